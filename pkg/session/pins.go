// SPDX-License-Identifier: Apache-2.0

package session

import (
	"errors"
	"fmt"
	"hash/maphash"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

// Defaults of PinsOptions.
const (
	// DefaultPinnedAddresses is MaxAddresses where none is given: as many as the kernel's table holds.
	DefaultPinnedAddresses = 1 << 16
	// DefaultLeaseIdle is Lease.Idle where none is given.
	DefaultLeaseIdle = 5 * time.Minute
)

const pinStripes = 64

// A live pin that unusedMax answers in a row have left unused ends the asking to reconnect; of answers within unusedLook
// only one counts, as a client may have had many connections open before it was pinned. Samples and full backends
// send a connection to the front end now and then, not every time.
const (
	unusedMax  = 4
	unusedLook = time.Second
)

// Lease bounds how long the kernel obeys a pin without the front end.
type Lease struct {
	Idle        time.Duration // a pin, and a session at its address, unused for longer counts no more
	Max         time.Duration // a pin ends so long after it was written; 0 = never
	Connections uint32        // that a pin serves; 0 = no bound
}

// PinsOptions configure Pins.
type PinsOptions struct {
	Table     PinTable
	Lease     Lease
	Steerable func(*fleet.Backend) bool // may the kernel steer to it; asked of eligible backends only. nil: all of them
	IsVIP     func(netip.AddrPort) bool // is the local address one that the kernel watches. nil: all are
	Skip      func(netip.Addr) bool     // client addresses never to pin: other shunts that steer here. nil: none
	// Home, if given, is asked for the home of a session whose first request at an address was spilled: it tells
	// whether the address is mixed before the session's next request does. Tracker.Home is meant.
	Home         func(Key) fleet.ID
	Handoff      bool // ask clients to reconnect once they are pinned
	MaxAddresses int  // remembered; the least recently seen go first, their pins with them
	Now          func() time.Time
}

// Pins decides which client addresses the kernel may steer.
//
// The kernel recognises an address, not a session. So an address is pinned only while all its recent sessions have
// one home. As soon as two want two backends it is mixed: its pin is removed before the call returns, and it is pinned
// again only when those that disagree have moved or been idle for Lease.Idle. A session is recent for Lease.Idle after the
// front end saw it; one that agrees with a live pin stays recent, since the kernel serves it unseen, and counts from the
// moment that the pin is removed. The rule errs towards not pinning: what cannot be told apart (requests without a
// session, sessions of an address beyond the first 64, those behind a pin that an earlier daemon wrote) counts for
// its backend until it is idle.
//
// Pins that the operator wrote are left as they are. Methods are safe for concurrent use; calls for one address come
// one after the other, so two answers with two homes leave it mixed in whichever order they arrive.
type Pins struct {
	o       PinsOptions
	lease   leaseSettings
	start   time.Time
	seed    maphash.Seed
	max     int // per stripe
	stripes [pinStripes]pinStripe

	written, removed, mixed, failed atomic.Uint64
}

type leaseSettings struct {
	Lease
	handoff bool
}

// PinStats counts since the start.
type PinStats struct {
	Written   uint64 // pins written
	Removed   uint64 // pins removed: mixed addresses, moved sessions, backends that left, addresses forgotten
	Mixed     uint64 // pins removed because their address became mixed
	Errors    uint64 // calls of the table that failed
	Addresses int    // remembered now
}

// PinInfo is what is known of one address.
type PinInfo struct {
	PinKey
	Pin      Pin           // zero if the address is not pinned
	Live     bool          // the pin's lease holds
	Mixed    bool          // recent sessions have different homes
	Sessions int           // recent ones
	Seen     time.Duration // since the front end served the address last
}

// NewPins returns Pins that remember no address; what an earlier daemon left in the table is taken over as it is met.
func NewPins(o PinsOptions) *Pins {
	if o.Steerable == nil {
		o.Steerable = func(*fleet.Backend) bool { return true }
	}
	if o.IsVIP == nil {
		o.IsVIP = func(netip.AddrPort) bool { return true }
	}
	if o.Skip == nil {
		o.Skip = func(netip.Addr) bool { return false }
	}
	if o.MaxAddresses <= 0 {
		o.MaxAddresses = DefaultPinnedAddresses
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Lease.Idle <= 0 {
		o.Lease.Idle = DefaultLeaseIdle
	}
	p := &Pins{o: o, lease: leaseSettings{o.Lease, o.Handoff}, start: o.Now(), seed: maphash.MakeSeed(), max: (o.MaxAddresses + pinStripes - 1) / pinStripes}
	for i := range p.stripes {
		s := &p.stripes[i]
		s.addrs = map[PinKey]*address{}
		s.lru.prev, s.lru.next = &s.lru, &s.lru
	}
	return p
}

// Seen tells that a request of the session, from client to local, goes to b. It is called when the backend is picked:
// from then on a mixed address is known, and its pin removed, though the answer may be far off. It never pins.
// For spilled and Key 0 see Offer.
func (p *Pins) Seen(client, local netip.AddrPort, k Key, b *fleet.Backend, spilled bool) {
	p.offer(served{client: client, local: local, key: k, backend: b, spilled: spilled})
}

// Offer is called just before the head of b's answer leaves. It writes, keeps or removes the address's pin, and returns
// true if the client is to be asked to reconnect, because the pin is in the table and handoff is on. expected is the
// tokens that the session's next turn is likely to bring: what one steered connection is charged.
//
// A spilled request went elsewhere than to its session's home for once, and neither pins nor moves. A request without
// a session (Key 0) does not pin either, but counts as a session of its backend. If the table fails the address is not
// pinned and the next call tries again.
func (p *Pins) Offer(client, local netip.AddrPort, k Key, b *fleet.Backend, expected int64, spilled bool) (handoff bool) {
	return p.offer(served{client: client, local: local, key: k, backend: b, spilled: spilled, answered: true,
		tokens: clamp32(expected)})
}

// Inherited returns the backend of a live pin that an earlier daemon left for an address which this one has not served
// yet, or 0. As the home of a session that is not known it keeps sessions where they were across a restart. It is a hint:
// the session may be another one.
func (p *Pins) Inherited(client, local netip.AddrPort) fleet.ID {
	key := pinKey(client, local)
	if !p.ours(key) {
		return 0
	}
	s := p.stripe(key.Client)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.addrs[key] != nil {
		return 0
	}
	if pin, live := p.o.Table.Get(key); live && !pin.Static {
		return pin.Backend
	}
	return 0
}

// Forget removes the pins of a backend that left, went down or is drained, and its place as a home. It is called after
// the backend has stopped being eligible; what Offer does at the same moment is covered either way. It must be called
// for one that left, whose ID may pass to another; for the others it only tidies up, since the kernel checks the state
// and Offer does. An error means that some pins are still in the table.
func (p *Pins) Forget(b *fleet.Backend) error {
	var errs []error
	for i := range p.stripes {
		s := &p.stripes[i]
		s.mu.Lock()
		for _, a := range s.addrs {
			n := len(a.members)
			a.members = slices.DeleteFunc(a.members, func(m member) bool { return m.home == b.ID() })
			if len(a.members) == n {
				continue
			}
			if pin, _ := p.o.Table.Get(a.key); pin.Backend == b.ID() {
				errs = append(errs, p.remove(a.key, pin))
			}
		}
		s.mu.Unlock()
	}
	return errors.Join(errs...)
}

// Unpin removes the client address's pins and all that is known of its sessions, at every VIP that it was seen at and
// at those given (for pins that an earlier daemon left). Static pins stay.
func (p *Pins) Unpin(client netip.Addr, vips ...netip.AddrPort) error {
	client = PinKey{Client: client}.Normal().Client
	s := p.stripe(client)
	s.mu.Lock()
	defer s.mu.Unlock()
	var keys []PinKey
	for key, a := range s.addrs {
		if key.Client == client {
			keys = append(keys, key)
			s.drop(a)
		}
	}
	for _, v := range vips {
		keys = append(keys, PinKey{client, v}.Normal())
	}
	var errs []error
	for _, key := range keys {
		if pin, _ := p.o.Table.Get(key); pin.Backend != 0 {
			errs = append(errs, p.remove(key, pin))
		}
	}
	return errors.Join(errs...)
}

// List returns what is known of each address, in the order of addresses.
func (p *Pins) List() []PinInfo {
	var list []PinInfo
	now, idle := p.now(), p.lease.Idle
	for i := range p.stripes {
		s := &p.stripes[i]
		s.mu.Lock()
		for key, a := range s.addrs {
			pin, live := p.o.Table.Get(key)
			info := PinInfo{PinKey: key, Pin: pin, Live: live, Seen: now - a.seen}
			var first, pinned fleet.ID
			if live && !pin.Static && !a.lost(pin.Backend) {
				pinned = pin.Backend
			}
			for _, m := range a.members {
				if m.lost() || !m.recent(now, idle, pinned) {
					continue
				}
				info.Sessions += int(m.count)
				info.Mixed = info.Mixed || first != 0 && m.home != first
				first = m.home
			}
			list = append(list, info)
		}
		s.mu.Unlock()
	}
	slices.SortFunc(list, func(a, b PinInfo) int {
		if c := a.Client.Compare(b.Client); c != 0 {
			return c
		}
		return a.VIP.Compare(b.VIP)
	})
	return list
}

// Stats returns the counts.
func (p *Pins) Stats() PinStats {
	st := PinStats{Written: p.written.Load(), Removed: p.removed.Load(), Mixed: p.mixed.Load(), Errors: p.failed.Load()}
	for i := range p.stripes {
		s := &p.stripes[i]
		s.mu.Lock()
		st.Addresses += len(s.addrs)
		s.mu.Unlock()
	}
	return st
}

// served is one call of Seen or Offer.
type served struct {
	client, local netip.AddrPort
	key           Key
	backend       *fleet.Backend
	spilled       bool
	answered      bool // Offer: may pin
	tokens        uint32
}

func (p *Pins) offer(r served) bool {
	key := pinKey(r.client, r.local)
	if r.backend == nil || !p.ours(key) {
		return false
	}
	set := &p.lease
	s := p.stripe(key.Client)
	s.mu.Lock()
	defer s.mu.Unlock()
	now := p.now()
	p.retire(s, now, set.Idle)

	pin, live := p.o.Table.Get(key)
	a := p.address(s, key, now)
	if a == nil {
		return false
	}
	if pin.Static {
		a.prune(now, set.Idle, 0)
		a.record(r, 0, now)
		return set.handoff && live && r.answered && !r.spilled && pin.Backend == r.backend.ID()
	}
	if pin.Backend == r.backend.ID() && pin.Generation != 0 && pin.Generation != r.backend.Generation() {
		live = false // void for the kernel too
	}
	// A home that takes no work is nobody's home, and its pin is void for the kernel too. Its sessions will find a new
	// one, and the first that does leads the others there.
	live = live && !a.lost(pin.Backend)
	pinned := pin.Backend
	if !live {
		pinned = 0
	}
	a.prune(now, set.Idle, pinned)
	if live && !a.has(pin.Backend) {
		// Who is behind this pin is not known: an earlier daemon wrote it, or its sessions moved while the table failed.
		a.members = append(a.members, member{home: pin.Backend, last: now, count: max(pin.Sessions, 1), tokens: pin.Tokens})
	}

	var home fleet.ID
	if r.spilled && r.key != 0 && p.o.Home != nil {
		home = p.o.Home(r.key)
	}
	a.record(r, home, now)

	want, mixed := a.home()
	pinnable := r.answered && !r.spilled && r.key != 0 && !mixed && want == r.backend.ID() && p.steerable(r.backend)
	switch {
	case live && !mixed && pin.Backend == want && pinnable:
		// A client that comes again and again without using its pin is one that the kernel cannot see: on this host,
		// or behind an interface without the program. Asking it to reconnect would help nobody.
		if pin.Used != a.used {
			a.used, a.unused, a.looked = pin.Used, 0, now
		} else if a.unused < unusedMax && now-a.looked >= unusedLook {
			a.unused, a.looked = a.unused+1, now
		}
		return p.keep(a, pin, r.backend, set) && set.handoff && a.unused < unusedMax
	case pinnable:
		return p.write(a, pin, r.backend, set) && set.handoff
	case live && !mixed && pin.Backend == want && (want != r.backend.ID() || p.steerable(r.backend)):
		return false // a request that does not pin met a pin that still holds
	}
	if pin.Backend != 0 {
		if p.remove(key, pin) == nil && mixed && live {
			p.mixed.Add(1)
		}
		if live {
			// The kernel may have served them until now.
			for i := range a.members {
				if a.members[i].home == pin.Backend {
					a.members[i].last = now
				}
			}
		}
	}
	return false
}

// keep leaves a live pin and its lease as they are, but tells the kernel of more or fewer sessions, and of a charge that
// is off by more than a quarter.
func (p *Pins) keep(a *address, pin Pin, b *fleet.Backend, set *leaseSettings) bool {
	sessions, tokens := a.totals()
	b.NotePin(int64(tokens))
	diff := int64(tokens) - int64(pin.Tokens)
	if sessions == pin.Sessions && 4*max(diff, -diff) <= int64(pin.Tokens) {
		return true
	}
	err := p.o.Table.Touch(a.key, Pin{Backend: b.ID(), Generation: b.Generation(), Sessions: sessions, Tokens: tokens})
	if err == nil {
		return true
	}
	if !errors.Is(err, ErrNoPin) {
		p.failed.Add(1)
	}
	return p.write(a, pin, b, set) // the lease may have ended since Get
}

// write puts a new pin in the table. It returns true if it is there and the backend still takes work: one that stopped
// to before the lock was taken is seen here, one that stops later is followed by Forget.
func (p *Pins) write(a *address, old Pin, b *fleet.Backend, set *leaseSettings) bool {
	sessions, tokens := a.totals()
	b.NotePin(int64(tokens)) // before the kernel can ask
	pin := Pin{Backend: b.ID(), Generation: b.Generation(), Expires: set.Max, Tokens: tokens,
		Connections: set.Connections, Sessions: sessions}
	if err := p.o.Table.Put(a.key, pin); err != nil {
		p.failed.Add(1)
		if old.Backend != 0 {
			_ = p.remove(a.key, old) // counted; what is left is met again by the next call
		}
		return false
	}
	p.written.Add(1)
	if !p.steerable(b) {
		_ = p.remove(a.key, pin) // as above
		return false
	}
	return true
}

func (p *Pins) remove(key PinKey, pin Pin) error {
	if pin.Static {
		return nil
	}
	if err := p.o.Table.Delete(key); err != nil {
		p.failed.Add(1)
		return fmt.Errorf("remove pin of %s: %w", key.Client, err)
	}
	p.removed.Add(1)
	return nil
}

func (p *Pins) steerable(b *fleet.Backend) bool { return b.Eligible() && p.o.Steerable(b) }

func (p *Pins) ours(k PinKey) bool {
	return k.Client.IsValid() && k.VIP.IsValid() && p.o.IsVIP(k.VIP) && !p.o.Skip(k.Client)
}

// now is monotonic, so a step of the wall clock ages nobody.
func (p *Pins) now() time.Duration { return p.o.Now().Sub(p.start) }

// stripe is chosen by the client's address alone, so that all its VIPs are under one lock.
func (p *Pins) stripe(client netip.Addr) *pinStripe {
	return &p.stripes[maphash.Comparable(p.seed, client)%pinStripes]
}

func pinKey(client, local netip.AddrPort) PinKey { return PinKey{client.Addr(), local}.Normal() }
