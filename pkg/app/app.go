// SPDX-License-Identifier: Apache-2.0

// Package app wires the daemon: it translates the configuration into each package's options, starts everything, and
// swaps what a reload can change. There is no other logic here.
package app

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
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
	"github.com/shunt-lb/shunt/pkg/request"
	"github.com/shunt-lb/shunt/pkg/session"
	"github.com/shunt-lb/shunt/pkg/tokens"
)

const (
	// watchEvery is how often the configuration file's content is compared. Reading it through its path sees every
	// way of changing it: in place, by renaming another over it, by swapping a link as Kubernetes does.
	watchEvery = 2 * time.Second
	// lockWait is how long to wait for another daemon to let go of the instance.
	lockWait = 3 * time.Second
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
	families    atomic.Pointer[map[string]request.Family]

	registry   *prometheus.Registry
	routing    *routing
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

	certificate *proxy.Certificate // nil: no TLS
	secrets     atomic.Pointer[secrets]
	models      *health.Models

	front     net.Listener
	operators []net.Listener
	loaded    [sha256.Size]byte // hash of the file that the configuration came from

	reloading   sync.Mutex
	policies    map[string]poolState
	reloadError atomic.Pointer[string]
	serving     atomic.Bool
	stopping    atomic.Bool
}

// Run serves until ctx ends, then stops accepting, lets open requests end for up to timeouts.stop_grace, and returns. What
// is steered goes on. It returns an error if it cannot start, or if a part of it fails.
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
	a.loaded, _ = contentHash(o.ConfigPath)
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
	encoding, models := cfg.Encodings()
	if a.counter, err = tokens.New(tokens.Options{Default: encoding, Models: models, Files: cfg.TokenizerFiles(), MaxBytes: int(cfg.Tokens.MaxBytes), LargeBytes: largePrompt}); err != nil {
		return nil, fmt.Errorf("load token encodings: %w", err)
	}
	known, err := readSecrets(cfg)
	if err != nil {
		return nil, err
	}
	a.secrets.Store(known)
	var listenTLS *tls.Config
	if t := cfg.TLS; t.Certificate != "" {
		if a.certificate, err = proxy.LoadCertificate(t.Certificate, t.Key); err != nil {
			return nil, err
		}
		listenTLS = a.certificate.Listener()
	}
	// Before the kernel path changes hands: what it leaves to this daemon waits in the listener's queue.
	if err := a.listen(cfg); err != nil {
		return nil, err
	}
	if cfg.Steering.Mode == config.ModeOff {
		a.noKernel = "steering.mode is off"
		a.cleanKernel(cfg)
	} else if err := a.openKernel(cfg); err != nil {
		return nil, err
	}

	a.routing = newRouting(a)
	f := fleet.Options{Index: a.routing.index}
	if a.kernel != nil {
		f.Table, f.Known = a.kernel.dp.Table(), a.kernel.dp.Known()
	}
	a.fleet = fleet.New(f)
	a.identifier = session.NewIdentifier(cfg.Session.Headers)
	a.tracker = session.NewTracker(session.TrackerOptions{Idle: cfg.Session.Idle})
	a.ingresses = session.NewIngresses(ingresses(cfg), nil)
	if err := a.apply(cfg, nil); err != nil {
		return nil, err
	}
	var pins *session.Pins
	if a.kernel != nil {
		a.kernel.bind(a.fleet, a.tracker, a.ingresses, a.certificate)
		pins = a.kernel.pins
		a.registry.MustRegister(a.kernel.dp.Collector())
	}
	a.routing.watch()
	a.registry.MustRegister(&collector{a}, &tokensCollector{a}, a.routing)
	a.checker = health.New(health.Options{Backends: a.fleet.Backends,
		Settings: func(b *fleet.Backend) health.Settings { return (*a.checks.Load())(b) }, OnChange: a.healthChanged, OnEject: a.ejected})
	a.models = health.NewModels(health.ModelsOptions{Backends: a.fleet.Backends, Set: a.fleet.SetModels,
		Key: func(b *fleet.Backend) string { return a.secrets.Load().backends[b.Pool()] }})

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
		Family:      a.family,
		Tracker:     a.tracker,
		Index:       a.routing.index,
		Pins:        pins,
		Needs:       func(pool string) policy.Needs { return (*a.needs.Load())[pool] },
		ListenTLS:   listenTLS,
		Metrics:     a.registry,
		AccessLog:   accessLog(access),
		Logger:      log,
		Ingress:     a.ingresses.Contains,
		Report:      a.report,
		PeerInfo:    a.peerInfo,
		OnProbe:     a.probed,
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
	for end := time.Now().Add(lockWait); errors.Is(err, datapath.ErrLocked) && time.Now().Before(end); {
		time.Sleep(lockWait / 20) // a daemon that was killed a moment ago is still being torn down
		k, err = openKernel(cfg, a.log)
	}
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

func (a *app) healthChanged(b *fleet.Backend, from, to fleet.Health, detail string) {
	a.log.Info("backend changed", "backend", b.Name(), "pool", b.Pool(), "from", from.String(), "to", to.String(), "detail", detail)
	if to == fleet.HealthDown {
		a.routing.forget(b)
	}
	if a.kernel != nil {
		a.kernel.poke()
	}
}

func (a *app) ejected(b *fleet.Backend, out bool, detail string) {
	if out {
		a.log.Warn("backend ejected", "backend", b.Name(), "pool", b.Pool(), "detail", detail)
	} else {
		a.log.Info("backend restored", "backend", b.Name(), "pool", b.Pool(), "detail", detail)
	}
	if a.kernel != nil {
		a.kernel.poke()
	}
}

// report enters what a request met at a backend in its health.
func (a *app) report(t *fleet.Ticket, o proxy.Outcome) {
	var met health.Outcome
	switch o {
	case proxy.OutcomeOK:
		met = health.Answered
	case proxy.OutcomeBusy:
		met = health.Busy
	case proxy.OutcomeTimeout:
		met = health.Hung
	case proxy.OutcomeConnectFailed:
		met = health.ConnectFailed
	case proxy.OutcomeUpstreamError:
		met = health.ServerError
	default:
		return
	}
	if t.Probe() {
		a.checker.ReportProbe(t.Backend(), met)
	} else {
		a.checker.Report(t.Backend(), met)
	}
}

// ready is nil when some backend can serve.
func (a *app) ready() error {
	switch {
	case !a.serving.Load():
		return errors.New("starting")
	case a.stopping.Load():
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
	info := health.PeerInfo{Product: "shunt", ABI: datapath.ABI}
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

// probed notes an ingress. What it steered here before it was known may have been taken for a client's.
func (a *app) probed(addr netip.Addr) {
	if !a.ingresses.Probed(addr) || a.kernel == nil {
		return
	}
	if err := a.kernel.pins.Unpin(addr, a.kernel.vips...); err != nil {
		a.log.Warn("unpin the address of another shunt", "address", addr, "error", err)
	}
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
		if a.kernel.fresh && !a.kernel.attached.Load() { // nothing was ever steered with these maps
			if err := datapath.Cleanup(a.kernel.cfg.BPFFS, a.kernel.cfg.Instance); err != nil {
				a.log.Warn("remove the maps of a kernel path that never was; run shunt cleanup", "error", err)
			}
		}
	}
	for _, l := range append(a.operators, a.front) {
		if l != nil {
			_ = l.Close()
		}
	}
	_ = a.closeLog()
}
