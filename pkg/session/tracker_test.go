// SPDX-License-Identifier: Apache-2.0

package session_test

import (
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/session"
)

func TestTrackerHomes(t *testing.T) {
	f, b := newBackends(t, 3)
	c := newClock()
	tr := session.NewTracker(session.TrackerOptions{Idle: time.Minute, Now: c.Now})
	home := func(k session.Key, want *fleet.Backend) {
		t.Helper()
		var id fleet.ID
		if want != nil {
			id = want.ID()
		}
		if got := tr.Home(k); got != id {
			t.Errorf("home of session %d is %d, want %d", k, got, id)
		}
	}
	home(1, nil)
	tr.Assign(1, b[0], false)
	tr.Assign(2, b[1], false)
	tr.Assign(0, b[1], false) // no session
	tr.Assign(3, b[2], true)  // spilled: no home
	tr.Assign(4, nil, false)
	home(0, nil)
	home(1, b[0])
	home(2, b[1])
	home(3, nil)
	tr.Assign(1, b[2], true)
	home(1, b[0])
	tr.Assign(1, b[2], false)
	home(1, b[2])
	if n := tr.Len(); n != 2 {
		t.Errorf("%d sessions, want 2", n)
	}

	// Each look keeps it; idle ends it.
	for range 5 {
		c.add(59 * time.Second)
		home(1, b[2])
	}
	home(2, nil)
	c.add(time.Minute)
	home(1, nil)

	// A backend that leaves is nobody's home, and neither is its successor with the same ID.
	tr.Assign(5, b[0], false)
	tr.Assign(6, b[2], false)
	applyBackends(t, f, 2)
	tr.Forget(b[2].ID())
	home(5, b[0])
	home(6, nil)
	tr.Assign(7, b[2], false) // a late one
	home(7, nil)
	applyBackends(t, f, 3)
	home(6, nil)
	back := f.Backends()[2]
	tr.Assign(6, back, false)
	home(6, back)
}

func TestTrackerExpected(t *testing.T) {
	c := newClock()
	tr := session.NewTracker(session.TrackerOptions{Idle: time.Minute, Now: c.Now})
	for _, turn := range []struct{ prompt, output, want int64 }{
		{1000, 100, 1200},
		{1300, 100, 1500},
		{1500, 500, 2200}, // mean 100 -> 200
		{-5, -5, 150},     // what cannot be is 0; mean 200 -> 150
	} {
		tr.Observe(1, turn.prompt, turn.output)
		if got := tr.Expected(1); got != turn.want {
			t.Errorf("after a prompt of %d and an answer of %d: %d expected, want %d", turn.prompt, turn.output, got, turn.want)
		}
	}
	tr.Observe(0, 1000, 100)
	if got := tr.Output(1); got != 150 {
		t.Errorf("mean answer of %d tokens, want 150", got)
	}
	if tr.Output(0) != 0 || tr.Output(99) != 0 {
		t.Error("a session that was never seen has answers")
	}
	if tr.Expected(0) != 0 || tr.Expected(99) != 0 {
		t.Error("tokens are expected of a session that is not known")
	}
	c.add(time.Minute)
	if got := tr.Expected(1); got != 0 {
		t.Errorf("an idle session: %d expected", got)
	}
}

// TestTrackerModel compares with a plain map, for a tracker with room for everything.
func TestTrackerModel(t *testing.T) {
	_, b := newBackends(t, 4)
	rapid.Check(t, func(t *rapid.T) {
		type entry struct {
			home fleet.ID
			last time.Time
		}
		c, model := newClock(), map[session.Key]entry{}
		tr := session.NewTracker(session.TrackerOptions{Idle: time.Minute, Now: c.Now})
		known := func(k session.Key) bool { return c.Now().Sub(model[k].last) < time.Minute }
		t.Repeat(map[string]func(*rapid.T){
			"assign": func(t *rapid.T) {
				k := session.Key(rapid.Uint64Range(1, 12).Draw(t, "key"))
				i, spilled := rapid.IntRange(0, 3).Draw(t, "backend"), rapid.Bool().Draw(t, "spilled")
				tr.Assign(k, b[i], spilled)
				e := model[k]
				if !known(k) {
					e = entry{}
				}
				if !spilled {
					e.home, e.last = b[i].ID(), c.Now()
				} else if known(k) {
					e.last = c.Now()
				}
				model[k] = e
			},
			"home": func(t *rapid.T) {
				k := session.Key(rapid.Uint64Range(1, 12).Draw(t, "key"))
				want := fleet.ID(0)
				if known(k) {
					want = model[k].home
					model[k] = entry{model[k].home, c.Now()}
				}
				if got := tr.Home(k); got != want {
					t.Fatalf("home of %d is %d, want %d", k, got, want)
				}
			},
			"forget": func(t *rapid.T) {
				id := b[rapid.IntRange(0, 3).Draw(t, "backend")].ID()
				tr.Forget(id)
				for k, e := range model {
					if e.home == id {
						model[k] = entry{0, e.last}
					}
				}
			},
			"wait": func(t *rapid.T) { c.add(time.Duration(rapid.IntRange(1, 40).Draw(t, "s")) * time.Second) },
		})
	})
}

// TestTrackerBounded: a flood of sessions that come once leaves the ones in use alone and the memory flat.
func TestTrackerBounded(t *testing.T) {
	_, b := newBackends(t, 1)
	const limit = 3200
	tr := session.NewTracker(session.TrackerOptions{Max: limit})
	r := rand.New(rand.NewPCG(1, 1))
	keep := make([]session.Key, 20)
	for i := range keep {
		keep[i] = session.Key(r.Uint64() | 1)
		tr.Assign(keep[i], b[0], false)
	}
	flood := func(n int) {
		for i := range n {
			k := session.Key(r.Uint64() | 1)
			tr.Assign(k, b[0], false)
			tr.Observe(k, 100, 10)
			if i%1000 == 0 {
				for _, k := range keep {
					if tr.Home(k) == 0 {
						t.Fatal("a session in use was forgotten")
					}
				}
			}
		}
	}
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	flood(20_000)
	before := heap()
	flood(200_000)
	if after := heap(); after > before+before/4+1<<20 {
		t.Errorf("the heap grew from %d to %d bytes", before, after)
	}
	if n := tr.Len(); n > limit+32 || n < limit/2 {
		t.Errorf("%d sessions, bound %d", n, limit)
	}
	runtime.KeepAlive(tr)
}

// TestTrackerRetires: idle sessions go as others come, without a goroutine.
func TestTrackerRetires(t *testing.T) {
	_, b := newBackends(t, 1)
	c := newClock()
	tr := session.NewTracker(session.TrackerOptions{Idle: time.Minute, Now: c.Now})
	r := rand.New(rand.NewPCG(2, 1))
	for range 5000 {
		tr.Assign(session.Key(r.Uint64()|1), b[0], false)
	}
	c.add(2 * time.Minute)
	for range 6000 {
		tr.Home(session.Key(r.Uint64() | 1))
	}
	if n := tr.Len(); n != 0 {
		t.Errorf("%d idle sessions are left", n)
	}
}

func TestTrackerConcurrent(t *testing.T) {
	_, b := newBackends(t, 4)
	tr := session.NewTracker(session.TrackerOptions{Max: 200})
	var wg sync.WaitGroup
	for g := range uint64(8) {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(g, 1))
			for range 3000 {
				k := session.Key(1 + r.Uint64N(1000)<<54)
				switch r.IntN(5) {
				case 0:
					tr.Assign(k, b[r.IntN(4)], r.IntN(3) == 0)
				case 1:
					tr.Observe(k, 100, 10)
				case 2:
					tr.Expected(k)
				case 3:
					tr.Forget(b[r.IntN(4)].ID())
				default:
					if id := tr.Home(k); id > b[3].ID() {
						t.Errorf("home %d", id)
					}
				}
			}
		})
	}
	wg.Wait()
}

func TestTrackerAllocs(t *testing.T) {
	_, b := newBackends(t, 1)
	tr := session.NewTracker(session.TrackerOptions{})
	if a := testing.AllocsPerRun(100, func() {
		tr.Assign(7, b[0], false)
		tr.Observe(7, 10, 10)
		tr.Home(7)
		tr.Expected(7)
	}); a != 0 {
		t.Errorf("a known session costs %v allocations", a)
	}
}
