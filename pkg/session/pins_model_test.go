// SPDX-License-Identifier: Apache-2.0

package session_test

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/session"
)

// who is a session, or all requests without one that went to a backend.
type who struct {
	key  session.Key
	anon fleet.ID
}

type sight struct {
	home fleet.ID
	last time.Time
	at   *fleet.Backend // nil: behind a pin of an earlier daemon
}

func (s sight) lost() bool { return s.at != nil && !s.at.Eligible() }

// pinModel is the mixed-address rule, naively: what was seen of each session of one address.
type pinModel struct {
	seen map[who]sight
}

// recent returns the homes of all sessions that count.
func (m *pinModel) recent(now time.Time, pinned fleet.ID) map[fleet.ID]bool {
	homes := map[fleet.ID]bool{}
	for w, s := range m.seen {
		if (now.Sub(s.last) < time.Minute || s.home == pinned) && !s.lost() {
			homes[s.home] = true
		} else {
			delete(m.seen, w)
		}
	}
	return homes
}

func TestPinsModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		r := newRig(t, nil)
		restart := func() {
			r.pins = session.NewPins(session.PinsOptions{Table: r.table, Handoff: true, Now: r.clock.Now,
				Lease: session.Lease{Idle: time.Minute, Max: 5 * time.Minute, Connections: 10}})
		}
		restart()
		m := &pinModel{seen: map[who]sight{}}
		pinned := func() fleet.ID {
			if p, live := r.table.Get(key); live {
				return p.Backend
			}
			return 0
		}
		request := func(rt *rapid.T, answered bool) {
			k := session.Key(rapid.Uint64Range(0, 3).Draw(rt, "key"))
			b := r.b[rapid.IntRange(0, 2).Draw(rt, "backend")]
			spilled := rapid.IntRange(0, 4).Draw(rt, "spilled") == 0
			now, before := r.clock.Now(), pinned()
			for _, s := range m.seen {
				if s.home == before && s.lost() {
					before = 0 // the kernel ignores it
				}
			}
			m.recent(now, before)
			inherited := before != 0
			for _, s := range m.seen {
				inherited = inherited && s.home != before
			}
			if inherited {
				m.seen[who{anon: before}] = sight{before, now, nil}
			}
			w := who{key: k}
			if k == 0 {
				w.anon = b.ID()
			}
			old, known := m.seen[w]
			switch {
			case spilled && k != 0 && known:
				m.seen[w] = sight{old.home, now, old.at}
			case spilled:
			case !b.Eligible() && k != 0:
				delete(m.seen, w)
			case b.Eligible():
				m.seen[w] = sight{b.ID(), now, b}
			}
			homes := m.recent(now, before)

			var handoff bool
			if answered {
				handoff = r.pins.Offer(client, vip, k, b, 10, spilled)
			} else {
				r.pins.Seen(client, vip, k, b, spilled)
			}

			after := pinned()
			can := answered && !spilled && k != 0 && b.Eligible()
			switch {
			case len(homes) > 1 && after != 0:
				rt.Fatalf("pinned to %d, homes %v", after, homes)
			case after != 0 && !homes[after]:
				rt.Fatalf("pinned to %d, which is nobody's home (%v)", after, homes)
			case len(homes) == 1 && can && after != b.ID():
				rt.Fatalf("all homes are %d, pinned to %d", b.ID(), after)
			case !can && before != after && after != 0:
				rt.Fatalf("a request that must not pin pinned to %d", after)
			case len(homes) == 1 && homes[before] && b.Eligible() && after != before:
				rt.Fatalf("the pin to %d was removed without need", before)
			case handoff != (len(homes) == 1 && can):
				rt.Fatalf("handoff %v, homes %v, may pin %v", handoff, homes, can)
			}
			if before != 0 && after != before {
				for w, s := range m.seen {
					if s.home == before {
						m.seen[w] = sight{before, now, s.at}
					}
				}
			}
		}
		rt.Repeat(map[string]func(*rapid.T){
			"answer":  func(rt *rapid.T) { request(rt, true) },
			"answer2": func(rt *rapid.T) { request(rt, true) },
			"request": func(rt *rapid.T) { request(rt, false) },
			"wait":    func(rt *rapid.T) { r.clock.add(time.Duration(rapid.IntRange(1, 45).Draw(rt, "s")) * time.Second) },
			// The kernel serves the address for a while.
			"steer": func(rt *rapid.T) {
				for range rapid.IntRange(1, 3).Draw(rt, "connections") {
					r.table.Use(key)
					r.clock.add(time.Duration(rapid.IntRange(1, 45).Draw(rt, "s")) * time.Second)
				}
			},
			"drain": func(rt *rapid.T) {
				r.b[rapid.IntRange(0, 2).Draw(rt, "backend")].SetAdmin(fleet.AdminDrain)
			},
			"drain, forget": func(rt *rapid.T) {
				b := r.b[rapid.IntRange(0, 2).Draw(rt, "backend")]
				b.SetAdmin(fleet.AdminDrain)
				known := false
				for w, s := range m.seen {
					if s.home == b.ID() {
						known = true
						delete(m.seen, w)
					}
				}
				if err := r.pins.Forget(b); err != nil {
					rt.Fatal(err)
				}
				if known && pinned() == b.ID() {
					rt.Fatal("pinned to a backend that is drained")
				}
			},
			"ready":   func(rt *rapid.T) { r.b[rapid.IntRange(0, 2).Draw(rt, "backend")].SetAdmin(fleet.AdminNone) },
			"restart": func(*rapid.T) { restart(); m.seen = map[who]sight{} },
			"unpin": func(rt *rapid.T) {
				if err := r.pins.Unpin(client.Addr(), vip); err != nil || pinned() != 0 {
					rt.Fatal("unpin: still pinned", err)
				}
				m.seen = map[who]sight{}
			},
		})
	})
}
