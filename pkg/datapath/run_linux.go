// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf/ringbuf"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/netdev"
)

const (
	tidyEvery   = 5 * time.Second
	refreshIdle = time.Second           // how often the network is read when nothing changes
	refreshRest = 50 * time.Millisecond // between two reads when much changes
	eventsEvery = 100 * time.Millisecond
)

// Run keeps the kernel's tables true until ctx ends: the heartbeat, neighbours and interfaces, used-up pins, events.
// It returns nil when ctx ends, and an error when a part of it cannot go on.
func (d *Datapath) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	changed := make(chan struct{}, 1)
	parts := []struct {
		name string
		run  func(context.Context) error
	}{
		{"heartbeat", d.runHeartbeat},
		{"network watch", func(ctx context.Context) error { return d.runWatch(ctx, changed) }},
		{"upkeep", func(ctx context.Context) error { return d.runUpkeep(ctx, changed) }},
		{"events", d.runEvents},
		{"watch of dead backends", d.runDead},
	}
	errs := make([]error, len(parts))
	var wg sync.WaitGroup
	for i, p := range parts {
		wg.Add(1)
		go func() {
			defer wg.Done()
			defer cancel() // one cannot go on without the others
			defer func() {
				if r := recover(); r != nil {
					errs[i] = fmt.Errorf("run %s: panic: %v\n%s", p.name, r, debug.Stack())
				}
			}()
			if err := p.run(ctx); err != nil {
				errs[i] = fmt.Errorf("run %s: %w", p.name, err)
			}
		}()
	}
	wg.Wait()
	return errors.Join(errs...)
}

// beat tells the kernel that the L7 lives.
func (d *Datapath) beat() {
	if d.silent.Load() {
		return
	}
	atomic.StoreUint64(&d.config.HeartbeatNs, d.clock.now())
	if d.silent.Load() { // Silence came between
		atomic.StoreUint64(&d.config.HeartbeatNs, 0)
	}
}

// Silence tells the kernel at once that no L7 takes connections any more: nothing is left to it that could be steered.
// It is called before the front end's listener closes. Everything else that Run does goes on.
func (d *Datapath) Silence() {
	d.silent.Store(true)
	atomic.StoreUint64(&d.config.HeartbeatNs, 0)
}

func (d *Datapath) runHeartbeat(ctx context.Context) error {
	t := time.NewTicker(heartbeatEvery)
	defer t.Stop()
	for {
		d.beat()
		select {
		case <-ctx.Done():
			d.Silence()
			return nil
		case <-t.C:
		}
	}
}

// runWatch signals changes of the network. When the watch fails it begins anew: upkeep looks every second anyway.
func (d *Datapath) runWatch(ctx context.Context, changed chan<- struct{}) error {
	for {
		err := d.net.Watch(ctx, 0, func(c netdev.Change) {
			switch c.Kind {
			case netdev.ChangeRoute: // a router's may change all the time: the next second is soon enough
				return
			case netdev.ChangeNeighbour:
				if hops := d.hops.Load(); hops != nil && !(*hops)[nextHop{c.Index, c.Addr}] {
					return
				}
			}
			select {
			case changed <- struct{}{}:
			default:
			}
		})
		if ctx.Err() != nil {
			return nil
		}
		d.notice("watch", err)
		if !sleep(ctx, time.Second) {
			return nil
		}
	}
}

// runUpkeep repairs what changed. Its errors are shown in the status: the next round may do better.
func (d *Datapath) runUpkeep(ctx context.Context, changed <-chan struct{}) error {
	tick := time.NewTicker(refreshIdle)
	defer tick.Stop()
	var tidied time.Time
	for {
		d.mu.Lock()
		d.tendLinks()
		err := d.refresh()
		d.mu.Unlock()
		d.notice("refresh", err)
		if time.Since(tidied) >= tidyEvery {
			tidied = time.Now()
			d.notice("tidy", d.pins.tidy(d.generation))
			d.notice("sweep", d.tendSweep())
		}
		if !sleep(ctx, refreshRest) {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-changed:
		}
	}
}

// tendSweep arms the kernel's sweep again when it stands still.
func (d *Datapath) tendSweep() error {
	var st steerState
	if err := d.m.ShuntState.Lookup(uint32(0), &st); err != nil {
		return fmt.Errorf("read sweep: %w", err)
	}
	if now := d.clock.now(); now-min(now, st.SweptNs) > max(uint64(tidyEvery), 100*st.SweepTookNs) {
		return d.armSweep()
	}
	return nil
}

func (d *Datapath) generation(id fleet.ID) (uint32, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.targets[id]
	if t == nil || t.left {
		return 0, false
	}
	return t.rec.Generation, true
}

// notice keeps an error for the status, once.
func (d *Datapath) notice(what string, err error) {
	if err == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	text := what + ": " + err.Error()
	for _, n := range d.notices {
		if n == text {
			return
		}
	}
	const most = 50
	if len(d.notices) >= most {
		d.notices = append(d.notices[:0], d.notices[1:]...)
	}
	d.notices = append(d.notices, text)
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// runEvents reads the ring. The kernel wakes nobody up for an event, so the reader looks by itself.
func (d *Datapath) runEvents(ctx context.Context) error {
	rd, err := ringbuf.NewReader(d.m.ShuntEvents)
	if err != nil {
		return fmt.Errorf("open ring: %w", err)
	}
	defer rd.Close()
	var rec ringbuf.Record
	for ctx.Err() == nil {
		rd.SetDeadline(time.Now().Add(eventsEvery))
		err := rd.ReadInto(&rec)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			continue
		case err != nil:
			return fmt.Errorf("read ring: %w", err)
		case len(rec.RawSample) < int(unsafe.Sizeof(steerEvent{})):
			continue // of a former program
		}
		var e steerEvent
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&e)), unsafe.Sizeof(e)), rec.RawSample)
		kind := EventKind(e.Kind)
		d.events[min(kind, EventFailover+1)].Add(1)
		if d.opt.OnEvent == nil {
			continue
		}
		d.opt.OnEvent(Event{
			Kind: kind, Backend: fleet.ID(e.Backend),
			Client: netip.AddrPortFrom(fromBytes(e.Client), e.ClientPort), VIP: d.pins.vipOf(e.VipId),
			BytesIn: e.BytesIn, BytesOut: e.BytesOut, Duration: time.Duration(e.DurationNs), Tokens: e.Tokens,
		})
	}
	return nil
}
