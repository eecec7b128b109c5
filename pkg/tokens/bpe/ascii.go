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

// notLetter has the high bit of each byte of w set that is no ASCII letter.
func notLetter(w uint64) uint64 {
	x := w&^highs | 0x20*ones
	return ((x+(0x80-'a')*ones)&^(x+(0x7f-'z')*ones)&^w)&highs ^ highs
}

func notLower(w uint64) uint64 {
	x := w &^ highs
	return ((x+(0x80-'a')*ones)&^(x+(0x7f-'z')*ones)&^w)&highs ^ highs
}

func notUpper(w uint64) uint64 {
	x := w &^ highs
	return ((x+(0x80-'A')*ones)&^(x+(0x7f-'Z')*ones)&^w)&highs ^ highs
}

// packMasks cuts the two words of a piece to its length and enters the length, by length.
var packMasks = func() (t [16]struct{ lo, hi, length uint64 }) {
	for n := range t {
		t[n].lo, t[n].hi = 1<<(8*min(n, 8))-1, 1<<(8*max(n-8, 0))-1
		if n >= 8 {
			t[n].lo = 1<<64 - 1
		}
		t[n].length = uint64(n) << 56
	}
	return t
}()

// prefixBit is 0x80 for the ASCII characters that can stand before a word in its piece: all but letters, numbers and line ends.
var prefixBit = func() (t [256]uint64) {
	for b := range t[:utf8.RuneSelf] {
		switch {
		case b >= '0' && b <= '9', b == '\r', b == '\n', b|0x20 >= 'a' && b|0x20 <= 'z':
		default:
			t[b] = 0x80
		}
	}
	return t
}()

// kind of an ASCII character, for what is no word.
type kind uint8

const (
	kindOther kind = iota // beyond ASCII
	kindLetter
	kindDigit
	kindSpace
	kindSymbol
)

var kinds = func() (t [256]kind) {
	for b := range t[:utf8.RuneSelf] {
		switch {
		case b >= '0' && b <= '9':
			t[b] = kindDigit
		case b|0x20 >= 'a' && b|0x20 <= 'z':
			t[b] = kindLetter
		case b >= '\t' && b <= '\r' || b == ' ':
			t[b] = kindSpace
		default:
			t[b] = kindSymbol
		}
	}
	return t
}()

// fastLetters counts pieces from text[i] on as long as they are ASCII, where words are runs of letters. size is how far it
// may read. It returns where it stopped: at a piece for nextPiece, or where less than padding can be read.
func (e *Encoding) fastLetters(st *state, text string, i, size int) (end, total int) {
	for i+padding <= size && i < len(text) {
		lo := load64(text, i)
		c := byte(lo)
		if c == '\'' && e.rules.quotes {
			if k := e.contraction(text, i); k > 0 {
				total += e.segment(st, text[i:i+k])
				i += k
				continue
			}
		}
		pre := prefixBit[c]
		hi := load64(text, i+8)
		var k int
		if m := notLetter(lo) &^ pre; m != 0 {
			k = bits.TrailingZeros64(m) >> 3
		} else if m := notLetter(hi); m != 0 {
			k = 8 + bits.TrailingZeros64(m)>>3
		} else {
			k = 16
			for {
				if i+k+8 > size {
					return i, total
				}
				if m := notLetter(load64(text, i+k)); m != 0 {
					k += bits.TrailingZeros64(m) >> 3
					break
				}
				k += 8
			}
		}
		if next := byteAt(text, i+k); next >= utf8.RuneSelf {
			return i, total
		} else if k <= int(pre>>7) {
			if k = e.other(text, i, c); k == 0 {
				return i, total
			}
		}
		if k > 15 {
			total += e.piece(st, text[i:i+k], false)
			i += k
			continue
		}
		if k == 1 {
			total++
			i++
			continue
		}
		m := &packMasks[k&15]
		lo &= m.lo
		hi = hi&m.hi | m.length
		if slot := &st.short[shortHash(lo, hi)]; slot.lo == lo && slot.hi&^countMask == hi {
			total += int(slot.hi >> countShift)
		} else {
			st.work++
			total += e.missShort(slot, st, text[i:i+k], lo, hi)
		}
		i += k
	}
	return i, total
}

// byteAt reads within the padding.
func byteAt(text string, i int) byte {
	return *(*byte)(unsafe.Add(unsafe.Pointer(unsafe.StringData(text)), i))
}

// fastCases is fastLetters where words are upper case letters, then lower case ones, then a contraction.
func (e *Encoding) fastCases(st *state, text string, i, size int) (end, total int) {
	for i+padding <= size && i < len(text) {
		lo := load64(text, i)
		c := byte(lo)
		pre := prefixBit[c]
		hi := load64(text, i+8)
		var k int
		m := notUpper(lo) &^ pre
		if m == 0 {
			return i, total // 8 capitals: rare
		}
		k = bits.TrailingZeros64(m) >> 3
		if m := notLower(lo) &^ (1<<(8*k) - 1); m != 0 {
			k = bits.TrailingZeros64(m) >> 3
		} else if m := notLower(hi); m != 0 {
			k = 8 + bits.TrailingZeros64(m)>>3
		} else {
			k = 16
			for {
				if i+k+8 > size {
					return i, total
				}
				if m := notLower(load64(text, i+k)); m != 0 {
					k += bits.TrailingZeros64(m) >> 3
					break
				}
				k += 8
			}
		}
		next := byteAt(text, i+k)
		if next >= utf8.RuneSelf {
			return i, total
		}
		if k <= int(pre>>7) {
			if k = e.other(text, i, c); k == 0 {
				return i, total
			}
		} else if next == '\'' {
			k += e.contraction(text, i+k)
		}
		if k > 15 {
			total += e.piece(st, text[i:i+k], false)
			i += k
			continue
		}
		if k == 1 {
			total++
			i++
			continue
		}
		w := &packMasks[k&15]
		lo &= w.lo
		hi = hi&w.hi | w.length
		if slot := &st.short[shortHash(lo, hi)]; slot.lo == lo && slot.hi&^countMask == hi {
			total += int(slot.hi >> countShift)
		} else {
			st.work++
			total += e.missShort(slot, st, text[i:i+k], lo, hi)
		}
		i += k
	}
	return i, total
}

// other returns the length of the piece at text[i] that is no word; c is its first byte, and no letter follows c. It returns
// 0 where other than ASCII characters could have a say.
func (e *Encoding) other(text string, i int, c byte) int {
	j := i
	switch kinds[c] {
	case kindDigit:
		for j++; j < len(text) && j-i < e.rules.digits; j++ {
			if kinds[text[j]] != kindDigit {
				if text[j] >= utf8.RuneSelf {
					return 0
				}
				break
			}
		}
		return j - i
	case kindSpace:
		if c == ' ' && i+1 < len(text) && kinds[text[i+1]] == kindSymbol {
			j++
			break
		}
		line := 0
		for ; j < len(text) && kinds[text[j]] == kindSpace; j++ {
			if b := text[j]; b == '\n' || b == '\r' {
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
	case kindSymbol:
	default:
		return 0
	}
	for j++; j < len(text) && kinds[text[j]] == kindSymbol; j++ {
	}
	if j < len(text) && text[j] >= utf8.RuneSelf {
		return 0
	}
	return e.symbolTail(text, j) - i
}
