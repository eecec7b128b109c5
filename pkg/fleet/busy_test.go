// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"slices"
	"sync"
	"testing"
	"time"
)

// A busy backend gets nothing while another may take it, and everything is as before when its time is over.
func TestBusyBackendsAreLeftOut(t *testing.T) {
	var now time.Duration
	f := New(Options{Now: func() time.Duration { return now }})
	if err := f.Apply(specs(3)); err != nil {
		t.Fatal(err)
	}
	for _, b := range f.Backends() {
		b.SetHealth(HealthUp)
	}
	var seen []string
	full := false
	f.Pool("p").chooser = pickFunc(func(q *Query, c []Candidate) (int, Reason) {
		seen, full = nil, q.HomeFull
		for i := range c {
			seen = append(seen, c[i].Backend.Name())
		}
		return 0, "first"
	})
	b := f.Backends()
	check := func(what string, q Query, wantFull bool, want ...string) {
		t.Helper()
		tk, err := f.Pool("p").Take(&q)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		tk.Release()
		if !slices.Equal(seen, want) || full != wantFull {
			t.Errorf("%s: candidates %v, home full %v; want %v, %v", what, seen, full, want, wantFull)
		}
	}
	check("none", Query{}, false, "b0", "b1", "b2")
	b[1].Busy(2 * time.Second)
	b[1].Busy(time.Second) // the longer one stays
	now = 1500 * time.Millisecond
	check("one", Query{Home: b[1].ID()}, true, "b0", "b2")
	check("another one's home", Query{Home: b[0].ID()}, false, "b0", "b2")
	check("the others were tried", Query{Home: b[1].ID(), Exclude: []ID{b[0].ID(), b[2].ID()}}, false, "b1")
	b[0].Busy(time.Second)
	b[2].SetHealth(HealthDown)
	check("all that are up", Query{Home: b[1].ID()}, false, "b0", "b1")
	b[2].SetHealth(HealthUp)
	now = 2 * time.Second
	check("one's time is over", Query{}, false, "b1", "b2")
	now = 3 * time.Second
	check("over", Query{}, false, "b0", "b1", "b2")
}

// That this host's only backend is busy does not make it the only candidate.
func TestBusyLocalBackend(t *testing.T) {
	f := New(Options{})
	s := specs(2)
	s[0].Backends[0].Local = true
	if err := f.Apply(s); err != nil {
		t.Fatal(err)
	}
	for _, b := range f.Backends() {
		b.SetHealth(HealthUp)
	}
	f.Backends()[0].Busy(time.Minute)
	tk, err := f.Pool("p").Take(&Query{LocalOnly: true})
	if err != nil || tk.Backend().Name() != "b1" {
		t.Fatalf("%v, %v", tk, err)
	}
	tk.Release()
}

// However the backends become busy meanwhile, a pick finds one.
func TestBusyLeavesACandidate(t *testing.T) {
	f := newFleet(t, 4)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for _, b := range f.Backends() {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					b.Busy(time.Microsecond)
				}
			}
		})
	}
	for range 5000 {
		tk, err := f.Pool("p").Take(&Query{PromptTokens: 1})
		if err != nil {
			t.Error(err)
			break
		}
		tk.Release()
	}
	close(stop)
	wg.Wait()
	checkZero(t, f)
}
