// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// timed is a fleet on a clock of the test's.
func timed(t *testing.T, n int) (*Fleet, *Pool, *time.Duration) {
	t.Helper()
	now := new(time.Duration)
	f := New(Options{Now: func() time.Duration { return *now }})
	if err := f.Apply(specs(n)); err != nil {
		t.Fatal(err)
	}
	for _, b := range f.Backends() {
		b.SetHealth(HealthUp)
	}
	return f, f.Pools()[0], now
}

// serve sends prompts one after the other to each backend, which takes base plus tokens/rate for each, and perToken for answers.
func serve(t *testing.T, p *Pool, now *time.Duration, rates []float64, rounds int, r *rand.Rand) {
	t.Helper()
	for range rounds {
		for i, rate := range rates {
			var others []ID
			for j, b := range p.Backends() {
				if j != i {
					others = append(others, b.ID())
				}
			}
			prompt := 200 + r.Int64N(8000)
			tk, err := p.Take(&Query{PromptTokens: prompt, OutputTokens: 50, Streams: true, Exclude: others})
			if err != nil {
				t.Fatal(err)
			}
			*now += time.Duration((0.05 + float64(prompt)/rate) * (0.9 + 0.2*r.Float64()) * 1e9)
			tk.FirstByte()
			for range 20 {
				*now += 20 * time.Millisecond
				tk.Decoded(1)
			}
			tk.Release()
		}
	}
}

func TestSpeedIsLearned(t *testing.T) {
	f, p, now := timed(t, 3)
	serve(t, p, now, []float64{6000, 6000, 20_000}, 150, rand.New(rand.NewPCG(1, 1)))
	for i, want := range []float64{6000, 6000, 20_000} {
		s := f.Backends()[i].Speed()
		// What routing compares is the time of a usual prompt.
		got, real := float64(s.PrefillBase)+4000/float64(s.PrefillRate), 0.05+4000/want
		if got < real*0.8 || got > real*1.25 {
			t.Errorf("backend %d: 4,000 tokens take %.3f s by what was learned, want %.3f (%+v)", i, got, real, s)
		}
		if d := float64(s.DecodeBase); math.Abs(d-0.02) > 0.006 {
			t.Errorf("backend %d: a token takes %.4f s, want about 0.02", i, d)
		}
	}
	if a, b := f.Backends()[0].Speed(), f.Backends()[1].Speed(); math.Abs(float64(a.PrefillRate/b.PrefillRate-1)) > 0.1 {
		t.Errorf("equal backends have the speeds %v and %v", a.PrefillRate, b.PrefillRate)
	}
}

func TestOneBadSampleTurnsNothingOver(t *testing.T) {
	f, p, now := timed(t, 1)
	serve(t, p, now, []float64{10_000}, 60, rand.New(rand.NewPCG(2, 2)))
	before := f.Backends()[0].Speed().PrefillRate
	tk, err := p.Take(&Query{PromptTokens: 100, Streams: true})
	if err != nil {
		t.Fatal(err)
	}
	*now += 10 * time.Minute
	tk.FirstByte()
	tk.Release()
	serve(t, p, now, []float64{10_000}, 1, rand.New(rand.NewPCG(3, 3)))
	if after := f.Backends()[0].Speed().PrefillRate; after < before*0.85 {
		t.Errorf("a request that hung took the speed from %v to %v", before, after)
	}
}

func TestQueueIsWhatIsNotYetComputed(t *testing.T) {
	f, p, now := timed(t, 1)
	b := f.Backends()[0]
	var seen Candidate
	if err := f.Apply([]PoolSpec{{Name: "p", Backends: specs(1)[0].Backends, Chooser: pickFunc(func(_ *Query, c []Candidate) (int, Reason) {
		seen = c[0]
		return 0, "x"
	})}}); err != nil {
		t.Fatal(err)
	}
	take := func(prompt int64, streams bool) *Ticket {
		t.Helper()
		tk, err := p.Take(&Query{PromptTokens: prompt, OutputTokens: 10, Streams: streams})
		if err != nil {
			t.Fatal(err)
		}
		return tk
	}
	first, second := take(5000, true), take(3000, true)
	if n, tokens := b.Waiting(); n != 2 || tokens != 8000 {
		t.Fatalf("%d requests and %d tokens wait", n, tokens)
	}
	// DefaultSpeed: 10,000 tokens/s after 40 ms. The first stream's own tokens count down, those behind it do not.
	*now = 240 * time.Millisecond
	take(1, true).Release()
	if seen.Queued < 5900 || seen.Queued > 6100 || seen.Waiting != 2 {
		t.Errorf("after 0.2 s of work %d tokens and %d requests wait, want 6000 and 2", seen.Queued, seen.Waiting)
	}
	*now = 10 * time.Second
	take(1, true).Release()
	if seen.Queued != 3000 {
		t.Errorf("%d tokens wait behind a stream that has not begun, want 3000", seen.Queued)
	}
	first.FirstByte()
	first.FirstByte()
	second.Release()
	first.Release()
	if n, tokens := b.Waiting(); n != 0 || tokens != 0 {
		t.Errorf("%d requests and %d tokens are left", n, tokens)
	}
	// Answers that come whole say nothing when the prefill ends: time does.
	x, y := take(5000, false), take(3000, false)
	*now += time.Second
	take(1, true).Release()
	if seen.Queued != 0 || seen.Waiting != 2 || seen.Context != 8020 {
		t.Errorf("after a second %d tokens of whole answers wait, context %d", seen.Queued, seen.Context)
	}
	x.Release()
	y.Release()
	if b.context.Load() != 0 || b.learned.head != nil || b.learned.tail != nil {
		t.Error("something is left of released tickets")
	}
}

func TestGaugesGrowStale(t *testing.T) {
	f, p, now := timed(t, 1)
	var seen Candidate
	if err := f.Apply([]PoolSpec{{Name: "p", Backends: specs(1)[0].Backends, Chooser: pickFunc(func(_ *Query, c []Candidate) (int, Reason) {
		seen = c[0]
		return 0, "x"
	})}}); err != nil {
		t.Fatal(err)
	}
	look := func() {
		t.Helper()
		if _, _, err := p.Explain(&Query{}); err != nil {
			t.Fatal(err)
		}
	}
	if look(); seen.Fresh {
		t.Error("figures that never came are fresh")
	}
	f.Backends()[0].SetGauges(Gauges{Waiting: 3, KVTokens: 1000, At: *now})
	*now += StaleGauges - 1
	if look(); !seen.Fresh || seen.Gauges.Waiting != 3 {
		t.Errorf("fresh %v, %+v", seen.Fresh, seen.Gauges)
	}
	*now += 1
	if look(); seen.Fresh {
		t.Error("old figures are fresh")
	}
}

// held is an index that knows one prompt.
type heldBy struct {
	id      ID
	n       int
	entered []ID
	gone    []ID
}

func (h *heldBy) Held(id ID, _ []uint64) int {
	if id == h.id {
		return h.n
	}
	return 0
}
func (h *heldBy) Enter(id ID, _ []uint64) { h.entered = append(h.entered, id) }
func (h *heldBy) Forget(id ID)            { h.gone = append(h.gone, id) }

func TestIndexFeedsTheChoice(t *testing.T) {
	x := &heldBy{}
	f := New(Options{Index: x})
	var seen []Candidate
	spec := specs(2)
	spec[0].Chooser = pickFunc(func(_ *Query, c []Candidate) (int, Reason) {
		seen = append(seen[:0], c...)
		return 1, "x"
	})
	if err := f.Apply(spec); err != nil {
		t.Fatal(err)
	}
	for _, b := range f.Backends() {
		b.SetHealth(HealthUp)
	}
	x.id, x.n = f.Backends()[1].ID(), 3
	tk, err := f.Pools()[0].Take(&Query{PromptTokens: 350, Blocks: []uint64{1, 2, 3}, BlockTokens: 100})
	if err != nil {
		t.Fatal(err)
	}
	if seen[0].Cached != 0 || seen[1].Cached != 300 || tk.Cached() != 300 {
		t.Errorf("cached %d and %d, ticket %d, want 0, 300, 300", seen[0].Cached, seen[1].Cached, tk.Cached())
	}
	if _, tokens := f.Backends()[1].Waiting(); tokens != 50 || len(x.entered) != 1 || x.entered[0] != x.id {
		t.Errorf("%d tokens wait, entered %v", tokens, x.entered)
	}
	if tk2, err := f.Pools()[0].Take(&Query{PromptTokens: 300, Blocks: []uint64{1, 2, 3}, BlockTokens: 100}); err != nil || tk2.Cached() != 299 {
		t.Errorf("one token is always computed: %d, %v", tk2.Cached(), err)
	}
	if err := f.Apply(specs(1)); err != nil {
		t.Fatal(err)
	}
	if len(x.gone) != 1 || x.gone[0] != x.id {
		t.Errorf("forgotten %v, want %d", x.gone, x.id)
	}
}
