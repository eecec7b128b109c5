// SPDX-License-Identifier: Apache-2.0

package tokens

import (
	"encoding/base64"
	"math"
	"math/rand/v2"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// meter is an engine that counts its work: the bytes that it gets and the squares of the longest pieces in them.
type meter struct {
	calls, bytes int
	work         float64
	longest      int
	perToken     func(text string) int // tokens of a text
	noWork       bool                  // count calls and bytes only
}

// pieces is what can be one piece to either encoding's pattern, written down apart from the splitter's own classes.
var pieces = []*regexp.Regexp{
	regexp.MustCompile(`[\p{L}\p{M}]+`),
	regexp.MustCompile(`[^\s\p{Z}\x{85}\v\p{L}\p{N}]+[\r\n/]*`),
	regexp.MustCompile(`[\s\p{Z}\x{85}\v]+`),
}

func (m *meter) count(text string) int {
	m.calls++
	m.bytes += len(text)
	for _, p := range pieces {
		if m.noWork {
			break
		}
		for _, loc := range p.FindAllStringIndex(text, -1) {
			n := len(strings.ToValidUTF8(text[loc[0]:loc[1]], "\uFFFD"))
			m.longest = max(m.longest, n)
			m.work += float64(n) * float64(n)
		}
	}
	if m.perToken != nil {
		return m.perToken(text)
	}
	return (len(text) + 3) / 4
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

// The cost of a text must not grow faster than its length, whatever is in it. Time would not tell that on a busy machine:
// the squares of the pieces do.
func TestHostileTextIsLinear(t *testing.T) {
	for name, text := range hostile() {
		var m meter
		e := newEncoder("test", &m, Options{MaxBytes: math.MaxInt, MaxRun: DefaultMaxRun, CacheEntries: -1})
		e.encode(text)
		if m.bytes != len(text) {
			t.Errorf("%s: %d bytes encoded of %d", name, m.bytes, len(text))
		}
		// Punctuation and the line ends behind it are two runs in one piece.
		if m.longest > 2*DefaultMaxRun+8 {
			t.Errorf("%s: a piece of %d bytes reaches the engine", name, m.longest)
		}
		// Every byte is seen by at most two of the three patterns; one of U+FFFD stands for a third of its width.
		if limit := 3 * 3 * float64(len(text)) * 2 * DefaultMaxRun; m.work > limit {
			t.Errorf("%s: work %.3g for %d bytes, limit %.3g", name, m.work, len(text), limit)
		}
		if limit := 6*len(text)/DefaultMaxRun + 2; m.calls > limit {
			t.Errorf("%s: %d parts of %d bytes, limit %d", name, m.calls, len(text), limit)
		}
	}
}

// With the guard out of the way the same meter must show the square, or the test above could not fail.
func TestMeterSeesSquares(t *testing.T) {
	var m meter
	newEncoder("test", &m, Options{MaxRun: math.MaxInt, CacheEntries: -1}).encode(strings.Repeat("👍-!", 10_000))
	if m.longest < 60_000 || m.work < 1e9 {
		t.Errorf("longest %d, work %g", m.longest, m.work)
	}
}

// The error that cuts cause, against the vocabulary itself on the uncut text.
func TestCutErrorIsSmall(t *testing.T) {
	for _, enc := range []string{CL100kBase, O200kBase} {
		e := encoder(t, enc, Options{CacheEntries: -1})
		for name, text := range hostile() {
			text = strings.ToValidUTF8(text[:4096], "")
			want, got := e.eng.count(text), e.Count(text)
			cuts := 0
			for sp := (splitter{text: text, maxRun: DefaultMaxRun}); ; {
				part, cut := sp.next()
				if part == "" {
					break
				}
				if cut {
					cuts++
				}
			}
			if diff := got.Tokens - want; diff > cuts+1 || diff < -cuts-1 {
				t.Errorf("%s %s: %d tokens, exactly %d, %d cuts", enc, name, got.Tokens, want, cuts)
			}
			if got.Estimated != (cuts > 0) {
				t.Errorf("%s %s: estimated %v with %d cuts", enc, name, got.Estimated, cuts)
			}
		}
	}
}

// Where no run is cut, parts must give the whole text's count: the soft cuts are exact.
func TestSoftCutsAreExact(t *testing.T) {
	words := rapid.SampledFrom([]string{
		"the", " ", "  ", "\n", "\r\n", "\n\n", "\t", "word", "Don't", "'s", "'RE", "x", "X", "camelCase", "123", "4", "²",
		".", ",", "();", "//", "/", "中文", "ü", "é", "e\u0301", "👍", "\u3000", "\u00a0", "\u2028", "ǅ", "ªº", "-", "\x00",
		"I'll", "’", "func main() {\n", "\tif a != b {\n", " a b c d ", "Lorem ipsum dolor sit amet, ", "\v", "\u0085",
	})
	cl100k, o200k := encoder(t, CL100kBase, Options{CacheEntries: -1}), encoder(t, O200kBase, Options{CacheEntries: -1})
	rapid.Check(t, func(t *rapid.T) {
		var b strings.Builder
		unit := rapid.SliceOfN(words, 1, 60).Draw(t, "words")
		for b.Len() < 2*partSize {
			for _, w := range unit {
				b.WriteString(w)
			}
			b.WriteString(rapid.SampledFrom([]string{"a b", "a\nb", "\nx", " y"}).Draw(t, "join"))
		}
		text := b.String()
		for _, e := range []*Encoder{cl100k, o200k} {
			got := e.encode(text)
			if want := e.eng.count(text); !got.Estimated && got.Tokens != want {
				t.Fatalf("%s: %d, want %d for %q", e.name, got.Tokens, want, text)
			}
		}
	})
}

func TestBudget(t *testing.T) {
	const maxBytes = 64 << 10
	prose := strings.Repeat("It was a bright cold day in April, and the clocks were striking thirteen. ", 1000)
	many := func(text string, n int) []string {
		s := make([]string, n)
		for i := range s {
			s[i] = text
		}
		return s
	}
	for _, tc := range []struct {
		name      string
		texts     []string
		tolerance float64 // of the estimate against the engine's count of everything
	}{
		{"within", many("hello world, how are you", 1000), 0},
		{"one long text", []string{strings.Repeat(prose, 50)}, 0.02},
		{"a million texts of one byte", many("x", 1_000_000), 0.02},
		{"many short texts", many("hello world", 100_000), 0.02},
		{"long texts", many(prose, 40), 0.02},
		{"long and short", append(many("hi", 5000), append(many(prose, 20), many("", 1000)...)...), 0.1},
		{"one text just over", []string{strings.Repeat("a b ", maxBytes/4+1)}, 0.02},
		{"Han", []string{strings.Repeat("中文 字", 300_000)}, 0.02},
		{"not UTF-8", []string{strings.Repeat("\x80", 1<<20)}, 0.02},
	} {
		m, all := meter{noWork: true}, meter{noWork: true}
		e := newEncoder("test", &m, Options{MaxBytes: maxBytes, MaxRun: DefaultMaxRun, CacheEntries: -1})
		got := e.CountAll(tc.texts)
		total, want := 0, 0
		whole := newEncoder("test", &all, Options{MaxBytes: math.MaxInt, MaxRun: DefaultMaxRun, CacheEntries: -1})
		for _, s := range tc.texts {
			total += len(s)
			want += whole.encode(s).Tokens
		}
		if m.bytes > maxBytes {
			t.Errorf("%s: %d bytes encoded, at most %d allowed", tc.name, m.bytes, maxBytes)
		}
		if m.calls > maxBytes/textCost {
			t.Errorf("%s: %d calls of the engine", tc.name, m.calls)
		}
		if diff := math.Abs(float64(got.Tokens-want)) / float64(want); diff > tc.tolerance {
			t.Errorf("%s: %d tokens, exactly %d: off by %.1f %%", tc.name, got.Tokens, want, 100*diff)
		}
		if over := m.bytes < total; got.Estimated != over {
			t.Errorf("%s: estimated %v with %d of %d bytes encoded", tc.name, got.Estimated, m.bytes, total)
		}
		if total > maxBytes && m.bytes < maxBytes/20 {
			t.Errorf("%s: only %d bytes sampled", tc.name, m.bytes)
		}
	}
}

// A sample of the head alone would be off by a factor here: the first half is dense, the second is not.
func TestSampleCoversTheWholeText(t *testing.T) {
	dense, thin := strings.Repeat("#!", 1<<20), strings.Repeat("word ", 1<<19)
	m := meter{noWork: true, perToken: func(s string) int { return strings.Count(s, "#!")*2 + strings.Count(s, "word") }}
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
		m = meter{noWork: true, perToken: func(s string) int { return len(s) }}
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

	cut := strings.Repeat("a", 2000)
	if first, again := e.Count(cut), e.Count(cut); !first.Estimated || first != again {
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
		small.put(text, Count{Tokens: i})
		if got, ok := small.get(text); !ok || got.Tokens != i {
			t.Errorf("%s: got %+v, %v", text, got, ok)
		}
	}
	// Two processes, or two encodings, never agree on keys.
	a, b := newCache(1), newCache(1)
	a.put("some text or other", Count{Tokens: 7})
	b.sets[0][0].check.Store(a.sets[0][0].check.Load())
	b.sets[0][0].value.Store(a.sets[0][0].value.Load())
	if _, ok := a.get("some text or other"); !ok {
		t.Error("text not found in its own cache")
	}
	if _, ok := b.get("some text or other"); ok {
		t.Error("an entry of another seed is found")
	}
}

func FuzzCount(f *testing.F) {
	for _, s := range []string{"", "hello", "<|endoftext|>", "\xff\xfe", "a\u0301", "中文", "'s 't", " \n \n", "12345", "\x00"} {
		f.Add(s)
	}
	c := newCounter(f, Options{CacheEntries: -1})
	f.Fuzz(func(t *testing.T, s string) {
		if len(s) > 2048 {
			return
		}
		for _, name := range []string{CL100kBase, O200kBase} {
			e, _ := c.Encoding(name)
			got := e.Count(s)
			if want := e.eng.count(s); !got.Estimated && got.Tokens != want {
				t.Errorf("%s: got %d, want %d", name, got.Tokens, want)
			}
		}
	})
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
