// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// firstOutput is the output expected of a request before any was seen, in tokens.
	firstOutput = 256
	// pinFade is how many updates of the limits it takes for the memory of a pin's charge to fade to a third.
	pinFade = 16384
)

// Pool is the backends that serve the same models under one policy.
type Pool struct {
	name    string
	now     func() time.Duration
	index   Index // nil: none
	outputs lengths
	lines   lines

	someOut atomic.Bool  // a backend is ejected
	panics  atomic.Bool  // and too few others are left
	lastUp  atomic.Int64 // when a backend came up last, ns on the clock

	mu       sync.Mutex
	rand     *rand.Rand
	models   []string
	chooser  Chooser
	backends []*Backend
	buf      []Candidate

	listed     map[string]set // by model, but for those that all list
	unlisted   set            // of which is not known what they list
	panicShare float64
	slowStart  time.Duration
	weighted   bool
}

func newPool(name string, now func() time.Duration, index Index) *Pool {
	p := &Pool{name: name, now: now, index: index, rand: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))}
	return p
}

// Name returns the pool's name.
func (p *Pool) Name() string { return p.name }

// Seed makes the pool's random choices repeatable, for simulations.
func (p *Pool) Seed(seed uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rand = rand.New(rand.NewPCG(seed, 1))
}

// Models returns the model names that the pool serves; empty means any.
func (p *Pool) Models() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.models
}

// Backends returns the pool's backends. The caller must not change the slice.
func (p *Pool) Backends() []*Backend {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.backends
}

// Take picks a backend and charges it, in one atomic step: requests that arrive together see each other's weight.
// The charge is q.PromptTokens and q.OutputTokens. Errors: ErrNoBackend, ErrOverloaded.
func (p *Pool) Take(q *Query) (*Ticket, error) {
	need := max(q.PromptTokens, 0) + max(q.OutputTokens, 0)
	p.mu.Lock()
	defer p.mu.Unlock()
	c, why, err := p.pick(q, need)
	if err != nil {
		return nil, err
	}
	b := c.Backend
	t := &Ticket{backend: b, reason: why, prompt: max(q.PromptTokens, 0), output: max(q.OutputTokens, 0), left: need,
		cached: c.Cached, streams: q.Streams, now: p.now, taken: p.now()}
	if why == ReasonProbe {
		t.probe = true
		b.probing.Store(true)
	}
	t.queued = t.prompt - t.cached
	t.expects = c.FirstByte(t.queued)
	b.slot.L7Tokens.Add(need)
	b.requests.Add(1)
	b.waiting.Add(1)
	b.queued.Add(t.queued)
	b.learned.enqueue(t)
	b.context.Add(need)
	if p.index != nil && len(q.Blocks) > 0 {
		p.index.Enter(b.id, q.Blocks)
	}
	return t, nil
}

// FirstByte predicts the seconds to the first byte of a prompt of which so many tokens are not cached; 0 if nothing is known
// of the backend's speed.
func (c *Candidate) FirstByte(uncached int64) float64 {
	if c.Speed.PrefillRate <= 0 {
		return 0
	}
	return float64(c.Speed.PrefillBase) + float64(max(c.Waiting, 0))*float64(c.Speed.QueueBase) +
		float64(max(c.Queued, 0)+max(uncached, 0))/float64(c.Speed.PrefillRate)
}

// Explain says where Take would send the request and why, and charges nothing.
func (p *Pool) Explain(q *Query) (*Backend, Reason, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c, why, err := p.pick(q, max(q.PromptTokens, 0)+max(q.OutputTokens, 0))
	if err != nil {
		return nil, "", err
	}
	return c.Backend, why, nil
}

// pick lets the policy choose, unless the request is to be a probe. The candidate is valid until the next pick.
func (p *Pool) pick(q *Query, need int64) (*Candidate, Reason, error) {
	only, last := p.serving(q.Model)
	if p.someOut.Load() {
		p.review() // the checks may have changed their mind about the others
		now := p.now()
		if b := p.probed(q, need, now, only); b != nil {
			p.buf = append(p.buf[:0], Candidate{ID: b.id, Weight: b.weight(), Tokens: b.tokens(), Requests: b.requests.Load(), Backend: b})
			p.know(&p.buf[0], q, now, p.lines.read())
			return &p.buf[0], ReasonProbe, nil
		}
	}
	c, overloaded := p.candidates(q, need, only, last)
	if len(c) == 0 {
		if overloaded {
			return nil, "", ErrOverloaded
		}
		return nil, "", ErrNoBackend
	}
	q.Rand = p.rand
	i, why := p.chooser.Pick(q, c)
	if i < 0 || i >= len(c) {
		return nil, "", fmt.Errorf("pick backend in pool %s: policy chose %d of %d candidates", p.name, i, len(c))
	}
	return &c[i], why, nil
}

// candidates lists the backends that may take the request. A backend at its limit is left out; one that is idle
// takes any request, or a prompt above the limit could never be served. A busy one is left out while others are there.
func (p *Pool) candidates(q *Query, need int64, only set, last bool) (c []Candidate, overloaded bool) {
	c = p.buf[:0]
	now, speed := p.now(), p.lines.read()
	top := p.ramping(now)
	q.HomeFull = false
	for i, b := range p.backends {
		if only != nil && !only.has(i) || !b.Eligible() && !(last && b.sound()) || slices.Contains(q.Exclude, b.id) {
			continue
		}
		spec := b.spec.Load()
		tokens := b.tokens()
		if spec.MaxInflightTokens > 0 && tokens > 0 && tokens+need > spec.MaxInflightTokens {
			overloaded = true
			q.HomeFull = q.HomeFull || b.id == q.Home
			continue
		}
		c = append(c, Candidate{ID: b.id, Weight: b.weight() * p.grown(b, now, top), Tokens: tokens,
			Requests: b.requests.Load() + max(b.slot.KernelFlows.Load(), 0), Backend: b})
		p.know(&c[len(c)-1], q, now, speed)
	}
	p.buf = c
	c = p.leaveRamping(q, leaveBusy(q, c, now), now, top)
	if q.LocalOnly && slices.ContainsFunc(c, func(c Candidate) bool { return c.Backend.Local() }) {
		c = slices.DeleteFunc(c, func(c Candidate) bool { return !c.Backend.Local() })
	}
	return c, overloaded
}

// know fills in what is believed of the backend beyond its load.
func (p *Pool) know(c *Candidate, q *Query, now time.Duration, speed Speed) {
	b := c.Backend
	if p.index != nil && len(q.Blocks) > 0 {
		held := p.index.Held(b.id, q.Blocks)
		c.Cached = min(int64(float64(held)*q.BlockTokens), max(q.PromptTokens-1, 0))
	}
	c.Queued, c.Waiting = max(b.queued.Load(), 0), max(b.waiting.Load(), 0)
	_, kernel := b.Load()
	c.Context = max(b.context.Load(), 0) + max(kernel, 0)
	var done int64
	c.Speed, c.Latency, c.Inflow, done = b.learned.read(now, speed)
	c.Queued = max(c.Queued-done, 0)
	if g := b.gauges.Load(); g != nil {
		c.Gauges, c.Fresh = *g, now-g.At < StaleGauges
	}
}

// StaleGauges is the age at which an engine's gauges are no longer believed: they are unknown then, not 0.
const StaleGauges = 5 * time.Second

// ExpectedOutput returns the tokens that an answer is expected to have: a quantile of the recent ones' lengths, capped by the
// request's own limit (0 = it sets none).
func (p *Pool) ExpectedOutput(maxTokens int64) int64 {
	n := int64(math.Round(p.outputs.expected(firstOutput)))
	if maxTokens > 0 {
		return min(maxTokens, n)
	}
	return n
}

// ObserveOutput enters the length of a whole answer, in tokens.
func (p *Pool) ObserveOutput(n int64) {
	if n >= 0 {
		p.outputs.add(n)
	}
}

// updateLimits sets the bound that the kernel holds new flows to: bounded load (Mirrokni, Thorup, Zadimoghaddam,
// "Consistent Hashing with Bounded Loads", 2017) in tokens. A backend may carry factor times its share of the pool's
// tokens, and above it slack tokens or the largest charge of its pins (see NotePin).
func (p *Pool) updateLimits(factor float64, slack int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var total, weights float64
	now := p.now()
	top := p.ramping(now)
	for _, b := range p.backends {
		if b.Eligible() {
			total += float64(max(b.tokens(), 0))
			weights += b.weight() * p.grown(b, now, top)
		}
	}
	for _, b := range p.backends {
		pinned := b.pinned.Load()
		b.pinned.CompareAndSwap(pinned, pinned-(pinned+pinFade-1)/pinFade)
		limit := int64(0)
		if b.Eligible() {
			limit = int64(math.Ceil(factor*total*b.weight()*p.grown(b, now, top)/weights)) + max(slack, pinned)
			if m := b.spec.Load().MaxInflightTokens; m > 0 {
				limit = min(limit, m)
			}
		}
		b.slot.Limit.Store(limit)
	}
}
