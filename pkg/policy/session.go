// SPDX-License-Identifier: Apache-2.0

package policy

import "github.com/shunt-lb/shunt/pkg/fleet"

// The reasons of the session policy.
const (
	ReasonSessionHome  fleet.Reason = "session_home"  // the session's home, within its bound
	ReasonSessionNew   fleet.Reason = "session_new"   // first sight of the session: the fewest tokens
	ReasonSessionSpill fleet.Reason = "session_spill" // this one request elsewhere; the home stays
	ReasonSessionMoved fleet.Reason = "session_moved" // the home takes no work any more: a new home
	ReasonSessionNone  fleet.Reason = "session_none"  // the request belongs to no session: the fewest tokens
)

// How far above its bounded share a home may be before a request spills. Staying spares the prefill of the prompt
// that the home has cached; spilling spares the wait behind the home's excess. Both cost about the same per token, so
// an excess up to what staying is worth is borne: half the prompt, as part of it may have been evicted or be new. The
// floor, about 0.15 s of prefill on one current GPU, keeps the affinity of small fleets at low load, where one
// request is already more than a share of the total.
const (
	SlackTokens = 2048 // floor of the excess that is borne, in tokens
	SlackPrompt = 0.5  // share of the request's prompt that is borne as excess
)

func init() {
	Register(Spec{
		Name: "session",
		Doc: "a new session goes to the backend with the fewest tokens in flight, a known one to its home while the " +
			"home is within the bound, else this one request goes to the fewest tokens",
		Needs:    Body | Tokens | Session,
		Weighted: true,
		Homes:    true,
		Reasons: []fleet.Reason{ReasonSessionHome, ReasonSessionNew, ReasonSessionSpill, ReasonSessionMoved,
			ReasonSessionNone},
		New: func(p Params) (Policy, error) { return &session{bound: p.Bound}, nil },
	})
}

type session struct {
	bound float64
}

// Spilled reports whether the reason stands for one request that left its session's home while the home stays: such
// a request must neither move the session nor pin it.
func Spilled(why fleet.Reason) bool {
	switch why {
	case ReasonSessionSpill, ReasonCostSpill, ReasonPrefixSpill, ReasonHashSpill, fleet.ReasonProbe:
		return true
	}
	return false
}

func (s *session) Pick(q *fleet.Query, c []fleet.Candidate) (int, fleet.Reason) {
	request := requestTokens(q)
	home := -1
	var total, weights float64
	var low lowest
	for i := range c {
		total += float64(max(c[i].Tokens, 0))
		weights += c[i].Weight
		if q.Home != 0 && c[i].ID == q.Home {
			home = i
		}
		low.offer(i, tokenScore(&c[i], request))
	}
	switch {
	case q.Session == 0:
		return fewestTokens(q, c, request, low), ReasonSessionNone
	case q.Home == 0:
		return fewestTokens(q, c, request, low), ReasonSessionNew
	case home < 0 && s.homeStays(q):
		return fewestTokens(q, c, request, low), ReasonSessionSpill
	case home < 0:
		return fewestTokens(q, c, request, low), ReasonSessionMoved
	}
	// Bounded load (Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2017), in tokens and by
	// weight. The request is taken off again by the slack: what counts is the work that it would find there.
	share := c[home].Weight / weights
	slack := float64(request) + max(SlackTokens, SlackPrompt*float64(max(q.PromptTokens, 0)))
	if float64(max(c[home].Tokens, 0)+request) <= s.bound*share*(total+float64(request))+slack ||
		tokenScore(&c[home], request) == low.score {
		return home, ReasonSessionHome
	}
	return fewestTokens(q, c, request, low), ReasonSessionSpill
}

// homeStays tells a home that merely cannot take this request from one that takes none any more: it was tried for this
// request and failed (health will say if it is gone), or it is at its limit of tokens in flight.
func (s *session) homeStays(q *fleet.Query) bool {
	if q.HomeFull {
		return true
	}
	for _, id := range q.Exclude {
		if id == q.Home {
			return true
		}
	}
	return false
}
