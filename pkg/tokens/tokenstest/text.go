// SPDX-License-Identifier: Apache-2.0

// Package tokenstest makes texts for tests and benchmarks of token counting: prose, code and data as they come in prompts,
// in many scripts, and texts made to be slow. All are made up here from a seed, so that no licence but this repository's
// lies on them and no two seeds give the same text.
package tokenstest

import (
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"unicode/utf8"
)

// maker adds a line or two of text to b.
type maker func(r *rand.Rand, b *strings.Builder)

var makers = map[string]maker{
	"english": prose, "code": code, "json": toolJSON, "chinese": chinese, "japanese": japanese, "korean": korean,
	"arabic": arabic, "russian": russian, "german": german, "thai": thai, "emoji": emoji, "base64": base64Text, "hex": hexText,
	"logs": logLine, "spaces": spaces, "unicode": unicodeText, "mixed": mixed,
}

// Kinds names the kinds of text that Text makes, sorted.
func Kinds() []string {
	kinds := make([]string, 0, len(makers))
	for k := range makers {
		kinds = append(kinds, k)
	}
	slices.Sort(kinds)
	return kinds
}

// Text returns at most size bytes of a kind of text, cut at a character. It panics for a kind that Kinds does not name.
func Text(kind string, seed uint64, size int) string {
	m, ok := makers[kind]
	if !ok {
		panic("no such kind of text: " + kind)
	}
	r := rand.New(rand.NewPCG(seed, uint64(len(kind))<<8|uint64(kind[0])))
	var b strings.Builder
	for b.Len() < size {
		m(r, &b)
	}
	s := b.String()[:size]
	for len(s) > 0 && !utf8.ValidString(s[max(0, len(s)-utf8.UTFMax+1):]) {
		cut := len(s) - 1
		for cut > 0 && !utf8.RuneStart(s[cut]) {
			cut--
		}
		if utf8.ValidString(s[cut:]) {
			break
		}
		s = s[:cut]
	}
	return s
}

// zipf picks one of n, the first ones most often, as words in a language are.
func zipf(r *rand.Rand, n int) int {
	x := r.Float64()
	return int(float64(n) * x * x * x)
}

func pick(r *rand.Rand, words []string) string { return words[zipf(r, len(words))] }

func any1[T any](r *rand.Rand, s []T) T { return s[r.IntN(len(s))] }

// madeUp is a word that stands in no list: a name, a term, an identifier's part.
func madeUp(r *rand.Rand) string {
	var b strings.Builder
	for range 1 + r.IntN(3) {
		b.WriteString(any1(r, onsets))
		b.WriteString(any1(r, vowels))
	}
	b.WriteString(any1(r, codas))
	return b.String()
}

func englishWord(r *rand.Rand) string {
	switch r.IntN(24) {
	case 0:
		return madeUp(r)
	case 1:
		w := madeUp(r)
		return strings.ToUpper(w[:1]) + w[1:]
	case 2:
		return fmt.Sprint(r.IntN(3000))
	case 3:
		return pick(r, englishWords) + any1(r, []string{"'s", "'ll", "n't", "'ve", "'d", "’s", "-based", "ing", "ly", "ness"})
	}
	return pick(r, englishWords)
}

func prose(r *rand.Rand, b *strings.Builder) {
	for n := range 6 + r.IntN(18) {
		w := englishWord(r)
		if n == 0 {
			w = strings.ToUpper(w[:1]) + w[1:]
		} else {
			b.WriteString(any1(r, []string{" ", " ", " ", " ", " ", " ", " ", " ", ", ", " ", " ", " (", ") ", "; ", " - "}))
		}
		b.WriteString(w)
	}
	b.WriteString(any1(r, []string{". ", ". ", ". ", "? ", "! ", ".\n", ".\n\n", ": "}))
}

func identifier(r *rand.Rand) string {
	parts := []string{pick(r, codeWords), madeUp(r), pick(r, codeWords), pick(r, englishWords)}[r.IntN(3):]
	switch r.IntN(4) {
	case 0:
		return strings.Join(parts, "_")
	case 1:
		return strings.ToUpper(strings.Join(parts, "_"))
	}
	for i, p := range parts {
		if i > 0 || r.IntN(3) == 0 {
			parts[i] = strings.ToUpper(p[:1]) + p[1:]
		}
	}
	return strings.Join(parts, "")
}

func code(r *rand.Rand, b *strings.Builder) {
	depth := r.IntN(4)
	indent := strings.Repeat(any1(r, []string{"\t", "\t", "    ", "  "}), depth)
	b.WriteString(indent)
	a, c, d := identifier(r), identifier(r), identifier(r)
	switch r.IntN(12) {
	case 0:
		fmt.Fprintf(b, "func (%s *%s) %s(%s int, %s string) ([]byte, error) {\n", a[:1], a, c, d[:1], madeUp(r))
	case 1:
		fmt.Fprintf(b, "if err := %s.%s(%s); err != nil {\n%s\treturn fmt.Errorf(\"%s %%q: %%w\", %s, err)\n%s}\n", a, c, d, indent, pick(r, englishWords), d, indent)
	case 2:
		fmt.Fprintf(b, "for (size_t i = 0; i < %s->%s; ++i) { %s[i] += 0x%x; }\n", a, c, d, r.IntN(1<<20))
	case 3:
		fmt.Fprintf(b, "def %s(self, %s=None, **kwargs):\n%s    \"\"\"%s %s.\"\"\"\n\n", a, c, indent, pick(r, englishWords), pick(r, englishWords))
	case 4:
		fmt.Fprintf(b, "// %s ", a)
		prose(r, b)
		b.WriteString("\n")
	case 5:
		fmt.Fprintf(b, "const %s = { %s: '%s', %s: [%d, %.3f], };\n", a, c, madeUp(r), d, r.IntN(500), r.Float64()*100)
	case 6:
		fmt.Fprintf(b, "return %s[%q] != %s && !%s.%s();\n", a, madeUp(r), c, d, identifier(r))
	case 7:
		b.WriteString("}\n\n")
	case 8:
		fmt.Fprintf(b, "%s := make(map[string]%s, %d)\n", a, c, r.IntN(100))
	case 9:
		fmt.Fprintf(b, "<div class=\"%s-%s\" id=%q>{{ .%s }}</div>\r\n", madeUp(r), madeUp(r), a, c)
	case 10:
		fmt.Fprintf(b, "#include <%s/%s.h>\n#define %s (%s << %d)\n", madeUp(r), madeUp(r), strings.ToUpper(a), c, r.IntN(31))
	default:
		fmt.Fprintf(b, "SELECT %s, COUNT(*) FROM %s WHERE %s >= '%d-%02d-%02d' -- %s\n", a, c, d, 1990+r.IntN(40), 1+r.IntN(12), 1+r.IntN(28), madeUp(r))
	}
}

func toolJSON(r *rand.Rand, b *strings.Builder) {
	name := func() string {
		if r.IntN(4) == 0 {
			return identifier(r)
		}
		return pick(r, codeWords) + "_" + pick(r, englishWords)
	}
	fmt.Fprintf(b, `{"type":"function","function":{"name":%q,"description":"`, name())
	for range 5 + r.IntN(8) {
		b.WriteString(pick(r, englishWords) + " ")
	}
	b.WriteString(`.","parameters":{"type":"object","properties":{`)
	n := 1 + r.IntN(5)
	for i := range n {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(b, `%q:{"type":%q,"description":"The %s of the %s"`, name(), any1(r, []string{"string", "integer", "number", "boolean", "array"}), pick(r, englishWords), pick(r, englishWords))
		if r.IntN(3) == 0 {
			fmt.Fprintf(b, `,"enum":[%q,%q,%q]`, pick(r, englishWords), madeUp(r), madeUp(r))
		}
		b.WriteByte('}')
	}
	fmt.Fprintf(b, `},"required":[%q],"additionalProperties":false}}},`, name())
	if r.IntN(4) == 0 {
		b.WriteString("\n")
	}
}

// script is a language written without spaces, or with spaces between words, from words and single characters.
func script(r *rand.Rand, b *strings.Builder, words []string, chars []rune, space string, stops []string) {
	for range 3 + r.IntN(9) {
		for range 2 + r.IntN(7) {
			switch k := r.IntN(20); {
			case k == 0:
				fmt.Fprint(b, r.IntN(3000))
			case k == 1 && space == "":
				b.WriteString(any1(r, []string{"API", "GPU", "Linux", "OK", " v2 ", "token"}))
			case k < 6 && len(chars) > 0:
				for range 1 + r.IntN(3) {
					b.WriteRune(chars[zipf(r, len(chars))])
				}
			default:
				b.WriteString(pick(r, words))
			}
			b.WriteString(space)
		}
		b.WriteString(any1(r, stops))
	}
	if r.IntN(3) == 0 {
		b.WriteString("\n")
	}
}

func chinese(r *rand.Rand, b *strings.Builder) {
	script(r, b, chineseWords, hanChars, "", []string{"，", "，", "。", "、", "；", "！", "？", "：“", "”。"})
}

func japanese(r *rand.Rand, b *strings.Builder) {
	script(r, b, japaneseWords, kanaChars, "", []string{"、", "。", "。\n", "「", "」", "？", "・"})
}

func korean(r *rand.Rand, b *strings.Builder) {
	script(r, b, koreanWords, hangulChars, " ", []string{", ", ". ", ".\n", "? ", "! "})
}

func arabic(r *rand.Rand, b *strings.Builder) {
	script(r, b, arabicWords, []rune("ابتثجحخدذرزسشصضطظعغفقكلمنهوي"), " ", []string{"، ", ". ", "؟ ", "؛ "})
}

func russian(r *rand.Rand, b *strings.Builder) {
	script(r, b, russianWords, []rune("оеаинтсрвлкмдпуяыьгзбчйхжшюцщэфъё"), " ", []string{", ", ". ", "? ", " — "})
}

func german(r *rand.Rand, b *strings.Builder) {
	script(r, b, germanWords, []rune("enisratdhulcgmobwfkzpvßjyäöüÄÖÜ"), " ", []string{", ", ". ", "? ", " – ", " „"})
}

func thai(r *rand.Rand, b *strings.Builder) {
	script(r, b, thaiWords, []rune("กขคงจฉชซดตถทธนบปผฝพฟมยรลวศสหอะาิีึืุูเแโใไ่้"), "", []string{" ", " ", "ๆ ", "\n"})
}

func emoji(r *rand.Rand, b *strings.Builder) {
	for range 1 + r.IntN(5) {
		switch r.IntN(6) {
		case 0:
			b.WriteRune(rune(0x1f300 + r.IntN(0x400)))
		case 1:
			b.WriteString(any1(r, []string{"👨‍👩‍👧‍👦", "🏳️‍🌈", "👩🏽‍💻", "❤️", "🇩🇪", "🇯🇵", "1️⃣", "☝🏿", "🫠", "🧑‍🚀"}))
		case 2:
			b.WriteString(strings.Repeat(string(rune(0x1f600+r.IntN(0x50))), 1+r.IntN(4)))
		case 3:
			b.WriteRune(rune(0x2600 + r.IntN(0x1c0)))
		default:
			b.WriteString(pick(r, englishWords) + any1(r, []string{" ", "", "!", "…", " — "}))
		}
	}
}

func randomBytes(r *rand.Rand, n int) []byte {
	raw := make([]byte, n)
	for i := range raw {
		raw[i] = byte(r.Uint32())
	}
	return raw
}

func base64Text(r *rand.Rand, b *strings.Builder) {
	b.WriteString(base64.StdEncoding.EncodeToString(randomBytes(r, 3*256)))
}

func hexText(r *rand.Rand, b *strings.Builder) {
	b.WriteString(hex.EncodeToString(randomBytes(r, 4+r.IntN(29))))
	b.WriteString(any1(r, []string{" ", "\n", "-", ":", ""}))
}

func logLine(r *rand.Rand, b *strings.Builder) {
	fmt.Fprintf(b, "2026-%02d-%02dT%02d:%02d:%02d.%06dZ %s [%s-%d] %d.%d.%d.%d:%d \"%s /%s/%s?id=%x HTTP/1.1\" %d %d %.3fms %s=%d\n",
		1+r.IntN(12), 1+r.IntN(28), r.IntN(24), r.IntN(60), r.IntN(60), r.IntN(1000000), any1(r, []string{"INFO", "WARN", "ERROR", "DEBUG"}),
		madeUp(r), r.IntN(64), r.IntN(256), r.IntN(256), r.IntN(256), r.IntN(256), r.IntN(65536), any1(r, []string{"GET", "POST", "PUT"}),
		madeUp(r), pick(r, codeWords), r.Uint64(), 200+r.IntN(400), r.IntN(1<<20), r.Float64()*900, madeUp(r), r.IntN(1<<30))
}

func spaces(r *rand.Rand, b *strings.Builder) {
	for range r.IntN(9) {
		b.WriteString(any1(r, []string{" ", " ", "  ", "\t", "\n", "\r\n", "\n\n", "\v", "\f", "\u00a0", "\u3000", "\u2003", "\u0085", "\u2028", "\r", "        "}))
	}
	b.WriteString(any1(r, []string{"x", "the", "A", "1", "22", ".", "=", "中", "é", "\u0301", "'s", "/", "_", "\u200b", ""}))
}

func unicodeText(r *rand.Rand, b *strings.Builder) {
	for range 1 + r.IntN(4) {
		switch c := any1(r, unicodeBlocks); r.IntN(8) {
		case 0:
			b.WriteString(any1(r, []string{" ", "'", "\n", "a", "B", "7", "’", "-"}))
		default:
			if x := c[0] + rune(r.IntN(int(c[1]-c[0]))); utf8.ValidRune(x) {
				b.WriteRune(x)
			}
		}
	}
}

func mixed(r *rand.Rand, b *strings.Builder) {
	kinds := []maker{prose, code, toolJSON, chinese, japanese, korean, arabic, russian, thai, emoji, logLine, spaces, hexText, unicodeText}
	kinds[r.IntN(len(kinds))](r, b)
}
