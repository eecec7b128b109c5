// SPDX-License-Identifier: Apache-2.0

package tokens

import (
	"unicode"
	"unicode/utf8"
)

// partSize is the size from which a part ends at the next place where a cut changes nothing.
const partSize = 4096

// runClass is a set of characters of which any number can stand in one piece of the encodings' patterns. A character may
// be in several: combining marks are letters to o200k_base and symbols to cl100k_base, and a slash among line ends is part
// of what o200k_base takes after punctuation.
type runClass uint8

const (
	classLetter runClass = 1 << iota
	classSpace
	classSymbol
	classTail // line ends and slashes
	classNumber
)

// runClasses is the number of classes whose runs are watched. Numbers are not: both patterns end a piece after three.
const runClasses = 4

var asciiClass = func() (t [utf8.RuneSelf]runClass) {
	for r := range t {
		t[r] = classOf(rune(r))
	}
	return t
}()

func classOf(r rune) runClass {
	switch {
	case r == '\r' || r == '\n':
		return classSpace | classTail
	case r == '/':
		return classSymbol | classTail
	case unicode.IsLetter(r):
		return classLetter
	case unicode.IsMark(r):
		return classLetter | classSymbol
	case unicode.IsNumber(r):
		return classNumber
	case unicode.IsSpace(r):
		return classSpace
	default:
		return classSymbol
	}
}

// splitter divides a text into parts in which no run is longer than maxRun bytes.
type splitter struct {
	text   string
	maxRun int
	pos    int
}

// next returns the next part, empty at the end of the text. cut says that the part ends within a run, so that the sum of
// the parts' counts may differ from the count of the whole.
func (s *splitter) next() (part string, cut bool) {
	text, start := s.text, s.pos
	var runs [runClasses]int
	var prev runClass
	for i := start; i < len(text); {
		class, size, width := classSymbol, 1, 1
		if b := text[i]; b < utf8.RuneSelf {
			class = asciiClass[b]
			// Between the letters of two words, or between a line's end and a letter, both patterns end a piece whatever
			// else stands around.
			if i-start >= partSize && prev == classLetter && b == ' ' && i+1 < len(text) && isASCIILetter(text[i+1]) ||
				i-start >= partSize && text[i-1] == '\n' && isASCIILetter(b) {
				s.pos = i
				return text[start:i], false
			}
		} else {
			r, n := utf8.DecodeRuneInString(text[i:])
			class, size, width = classOf(r), n, n
			if r == utf8.RuneError {
				width = 3 // an invalid byte is encoded as U+FFFD
			}
		}
		for c := range runs {
			if class&(1<<c) == 0 {
				runs[c] = 0
				continue
			}
			runs[c] += width
			if runs[c] > s.maxRun && i > start {
				s.pos = i
				return text[start:i], true
			}
		}
		prev = class
		i += size
	}
	s.pos = len(text)
	return text[start:], false
}

func isASCIILetter(b byte) bool {
	b |= 0x20
	return 'a' <= b && b <= 'z'
}
