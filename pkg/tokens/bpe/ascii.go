// SPDX-License-Identifier: Apache-2.0

package bpe

import (
	"math/bits"
	"unicode/utf8"
	"unsafe"
)

const (
	ones  = 0x0101010101010101
	highs = 0x8080808080808080
)

// within has the high bit of each byte of w set that is ASCII and from lo to hi.
func within(w, lo, hi uint64) uint64 {
	x := w &^ highs
	return (x + (0x80-lo)*ones) &^ (x + (0x7f-hi)*ones) &^ w & highs
}

func notLetter(w uint64) uint64 {
	x := w&^highs | 0x20*ones
	return (x+(0x80-'a')*ones)&^(x+(0x7f-'z')*ones)&^w&highs ^ highs
}

func notLower(w uint64) uint64 { return within(w, 'a', 'z') ^ highs }
func notUpper(w uint64) uint64 { return within(w, 'A', 'Z') ^ highs }
func spaceAt(w uint64) uint64  { return within(w, '\t', '\r') | within(w, ' ', ' ') }
func lineAt(w uint64) uint64   { return within(w, '\n', '\n') | within(w, '\r', '\r') }

// masks cuts the two words of a piece to its length and enters the length, by length.
var masks = func() (t [16]struct{ lo, hi, length uint64 }) {
	for n := range t {
		t[n].lo, t[n].hi = 1<<(8*min(n, 8))-1, 1<<(8*max(n-8, 0))-1
		if n >= 8 {
			t[n].lo = 1<<64 - 1
		}
		t[n].length = uint64(n) << 56
	}
	return t
}()

// kind of an ASCII character, for what is no word.
type kind = uint8

const (
	kindOther kind = iota // beyond ASCII; NUL, which may be padding
	kindLetter
	kindDigit
	kindBlank
	kindSpace // but the blank and line ends
	kindLine
	kindSymbol // but the slash
	kindSlash

	kindBits = 3
)

func kindOf(b byte) kind {
	switch {
	case b == 0 || b >= utf8.RuneSelf:
		return kindOther
	case b >= '0' && b <= '9':
		return kindDigit
	case b|0x20 >= 'a' && b|0x20 <= 'z':
		return kindLetter
	case b == ' ':
		return kindBlank
	case b == '\n' || b == '\r':
		return kindLine
	case b >= '\t' && b <= '\r':
		return kindSpace
	case b == '/':
		return kindSlash
	}
	return kindSymbol
}

// asciiTable is what the ASCII loop looks up.
type asciiTable struct {
	kinds [256]kind
	// prefix is 0x80 for what can stand before a word in its piece: all but letters, numbers, line ends and what is not ASCII.
	prefix [256]uint8
	// ends is the length of a piece that is no word by the kinds of its first four characters, 0 where they do not tell.
	ends [1 << (4 * kindBits)]uint8
}

func newASCIITable(r splitRules) *asciiTable {
	t := new(asciiTable)
	for b := range t.kinds {
		t.kinds[b] = kindOf(byte(b))
		switch t.kinds[b] {
		case kindOther, kindLetter, kindDigit, kindLine:
		default:
			t.prefix[b] = 0x80
		}
	}
	for i := range t.ends {
		var k [4]kind
		for j := range k {
			k[j] = kind(i >> (j * kindBits) & (1<<kindBits - 1))
		}
		t.ends[i] = uint8(r.endOf(k))
	}
	return t
}

func isSpaceKind(k kind) bool  { return k == kindBlank || k == kindSpace || k == kindLine }
func isSymbolKind(k kind) bool { return k == kindSymbol || k == kindSlash }

// endOf is the length of the piece that begins with characters of these kinds, 0 if it may be longer, a word or not ASCII.
func (r splitRules) endOf(k [4]kind) int {
	j := 0
	switch {
	case k[0] == kindDigit:
		for j = 1; j < r.digits; j++ {
			if k[j] == kindOther {
				return 0
			}
			if k[j] != kindDigit {
				break
			}
		}
		return j
	case isSymbolKind(k[0]) || k[0] == kindBlank && isSymbolKind(k[1]):
		for j = 1; j < len(k) && isSymbolKind(k[j]); j++ {
		}
		if j == len(k) || k[j] == kindOther {
			return 0
		}
		for ; j < len(k); j++ {
			if k[j] == kindLine && r.tail&tailLines != 0 || k[j] == kindSlash && r.tail&tailSlash != 0 {
				continue
			}
			return j
		}
		return 0
	case isSpaceKind(k[0]):
		line := 0
		for ; j < len(k) && isSpaceKind(k[j]); j++ {
			if k[j] == kindLine {
				line = j + 1
			}
		}
		switch {
		case j == len(k) || k[j] == kindOther:
			return 0
		case line > 0:
			return line
		}
		return max(j-1, 1)
	}
	return 0
}

// fastLetters counts pieces from text[i] on as long as they are ASCII, where words are runs of letters. size is how far it
// may read. It returns where it stopped: at a piece for nextPiece, or where less than padding can be read.
func (e *Encoding) fastLetters(st *state, text string, i, size int) (end, total int) {
	t := e.ascii
	for i+padding <= size && i < len(text) {
		lo, hi := load64(text, i), load64(text, i+8)
		c := byte(lo)
		if c == '\'' && e.rules.quotes {
			if k := e.contraction(text, i); k > 0 {
				total += e.segment(st, text[i:i+k])
				i += k
				continue
			}
		}
		k := int(t.ends[uint(t.kinds[c])|uint(t.kinds[byte(lo>>8)])<<kindBits|uint(t.kinds[byte(lo>>16)])<<(2*kindBits)|
			uint(t.kinds[byte(lo>>24)])<<(3*kindBits)])
		pre := uint64(t.prefix[c])
		word := 0
		if m := notLetter(lo) &^ pre; m != 0 {
			word = bits.TrailingZeros64(m) >> 3
		} else if m := notLetter(hi); m != 0 {
			word = 8 + bits.TrailingZeros64(m)>>3
		} else if word = longWord(text, i+16, size, notLetter) - i; word < 0 {
			return i, total
		}
		if byteAt(text, i+word) >= utf8.RuneSelf {
			return i, total
		}
		if word > int(pre>>7) {
			k = word
		}
		if uint(k-1) >= 15 {
			if k == 0 {
				if k = e.other(text, i); k == 0 {
					return i, total
				}
			}
			total += e.piece(st, text[i:i+k], false)
			i += k
			continue
		}
		m := &masks[k&15]
		lo &= m.lo
		hi = hi&m.hi | m.length
		if slot := &st.short[shortHash(lo, hi)]; slot.lo == lo && slot.hi&^countMask == hi {
			total += int(slot.hi >> countShift)
		} else {
			total += e.missShort(slot, st, text[i:i+k], lo, hi)
		}
		i += k
	}
	return i, total
}

// fastCases is fastLetters where words are upper case letters, then lower case ones, then a contraction.
func (e *Encoding) fastCases(st *state, text string, i, size int) (end, total int) {
	t := e.ascii
	for i+padding <= size && i < len(text) {
		lo, hi := load64(text, i), load64(text, i+8)
		c := byte(lo)
		k := int(t.ends[uint(t.kinds[c])|uint(t.kinds[byte(lo>>8)])<<kindBits|uint(t.kinds[byte(lo>>16)])<<(2*kindBits)|
			uint(t.kinds[byte(lo>>24)])<<(3*kindBits)])
		pre := uint64(t.prefix[c])
		word := 0
		m := notUpper(lo) &^ pre
		if m == 0 {
			return i, total // eight capitals: rare
		}
		// The lowest bit of m and all above: the lower case letters are looked for behind the capitals.
		if m = notLower(lo) &^ (m&-m - 1); m != 0 {
			word = bits.TrailingZeros64(m) >> 3
		} else if m = notLower(hi); m != 0 {
			word = 8 + bits.TrailingZeros64(m)>>3
		} else if word = longWord(text, i+16, size, notLower) - i; word < 0 {
			return i, total
		}
		next := byteAt(text, i+word)
		if next >= utf8.RuneSelf {
			return i, total
		}
		if word > int(pre>>7) {
			k = word
			if next == '\'' {
				k += e.contraction(text, i+k)
			}
		}
		if uint(k-1) >= 15 {
			if k == 0 {
				if k = e.other(text, i); k == 0 {
					return i, total
				}
			}
			total += e.piece(st, text[i:i+k], false)
			i += k
			continue
		}
		w := &masks[k&15]
		lo &= w.lo
		hi = hi&w.hi | w.length
		if slot := &st.short[shortHash(lo, hi)]; slot.lo == lo && slot.hi&^countMask == hi {
			total += int(slot.hi >> countShift)
		} else {
			total += e.missShort(slot, st, text[i:i+k], lo, hi)
		}
		i += k
	}
	return i, total
}

// longWord returns the end of the run at i of what stop does not mark, -1 if that is too close to the end of what can be read.
func longWord(text string, i, size int, stop func(uint64) uint64) int {
	for ; i+8 <= size; i += 8 {
		if m := stop(load64(text, i)); m != 0 {
			return i + bits.TrailingZeros64(m)>>3
		}
	}
	return -1
}

// byteAt reads within the padding.
func byteAt(text string, i int) byte {
	return *(*byte)(unsafe.Add(unsafe.Pointer(unsafe.StringData(text)), i))
}

// other returns the length of the piece at text[i] that is no word, 0 where other than ASCII characters could have a say.
func (e *Encoding) other(text string, i int) int {
	kinds := &e.ascii.kinds
	j := i
	switch c := kinds[text[i]]; {
	case isSpaceKind(c):
		if c == kindBlank && i+1 < len(text) && isSymbolKind(kinds[text[i+1]]) {
			j++
			break
		}
		line := 0
		for j+8 <= len(text) {
			w := load64(text, j)
			stop := spaceAt(w) ^ highs
			// Line ends before the first stop.
			if l := lineAt(w) & (stop&-stop - 1); l != 0 {
				line = j + bits.Len64(l)>>3
			}
			if stop != 0 {
				j += bits.TrailingZeros64(stop) >> 3
				break
			}
			j += 8
		}
		for ; j < len(text) && isSpaceKind(kinds[text[j]]); j++ {
			if kinds[text[j]] == kindLine {
				line = j + 1
			}
		}
		switch {
		case j < len(text) && text[j] >= utf8.RuneSelf:
			return 0
		case line > 0:
			return line - i
		case j == len(text) || j == i+1:
			return j - i
		}
		return j - 1 - i
	case isSymbolKind(c):
	default:
		return 0
	}
	for j++; j < len(text) && isSymbolKind(kinds[text[j]]); j++ {
	}
	if j < len(text) && kinds[text[j]] == kindOther {
		return 0
	}
	return e.symbolTail(text, j) - i
}
