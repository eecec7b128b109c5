// SPDX-License-Identifier: Apache-2.0

package prefix

import (
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

var _ fleet.Index = (*Index)(nil)

func blocksOf(texts ...string) []uint64 {
	var h Hasher
	h.Reset()
	for _, t := range texts {
		h.Add(t)
	}
	b, _ := h.Blocks()
	return b
}

func TestHasherChains(t *testing.T) {
	a, b := strings.Repeat("a", BlockBytes), strings.Repeat("b", BlockBytes)
	ab, ba := blocksOf(a+b), blocksOf(b+a)
	if len(ab) != 2 || len(ba) != 2 || ab[0] == ba[1] || ab[1] == ba[0] {
		t.Errorf("blocks do not chain: %v %v", ab, ba)
	}
	for _, got := range [][]uint64{blocksOf(a+b, "tail"), blocksOf(a + b + "tail"), blocksOf(a + b + b)[:2]} {
		if len(got) != 2 || got[0] != ab[0] || got[1] != ab[1] {
			t.Errorf("a longer prompt has other first blocks: %v, want %v", got, ab)
		}
	}
	if got := blocksOf(a[:100], a[100:]); len(got) != 1 || got[0] == blocksOf(a)[0] {
		t.Error("two texts have the blocks of their concatenation")
	}
	if got := blocksOf(a[:BlockBytes-1]); len(got) != 0 {
		t.Errorf("a part of a block gave %d blocks", len(got))
	}
}

// model is the index of one backend done the simple way.
type model struct {
	limit int
	used  []uint64 // most recent first
}

func (m *model) enter(blocks []uint64) {
	blocks = blocks[:min(len(blocks), m.limit)]
	for i := len(blocks) - 1; i >= 0; i-- {
		kept := []uint64{blocks[i]}
		for _, b := range m.used {
			if b != blocks[i] {
				kept = append(kept, b)
			}
		}
		m.used = kept
	}
	m.used = m.used[:min(len(m.used), m.limit)]
}

func (m *model) held(blocks []uint64) (n int) {
	for _, b := range blocks {
		found := false
		for _, u := range m.used {
			found = found || u == b
		}
		if !found {
			return n
		}
		n++
	}
	return n
}

func TestIndexIsAnLRUOfChains(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(1, 40).Draw(t, "limit")
		x, m := New(Options{}), model{limit: limit}
		x.Resize(3, limit)
		for range 60 {
			blocks := chain(rapid.Uint64Range(0, 6).Draw(t, "root"), rapid.Uint64Range(0, 3).Draw(t, "branch"), rapid.IntRange(0, 25).Draw(t, "length"))
			if rapid.Bool().Draw(t, "enter") {
				x.Enter(3, blocks)
				m.enter(blocks)
			}
			if got, want := x.Held(3, blocks), m.held(blocks); got != want {
				t.Fatalf("held %d blocks, want %d", got, want)
			}
			if x.Len(3) != len(m.used) {
				t.Fatalf("%d blocks, want %d", x.Len(3), len(m.used))
			}
		}
		x.Forget(3)
		if x.Len(3) != 0 || x.active.Load() != 0 {
			t.Fatal("a backend that was forgotten holds blocks")
		}
	})
}

// chain makes hashes of a prompt that shares its first half with those of the same root. They collide in the low bits on
// purpose.
func chain(root, branch uint64, n int) []uint64 {
	out := make([]uint64, n)
	for i := range out {
		out[i] = root<<40 | uint64(i+1)<<8
		if i > n/2 {
			out[i] |= branch<<32 | uint64(n)<<20
		}
	}
	return out
}

func TestLookupsDoNotAllocate(t *testing.T) {
	x := New(Options{})
	blocks := chain(1, 0, 800)
	for id := fleet.ID(1); id <= 16; id++ {
		x.Enter(id, blocks[:50*id])
	}
	if a := testing.AllocsPerRun(100, func() {
		for id := fleet.ID(1); id <= 16; id++ {
			if x.Held(id, blocks) != int(50*id) {
				t.Fatal("wrong length")
			}
		}
	}); a != 0 {
		t.Errorf("a look-up makes %v allocations", a)
	}
}

func TestMemoryIsFlat(t *testing.T) {
	const budget = 1 << 20
	x := New(Options{Bytes: budget, Blocks: 1 << 20})
	r := rand.New(rand.NewPCG(1, 2))
	blocks := make([]uint64, 8)
	fill := func(prompts int) {
		for i := range prompts {
			for j := range blocks {
				blocks[j] = r.Uint64()
			}
			x.Enter(fleet.ID(1+i%4), blocks)
		}
	}
	before := heap()
	fill(50_000)
	first := heap()
	fill(1_000_000)
	if after := heap(); after > first+budget/10 || after > before+budget*11/10 {
		t.Errorf("memory grew from %d to %d and %d bytes, want at most %d in all", before, first, after, budget)
	}
	for id := fleet.ID(1); id <= 4; id++ {
		x.Forget(id)
	}
	if after := heap(); after > before+64<<10 {
		t.Errorf("%d bytes are left of forgotten backends", after-before)
	}
	runtime.KeepAlive(x)
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func TestCorrectLearnsTheCache(t *testing.T) {
	x := New(Options{Blocks: 1000})
	prompt := func(i int) []uint64 { return chain(uint64(i), 0, 10) }
	for i := range 100 {
		x.Enter(1, prompt(i+1))
	}
	// The engine really holds 300 blocks: it finds nothing of the older prompts.
	r := rand.New(rand.NewPCG(3, 4))
	for range 3000 {
		p := prompt(1 + r.IntN(100))
		if n := x.Held(1, p); n > 0 {
			x.Correct(1, n, 0)
		}
		x.Enter(1, p)
	}
	if n := x.Len(1); n > 500 {
		t.Errorf("still %d blocks believed", n)
	}
	for range 2000 {
		x.Correct(1, 10, 10)
	}
	if got := x.limit(&x.caches[1]); got != 1000 {
		t.Errorf("limit is %d after many true look-ups, want 1000", got)
	}
}

func TestConcurrentUse(t *testing.T) {
	x := New(Options{Blocks: 200})
	var wg sync.WaitGroup
	for g := range uint64(4) {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(g, 1))
			for range 2000 {
				b := chain(r.Uint64N(20), r.Uint64N(3), r.IntN(60))
				switch r.IntN(8) {
				case 0:
					x.Forget(1)
				case 1, 2:
					x.Enter(1, b)
				default:
					if n := x.Held(1, b); n > len(b) {
						t.Errorf("held %d of %d blocks", n, len(b))
					}
				}
			}
		})
	}
	wg.Wait()
}

func BenchmarkLookup100kTokens(b *testing.B) {
	text := strings.Repeat("0123456789abcdef", 400<<10/16)
	x := New(Options{})
	var h Hasher
	h.Reset()
	h.Add(text)
	blocks, _ := h.Blocks()
	for id := fleet.ID(1); id <= 16; id++ {
		x.Enter(id, blocks)
	}
	b.ReportAllocs()
	for b.Loop() {
		h.Reset()
		h.Add(text)
		blocks, _ := h.Blocks()
		for id := fleet.ID(1); id <= 16; id++ {
			x.Held(id, blocks)
		}
	}
}

func BenchmarkEnter100kTokens(b *testing.B) {
	x := New(Options{})
	blocks := chain(1, 2, 800)
	b.ReportAllocs()
	for b.Loop() {
		x.Enter(1, blocks)
	}
}
