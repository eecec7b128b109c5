// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"slices"
	"time"
)

// Options describe one engine. Zero values take the defaults named.
type Options struct {
	Profile        Profile       // default: DefaultProfile
	KVTokens       int           // capacity of the KV cache; default: the profile's
	BlockTokens    int           // tokens in a block of it; default BlockTokens
	MaxBatchTokens int           // token budget of one step; default 2,048
	MaxSeqs        int           // sequences that run at once; default 256
	MaxModelLen    int           // longest prompt + output; default and bound: KVTokens
	Overhead       time.Duration // from arrival until the scheduler sees the request (HTTP, tokenising); default 0
	Fixed          *FixedTiming  // replaces the profile's times
}

// FixedTiming gives every request the same times, whatever the load.
type FixedTiming struct {
	TTFT time.Duration // from arrival (or from the end of queueing) to the first token
	ITL  time.Duration // between tokens
}

// Request is what the model needs to know of a request.
type Request struct {
	PromptTokens int         // > 0
	OutputTokens int         // exact length of the answer; 0 = prefill only (embeddings)
	Blocks       []BlockHash // chained hashes of the full blocks of prompt and answer; may be shorter: the rest is never reused
	Tag          any         // the caller's
}

// State is where a sequence stands.
type State uint8

// The states of a sequence, in order; Aborted can follow any of the first two.
const (
	Waiting State = iota
	Running
	Finished
	Aborted
)

// Seq is one request inside an engine. Its fields are for reading, between calls of the engine's methods.
type Seq struct {
	Request
	Arrived   time.Duration
	First     time.Duration // when the first token came; 0 before
	Generated int           // tokens of the answer so far
	Cached    int           // prompt tokens that the prefix cache held
	State     State
	Preempted int // times that it lost its blocks to another

	ready    time.Duration
	due      time.Duration // FixedTiming: next token
	computed int           // tokens whose keys and values are in blocks
	planned  int           // tokens that the current step computes
	blocks   []int32
	hashed   int  // blocks published
	seen     bool // counted in the stats
	queued   bool // FixedTiming: it found no place when it arrived
}

func (s *Seq) length() int { return s.PromptTokens + s.Generated }

// Event is what a step brought to one sequence: one token, the end, or both.
type Event struct {
	Seq   *Seq
	Token bool // one more token of the answer
	First bool // it is the first
	Done  bool // the sequence is finished
}

// Step is the time until which the engine is busy or has nothing to do.
type Step struct {
	End     time.Duration
	Prefill int  // prompt tokens in it
	Decode  int  // decoding sequences in it
	Idle    bool // nothing is computed until End: an arrival before that calls for a new Begin
}

// Stats are an engine's gauges and counters, in vLLM's sense.
type Stats struct {
	Waiting, Running int
	KVUsage          float64 // share of the KV cache's blocks that sequences hold
	Queries, Hits    int64   // prompt tokens looked up in the prefix cache, and found there
	PromptTokens     int64   // prompt tokens of sequences that were scheduled
	OutputTokens     int64
	Steps            int64
	Preemptions      int64
}

// Engine is the model of one inference server. Time is an argument of its methods (since any fixed moment, never going
// back), so it runs on every clock. It is not safe for concurrent use.
//
// The caller loops: Begin says until when the next step lasts, Finish at that moment says what it brought.
type Engine struct {
	o        Options
	kv       *kvCache
	incoming []*Seq // not yet ready, in order of arrival
	waiting  []*Seq
	running  []*Seq
	planned  []*Seq // in the step that is under way
	busy     bool
	end      time.Duration
	slow     float64 // factor on the times of steps
	stats    Stats
	events   []Event
	match    []int32
}

// NewEngine returns an idle engine with an empty cache.
func NewEngine(o Options) (*Engine, error) {
	if o.Profile.Name == "" {
		o.Profile = profiles[DefaultProfile]
	}
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	def(&o.KVTokens, o.Profile.KVTokens)
	def(&o.BlockTokens, BlockTokens)
	def(&o.MaxBatchTokens, 2048)
	def(&o.MaxSeqs, 256)
	def(&o.MaxModelLen, o.KVTokens)
	o.MaxModelLen = min(o.MaxModelLen, o.KVTokens/o.BlockTokens*o.BlockTokens)
	if o.BlockTokens < 1 || o.KVTokens < o.BlockTokens || o.MaxBatchTokens < 1 || o.MaxSeqs < 1 || o.MaxModelLen < 2 || o.Overhead < 0 {
		return nil, fmt.Errorf("make engine: %w: KV tokens %d (at least %d), batch tokens %d, sequences %d, model length %d, overhead %s",
			ErrOptions, o.KVTokens, o.BlockTokens, o.MaxBatchTokens, o.MaxSeqs, o.MaxModelLen, o.Overhead)
	}
	if o.Fixed != nil && (o.Fixed.TTFT < 0 || o.Fixed.ITL < 0) {
		return nil, fmt.Errorf("make engine: %w: negative time", ErrOptions)
	}
	return &Engine{o: o, slow: 1, kv: newKVCache(o.KVTokens / o.BlockTokens)}, nil
}

// MaxModelLen is the largest sum of prompt and answer that Add accepts.
func (e *Engine) MaxModelLen() int { return e.o.MaxModelLen }

// KVBlocks is the capacity of the cache in blocks.
func (e *Engine) KVBlocks() int { return e.kv.size() }

// Add hands a request to the engine.
func (e *Engine) Add(now time.Duration, r Request) (*Seq, error) {
	if r.PromptTokens < 1 || r.OutputTokens < 0 {
		return nil, fmt.Errorf("add request: %w: %d prompt tokens, %d output tokens", ErrOptions, r.PromptTokens, r.OutputTokens)
	}
	if n := r.PromptTokens + r.OutputTokens; n > e.o.MaxModelLen {
		return nil, fmt.Errorf("add request of %d tokens: %w (%d)", n, ErrTooLong, e.o.MaxModelLen)
	}
	s := &Seq{Request: r, Arrived: now, ready: now + e.o.Overhead}
	if e.o.Fixed != nil || e.o.Overhead == 0 {
		e.waiting = append(e.waiting, s)
	} else {
		e.incoming = append(e.incoming, s)
	}
	return s, nil
}

// Abort ends a sequence: its place in the batch and its blocks are free at once.
func (e *Engine) Abort(s *Seq) {
	if s.State >= Finished {
		return
	}
	for _, q := range []*[]*Seq{&e.incoming, &e.waiting, &e.running} {
		if i := slices.Index(*q, s); i >= 0 {
			*q = slices.Delete(*q, i, i+1)
		}
	}
	e.drop(s)
	s.State = Aborted
}

// ResetCache forgets all cached prefixes that no sequence uses now.
func (e *Engine) ResetCache() { e.kv.reset() }

// Stats returns the gauges and counters as they are now.
func (e *Engine) Stats() Stats {
	st := e.stats
	st.Waiting, st.Running = len(e.incoming)+len(e.waiting), len(e.running)
	st.KVUsage = float64(e.kv.size()-e.kv.free) / float64(e.kv.size())
	return st
}

// Begin starts the next step. It returns false if there is nothing to do until the next Add. While a step is under way
// it returns that step.
func (e *Engine) Begin(now time.Duration) (Step, bool) {
	if e.busy {
		return Step{End: e.end}, true
	}
	for len(e.incoming) > 0 && e.incoming[0].ready <= now {
		e.waiting = append(e.waiting, e.incoming[0])
		e.incoming = e.incoming[1:]
	}
	if e.o.Fixed != nil {
		return e.beginFixed(now)
	}
	b := e.schedule()
	if len(e.planned) == 0 {
		if len(e.incoming) > 0 {
			return Step{End: e.incoming[0].ready, Idle: true}, true
		}
		return Step{}, false
	}
	e.busy, e.end = true, now+time.Duration(float64(e.o.Profile.stepTime(b))*e.slow)
	e.stats.Steps++
	return Step{End: e.end, Prefill: b.prefill, Decode: b.decode}, true
}

// Finish ends the step that is under way and returns what it brought. The slice is valid until the next Finish.
func (e *Engine) Finish(now time.Duration) []Event {
	e.events = e.events[:0]
	if e.o.Fixed != nil {
		e.finishFixed(now)
		return e.events
	}
	for _, s := range e.planned {
		if s.State != Running || s.planned == 0 { // aborted in the meantime
			continue
		}
		s.computed += s.planned
		s.planned = 0
		if s.computed == s.length() {
			e.advance(s, now)
		}
	}
	e.planned, e.busy = e.planned[:0], false
	return e.events
}

// advance gives s its next token, or its end.
func (e *Engine) advance(s *Seq, now time.Duration) {
	ev := Event{Seq: s}
	if s.OutputTokens > 0 {
		s.Generated++
		e.stats.OutputTokens++
		ev.Token, ev.First = true, s.Generated == 1
	}
	if s.First == 0 {
		s.First = now
	}
	if s.Generated == s.OutputTokens {
		ev.Done = true
		s.State = Finished
		if i := slices.Index(e.running, s); i >= 0 {
			e.running = slices.Delete(e.running, i, i+1)
		}
		e.drop(s)
	}
	e.events = append(e.events, ev)
}

// schedule fills a step: running sequences first, in their order, then waiting ones, as vLLM's scheduler does.
func (e *Engine) schedule() (b batch) {
	budget := e.o.MaxBatchTokens
	preempted := false
	for i := 0; i < len(e.running) && budget > 0; i++ {
		s := e.running[i]
		n := min(s.length()-s.computed, budget)
		for !e.reserve(s, s.computed+n) {
			victim := e.running[len(e.running)-1]
			e.preempt(victim)
			preempted = true
			if victim == s {
				s = nil
				break
			}
		}
		if s == nil {
			break
		}
		budget -= n
		e.plan(s, n, &b)
	}
	for !preempted && len(e.waiting) > 0 && budget > 0 && len(e.running) < e.o.MaxSeqs {
		s := e.waiting[0]
		hit := e.lookup(s)
		n := min(s.length()-hit*e.o.BlockTokens, budget)
		if !e.admit(s, hit, hit*e.o.BlockTokens+n) {
			break
		}
		e.waiting = e.waiting[1:]
		budget -= n
		e.plan(s, n, &b)
	}
	return b
}

// lookup finds how many blocks of s's tokens the cache holds (left in e.match). At least one token is computed anew.
func (e *Engine) lookup(s *Seq) int {
	full := min((s.length()-1)/e.o.BlockTokens, len(s.Blocks))
	e.match = e.kv.match(e.match[:0], s.Blocks[:full])
	return len(e.match)
}

// admit moves s from waiting to running with its first hit blocks from the cache and room for upTo tokens.
func (e *Engine) admit(s *Seq, hit, upTo int) bool {
	need := (upTo+e.o.BlockTokens-1)/e.o.BlockTokens - hit
	if need > e.kv.free-e.kv.unused(e.match) {
		return false
	}
	for _, id := range e.match {
		e.kv.hold(id)
	}
	s.blocks = append(s.blocks[:0], e.match...)
	s.hashed = hit
	s.computed = hit * e.o.BlockTokens
	if !s.seen {
		s.seen = true
		s.Cached = s.computed
		e.stats.Queries += int64(s.PromptTokens)
		e.stats.Hits += int64(s.Cached)
		e.stats.PromptTokens += int64(s.PromptTokens)
	}
	s.State = Running
	e.running = append(e.running, s)
	return e.reserve(s, upTo)
}

// reserve gives s blocks for n tokens, or nothing if there are too few.
func (e *Engine) reserve(s *Seq, n int) bool {
	need := (n+e.o.BlockTokens-1)/e.o.BlockTokens - len(s.blocks)
	if need > e.kv.free {
		return false
	}
	for range need {
		s.blocks = append(s.blocks, e.kv.take())
	}
	return true
}

// plan puts n tokens of s into the step. Blocks that become full in it can be shared from now on, as in vLLM, where
// a step writes a layer's keys and values before any sequence of the step reads them.
func (e *Engine) plan(s *Seq, n int, b *batch) {
	s.planned = n
	e.planned = append(e.planned, s)
	if s.Generated > 0 && n == 1 {
		b.decode++
		b.decodeCtx += s.computed
	} else {
		b.prefill += n
		b.prefillWork += float64(n) * (float64(s.computed) + float64(n)/2)
	}
	e.publish(s, s.computed+n)
}

func (e *Engine) publish(s *Seq, computed int) {
	full := min(computed/e.o.BlockTokens, len(s.Blocks))
	for ; s.hashed < full; s.hashed++ {
		e.kv.publish(s.blocks[s.hashed], s.Blocks[s.hashed])
	}
}

// preempt takes s's blocks and puts it at the head of the queue; its tokens are computed again later.
func (e *Engine) preempt(s *Seq) {
	e.running = e.running[:len(e.running)-1]
	e.drop(s)
	s.State = Waiting
	s.Preempted++
	e.stats.Preemptions++
	e.waiting = slices.Insert(e.waiting, 0, s)
}

func (e *Engine) drop(s *Seq) {
	e.kv.release(s.blocks)
	s.blocks, s.hashed, s.computed, s.planned = s.blocks[:0], 0, 0, 0
}

// beginFixed admits what fits and says when the next token is due. Blocks for the whole sequence are taken at once.
func (e *Engine) beginFixed(now time.Duration) (Step, bool) {
	for len(e.waiting) > 0 && len(e.running) < e.o.MaxSeqs {
		s := e.waiting[0]
		if !e.admit(s, e.lookup(s), s.PromptTokens+s.OutputTokens) {
			break
		}
		e.waiting = e.waiting[1:]
		s.due = s.Arrived + e.o.Fixed.TTFT
		if s.queued {
			s.due = now + e.o.Fixed.TTFT
		}
		e.publish(s, s.PromptTokens)
	}
	for _, s := range e.waiting {
		s.queued = true
	}
	if len(e.running) == 0 {
		return Step{}, false
	}
	end := e.running[0].due
	for _, s := range e.running {
		end = min(end, s.due)
	}
	return Step{End: max(end, now), Idle: true}, true
}

func (e *Engine) finishFixed(now time.Duration) {
	for i := 0; i < len(e.running); {
		s := e.running[i]
		if s.due <= now {
			s.due += e.o.Fixed.ITL
			e.publish(s, s.length())
			e.advance(s, now)
		}
		if i < len(e.running) && e.running[i] == s {
			i++
		}
	}
}
