// SPDX-License-Identifier: Apache-2.0

package bpe

import (
	"sync"
	"unicode"
	"unicode/utf8"
)

// class is a set of the Unicode properties that the split patterns ask for.
type class uint8

const (
	isLetter class = 1 << iota // \p{L}
	isNumber                   // \p{N}
	isSpace                    // \s
	isUpper                    // [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]: what a word of o200k_base begins with
	isLower                    // [\p{Ll}\p{Lm}\p{Lo}\p{M}]: what it ends with
	isMark                     // \p{M}
	isPunct                    // [\p{P}\p{S}]
	isScript                   // [一-龥぀-ゟ゠-ヿ], which DeepSeek's pattern takes apart from other letters

	isWord = isLetter | isNumber | isSpace // what a symbol is not
)

// classTable is a table of two stages: the page of a rune's upper bits, then its place in the page.
type classTable struct {
	page    [(unicode.MaxRune + 1) >> 8]uint8
	classes [][256]class
}

var (
	classesOnce sync.Once
	runeClasses classTable
	byteClasses [256]class // of ASCII; 0 from 0x80 on
)

func initClasses() {
	classesOnce.Do(func() {
		all := make([]class, unicode.MaxRune+1)
		set := func(c class, tables ...*unicode.RangeTable) {
			for _, t := range tables {
				for _, r := range t.R16 {
					for x := uint32(r.Lo); x <= uint32(r.Hi); x += uint32(r.Stride) {
						all[x] |= c
					}
				}
				for _, r := range t.R32 {
					for x := r.Lo; x <= r.Hi; x += r.Stride {
						all[x] |= c
					}
				}
			}
		}
		set(isLetter, unicode.L)
		set(isNumber, unicode.N)
		set(isSpace, unicode.White_Space)
		set(isUpper, unicode.Lu, unicode.Lt, unicode.Lm, unicode.Lo, unicode.M)
		set(isLower, unicode.Ll, unicode.Lm, unicode.Lo, unicode.M)
		set(isMark, unicode.M)
		set(isPunct, unicode.P, unicode.S)
		for r := rune(0x3040); r <= 0x30ff; r++ {
			all[r] |= isScript
		}
		for r := rune(0x4e00); r <= 0x9fa5; r++ {
			all[r] |= isScript
		}
		copy(byteClasses[:utf8.RuneSelf], all)
		pages := make(map[[256]class]uint8)
		for p := range runeClasses.page {
			page := [256]class(all[p<<8:])
			n, ok := pages[page]
			if !ok {
				n = uint8(len(runeClasses.classes))
				pages[page] = n
				runeClasses.classes = append(runeClasses.classes, page)
			}
			runeClasses.page[p] = n
		}
	})
}

func classOf(r rune) class {
	return runeClasses.classes[runeClasses.page[uint32(r)>>8]][uint8(r)]
}

// decode returns the rune at text[i] and its length, 0 if the bytes there are not UTF-8.
func decode(text string, i int) (rune, int) {
	b := text[i]
	if b < utf8.RuneSelf {
		return rune(b), 1
	}
	if b >= 0xe1 && b < 0xf0 && b != 0xed && i+2 < len(text) {
		c, d := text[i+1], text[i+2]
		if c&0xc0 == 0x80 && d&0xc0 == 0x80 {
			return rune(b&0x0f)<<12 | rune(c&0x3f)<<6 | rune(d&0x3f), 3
		}
		return 0, 0
	}
	r, size := utf8.DecodeRuneInString(text[i:])
	if size == 1 {
		return 0, 0
	}
	return r, size
}
