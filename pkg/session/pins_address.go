// SPDX-License-Identifier: Apache-2.0

package session

import (
	"math"
	"slices"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

// maxMembers bounds the sessions of one address that are told apart. Beyond it they count for their backends.
const maxMembers = 64

// pinStripe is the addresses whose clients hash to it. Its lock is held across calls of the table: a call for an
// address is one step.
type pinStripe struct {
	mu    sync.Mutex
	addrs map[PinKey]*address
	lru   address // sentinel; next is the most recently used
}

// address is what the front end knows of one PinKey.
type address struct {
	key        PinKey
	members    []member
	seen       time.Duration // by the front end
	checked    time.Duration // by retire
	used       uint32        // connections of the pin, when the front end looked last
	unused     uint8         // looks in a row, a second apart or more, that found a live pin as unused as before
	looked     time.Duration
	prev, next *address
}

// member is one session of an address; with key 0 it is all that cannot be told apart and went to one backend.
type member struct {
	key    Key
	home   fleet.ID
	at     *fleet.Backend // the home; nil if only its ID is known
	count  uint32         // sessions that it stands for
	tokens uint32         // expected of the next turn; 0 = not known
	last   time.Duration
}

// recent reports whether the session still counts: seen lately, or in the care of a live pin to pinned.
func (m *member) recent(now, idle time.Duration, pinned fleet.ID) bool {
	return now-m.last < idle || m.home == pinned
}

// lost reports whether the session's home takes no work any more.
func (m *member) lost() bool { return m.at != nil && !m.at.Eligible() }

// lost reports whether the backend is known to take no work any more.
func (a *address) lost(id fleet.ID) bool {
	for i := range a.members {
		if m := &a.members[i]; m.home == id && m.lost() {
			return true
		}
	}
	return false
}

// prune drops the sessions that count no more.
func (a *address) prune(now, idle time.Duration, pinned fleet.ID) {
	a.members = slices.DeleteFunc(a.members, func(m member) bool { return m.lost() || !m.recent(now, idle, pinned) })
}

// record enters the request. home is that of a spilled one, if it is known.
func (a *address) record(r served, home fleet.ID, now time.Duration) {
	if !r.spilled {
		home = 0
		if r.backend.Eligible() {
			home = r.backend.ID()
		}
	}
	i := a.index(r.key, home)
	switch {
	case r.spilled && r.key == 0:
		return
	case r.spilled && home == 0: // a sign of life, no more
		if i >= 0 {
			a.members[i].last = now
		}
		return
	case home == 0: // its next turn goes elsewhere: it has no home
		if i >= 0 && r.key != 0 {
			a.members = append(a.members[:i], a.members[i+1:]...)
		}
		return
	}
	if i < 0 {
		key := r.key
		if len(a.members) >= maxMembers {
			key = 0
			i = a.index(0, home)
		}
		if i < 0 {
			a.members = append(a.members, member{key: key, count: 1})
			i = len(a.members) - 1
		}
	}
	m := &a.members[i]
	if m.home != home {
		m.at = nil
	}
	m.home, m.last = home, now
	if !r.spilled {
		m.at = r.backend
	}
	if r.tokens != 0 {
		m.tokens = r.tokens
	}
}

func (a *address) index(k Key, home fleet.ID) int {
	for i := range a.members {
		if m := &a.members[i]; m.key == k && (k != 0 || m.home == home) {
			return i
		}
	}
	return -1
}

func (a *address) has(home fleet.ID) bool {
	for i := range a.members {
		if a.members[i].home == home {
			return true
		}
	}
	return false
}

// home returns the one home of all members, 0 if there are none, or that they disagree.
func (a *address) home() (home fleet.ID, mixed bool) {
	for i := range a.members {
		if m := &a.members[i]; home == 0 {
			home = m.home
		} else if m.home != home {
			return 0, true
		}
	}
	return home, false
}

// totals returns how many sessions there are, at least 1, and the mean of what their next turns are expected to bring.
func (a *address) totals() (sessions, tokens uint32) {
	var n, sum, known int64
	for i := range a.members {
		m := &a.members[i]
		n += int64(m.count)
		if m.tokens != 0 {
			sum += int64(m.tokens)
			known++
		}
	}
	if known > 0 {
		tokens = clamp32((sum + known - 1) / known)
	}
	return max(clamp32(n), 1), tokens
}

// address returns the state of the key, now the most recently used. It is nil if there was no room and none could be
// made, because the table does not let go of a pin.
func (p *Pins) address(s *pinStripe, key PinKey, now time.Duration) *address {
	a := s.addrs[key]
	if a == nil {
		if len(s.addrs) >= p.max {
			last := s.lru.prev
			if pin, _ := p.o.Table.Get(last.key); pin.Backend != 0 && p.remove(last.key, pin) != nil {
				return nil
			}
			s.drop(last)
		}
		a = &address{key: key}
		s.addrs[key] = a
	} else {
		a.unlink()
	}
	s.pushFront(a)
	a.seen, a.checked = now, now
	return a
}

// retire forgets the least recently used address once its sessions are idle, unless a pin that lives takes care of them.
func (p *Pins) retire(s *pinStripe, now, idle time.Duration) {
	a := s.lru.prev
	if a == &s.lru || now-a.checked < idle {
		return
	}
	if _, live := p.o.Table.Get(a.key); !live {
		s.drop(a)
		return
	}
	a.unlink()
	s.pushFront(a)
	a.checked = now
}

func (s *pinStripe) drop(a *address) {
	a.unlink()
	delete(s.addrs, a.key)
}

func (s *pinStripe) pushFront(a *address) {
	a.prev, a.next = &s.lru, s.lru.next
	a.next.prev, s.lru.next = a, a
}

func (a *address) unlink() {
	a.prev.next, a.next.prev = a.next, a.prev
}

func clamp32(n int64) uint32 { return uint32(min(max(n, 0), math.MaxUint32)) }
