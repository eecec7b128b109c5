// SPDX-License-Identifier: Apache-2.0

// Package app wires the daemon: it translates the configuration into each package's options, starts everything, and
// swaps what a reload can change. There is no other logic here.
package app

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shunt-lb/shunt/pkg/admin"
	"github.com/shunt-lb/shunt/pkg/config"
	"github.com/shunt-lb/shunt/pkg/datapath"
	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/health"
	"github.com/shunt-lb/shunt/pkg/metrics"
	"github.com/shunt-lb/shunt/pkg/policy"
	"github.com/shunt-lb/shunt/pkg/proxy"
	"github.com/shunt-lb/shunt/pkg/session"
	"github.com/shunt-lb/shunt/pkg/tokens"
)

const (
	// ShutdownGrace is how long open requests may take to end after the daemon was asked to stop.
	ShutdownGrace = 30 * time.Second
	// watchEvery is how often the configuration file's content is compared. Reading it through its path sees every
	// way of changing it: in place, by renaming another over it, by swapping a link as Kubernetes does.
	watchEvery = 2 * time.Second
)

// Options of Run.
type Options struct {
	Version    string
	ConfigPath string // shown, and watched for changes; "" = started by flags
	// Reload reads the configuration anew; nil = there is none to read.
	Reload func() (*config.Config, error)
	// ReloadRequests asks for a reload with each value (SIGHUP).
	ReloadRequests <-chan struct{}
	// Notify is told "READY=1", "RELOADING=1" and "STOPPING=1", for a service manager. nil = nobody.
	Notify func(state string)
	Stderr io.Writer // log and access log
}

// app is a running daemon.
type app struct {
	o       Options
	log     *slog.Logger
	started time.Time

	cfg     atomic.Pointer[config.Config]
	checks  atomic.Pointer[func(*fleet.Backend) health.Settings]
	needs   atomic.Pointer[map[string]policy.Needs]
	counter *tokens.Counter

	calibration *calibration

	registry   *prometheus.Registry
	fleet      *fleet.Fleet
	checker    *health.Checker
	tracker    *session.Tracker
	identifier *session.Identifier
	ingresses  *session.Ingresses
	kernel     *kernel // nil: nothing is steered
	noKernel   string  // why
	proxy      *proxy.Server
	admin      *admin.Server
	closeLog   func() error

	reloading   sync.Mutex
	policies    map[string]poolState
	reloadError atomic.Pointer[string]
	stopping    atomic.Bool
}

// Run serves until ctx ends, then stops accepting, lets open requests end for up to ShutdownGrace, and returns. What is
// steered goes on. It returns an error if it cannot start, or if a part of it fails.
func Run(ctx context.Context, cfg *config.Config, o Options) error {
	if o.Stderr == nil {
		o.Stderr = os.Stderr
	}
	if o.Notify == nil {
		o.Notify = func(string) {}
	}
	a, err := build(cfg, o)
	if err != nil {
		return err
	}
	defer a.close()
	return a.serve(ctx)
}

func build(cfg *config.Config, o Options) (_ *app, err error) {
	log, err := newLogger(cfg.Log, o.Stderr)
	if err != nil {
		return nil, err
	}
	a := &app{o: o, log: log, started: time.Now(), registry: metrics.NewRegistry(o.Version), calibration: newCalibration(),
		closeLog: func() error { return nil }}
	defer func() {
		if err != nil {
			a.close()
		}
	}()
	if err := cfg.Validate(Host()); err != nil {
		return nil, err
	}
	for _, w := range cfg.Warnings(Host()) {
		log.Warn("configuration", "warning", w.String())
	}
	if cfg.Steering.Mode == config.ModeOff {
		a.noKernel = "steering.mode is off"
		a.cleanKernel(cfg)
	} else if err := a.openKernel(cfg); err != nil {
		return nil, err
	}

	f := fleet.Options{}
	if a.kernel != nil {
		f.Table, f.Known = a.kernel.dp.Table(), a.kernel.dp.Known()
	}
	a.fleet = fleet.New(f)
	if err := a.apply(cfg); err != nil {
		return nil, err
	}
	encoding, models := cfg.Encodings()
	if a.counter, err = tokens.New(tokens.Options{Default: encoding, Models: models, MaxBytes: int(cfg.Tokens.MaxBytes)}); err != nil {
		return nil, fmt.Errorf("load token encodings: %w", err)
	}
	a.identifier = session.NewIdentifier(cfg.Session.Headers)
	a.tracker = session.NewTracker(session.TrackerOptions{Idle: cfg.Session.Idle})
	a.ingresses = session.NewIngresses(cfg.Steering.Ingress, nil)
	var pins *session.Pins
	if a.kernel != nil {
		a.kernel.bind(a.fleet, a.tracker, a.ingresses)
		pins = a.kernel.pins
		a.registry.MustRegister(a.kernel.dp.Collector())
	}
	a.registry.MustRegister(&collector{a}, &tokensCollector{a})
	a.checker = health.New(health.Options{Backends: a.fleet.Backends,
		Settings: func(b *fleet.Backend) health.Settings { return (*a.checks.Load())(b) }, OnChange: a.healthChanged})

	access, closeLog, err := openAccessLog(cfg.AccessLog, o.Stderr)
	if err != nil {
		return nil, err
	}
	a.closeLog = closeLog
	a.proxy, err = proxy.New(proxy.Options{
		Dynamic:     a.dynamic(cfg),
		Fleet:       a.fleet,
		Counter:     a.counter,
		Calibration: a.calibration,
		Tracker:     a.tracker,
		Pins:        pins,
		Needs:       func(pool string) policy.Needs { return (*a.needs.Load())[pool] },
		Metrics:     a.registry,
		AccessLog:   accessLog(access),
		Logger:      log,
		Ingress:     a.ingresses.Contains,
		Report:      a.report,
		PeerInfo:    a.peerInfo,
		OnProbe:     a.ingresses.Probed,
	})
	if err != nil {
		return nil, err
	}
	token, err := adminToken(cfg.Admin.TokenFile)
	if err != nil {
		return nil, err
	}
	a.admin = admin.New(admin.Options{Registry: a.registry, Version: o.Version, Token: token, Logger: log,
		Ready: a.ready, Status: a.status, Backends: a.backends, Sessions: a.sessions, Flows: a.flows,
		Config:   func() any { return a.cfg.Load().Effective() },
		SetAdmin: a.setAdmin, Unpin: a.unpin, Reload: a.reload})
	return a, nil
}

// openKernel opens the kernel path. Without it the daemon serves at L7 only, unless the configuration requires it.
func (a *app) openKernel(cfg *config.Config) error {
	k, err := openKernel(cfg, a.log)
	switch {
	case err == nil:
		a.kernel = k
		return nil
	case cfg.Steering.Require || errors.Is(err, datapath.ErrLocked):
		return fmt.Errorf("open the kernel path: %w", err)
	}
	a.noKernel = err.Error()
	a.log.Warn("nothing is steered in the kernel; every request is served at L7", "reason", err)
	return nil
}

// cleanKernel takes away what a daemon that steered has left: with mode off nothing may go on being steered. What the
// flags started says nothing of a steering that somebody else has configured.
func (a *app) cleanKernel(cfg *config.Config) {
	if a.o.ConfigPath == "" {
		return
	}
	err := datapath.Cleanup(cfg.Steering.BPFFS, cfg.Steering.Instance)
	if err != nil && !errors.Is(err, datapath.ErrUnavailable) && !errors.Is(err, datapath.ErrLocked) &&
		!errors.Is(err, os.ErrPermission) {
		a.log.Warn("a former daemon's kernel path may go on steering; run shunt cleanup", "error", err)
	}
}

func adminToken(file string) (string, error) {
	if file == "" {
		return "", nil
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return "", fmt.Errorf("read admin token: %w", err)
	}
	token := strings.TrimSpace(string(b))
	if token == "" {
		return "", fmt.Errorf("read admin token: %s is empty", file)
	}
	return token, nil
}

func (a *app) dynamic(cfg *config.Config) proxy.Dynamic {
	return proxy.Dynamic{
		Paths:      cfg.AllowedPaths(proxy.DefaultPaths),
		Identifier: a.identifier.WithHeaders(cfg.Session.Headers),
		Limits: proxy.Limits{MaxBody: int64(cfg.Limits.MaxBody), MaxHeader: int(cfg.Limits.MaxHeader),
			MaxConnections: cfg.Limits.MaxConnections},
		Timeouts: proxy.Timeouts{Connect: cfg.Timeouts.Connect, FirstByte: cfg.Timeouts.FirstByte, Idle: cfg.Timeouts.Idle,
			Header: cfg.Timeouts.HeaderRead, KeepAlive: cfg.Timeouts.ClientIdle},
		Retries: cfg.Retries.Max, RetryBudget: cfg.Retries.Budget,
	}
}

// apply gives the fleet the configuration's pools. On an error nothing has changed.
func (a *app) apply(cfg *config.Config) error {
	specs, policies, err := pools(cfg, a.policies)
	if err != nil {
		return err
	}
	before := a.fleet.Backends()
	if err := a.fleet.Apply(specs); err != nil {
		return err
	}
	a.policies = policies
	needs := map[string]policy.Needs{}
	for _, p := range cfg.Pools {
		spec, _ := policy.Lookup(p.Policy)
		needs[p.Name] = spec.Needs
	}
	a.needs.Store(&needs)
	checks := healthSettings(cfg)
	a.checks.Store(&checks)
	a.calibration.apply(cfg)
	a.cfg.Store(cfg)
	for _, b := range before {
		if b.Gone() {
			a.tracker.Forget(b.ID())
			if a.kernel != nil {
				a.kernel.forget(b)
			}
		}
	}
	return nil
}

// reload reads the configuration and puts it in force as a whole, or not at all.
func (a *app) reload() (err error) {
	a.reloading.Lock()
	defer a.reloading.Unlock()
	a.o.Notify("RELOADING=1")
	defer a.o.Notify("READY=1")
	defer func() {
		text := ""
		if err != nil {
			text = err.Error()
			a.log.Error("reload refused; the former configuration stays in force", "error", err)
		}
		a.reloadError.Store(&text)
	}()
	if a.o.Reload == nil {
		return errors.New("reload: started by flags, there is no file to read")
	}
	cfg, err := a.o.Reload()
	if err != nil {
		return fmt.Errorf("reload: %w", err)
	}
	if err := cfg.Validate(Host()); err != nil {
		return fmt.Errorf("reload: %w", err)
	}
	old := a.cfg.Load()
	if names := fixed(old, cfg); len(names) > 0 {
		return fmt.Errorf("reload: a change of %s takes a restart", strings.Join(names, ", "))
	}
	if err := a.proxy.Update(a.dynamic(cfg)); err != nil {
		return fmt.Errorf("reload: %w", err)
	}
	if err := a.apply(cfg); err != nil {
		_ = a.proxy.Update(a.dynamic(old)) // it was accepted before
		return fmt.Errorf("reload: %w", err)
	}
	if a.kernel != nil {
		a.kernel.poke()
	}
	a.log.Info("configuration reloaded", "pools", len(cfg.Pools), "backends", len(a.fleet.Backends()))
	return nil
}

func (a *app) healthChanged(b *fleet.Backend, from, to fleet.Health, detail string) {
	a.log.Info("backend changed", "backend", b.Name(), "pool", b.Pool(), "from", from.String(), "to", to.String(), "detail", detail)
	if a.kernel != nil {
		a.kernel.poke()
	}
}

// report enters what a request met at a backend in its health. A 5xx says nothing of whether the backend lives.
func (a *app) report(b *fleet.Backend, o proxy.Outcome) {
	switch o {
	case proxy.OutcomeOK:
		a.checker.Report(b, health.Answered)
	case proxy.OutcomeBusy:
		a.checker.Report(b, health.Busy)
	case proxy.OutcomeTimeout:
		a.checker.Report(b, health.Hung)
	case proxy.OutcomeConnectFailed:
		a.checker.Report(b, health.ConnectFailed)
	case proxy.OutcomeUpstreamError:
		a.checker.Report(b, health.ServerError)
	}
}

// ready is nil when some backend can serve.
func (a *app) ready() error {
	if a.stopping.Load() {
		return errors.New("stopping")
	}
	for _, b := range a.fleet.Backends() {
		if b.Eligible() {
			return nil
		}
	}
	return errors.New("no backend is up")
}

// peerInfo is what this shunt tells those that mean to steer to it.
func (a *app) peerInfo() []byte {
	info := health.PeerInfo{Product: "shunt", ABI: datapath.ABI, Version: a.o.Version}
	for _, b := range a.fleet.Backends() {
		if b.Local() && b.Eligible() && !a.stopping.Load() {
			info.Ready = true
		}
	}
	body, err := json.Marshal(info)
	if err != nil {
		return nil
	}
	return body
}

func (a *app) serve(ctx context.Context) error {
	cfg := a.cfg.Load()
	front, err := listen(ctx, cfg.Listen)
	if err != nil {
		return err
	}
	listeners := []net.Listener{}
	closeAll := func() {
		_ = front.Close()
		for _, l := range listeners {
			_ = l.Close()
		}
	}
	if cfg.Admin.Listen.IsValid() {
		l, err := listen(ctx, cfg.Admin.Listen)
		if err != nil {
			closeAll()
			return err
		}
		listeners = append(listeners, l)
	}
	if cfg.Admin.Socket != "" {
		l, err := admin.ListenUnix(cfg.Admin.Socket)
		if err != nil {
			closeAll()
			return err
		}
		listeners = append(listeners, l)
	}

	// The parts outlive ctx until the last request has ended.
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	failed := make(chan error, 8)
	var wg sync.WaitGroup
	part := func(f func() error) {
		wg.Go(func() {
			if err := f(); err != nil {
				failed <- err
			}
		})
	}
	for _, l := range listeners {
		part(func() error { return a.admin.Serve(l) })
	}
	a.checker.CheckAll(run)
	if a.kernel != nil {
		if a.kernel.peers != nil {
			a.kernel.peers.CheckAll(run)
		}
		if err := a.attach(cfg); err != nil {
			closeAll()
			stop()
			_ = a.admin.Shutdown(context.Background())
			wg.Wait()
			return err
		}
	}
	part(func() error { return a.checker.Run(run) })
	if a.kernel != nil {
		part(func() error { return a.kernel.run(run) })
	}
	part(func() error { return a.watchConfig(run) })
	part(func() error { return a.proxy.Serve(front) })

	a.log.Info("serving", "listen", front.Addr().String(), "backends", len(a.fleet.Backends()), "kernel_path", a.kernel != nil, "version", a.o.Version)
	a.o.Notify("READY=1")
	select {
	case <-ctx.Done():
		err = nil
	case err = <-failed:
	}
	a.stopping.Store(true)
	a.o.Notify("STOPPING=1")
	a.log.Info("stopping", "open_connections", a.proxy.Connections(), "grace", ShutdownGrace.String())
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), ShutdownGrace)
	defer cancel()
	if e := a.proxy.Shutdown(grace); e != nil && err == nil && grace.Err() == nil {
		err = e
	}
	end, cancelEnd := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancelEnd()
	_ = a.admin.Shutdown(end)
	stop()
	wg.Wait()
	return err
}

// attach makes the kernel path live.
func (a *app) attach(cfg *config.Config) error {
	err := a.kernel.attach()
	if err == nil {
		return nil
	}
	if cfg.Steering.Require {
		return fmt.Errorf("attach the kernel path: %w", err)
	}
	a.kernel.mu.Lock()
	a.kernel.problem = err.Error()
	a.kernel.mu.Unlock()
	a.log.Warn("nothing is steered in the kernel; every request is served at L7", "reason", err)
	return nil
}

func listen(ctx context.Context, addr netip.AddrPort) (net.Listener, error) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(false) // the kernel would see a subflow's SYN as a connection of its own
	l, err := lc.Listen(ctx, "tcp", addr.String())
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", addr, err)
	}
	return l, nil
}

// watchConfig reloads when asked to and when the file's content has changed.
func (a *app) watchConfig(ctx context.Context) error {
	var tick <-chan time.Time
	if a.o.ConfigPath != "" {
		t := time.NewTicker(watchEvery)
		defer t.Stop()
		tick = t.C
	}
	last, _ := contentHash(a.o.ConfigPath)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-a.o.ReloadRequests:
			last, _ = contentHash(a.o.ConfigPath)
		case <-tick:
			now, err := contentHash(a.o.ConfigPath)
			if err != nil || now == last {
				continue // a file that is being replaced is there again at the next look
			}
			last = now
		}
		_ = a.reload() // it has logged the error, and status shows it
	}
}

func contentHash(path string) ([sha256.Size]byte, error) {
	b, err := os.ReadFile(path)
	return sha256.Sum256(b), err
}

// close releases what build opened. What is steered goes on.
func (a *app) close() {
	if a.proxy != nil {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = a.proxy.Shutdown(ctx) // the first one has reported
	}
	if a.kernel != nil {
		if err := a.kernel.dp.Close(); err != nil {
			a.log.Warn("close the kernel path", "error", err)
		}
	}
	_ = a.closeLog()
}
