// SPDX-License-Identifier: Apache-2.0

package policy

import "github.com/shunt-lb/shunt/pkg/fleet"

// The reasons of the prefix policy.
const (
	ReasonPrefix      fleet.Reason = "prefix"       // it holds the most of the prompt, within its bound
	ReasonPrefixSpill fleet.Reason = "prefix_spill" // who holds more is over the bound
	ReasonPrefixCold  fleet.Reason = "prefix_cold"  // nobody holds any of it: the fewest tokens
)

func init() {
	Register(Spec{
		Name: "prefix",
		Doc: "the backend that holds the longest beginning of the prompt and is within its bounded share of the tokens, else the " +
			"fewest tokens in flight",
		Needs:    Body | Tokens | Session | PrefixIndex,
		Weighted: true,
		Homes:    true,
		Reasons:  []fleet.Reason{ReasonPrefix, ReasonPrefixSpill, ReasonPrefixCold},
		New:      func(p Params) (Policy, error) { return &prefix{bound: p.Bound}, nil },
	})
}

type prefix struct {
	bound float64
}

func (p *prefix) Pick(q *fleet.Query, c []fleet.Candidate) (int, fleet.Reason) {
	request := requestTokens(q)
	var total, weights float64
	var low lowest
	most := int64(0)
	for i := range c {
		total += float64(max(c[i].Tokens, 0))
		weights += c[i].Weight
		most = max(most, held(q, &c[i]))
		low.offer(i, tokenScore(&c[i], request))
	}
	if most <= 0 {
		return fewestTokens(q, c, request, low), ReasonPrefixCold
	}
	// An excess is borne up to half of what staying spares; see session.
	best, longest := -1, int64(0)
	for i := range c {
		has := held(q, &c[i])
		if has <= 0 {
			continue
		}
		bound := p.bound*(total+float64(request))*c[i].Weight/weights + float64(request) + max(SlackTokens, SlackPrompt*float64(has))
		if float64(max(c[i].Tokens, 0)+request) > bound {
			continue
		}
		if best < 0 || has > longest || has == longest && tokenScore(&c[i], request) < tokenScore(&c[best], request) {
			best, longest = i, has
		}
	}
	if best < 0 {
		return fewestTokens(q, c, request, low), ReasonPrefixSpill
	}
	// A beginning that everyone shares says nothing: what is spared must outweigh what the others would do meanwhile.
	if spared := float64(longest - held(q, &c[low.first])); float64(c[best].Tokens)/c[best].Weight-float64(c[low.first].Tokens)/c[low.first].Weight > spared {
		return fewestTokens(q, c, request, low), ReasonPrefixSpill
	}
	if longest < most {
		return best, ReasonPrefixSpill
	}
	return best, ReasonPrefix
}
