// SPDX-License-Identifier: Apache-2.0

package bpe

import (
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/pkoukk/tiktoken-go"
	tiktokenloader "github.com/pkoukk/tiktoken-go-loader"
	"pgregory.net/rapid"

	"github.com/shunt-lb/shunt/pkg/tokens/tokenstest"
)

// pair is an encoding and tiktoken-go's of the same name.
type pair struct {
	name   string
	enc    *Encoding
	oracle *tiktoken.Tiktoken
}

func (p pair) want(text string) int { return len(p.oracle.EncodeOrdinary(text)) }

func loadRanks(name string) (map[string]int, error) {
	return tiktokenloader.NewOfflineLoader().LoadTiktokenBpe(name + ".tiktoken")
}

var pairsOnce = sync.OnceValues(func() ([]pair, error) {
	tiktoken.SetBpeLoader(tiktokenloader.NewOfflineLoader())
	var out []pair
	for _, p := range []struct {
		name    string
		pattern Pattern
	}{{"cl100k_base", CL100k}, {"o200k_base", O200k}} {
		ranks, err := loadRanks(p.name)
		if err != nil {
			return nil, err
		}
		enc, err := New(ranks, p.pattern)
		if err != nil {
			return nil, err
		}
		oracle, err := tiktoken.GetEncoding(p.name)
		if err != nil {
			return nil, err
		}
		out = append(out, pair{p.name, enc, oracle})
	}
	return out, nil
})

func pairs(t interface {
	Helper()
	Fatal(...any)
}) []pair {
	t.Helper()
	p, err := pairsOnce()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func check(t testing.TB, text string) {
	t.Helper()
	for _, p := range pairs(t) {
		checkOne(t, p, text)
	}
}

func checkOne(t testing.TB, p pair, text string) {
	t.Helper()
	if got, want := p.enc.Count(text), p.want(text); got != want {
		t.Errorf("%s: %d, want %d for %.300q", p.name, got, want, text)
	}
}

func TestEdges(t *testing.T) {
	for _, s := range []string{
		"", "a", "hello world", "Hello, World! Don't you'll I'VE 'tis '", "  \n\n  x", "a \n \n b", "3² ³", "亚洲AV亚洲av", "e\u0301\u0301x",
		"\u0301abc", "'ſabc x'ſ", "ABC'S abc'Ll'x", "foo//\r\n/x", strings.Repeat("-", 80) + "x", "\xff", "a\xffb", "\xe4\xbd", "ab \xff cd",
		"  \xff", "\u00a0\u3000x", "12345678 ١٢٣٤", "中文测试，你好世界！今天天气不错", "こんにちは世界", "안녕하세요 세계", "👍👍🏽👨‍👩‍👧", "\ufeffabc",
		"HTTPServerURL getElementsByClassNameAndSomethingVeryLongIndeedYes", "tab\tindent\n\t\treturn x\n", "it's 'S 'T '",
		"a b c d e f g h i j k l m n o p q r s t u v w x y z 'quoted' \"double\" ABCDEFGHIJKLMNOP ABCDEFGHijk",
		"x                    y\n      \n  ", "word’s word—word … “quotes”", "\x00\x01ab\x00\x00", "a\x00", "\u0085 \u0085", "ǅabc ʰabc Ⅷ³x",
		"\xed\xa0\x80", "\xf4\x90\x80\x80", "\xc0\x80", "中\xe4\xb8", "\xe4\xb8中", "<|endoftext|><|im_start|>", "'", "''", "'r", "'re", "'l", "ab'l", "ab're",
	} {
		check(t, s)
		check(t, s+" and some more text behind it, so that the loop sees it.")
		// Every distance from the place where the loop hands over to a copy.
		for n := 1; n < padding; n += 3 {
			check(t, s+strings.Repeat("x", n))
		}
	}
}

func TestCorpora(t *testing.T) {
	for _, kind := range tokenstest.Kinds() {
		text := tokenstest.Text(kind, 11, 40<<10)
		if kind == "base64" {
			text = text[:16<<10]
		}
		for size := range []int{0, 1, 2} { // whole, in messages, in scraps
			step := []int{len(text), 2000, 61}[size]
			sum := text
			if size > 0 {
				sum = text[:len(text)/4]
			}
			for len(sum) > 0 {
				n := min(step, len(sum))
				check(t, sum[:n]) // cuts characters too, so that invalid ends are counted
				sum = sum[n:]
			}
			if t.Failed() {
				t.Fatalf("in %s", kind)
			}
		}
	}
}

// Every code point, beside others and beside a letter; and a sample of them in a longer context, all with SHUNT_SOAK=1.
func TestSoakCodePoints(t *testing.T) {
	pairs(t) // loads the classes
	all := os.Getenv("SHUNT_SOAK") == "1"
	rng := rand.New(rand.NewPCG(5, 6))
	var row, full strings.Builder
	for r := rune(0); r <= unicode.MaxRune; r++ {
		if utf8.ValidRune(r) {
			c := string(r)
			assigned := unicode.In(r, unicode.L, unicode.M, unicode.N, unicode.P, unicode.S, unicode.Z, unicode.Cc, unicode.Cf)
			// What is not assigned is one class, so that runs of it tell enough; else a letter and a space go between any two.
			row.WriteString(c)
			if assigned || r%16 == 0 {
				row.WriteString("a ")
			}
			if all || rng.IntN(1000) == 0 || assigned && rng.IntN(50) == 0 {
				full.WriteString("a" + c + "B " + c + c + "c1" + c + "\n" + c + " 's" + c + "'s " + c + "." + c + "/\r\n")
			}
			if got, want := classOf(r)&(isLetter|isNumber|isSpace) == 0, !unicode.In(r, unicode.L, unicode.N, unicode.White_Space); got != want {
				t.Fatalf("%U: a symbol: %v, want %v", r, got, want)
			}
		}
		if r%1024 == 1023 {
			// The planes without any letters in turn for one encoding and the other.
			for i, p := range pairs(t) {
				if r < 0x40000 || all || int(r>>10)%2 == i {
					checkOne(t, p, row.String())
				}
				checkOne(t, p, full.String())
			}
			row.Reset()
			full.Reset()
		}
		if t.Failed() {
			t.FailNow()
		}
	}
}

func TestRandomText(t *testing.T) {
	words := rapid.OneOf(
		rapid.SampledFrom([]string{"the", " ", "  ", "\n", "\r\n", "\n\n", "\t", "word", "Don't", "'s", "'RE", "x", "X", "camelCase", "123", "4", "²",
			".", ",", "();", "//", "/", "中文", "ü", "é", "e\u0301", "👍", "\u3000", "\u00a0", "\u2028", "ǅ", "ªº", "-", "\x00", "I'll", "’",
			"func main() {\n", "\tif a != b {\n", "\v", "\u0085", "\xff", "\xe4\xb8", "----------", "==", "antidisestablishmentarianism"}),
		rapid.StringN(1, 6, -1),
		rapid.Map(rapid.SliceOfN(rapid.Byte(), 1, 6), func(b []byte) string { return string(b) }),
	)
	rapid.Check(t, func(t *rapid.T) {
		text := strings.Join(rapid.SliceOfN(words, 1, 60).Draw(t, "words"), "")
		for _, p := range pairs(t) {
			if got, want := p.enc.Count(text), p.want(text); got != want {
				t.Fatalf("%s: %d, want %d for %q", p.name, got, want, text)
			}
			if got := p.enc.CountBytes([]byte(text)); got != p.enc.Count(text) {
				t.Fatalf("%s: bytes: %d", p.name, got)
			}
		}
	})
}

func TestHostileTextIsExact(t *testing.T) {
	for name, text := range tokenstest.Hostile(1500) {
		check(t, text[:1500])
		if t.Failed() {
			t.Fatalf("in %s", name)
		}
	}
}

func FuzzCount(f *testing.F) {
	pairs(f) // before the clock of an input runs
	for _, s := range []string{"", "hello", "<|endoftext|>", "\xff\xfe", "a\u0301", "中文", "'s 't", " \n \n", "12345", "\x00"} {
		f.Add(s)
	}
	for _, kind := range tokenstest.Kinds() {
		f.Add(tokenstest.Text(kind, 3, 300))
	}
	f.Fuzz(func(t *testing.T, s string) {
		if len(s) <= 2048 {
			check(t, s)
		}
	})
}
