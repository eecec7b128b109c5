// SPDX-License-Identifier: Apache-2.0

package tokens

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/shunt-lb/shunt/pkg/tokens/tokenstest"
	"pgregory.net/rapid"
)

// quote returns the inside of s as a JSON string.
func quote(s string) string {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if enc.Encode(s) != nil {
		panic("no JSON")
	}
	out := strings.TrimSuffix(b.String(), "\n")
	return out[1 : len(out)-1]
}

func TestCountTextsEqualsCount(t *testing.T) {
	e := encoder(t, O200kBase, Options{})
	texts := []string{"", "hi", "hello, how are you", "two\nlines\twith \"quotes\" and \\", "é👍\u2028中文", "func main() {\n\tfmt.Println(\"x\")\n}\n"}
	want := Count{}
	var plain, escaped []Text
	for _, s := range texts {
		want = want.Add(e.Count(s))
		plain = append(plain, Text{S: s})
		escaped = append(escaped, Text{S: quote(s), Form: JSONString})
	}
	for range 2 { // the second time from the cache
		if got := e.CountTexts(plain); got != want {
			t.Errorf("plain: got %+v, want %+v", got, want)
		}
		if got := e.CountTexts(escaped); got != want {
			t.Errorf("escaped: got %+v, want %+v", got, want)
		}
	}
	if got, want := e.CountTexts([]Text{{S: "{ \"a\":[1,\n2] }", Form: JSONValue}}), e.Count(`{"a": [1, 2]}`); got != want {
		t.Errorf("JSON: got %+v, want %+v", got, want)
	}
}

// One spelling is another text in each form: a cached count of one must not be found for another.
func TestFormsDoNotMeetInTheCache(t *testing.T) {
	e := encoder(t, O200kBase, Options{})
	const s = `one\ntwo\n,three`
	want := map[Form]Count{Plain: e.Count(s), JSONString: e.Count("one\ntwo\n,three"), JSONValue: e.Count(`one\ntwo\n, three`)}
	for range 2 {
		for form, n := range want {
			if got := e.CountTexts([]Text{{S: s, Form: form}}); got != n {
				t.Errorf("form %d: got %+v, want %+v", form, got, n)
			}
		}
	}
	e.Remember(func() uint64 { _, key, _ := e.Lookup([]byte(s), 0); return key }(), Count{Tokens: 1234})
	if got, _, ok := e.Lookup([]byte(s), 0); !ok || got.Tokens != 1234 {
		t.Errorf("not remembered: %+v, %v", got, ok)
	}
	if _, _, ok := e.Lookup([]byte(s), 1); ok {
		t.Error("found as another kind")
	}
	if got := e.CountTexts([]Text{{S: s}}); got != want[Plain] {
		t.Errorf("plain after Remember: %+v", got)
	}
	if _, key, ok := encoder(t, O200kBase, Options{CacheEntries: -1}).Lookup([]byte(s), 0); key != 0 || ok {
		t.Error("a key without a cache")
	}
}

func TestStats(t *testing.T) {
	m := meter{}
	e := newEncoder("test", &m, Options{MaxBytes: 64 << 10, MaxRun: DefaultMaxRun, CacheEntries: 64})
	texts := []Text{{S: "hello, world"}, {S: "short"}, {}}
	for range 3 {
		e.CountTexts(texts)
	}
	want := Stats{Hits: 2, HitBytes: 24, Misses: 1 + 3, MissBytes: 12 + 3*5}
	if got := e.Stats(); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	c := newCounter(t, Options{})
	c.For("gpt-4").CountTexts(texts)
	s := c.Stats()
	if len(s) != 2 || s[CL100kBase].Misses != 2 || s[O200kBase].Misses != 0 {
		t.Errorf("got %+v", s)
	}
}

func TestCountTextsAllocations(t *testing.T) {
	m := meter{}
	e := newEncoder("test", &m, Options{MaxBytes: 64 << 10, MaxRun: DefaultMaxRun, CacheEntries: 64})
	texts := []Text{{S: strings.Repeat("word ", 3000)}, {S: strings.Repeat(`a\nb `, 3000), Form: JSONString}}
	if n := testing.AllocsPerRun(50, func() { e.CountTexts(texts) }); n != 0 {
		t.Errorf("%v allocations for remembered texts", n)
	}
	if raceEnabled {
		return
	}
	raw := []byte("some bytes of a text")
	plain := []string{texts[0].S, strings.Repeat("other ", 100)}
	if n := testing.AllocsPerRun(50, func() { e.Count(plain[0]); e.CountBytes(raw); e.CountAll(plain) }); n > 0.5 {
		t.Errorf("%v allocations for plain texts", n)
	}
	none := newEncoder("test", &m, Options{MaxBytes: 16 << 10, MaxRun: DefaultMaxRun, CacheEntries: -1})
	if n := testing.AllocsPerRun(50, func() { none.CountTexts(texts) }); n > 0.5 { // the pool may lose its buffer to a collection
		t.Errorf("%v allocations for texts that are encoded and sampled", n)
	}
}

// The engine must never get more than the budget, and the estimate must be near the truth.
func TestSample(t *testing.T) {
	const maxBytes = 64 << 10
	prose := strings.Repeat("It was a bright cold day in April, and the clocks were striking thirteen. ", 1000)
	long := func(s string) []Text { return []Text{{S: s}} }
	many := func(s string, n int) []Text {
		texts := make([]Text, n)
		for i := range texts {
			texts[i].S = s
		}
		return texts
	}
	for _, tc := range []struct {
		name      string
		texts     []Text
		tolerance float64
	}{
		{"within", many("hello world, how are you", 1000), 0},
		{"one long text", long(strings.Repeat(prose, 50)), 0.02},
		{"a million texts of one byte", many("x", 1_000_000), 0.02},
		{"many short texts", many("hello world", 100_000), 0.02},
		{"long and short", append(many("hi", 5000), append(many(prose, 20), many("", 1000)...)...), 0.1},
		{"one text just over", long(strings.Repeat("a b ", maxBytes/4+1)), 0.02},
		{"Han", long(strings.Repeat("中文 字", 300_000)), 0.02},
		{"not UTF-8", long(strings.Repeat("\x80", 1<<20)), 0.02},
		{"escapes", []Text{{S: quote(strings.Repeat("one \"two\"\n\tthree\\four\n", 30_000)), Form: JSONString}}, 0.02},
		{"nothing but escapes", []Text{{S: strings.Repeat(`\u4e2d\u6587`, 50_000), Form: JSONString}}, 0.02},
		{"nothing but backslashes", []Text{{S: strings.Repeat(`\\`, 300_000), Form: JSONString}}, 0.02},
	} {
		m, all := meter{}, meter{}
		e := newEncoder("test", &m, Options{MaxBytes: maxBytes, MaxRun: DefaultMaxRun, CacheEntries: -1})
		got := e.CountTexts(tc.texts)
		total, want := 0, 0
		whole := newEncoder("test", &all, Options{MaxBytes: math.MaxInt, MaxRun: DefaultMaxRun, CacheEntries: -1})
		var scratch []byte
		for i := range tc.texts {
			s := tc.texts[i].plain(tc.texts[i].S, &scratch)
			total += len(s)
			want += whole.encode(s).Tokens
		}
		if m.bytes > maxBytes {
			t.Errorf("%s: %d bytes encoded, at most %d allowed", tc.name, m.bytes, maxBytes)
		}
		if diff := math.Abs(float64(got.Tokens-want)) / float64(want); diff > tc.tolerance {
			t.Errorf("%s: %d tokens, exactly %d: off by %.1f %%", tc.name, got.Tokens, want, 100*diff)
		}
		if over := m.bytes < total; got.Estimated != over {
			t.Errorf("%s: estimated %v with %d of %d bytes encoded", tc.name, got.Estimated, m.bytes, total)
		}
		if total > 2*maxBytes && m.bytes < maxBytes/20 {
			t.Errorf("%s: only %d bytes sampled", tc.name, m.bytes)
		}
	}
}

// Where kinds of text change at another pace than the sample, one density for all would be far off: the blocks that are
// counted would all be of one kind.
func TestSampleGoesByBucket(t *testing.T) {
	prose := strings.Repeat("some plain words of a text and ", 133)[:4096]
	dense := strings.Repeat("Zm9vYmFyYmF6cXV4", 256)
	perToken := func(s string) int {
		if strings.Contains(s, " ") {
			return len(s) / 5
		}
		return len(s)
	}
	var b strings.Builder
	want := 0
	for i := range 256 {
		block := prose
		if i%8 != 0 {
			block = dense
		}
		b.WriteString(block)
		want += perToken(block)
	}
	m := meter{perToken: perToken}
	e := newEncoder("test", &m, Options{MaxBytes: 128 << 10, MaxRun: math.MaxInt, CacheEntries: -1})
	for i := range 60 { // it has seen such texts before
		s := dense
		if i%2 == 0 {
			s = prose
		}
		e.CountTexts([]Text{{S: s}})
	}
	got := e.CountTexts([]Text{{S: b.String()}}).Tokens
	if diff := math.Abs(float64(got-want)) / float64(want); diff > 0.1 {
		t.Errorf("%d tokens, exactly %d: off by %.0f %%", got, want, 100*diff)
	}
}

func TestBuckets(t *testing.T) {
	for text, want := range map[string]bucket{
		"It was a bright cold day in April, and the clocks were striking thirteen.":              bucketProse,
		"func (s *T) f(x []int) { for i := range x { s.a[i] += x[i]; if x[i] > 0 { return } } }": bucketCode,
		`{"type":"function","function":{"name":"get","description":"Gets a thing by its name"}}`: bucketJSON,
		"2024-11-02 13:04:55.123 10.0.0.17 200 4311 0x7f3a 99182 11 4\n2024-11-02 13:04:56.011":  bucketDigits,
		"VGhpcyBpcyBhIHRleHQgdGhhdCBoYXMgYmVlbiBlbmNvZGVkIGluIGJhc2U2NCBhbmQgaGFzIG5vIHNwYWNlcw": bucketDense,
		"a" + strings.Repeat(" ", 100): bucketSpace,
		"Über die Brücke gehen schöne Mädchen und häßliche Männer, später müssen sie zurück.": bucketLatin,
		"Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива":    bucketAlpha,
		"كل العائلات السعيدة متشابهة":                                                         bucketAlpha,
		"四月间，天气寒冷晴朗，钟敲了十三下。温斯顿史密斯为了要躲寒风，紧缩着脖子":                                                bucketHan,
		"四月の晴れた寒い日だった。時計が十三時を打っている。ウィンストン・スミスは":                                               bucketKana,
		"맑고 쌀쌀한 사월의 어느 날이었다. 시계들이 열세 번을 쳤다.":                                                  bucketHangul,
		"👍👎🎉🎊👍👎🎉🎊": bucketOther,
		"ประเทศไทยเป็นประเทศที่มีวัฒนธรรม": bucketIndic,
		strings.Repeat(`\u4e2d\u6587`, 10): bucketEscapes,
		strings.Repeat("\x80\xff", 50):     bucketOther,
		"":                                 bucketProse,
	} {
		if got := bucketOf(text); got != want {
			t.Errorf("%.40q: bucket %d, want %d", text, got, want)
		}
	}
}

// With every place for large counts taken, a large request is estimated at once and encodes nothing, and a small one is
// counted as ever.
func TestLargeCountsWaitForAPlace(t *testing.T) {
	m := meter{}
	e := newEncoder("test", &m, Options{MaxBytes: 1 << 20, MaxRun: DefaultMaxRun, CacheEntries: 64})
	e.texts.gate = largeGate(Options{LargeBytes: 10_000, LargeCounts: 2, LargeWait: time.Nanosecond})
	large := []Text{{S: strings.Repeat("some words ", 1000)}}
	if got := e.CountTexts(large); got.Estimated || m.bytes == 0 {
		t.Fatalf("with places free: %+v, %d bytes encoded", got, m.bytes)
	}
	for range 2 {
		if !e.texts.gate.enter() {
			t.Fatal("no place")
		}
	}
	m = meter{}
	other := []Text{{S: strings.Repeat("other words ", 1000)}}
	got := e.CountTexts(other)
	if !got.Estimated || m.calls != 0 {
		t.Errorf("with no place: %+v, %d calls of the engine", got, m.calls)
	}
	if want := len(other[0].S) / 4; got.Tokens < want/2 || got.Tokens > 2*want {
		t.Errorf("estimate %d, exactly %d", got.Tokens, want)
	}
	if s := e.Stats(); s.RefusedLargeCounts != 1 || s.EstimatedBytes != 12_000 {
		t.Errorf("got %+v", s)
	}
	if got := e.CountTexts(large); got.Estimated {
		t.Errorf("a text that is remembered needs no place: %+v", got)
	}
	if got := e.CountTexts([]Text{{S: strings.Repeat("few ", 1000)}}); got.Estimated {
		t.Errorf("a small one: %+v", got)
	}
	e.texts.gate.leave()
	if got := e.CountTexts(other); got.Estimated {
		t.Errorf("with a place again: %+v", got)
	}
	if n := len(e.texts.gate.slots); n != 1 {
		t.Errorf("%d places taken, want 1", n)
	}
	if largeGate(Options{}) != nil {
		t.Error("a gate that nobody asked for")
	}
}

func TestCountTextsConcurrently(t *testing.T) {
	e := encoder(t, O200kBase, Options{CacheEntries: 64, LargeBytes: 2000, LargeWait: time.Second})
	var want [200]Count
	text := func(i int) string { return strings.Repeat(fmt.Sprintf("text number %d, ", i), i+1) }
	exact := encoder(t, O200kBase, Options{CacheEntries: -1})
	for i := range want {
		want[i] = exact.Count(text(i))
	}
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 1))
			for range 300 {
				i := r.IntN(len(want))
				if got := e.CountTexts([]Text{{S: text(i)}}); !got.Estimated && got != want[i] {
					t.Errorf("text %d: got %+v, want %+v", i, got, want[i])
				}
			}
		})
	}
	wg.Wait()
}

func TestUnescape(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := rapid.String().Draw(t, "text")
		if got := string(AppendUnescaped(nil, quote(s))); got != strings.ToValidUTF8(s, "\uFFFD") {
			t.Fatalf("got %q, want %q", got, s)
		}
	})
	for in, want := range map[string]string{
		`\u0041\/\b\f\n\r\t\"\\`: "A/\b\f\n\r\t\"\\", `\ud83d\udc4d`: "👍", `\ud83d`: "\uFFFD", `\ud83dx`: "\uFFFDx",
		`\udc4d\ud83d`: "\uFFFD\uFFFD", `\ud83d\u0041`: "\uFFFDA", `\`: `\`, `a\`: `a\`, `\u12`: `\u12`, `\x`: `\x`, `\ud83d\u1`: "\uFFFD\\u1",
	} {
		if got := string(AppendUnescaped(nil, in)); got != want {
			t.Errorf("%s: got %q, want %q", in, got, want)
		}
	}
}

func FuzzUnescape(f *testing.F) {
	f.Add(`a\n\ud83d\udc4d`)
	f.Add(`\`)
	f.Fuzz(func(t *testing.T, raw string) {
		got := AppendUnescaped(nil, raw)
		if len(got) > len(raw) {
			t.Fatalf("%q grew to %q", raw, got)
		}
		var want string
		if utf8.ValidString(raw) && json.Unmarshal([]byte(`"`+raw+`"`), &want) == nil && string(got) != want {
			t.Fatalf("got %q, want %q", got, want)
		}
		spaced := appendSpaced(nil, raw)
		var a, b bytes.Buffer
		if json.Compact(&a, []byte(raw)) == nil && (json.Compact(&b, spaced) != nil || a.String() != b.String()) {
			t.Fatalf("%q became %q", raw, spaced)
		}
	})
}

// The estimates on text of every kind, against the exact count: beyond the budget, and with no place for a large count.
func TestEstimatesAreNear(t *testing.T) {
	const chunk, size = 20 << 10, 1 << 20
	e := encoder(t, O200kBase, Options{CacheEntries: -1, LargeBytes: size - 1, LargeCounts: 1, LargeWait: time.Nanosecond})
	whole := encoder(t, O200kBase, Options{CacheEntries: -1, MaxBytes: math.MaxInt})
	kinds := tokenstest.Kinds()
	for i, kind := range kinds { // traffic of the same kinds, in messages
		for j := range 40 {
			e.Count(tokenstest.Text(kind, uint64(1000*i+j), 3000))
		}
	}
	r := rand.New(rand.NewPCG(3, 4))
	var b strings.Builder
	for n := uint64(0); b.Len() < size; n++ {
		b.WriteString(tokenstest.Text(kinds[r.IntN(len(kinds))], n, chunk))
	}
	mixed := b.String()
	texts := map[string]string{"all kinds": mixed}
	for _, kind := range kinds {
		texts[kind] = tokenstest.Text(kind, 77, size)
	}
	for name, text := range texts {
		want := whole.Count(text).Tokens
		sampled := e.Count(text)
		e.texts.gate.enter()
		guessed := e.Count(text)
		e.texts.gate.leave()
		off := func(c Count) float64 { return float64(c.Tokens-want) / float64(want) }
		if !sampled.Estimated || math.Abs(off(sampled)) > 0.05 {
			t.Errorf("%s: %d tokens by sampling, exactly %d", name, sampled.Tokens, want)
		}
		if !guessed.Estimated || math.Abs(off(guessed)) > 0.25 {
			t.Errorf("%s: %d tokens by kind, exactly %d", name, guessed.Tokens, want)
		}
		t.Logf("%-10s %8d tokens, sampled %+.1f %%, by kind %+.1f %%", name, want, 100*off(sampled), 100*off(guessed))
	}
}
