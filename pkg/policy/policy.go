// SPDX-License-Identifier: Apache-2.0

// Package policy decides which backend of a pool serves a request.
//
// A policy is one file with one Register call in its init function; nothing else is edited to add one. It must pass
// policytest.Run, which a test of that package calls for every name in the registry.
package policy

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

// DefaultBound is Params.Bound where none is configured: a backend may carry a quarter more than its share.
const DefaultBound = 1.25

// Policy is the contract. Pick gets at least one candidate, all of which may take the request, and returns the index
// of one of them and a reason that the policy's Spec declares. It runs under the pool's lock: it must not allocate,
// block, or keep or change the query or the slice. It may keep state of its own, which it must guard, since `shunt
// explain` and requests ask at the same time.
type Policy interface{ fleet.Chooser }

// Needs is what a policy must know of a request or a backend. A route whose policy does not need the body is not
// parsed for it, and a configuration in which nothing feeds a need is refused.
type Needs uint8

// The needs.
const (
	Body        Needs = 1 << iota // facts from the request's body
	Tokens                        // the prompt's length and the expected output's
	Session                       // who the session is, and its home
	PrefixIndex                   // which backend has how much of the prompt cached
	EngineLoad                    // figures that the engines report
)

// Has reports whether n includes all of m.
func (n Needs) Has(m Needs) bool { return n&m == m }

func (n Needs) String() string {
	var s []string
	for i, name := range [...]string{"body", "tokens", "session", "prefix-index", "engine-load"} {
		if n.Has(1 << i) {
			s = append(s, name)
		}
	}
	return strings.Join(s, ",")
}

// Params are the settings that policies share. A policy ignores those that are not its own.
type Params struct {
	// Bound is how much more than its share of the pool's tokens a backend may carry before work that prefers it
	// goes elsewhere. At least 1; 0 means DefaultBound.
	Bound float64
}

// Spec describes a policy to the registry, to `shunt check` and to the reader of the documentation.
type Spec struct {
	Name     string // as written in the configuration
	Doc      string // one sentence
	Needs    Needs
	Weighted bool           // shares follow the backends' weights
	Homes    bool           // a known session goes to its home where loads are even
	Reasons  []fleet.Reason // all that Pick may return
	New      func(Params) (Policy, error)
}

var registry = map[string]Spec{}

// Register adds a policy. It is called from init functions only and panics on an incomplete or repeated Spec.
func Register(s Spec) {
	if s.Name == "" || s.Doc == "" || s.New == nil || len(s.Reasons) == 0 {
		panic(fmt.Sprintf("policy: incomplete spec %q", s.Name))
	}
	if _, ok := registry[s.Name]; ok {
		panic(fmt.Sprintf("policy: %q registered twice", s.Name))
	}
	registry[s.Name] = s
}

// Names returns the registered policies in alphabetical order.
func Names() []string {
	names := make([]string, 0, len(registry))
	for n := range registry {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// Lookup returns the policy's description.
func Lookup(name string) (Spec, bool) {
	s, ok := registry[name]
	return s, ok
}

// New returns a fresh instance of the named policy. Each pool has its own. It fails on an unknown name, which the
// error answers with the known ones, and on params that make no sense.
func New(name string, p Params) (Policy, error) {
	s, ok := registry[name]
	if !ok {
		return nil, fmt.Errorf("unknown policy %q (known: %s)", name, strings.Join(Names(), ", "))
	}
	if p.Bound == 0 {
		p.Bound = DefaultBound
	}
	if p.Bound < 1 || math.IsNaN(p.Bound) || math.IsInf(p.Bound, 0) {
		return nil, fmt.Errorf("make policy %s: bound %v must be a number of at least 1", name, p.Bound)
	}
	pol, err := s.New(p)
	if err != nil {
		return nil, fmt.Errorf("make policy %s: %w", name, err)
	}
	return pol, nil
}

// requestTokens is what the request would add to a backend's weight.
func requestTokens(q *fleet.Query) int64 { return max(q.PromptTokens, 0) + max(q.OutputTokens, 0) }

// heldShare is how much of a known session's prompt its home is taken to hold where the prompt's blocks are not known.
const heldShare = 0.75

// held is how many of the prompt's tokens the candidate is believed to hold.
func held(q *fleet.Query, c *fleet.Candidate) int64 {
	if len(q.Blocks) == 0 && q.Home != 0 && q.Home == c.ID {
		return int64(heldShare * float64(max(q.PromptTokens, 0)))
	}
	return c.Cached
}

// draw returns a random number below n, from the query's source where it has one.
func draw(q *fleet.Query, n int) int {
	if q.Rand != nil {
		return q.Rand.IntN(n)
	}
	return rand.IntN(n)
}

// lowest is the running minimum of a scan over candidates, and how many share it. Equal rationals give equal
// quotients, so ties of backends with different weights are found too.
type lowest struct {
	score float64
	first int
	ties  int
}

func (l *lowest) offer(i int, score float64) {
	switch {
	case l.ties == 0 || score < l.score:
		*l = lowest{score: score, first: i, ties: 1}
	case score == l.score:
		l.ties++
	}
}

// tokenScore is the candidate's tokens in flight with the request on top, relative to its capacity. The words of the
// kernel may be a moment behind those of the front end, so a sum below zero counts as zero: it must not attract work.
func tokenScore(c *fleet.Candidate, request int64) float64 {
	return float64(max(c.Tokens, 0)+request) / c.Weight
}

// fewestTokens resolves ties of a scan by tokenScore at random.
func fewestTokens(q *fleet.Query, c []fleet.Candidate, request int64, l lowest) int {
	if l.ties == 1 {
		return l.first
	}
	skip := draw(q, l.ties)
	for i := l.first; i < len(c); i++ {
		if tokenScore(&c[i], request) == l.score {
			if skip == 0 {
				return i
			}
			skip--
		}
	}
	return l.first
}
