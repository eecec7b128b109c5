// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"errors"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestStepTime(t *testing.T) {
	// Expected values are computed by hand from the published figures of each profile.
	for _, tc := range []struct {
		profile string
		b       batch
		ms      float64
	}{
		{"llama-3-8b-a100-tp1", batch{decode: 1}, 9.696 + 1.153 + 0.0044},
		{"llama-3-8b-a100-tp1", batch{decode: 12, decodeCtx: 12000}, (9.984+10.128)/2 + 1.153 + 12*0.0044 + 12000*9.183e-05},
		{"llama-3-8b-a100-tp1", batch{prefill: 2048}, 145.568 + 1.153},
		{"llama-3-8b-a100-tp1", batch{prefill: 2048, prefillWork: 2048 * 1024}, 145.568 + 1.153 + 2048*1024*3.361e-06},
		{"llama-3-8b-a100-tp1", batch{prefill: 6144}, 273.568 + 2*(273.568-205.168) + 1.153},
		{"llama-3-8b-h100-tp1", batch{decode: 1}, 5.851 + 1.153 + 0.0044},
		{"llama-3-70b-h100-tp4", batch{decode: 1}, 16.72 + 2.694 + 0.0044},
		{"llama-3-70b-h100-tp4", batch{}, 0},
	} {
		p, err := LookupProfile(tc.profile)
		if err != nil {
			t.Fatal(err)
		}
		got := float64(p.stepTime(tc.b)) / float64(time.Millisecond)
		if math.Abs(got-tc.ms) > 1e-4 {
			t.Errorf("%s %+v: %.4f ms, want %.4f", tc.profile, tc.b, got, tc.ms)
		}
	}
	if _, err := LookupProfile("gpt-9"); !errors.Is(err, ErrUnknownProfile) {
		t.Errorf("unknown profile: %v", err)
	}
	for _, name := range ProfileNames() {
		p := profiles[name]
		if p.Name != name || p.Source == "" || p.KVTokens < 1 || p.DecodeAttnMS <= 0 || p.PrefillAttnMS <= 0 || p.HostStepMS <= 0 {
			t.Errorf("profile %s is incomplete", name)
		}
		for i := 1; i < len(knots); i++ {
			if p.LinearMS[i] < p.LinearMS[i-1] {
				t.Errorf("profile %s falls at %v tokens", name, knots[i])
			}
		}
	}
}

// clock drives an engine on virtual time.
type clock struct {
	t   testing.TB
	e   *Engine
	now time.Duration
}

func newClock(t testing.TB, o Options) *clock {
	t.Helper()
	e, err := NewEngine(o)
	if err != nil {
		t.Fatal(err)
	}
	return &clock{t: t, e: e}
}

func (c *clock) add(prompt, output int, blocks []BlockHash) *Seq {
	c.t.Helper()
	s, err := c.e.Add(c.now, Request{PromptTokens: prompt, OutputTokens: output, Blocks: blocks})
	if err != nil {
		c.t.Fatal(err)
	}
	return s
}

func (c *clock) step() (Step, []Event, bool) {
	st, ok := c.e.Begin(c.now)
	if !ok {
		return st, nil, false
	}
	if st.End < c.now {
		c.t.Fatalf("step ends at %s, before now (%s)", st.End, c.now)
	}
	c.now = st.End
	return st, c.e.Finish(c.now), true
}

func (c *clock) run() {
	for i := 0; ; i++ {
		if _, _, ok := c.step(); !ok {
			return
		}
		if i > 1e6 {
			c.t.Fatal("the engine does not come to rest")
		}
	}
}

func seqTokens(from, n int) []uint32 {
	t := make([]uint32, n)
	for i := range t {
		t[i] = uint32(from + i)
	}
	return t
}

func TestOneRequest(t *testing.T) {
	c := newClock(t, Options{Overhead: 20 * time.Millisecond})
	p := &c.e.o.Profile
	s := c.add(5000, 3, nil)

	st, ev, _ := c.step()
	if !st.Idle || c.now != 20*time.Millisecond || len(ev) != 0 {
		t.Fatalf("before the overhead is over: %+v, %d events, at %s", st, len(ev), c.now)
	}
	want := c.now
	for i, n := range []int{2048, 2048, 904} {
		st, ev, _ := c.step()
		want += p.stepTime(batch{prefill: n, prefillWork: float64(n) * (float64(2048*i) + float64(n)/2)})
		if st.Prefill != n || st.Decode != 0 || c.now != want {
			t.Fatalf("chunk %d: %+v at %s, want %d tokens at %s", i, st, c.now, n, want)
		}
		if first := i == 2; first != (len(ev) == 1) {
			t.Fatalf("chunk %d: %d events", i, len(ev))
		}
	}
	if s.First != want || s.Generated != 1 {
		t.Fatalf("first token at %s (%d generated), want %s", s.First, s.Generated, want)
	}
	for i := 1; i < 3; i++ {
		st, ev, _ := c.step()
		want += p.stepTime(batch{decode: 1, decodeCtx: 4999 + i})
		if st.Decode != 1 || st.Prefill != 0 || c.now != want || len(ev) != 1 || ev[0].First || ev[0].Done != (i == 2) {
			t.Fatalf("decode %d: %+v %+v at %s, want %s", i, st, ev, c.now, want)
		}
	}
	if _, _, ok := c.step(); ok {
		t.Error("the engine goes on after the last token")
	}
	if s.State != Finished || c.e.Stats().KVUsage != 0 {
		t.Errorf("state %d, KV usage %v", s.State, c.e.Stats().KVUsage)
	}
}

func TestDecodeGoesOnDuringPrefill(t *testing.T) {
	c := newClock(t, Options{})
	a := c.add(10, 100, nil)
	c.step()
	c.add(10000, 1, nil)
	for i := range 5 {
		st, ev, _ := c.step()
		if st.Decode != 1 || st.Prefill != min(2047, 10000-2047*i) || len(ev) == 0 || ev[0].Seq != a {
			t.Fatalf("step %d: %+v, %d events", i, st, len(ev))
		}
	}
}

func TestMaxSeqs(t *testing.T) {
	c := newClock(t, Options{MaxSeqs: 2})
	for range 5 {
		c.add(10, 2, nil)
	}
	if st, _, _ := c.step(); st.Prefill != 20 {
		t.Fatalf("first step: %+v", st)
	}
	if s := c.e.Stats(); s.Running != 2 || s.Waiting != 3 {
		t.Fatalf("stats: %+v", s)
	}
	c.run()
	if s := c.e.Stats(); s.OutputTokens != 10 || s.Running+s.Waiting != 0 {
		t.Fatalf("stats: %+v", s)
	}
}

func TestPrefixCache(t *testing.T) {
	turn1 := seqTokens(0, 100)
	answer := seqTokens(1000, 30)
	turn2 := append(append(append([]uint32{}, turn1...), answer...), seqTokens(2000, 20)...)
	for _, tc := range []struct {
		name   string
		prompt []uint32
		want   int
	}{
		// 129 tokens of turn 1 are in the cache: the last token of an answer is never computed.
		{"the next turn finds prompt and answer", turn2, 128},
		{"the same prompt again", turn1, 96},
		{"a prompt of whole blocks computes one token at least", turn1[:96], 80},
		{"a shorter prompt with the same beginning", turn1[:40], 32},
		{"another beginning", append([]uint32{7}, turn1...), 0},
		{"less than a block", turn1[:15], 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := newClock(t, Options{})
			c.add(len(turn1), len(answer), HashBlocks(1, append(append([]uint32{}, turn1...), answer...)))
			c.run()
			s := c.add(len(tc.prompt), 1, HashBlocks(1, tc.prompt))
			st, _, _ := c.step()
			if s.Cached != tc.want || st.Prefill != len(tc.prompt)-tc.want {
				t.Errorf("cached %d, computed %d; want %d of %d cached", s.Cached, st.Prefill, tc.want, len(tc.prompt))
			}
			if got := c.e.Stats(); got.Hits != int64(tc.want) || got.Queries != int64(len(turn1)+len(tc.prompt)) {
				t.Errorf("queries %d, hits %d", got.Queries, got.Hits)
			}
			other := c.add(len(tc.prompt), 1, HashBlocks(2, tc.prompt))
			c.run()
			if other.Cached != 0 {
				t.Errorf("another model found %d tokens", other.Cached)
			}
		})
	}
}

func TestResetCache(t *testing.T) {
	c := newClock(t, Options{})
	h := HashBlocks(0, seqTokens(0, 64))
	c.add(64, 1, h)
	c.run()
	c.e.ResetCache()
	s := c.add(64, 1, h)
	c.run()
	if s.Cached != 0 {
		t.Errorf("%d tokens cached after the reset", s.Cached)
	}
}

func TestEvictionOrder(t *testing.T) {
	c := newClock(t, Options{KVTokens: 8 * BlockTokens})
	a, b := HashBlocks(0, seqTokens(0, 64)), HashBlocks(0, seqTokens(1000, 64))
	c.add(64, 1, a)
	c.run()
	c.add(64, 1, b)
	c.run()
	// The cache is full. Two more blocks evict the tail of the oldest: a's blocks 3 and 2.
	c.add(32, 1, HashBlocks(0, seqTokens(2000, 32)))
	c.run()
	for _, tc := range []struct {
		hashes []BlockHash
		want   int
	}{{b, 4}, {a, 2}} {
		if got := len(c.e.kv.match(nil, tc.hashes)); got != tc.want {
			t.Errorf("%d blocks left, want %d", got, tc.want)
		}
	}
	// Use makes a young again: what is evicted next is b.
	if s := c.add(33, 1, a); true {
		c.run()
		if s.Cached != 32 {
			t.Fatalf("cached %d", s.Cached)
		}
	}
	c.add(64, 1, HashBlocks(0, seqTokens(3000, 64)))
	c.run()
	if got := len(c.e.kv.match(nil, a)); got != 2 {
		t.Errorf("%d blocks of the younger prefix left, want 2", got)
	}
	if got := len(c.e.kv.match(nil, b)); got >= 4 {
		t.Errorf("all blocks of the older prefix left")
	}
}

func TestPreemption(t *testing.T) {
	c := newClock(t, Options{KVTokens: 16 * BlockTokens})
	var seqs []*Seq
	for i := range 4 {
		seqs = append(seqs, c.add(48, 100, HashBlocks(0, seqTokens(i*1000, 148))))
	}
	c.run()
	st := c.e.Stats()
	if st.Preemptions == 0 || seqs[0].Preempted != 0 || seqs[3].Preempted == 0 {
		t.Errorf("%d preemptions, first %d, last %d", st.Preemptions, seqs[0].Preempted, seqs[3].Preempted)
	}
	for i, s := range seqs {
		if s.State != Finished || s.Generated != 100 {
			t.Errorf("sequence %d: state %d, %d tokens", i, s.State, s.Generated)
		}
	}
	if st.OutputTokens != 400 || st.KVUsage != 0 || st.PromptTokens != 4*48 {
		t.Errorf("stats %+v", st)
	}
}

func TestAbort(t *testing.T) {
	c := newClock(t, Options{MaxSeqs: 1, Overhead: time.Millisecond})
	a, b, d := c.add(100, 50, nil), c.add(100, 50, nil), c.add(100, 2, nil)
	c.step()
	if _, ok := c.e.Begin(c.now); !ok {
		t.Fatal("nothing to do")
	}
	c.e.Abort(a) // in the middle of its step
	c.e.Abort(b) // waiting
	c.e.Abort(a)
	if st := c.e.Stats(); st.Running != 0 || st.KVUsage != 0 || st.Waiting != 1 {
		t.Fatalf("after the aborts: %+v", st)
	}
	c.run()
	if a.State != Aborted || a.Generated != 0 || b.State != Aborted || d.State != Finished {
		t.Errorf("states %d %d %d", a.State, b.State, d.State)
	}
	c.e.Abort(d)
	if d.State != Finished {
		t.Error("a finished sequence can be aborted")
	}
	late := c.add(10, 1, nil)
	c.e.Abort(late)
	if st, ok := c.e.Begin(c.now); ok {
		t.Errorf("work left: %+v", st)
	}
}

func TestFixedTiming(t *testing.T) {
	c := newClock(t, Options{Fixed: &FixedTiming{TTFT: 100 * time.Millisecond, ITL: 10 * time.Millisecond}, MaxSeqs: 2})
	a, b, late := c.add(5000, 3, nil), c.add(10, 0, nil), c.add(10, 1, nil)
	c.run()
	ms := time.Millisecond
	if a.First != 100*ms || b.First != 100*ms || a.Generated != 3 || b.Generated != 0 {
		t.Errorf("first at %s and %s", a.First, b.First)
	}
	if late.First != 200*ms { // queued until b was done
		t.Errorf("queued request: first token at %s", late.First)
	}
	if c.now != 200*ms || c.e.Stats().KVUsage != 0 {
		t.Errorf("ended at %s", c.now)
	}
	zero := newClock(t, Options{Fixed: &FixedTiming{}})
	s := zero.add(10, 50, nil)
	zero.run()
	if s.Generated != 50 || zero.now != 0 {
		t.Errorf("no time: %d tokens at %s", s.Generated, zero.now)
	}
}

func TestAddRefuses(t *testing.T) {
	c := newClock(t, Options{KVTokens: 160, MaxModelLen: 1000})
	for _, tc := range []struct {
		prompt, output int
		want           error
	}{{0, 1, ErrOptions}, {1, -1, ErrOptions}, {160, 1, ErrTooLong}, {100, 61, ErrTooLong}, {100, 60, nil}} {
		if _, err := c.e.Add(0, Request{PromptTokens: tc.prompt, OutputTokens: tc.output}); !errors.Is(err, tc.want) {
			t.Errorf("%d + %d: %v, want %v", tc.prompt, tc.output, err, tc.want)
		}
	}
	for _, o := range []Options{{KVTokens: 8}, {MaxSeqs: -1}, {MaxBatchTokens: -1}, {Overhead: -1}, {Fixed: &FixedTiming{ITL: -1}}} {
		if _, err := NewEngine(o); !errors.Is(err, ErrOptions) {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

// TestInvariants lets random requests and aborts loose on a small cache and checks the block pool after each step.
func TestInvariants(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		rnd := rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "seed"), 1))
		o := Options{KVTokens: 20 * BlockTokens, MaxBatchTokens: 64, MaxSeqs: 4, Overhead: time.Millisecond}
		if rapid.Bool().Draw(rt, "fixed") {
			o.Fixed = &FixedTiming{TTFT: time.Millisecond, ITL: time.Millisecond}
		}
		c := newClock(t, o)
		var all []*Seq
		for range rapid.IntRange(1, 60).Draw(rt, "ops") {
			switch rnd.IntN(4) {
			case 0, 1:
				prompt, out := 1+rnd.IntN(120), rnd.IntN(100)
				all = append(all, c.add(prompt, out, HashBlocks(0, seqTokens(rnd.IntN(3)*1000, prompt+out))))
			case 2:
				if len(all) > 0 {
					c.e.Abort(all[rnd.IntN(len(all))])
				}
			default:
				c.step()
			}
			checkPool(rt, c.e)
		}
		c.run()
		checkPool(rt, c.e)
		for _, s := range all {
			if s.State == Finished && s.Generated != s.OutputTokens {
				rt.Fatalf("finished with %d of %d tokens", s.Generated, s.OutputTokens)
			}
			if s.State < Finished {
				rt.Fatalf("a sequence never ended: %+v", s)
			}
		}
		if c.e.kv.free != c.e.kv.size() {
			rt.Fatalf("%d of %d blocks free at rest", c.e.kv.free, c.e.kv.size())
		}
	})
}

func checkPool(t *rapid.T, e *Engine) {
	kv := e.kv
	refs := make([]int32, kv.size())
	for _, s := range e.running {
		for _, id := range s.blocks {
			refs[id]++
		}
	}
	listed := 0
	end := int32(kv.size())
	for id := kv.blocks[end].next; id != end; id = kv.blocks[id].next {
		listed++
		if refs[id] != 0 {
			t.Fatalf("block %d is held and in the eviction list", id)
		}
	}
	held := 0
	for id, n := range refs {
		if kv.blocks[id].refs != n {
			t.Fatalf("block %d: %d references counted, %d held", id, kv.blocks[id].refs, n)
		}
		if n > 0 {
			held++
		}
	}
	if listed != kv.free || listed+held != kv.size() {
		t.Fatalf("%d listed, %d counted free, %d held, %d blocks", listed, kv.free, held, kv.size())
	}
	for h, id := range kv.table {
		if b := kv.blocks[id]; !b.cached || b.hash != h {
			t.Fatalf("the table's entry for block %d is stale", id)
		}
	}
}
