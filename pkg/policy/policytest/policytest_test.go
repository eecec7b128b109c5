// SPDX-License-Identifier: Apache-2.0

package policytest_test

import (
	"fmt"
	"testing"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/policy"
	"github.com/shunt-lb/shunt/pkg/policy/policytest"
)

func TestEveryPolicy(t *testing.T) {
	for _, name := range policy.Names() {
		spec, ok := policy.Lookup(name)
		if !ok {
			t.Fatalf("policy %s is listed and not found", name)
		}
		t.Run(name, func(t *testing.T) { policytest.Run(t, spec) })
	}
}

func BenchmarkPick(b *testing.B) {
	for _, name := range policy.Names() {
		for _, n := range []int{16, 128, 1024} {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				p, err := policy.New(name, policy.Params{})
				if err != nil {
					b.Fatal(err)
				}
				r, c := policytest.Source(1), policytest.Candidates(n)
				q := &fleet.Query{Session: 9, Home: fleet.ID(n), PromptTokens: 2000, OutputTokens: 200, Rand: r}
				b.ReportAllocs()
				for b.Loop() {
					i, _ := p.Pick(q, c)
					c[i].Tokens = (c[i].Tokens + 2200) % 100_000
				}
			})
		}
	}
}
