// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"strings"
	"unicode/utf8"

	"github.com/cespare/xxhash/v2"
)

// The engine's stand-in tokenizer cuts text into pieces roughly as the byte-pair encodings do for English: a word with
// the space before it is one token, a long run of letters one per four bytes, digits by threes. What matters is that it
// is deterministic and that equal beginnings of a text give equal beginnings of the token list; exact counting is
// shunt's own business (pkg/tokens).
const (
	maxWord     = 12 // letters that still make one token
	longPiece   = 4  // bytes per token in longer runs
	digitPiece  = 3
	punctPiece  = 3
	foreignRune = 2 // runes per token outside ASCII
)

type runeClass uint8

const (
	letters runeClass = iota
	digits
	spaces
	punct
	foreign
)

func classOf(c byte) runeClass {
	switch {
	case c >= utf8.RuneSelf:
		return foreign
	case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z':
		return letters
	case c >= '0' && c <= '9':
		return digits
	case c == ' ', c == '\n', c == '\t', c == '\r':
		return spaces
	}
	return punct
}

// Tokenize appends the tokens of text to dst.
func Tokenize(dst []uint32, text string) []uint32 {
	for i := 0; i < len(text); {
		start := i
		cl := classOf(text[i])
		if cl == spaces { // of a run of spaces the last joins the word that follows, but no number
			j := i
			for j < len(text) && classOf(text[j]) == spaces {
				j++
			}
			switch {
			case j == len(text) || text[j-1] != ' ' || classOf(text[j]) == digits:
				dst = append(dst, piece(text[i:j]))
				i = j
				continue
			case j-1 > i:
				dst = append(dst, piece(text[i:j-1]))
				start = j - 1
			}
			i = j
			cl = classOf(text[i])
		}
		run := i
		for i < len(text) && classOf(text[i]) == cl {
			i++
		}
		if cl == letters && i-run <= maxWord {
			dst = append(dst, piece(text[start:i]))
			continue
		}
		for p := run; p < i; {
			q := min(p+pieceLen(cl), i)
			if cl == foreign {
				q = p
				for k := 0; k < foreignRune && q < i; k++ {
					_, n := utf8.DecodeRuneInString(text[q:i])
					q += n
				}
			}
			dst = append(dst, piece(text[start:q]))
			p, start = q, q
		}
	}
	return dst
}

func pieceLen(c runeClass) int {
	switch c {
	case digits:
		return digitPiece
	case punct:
		return punctPiece
	}
	return longPiece
}

func piece(s string) uint32 { return uint32(xxhash.Sum64String(s)) }

// fillerWords make the answers. Each is one token with its space, here and in the common encodings.
var fillerWords = strings.Fields(`the of and to in is for on that with as by this from at which are be or an
 it one time can other has more two first new all their after most people some work year part system way into
 over number where state world through between each many same under while high small large next early line point
 form power water light house country school group order case area level point open white`)

// filler returns token i of the answer with this seed: a word, with a space before it unless it is the first.
func filler(seed uint64, i int) string {
	w := fillerWords[mix(seed+uint64(i)*0x9e3779b97f4a7c15)%uint64(len(fillerWords))]
	if i == 0 {
		return w
	}
	return " " + w
}

// fillerText is the answer's first n tokens.
func fillerText(seed uint64, n int) string {
	var b strings.Builder
	for i := range n {
		b.WriteString(filler(seed, i))
	}
	return b.String()
}

// appendFiller appends the tokens of the answer with this seed, as Tokenize would find them in the text.
func appendFiller(dst []uint32, seed uint64, n int) []uint32 {
	for i := range n {
		dst = append(dst, piece(filler(seed, i)))
	}
	return dst
}

// mix is splitmix64's finaliser.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}
