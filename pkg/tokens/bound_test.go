// SPDX-License-Identifier: Apache-2.0

package tokens

import (
	"math"
	"strconv"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/pkg/tokens/tokenstest"
)

// meter is an engine that counts the calls and bytes that it gets.
type meter struct {
	calls, bytes int
	perToken     func(text string) int // tokens of a text; nil: one for four bytes
}

func (m *meter) CountCut(text string, _ int) (int, bool) {
	m.calls++
	m.bytes += len(text)
	if m.perToken != nil {
		return m.perToken(text), false
	}
	return (len(text) + 3) / 4, false
}

func hostile() map[string]string { return tokenstest.Hostile(100_000) }

// The error that cuts cause, against the vocabulary itself on the uncut text.
func TestCutErrorIsSmall(t *testing.T) {
	const size, shortRun = 200_000, 512
	texts := tokenstest.Hostile(size)
	for _, enc := range []string{CL100kBase, O200kBase} {
		e := encoder(t, enc, Options{CacheEntries: -1, MaxBytes: size * 3})
		short := encoder(t, enc, Options{CacheEntries: -1, MaxBytes: size * 3, MaxRun: shortRun})
		anyCut := false
		for name, text := range texts {
			text = strings.ToValidUTF8(text[:size], "")
			want, cut := e.eng.CountCut(text, 0)
			if cut {
				t.Fatalf("%s %s: a cut without a bound", enc, name)
			}
			got := e.Count(text)
			if diff := math.Abs(float64(got.Tokens - want)); diff > 0.0015*float64(want) {
				t.Errorf("%s %s: %d tokens, exactly %d", enc, name, got.Tokens, want)
			}
			if !got.Estimated && got.Tokens != want {
				t.Errorf("%s %s: %d tokens, exactly %d, and not called an estimate", enc, name, got.Tokens, want)
			}
			anyCut = anyCut || got.Estimated
			// A cut adds four tokens at most, or hides one.
			if got := short.Count(text).Tokens; got-want > 4*size/shortRun+1 || want-got > size/shortRun+1 {
				t.Errorf("%s %s: %d tokens with cuts at %d bytes, exactly %d", enc, name, got, shortRun, want)
			}
		}
		if !anyCut {
			t.Errorf("%s: nothing was cut at %d bytes", enc, DefaultMaxRun)
		}
	}
}

// A sample of the head alone would be off by a factor here: the first half is dense, the second is not.
func TestSampleCoversTheWholeText(t *testing.T) {
	dense, thin := strings.Repeat("#!", 1<<20), strings.Repeat("word ", 1<<19)
	m := meter{perToken: func(s string) int { return strings.Count(s, "#!")*2 + strings.Count(s, "word") }}
	e := newEncoder("test", &m, Options{MaxBytes: DefaultMaxBytes, MaxRun: DefaultMaxRun, CacheEntries: -1})
	want := 2<<20 + 1<<19
	for name, texts := range map[string][]string{"one text": {dense + thin}, "two texts": {dense, thin}} {
		got := e.CountAll(texts).Tokens
		if diff := math.Abs(float64(got-want)) / float64(want); diff > 0.02 {
			t.Errorf("%s: %d tokens, exactly %d", name, got, want)
		}
	}
}

func TestCache(t *testing.T) {
	var m meter
	e := newEncoder("test", &m, Options{MaxBytes: 64 << 10, MaxRun: DefaultMaxRun, CacheEntries: DefaultCacheEntries})
	// A conversation that grows beyond MaxBytes turn by turn is counted in full, and each turn costs its own text only.
	var texts []string
	want, last := 0, 0
	for turn := range 40 {
		text := strings.Repeat("word ", 1000) + string(rune('a'+turn))
		texts = append(texts, text)
		want += (len(text) + 3) / 4
		m = meter{perToken: func(s string) int { return len(s) }}
		got := e.CountAll(texts)
		if got.Estimated {
			t.Fatalf("turn %d: estimated", turn)
		}
		if got.Tokens-last != len(text) {
			t.Fatalf("turn %d: %d tokens more, want %d", turn, got.Tokens-last, len(text))
		}
		if m.bytes != len(text) {
			t.Fatalf("turn %d: %d bytes encoded, want the new text's %d", turn, m.bytes, len(text))
		}
		last = got.Tokens
	}
	if n := testing.AllocsPerRun(100, func() { e.CountAll(texts) }); n != 0 && !raceEnabled {
		t.Errorf("%v allocations for remembered texts", n)
	}

	cut := strings.Repeat("a", 2*DefaultMaxRun)
	real := encoder(t, O200kBase, Options{})
	if first, again := real.Count(cut), real.Count(cut); !first.Estimated || first != again {
		t.Errorf("got %+v, then %+v", first, again)
	}
	if n := len(e.cache.sets) * cacheWays; n != DefaultCacheEntries {
		t.Errorf("%d entries", n)
	}
	for n, want := range map[int]int{1: 4, 4: 4, 5: 8, 1000: 1024} {
		if got := len(newCache(n).sets) * cacheWays; got != want {
			t.Errorf("newCache(%d): %d entries, want %d", n, got, want)
		}
	}
	// A set that is full takes new texts instead of old ones.
	small := newCache(1)
	for i := range 100 {
		text := "text number " + strconv.Itoa(i)
		small.store(small.key(text, Plain), Count{Tokens: i})
		if got, ok := small.find(small.key(text, Plain)); !ok || got.Tokens != i {
			t.Errorf("%s: got %+v, %v", text, got, ok)
		}
	}
	// Two processes, or two encodings, never agree on keys.
	a, b := newCache(1), newCache(1)
	a.store(a.key("some text or other", Plain), Count{Tokens: 7})
	b.sets[0][0].check.Store(a.sets[0][0].check.Load())
	b.sets[0][0].value.Store(a.sets[0][0].value.Load())
	if _, ok := a.find(a.key("some text or other", Plain)); !ok {
		t.Error("text not found in its own cache")
	}
	if _, ok := b.find(b.key("some text or other", Plain)); ok {
		t.Error("an entry of another seed is found")
	}
}

func BenchmarkCount(b *testing.B) {
	text := strings.Repeat("It was a bright cold day in April, and the clocks were striking thirteen. ", 220)
	for _, bc := range []struct {
		name string
		o    Options
	}{{"encode", Options{CacheEntries: -1}}, {"remembered", Options{}}} {
		e := encoder(b, O200kBase, bc.o)
		b.Run(bc.name, func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			b.ReportAllocs()
			for b.Loop() {
				e.Count(text)
			}
		})
	}
	e := encoder(b, O200kBase, Options{CacheEntries: -1})
	for name, text := range hostile() {
		b.Run("hostile/"+strings.ReplaceAll(name, " ", "_"), func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				e.encode(text)
			}
		})
	}
}
