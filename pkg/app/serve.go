// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/pkg/admin"
	"github.com/shunt-lb/shunt/pkg/config"
)

// listen opens all listeners. Clients that connect before anything is served wait in the queue.
func (a *app) listen(cfg *config.Config) (err error) {
	if a.front, err = listen(cfg.Listen); err != nil {
		return err
	}
	if cfg.Admin.Listen.IsValid() {
		l, err := listen(cfg.Admin.Listen)
		if err != nil {
			return err
		}
		a.operators = append(a.operators, l)
	}
	if cfg.Admin.Socket != "" {
		l, err := admin.ListenUnix(cfg.Admin.Socket)
		if err != nil {
			return err
		}
		a.operators = append(a.operators, l)
	}
	return nil
}

func listen(addr netip.AddrPort) (net.Listener, error) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(false) // the kernel would see a subflow's SYN as a connection of its own
	l, err := lc.Listen(context.Background(), "tcp", addr.String())
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", addr, err)
	}
	return l, nil
}

// parts are the daemon's goroutines: they end when their context does, or report why they cannot go on.
type parts struct {
	wg     sync.WaitGroup
	failed chan error
}

func (p *parts) start(f func() error) {
	p.wg.Go(func() {
		if err := f(); err != nil {
			select {
			case p.failed <- err:
			default: // one is enough to stop for
			}
		}
	})
}

func (a *app) serve(ctx context.Context) error {
	cfg := a.cfg.Load()
	// The parts outlive ctx until the last request has ended.
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	p := &parts{failed: make(chan error, 1)}
	defer p.wg.Wait()
	defer stop()

	for _, l := range a.operators {
		p.start(func() error { return a.admin.Serve(l) })
	}
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = a.admin.Shutdown(end)
	}()
	a.checker.CheckAll(run)
	if a.kernel != nil {
		if a.kernel.peers != nil {
			a.kernel.peers.CheckAll(run)
		}
		if err := a.kernel.attach(); err != nil {
			if cfg.Steering.Require {
				return fmt.Errorf("attach the kernel path: %w", err)
			}
			a.log.Warn("nothing is steered in the kernel until the program can be attached; every request is served at L7", "reason", err)
		}
		p.start(func() error { return a.kernel.run(run) })
	}
	p.start(func() error { return a.checker.Run(run) })
	p.start(func() error { return a.routing.run(run) })
	p.start(func() error { return a.models.Run(run) })
	p.start(func() error { return a.watchConfig(run) })
	p.start(func() error { return a.watchSecrets(run) })
	if a.certificate != nil {
		p.start(func() error { return a.watchCertificate(run) })
	}
	p.start(func() error { return a.proxy.Serve(a.front) })

	a.serving.Store(true)
	a.log.Info("serving", "listen", a.front.Addr().String(), "backends", len(a.fleet.Backends()), "kernel_path", a.kernel != nil && a.kernel.attached.Load(), "version", a.o.Version)
	a.o.Notify("READY=1")
	var err error
	select {
	case <-ctx.Done():
	case err = <-p.failed:
	}
	if e := a.stop(context.WithoutCancel(ctx)); err == nil {
		err = e
	}
	return err
}

// stop ends the front end: it says that it is not ready, and that clients should connect elsewhere; it waits until that
// has spread; it tells the kernel to leave it nothing more; then it closes the listener and lets open requests end.
func (a *app) stop(ctx context.Context) error {
	t := a.cfg.Load().Timeouts
	a.stopping.Store(true)
	a.o.Notify("STOPPING=1")
	a.log.Info("stopping", "open_connections", a.proxy.Connections(), "delay", t.StopDelay.String(), "grace", t.StopGrace.String())
	a.proxy.Drain()
	if t.StopDelay > 0 {
		time.Sleep(t.StopDelay)
	}
	if a.kernel != nil {
		a.kernel.dp.Silence()
	}
	grace, cancel := context.WithTimeout(ctx, t.StopGrace)
	defer cancel()
	if err := a.proxy.Shutdown(grace); err != nil && grace.Err() == nil {
		return err
	}
	return nil
}
