// SPDX-License-Identifier: Apache-2.0

package tokens

import (
	"encoding/base64"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
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

func hostile() map[string]string {
	const n = 100_000
	fill := func(unit string) string { return strings.Repeat(unit, n/len(unit)+1) }
	rng := rand.New(rand.NewPCG(1, 2))
	random := func(set string) string {
		runes := []rune(set)
		var b strings.Builder
		for b.Len() < n {
			b.WriteRune(runes[rng.IntN(len(runes))])
		}
		return b.String()
	}
	raw := make([]byte, n)
	for i := range raw {
		raw[i] = byte(rng.Uint32())
	}
	return map[string]string{
		"a":                      fill("a"),
		"A":                      fill("A"),
		"space":                  fill(" "),
		"newline":                fill("\n"),
		"space newline":          fill(" \n"),
		"tab space":              random(" \t\n\r\v\f"),
		"wide spaces":            fill("\u3000 \u00a0\u2003"),
		"dash":                   fill("-"),
		"equals":                 fill("="),
		"emoji":                  fill("👍"),
		"emoji with ASCII marks": fill("👍-!"),
		"slash and newline":      fill("/\n"),
		"punctuation, then tail": fill("-" + strings.Repeat("/\r\n", 3000)),
		"Han":                    fill("中"),
		"random Han":             random("的一是不了人我在有他这为之大来以个中上们到说国和地也子时道出而要于就下得可你年生"),
		"Han and Latin letters":  fill("中a文B"),
		"combining marks":        fill("a\u0301"),
		"marks only":             fill("\u0301"),
		"marks and dashes":       fill("\u0301-"),
		"random letters":         random("abcdefghijklmnopqrstuvwxyz"),
		"mixed case":             random("aB"),
		"DNA":                    random("acgt"),
		"Thai":                   random("กขคงจฉชซดตถทธนบปผฝพฟมยรลวศสหอะาิีึืุู"),
		"base64":                 base64.StdEncoding.EncodeToString(raw),
		"hex digits":             fill("0123456789"),
		"other digits":           fill("٣٤٥"),
		"contractions":           fill("'s"),
		"endoftext":              fill("<|endoftext|>"),
		"invalid":                fill("\xff"),
		"random bytes":           string(raw),
		"zero bytes":             fill("\x00"),
		"private use":            fill("\ue000"),
	}
}

// The error that cuts cause, against the vocabulary itself on the uncut text.
func TestCutErrorIsSmall(t *testing.T) {
	const size, maxRun = 12_000, DefaultMaxRun
	for _, enc := range []string{CL100kBase, O200kBase} {
		e := encoder(t, enc, Options{CacheEntries: -1})
		short := encoder(t, enc, Options{CacheEntries: -1, MaxRun: 512})
		anyCut := false
		for name, text := range hostile() {
			text = strings.ToValidUTF8(text[:size], "")
			want, cut := e.eng.CountCut(text, 0)
			if cut {
				t.Fatalf("%s %s: a cut without a bound", enc, name)
			}
			// 0.15 % of the tokens, or one token: the text has but two cuts.
			got := e.Count(text)
			if diff := math.Abs(float64(got.Tokens - want)); diff > 1 && diff > 0.0015*float64(want) {
				t.Errorf("%s %s: %d tokens, exactly %d", enc, name, got.Tokens, want)
			}
			if !got.Estimated && got.Tokens != want {
				t.Errorf("%s %s: %d tokens, exactly %d, and not called an estimate", enc, name, got.Tokens, want)
			}
			anyCut = anyCut || got.Estimated
			// No more than one token a cut anywhere.
			if got := short.Count(text).Tokens; got-want > size/512+1 || want-got > size/512+1 {
				t.Errorf("%s %s: %d tokens with cuts at 512 bytes, exactly %d", enc, name, got, want)
			}
		}
		if !anyCut {
			t.Errorf("%s: nothing was cut at %d bytes", enc, maxRun)
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
	if n := testing.AllocsPerRun(100, func() { e.CountAll(texts) }); n != 0 {
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
