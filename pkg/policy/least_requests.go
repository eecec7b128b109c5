// SPDX-License-Identifier: Apache-2.0

package policy

import "github.com/shunt-lb/shunt/pkg/fleet"

// ReasonLeastRequests: the backend had the fewest requests in flight for its weight.
const ReasonLeastRequests fleet.Reason = "least_requests"

func init() {
	Register(Spec{
		Name:     "least_requests",
		Doc:      "the backend with the fewest requests in flight for its weight, this request included; ties at random",
		Weighted: true,
		Reasons:  []fleet.Reason{ReasonLeastRequests},
		New:      func(Params) (Policy, error) { return leastRequests{}, nil },
	})
}

type leastRequests struct{}

func requestScore(c *fleet.Candidate) float64 { return float64(max(c.Requests, 0)+1) / c.Weight }

func (leastRequests) Pick(q *fleet.Query, c []fleet.Candidate) (int, fleet.Reason) {
	var low lowest
	for i := range c {
		low.offer(i, requestScore(&c[i]))
	}
	if low.ties == 1 {
		return low.first, ReasonLeastRequests
	}
	skip := draw(q, low.ties)
	for i := low.first; i < len(c); i++ {
		if requestScore(&c[i]) == low.score {
			if skip == 0 {
				return i, ReasonLeastRequests
			}
			skip--
		}
	}
	return low.first, ReasonLeastRequests
}
