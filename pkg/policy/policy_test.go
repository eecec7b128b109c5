// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/policy"
	"github.com/shunt-lb/shunt/pkg/policy/policytest"
)

func newPolicy(t *testing.T, name string, p policy.Params) policy.Policy {
	t.Helper()
	pol, err := policy.New(name, p)
	if err != nil {
		t.Fatal(err)
	}
	return pol
}

func TestRegistry(t *testing.T) {
	want := []string{"least_requests", "least_tokens", "round_robin", "session"}
	names := policy.Names()
	if !slices.IsSorted(names) {
		t.Errorf("names %v are not sorted", names)
	}
	for _, w := range want {
		if !slices.Contains(names, w) {
			t.Errorf("policy %s is not registered", w)
		}
	}
	if _, err := policy.New("nonesuch", policy.Params{}); err == nil || !strings.Contains(err.Error(), "least_tokens") {
		t.Errorf("unknown policy: error %v does not name the known ones", err)
	}
	for _, bound := range []float64{0.99, -1, math.NaN(), math.Inf(1)} {
		if _, err := policy.New("session", policy.Params{Bound: bound}); err == nil {
			t.Errorf("bound %v is accepted", bound)
		}
	}
	spec, _ := policy.Lookup("session")
	if got := spec.Needs.String(); got != "body,tokens,session" {
		t.Errorf("session needs %q", got)
	}
}

func TestRegisterRefuses(t *testing.T) {
	spec, _ := policy.Lookup("session")
	unnamed := spec
	unnamed.Name = ""
	for _, s := range []policy.Spec{spec, unnamed, {Name: "x"}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("spec %q: no panic", s.Name)
				}
			}()
			policy.Register(s)
		}()
	}
}

func cands(tokens ...int64) []fleet.Candidate {
	c := policytest.Candidates(len(tokens))
	for i := range c {
		c[i].Tokens = tokens[i]
	}
	return c
}

// TestBigRequest is what token counts are for: small requests stay clear of the backend that has a big one.
func TestBigRequest(t *testing.T) {
	for name, clear := range map[string]bool{"least_tokens": true, "session": true, "round_robin": false} {
		p, r, c := newPolicy(t, name, policy.Params{}), policytest.Source(1), policytest.Candidates(2)
		take := func(prompt int64) int {
			q := &fleet.Query{Session: r.Uint64() | 1, PromptTokens: prompt, OutputTokens: 16, Rand: r}
			i, _ := p.Pick(q, c)
			c[i].Tokens += prompt + 16
			c[i].Requests++
			return i
		}
		big, behind := take(4000), 0
		for range 20 {
			if take(10) == big {
				behind++
			}
		}
		if clear && behind != 0 || !clear && (behind < 8 || behind > 12) {
			t.Errorf("%s: %d of 20 small requests are behind the big one", name, behind)
		}
	}
}

func TestLeast(t *testing.T) {
	tests := []struct {
		name    string
		policy  string
		change  func(c []fleet.Candidate)
		request int64
		want    []int
	}{
		{"fewest tokens", "least_tokens", func(c []fleet.Candidate) { c[2].Tokens = 5 }, 100, []int{2}},
		{"requests do not count", "least_tokens", func(c []fleet.Candidate) { c[2].Tokens, c[2].Requests = 5, 1000 }, 100, []int{2}},
		{"the request counts by weight", "least_tokens", func(c []fleet.Candidate) { c[1].Tokens, c[1].Weight = 50, 2 }, 100, []int{1}},
		{"a small one stays with the idle", "least_tokens", func(c []fleet.Candidate) {
			c[0].Tokens, c[1].Tokens, c[2].Tokens, c[1].Weight = 0, 50, 0, 2
		}, 10, []int{0, 2}},
		{"below zero is zero", "least_tokens", func(c []fleet.Candidate) { c[0].Tokens, c[1].Tokens, c[2].Tokens = -900, 0, 7 }, 1, []int{0, 1}},
		{"fewest requests", "least_requests", func(c []fleet.Candidate) { c[1].Requests, c[1].Tokens = 1, 1<<30 }, 1, []int{1}},
		{"requests by weight", "least_requests", func(c []fleet.Candidate) { c[0].Requests, c[0].Weight = 5, 4 }, 1, []int{0}},
		{"ties across weights", "least_requests", func(c []fleet.Candidate) {
			c[0].Requests, c[1].Requests, c[1].Weight, c[2].Requests, c[2].Weight = 9, 0, 3, 1, 6
		}, 1, []int{1, 2}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := cands(1000, 1000, 1000)
			for i := range c {
				c[i].Requests = 10
			}
			tt.change(c)
			p, r := newPolicy(t, tt.policy, policy.Params{}), policytest.Source(1)
			seen := map[int]bool{}
			for range 100 {
				i, _ := p.Pick(&fleet.Query{PromptTokens: tt.request, Rand: r}, c)
				seen[i] = true
			}
			for i := range c {
				if seen[i] != slices.Contains(tt.want, i) {
					t.Errorf("candidates chosen: %v, want %v", seen, tt.want)
					break
				}
			}
		})
	}
}

func TestSession(t *testing.T) {
	tests := []struct {
		name   string
		query  fleet.Query
		tokens []int64
		weight []float64
		want   fleet.ID
		why    fleet.Reason
	}{
		{"no session", fleet.Query{Home: 1, PromptTokens: 10}, []int64{50, 7, 60}, nil, 2, policy.ReasonSessionNone},
		{"new", fleet.Query{Session: 1, PromptTokens: 10}, []int64{50, 60, 7}, nil, 3, policy.ReasonSessionNew},
		{"home, idle fleet", fleet.Query{Session: 1, Home: 2, PromptTokens: 90_000, OutputTokens: 500}, []int64{0, 0, 0}, nil, 2, policy.ReasonSessionHome},
		{"home, low load", fleet.Query{Session: 1, Home: 2, PromptTokens: 100, OutputTokens: 200}, []int64{0, 1500, 0}, nil, 2, policy.ReasonSessionHome},
		{"home, at even load", fleet.Query{Session: 1, Home: 2, PromptTokens: 100, OutputTokens: 200}, []int64{40_000, 41_000, 39_000}, nil, 2, policy.ReasonSessionHome},
		// 1.25 * 20,000 / 3 + 2,048 = 10,381.3
		{"just within", fleet.Query{Session: 1, Home: 1, PromptTokens: 100}, []int64{10_381, 5_000, 4_519}, nil, 1, policy.ReasonSessionHome},
		{"just over", fleet.Query{Session: 1, Home: 1, PromptTokens: 100}, []int64{10_382, 5_000, 4_518}, nil, 3, policy.ReasonSessionSpill},
		{"over the bound", fleet.Query{Session: 1, Home: 2, PromptTokens: 100, OutputTokens: 200}, []int64{40_000, 90_000, 39_000}, nil, 3, policy.ReasonSessionSpill},
		{"a long prompt is worth a wait", fleet.Query{Session: 1, Home: 2, PromptTokens: 30_000}, []int64{0, 14_000, 0}, nil, 2, policy.ReasonSessionHome},
		{"a short one is not", fleet.Query{Session: 1, Home: 2, PromptTokens: 3_000}, []int64{0, 14_000, 0}, nil, 0, policy.ReasonSessionSpill},
		{"a big home carries more", fleet.Query{Session: 1, Home: 1, PromptTokens: 100}, []int64{60_000, 20_000, 20_000}, []float64{3, 1, 1}, 1, policy.ReasonSessionHome},
		{"a small one less", fleet.Query{Session: 1, Home: 2, PromptTokens: 100}, []int64{60_000, 35_000, 20_000}, []float64{3, 1, 1}, 0, policy.ReasonSessionSpill},
		{"home gone", fleet.Query{Session: 1, Home: 9, PromptTokens: 10}, []int64{50, 7, 60}, nil, 2, policy.ReasonSessionMoved},
		{"home failed this request", fleet.Query{Session: 1, Home: 9, Exclude: []fleet.ID{4, 9}}, []int64{50, 7, 60}, nil, 2, policy.ReasonSessionSpill},
		{"home full", fleet.Query{Session: 1, Home: 9, HomeFull: true}, []int64{50, 7, 60}, nil, 2, policy.ReasonSessionSpill},
		{"alone", fleet.Query{Session: 1, Home: 1, PromptTokens: 10}, []int64{1 << 40}, nil, 1, policy.ReasonSessionHome},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := cands(tt.tokens...)
			for i, w := range tt.weight {
				c[i].Weight = w
			}
			tt.query.Rand = policytest.Source(1)
			i, why := newPolicy(t, "session", policy.Params{}).Pick(&tt.query, c)
			if why != tt.why || tt.want != 0 && c[i].ID != tt.want {
				t.Errorf("picked backend %d (%s), want %d (%s)", c[i].ID, why, tt.want, tt.why)
			}
			if why == policy.ReasonSessionSpill && c[i].ID == tt.query.Home {
				t.Error("spilled to the home itself")
			}
			if got := policy.Spilled(why); got != (tt.why == policy.ReasonSessionSpill) {
				t.Errorf("Spilled(%s) = %v", why, got)
			}
		})
	}
}

// TestSessionBound: however hot one home is, it carries no more than the bound and the slack.
func TestSessionBound(t *testing.T) {
	for _, bound := range []float64{1, 1.25, 2} {
		p, r, c := newPolicy(t, "session", policy.Params{Bound: bound}), policytest.Source(1), policytest.Candidates(4)
		home, spilled := 0, 0
		for range 2000 {
			q := &fleet.Query{Session: 7, Home: 3, PromptTokens: 300, OutputTokens: 100, Rand: r}
			i, why := p.Pick(q, c)
			c[i].Tokens += 400
			if why == policy.ReasonSessionHome {
				home++
			} else {
				spilled++
			}
		}
		mean := float64(2000*400) / 4
		if got := float64(c[2].Tokens); got > bound*mean+policy.SlackTokens+400 || got < bound*mean*0.9 {
			t.Errorf("bound %v: the home carries %.0f, mean %.0f", bound, got, mean)
		}
		if home == 0 || spilled == 0 {
			t.Errorf("bound %v: %d home, %d spilled", bound, home, spilled)
		}
	}
}

func TestRoundRobinOrder(t *testing.T) {
	p := newPolicy(t, "round_robin", policy.Params{})
	var got []fleet.ID
	pick := func(ids ...fleet.ID) {
		c := make([]fleet.Candidate, len(ids))
		for i, id := range ids {
			c[i] = fleet.Candidate{ID: id, Weight: 1}
		}
		i, _ := p.Pick(&fleet.Query{}, c)
		got = append(got, c[i].ID)
	}
	pick(1, 2, 3)
	pick(3, 2, 1)
	pick(1, 2) // 3 is down
	pick(1, 2, 3)
	pick(1, 2, 3, 1000)
	pick(1, 2, 3, 1000)
	pick(1, 2, 3, 1000)
	if want := []fleet.ID{1, 2, 1, 2, 3, 1000, 1}; !slices.Equal(got, want) {
		t.Errorf("order %v, want %v", got, want)
	}
}
