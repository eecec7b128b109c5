// SPDX-License-Identifier: Apache-2.0

package bpe

import "unicode/utf8"

// deepSeekPiece is nextPiece for DeepSeek's three patterns: up to three numbers; then runs of Han and kana; then what stands
// between those, each stretch as if it were a text of its own.
func (e *Encoding) deepSeekPiece(text string, i int) (end int, wide bool) {
	r, size := decode(text, i)
	if size == 0 {
		return -1, false
	}
	c := classOf(r)
	wide = size > 2
	if c&isNumber != 0 {
		j := i + size
		for range 2 {
			r, n := stretchRune(text, j, isNumber, isNumber)
			if n <= 0 {
				break
			}
			wide = wide || utf8.RuneLen(r) > 2
			j += n
		}
		return j, wide
	}
	s := stretch{text: text, in: c & isScript, wide: wide}
	end = s.piece(i)
	if s.bad {
		return -1, false
	}
	return end, s.wide
}

// stretchRune returns the rune at i and its length: 0 where the text ends or its class is not want in mask, -1 where it is
// not UTF-8.
func stretchRune(text string, i int, mask, want class) (rune, int) {
	if i >= len(text) {
		return 0, 0
	}
	r, n := decode(text, i)
	if n == 0 {
		return 0, -1
	}
	if classOf(r)&mask != want {
		return 0, 0
	}
	return r, n
}

// stretch is a run of the text that is split on its own: of Han and kana, or without these and without numbers.
type stretch struct {
	text string
	in   class // isScript or 0
	wide bool  // a character of three bytes or more was seen
	bad  bool  // bytes that are not UTF-8 were seen
}

func (s *stretch) rune(i int) (class, rune, int) {
	r, n := stretchRune(s.text, i, isScript|isNumber, s.in)
	if n <= 0 {
		s.bad = s.bad || n < 0
		return 0, 0, 0
	}
	s.wide = s.wide || n > 2
	return classOf(r), r, n
}

// run returns the end of the run at i of characters of any of the classes.
func (s *stretch) run(i int, any class) int {
	for {
		c, _, n := s.rune(i)
		if n == 0 || c&any == 0 {
			return i
		}
		i += n
	}
}

// piece returns the end of the piece at i: a match of the third pattern, or what lies before the next match.
func (s *stretch) piece(i int) int {
	c, r, n := s.rune(i)
	if r < utf8.RuneSelf && c&isPunct != 0 {
		j := i + 1
		for j < len(s.text) && kindOf(s.text[j]) == kindLetter {
			j++
		}
		if j > i+1 {
			return j
		}
	}
	if r != '\r' && r != '\n' && c&(isLetter|isPunct) == 0 {
		if j := s.run(i+n, isLetter|isMark); j > i+n {
			return j
		}
	}
	if j := s.run(i, isLetter|isMark); j > i {
		return j
	}
	j := i
	if r == ' ' {
		j++
	}
	if k := s.run(j, isPunct); k > j {
		for k < len(s.text) && (s.text[k] == '\r' || s.text[k] == '\n') {
			k++
		}
		return k
	}
	if c&isSpace != 0 {
		return s.spaces(i)
	}
	// No match begins here. The next one begins at any other kind of character, or one before a letter.
	for j = i + n; ; j += n {
		if c, _, n = s.rune(j); n == 0 || c&(isLetter|isMark|isPunct|isSpace) != 0 {
			return j
		}
		if next, _, m := s.rune(j + n); m > 0 && next&(isLetter|isMark) != 0 {
			return j
		}
	}
}

func (s *stretch) spaces(i int) int {
	start, line, last := i, -1, i
	for {
		c, r, n := s.rune(i)
		if n == 0 || c&isSpace == 0 {
			switch {
			case line >= 0:
				return line
			case n == 0 || last == start: // a stretch ends like a text
				return i
			}
			return last
		}
		last = i
		i += n
		if r == '\r' || r == '\n' {
			line = i
		}
	}
}
