// SPDX-License-Identifier: Apache-2.0

package policy

import "github.com/shunt-lb/shunt/pkg/fleet"

// ReasonLeastTokens: the backend had the fewest tokens in flight for its weight.
const ReasonLeastTokens fleet.Reason = "least_tokens"

func init() {
	Register(Spec{
		Name:     "least_tokens",
		Doc:      "the backend with the fewest tokens in flight for its weight, this request's included; ties at random",
		Needs:    Body | Tokens,
		Weighted: true,
		Reasons:  []fleet.Reason{ReasonLeastTokens},
		New:      func(Params) (Policy, error) { return leastTokens{}, nil },
	})
}

type leastTokens struct{}

func (leastTokens) Pick(q *fleet.Query, c []fleet.Candidate) (int, fleet.Reason) {
	request := requestTokens(q)
	var low lowest
	for i := range c {
		low.offer(i, tokenScore(&c[i], request))
	}
	return fewestTokens(q, c, request, low), ReasonLeastTokens
}
