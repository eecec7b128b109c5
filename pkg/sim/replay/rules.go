// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"maps"
	"math"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/prefix"
	"github.com/shunt-lb/shunt/pkg/sim"
)

// rule is how another router chooses, made from its published formula and settings, or an oracle.
type rule interface {
	fleet.Chooser
	// see is told the request before the pick.
	see(r *Request, blocks []sim.BlockHash)
}

var rules = map[string]func(*world, *router) rule{
	"random":        func(*world, *router) rule { return &randomRule{} },
	"longest_match": func(w *world, _ *router) rule { return &longestMatch{base{w: w}} },
	"llm-d": func(w *world, r *router) rule {
		w.o.Scrape = min(w.o.Scrape, 50*time.Millisecond)
		return newLLMD(w, r)
	},
	"sglang": func(w *world, _ *router) rule {
		return &sglang{base: base{w: w}, threshold: 0.3, abs: 64, rel: 1.5, owner: map[uint64]fleet.ID{}}
	},
	"dynamo": func(w *world, _ *router) rule { return &dynamo{base{w: w}} },
	"aibrix": func(w *world, _ *router) rule { return &aibrix{base{w: w}} },
	"oracle": func(w *world, _ *router) rule { return &oracle{base{w: w}} },
}

// Rules names the rules of other routers, and the oracle.
func Rules() []string { return slices.Sorted(maps.Keys(rules)) }

type base struct {
	w      *world
	r      *Request
	blocks []sim.BlockHash
}

func (b *base) see(r *Request, blocks []sim.BlockHash) { b.r, b.blocks = r, blocks }

// server finds the engine behind a candidate. IDs are given in order.
func (b *base) server(c *fleet.Candidate) *server { return &b.w.servers[c.ID-1] }

// pick returns the index with the lowest score, ties at random.
func pick(q *fleet.Query, n int, score func(int) float64) int {
	best, ties, low := 0, 0, math.Inf(1)
	for i := range n {
		s := score(i)
		switch {
		case s < low:
			best, ties, low = i, 1, s
		case s == low:
			if ties++; q.Rand.IntN(ties) == 0 {
				best = i
			}
		}
	}
	return best
}

type randomRule struct{ base }

func (*randomRule) Pick(q *fleet.Query, c []fleet.Candidate) (int, fleet.Reason) {
	return q.Rand.IntN(len(c)), "random"
}

// longestMatch sends to whoever holds most of the prompt, ties to the fewest tokens in flight.
type longestMatch struct{ base }

func (*longestMatch) Pick(q *fleet.Query, c []fleet.Candidate) (int, fleet.Reason) {
	return pick(q, len(c), func(i int) float64 { return float64(c[i].Tokens) - 1e9*float64(c[i].Cached) }), "longest_match"
}

// llmd is the default profile of llm-d's endpoint picker: 2 x queue + 2 x free KV cache + 3 x share of the prompt's blocks that
// its own index holds; gauges every 50 ms, ties shuffled. Its index is sized from the engine's cache.
type llmd struct {
	base
	index *prefix.Index
}

func newLLMD(w *world, r *router) rule {
	l := &llmd{base: base{w: w}, index: prefix.New(prefix.Options{Bytes: 1 << 30})}
	for i := range w.servers {
		if w.t.BlockTokens > 0 {
			l.index.Resize(fleet.ID(i+1), w.servers[i].engine.KVBlocks()*w.eblock/w.t.BlockTokens)
		}
	}
	return l
}

func (l *llmd) Pick(q *fleet.Query, c []fleet.Candidate) (int, fleet.Reason) {
	lo, hi := math.MaxInt, 0
	for i := range c {
		n := l.server(&c[i]).gauges.Waiting
		lo, hi = min(lo, n), max(hi, n)
	}
	best := pick(q, len(c), func(i int) float64 {
		g := &l.server(&c[i]).gauges
		queue, match := 1.0, 0.0
		if hi > lo {
			queue = float64(hi-g.Waiting) / float64(hi-lo)
		}
		if len(q.Blocks) > 0 {
			match = float64(l.index.Held(c[i].ID, q.Blocks)) / float64(len(q.Blocks))
		}
		return -(2*queue + 2*(1-g.KVUsage) + 3*match)
	})
	l.index.Enter(c[best].ID, q.Blocks)
	return best, "llm-d"
}

// sglang is the cache_aware policy of SGLang's router with its command line's defaults: in balance (requests in flight) the
// worker that the tree names for the longest match, if that is more than the threshold of the prompt, else the fewest
// requests; out of balance the fewest requests for all.
type sglang struct {
	base
	threshold, rel float64
	abs            int64
	owner          map[uint64]fleet.ID // block -> worker that had it last; unbounded, as 2^26 characters nearly are
}

func (s *sglang) Pick(q *fleet.Query, c []fleet.Candidate) (int, fleet.Reason) {
	lo, hi := int64(math.MaxInt64), int64(0)
	for i := range c {
		lo, hi = min(lo, c[i].Requests), max(hi, c[i].Requests)
	}
	best := -1
	if hi-lo <= s.abs || float64(hi) <= s.rel*float64(lo) {
		matched, owner := 0, fleet.ID(0)
		for _, b := range q.Blocks {
			id, ok := s.owner[b]
			if !ok {
				break
			}
			matched++
			owner = id
		}
		if float64(matched)*q.BlockTokens > s.threshold*float64(q.PromptTokens) {
			best = slices.IndexFunc(c, func(c fleet.Candidate) bool { return c.ID == owner })
		}
	}
	if best < 0 {
		best = pick(q, len(c), func(i int) float64 { return float64(c[i].Requests) })
	}
	for _, b := range q.Blocks {
		s.owner[b] = c[best].ID
	}
	return best, "sglang"
}

// dynamo is the documented cost of Dynamo's KV router at its defaults: blocks to prefill, those of requests under way included,
// plus blocks of active sequences; its index follows the engines' own events, so it is exact here.
type dynamo struct{ base }

func (d *dynamo) Pick(q *fleet.Query, c []fleet.Candidate) (int, fleet.Reason) {
	return pick(q, len(c), func(i int) float64 {
		held := d.server(&c[i]).engine.Peek(d.r.Prompt, d.blocks)
		return float64(c[i].Queued) + float64(d.r.Prompt-held) + float64(c[i].Context)
	}), "dynamo"
}

// aibrix is AIBrix's prefix-cache algorithm at its defaults: if running requests differ by more than 8, the fewest; else the
// best match whose running requests are within one standard deviation above the mean; else the fewest.
type aibrix struct{ base }

func (a *aibrix) Pick(q *fleet.Query, c []fleet.Candidate) (int, fleet.Reason) {
	lo, hi := int64(math.MaxInt64), int64(0)
	var sum, squares float64
	for i := range c {
		n := c[i].Requests
		lo, hi = min(lo, n), max(hi, n)
		sum += float64(n)
		squares += float64(n) * float64(n)
	}
	n := float64(len(c))
	mean := sum / n
	top := mean + math.Sqrt(max(squares/n-mean*mean, 0))
	fewest := func(i int) float64 { return float64(c[i].Requests) }
	if hi-lo > 8 {
		return pick(q, len(c), fewest), "aibrix"
	}
	best := pick(q, len(c), func(i int) float64 {
		if c[i].Cached == 0 || float64(c[i].Requests) > top {
			return math.Inf(1)
		}
		return float64(c[i].Requests) - 1e6*float64(c[i].Cached)
	})
	if c[best].Cached == 0 || float64(c[best].Requests) > top {
		best = pick(q, len(c), fewest)
	}
	return best, "aibrix"
}

// oracle sees the engines as they are at this moment, and knows their profiles.
type oracle struct{ base }

func (o *oracle) Pick(q *fleet.Query, c []fleet.Candidate) (int, fleet.Reason) {
	return pick(q, len(c), func(i int) float64 {
		s := o.server(&c[i])
		p := &o.w.o.Profiles[int(c[i].ID-1)%len(o.w.o.Profiles)]
		held := s.engine.Peek(o.r.Prompt, o.blocks)
		st := s.engine.Stats()
		second := p.Prefill(8192, 2048).Seconds() / 8192
		own := p.Prefill(o.r.Prompt, 2048).Seconds() - p.Prefill(held, 2048).Seconds()
		step := p.Decode(max(st.Running, 1), s.engine.Context()/max(st.Running, 1)+1).Seconds()
		return float64(s.engine.Backlog())*second + 2*own + step*float64(o.r.Output)*0.5
	}), "oracle"
}
