// SPDX-License-Identifier: Apache-2.0

package session_test

import (
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/session"
)

// TestPinsBounded: addresses come and go without end; what is remembered, and the pins, stay within the bound.
func TestPinsBounded(t *testing.T) {
	r := newRig(t, func(o *session.PinsOptions) { o.MaxAddresses = 640 })
	a := netip.MustParseAddr("2001:db8::")
	for i := range 20_000 {
		a = a.Next()
		r.pins.Offer(netip.AddrPortFrom(a, 1), vip, session.Key(i+1), r.b[0], 1, false)
	}
	if st := r.pins.Stats(); st.Addresses > 640 || st.Addresses < 320 {
		t.Errorf("%d addresses, bound 640", st.Addresses)
	}
	if n := r.table.Len(); n != r.pins.Stats().Addresses {
		t.Errorf("%d pins for %d addresses", n, r.pins.Stats().Addresses)
	}
	// They retire when they are idle, as others come.
	r.clock.add(2 * time.Minute)
	for range 10_000 {
		a = a.Next()
		r.pins.Seen(netip.AddrPortFrom(a, 1), vip, 1, r.b[0], true)
	}
	for _, info := range r.pins.List() {
		if info.Seen > time.Minute {
			t.Fatalf("%s was seen %s ago", info.Client, info.Seen)
		}
	}
}

// TestPinsRetireKeepsLive: an address whose sessions the kernel serves is not forgotten for the front end's not seeing it.
func TestPinsRetireKeepsLive(t *testing.T) {
	r := newRig(t, nil)
	r.offer(1, 0)
	a := netip.MustParseAddr("2001:db8::")
	for range 30 {
		r.clock.add(50 * time.Second)
		if _, ok := r.table.Use(key); !ok {
			t.Fatal("the pin ended")
		}
		for range 500 {
			a = a.Next()
			r.pins.Seen(netip.AddrPortFrom(a, 1), vip, 1, r.b[1], false)
		}
	}
	r.pinned(0)
	if r.pins.Inherited(client, vip) != 0 {
		t.Error("the address was forgotten")
	}
}

// TestPinsUnused: a client that never uses its pin is not asked to reconnect for ever; one that does is again.
func TestPinsUnused(t *testing.T) {
	r := newRig(t, nil)
	for range 10 { // many connections that were open before the pin
		check(t, "at once", r.offer(1, 0), true)
	}
	asked := 0
	for range 20 {
		r.clock.add(2 * time.Second)
		if r.offer(1, 0) {
			asked++
		}
	}
	if asked == 0 || asked > 4 {
		t.Errorf("asked to reconnect %d times of 20, though the pin is never used", asked)
	}
	r.pinned(0)
	if _, ok := r.table.Use(key); !ok {
		t.Fatal("the pin ended")
	}
	check(t, "after a use", r.offer(1, 0), true)
}

// TestPinsManySessions: beyond those that are told apart, sessions count for their backends.
func TestPinsManySessions(t *testing.T) {
	r := newRig(t, nil)
	for k := range session.Key(500) {
		check(t, "handoff", r.offer(k+1, 0), true)
	}
	r.sessions(65)
	check(t, "one that disagrees", r.offer(1000, 1), false)
	r.pinned(-1)
	check(t, "one of the crowd", r.offer(400, 0), false)
	r.clock.add(time.Minute)
	check(t, "all others idle", r.offer(400, 0), true)
	r.sessions(1)
}

// TestPinsConcurrentMixed: two sessions with two homes answer at the same time on one address. Whatever the order, it is
// mixed, and from then on no pin is written.
func TestPinsConcurrentMixed(t *testing.T) {
	for i := range 100 {
		r := newRig(t, nil)
		var both atomic.Int64
		r.table.onPut = func(session.PinKey, session.Pin) {
			if both.Load() == 2 {
				t.Error("pinned again")
			}
		}
		var wg sync.WaitGroup
		var handoffs atomic.Int64
		for k := range 2 {
			wg.Go(func() {
				for n := range 20 {
					if r.offer(session.Key(k+1), k) {
						handoffs.Add(1)
					}
					if n == 0 {
						both.Add(1)
					}
				}
			})
		}
		wg.Wait()
		r.pinned(-1)
		if i == 0 && t.Failed() {
			return
		}
	}
}

// TestPinsConcurrent: many addresses, sessions, moves, drains; an Offer that returns true has its pin in the table.
func TestPinsConcurrent(t *testing.T) {
	r := newRig(t, nil)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			own := netip.AddrPortFrom(netip.MustParseAddr(fmt.Sprintf("198.51.100.%d", 100+g)), 1)
			for i := range 400 {
				b := r.b[(g+i/50)%3]
				if r.pins.Offer(own, vip, session.Key(g+1), b, 10, false) {
					p, live := r.table.Get(session.PinKey{Client: own.Addr(), VIP: vip})
					if !live || p.Backend != b.ID() {
						t.Errorf("handoff without a pin: %+v", p)
					}
				} else {
					t.Error("a lone session is not pinned")
				}
				r.pins.Offer(client, vip, session.Key(i%5), r.b[i%4], 10, i%3 == 0)
				switch i % 50 {
				case 0:
					r.pins.List()
				case 10:
					_ = r.pins.Unpin(client.Addr())
				case 20:
					_ = r.pins.Forget(r.b[3])
				case 30:
					r.pins.Inherited(client, vip)
					r.pins.Stats()
				}
			}
		})
	}
	wg.Wait()
}

func TestPinsAllocs(t *testing.T) {
	r := newRig(t, nil)
	r.offer(1, 0)
	if a := testing.AllocsPerRun(100, func() {
		r.pins.Seen(client, vip, 1, r.b[0], false)
		r.offer(1, 0)
	}); a != 0 {
		t.Errorf("a request at a known address costs %v allocations", a)
	}
}

func BenchmarkOffer(b *testing.B) {
	r := newRig(b, nil)
	b.ReportAllocs()
	for b.Loop() {
		r.offer(1, 0)
	}
}
