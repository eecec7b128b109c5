// SPDX-License-Identifier: Apache-2.0

package bpe

import "unicode/utf8"

// seams knows between which characters a piece can be taken apart without changing its tokens: where no token's text holds
// the two next to each other, nor ends or begins within one of them next to the other, no merge can cross. In Chinese that
// leaves short segments that repeat, where the pieces between two punctuation marks never do.
type seams struct {
	runes []uint8  // by code point below 0x10000
	pairs []uint64 // bitmap of pairs that stand in a token, hashed: a false hit costs time only
}

const (
	seamCount  = 3      // mask: tokens of the character alone, 1 to 3
	openRight  = 1 << 2 // a token holds this character, and a part only of the next
	openLeft   = 1 << 3 // a token holds this character, and a part only of the one before
	seamPlanes = 1 << 16

	seamShift = 64 - 20
)

func seamHash(x, y rune) uint64 { return (uint64(x)<<16 | uint64(y)) * pairFactor >> seamShift }

// apart reports whether no merge can cross the border between x and y.
func (s *seams) apart(x, y rune) bool {
	if x|y < utf8.RuneSelf || x >= seamPlanes || y >= seamPlanes || s.runes[x]&openRight != 0 || s.runes[y]&openLeft != 0 {
		return false
	}
	h := seamHash(x, y)
	return s.pairs[h>>6]>>(h&63)&1 == 0
}

func newSeams(tokens []string) seams {
	s := seams{runes: make([]uint8, seamPlanes), pairs: make([]uint64, 1<<(64-seamShift)/64)}
	for i := range s.runes {
		s.runes[i] = uint8(utf8.RuneLen(max(rune(i), 0)) & seamCount)
		if i >= 0xd800 && i < 0xe000 {
			s.runes[i] = 0
		}
	}
	// A token can be part of a character's text: two bytes of three, at either end.
	var heads, tails [1 << 16]bool
	for _, t := range tokens {
		if len(t) == 2 {
			heads[uint(t[0])<<8|uint(t[1])] = true
		}
	}
	tails = heads
	for r := rune(0x80); r < seamPlanes; r++ {
		if r >= 0xd800 && r < 0xe000 {
			continue
		}
		var b [4]byte
		n := utf8.EncodeRune(b[:], r)
		count := n
		if heads[uint(b[0])<<8|uint(b[1])] || n == 3 && tails[uint(b[1])<<8|uint(b[2])] {
			count--
		}
		s.runes[r] = uint8(count)
	}
	for _, t := range tokens {
		s.addToken(t)
	}
	return s
}

func (s *seams) addToken(t string) {
	if r, n := utf8.DecodeRuneInString(t); n == len(t) && n > 1 && r < seamPlanes {
		s.runes[r] = s.runes[r]&^seamCount | 1
		return
	}
	lead := 0
	for lead < len(t) && lead < 4 && t[lead]&0xc0 == 0x80 {
		lead++
	}
	prev := rune(-1) // the full character before; -1: none, or a part of one
	for i := lead; i < len(t); {
		r, n := utf8.DecodeRuneInString(t[i:])
		if r == utf8.RuneError && n == 1 {
			// The token ends within this character.
			switch {
			case prev >= 0 && prev < seamPlanes:
				s.runes[prev] |= openRight
			case prev < 0 && i > 0:
				s.openTails(t[:i])
			}
			return
		}
		switch {
		case r >= seamPlanes:
		case prev >= 0 && prev < seamPlanes:
			h := seamHash(prev, r)
			s.pairs[h>>6] |= 1 << (h & 63)
		case prev < 0 && i > 0:
			s.runes[r] |= openLeft
		}
		prev = r
		i += n
	}
}

// openTails marks every character whose text ends with tail, which stands in a token with only a part of the next.
func (s *seams) openTails(tail string) {
	for r := rune(0x80); r < seamPlanes; r++ {
		if r >= 0xd800 && r < 0xe000 {
			continue
		}
		var b [4]byte
		n := utf8.EncodeRune(b[:], r)
		if n > len(tail) && string(b[n-len(tail):n]) == tail {
			s.runes[r] |= openRight
		}
	}
}

// smallTable holds the tokens of every piece of two or three ASCII characters, in two bits each.
type smallTable struct {
	two   []uint8
	three []uint8
}

func (t *smallTable) get(b0, b1, b2 byte, n int) int {
	if n == 2 {
		i := uint(b0) | uint(b1)<<7
		return int(t.two[i>>2] >> (i & 3 * 2) & 3)
	}
	i := uint(b0) | uint(b1)<<7 | uint(b2)<<14
	return int(t.three[i>>2] >> (i & 3 * 2) & 3)
}

func newSmallTable(tokens []string, whole map[string]struct{}) smallTable {
	t := smallTable{two: make([]uint8, 1<<14/4), three: make([]uint8, 1<<21/4)}
	for i := range t.two {
		t.two[i] = 0xaa // 2 each
	}
	for i := range t.three {
		t.three[i] = 0xff // 3 each
	}
	put := func(table []uint8, i uint, v uint8) {
		table[i>>2] = table[i>>2]&^(3<<(i&3*2)) | v<<(i&3*2)
	}
	ascii := func(s string) bool {
		for i := range len(s) {
			if s[i] >= utf8.RuneSelf {
				return false
			}
		}
		return true
	}
	for _, s := range tokens {
		if len(s) != 2 || !ascii(s) {
			continue
		}
		i := uint(s[0]) | uint(s[1])<<7
		put(t.two, i, 1)
		for c := range uint(utf8.RuneSelf) {
			put(t.three, i|c<<14, 2)
			put(t.three, i<<7|c, 2)
		}
	}
	for _, s := range tokens {
		if len(s) == 3 && ascii(s) {
			put(t.three, uint(s[0])|uint(s[1])<<7|uint(s[2])<<14, 1)
		}
	}
	for s := range whole {
		switch {
		case len(s) == 2 && ascii(s):
			put(t.two, uint(s[0])|uint(s[1])<<7, 1)
		case len(s) == 3 && ascii(s):
			put(t.three, uint(s[0])|uint(s[1])<<7|uint(s[2])<<14, 1)
		}
	}
	return t
}
