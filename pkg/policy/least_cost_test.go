// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"fmt"
	"net/url"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/policy"
	"github.com/shunt-lb/shunt/pkg/prefix"
)

// pool is a real pool of n backends that are up, with a prefix index.
func pool(t testing.TB, name string, n int) (*fleet.Fleet, *fleet.Pool) {
	t.Helper()
	f := fleet.New(fleet.Options{Index: prefix.New(prefix.Options{})})
	apply(t, f, name, n)
	return f, f.Pools()[0]
}

func apply(t testing.TB, f *fleet.Fleet, name string, n int) {
	t.Helper()
	p, err := policy.New(name, policy.Params{})
	if err != nil {
		t.Fatal(err)
	}
	spec := fleet.PoolSpec{Name: "p", Chooser: p}
	for i := range n {
		spec.Backends = append(spec.Backends, fleet.BackendSpec{Name: fmt.Sprintf("b%d", i), URL: &url.URL{Scheme: "http", Host: fmt.Sprintf("10.0.0.%d:8000", i+1)}})
	}
	if err := f.Apply([]fleet.PoolSpec{spec}); err != nil {
		t.Fatal(err)
	}
	for _, b := range f.Backends() {
		b.SetHealth(fleet.HealthUp)
	}
}

func blocks(seed uint64, n int) []uint64 {
	out := make([]uint64, n)
	for i := range out {
		out[i] = (seed<<20 + uint64(i) + 1) * 0x9e3779b97f4a7c15
	}
	return out
}

func take(t testing.TB, p *fleet.Pool, q *fleet.Query) *fleet.Ticket {
	t.Helper()
	tk, err := p.Take(q)
	if err != nil {
		t.Fatal(err)
	}
	return tk
}

func TestUnlikePromptsSpread(t *testing.T) {
	for _, name := range []string{"least_cost", "prefix", "session", "least_tokens", "least_requests", "least_queue"} {
		_, p := pool(t, name, 4)
		got := map[string]int{}
		for i := range uint64(64) {
			tk := take(t, p, &fleet.Query{Session: i + 1, PromptTokens: 2000, OutputTokens: 200, Streams: true, Blocks: blocks(i, 16), BlockTokens: 125})
			got[tk.Backend().Name()]++
		}
		for b, n := range got {
			if n < 14 || n > 18 || len(got) != 4 {
				t.Errorf("%s: %s got %d of 64 at once (%v)", name, b, n, got)
			}
		}
	}
}

func TestEqualColdPromptsLandTogether(t *testing.T) {
	_, p := pool(t, "least_cost", 4)
	got := map[string]int{}
	for range 10 {
		tk := take(t, p, &fleet.Query{PromptTokens: 8100, OutputTokens: 50, Streams: true, Blocks: blocks(1, 64), BlockTokens: 125})
		got[tk.Backend().Name()]++
	}
	most := 0
	for _, n := range got {
		most = max(most, n)
	}
	if most < 6 {
		t.Errorf("10 equal prompts went to %v", got)
	}
}

// TestHotPrefixIsReplicated: all requests begin alike. The busiest backend holds at most a quarter more than the mean, and most
// prompts still find their beginning.
func TestHotPrefixIsReplicated(t *testing.T) {
	_, p := pool(t, "least_cost", 4)
	type open struct {
		tk    *fleet.Ticket
		until int
	}
	var running []open
	hits, total, worst := 0, 0, 0.0
	for now := range 2000 {
		kept := running[:0]
		for _, o := range running {
			if o.until <= now {
				o.tk.Release()
				continue
			}
			kept = append(kept, o)
		}
		running = kept
		tail := blocks(uint64(now)+100, 4)
		tk := take(t, p, &fleet.Query{PromptTokens: 8500, OutputTokens: 300, Streams: true, Blocks: append(blocks(1, 64), tail...), BlockTokens: 125})
		tk.FirstByte()
		running = append(running, open{tk, now + 40 + now%17})
		if now < 200 {
			continue
		}
		total++
		if tk.Cached() >= 8000 {
			hits++
		}
		var sum, top int64
		for _, b := range p.Backends() {
			l7, _ := b.Load()
			sum, top = sum+l7, max(top, l7)
		}
		worst = max(worst, float64(top)*4/float64(sum))
	}
	if hits < total*8/10 || worst > 1.25 {
		t.Errorf("%d of %d hits, busiest over mean up to %.2f", hits, total, worst)
	}
}

func TestALongPromptIsHeldWhereItWas(t *testing.T) {
	f, p := pool(t, "least_cost", 4)
	long := func() *fleet.Query {
		return &fleet.Query{Session: 9, PromptTokens: 64_000, OutputTokens: 300, Streams: true, Blocks: blocks(9, 500), BlockTokens: 128}
	}
	tk := take(t, p, long())
	home := tk.Backend()
	tk.FirstByte()
	tk.Release()
	// Some load at home is worth bearing for 6 s of prefill, however little there is elsewhere.
	for range 4 {
		var others []fleet.ID
		for _, b := range f.Backends() {
			if b != home {
				others = append(others, b.ID())
			}
		}
		take(t, p, &fleet.Query{PromptTokens: 3000, OutputTokens: 100, Streams: true, Exclude: others})
	}
	if tk := take(t, p, long()); tk.Backend() != home || tk.Reason() != policy.ReasonCostCached {
		t.Errorf("the next turn went to %s (%s), home is %s", tk.Backend().Name(), tk.Reason(), home.Name())
	}
}

func TestDeadlineMovesARequest(t *testing.T) {
	c := []fleet.Candidate{
		{ID: 1, Weight: 1, Speed: fleet.DefaultSpeed, Queued: 26_000, Cached: 12_000},
		{ID: 2, Weight: 1, Speed: fleet.DefaultSpeed, Context: 40_000, Requests: 6},
	}
	p, err := policy.New("least_cost", policy.Params{})
	if err != nil {
		t.Fatal(err)
	}
	q := fleet.Query{PromptTokens: 20_000, OutputTokens: 20, Blocks: []uint64{1}, Streams: true}
	if i, _ := p.Pick(&q, c); i != 0 {
		t.Errorf("without a deadline candidate %d was picked", i)
	}
	q.Deadline = 2100 * time.Millisecond
	if i, _ := p.Pick(&q, c); i != 1 {
		t.Errorf("with a deadline that only the other keeps candidate %d was picked", i)
	}
}

func TestOtherBalancersCount(t *testing.T) {
	p, err := policy.New("least_cost", policy.Params{})
	if err != nil {
		t.Fatal(err)
	}
	c := []fleet.Candidate{
		{ID: 1, Weight: 1, Speed: fleet.DefaultSpeed, Requests: 1, Fresh: true, Gauges: fleet.Gauges{Waiting: 8, Running: 20, Sent: 1}},
		{ID: 2, Weight: 1, Speed: fleet.DefaultSpeed, Requests: 1, Fresh: true, Gauges: fleet.Gauges{Running: 1, Sent: 1}},
	}
	for range 20 {
		if i, _ := p.Pick(&fleet.Query{PromptTokens: 1000}, c); i != 1 {
			t.Fatal("picked the engine that is full of others' requests")
		}
	}
}

func TestConsistentHashMovesNoMoreThanItMust(t *testing.T) {
	const keys = 4000
	where := func(f *fleet.Fleet) []string {
		out := make([]string, keys)
		for k := range out {
			b, _, err := f.Pools()[0].Explain(&fleet.Query{Session: uint64(k)*0x9e3779b97f4a7c15 + 1, PromptTokens: 100})
			if err != nil {
				t.Fatal(err)
			}
			out[k] = b.Name()
		}
		return out
	}
	f, _ := pool(t, "consistent_hash", 4)
	before := where(f)
	apply(t, f, "consistent_hash", 5)
	moved := 0
	for k, b := range where(f) {
		if b != before[k] {
			moved++
		}
	}
	if moved < keys/10 || moved > keys/4 {
		t.Errorf("%d of %d keys moved to a fifth backend", moved, keys)
	}
	apply(t, f, "consistent_hash", 4)
	for k, b := range where(f) {
		if b != before[k] {
			t.Fatalf("key %d did not return", k)
		}
	}
}

func BenchmarkPick(b *testing.B) {
	for _, name := range []string{"least_cost", "prefix", "session"} {
		for _, n := range []int{16, 128, 1023} {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				p, err := policy.New(name, policy.Params{})
				if err != nil {
					b.Fatal(err)
				}
				c := make([]fleet.Candidate, n)
				for i := range c {
					c[i] = fleet.Candidate{ID: fleet.ID(i + 1), Weight: 1, Speed: fleet.DefaultSpeed, Requests: int64(i % 7), Tokens: int64(i * 100 % 977), Queued: int64(i * 100 % 977), Cached: int64(i % 500)}
				}
				q := fleet.Query{Session: 5, Home: 3, PromptTokens: 3000, OutputTokens: 200, Blocks: []uint64{1}}
				b.ReportAllocs()
				for b.Loop() {
					p.Pick(&q, c)
				}
			})
		}
	}
}
