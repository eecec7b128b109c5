// SPDX-License-Identifier: Apache-2.0

package policy

import "github.com/shunt-lb/shunt/pkg/fleet"

// The reasons of least_cost.
const (
	ReasonCostCached fleet.Reason = "cost_cached" // the lowest cost, and nobody holds more of the prompt
	ReasonCostCold   fleet.Reason = "cost_cold"   // the lowest cost; nobody holds any of the prompt
	ReasonCostSpill  fleet.Reason = "cost_spill"  // somebody holds more of the prompt, but costs more
)

// What the parts of the cost weigh, in seconds of the request itself. Found on traces of chats, agents and mixed traffic at
// 60 to 100 % load; the results hardly change within a factor of two around each.
const (
	// costWork counts the prefill that the request brings once more, for whoever comes after it: what is held elsewhere and
	// computed anew also drives others' prefixes out of the cache.
	costWork = 1
	// costChurn counts it once more for a cache that has lately taken in as much as the mean, and in proportion: it is the
	// prefixes of the conversations there that have to go. This spreads conversations evenly where the load of a moment does not.
	costChurn = 2
	// costWaiting counts it for each request that waits there, costDecoding for each answer that it makes stutter.
	costWaiting  = 1
	costDecoding = 0.15
	// costFull is the barrier of a filling KV cache: at half of it, this many seconds.
	costFull = 1
	// costMove is what it takes to draw a session from its home: the home holds the session's last answer too, of which the
	// index knows nothing, and connections that are steered there cost nothing here.
	costMove = 0.1
	// costLate counts each second beyond the request's deadline.
	costLate = 4
	// fullest bounds the barrier: beyond it backends differ by the rest of their cost.
	fullest = 0.98
)

func init() {
	Register(Spec{
		Name: "least_cost",
		Doc: "the backend where the request costs the fewest seconds: predicted time to first token (queue and tokens not cached " +
			"there, at its learned speed), the delay of others, its own decoding, and a barrier as the KV cache fills",
		Needs:   Body | Tokens | Session | PrefixIndex,
		Reasons: []fleet.Reason{ReasonCostCached, ReasonCostCold, ReasonCostSpill},
		Homes:   true,
		New:     func(Params) (Policy, error) { return leastCost{}, nil },
	})
}

// leastCost keeps nothing of its own: what it knows of a backend is learned in the ledger, at the backend.
type leastCost struct{}

func (leastCost) Pick(q *fleet.Query, c []fleet.Candidate) (int, fleet.Reason) {
	var low lowest
	most, churn := int64(0), 0.0
	for i := range c {
		churn += inflow(&c[i])
	}
	churn /= float64(len(c))
	for i := range c {
		low.offer(i, seconds(q, &c[i], churn))
		most = max(most, held(q, &c[i]))
	}
	best := low.first
	if low.ties > 1 {
		skip := draw(q, low.ties)
		for i := low.first; i < len(c); i++ {
			if seconds(q, &c[i], churn) != low.score {
				continue
			}
			if skip == 0 {
				best = i
				break
			}
			skip--
		}
	}
	switch {
	case most == 0:
		return best, ReasonCostCold
	case held(q, &c[best]) < most:
		return best, ReasonCostSpill
	}
	return best, ReasonCostCached
}

// inflow is the candidate's recent prefill in seconds; one more, so that an idle pool has a mean.
func inflow(c *fleet.Candidate) float64 {
	if c.Speed.PrefillRate <= 0 {
		return 1
	}
	return 1 + c.Inflow/float64(c.Speed.PrefillRate)
}

// seconds is what the request costs at the candidate; churn is the candidates' mean inflow.
func seconds(q *fleet.Query, c *fleet.Candidate, churn float64) float64 {
	prompt := float64(max(q.PromptTokens, 0))
	s := &c.Speed
	if s.PrefillRate <= 0 { // nothing is known but the load
		return tokenScore(c, requestTokens(q)-held(q, c)) / float64(fleet.DefaultSpeed.PrefillRate)
	}
	each := 1 / float64(s.PrefillRate)
	cached := float64(held(q, c))
	own := max(prompt-cached, 0) * each
	waiting, context := float64(max(c.Waiting, 0)), float64(max(c.Context, 0))
	decoding := max(float64(c.Requests)-waiting, 0)
	queue := float64(c.Queued)*each + waiting*float64(s.QueueBase)
	full := 0.0
	if c.Fresh {
		full = c.Gauges.KVUse
		if more := foreign(c); more > 0 { // of other balancers; they are taken to be as ours are
			size := prompt
			if c.Requests > 0 {
				size = context / float64(c.Requests)
			}
			wait := min(more, max(float64(c.Gauges.Waiting)-waiting, 0))
			queue += wait * (size*each + float64(s.QueueBase))
			waiting += wait
			decoding += more - wait
			context += more * size
		}
	}
	first := float64(s.PrefillBase) + queue + own
	cost := first + own*(costWork+costChurn*inflow(c)/churn+costWaiting*waiting+costDecoding*decoding) +
		float64(max(q.OutputTokens, 0))*(float64(s.DecodeBase)+float64(s.DecodeSlope)*context)
	if c.Gauges.KVTokens > 0 { // the size is a fact; how much of it is in use grows old
		full = max(full, (context+prompt-cached)/float64(c.Gauges.KVTokens))
	}
	if full > 0 {
		full = min(full, fullest)
		cost += costFull * full / (1 - full)
	}
	if q.Home != 0 && q.Home != c.ID {
		cost += costMove
	}
	if q.Deadline > 0 {
		cost += costLate * max(first-q.Deadline.Seconds(), 0)
	}
	return cost
}

// foreignTrust is how much the engine's requests of others count: a report is old when it comes, and balancers that all follow
// the last one run after each other.
const foreignTrust = 0.5

// foreign is the engine's requests that are not the front end's own.
func foreign(c *fleet.Candidate) float64 {
	return foreignTrust * float64(max(c.Gauges.Waiting+c.Gauges.Running-c.Gauges.Sent, 0))
}
