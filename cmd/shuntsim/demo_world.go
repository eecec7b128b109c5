// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/pkg/admin"
	"github.com/shunt-lb/shunt/pkg/netdev/lab"
)

const (
	demoEngines = 3
	demoModel   = "llama-3-8b"
	stopGrace   = 10 * time.Second
)

// dialer opens a connection from one place of the world.
type dialer func(ctx context.Context, network, address string) (net.Conn, error)

// process is a running program, in a namespace or not.
type process interface {
	Done() <-chan struct{}
	Stop(grace time.Duration) error
}

// world is where the demo happens: a lab of namespaces, or the loopback interface.
type world struct {
	shunt, self string
	dir         string
	lab         *lab.Lab // nil on loopback
	bed         *lab.Testbed
	bpffs       string

	engines []engineAddr
	vip     netip.AddrPort
	clients [2]dialer // the conversation's and the background's
	client  netip.Addr
	admin   admin.Client

	procs []started // in order of their start
	logs  []string
}

type engineAddr struct {
	name string
	addr netip.AddrPort
	dial dialer
}

type started struct {
	process
	name string
}

func newWorld(shunt string, steer, named bool) (_ *world, err error) {
	w := &world{shunt: shunt}
	if w.self, err = os.Executable(); err != nil {
		return nil, fmt.Errorf("find own binary: %w", err)
	}
	if w.dir, err = os.MkdirTemp("", "shunt-demo-"); err != nil {
		return nil, fmt.Errorf("make directory: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	w.admin = admin.Client{Addr: w.path("admin.sock")}
	if steer {
		return w, w.buildLab(named)
	}
	return w, w.buildLoopback()
}

func (w *world) path(name string) string { return filepath.Join(w.dir, name) }

func (w *world) buildLab(named bool) error {
	name := ""
	if named {
		name = "shunt-demo-" + strconv.Itoa(os.Getpid())
	}
	w.lab = lab.New()
	var err error
	if w.bed, err = w.lab.Steering(lab.SteeringOptions{Name: name, Clients: 2, Engines: demoEngines}); err != nil {
		return err
	}
	bpffs := w.path("bpf")
	if err := os.Mkdir(bpffs, 0o700); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	if err := mountBPF(bpffs); err != nil {
		return err
	}
	w.bpffs = bpffs
	for i, e := range w.bed.Engines {
		w.engines = append(w.engines, engineAddr{engineName(i), netip.AddrPortFrom(e.V4, 8000), e.Dial})
	}
	w.vip = netip.AddrPortFrom(w.bed.Balancer.V4, 8080)
	w.clients = [2]dialer{w.bed.Clients[0].Dial, w.bed.Clients[1].Dial}
	w.client = w.bed.Clients[0].V4
	return nil
}

func (w *world) buildLoopback() error {
	// The ports are free at this moment; the processes take them within the next second.
	local := netip.MustParseAddr("127.0.0.1")
	var ports []netip.AddrPort
	var open []net.Listener
	for range demoEngines + 1 {
		ln, err := net.Listen("tcp", netip.AddrPortFrom(local, 0).String())
		if err != nil {
			return fmt.Errorf("find a free port: %w", err)
		}
		open = append(open, ln)
		ports = append(ports, ln.Addr().(*net.TCPAddr).AddrPort())
	}
	for _, ln := range open {
		if err := ln.Close(); err != nil {
			return fmt.Errorf("find a free port: %w", err)
		}
	}
	dial := new(net.Dialer).DialContext
	for i := range demoEngines {
		w.engines = append(w.engines, engineAddr{engineName(i), ports[i], dial})
	}
	w.vip, w.client = ports[demoEngines], local
	w.clients = [2]dialer{dial, dial}
	return nil
}

func engineName(i int) string { return "engine-" + strconv.Itoa(i+1) }

// config is the daemon's configuration file.
func (w *world) config() string {
	var b strings.Builder
	fmt.Fprintf(&b, "listen: %s\nadmin: {socket: %s}\naccess_log: %s\n", w.vip, w.path("admin.sock"), w.path("access.log"))
	fmt.Fprintf(&b, "pools:\n  - name: llama\n    models: [%s]\n    policy: session\n    health: {interval: 500ms}\n    backends:\n", demoModel)
	for _, e := range w.engines {
		fmt.Fprintf(&b, "      - {name: %s, url: 'http://%s'}\n", e.name, e.addr)
	}
	if w.lab != nil {
		// Everything else is as it comes: the first connections of a pinned address are spared from sampling, so that
		// the demo's are steered.
		fmt.Fprintf(&b, "steering:\n  mode: nat\n  target: engine\n  interfaces: [%s]\n  vip: %s\n  bpffs: %s\n  attach: xdp\n  require: true\n",
			w.bed.Balancer.Iface, w.vip.Addr(), w.bpffs)
	}
	return b.String()
}

// start runs the engines and the daemon, and waits until they serve.
func (w *world) start(ctx context.Context) error {
	for i, e := range w.engines {
		var ns *lab.Namespace
		if w.lab != nil {
			ns = w.bed.Engines[i].Namespace
		}
		if err := w.launch(ns, e.name, w.self, "engine", "--listen", e.addr.String(), "--name", e.name, "--model", demoModel); err != nil {
			return err
		}
	}
	for _, e := range w.engines {
		if err := poll(ctx, 30*time.Second, e.name+" answers", func() bool { return w.engineGet(ctx, e, "/health", nil) == nil }); err != nil {
			return err
		}
	}
	file := w.path("shunt.yaml")
	if err := os.WriteFile(file, []byte(w.config()), 0o600); err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	var ns *lab.Namespace
	if w.lab != nil {
		ns = w.bed.Balancer.Namespace
	}
	if err := w.launch(ns, "shunt", w.shunt, "serve", "--config", file); err != nil {
		return err
	}
	daemon := w.procs[len(w.procs)-1]
	err := poll(ctx, 30*time.Second, "shunt is ready", func() bool {
		select {
		case <-daemon.Done():
			return true
		default:
			return w.adminGet(ctx, "/readyz", nil) == nil
		}
	})
	select {
	case <-daemon.Done():
		return errors.New("shunt ended before it was ready")
	default:
		return err
	}
}

func (w *world) launch(ns *lab.Namespace, name, path string, args ...string) error {
	file, err := os.OpenFile(w.path(name+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open log: %w", err)
	}
	defer func() { _ = file.Close() }() // the child has its own
	w.logs = append(w.logs, file.Name())
	cmd := exec.Command(path, args...)
	cmd.Stdout, cmd.Stderr = file, file
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for the demo, which stops the others in order
	var p process
	if ns != nil {
		p, err = ns.Start(cmd)
	} else {
		p, err = startLocal(cmd)
	}
	if err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	w.procs = append(w.procs, started{p, name})
	return nil
}

// close stops what runs, the newest first, and removes what was made.
func (w *world) close() error {
	var errs []error
	for i := len(w.procs) - 1; i >= 0; i-- {
		if err := w.procs[i].Stop(stopGrace); err != nil {
			errs = append(errs, fmt.Errorf("stop %s: %w", w.procs[i].name, err))
		}
	}
	w.procs = nil
	if w.lab != nil {
		errs = append(errs, w.lab.Close())
	}
	if w.bpffs != "" {
		errs = append(errs, unmountBPF(w.bpffs))
	}
	if err := os.RemoveAll(w.dir); err != nil {
		errs = append(errs, fmt.Errorf("remove %s: %w", w.dir, err))
	}
	return errors.Join(errs...)
}

// showLogs prints the ends of the processes' output, for when something went wrong.
func (w *world) showLogs(out io.Writer) {
	for _, file := range w.logs {
		b, err := os.ReadFile(file)
		if err != nil || len(b) == 0 {
			continue
		}
		fmt.Fprintf(out, "\n--- %s\n%s", filepath.Base(file), b[max(0, len(b)-3000):])
	}
}

func (w *world) engineGet(ctx context.Context, e engineAddr, path string, into any) error {
	tr := &http.Transport{DialContext: e.dial}
	defer tr.CloseIdleConnections()
	return get(ctx, &http.Client{Transport: tr, Timeout: 5 * time.Second}, "http://"+e.addr.String()+path, into)
}

// adminGet asks the operator's listener for what is not part of its API: readiness and metrics.
func (w *world) adminGet(ctx context.Context, path string, into any) error {
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", w.admin.Addr)
	}}
	defer tr.CloseIdleConnections()
	return get(ctx, &http.Client{Transport: tr, Timeout: 5 * time.Second}, "http://localhost"+path, into)
}

// get decodes JSON, or copies the text when into is a *bytes.Buffer.
func get(ctx context.Context, c *http.Client, url string, into any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("get %s: status %d", req.URL.Path, resp.StatusCode)
	}
	switch into := into.(type) {
	case nil:
		_, err = io.Copy(io.Discard, resp.Body)
	case *bytes.Buffer:
		_, err = into.ReadFrom(resp.Body)
	default:
		err = json.NewDecoder(resp.Body).Decode(into)
	}
	if err != nil {
		return fmt.Errorf("get %s: %w", req.URL.Path, err)
	}
	return nil
}

// localProcess is a program outside any lab.
type localProcess struct {
	cmd  *exec.Cmd
	done chan struct{}
}

func startLocal(cmd *exec.Cmd) (*localProcess, error) {
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &localProcess{cmd: cmd, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		_ = cmd.Wait() // how it ended is in its log
	}()
	return p, nil
}

func (p *localProcess) Done() <-chan struct{} { return p.done }

func (p *localProcess) Stop(grace time.Duration) error {
	kill := sync.OnceFunc(func() { _ = p.cmd.Process.Kill() }) // fails only when it has ended
	t := time.AfterFunc(grace, kill)
	defer t.Stop()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-p.done
	return nil
}
