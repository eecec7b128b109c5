// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shunt-lb/shunt/pkg/config"
	"github.com/shunt-lb/shunt/pkg/datapath"
	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/health"
	"github.com/shunt-lb/shunt/pkg/netdev"
	"github.com/shunt-lb/shunt/pkg/proxy"
	"github.com/shunt-lb/shunt/pkg/session"
)

const (
	// limitEvery is how often the kernel's bounds follow the load.
	limitEvery = 100 * time.Millisecond
	// syncEvery is how often the kernel's view is written, and attaching is tried, when nothing asks for it.
	syncEvery = 2 * time.Second
	// limitSlack is what an idle backend may carry above its share, in tokens.
	limitSlack = 4096
	// An address may have flowsPerSession open flows for each of its sessions, and flowsSlack more: SDKs open two
	// connections for one conversation.
	flowsPerSession = 2
	flowsSlack      = 2
	// What a steered request has left to decode when its answer begins, as a share of its tokens; the bytes on the wire
	// for each streamed token (a chunk of server-sent events in a packet of its own); how long a silence says that the
	// answer is over.
	outputShare = 0.25
	answerBytes = 300
	answerIdle  = 3 * time.Second
	// New flows a second: far above what clients do, and so low that a flood cannot fill the tables within the three
	// seconds that a half-open flow lives.
	clientRate, clientBurst = 1000, 2000
	vipRate, vipBurst       = 20_000, 20_000
)

// kernel keeps the kernel's view of the fleet: which backends may be steered to, and how much they may carry. It is
// nil where nothing is steered.
type kernel struct {
	cfg   config.Steering
	dp    *datapath.Datapath
	fresh bool // no former daemon has used the maps
	vips  []netip.AddrPort
	peers *health.Peers // nil with target engine
	log   *slog.Logger

	fleet *fleet.Fleet
	pins  *session.Pins
	wake  chan struct{}

	mu       sync.Mutex // sync
	problem  string
	locals   atomic.Pointer[map[fleet.ID]bool] // backends on this host, as of the last sync
	own      atomic.Pointer[netdev.AddrSet]    // packets from them meet no program
	attached atomic.Bool
}

// kernelOptions are the datapath's options of a configuration.
func kernelOptions(cfg *config.Config) datapath.Options {
	s := cfg.Steering
	settings := datapath.Settings{
		NATPorts:   netdev.PortRange{First: s.NATPorts.First, Last: s.NATPorts.Last},
		Lease:      datapath.Lease{Idle: s.Lease.Idle, Sample: uint32(s.Lease.Sample), FlowsPerSession: flowsPerSession, FlowsSlack: flowsSlack},
		Charge:     datapath.Charge{OutputShare: outputShare, AnswerBytes: answerBytes, Idle: answerIdle},
		ClientRate: datapath.Rate{PerSecond: clientRate, Burst: clientBurst},
		VIPRate:    datapath.Rate{PerSecond: vipRate, Burst: vipBurst},
		DrainLimit: s.DrainLimit,
	}
	for _, a := range s.VIP {
		settings.VIPs = append(settings.VIPs, datapath.VIP{
			Addr: netip.AddrPortFrom(a, cfg.Listen.Port()), SNAT: s.SNATFor(a), DSR: s.Mode == config.ModeDSR,
		})
	}
	return datapath.Options{Instance: s.Instance, BPFFS: s.BPFFS, Interfaces: s.Interfaces, Attach: s.Attach, Settings: settings}
}

// openKernel loads or takes over the maps and the program. The error is datapath.ErrUnavailable and says what is
// missing where the machine or the privileges do not allow it.
func openKernel(cfg *config.Config, log *slog.Logger) (*kernel, error) {
	k := &kernel{cfg: cfg.Steering, log: log, wake: make(chan struct{}, 1)}
	o := kernelOptions(cfg)
	for _, v := range o.VIPs {
		k.vips = append(k.vips, v.Addr)
	}
	dp, err := datapath.Open(o)
	if err != nil {
		return nil, err
	}
	k.dp, k.fresh = dp, len(dp.Known()) == 0
	return k, nil
}

// bind connects the kernel path with the fleet, once there is one.
func (k *kernel) bind(f *fleet.Fleet, homes *session.Tracker, ingresses *session.Ingresses, certificate *proxy.Certificate) {
	k.fleet = f
	k.locals.Store(&map[fleet.ID]bool{})
	k.own.Store(&netdev.AddrSet{})
	if k.cfg.Target == config.TargetPeer {
		var peerTLS *tls.Config
		if certificate != nil {
			peerTLS = certificate.Peer()
		}
		k.peers = health.NewPeers(health.PeersOptions{
			Backends: f.Backends,
			Source: func(target netip.Addr) netip.Addr {
				for _, v := range k.vips {
					if v.Addr().Is4() == target.Is4() {
						return k.cfg.SNATFor(v.Addr())
					}
				}
				return netip.Addr{}
			},
			ABI: datapath.ABI,
			TLS: peerTLS,
			OnChange: func(b *fleet.Backend, ready bool, detail string) {
				k.log.Info("peer changed", "backend", b.Name(), "steer", b.Steer(), "ready", ready, "detail", detail)
				k.poke()
			},
		})
	}
	k.pins = session.NewPins(session.PinsOptions{
		Table:     k.dp.PinTable(),
		Lease:     session.Lease{Idle: k.cfg.Lease.Idle, Max: k.cfg.Lease.Max, Connections: uint32(k.cfg.Lease.Connections)},
		Steerable: k.steerable,
		IsVIP:     k.isVIP,
		Skip:      func(a netip.Addr) bool { return ingresses.Contains(a) || k.own.Load().Has(a) },
		Home:      homes.Home,
		Handoff:   k.cfg.Handoff == config.HandoffClose,
	})
}

func (k *kernel) isVIP(local netip.AddrPort) bool {
	local = netip.AddrPortFrom(local.Addr().Unmap(), local.Port())
	for _, v := range k.vips {
		if v == local {
			return true
		}
	}
	return false
}

// reachable reports whether what answers at the backend's steered address is what the target asks for.
func (k *kernel) reachable(b *fleet.Backend) bool {
	return b.Steer().IsValid() && (k.peers == nil || k.peers.Ready(b))
}

// steerable reports whether a session of the backend may be pinned. A backend of this host is served by the local L7.
func (k *kernel) steerable(b *fleet.Backend) bool {
	return k.attached.Load() && b.Eligible() && k.reachable(b) && !(*k.locals.Load())[b.ID()]
}

// poke makes Run write the kernel's view soon.
func (k *kernel) poke() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// sync writes the state of every backend to the kernel.
func (k *kernel) sync() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if own, err := netdev.LocalSet(); err == nil {
		k.own.Store(&own)
	}
	own := k.own.Load()
	var records []datapath.BackendRecord
	locals := map[fleet.ID]bool{}
	for _, b := range k.fleet.Backends() {
		state := b.Health()
		if state == fleet.HealthUp && !k.reachable(b) {
			state = fleet.HealthDown
		}
		if _, out := b.Ejected(); out && state == fleet.HealthUp && !b.Eligible() {
			state = fleet.HealthUnknown // no new connections; the open ones have no dead host to be told of
		}
		if b.Steer().IsValid() {
			locals[b.ID()] = own.Has(b.Steer().Addr())
		}
		records = append(records, datapath.BackendRecord{ID: b.ID(), Name: b.Name(), Steer: b.Steer(), State: state,
			Generation: b.Generation(), Local: locals[b.ID()]})
	}
	k.locals.Store(&locals)
	if err := k.dp.SetBackends(records); err != nil {
		k.problem = err.Error()
		return fmt.Errorf("write backends to the kernel: %w", err)
	}
	k.problem = ""
	return nil
}

// attach puts the program on the interfaces; before it the kernel's view must be written.
func (k *kernel) attach() error {
	k.limits()
	if err := k.sync(); err != nil {
		return err
	}
	if err := k.dp.Attach(); err != nil {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.problem = err.Error()
		return err
	}
	k.attached.Store(true)
	return nil
}

func (k *kernel) limits() { k.fleet.UpdateLimits(k.cfg.Bound, limitSlack) }

// forget drops the pins of a backend that a reload took away.
func (k *kernel) forget(b *fleet.Backend) {
	if err := k.pins.Forget(b); err != nil {
		k.log.Warn("pins of a removed backend are left; the kernel ignores them", "backend", b.Name(), "error", err)
	}
}

// run keeps the kernel's view fresh until ctx ends.
func (k *kernel) run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	if k.peers != nil {
		wg.Go(func() { k.peers.Run(ctx) })
	}
	wg.Go(func() { k.follow(ctx) })
	if err := k.dp.Run(ctx); err != nil && !errors.Is(err, context.Canceled) {
		return fmt.Errorf("run the kernel path: %w", err)
	}
	return nil
}

func (k *kernel) follow(ctx context.Context) {
	tick, slow := time.NewTicker(limitEvery), time.NewTicker(syncEvery)
	defer tick.Stop()
	defer slow.Stop()
	failing := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			k.limits()
			continue
		case <-slow.C:
		case <-k.wake:
		}
		if !k.attached.Load() {
			if err := k.attach(); err != nil {
				continue // status says why
			}
			k.log.Info("the program is attached: sessions are steered in the kernel")
			continue // the view was written for it
		}
		err := k.sync()
		if err != nil && !failing {
			k.log.Error("the kernel's view of the backends is old", "error", err)
		}
		failing = err != nil
	}
}
