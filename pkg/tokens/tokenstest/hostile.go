// SPDX-License-Identifier: Apache-2.0

package tokenstest

import (
	"encoding/base64"
	"math/rand/v2"
	"strings"
)

// Hostile returns texts of at least n bytes that make encoders slow, by name: runs that a split pattern takes as one piece,
// and texts between tokens.
func Hostile(n int) map[string]string {
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
	// runs of random length of each of a set of units
	runs := func(longest int, units ...string) string {
		var b strings.Builder
		for b.Len() < n {
			b.WriteString(strings.Repeat(units[rng.IntN(len(units))], 1+rng.IntN(longest)))
		}
		return b.String()
	}
	raw := randomBytes(rng, n)
	return map[string]string{
		"a":                      fill("a"),
		"A":                      fill("A"),
		"space":                  fill(" "),
		"newline":                fill("\n"),
		"space newline":          fill(" \n"),
		"tab space":              random(" \t\n\r\v\f"),
		"wide spaces":            fill("\u3000 \u00a0\u2003"),
		"dash":                   fill("-"),
		"slash":                  fill("/"),
		"equals":                 fill("="),
		"underline":              fill("_"),
		"star":                   fill("*"),
		"dot":                    fill("."),
		"hash":                   fill("#"),
		"tilde":                  fill("~"),
		"dash equals":            fill("-="),
		"rulers":                 runs(200, "-", "=", "/", "*", "_", "#", "~", "."),
		"short rulers":           runs(9, "-", "=", "/", "*", "_", "#", "~", "."),
		"box lines":              fill("─"),
		"box lines mixed":        runs(70, "─", "━", "═", "│"),
		"emoji":                  fill("👍"),
		"emoji with ASCII marks": fill("👍-!"),
		"slash and newline":      fill("/\n"),
		"punctuation, then tail": fill("-" + strings.Repeat("/\r\n", 3000)),
		"random punctuation":     random("!\"#$%&()*+,-./:;<=>?@[]^_`{|}~"),
		"Han":                    fill("中"),
		"random Han":             random("的一是不了人我在有他这为之大来以个中上们到说国和地也子时道出而要于就下得可你年生"),
		"Han and Latin letters":  fill("中a文B"),
		"random Hangul":          random(string(hangulChars)),
		"combining marks":        fill("a\u0301"),
		"marks only":             fill("\u0301"),
		"marks and dashes":       fill("\u0301-"),
		"random letters":         random("abcdefghijklmnopqrstuvwxyz"),
		"random capitals":        random("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
		"mixed case":             random("aB"),
		"two letters":            random("ab"),
		"DNA":                    random("acgt"),
		"words run together":     strings.Join(strings.Fields(Text("english", 7, 2*n)), "")[:n],
		"Thai":                   random("กขคงจฉชซดตถทธนบปผฝพฟมยรลวศสหอะาิีึืุู"),
		"Cyrillic":               random("оеаинтсрвлкмдпуяыьгзбчйхжшюцщэф"),
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
