// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"math"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

// The reasons of consistent_hash.
const (
	ReasonHash      fleet.Reason = "hash"       // the key's own backend
	ReasonHashSpill fleet.Reason = "hash_spill" // its own is over the bound: the next by the same hash
	ReasonHashNone  fleet.Reason = "hash_none"  // the request has no key: the fewest tokens
)

func init() {
	Register(Spec{
		Name: "consistent_hash",
		Doc: "the backend that the session's hash names, or the next one while that is over its bounded share of the tokens; " +
			"balancers agree without a word, and a change of the pool moves only the share that it must",
		Needs:    Body | Tokens | Session,
		Weighted: true,
		Reasons:  []fleet.Reason{ReasonHash, ReasonHashSpill, ReasonHashNone},
		New:      func(p Params) (Policy, error) { return &consistentHash{bound: p.Bound}, nil },
	})
}

// consistentHash is weighted rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads: the candidates are ordered
// for each key by -weight/ln(hash), and the first that is within its bound takes the request.
type consistentHash struct {
	bound float64
}

func (h *consistentHash) Pick(q *fleet.Query, c []fleet.Candidate) (int, fleet.Reason) {
	request := requestTokens(q)
	key := q.Session
	if key == 0 && len(q.Blocks) > 0 {
		key = q.Blocks[0]
	}
	var total, weights float64
	var low lowest
	for i := range c {
		total += float64(max(c[i].Tokens, 0))
		weights += c[i].Weight
		low.offer(i, tokenScore(&c[i], request))
	}
	if key == 0 {
		return fewestTokens(q, c, request, low), ReasonHashNone
	}
	// One more than the share of everything, the request included; the slack as for sessions.
	slack := float64(request) + max(SlackTokens, SlackPrompt*float64(max(q.PromptTokens, 0)))
	own, best := -1, -1
	var first, top float64
	for i := range c {
		s := rendezvous(key, &c[i])
		if own < 0 || s > first {
			own, first = i, s
		}
		bound := h.bound*(total+float64(request))*c[i].Weight/weights + slack
		if float64(max(c[i].Tokens, 0)+request) <= bound && (best < 0 || s > top) {
			best, top = i, s
		}
	}
	switch {
	case best < 0:
		return fewestTokens(q, c, request, low), ReasonHashSpill
	case best != own:
		return best, ReasonHashSpill
	}
	return best, ReasonHash
}

// rendezvous is the candidate's rank for the key.
func rendezvous(key uint64, c *fleet.Candidate) float64 {
	x := key ^ identity(c)*0x9e3779b97f4a7c15
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	x ^= x >> 31
	return -c.Weight / math.Log((float64(x>>11)+0.5)/(1<<53))
}

// identity is a hash of the backend's name, equal for all balancers; without one, its slot.
func identity(c *fleet.Candidate) uint64 {
	if c.Backend == nil {
		return uint64(c.ID)
	}
	h := uint64(14695981039346656037)
	name := c.Backend.Name()
	for i := range len(name) {
		h = (h ^ uint64(name[i])) * 1099511628211
	}
	return h
}
