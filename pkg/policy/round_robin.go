// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"sync/atomic"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

// ReasonRoundRobin: it was the backend's turn.
const ReasonRoundRobin fleet.Reason = "round_robin"

func init() {
	Register(Spec{
		Name:    "round_robin",
		Doc:     "each backend in turn, whatever its load or weight",
		Reasons: []fleet.Reason{ReasonRoundRobin},
		New:     func(Params) (Policy, error) { return new(roundRobin), nil },
	})
}

// roundRobin remembers whose turn it was, not a count of turns: the order then stays fair while candidates come and go.
type roundRobin struct {
	last atomic.Uint32
}

func (r *roundRobin) Pick(_ *fleet.Query, c []fleet.Candidate) (int, fleet.Reason) {
	for {
		last := r.last.Load()
		next, first := -1, 0
		for i := range c {
			if c[i].ID < c[first].ID {
				first = i
			}
			if c[i].ID > fleet.ID(last) && (next < 0 || c[i].ID < c[next].ID) {
				next = i
			}
		}
		if next < 0 {
			next = first
		}
		if r.last.CompareAndSwap(last, uint32(c[next].ID)) {
			return next, ReasonRoundRobin
		}
	}
}
