// SPDX-License-Identifier: Apache-2.0

package policy

import "github.com/shunt-lb/shunt/pkg/fleet"

// ReasonPowerOfTwo: of two backends drawn at random it had fewer requests in flight.
const ReasonPowerOfTwo fleet.Reason = "power_of_two"

func init() {
	Register(Spec{
		Name:     "power_of_two",
		Doc:      "of two backends drawn at random by weight, the one with fewer requests in flight for its weight",
		Weighted: true,
		Reasons:  []fleet.Reason{ReasonPowerOfTwo},
		New:      func(Params) (Policy, error) { return powerOfTwo{}, nil },
	})
}

type powerOfTwo struct{}

func (powerOfTwo) Pick(q *fleet.Query, c []fleet.Candidate) (int, fleet.Reason) {
	if len(c) == 1 {
		return 0, ReasonPowerOfTwo
	}
	total := 0.0
	for i := range c {
		total += c[i].Weight
	}
	a := drawWeighted(q, c, total, -1)
	b := drawWeighted(q, c, total-c[a].Weight, a)
	if requestScore(&c[b]) < requestScore(&c[a]) {
		a = b
	}
	return a, ReasonPowerOfTwo
}

// drawWeighted draws a candidate other than skip; total is the sum of the weights without it.
func drawWeighted(q *fleet.Query, c []fleet.Candidate, total float64, skip int) int {
	const grain = 1 << 30
	x := float64(draw(q, grain)) / grain * total
	last := 0
	for i := range c {
		if i == skip {
			continue
		}
		last = i
		if x -= c[i].Weight; x < 0 {
			break
		}
	}
	return last
}
