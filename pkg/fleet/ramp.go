// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"slices"
	"time"
)

const (
	// firstRamp is the share of its weight that a backend begins with.
	firstRamp = 0.1
	// evenRamp: backends whose ramps differ by less came up together, and are held to be equal.
	evenRamp = 0.9
)

// cameUp starts the backend's slow start.
func (b *Backend) cameUp() {
	now := max(int64(b.now()), 1)
	b.since.Store(now)
	if p := b.in.Load(); p != nil {
		p.lastUp.Store(now) // one that is a moment older is as good
	}
}

// ramp is the share of its weight that the backend has by now, beside one that came up long ago.
func (b *Backend) ramp(now, slowStart time.Duration) float64 {
	since := b.since.Load()
	if since == 0 {
		return 1
	}
	return min(max(float64(int64(now)-since)/float64(slowStart), firstRamp), 1)
}

// ramping returns the ramp of the backend that is furthest, which the others' are relative to; 0 if no ramp counts. It matters
// only who came up later than others: after a start of the daemon all are new, and equal.
func (p *Pool) ramping(now time.Duration) float64 {
	last := p.lastUp.Load()
	if p.slowStart <= 0 || last == 0 || int64(now)-last >= int64(p.slowStart) {
		return 0
	}
	top := 0.0
	for _, b := range p.backends {
		if b.Eligible() {
			top = max(top, b.ramp(now, p.slowStart))
		}
	}
	return top
}

// grown is the share of its weight that the backend has in comparison, given what ramping returned.
func (p *Pool) grown(b *Backend, now time.Duration, top float64) float64 {
	if top == 0 {
		return 1
	}
	if r := b.ramp(now, p.slowStart) / top; r < evenRamp {
		return r
	}
	return 1
}

// leaveRamping is the slow start under a policy that goes by no weights: a backend that came up later than others is a
// candidate for a growing share of the requests. Its own sessions come back to it.
func (p *Pool) leaveRamping(q *Query, c []Candidate, now time.Duration, top float64) []Candidate {
	left := len(c)
	if top == 0 || p.weighted || left < 2 {
		return c
	}
	return slices.DeleteFunc(c, func(c Candidate) bool {
		r := p.grown(c.Backend, now, top)
		if r >= 1 || left == 1 || c.ID == q.Home || p.rand.Float64() < r {
			return false
		}
		left--
		return true
	})
}
