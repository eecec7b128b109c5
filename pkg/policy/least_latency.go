// SPDX-License-Identifier: Apache-2.0

package policy

import "github.com/shunt-lb/shunt/pkg/fleet"

// ReasonLeastLatency: the lowest peak of the first-byte times, times the requests in flight.
const ReasonLeastLatency fleet.Reason = "least_latency"

func init() {
	Register(Spec{
		Name: "least_latency",
		Doc: "of two backends drawn at random, the lower product of recent peak time to first byte (it rises at once and fades) " +
			"and requests in flight",
		Reasons: []fleet.Reason{ReasonLeastLatency},
		New:     func(Params) (Policy, error) { return leastLatency{}, nil },
	})
}

// leastLatency is the peak EWMA of Finagle and Linkerd. Two are drawn, since latency is seen late: the best of all would be
// everybody's choice until its answers are slow.
type leastLatency struct{}

// unknownLatency stands for a backend that has answered nothing yet: neither shunned nor flooded.
const unknownLatency = 0.1

func latencyScore(c *fleet.Candidate) float64 {
	l := c.Latency
	if l <= 0 {
		l = unknownLatency
	}
	return l * float64(max(c.Requests, 0)+1)
}

func (leastLatency) Pick(q *fleet.Query, c []fleet.Candidate) (int, fleet.Reason) {
	if len(c) == 1 {
		return 0, ReasonLeastLatency
	}
	a := draw(q, len(c))
	b := (a + 1 + draw(q, len(c)-1)) % len(c)
	if latencyScore(&c[b]) < latencyScore(&c[a]) {
		a = b
	}
	return a, ReasonLeastLatency
}
