// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"sync"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

// ReasonWeightedRoundRobin: it was the backend's turn by its weight.
const ReasonWeightedRoundRobin fleet.Reason = "weighted_round_robin"

func init() {
	Register(Spec{
		Name:     "weighted_round_robin",
		Doc:      "each backend as often as its weight says, its turns spread evenly",
		Weighted: true,
		Reasons:  []fleet.Reason{ReasonWeightedRoundRobin},
		New:      func(Params) (Policy, error) { return new(weightedRoundRobin), nil },
	})
}

// weightedRoundRobin is nginx's smooth one: each pick raises everyone's credit by its weight, and the highest pays for all.
type weightedRoundRobin struct {
	mu     sync.Mutex
	credit [fleet.MaxBackends]float64
}

func (w *weightedRoundRobin) Pick(q *fleet.Query, c []fleet.Candidate) (int, fleet.Reason) {
	w.mu.Lock()
	defer w.mu.Unlock()
	best, total := 0, 0.0
	for i := range c {
		w.credit[slot(&c[i])] += c[i].Weight
		total += c[i].Weight
	}
	var top lowest
	for i := range c {
		top.offer(i, -w.credit[slot(&c[i])])
	}
	best = top.first
	if top.ties > 1 { // at the start, or equal weights: whoever; a fixed order would send each balancer's first request to one
		skip := draw(q, top.ties)
		for i := top.first; i < len(c); i++ {
			if -w.credit[slot(&c[i])] == top.score {
				if skip == 0 {
					best = i
					break
				}
				skip--
			}
		}
	}
	// Who was away for long comes back without what it would have saved or owed.
	s := slot(&c[best])
	w.credit[s] = max(w.credit[s]-total, -total)
	return best, ReasonWeightedRoundRobin
}

func slot(c *fleet.Candidate) int { return int(c.ID) % fleet.MaxBackends }
