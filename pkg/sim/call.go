// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/cespare/xxhash/v2"
)

// call is one HTTP request in the engine: one sequence per prompt and choice.
type call struct {
	s       *Server
	id      string
	model   string
	arrived time.Time
	choices []*choice
	notify  chan struct{} // cap 1: some choice went on
	rec     *record
}

// choice is one sequence of a call. Fields after seq are guarded by the server's mutex.
type choice struct {
	call   *call
	index  int
	seed   uint64
	output int // its length
	reason string
	req    Request
	seq    *Seq

	produced int
	done     bool
	first    time.Time // of the tokens
	last     time.Time
}

// submit gives prompts x n sequences to the engine. Output 0 means prefill only.
func (s *Server) submit(rec *record, idPrefix, model string, prompts [][]uint32, n int, lim limits) (*call, error) {
	c := &call{s: s, id: fmt.Sprintf("%s%016x", idPrefix, mix(s.ids.Add(1))), model: model, arrived: time.Now(), notify: make(chan struct{}, 1), rec: rec}
	root := xxhash.Sum64String(model)
	for _, prompt := range prompts {
		hashes := HashBlocks(root, prompt)
		seed := root
		for _, t := range prompt {
			seed = mix(seed ^ uint64(t))
		}
		for i := range n {
			ch := &choice{call: c, index: len(c.choices), seed: seed + uint64(i)}
			ch.output, ch.reason = lim.length(ch.seed, s.o.AnswerTokens, s.engine.MaxModelLen()-len(prompt))
			blocks := hashes
			if ch.output > 0 {
				tail := append([]uint32{}, prompt[len(hashes)*BlockTokens:]...)
				parent := root
				if len(hashes) > 0 {
					parent = uint64(hashes[len(hashes)-1])
				}
				blocks = append(hashes[:len(hashes):len(hashes)], HashBlocks(parent, appendFiller(tail, ch.seed, ch.output))...)
			}
			ch.req = Request{PromptTokens: len(prompt), OutputTokens: ch.output, Blocks: blocks, Tag: ch}
			c.choices = append(c.choices, ch)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	for i, ch := range c.choices {
		seq, err := s.engine.Add(now, ch.req)
		if err != nil {
			for _, earlier := range c.choices[:i] {
				s.engine.Abort(earlier.seq)
			}
			return nil, err
		}
		ch.seq = seq
	}
	s.kick()
	return c, nil
}

// event is called by the driver under the server's mutex.
func (ch *choice) event(ev Event) {
	c := ch.call
	if ev.Token {
		now := time.Now()
		if ev.First {
			ch.first = now
			c.s.metrics.ttft.Observe(now.Sub(c.arrived).Seconds())
		} else {
			c.s.metrics.itl.Observe(now.Sub(ch.last).Seconds())
		}
		ch.last = now
		ch.produced++
	}
	if ch.index == 0 && (ev.First || ev.Done) {
		c.s.log.firstToken(c.rec, time.Since(c.arrived))
	}
	if ev.Done {
		ch.done = true
		c.s.metrics.finished(ch, time.Since(c.arrived))
	}
	select {
	case c.notify <- struct{}{}:
	default:
	}
}

// wait blocks until every choice is finished. If ctx ends first the sequences are aborted.
func (c *call) wait(ctx context.Context) error {
	for !c.finished() {
		if err := c.next(ctx); err != nil {
			return err
		}
	}
	return nil
}

// next blocks until something went on since the last call of next.
func (c *call) next(ctx context.Context) error {
	select {
	case <-c.notify:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (c *call) finished() bool {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	for _, ch := range c.choices {
		if !ch.done {
			return false
		}
	}
	return true
}

// progress returns how many tokens of choice i exist and whether it has ended.
func (c *call) progress(i int) (produced int, done bool) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	return c.choices[i].produced, c.choices[i].done
}

// complete fills in the record of a call that is answered. It comes before the answer's last byte, so that whoever has
// read the answer finds the record.
func (c *call) complete() {
	c.s.log.end(c.rec, c.usage(), false)
	c.s.log.status(c.rec, http.StatusOK)
}

// close ends the call: what still runs is aborted, and the record is completed. It is called on every path.
func (c *call) close() {
	c.s.mu.Lock()
	aborted := false
	for _, ch := range c.choices {
		if !ch.done {
			aborted = true
			c.s.engine.Abort(ch.seq)
			c.s.metrics.aborted.Inc()
		}
	}
	u := c.usageLocked()
	c.s.mu.Unlock()
	c.s.kick() // what waited for the slots can start
	c.s.log.end(c.rec, u, aborted)
}

// usage is what the answer reports. Each prompt counts once, however many choices it has.
type usage struct{ prompt, cached, output int }

func (c *call) usage() usage {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	return c.usageLocked()
}

func (c *call) usageLocked() (u usage) {
	n := max(c.rec.n, 1)
	for i, ch := range c.choices {
		if i%n == 0 {
			u.prompt += ch.seq.PromptTokens
			u.cached += ch.seq.Cached
		}
		u.output += ch.produced
	}
	return u
}

// limits are what a request says of its answer's length. Zero values mean not said.
type limits struct {
	max       int
	min       int
	ignoreEOS bool
	none      bool // prefill only
}

// length decides an answer's length and why it ends there. Room is what the context length leaves.
func (l limits) length(seed uint64, natural, room int) (n int, reason string) {
	if l.none {
		return 0, "stop"
	}
	n, reason = natural, "stop"
	if n == 0 {
		n = 32 + int(mix(seed)%256)
	}
	n = max(n, l.min)
	bound := max(room, 1)
	if l.max > 0 {
		bound = min(bound, l.max)
	}
	if n > bound || l.ignoreEOS && l.max > 0 {
		n, reason = bound, "length"
	}
	return n, reason
}
