// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// Process is a command that runs in a namespace.
type Process struct {
	Cmd *exec.Cmd

	done chan struct{}
	err  error
}

// Start starts cmd inside the namespace. The lab waits for it: use Process.Wait, never cmd.Wait. Only the network is
// another one: files, mounts (bpffs too) and users are this process's own.
func (n *Namespace) Start(cmd *exec.Cmd) (*Process, error) {
	n.lab.mu.Lock()
	defer n.lab.mu.Unlock()
	if n.lab.dead {
		return nil, errors.New("start process: the lab is closed")
	}
	// A child inherits the namespace of the thread that forks it.
	if err := n.Do(cmd.Start); err != nil {
		return nil, fmt.Errorf("start %s in namespace %s: %w", cmd.Path, n, err)
	}
	p := &Process{Cmd: cmd, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		p.err = cmd.Wait()
	}()
	n.lab.procs = append(n.lab.procs, p)
	return p, nil
}

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Wait waits for the end and returns what exec.Cmd.Wait returned.
func (p *Process) Wait() error { <-p.done; return p.err }

// Signal sends a signal; it is nil when the process has ended already.
func (p *Process) Signal(s os.Signal) error {
	if err := p.Cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signal process: %w", err)
	}
	return nil
}

// Stop sends SIGTERM, after grace SIGKILL, and waits for the end.
func (p *Process) Stop(grace time.Duration) error {
	if err := p.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	t := time.NewTimer(grace)
	defer t.Stop()
	select {
	case <-p.done:
	case <-t.C:
		p.kill()
		<-p.done
		return fmt.Errorf("stop process: killed after %v", grace)
	}
	return nil
}

// kill errors only when the process has ended, which is what is wanted.
func (p *Process) kill() { _ = p.Cmd.Process.Kill() }
