// SPDX-License-Identifier: Apache-2.0

package bpe

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/pkg/tokens/tokenstest"
)

// work counts the steps of merging for a text with an empty cache, where each piece that is looked up is a step too.
func (p pair) work(text string, maxPiece int) int {
	st := newState()
	st.maxPiece = maxPiece
	p.enc.count(st, text)
	return st.work
}

const testCut = 4096

// The cost of a text must not grow faster than its length, whatever is in it, nor be far above that of prose. Time would not
// tell that on a busy machine: steps do.
func TestHostileTextIsLinear(t *testing.T) {
	for _, p := range pairs(t) {
		english := tokenstest.Text("english", 1, 256<<10)
		// Prose costs a look-up a piece at least, and so it is taken: 5 bytes a piece.
		base := float64(p.work(english, testCut))/float64(len(english)) + 0.2
		small, large := tokenstest.Hostile(16<<10), tokenstest.Hostile(64<<10)
		worst, name := 0.0, ""
		for n, text := range large {
			per := float64(p.work(text, testCut)) / float64(len(text))
			perSmall := float64(p.work(small[n], testCut)) / float64(len(small[n]))
			if per > 1.2*perSmall+0.1 {
				t.Errorf("%s %s: %.2f steps a byte, %.2f in a quarter of the text", p.name, n, per, perSmall)
			}
			if per > worst {
				worst, name = per, n
			}
			if os.Getenv("SHUNT_SOAK") == "1" {
				t.Logf("%s %s: %.2f steps a byte", p.name, n, per)
			}
		}
		t.Logf("%s: %.2f steps a byte of prose, %.2f at worst (%s)", p.name, base, worst, name)
		if worst > 25*base {
			t.Errorf("%s: %s costs %.1f times as much as prose", p.name, name, worst/base)
		}
	}
}

// A search for what is slower than the families above: every unit of two ASCII characters, and the texts of tokens, repeated.
func TestSoakSearchForSlowUnits(t *testing.T) {
	var units []string
	for a := byte('\t'); a < 0x7f; a++ {
		for b := byte('\t'); b < 0x7f; b++ {
			units = append(units, string([]byte{a, b}))
		}
	}
	ranks, err := loadRanks("o200k_base")
	if err != nil {
		t.Fatal(err)
	}
	every := 16
	if os.Getenv("SHUNT_SOAK") == "1" {
		every = 1
	}
	for unit, rank := range ranks {
		if rank%every == 0 && len(unit) > 2 {
			units = append(units, unit)
		}
	}
	for _, p := range pairs(t) {
		english := tokenstest.Text("english", 1, 256<<10)
		base := float64(p.work(english, testCut))/float64(len(english)) + 0.2
		st := newState()
		st.maxPiece = testCut
		worst, name := 0.0, ""
		for _, unit := range units {
			text := strings.Repeat(unit, 700/len(unit)+1)
			st.work = 0
			p.enc.count(st, text)
			if per := float64(st.work) / float64(len(text)); per > worst {
				worst, name = per, unit
			}
		}
		t.Logf("%s: %.2f steps a byte at worst, of %d units (%q)", p.name, worst, len(units), name)
		if worst > 25*base {
			t.Errorf("%s: %q costs %.1f times as much as prose", p.name, name, worst/base)
		}
	}
}

// Without a bound on pieces the steps must still be linear: the bound is the last guard, not the first.
func TestUncutTextIsLinear(t *testing.T) {
	for _, p := range pairs(t) {
		for n, text := range tokenstest.Hostile(64 << 10) {
			cut, uncut := p.work(text, testCut), p.work(text, 1<<30)
			if float64(uncut) > 2*float64(cut)+0.5*float64(len(text)) {
				t.Errorf("%s %s: %d steps, %d with cuts", p.name, n, uncut, cut)
			}
		}
	}
}

// The steps must see what is slow, or the tests above could not fail.
func TestStepsSeeSlowText(t *testing.T) {
	for _, p := range pairs(t) {
		quick, slow := p.work(strings.Repeat(" the", 4096), testCut), p.work(tokenstest.Hostile(16 << 10)["random letters"], testCut)
		if slow < 10*quick {
			t.Errorf("%s: %d steps for random letters, %d for words", p.name, slow, quick)
		}
	}
}

func TestCutsAreCounted(t *testing.T) {
	for _, p := range pairs(t) {
		text := strings.Repeat("abc中", 1000)
		n, cut := p.enc.CountCut(text, 64)
		if want := p.enc.Count(text); !cut || n < want || n > want+2*len(text)/60 {
			t.Errorf("%s: %d, %v with cuts, %d without", p.name, n, cut, want)
		}
		if n, cut := p.enc.CountCut("the quick brown fox", 64); cut || n != 4 {
			t.Errorf("%s: %d, %v", p.name, n, cut)
		}
	}
}

func TestNoAllocations(t *testing.T) {
	for _, p := range pairs(t) {
		for _, kind := range append(tokenstest.Kinds(), "invalid") {
			text := "a\xff" + strings.Repeat("b \xc3\x28", 1000)
			if kind != "invalid" {
				text = tokenstest.Text(kind, 5, 16<<10)
			}
			// A collection may take the work space out of the pool.
			if n := testing.AllocsPerRun(20, func() { p.enc.CountCut(text, testCut) }); n >= 1 {
				t.Errorf("%s %s: %v allocations", p.name, kind, n)
			}
		}
	}
}

// Many goroutines share one encoding.
func TestConcurrentCounts(t *testing.T) {
	for _, p := range pairs(t) {
		t.Run(p.name, func(t *testing.T) {
			for i := range 4 {
				t.Run(fmt.Sprint(i), func(t *testing.T) {
					t.Parallel()
					for seed := range uint64(20) {
						text := tokenstest.Text("mixed", seed%4, 2000)
						if got, again := p.enc.Count(text), p.enc.Count(text); got != again || got == 0 {
							t.Errorf("%d, then %d", got, again)
						}
					}
				})
			}
		})
	}
}
