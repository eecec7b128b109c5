// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/netdev"
)

const (
	deadEvery  = 250 * time.Millisecond
	deadSilent = 500 * time.Millisecond // without a sign of life from a backend that is down, after it was asked for one
	deadSample = 64                     // connections on which a backend is asked
	deadAfter  = 10 * time.Second       // the sweep has deleted ended flows by then
	probeEvery = 600 * time.Millisecond // a host answers a stale segment only twice a second
)

// watch is what is known of a backend whose open flows may have to be ended.
type watch struct {
	since    time.Time // of the last sign of life, or of the first question
	asked    time.Time
	progress uint64 // packets of the backend's side, on all its flows
	killed   time.Time
}

// Kill ends the open steered connections of a backend: their clients get a RST as soon as they can be made to send
// something, which takes a fraction of a second. New connections are not touched by it; a backend that takes them
// is refused with an error.
func (d *Datapath) Kill(id fleet.ID) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.targets[id]
	if t == nil {
		return fmt.Errorf("end flows: no backend has id %d", id)
	}
	if t.takes(d) {
		return fmt.Errorf("end flows of %q: it takes new connections: drain it first", t.rec.Name)
	}
	d.kill(id, t, time.Now())
	return nil
}

// takes says whether new connections may be steered to it.
func (t *target) takes(d *Datapath) bool {
	return t.rec.State == fleet.HealthUp && !t.left && d.table.Admin[t.rec.ID].State.Load() == 0
}

// kill makes the kernel end what a backend has open. The caller holds d.mu.
func (d *Datapath) kill(id fleet.ID, t *target, now time.Time) {
	t.watch.killed = now
	d.epochs[id].kill.Store(1)
	d.epochs[id].value.Add(1)
}

// revive lets flows of the backend live again; those that were ended stay so. The caller holds d.mu.
func (d *Datapath) revive(id fleet.ID, t *target) {
	t.watch = watch{}
	d.epochs[id].kill.Store(0)
}

// runDead ends the connections of backends that died or whose time to drain is over.
func (d *Datapath) runDead(ctx context.Context) error {
	p, err := d.net.Prober()
	if err != nil {
		d.notice("clients of dead backends hear of it only when they send", err) // no CAP_NET_RAW
		p = nil
	} else {
		defer p.Close()
	}
	tick := time.NewTicker(deadEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case now := <-tick.C:
			d.notice("end flows of dead backends", d.tendDead(p, now))
		}
	}
}

// tendDead is one look at all backends. A backend is dead when the L7 says that it is down and its host gives no sign of
// life on any connection, though asked: a process that ended on a living host closes its connections itself, and one
// that only fails its health check may still finish what it has begun.
func (d *Datapath) tendDead(p *netdev.Prober, now time.Time) error {
	d.mu.Lock()
	watched := map[fleet.ID]*target{}
	for id, t := range d.targets {
		d.drainClock(id, t, now)
		down := t.rec.State == fleet.HealthDown && !t.left
		over := !t.drained.IsZero() && d.set.DrainLimit > 0 && now.Sub(t.drained) >= d.set.DrainLimit
		dead := !t.watch.killed.IsZero()
		if over && !dead {
			d.kill(id, t, now)
			dead = true
		}
		switch {
		case t.takes(d), !down && !over && !dead:
			if t.watch != (watch{}) {
				d.revive(id, t)
			}
		case d.table.Slots[id].KernelFlows.Load() > 0, dead && now.Sub(t.watch.killed) < deadAfter:
			watched[id] = t
		case dead:
			d.epochs[id].kill.Store(0) // all has ended: what is opened later has nothing to do with it
		}
	}
	d.mu.Unlock()
	if len(watched) == 0 {
		return nil
	}
	byBackend := map[fleet.ID][]flowEntry{}
	if err := d.m.scanFlows(func(k steerFlowKey, f *steerFlow) {
		if id := fleet.ID(f.Backend); watched[id] != nil && f.has(steerShuntFlowFlagsSHUNT_FLOW_FORWARD) && f.has(steerShuntFlowFlagsSHUNT_FLOW_ESTAB) {
			byBackend[id] = append(byBackend[id], flowEntry{k, *f})
		}
	}); err != nil {
		return err
	}
	var errs []error
	for id, t := range watched {
		errs = append(errs, d.tendOne(p, id, t, byBackend[id], now))
	}
	return errors.Join(errs...)
}

// drainClock notes since when the operator has wanted a backend empty. The caller holds d.mu.
func (d *Datapath) drainClock(id fleet.ID, t *target, now time.Time) {
	switch wanted := d.table.Admin[id].State.Load() != 0 || t.left; {
	case !wanted:
		t.drained = time.Time{}
	case t.drained.IsZero():
		t.drained = now
	}
}

func (d *Datapath) tendOne(p *netdev.Prober, id fleet.ID, t *target, flows []flowEntry, now time.Time) error {
	progress := uint64(0)
	answers := make([]steerFlow, len(flows)) // entries of the other direction; zero without one
	for i := range flows {
		progress += uint64(flows[i].value.Answered)
		if back, err := d.m.flow(answerKey(&flows[i].value)); err == nil {
			answers[i] = back
			progress += uint64(back.Packets)
		}
	}
	d.mu.Lock()
	w := &t.watch
	// Without a way to ask on the connections themselves, a next hop that answers is a sign of life too.
	asked := p != nil && len(flows) > 0 && answers[0].Sport != 0 || t.problem != ""
	ask := now.Sub(w.asked) >= probeEvery
	switch {
	case !w.killed.IsZero():
	case w.since.IsZero() || progress != w.progress:
		w.since, w.progress = now, progress
	case asked && !w.asked.Before(w.since) && now.Sub(w.asked) >= deadSilent:
		d.kill(id, t, now)
		ask = true
	}
	if ask {
		w.asked = now
	}
	killed := !w.killed.IsZero()
	d.mu.Unlock()
	if p == nil || !ask {
		return nil
	}
	var errs []error
	for i := range flows {
		k, f, back := &flows[i].key, &flows[i].value, &answers[i]
		client, vip := netip.AddrPortFrom(fromBytes(k.Src), k.Sport), netip.AddrPortFrom(fromBytes(k.Dst), k.Dport)
		if killed {
			errs = append(errs, probeError(p.ACK(vip, client, f.Ack-1, back.Ack)))
		}
		if i < deadSample && back.Sport != 0 {
			nat, steer := netip.AddrPortFrom(fromBytes(f.Src), f.Sport), netip.AddrPortFrom(fromBytes(f.Dst), f.Dport)
			errs = append(errs, probeError(p.ACK(nat, steer, back.Ack-1, f.Ack)))
		}
	}
	return errors.Join(errs...)
}

// probeError leaves out what only says that the host is as dead as was thought.
func probeError(err error) error {
	if errors.Is(err, unix.EHOSTUNREACH) || errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.ENETDOWN) {
		return nil
	}
	return err
}
