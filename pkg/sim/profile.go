// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// DefaultProfile is the server that an engine models when nothing else is asked for.
const DefaultProfile = "llama-3-8b-a100-tp1"

// Profile is what one inference server (a model on a number of GPUs) costs per step. All times are milliseconds.
//
//	step = L(prefill tokens + decoding sequences) + HostStepMS + HostRequestMS*sequences
//	     + PrefillAttnMS * sum over prefills of n*(context + n/2) + DecodeAttnMS * sum over decodes of context
//
// L is linear between the knots, and goes on with the last slope beyond them.
type Profile struct {
	Name   string
	Source string // where the figures come from

	LinearMS        [len(knots)]float64 // all linear layers and all-reduces at each knot
	PrefillAttnMS   float64             // per prompt token and token of context
	DecodeAttnMS    float64             // per token of context
	HostStepMS      float64             // scheduler and kernel launches, per step
	HostRequestMS   float64             // per decoding sequence
	KVTokens        int                 // tokens that fit the KV cache
	KVBytesPerToken int                 // over all GPUs of the server
}

// LookupProfile returns a built-in profile; the error names those that exist.
func LookupProfile(name string) (Profile, error) {
	p, ok := profiles[name]
	if !ok {
		return Profile{}, fmt.Errorf("look up profile %q: %w (have %s)", name, ErrUnknownProfile, strings.Join(ProfileNames(), ", "))
	}
	return p, nil
}

// ProfileNames lists the built-in profiles in alphabetical order.
func ProfileNames() []string {
	names := make([]string, 0, len(profiles))
	for n := range profiles {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// batch is the shape of one step, as far as its time depends on it.
type batch struct {
	prefill     int     // prompt tokens computed
	decode      int     // sequences that compute one token
	prefillWork float64 // sum of n*(context + n/2)
	decodeCtx   int     // sum of the contexts of the decoding sequences
}

// stepTime is how long the server computes on b.
func (p *Profile) stepTime(b batch) time.Duration {
	if b.prefill+b.decode == 0 {
		return 0
	}
	ms := p.linear(float64(b.prefill+b.decode)) + p.HostStepMS + p.HostRequestMS*float64(b.decode) +
		p.PrefillAttnMS*b.prefillWork + p.DecodeAttnMS*float64(b.decodeCtx)
	return time.Duration(ms * float64(time.Millisecond))
}

func (p *Profile) linear(n float64) float64 {
	if n <= knots[0] {
		return p.LinearMS[0]
	}
	i := 1
	for i < len(knots)-1 && n > knots[i] {
		i++
	}
	x0, x1, y0, y1 := knots[i-1], knots[i], p.LinearMS[i-1], p.LinearMS[i]
	return y0 + (y1-y0)*(n-x0)/(x1-x0)
}
