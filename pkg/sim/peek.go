// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"time"
)

// What only a simulation can know of an engine: an oracle routes by it, and faults are made with it.

// Peek returns how many of the prompt's tokens the prefix cache holds at this moment.
func (e *Engine) Peek(promptTokens int, blocks []BlockHash) int {
	full := min((promptTokens-1)/e.o.BlockTokens, len(blocks))
	e.match = e.kv.match(e.match[:0], blocks[:full])
	return len(e.match) * e.o.BlockTokens
}

// Backlog returns the prompt tokens that are still to be computed, less what the prefix cache holds of them.
func (e *Engine) Backlog() (tokens int) {
	for _, q := range [...][]*Seq{e.incoming, e.waiting} {
		for _, s := range q {
			tokens += s.length() - e.Peek(s.length(), s.Blocks)
		}
	}
	for _, s := range e.running {
		if left := s.length() - s.computed; left > 1 {
			tokens += left
		}
	}
	return tokens
}

// Context returns the tokens whose keys and values running sequences hold.
func (e *Engine) Context() (tokens int) {
	for _, s := range e.running {
		tokens += s.computed
	}
	return tokens
}

// Slow makes every step from the next on take that many times as long as the profile says.
func (e *Engine) Slow(factor float64) { e.slow = factor }

// Crash aborts everything, forgets the cache, and returns what was aborted.
func (e *Engine) Crash() (lost []*Seq) {
	for _, q := range [...][]*Seq{e.incoming, e.waiting, e.running} {
		lost = append(lost, q...)
	}
	for _, s := range lost {
		e.Abort(s)
	}
	e.planned, e.busy = e.planned[:0], false
	e.kv.reset()
	return lost
}

// Prefill is how long an idle server takes for a prompt of which nothing is cached, in chunks of that many tokens.
func (p *Profile) Prefill(tokens, chunk int) (d time.Duration) {
	for done := 0; done < tokens; done += chunk {
		n := min(chunk, tokens-done)
		d += p.stepTime(batch{prefill: n, prefillWork: float64(n) * (float64(done) + float64(n)/2)})
	}
	return d
}

// WithPrefill returns the profile with the times of its large batches scaled so that an idle server computes that many prompt
// tokens a second in chunks of 2,048. What small batches cost, which memory bounds, stays.
func (p Profile) WithPrefill(rate float64) Profile {
	const chunk = 2048
	rest := p.stepTime(batch{prefill: chunk, prefillWork: chunk * chunk / 2}).Seconds()*1000 - p.linear(chunk)
	floor := p.LinearMS[0]
	factor := max((chunk/rate*1000-rest-floor)/(p.linear(chunk)-floor), 0.01)
	for i, ms := range p.LinearMS {
		p.LinearMS[i] = floor + (ms-floor)*factor
	}
	p.Name = fmt.Sprintf("%s-prefill-%.0f", p.Name, rate)
	return p
}

// Decode is how long a step of so many sequences takes, each with a context of that many tokens.
func (p *Profile) Decode(sequences, context int) time.Duration {
	return p.stepTime(batch{decode: sequences, decodeCtx: sequences * context})
}
