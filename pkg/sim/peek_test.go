// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"math"
	"testing"
	"time"
)

func TestWithPrefill(t *testing.T) {
	p, err := LookupProfile("llama-3-8b-h100-tp1")
	if err != nil {
		t.Fatal(err)
	}
	for _, rate := range []float64{28_000, 46_600, 20_000} {
		q := p.WithPrefill(rate)
		if got := 2048 / q.Prefill(2048, 2048).Seconds(); math.Abs(got/rate-1) > 0.01 {
			t.Errorf("want %v tokens/s, got %v", rate, got)
		}
		if a, b := p.Decode(1, 0), q.Decode(1, 0); a != b {
			t.Errorf("a lone decoding step takes %s instead of %s", b, a)
		}
	}
}

func TestPeekAndBacklog(t *testing.T) {
	e, err := NewEngine(Options{KVTokens: 4096, BlockTokens: 64})
	if err != nil {
		t.Fatal(err)
	}
	blocks := []BlockHash{1, 2, 3, 4}
	add := func() {
		t.Helper()
		if _, err := e.Add(0, Request{PromptTokens: 300, OutputTokens: 2, Blocks: blocks}); err != nil {
			t.Fatal(err)
		}
	}
	add()
	if e.Peek(300, blocks) != 0 || e.Backlog() != 300 || e.Context() != 0 {
		t.Errorf("an arrival: peek %d, backlog %d, context %d", e.Peek(300, blocks), e.Backlog(), e.Context())
	}
	st, _ := e.Begin(0)
	e.Finish(st.End)
	if e.Peek(300, blocks) != 256 || e.Peek(256, blocks) != 192 || e.Backlog() != 0 || e.Context() != 300 {
		t.Errorf("after its prefill: peek %d, backlog %d, context %d", e.Peek(300, blocks), e.Backlog(), e.Context())
	}
	add()
	if e.Backlog() != 44 {
		t.Errorf("an equal prompt adds %d tokens, want 44", e.Backlog())
	}
	before := e.o.Profile.stepTime(batch{prefill: 44, decode: 1})
	e.Slow(3)
	if st, _ := e.Begin(st.End); st.End < 3*before-time.Millisecond {
		t.Errorf("three times slower, a step takes %s", st.End)
	}
	if lost := e.Crash(); len(lost) != 2 || e.Peek(300, blocks) != 0 || e.Stats().Running != 0 {
		t.Errorf("a crash lost %d sequences and left %+v", len(lost), e.Stats())
	}
	if _, ok := e.Begin(time.Hour); ok {
		t.Error("there is work after a crash")
	}
}
