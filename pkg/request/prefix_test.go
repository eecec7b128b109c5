// SPDX-License-Identifier: Apache-2.0

package request

import (
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/pkg/prefix"
)

func TestPrefixGrowsWithTheConversation(t *testing.T) {
	long := strings.Repeat("You are a careful assistant. ", 60)
	blocks := func(body string) []uint64 {
		t.Helper()
		p := Acquire()
		defer p.Release()
		if _, err := p.Parse(Chat, []byte(body)); err != nil {
			t.Fatal(err)
		}
		var h prefix.Hasher
		p.Prefix(&h)
		b, _ := h.Blocks()
		return slices.Clone(b)
	}
	first := blocks(`{"model":"m","messages":[{"role":"system","content":"` + long + `"},{"role":"user","content":"` + long + `"}]}`)
	second := blocks(`{"messages":[{"role":"system","content":"` + long + `"},{"role":"user","content":"` + long + `"},{"role":"assistant","content":"` + long + `"}],"model":"m","stream":true}`)
	if len(first) < 6 || len(second) <= len(first) || !slices.Equal(first, second[:len(first)]) {
		t.Errorf("a later turn has other blocks: %d and %d", len(first), len(second))
	}
	for name, body := range map[string]string{
		"model": `{"model":"n","messages":[{"role":"system","content":"` + long + `"}]}`,
		"salt":  `{"model":"m","cache_salt":"x","messages":[{"role":"system","content":"` + long + `"}]}`,
		"tools": `{"model":"m","tools":[{"type":"function"}],"messages":[{"role":"system","content":"` + long + `"}]}`,
	} {
		if b := blocks(body); len(b) == 0 || b[0] == first[0] {
			t.Errorf("another %s has the same first block", name)
		}
	}
}
