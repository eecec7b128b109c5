// SPDX-License-Identifier: Apache-2.0

package policy

import "github.com/shunt-lb/shunt/pkg/fleet"

// The reasons of least_queue.
const (
	ReasonLeastQueue      fleet.Reason = "least_queue"       // the fewest requests in engine and on the way
	ReasonLeastQueueBlind fleet.Reason = "least_queue_blind" // the engine's figures are missing or old: by our own requests
)

func init() {
	Register(Spec{
		Name: "least_queue",
		Doc: "the backend whose engine reports the fewest requests for its weight, waiting ones counted double and those sent since " +
			"the report on top",
		Needs:    EngineLoad,
		Weighted: true,
		Reasons:  []fleet.Reason{ReasonLeastQueue, ReasonLeastQueueBlind},
		New:      func(Params) (Policy, error) { return leastQueue{}, nil },
	})
}

type leastQueue struct{}

// queueScore never takes the engine's word for less than our own count: the report is older than our last requests.
func queueScore(c *fleet.Candidate) float64 {
	n := float64(max(c.Requests, 0))
	if c.Fresh {
		g := &c.Gauges
		n = max(n, float64(max(g.Waiting+g.Running, 0)+max(c.Requests-g.Sent, 0))) + float64(max(g.Waiting, 0))
	}
	return (n + 1) / c.Weight
}

func (leastQueue) Pick(q *fleet.Query, c []fleet.Candidate) (int, fleet.Reason) {
	var low lowest
	for i := range c {
		low.offer(i, queueScore(&c[i]))
	}
	best := low.first
	if low.ties > 1 {
		skip := draw(q, low.ties)
		for i := low.first; i < len(c); i++ {
			if queueScore(&c[i]) == low.score {
				if skip == 0 {
					best = i
					break
				}
				skip--
			}
		}
	}
	if !c[best].Fresh {
		return best, ReasonLeastQueueBlind
	}
	return best, ReasonLeastQueue
}
