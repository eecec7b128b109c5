// SPDX-License-Identifier: Apache-2.0

// Package policytest is the suite that every policy must pass.
//
// Candidates in it have no Backend: a policy decides by the other fields.
package policytest

import (
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/policy"
)

// Run checks that the policy keeps its contract and what its Spec says.
func Run(t *testing.T, spec policy.Spec) {
	t.Run("index and reason", func(t *testing.T) { testRange(t, spec) })
	t.Run("one candidate", func(t *testing.T) { testOne(t, spec) })
	t.Run("odd loads", func(t *testing.T) { testOdd(t, spec) })
	t.Run("candidates and query unchanged", func(t *testing.T) { testUnchanged(t, spec) })
	t.Run("allocates nothing", func(t *testing.T) { testAllocs(t, spec) })
	t.Run("does not block", func(t *testing.T) { testBlock(t, spec) })
	t.Run("same seed, same picks", func(t *testing.T) { testSeed(t, spec) })
	t.Run("equal loads share evenly", func(t *testing.T) { testEven(t, spec) })
	t.Run("load stays bounded", func(t *testing.T) { testBounded(t, spec) })
	t.Run("changing candidates", func(t *testing.T) { testChanging(t, spec) })
	t.Run("concurrent", func(t *testing.T) { testConcurrent(t, spec) })
	if spec.Weighted {
		t.Run("weights", func(t *testing.T) { testWeights(t, spec) })
	}
	if spec.Homes {
		t.Run("session returns home", func(t *testing.T) { testHome(t, spec) })
	}
}

// Candidates returns n idle candidates of weight 1 with IDs from 1.
func Candidates(n int) []fleet.Candidate {
	c := make([]fleet.Candidate, n)
	for i := range c {
		c[i] = fleet.Candidate{ID: fleet.ID(i + 1), Weight: 1}
	}
	return c
}

// Source returns a seeded source of randomness.
func Source(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 1)) }

func fresh(t testing.TB, spec policy.Spec) policy.Policy {
	t.Helper()
	p, err := policy.New(spec.Name, policy.Params{})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// query returns a request with a session of its own and random sizes.
func query(r *rand.Rand) *fleet.Query {
	return &fleet.Query{Model: "m", Session: r.Uint64() | 1, PromptTokens: r.Int64N(8000), OutputTokens: 16 + r.Int64N(500), Rand: r}
}

func load(r *rand.Rand, c []fleet.Candidate) {
	for i := range c {
		c[i].Tokens, c[i].Requests = r.Int64N(100_000), r.Int64N(100)
		c[i].Weight = float64(1 + r.IntN(4))
	}
}

func testRange(t *testing.T, spec policy.Spec) {
	p, r := fresh(t, spec), Source(1)
	for n := 1; n <= 64; n++ {
		for range 50 {
			c := Candidates(n)
			load(r, c)
			q := query(r)
			if r.IntN(2) == 0 {
				q.Home = fleet.ID(1 + r.IntN(2*n)) // among the candidates or not
			}
			i, why := p.Pick(q, c)
			if i < 0 || i >= n {
				t.Fatalf("picked %d of %d candidates", i, n)
			}
			if !slices.Contains(spec.Reasons, why) {
				t.Fatalf("reason %q is not declared", why)
			}
		}
	}
}

func testOne(t *testing.T, spec policy.Spec) {
	p, r := fresh(t, spec), Source(2)
	c := Candidates(1)
	c[0].ID, c[0].Tokens, c[0].Requests = 77, 1<<40, 1<<20
	for _, home := range []fleet.ID{0, 77, 5} {
		q := query(r)
		q.Home = home
		if i, _ := p.Pick(q, c); i != 0 {
			t.Errorf("home %d: picked %d of 1 candidate", home, i)
		}
	}
}

// testOdd: loads that should not occur, and a query without a source of randomness.
func testOdd(t *testing.T, spec policy.Spec) {
	p := fresh(t, spec)
	c := Candidates(3)
	c[0].Tokens, c[0].Requests = -5000, -3
	c[1].Tokens, c[1].Requests = math.MaxInt64/2, math.MaxInt64/2
	c[2].Weight = 1e-9
	for _, q := range []*fleet.Query{{}, {PromptTokens: -10, OutputTokens: -10}, {Session: 1, Home: 2, PromptTokens: math.MaxInt64 / 4}} {
		for range 20 {
			if i, _ := p.Pick(q, c); i < 0 || i > 2 {
				t.Fatalf("query %+v: picked %d of 3 candidates", q, i)
			}
		}
	}
}

func testUnchanged(t *testing.T, spec policy.Spec) {
	p, r := fresh(t, spec), Source(3)
	c := Candidates(9)
	for range 100 {
		load(r, c)
		q := query(r)
		q.Exclude = []fleet.ID{42}
		before, qb := slices.Clone(c), *q
		p.Pick(q, c)
		if !slices.Equal(before, c) {
			t.Fatal("Pick changed the candidates")
		}
		if q.Session != qb.Session || q.Home != qb.Home || q.PromptTokens != qb.PromptTokens || len(q.Exclude) != 1 {
			t.Fatal("Pick changed the query")
		}
	}
	// A policy that kept the slice would now read other candidates than it is given.
	for i := range c {
		c[i] = fleet.Candidate{ID: 900, Weight: 1}
	}
	if i, _ := p.Pick(query(r), Candidates(2)); i < 0 || i > 1 {
		t.Fatalf("picked %d of 2 candidates", i)
	}
}

func testAllocs(t *testing.T, spec policy.Spec) {
	p, r := fresh(t, spec), Source(4)
	for _, n := range []int{1, 16, 128} {
		c := Candidates(n)
		for _, equal := range []bool{true, false} {
			if !equal {
				load(r, c)
			}
			q := query(r)
			q.Home = fleet.ID(n)
			if a := testing.AllocsPerRun(100, func() { p.Pick(q, c) }); a != 0 {
				t.Errorf("%d candidates, equal loads %v: %v allocations", n, equal, a)
			}
		}
	}
}

// testBlock runs in a bubble: a Pick that waits for a goroutine or a clock either moves its time or deadlocks it.
func testBlock(t *testing.T, spec policy.Spec) {
	synctest.Test(t, func(t *testing.T) {
		p, r, c := fresh(t, spec), Source(5), Candidates(16)
		begun := time.Now()
		for range 100 {
			p.Pick(query(r), c)
		}
		if d := time.Since(begun); d != 0 {
			t.Errorf("picks waited %s", d)
		}
	})
}

func testSeed(t *testing.T, spec policy.Spec) {
	run := func() (picks []int) {
		p, r, c := fresh(t, spec), Source(6), Candidates(10)
		for range 500 {
			i, _ := p.Pick(query(r), c)
			picks = append(picks, i)
			c[r.IntN(len(c))].Tokens = r.Int64N(3) * 1000
		}
		return picks
	}
	if a, b := run(), run(); !slices.Equal(a, b) {
		t.Error("two runs with one seed differ")
	}
}

// testEven: idle candidates of equal weight are chosen equally often, wherever they stand in the slice.
func testEven(t *testing.T, spec policy.Spec) {
	const n, rounds = 8, 8000
	p, r, c := fresh(t, spec), Source(7), Candidates(n)
	var got [n]int
	for range rounds {
		i, _ := p.Pick(query(r), c)
		got[i]++
	}
	for i, k := range got {
		if k < rounds/n*8/10 || k > rounds/n*12/10 {
			t.Errorf("candidate %d was chosen %d times, want about %d", i, k, rounds/n)
		}
	}
}

// simulate serves requests that each stay for a random time, and returns the requests and tokens that each got.
func simulate(t *testing.T, spec policy.Spec, c []fleet.Candidate, rounds int) (requests, tokens []int64) {
	type open struct {
		i, until int
		tokens   int64
	}
	p, r := fresh(t, spec), Source(8)
	requests, tokens = make([]int64, len(c)), make([]int64, len(c))
	var running []open
	for now := range rounds {
		running = slices.DeleteFunc(running, func(o open) bool {
			if o.until <= now {
				c[o.i].Tokens -= o.tokens
				c[o.i].Requests--
			}
			return o.until <= now
		})
		q := query(r)
		i, _ := p.Pick(q, c)
		o := open{i, now + 1 + r.IntN(200), q.PromptTokens + q.OutputTokens}
		c[i].Tokens += o.tokens
		c[i].Requests++
		requests[i]++
		tokens[i] += o.tokens
		running = append(running, o)
	}
	return requests, tokens
}

// testBounded: new sessions of mixed sizes leave no candidate without work and none with twice its share.
func testBounded(t *testing.T, spec policy.Spec) {
	const n, rounds = 6, 6000
	requests, tokens := simulate(t, spec, Candidates(n), rounds)
	var sum int64
	for _, k := range tokens {
		sum += k
	}
	for i := range requests {
		if requests[i] < rounds/n/2 || requests[i] > rounds/n*2 || tokens[i] < sum/n/2 || tokens[i] > sum/n*2 {
			t.Errorf("candidate %d got %d of %d requests and %d of %d tokens", i, requests[i], rounds, tokens[i], sum)
		}
	}
}

// testWeights: with enough in flight, shares follow the weights. A policy that knows sizes may give small backends more
// and smaller requests, so its requests are held to a wider range than its tokens.
func testWeights(t *testing.T, spec policy.Spec) {
	c := Candidates(3)
	c[1].Weight, c[2].Weight = 2, 5
	requests, tokens := simulate(t, spec, c, 8000)
	var sum int64
	for _, k := range tokens {
		sum += k
	}
	slack := 0.2
	if spec.Needs.Has(policy.Tokens) {
		slack = 0.6
	}
	for i, w := range []float64{1, 2, 5} {
		want := w / 8
		if got := float64(requests[i]) / 8000; got < want*(1-slack) || got > want*(1+slack) {
			t.Errorf("weight %v of 8: %.3f of the requests", w, got)
		}
		if got := float64(tokens[i]) / float64(sum); got < want*0.8 || got > want*1.2 {
			t.Errorf("weight %v of 8: %.3f of the tokens", w, got)
		}
	}
}

// testChanging: candidates that come, go and change places (one is down, one was tried before) starve nobody.
func testChanging(t *testing.T, spec policy.Spec) {
	const n, rounds = 5, 5000
	p, r := fresh(t, spec), Source(9)
	got := map[fleet.ID]int{}
	for range rounds {
		c := Candidates(n)
		r.Shuffle(n, func(i, j int) { c[i], c[j] = c[j], c[i] })
		c = c[:1+r.IntN(n)]
		i, _ := p.Pick(query(r), c)
		got[c[i].ID]++
	}
	for id := fleet.ID(1); id <= n; id++ {
		if got[id] < rounds/n*7/10 || got[id] > rounds/n*13/10 {
			t.Errorf("backend %d was chosen %d times, want about %d", id, got[id], rounds/n)
		}
	}
}

func testConcurrent(t *testing.T, spec policy.Spec) {
	p := fresh(t, spec)
	var wg sync.WaitGroup
	for g := range uint64(8) {
		wg.Go(func() {
			r := Source(10 + g)
			c := Candidates(3 + int(g))
			for range 1000 {
				c[r.IntN(len(c))].Tokens = r.Int64N(1000)
				if i, _ := p.Pick(query(r), c); i < 0 || i >= len(c) {
					t.Errorf("picked %d of %d candidates", i, len(c))
					return
				}
			}
		})
	}
	wg.Wait()
}

// testHome: at even loads a known session goes home nearly always.
func testHome(t *testing.T, spec policy.Spec) {
	p, r, c := fresh(t, spec), Source(11), Candidates(4)
	for _, tokens := range []int64{0, 500, 20_000} {
		for i := range c {
			c[i].Tokens = tokens
		}
		home := 0
		for range 200 {
			q := query(r)
			q.Home = fleet.ID(1 + r.IntN(4))
			if i, _ := p.Pick(q, c); c[i].ID == q.Home {
				home++
			}
		}
		if home < 190 {
			t.Errorf("%d tokens everywhere: %d of 200 went home", tokens, home)
		}
	}
}
