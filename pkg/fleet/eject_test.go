// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"math"
	"slices"
	"testing"
	"time"
)

// ejectWorld is a pool of three backends on a clock of the test's, whose policy notes the candidates and takes the first.
type ejectWorld struct {
	t    *testing.T
	now  time.Duration
	f    *Fleet
	b    []*Backend
	seen []string
}

func newEjectWorld(t *testing.T) *ejectWorld {
	w := &ejectWorld{t: t}
	w.f = New(Options{Now: func() time.Duration { return w.now }})
	s := specs(3)
	s[0].Panic = 0.5
	s[0].Chooser = pickFunc(func(_ *Query, c []Candidate) (int, Reason) {
		w.seen = nil
		for i := range c {
			w.seen = append(w.seen, c[i].Backend.Name())
		}
		return 0, "first"
	})
	if err := w.f.Apply(s); err != nil {
		t.Fatal(err)
	}
	w.b = w.f.Backends()
	for _, b := range w.b {
		b.SetHealth(HealthUp)
	}
	return w
}

func (w *ejectWorld) take(q Query) *Ticket {
	w.t.Helper()
	tk, err := w.f.Pool("p").Take(&q)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(tk.Release)
	return tk
}

func (w *ejectWorld) candidates(what string, want ...string) {
	w.t.Helper()
	w.seen = nil
	w.take(Query{}).Release()
	if !slices.Equal(w.seen, want) {
		w.t.Errorf("%s: candidates %v, want %v", what, w.seen, want)
	}
}

// An ejected backend gets nothing for the hold, and then one request at a time.
func TestEjectedBackendsAreProbedByOneRequest(t *testing.T) {
	w := newEjectWorld(t)
	w.b[0].Eject(10 * time.Second)
	w.b[0].Eject(5 * time.Second) // ends move later only
	w.now = 9 * time.Second
	if w.take(Query{MayProbe: true}).Probe() || w.b[0].Eligible() {
		t.Error("in use before the hold was over")
	}
	w.candidates("held", "b1", "b2")
	w.now = 10 * time.Second
	for _, q := range []Query{{}, {MayProbe: true, Exclude: []ID{w.b[1].ID()}}, {MayProbe: true, LocalOnly: true}} {
		if w.take(q).Probe() {
			t.Errorf("%+v is a probe", q)
		}
	}
	for range 3 { // whatever a probe's end is, it lets the next one try
		probe := w.take(Query{MayProbe: true})
		if !probe.Probe() || probe.Backend() != w.b[0] || probe.Reason() != ReasonProbe {
			t.Fatalf("took %s for %s, not a probe", probe.Backend().Name(), probe.Reason())
		}
		for range 5 {
			if w.take(Query{MayProbe: true}).Probe() {
				t.Error("two probes at a time")
			}
		}
		probe.Release()
		probe.Release()
	}
	w.b[0].Restore()
	w.candidates("restored", "b0", "b1", "b2")
	if in, out := w.b[0].Ejected(); in != 0 || out || !w.b[0].Eligible() {
		t.Errorf("restored, but still out %v for %s", out, in)
	}
}

// With fewer than the configured share left all are used, but never what the checks or the operator took out.
func TestTooManyEjectionsAreOverridden(t *testing.T) {
	w := newEjectWorld(t)
	p := w.f.Pool("p")
	w.b[0].Eject(time.Hour)
	w.candidates("2 of 3 left", "b1", "b2")
	w.b[1].Eject(time.Hour)
	w.candidates("1 of 3 left", "b0", "b1", "b2")
	if !p.Panicking() || !w.b[0].Eligible() {
		t.Error("the pool does not say that it uses ejected backends")
	}
	w.b[0].SetHealth(HealthDown)
	w.candidates("1 of 2 left", "b2")
	w.b[2].SetAdmin(AdminDrain)
	w.candidates("0 of 1 left", "b1")
	w.b[1].SetHealth(HealthDown)
	if _, err := p.Take(&Query{MayProbe: true}); !errors.Is(err, ErrNoBackend) {
		t.Errorf("nothing is up: %v", err)
	}
	w.b[0].SetHealth(HealthUp)
	w.b[0].Restore()
	w.candidates("one restored", "b0")
	if p.Panicking() {
		t.Error("still in panic")
	}
}

// A reload keeps an ejection, and its limit for the kernel is 0.
func TestEjectionSurvivesReload(t *testing.T) {
	w := newEjectWorld(t)
	w.b[2].Eject(time.Hour)
	s := specs(3)
	s[0].Panic = 0.5
	if err := w.f.Apply(s); err != nil {
		t.Fatal(err)
	}
	w.f.UpdateLimits(1.25, 100)
	if w.b[2].Eligible() || w.b[2].Limit() != 0 || w.b[1].Limit() == 0 {
		t.Errorf("eligible %v, limits %d and %d", w.b[2].Eligible(), w.b[2].Limit(), w.b[1].Limit())
	}
	if s[0].Panic = 1; w.f.Apply(s) != nil || !w.b[2].Eligible() {
		t.Error("a changed share is not in force")
	}
}

// A backend that joins others grows into its weight, and is never above its share.
func TestSlowStart(t *testing.T) {
	now := time.Hour
	f := New(Options{Now: func() time.Duration { return now }})
	s := specs(4)
	s[0].SlowStart, s[0].Weighted = 30*time.Second, true
	var c []Candidate
	s[0].Chooser = pickFunc(func(_ *Query, list []Candidate) (int, Reason) { c = slices.Clone(list); return 0, "first" })
	if err := f.Apply(s); err != nil {
		t.Fatal(err)
	}
	b := f.Backends()
	for i := range 3 {
		b[i].SetHealth(HealthUp)
		now += 10 * time.Millisecond
	}
	weights := func() (w [4]float64) {
		tk, err := f.Pool("p").Take(&Query{})
		if err != nil {
			t.Fatal(err)
		}
		tk.Release()
		for _, c := range c {
			w[slices.Index(b, c.Backend)] = math.Round(c.Weight*100) / 100
		}
		return w
	}
	now += 10 * time.Second
	if w := weights(); w != [4]float64{1, 1, 1, 0} {
		t.Errorf("all came up together: weights %v", w)
	}
	now += time.Minute
	b[3].SetHealth(HealthUp)
	for _, tt := range []struct {
		after time.Duration
		want  float64
	}{{0, 0.1}, {3 * time.Second, 0.1}, {15 * time.Second, 0.5}, {25 * time.Second, 0.83}, {30 * time.Second, 1}, {time.Hour, 1}} {
		up := now
		now += tt.after
		if w := weights(); w != [4]float64{1, 1, 1, tt.want} {
			t.Errorf("%s after it came up: weights %v, want %v", tt.after, w, tt.want)
		}
		now = up
	}
	now += time.Minute
	b[0].Eject(time.Second)
	b[0].Restore()
	if w := weights(); w[0] != 0.1 {
		t.Errorf("restored a moment ago: weights %v", w)
	}
	for i := 1; i < 4; i++ {
		b[i].SetHealth(HealthDown)
	}
	if w := weights(); w[0] != 1 {
		t.Errorf("the only one: weights %v", w)
	}
}

// Under a policy without weights the newcomer is a candidate for its share of the requests, and for those of its sessions.
func TestSlowStartWithoutWeights(t *testing.T) {
	now := time.Hour
	f := New(Options{Now: func() time.Duration { return now }})
	s := specs(4)
	s[0].SlowStart = 30 * time.Second
	if err := f.Apply(s); err != nil { // fewest: the newcomer, which is idle, would take everything
		t.Fatal(err)
	}
	b, p := f.Backends(), f.Pool("p")
	p.Seed(1)
	for _, b := range b[:3] {
		b.SetHealth(HealthUp)
	}
	now += time.Minute
	for range 3 {
		if tk, err := p.Take(&Query{PromptTokens: 1000}); err != nil {
			t.Fatal(err)
		} else {
			defer tk.Release()
		}
	}
	b[3].SetHealth(HealthUp)
	share := func(q Query) float64 {
		hits := 0
		for range 1000 {
			q := q
			tk, err := p.Take(&q)
			if err != nil {
				t.Fatal(err)
			}
			if tk.Backend() == b[3] {
				hits++
			}
			tk.Release()
		}
		return float64(hits) / 1000
	}
	if s := share(Query{}); s < 0.05 || s > 0.15 {
		t.Errorf("at first it gets %v of the requests", s)
	}
	if s := share(Query{Home: b[3].ID()}); s != 1 {
		t.Errorf("it gets %v of its own sessions", s)
	}
	now += 15 * time.Second
	if s := share(Query{}); s < 0.4 || s > 0.6 {
		t.Errorf("half way it gets %v of the requests", s)
	}
	now += 15 * time.Second
	if s := share(Query{}); s != 1 {
		t.Errorf("in the end it gets %v of the requests", s)
	}
}
