// SPDX-License-Identifier: Apache-2.0

package session_test

import (
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/session"
)

var (
	vip    = netip.MustParseAddrPort("192.0.2.1:8080")
	client = netip.MustParseAddrPort("198.51.100.7:40000")
	key    = session.PinKey{Client: client.Addr(), VIP: vip}
)

// brokenTable fails as told.
type brokenTable struct {
	*session.HeapPins
	put, del      error
	touch         func()
	puts, touches atomic.Int64
	onPut         func(session.PinKey, session.Pin)
}

func (b *brokenTable) Put(k session.PinKey, p session.Pin) error {
	b.puts.Add(1)
	if b.onPut != nil {
		b.onPut(k, p)
	}
	if b.put != nil {
		return b.put
	}
	return b.HeapPins.Put(k, p)
}

func (b *brokenTable) Touch(k session.PinKey, p session.Pin) error {
	b.touches.Add(1)
	if b.touch != nil {
		b.touch()
	}
	return b.HeapPins.Touch(k, p)
}

func (b *brokenTable) Delete(k session.PinKey) error {
	if b.del != nil {
		return b.del
	}
	return b.HeapPins.Delete(k)
}

type rig struct {
	t     testing.TB
	clock *clock
	table *brokenTable
	fleet *fleet.Fleet
	b     []*fleet.Backend
	pins  *session.Pins
}

func newRig(t testing.TB, change func(*session.PinsOptions)) *rig {
	t.Helper()
	r := &rig{t: t, clock: newClock(), table: &brokenTable{HeapPins: session.NewHeapPins()}}
	r.table.Now, r.table.Idle = r.clock.Now, time.Minute
	r.fleet, r.b = newBackends(t, 4)
	o := session.PinsOptions{
		Table:   r.table,
		Lease:   session.Lease{Idle: time.Minute, Max: time.Hour, Connections: 64},
		IsVIP:   func(a netip.AddrPort) bool { return a == vip },
		Skip:    func(a netip.Addr) bool { return a == netip.MustParseAddr("203.0.113.1") },
		Handoff: true,
		Now:     r.clock.Now,
	}
	if change != nil {
		change(&o)
	}
	r.pins = session.NewPins(o)
	return r
}

// offer is the answer of backend i to a session's request; 100 tokens are expected of its next turn.
func (r *rig) offer(k session.Key, i int) bool {
	return r.pins.Offer(client, vip, k, r.b[i], 100, false)
}

// pinned checks where the client's new connections go; -1 = to the front end.
func (r *rig) pinned(want int) {
	r.t.Helper()
	got := -1
	if p, live := r.table.Get(key); live {
		got = int(p.Backend) - 1
		if p.Generation != r.b[got].Generation() {
			r.t.Errorf("pin of generation %d", p.Generation)
		}
	}
	if got != want {
		r.t.Errorf("pinned to %d, want %d", got, want)
	}
}

func (r *rig) sessions(want uint32) {
	r.t.Helper()
	if p, _ := r.table.Get(key); p.Sessions != want {
		r.t.Errorf("%d sessions, want %d", p.Sessions, want)
	}
}

func check(t testing.TB, what string, got, want bool) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

func TestPinsFirstTurn(t *testing.T) {
	r := newRig(t, nil)
	check(t, "handoff of turn 1", r.offer(1, 0), true)
	r.pinned(0)
	want := session.Pin{Backend: r.b[0].ID(), Generation: r.b[0].Generation(), Expires: time.Hour, Tokens: 100, Connections: 64, Sessions: 1}
	if p, _ := r.table.Get(key); p != want {
		t.Errorf("pin %+v, want %+v", p, want)
	}
	// A live pin is not written again: its lease runs from the first turn.
	r.clock.add(30 * time.Second)
	check(t, "handoff of turn 2", r.offer(1, 0), true)
	if n := r.table.puts.Load(); n != 1 {
		t.Errorf("%d pins written", n)
	}
	if p, _ := r.table.Get(key); p.Expires != time.Hour-30*time.Second {
		t.Errorf("the lease was renewed: %s left", p.Expires)
	}
	if n := r.table.touches.Load(); n != 0 {
		t.Errorf("%d touches for nothing new", n)
	}
	// Once it has ended, it is.
	r.clock.add(time.Minute)
	r.pinned(-1)
	check(t, "handoff after the lease", r.offer(1, 0), true)
	r.pinned(0)
}

func TestPinsHandoffOff(t *testing.T) {
	r := newRig(t, func(o *session.PinsOptions) { o.Handoff = false })
	check(t, "handoff", r.offer(1, 0), false)
	r.pinned(0)
	check(t, "handoff, once pinned", r.offer(1, 0), false)
}

func TestPinsLease(t *testing.T) {
	r := newRig(t, func(o *session.PinsOptions) { o.Lease = session.Lease{Idle: time.Minute, Connections: 3} })
	check(t, "handoff", r.offer(1, 0), true)
	if p, _ := r.table.Get(key); p.Connections != 3 || p.Expires != 0 {
		t.Errorf("the lease is not used: %+v", p)
	}
}

func TestPinsNotOurs(t *testing.T) {
	r := newRig(t, func(o *session.PinsOptions) {
		o.Steerable = func(b *fleet.Backend) bool { return b.Name() != "b3" }
	})
	tests := []struct {
		name          string
		client, local netip.AddrPort
		backend       *fleet.Backend
	}{
		{"not a VIP", client, netip.MustParseAddrPort("192.0.2.1:9090"), r.b[0]},
		{"another address", client, netip.MustParseAddrPort("192.0.2.2:8080"), r.b[0]},
		{"an ingress", netip.MustParseAddrPort("203.0.113.1:5000"), vip, r.b[0]},
		{"a mapped ingress", netip.MustParseAddrPort("[::ffff:203.0.113.1]:5000"), vip, r.b[0]},
		{"not steerable", client, vip, r.b[3]},
		{"no backend", client, vip, nil},
		{"no address", netip.AddrPort{}, vip, r.b[0]},
	}
	for _, tt := range tests {
		if r.pins.Offer(tt.client, tt.local, 1, tt.backend, 100, false) || r.table.Len() != 0 {
			t.Errorf("%s: pinned", tt.name)
		}
	}
	r.b[1].SetAdmin(fleet.AdminDrain)
	r.b[2].SetHealth(fleet.HealthDown)
	for _, i := range []int{1, 2} {
		if r.offer(2, i) || r.table.Len() != 0 {
			t.Errorf("pinned to %s", r.b[i].Name())
		}
	}
}

func TestPinsMapped(t *testing.T) {
	r := newRig(t, nil)
	mapped := netip.MustParseAddrPort("[::ffff:198.51.100.7]:1")
	mappedVIP := netip.MustParseAddrPort("[::ffff:192.0.2.1]:8080")
	check(t, "handoff", r.pins.Offer(mapped, mappedVIP, 1, r.b[0], 1, false), true)
	r.pinned(0)
	r.offer(2, 1)
	r.pinned(-1)
}

func TestPinsMixed(t *testing.T) {
	r := newRig(t, nil)
	r.offer(1, 0)
	check(t, "second session, same home", r.offer(2, 0), true)
	r.pinned(0)
	r.sessions(2)
	check(t, "third session, other home", r.offer(3, 1), false)
	r.pinned(-1)
	if info := r.pins.List(); len(info) != 1 || !info[0].Mixed || info[0].Sessions != 3 || info[0].Live {
		t.Errorf("listed as %+v", info)
	}
	// While the disagreement lasts nothing is pinned, whoever asks.
	for range 5 {
		r.clock.add(30 * time.Second)
		check(t, "first", r.offer(1, 0), false)
		check(t, "third", r.offer(3, 1), false)
		r.pinned(-1)
	}
	// The third one goes quiet.
	r.clock.add(59 * time.Second)
	check(t, "just before it is idle", r.offer(1, 0), false)
	r.clock.add(time.Second)
	check(t, "once it is idle", r.offer(1, 0), true)
	r.pinned(0)
	r.sessions(1)
	if st := r.pins.Stats(); st.Mixed != 1 || st.Removed != 1 || st.Written != 2 || st.Addresses != 1 || st.Errors != 0 {
		t.Errorf("stats %+v", st)
	}
}

// TestPinsUnseenSessions: the front end does not see sessions that the kernel steers. They count for as long as the pin
// lives, and from the moment that it is removed.
func TestPinsUnseenSessions(t *testing.T) {
	r := newRig(t, nil)
	r.offer(1, 0)
	for range 20 {
		r.clock.add(50 * time.Second)
		if _, ok := r.table.Use(key); !ok {
			t.Fatal("the pin ended")
		}
	}
	check(t, "another session after 16 minutes", r.offer(2, 1), false)
	r.pinned(-1)
	r.clock.add(50 * time.Second)
	check(t, "50 s later", r.offer(2, 1), false)
	r.clock.add(10 * time.Second)
	check(t, "once the first is idle", r.offer(2, 1), true)
	r.pinned(1)
}

func TestPinsHomeMoves(t *testing.T) {
	r := newRig(t, nil)
	r.offer(1, 0)
	for range 3 { // the kernel serves it, unseen
		r.clock.add(50 * time.Second)
		r.table.Use(key)
	}
	check(t, "the only session moved", r.offer(1, 1), true)
	r.pinned(1)
	r.offer(2, 1)
	check(t, "one of two moved", r.offer(1, 2), false)
	r.pinned(-1)
	check(t, "the other followed", r.offer(2, 2), true)
	r.pinned(2)
	// It moved to a backend that cannot be steered to: the old pin must not stay.
	r.b[3].SetAdmin(fleet.AdminDrain)
	r.offer(1, 3)
	r.pinned(2) // session 1 has no home now, session 2 still has
	r.offer(2, 3)
	r.pinned(-1)
}

// TestPinsHomeDown: nobody calls Forget (bpftool wrote the state), and the sessions of an address follow the first one
// to its new home.
func TestPinsHomeDown(t *testing.T) {
	r := newRig(t, nil)
	r.offer(1, 0)
	r.offer(2, 0)
	r.b[0].SetAdmin(fleet.AdminMaint)
	check(t, "first to move", r.offer(1, 1), true)
	r.pinned(1)
	r.sessions(1)
	check(t, "the other followed", r.offer(2, 1), true)
	r.sessions(2)
	r.b[1].SetAdmin(fleet.AdminMaint)
	r.pins.Seen(client, vip, 3, r.b[2], false)
	r.pinned(-1)
}

func TestPinsMoveToUnsteerable(t *testing.T) {
	r := newRig(t, func(o *session.PinsOptions) {
		o.Steerable = func(b *fleet.Backend) bool { return b.Name() != "b3" }
	})
	r.offer(1, 0)
	check(t, "moved", r.offer(1, 3), false)
	r.pinned(-1)
	r.offer(2, 0)
	r.pinned(-1) // they disagree, though one of them could not be pinned anyway
}

func TestPinsSpilled(t *testing.T) {
	r := newRig(t, nil)
	spill := func(k session.Key, i int) bool { return r.pins.Offer(client, vip, k, r.b[i], 100, true) }
	check(t, "first request spilled", spill(1, 1), false)
	if r.table.Len() != 0 {
		t.Error("a spilled request wrote a pin")
	}
	r.offer(1, 0)
	check(t, "spilled", spill(1, 1), false)
	check(t, "without a session", spill(0, 1), false)
	r.pinned(0)
	check(t, "back home", r.offer(1, 0), true)
	r.sessions(1)
	// It is a sign of life all the same.
	r.offer(2, 1)
	for range 3 {
		r.clock.add(40 * time.Second)
		spill(2, 3)
		check(t, "the other one spilled", r.offer(1, 0), false)
	}
}

func TestPinsSpilledHomeElsewhere(t *testing.T) {
	home := map[session.Key]fleet.ID{}
	r := newRig(t, func(o *session.PinsOptions) { o.Home = func(k session.Key) fleet.ID { return home[k] } })
	r.offer(1, 0)
	home[2] = r.b[1].ID()
	r.pins.Seen(client, vip, 2, r.b[0], true)
	r.pinned(-1) // its home is another one, though this request went to the pinned one
	r.clock.add(time.Minute)
	r.offer(1, 0)
	r.pinned(0)
	home[1] = r.b[2].ID() // moved by way of another address
	r.pins.Offer(client, vip, 1, r.b[0], 100, true)
	r.pinned(-1)
}

func TestPinsNoSession(t *testing.T) {
	r := newRig(t, nil)
	check(t, "no session, no pin", r.offer(0, 0), false)
	if r.table.Len() != 0 {
		t.Error("a request without a session wrote a pin")
	}
	check(t, "a session that agrees", r.offer(1, 0), true)
	r.sessions(2)
	check(t, "no session, same backend", r.offer(0, 0), false)
	r.pinned(0)
	check(t, "no session, another backend", r.offer(0, 1), false)
	r.pinned(-1)
	// Each counts for its backend; one does not move the other.
	check(t, "no session, same backend again", r.offer(0, 0), false)
	check(t, "the session", r.offer(1, 0), false)
	r.clock.add(time.Minute)
	check(t, "later", r.offer(1, 0), true)
}

// TestPinsSeen: the address is known to be mixed when the backend is picked, long before the answer.
func TestPinsSeen(t *testing.T) {
	r := newRig(t, nil)
	r.pins.Seen(client, vip, 1, r.b[0], false)
	if r.table.Len() != 0 {
		t.Error("a request without an answer is pinned")
	}
	r.offer(1, 0)
	r.pins.Seen(client, vip, 1, r.b[0], false)
	r.pins.Seen(client, vip, 2, r.b[0], false)
	r.pinned(0)
	r.pins.Seen(client, vip, 3, r.b[1], false)
	r.pinned(-1)
	check(t, "answer of the first", r.offer(1, 0), false)
	check(t, "answer of the third", r.offer(3, 1), false)
}

func TestPinsTokens(t *testing.T) {
	r := newRig(t, nil)
	offer := func(k session.Key, expected int64, want uint32, touches int64) {
		t.Helper()
		r.pins.Offer(client, vip, k, r.b[0], expected, false)
		if p, _ := r.table.Get(key); p.Tokens != want || r.table.touches.Load() != touches {
			t.Errorf("charge %d after %d touches, want %d after %d", p.Tokens, r.table.touches.Load(), want, touches)
		}
	}
	offer(1, 1000, 1000, 0)
	offer(1, 1250, 1000, 0) // within a quarter
	offer(1, 1251, 1251, 1)
	offer(1, 900, 900, 2)
	offer(2, 100, 500, 3) // mean of both sessions
	offer(3, 0, 500, 4)   // not known: no part in the mean
	offer(3, -7, 500, 4)  // likewise
	offer(2, 1<<40, 2147484098, 5)
	if n := r.table.puts.Load(); n != 1 {
		t.Errorf("%d pins written", n)
	}
}

func TestPinsForget(t *testing.T) {
	r := newRig(t, nil)
	other := netip.MustParseAddrPort("[2001:db8::9]:1")
	r.offer(1, 0)
	r.offer(2, 0)
	r.pins.Offer(other, vip, 3, r.b[1], 100, false)
	r.b[0].SetHealth(fleet.HealthDown)
	if err := r.pins.Forget(r.b[0]); err != nil {
		t.Error(err)
	}
	r.pinned(-1)
	if r.table.Len() != 1 {
		t.Error("the other backend's pin went too")
	}
	// The sessions are without a home: the first one that finds a new one is pinned, and leads the other there.
	check(t, "new home", r.offer(1, 1), true)
	r.pinned(1)
	// A late answer of the dead one changes nothing.
	check(t, "late answer", r.offer(2, 0), false)
	r.pinned(1)
}

// TestPinsForgetRace: the backend stops taking work at every point of an Offer; no pin to it is left.
func TestPinsForgetRace(t *testing.T) {
	r := newRig(t, nil)
	r.table.onPut = func(session.PinKey, session.Pin) { r.b[0].SetAdmin(fleet.AdminDrain) }
	check(t, "handoff", r.offer(1, 0), false)
	r.pinned(-1)
	r.table.onPut = nil
	for i := range 200 {
		r.b[0].SetAdmin(fleet.AdminNone)
		var wg sync.WaitGroup
		wg.Go(func() { r.offer(session.Key(i+1), 0) })
		wg.Go(func() {
			r.b[0].SetAdmin(fleet.AdminDrain)
			if err := r.pins.Forget(r.b[0]); err != nil {
				t.Error(err)
			}
		})
		wg.Wait()
		r.pinned(-1)
	}
}

func TestPinsGeneration(t *testing.T) {
	r := newRig(t, nil)
	r.offer(1, 2)
	p, _ := r.table.Get(key)
	p.Generation++ // of another instance with the same ID
	if err := r.table.Put(key, p); err != nil {
		t.Fatal(err)
	}
	check(t, "handoff", r.offer(1, 2), true)
	r.pinned(2)
}

func TestPinsStatic(t *testing.T) {
	r := newRig(t, nil)
	static := session.Pin{Backend: r.b[0].ID(), Sessions: 1, Static: true}
	if err := r.table.HeapPins.Put(key, static); err != nil {
		t.Fatal(err)
	}
	check(t, "handoff to where it points", r.offer(1, 0), true)
	check(t, "handoff elsewhere", r.offer(2, 1), false)
	check(t, "handoff, spilled", r.pins.Offer(client, vip, 1, r.b[0], 1, true), false)
	r.pins.Seen(client, vip, 3, r.b[2], false)
	errs := errors.Join(r.pins.Forget(r.b[0]), r.pins.Unpin(client.Addr(), vip))
	if p, _ := r.table.Get(key); p != static || errs != nil {
		t.Errorf("static pin is now %+v (%v)", p, errs)
	}
}

func TestPinsTableErrors(t *testing.T) {
	r := newRig(t, nil)
	r.table.put = session.ErrPinTableFull
	check(t, "full table", r.offer(1, 0), false)
	r.table.put = nil
	check(t, "room again", r.offer(1, 0), true)
	r.pinned(0)

	// The pin cannot be removed: it is not offered, and each call tries again.
	r.table.del = errors.New("broken")
	check(t, "mixed", r.offer(2, 1), false)
	check(t, "mixed", r.offer(1, 0), false)
	r.table.del = nil
	check(t, "mixed", r.offer(1, 0), false)
	r.pinned(-1)

	// A move that cannot be written must not leave the old pin.
	r.clock.add(time.Minute)
	r.offer(1, 0)
	r.pinned(0)
	r.table.put = session.ErrPinTableFull
	check(t, "move", r.offer(1, 1), false)
	r.pinned(-1)
	r.table.put = nil
	check(t, "move", r.offer(1, 1), true)
	r.pinned(1)

	// The lease ends between the look and the touch.
	r.table.touch = func() { r.clock.add(2 * time.Hour) }
	check(t, "lease ends", r.offer(2, 1), true)
	r.pinned(1)
	if st := r.pins.Stats(); st.Errors != 4 {
		t.Errorf("%d errors counted, want 4", st.Errors)
	}
}

// TestPinsRestart: pins outlive the daemon, what it knew of the sessions behind them does not.
func TestPinsRestart(t *testing.T) {
	r := newRig(t, nil)
	r.offer(1, 0)
	r.offer(2, 0)
	restart := func() {
		r.pins = session.NewPins(session.PinsOptions{Table: r.table, Lease: session.Lease{Idle: time.Minute}, Handoff: true, Now: r.clock.Now})
	}
	restart()
	if id := r.pins.Inherited(client, vip); id != r.b[0].ID() {
		t.Errorf("inherited home %d", id)
	}
	check(t, "a session that agrees", r.offer(1, 0), true)
	r.pinned(0)
	if id := r.pins.Inherited(client, vip); id != 0 {
		t.Errorf("inherited home %d of an address that is known", id)
	}
	restart()
	r.clock.add(30 * time.Second)
	check(t, "one that does not", r.offer(3, 1), false)
	r.pinned(-1)
	r.clock.add(59 * time.Second)
	check(t, "59 s later", r.offer(3, 1), false)
	r.clock.add(time.Second)
	check(t, "60 s later", r.offer(3, 1), true)

	restart()
	if err := r.pins.Unpin(client.Addr()); err != nil {
		t.Error(err)
	}
	r.pinned(1) // not known to be there
	if err := r.pins.Unpin(netip.MustParseAddr("::ffff:198.51.100.7"), vip); err != nil {
		t.Error(err)
	}
	r.pinned(-1)
}

func TestPinsUnpin(t *testing.T) {
	r := newRig(t, nil)
	r.offer(1, 0)
	r.offer(2, 1)
	if err := r.pins.Unpin(client.Addr()); err != nil {
		t.Error(err)
	}
	if len(r.pins.List()) != 0 {
		t.Error("the address is still known")
	}
	check(t, "as if new", r.offer(2, 1), true)
	if err := r.pins.Unpin(client.Addr()); err != nil {
		t.Error(err)
	}
	r.pinned(-1)
}
