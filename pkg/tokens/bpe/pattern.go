// SPDX-License-Identifier: Apache-2.0

package bpe

import "unicode/utf8"

// Pattern is a way of splitting text into the pieces that are merged each on its own.
type Pattern uint8

// The patterns. Each stands for a regular expression that is written by hand here.
const (
	// CL100k is the pattern of cl100k_base, and of Llama 3.
	CL100k Pattern = iota + 1
	// O200k is the pattern of o200k_base, and of gpt-oss.
	O200k
	// Qwen2 is CL100k with digits one by one: Qwen 2, 2.5 and 3.
	Qwen2
	// DeepSeek is the sequence of three patterns of DeepSeek V3 and R1.
	DeepSeek
	// GPT2 is the pattern of GPT-2, the default of a byte-level pre-tokenizer.
	GPT2
)

// splitRules is what the patterns differ in.
type splitRules struct {
	digits    int   // most numbers in a piece
	quotes    bool  // a contraction ('s, 'll) is a piece of its own, tried first
	suffix    bool  // a contraction belongs to the word before
	cases     bool  // a word ends where an upper case letter follows a lower case one, and marks are letters
	tail      class // which of \r, \n and / can follow symbols in their piece
	stretches bool  // DeepSeek's
	plain     bool  // GPT-2's
	fast      bool  // the ASCII loop knows the rules
	longS     bool  // ſ is an s in a contraction
}

const (
	tailLines class = 1 << iota
	tailSlash
)

var patternRules = map[Pattern]splitRules{
	CL100k:   {digits: 3, quotes: true, tail: tailLines, fast: true},
	O200k:    {digits: 3, suffix: true, cases: true, tail: tailLines | tailSlash, fast: true},
	Qwen2:    {digits: 1, quotes: true, tail: tailLines, fast: true},
	DeepSeek: {stretches: true},
	GPT2:     {plain: true},
}

// next is the piece at text[i] by the encoding's pattern; see nextPiece.
func (e *Encoding) next(text string, i int) (end int, wide bool) {
	switch {
	case e.rules.stretches:
		return e.deepSeekPiece(text, i)
	case e.rules.plain:
		return e.gpt2Piece(text, i)
	}
	return e.nextPiece(text, i)
}

// gpt2Piece is nextPiece for GPT-2's pattern, where only a space goes before a word, a number or symbols, runs of numbers
// have no bound, contractions are lower case, and line ends are white space like any other.
func (e *Encoding) gpt2Piece(text string, i int) (end int, wide bool) {
	if text[i] == '\'' && i+1 < len(text) {
		if n := e.contraction(text, i); n > 0 && text[i+1] >= 'a' && text[i+n-1] >= 'a' {
			return i + n, false
		}
	}
	j := i
	if text[i] == ' ' && i+1 < len(text) {
		j++
	}
	r, size := decode(text, j)
	if size == 0 {
		// The invalid byte is a symbol, which the space belongs to.
		return -1, false
	}
	switch c := classOf(r); {
	case c&isLetter != 0:
		return runOf(text, j, isLetter, isLetter)
	case c&isNumber != 0:
		return runOf(text, j, isNumber, isNumber)
	case c&isWord == 0:
		return runOf(text, j, isWord, 0)
	}
	end, wide = runOf(text, i, isSpace, isSpace)
	if end < 0 || end == len(text) {
		return end, wide
	}
	// All but the last character, if there are several.
	_, n := utf8.DecodeLastRuneInString(text[:end])
	return max(end-n, i+sizeAt(text, i)), wide
}

func sizeAt(text string, i int) int {
	_, n := decode(text, i)
	return n
}

// runOf returns the end of the run at i of characters whose class is want in mask.
func runOf(text string, i int, mask, want class) (end int, wide bool) {
	for i < len(text) {
		r, n := decode(text, i)
		if n == 0 {
			return -1, false
		}
		if classOf(r)&mask != want {
			break
		}
		wide = wide || n > 2
		i += n
	}
	return i, wide
}

// contraction returns the length of the contraction that text[i:] begins with, or 0.
func (e *Encoding) contraction(text string, i int) int {
	if i+1 >= len(text) || text[i] != '\'' {
		return 0
	}
	b := text[i+1]
	switch b | 0x20 {
	case 's', 't', 'm', 'd':
		return 2
	case 'r', 'v':
		if i+2 < len(text) && text[i+2]|0x20 == 'e' {
			return 3
		}
	case 'l':
		if i+2 < len(text) && text[i+2]|0x20 == 'l' {
			return 3
		}
	}
	if e.rules.longS && b == 0xc5 && i+2 < len(text) && text[i+2] == 0xbf {
		return 3
	}
	return 0
}

// nextPiece returns the end of the piece that begins at text[i], and whether it may hold characters of three bytes and more.
// It returns -1 where it meets bytes that are not UTF-8.
func (e *Encoding) nextPiece(text string, i int) (end int, wide bool) {
	r, size := decode(text, i)
	if size == 0 {
		return -1, false
	}
	wide = size > 2
	c := classOf(r)
	if r == '\'' && e.rules.quotes {
		if n := e.contraction(text, i); n > 0 {
			return i + n, false
		}
	}
	if c&isNumber != 0 {
		j := i + size
		for k := 1; k < e.rules.digits && j < len(text); k++ {
			r, n := decode(text, j)
			if n == 0 || classOf(r)&isNumber == 0 {
				break
			}
			wide = wide || n > 2
			j += n
		}
		return j, wide
	}
	// A word, with one character before it that is neither letter nor number nor line end.
	word := i
	if c&isLetter == 0 && r != '\r' && r != '\n' {
		word = i + size
	}
	if e.rules.cases {
		if end, w := e.wordCases(text, i, word); end != 0 {
			return end, wide || w
		}
	} else if end, w := letters(text, word); end < 0 || end > word {
		return end, wide || w
	}
	// Symbols, with a space before them.
	j := i
	if r == ' ' {
		j++
	}
	if end, w := e.symbols(text, j); end < 0 || end > j {
		return end, wide || w
	}
	return spaces(text, i)
}

// letters returns the end of the run of letters at i.
func letters(text string, i int) (end int, wide bool) {
	for i < len(text) {
		r, n := decode(text, i)
		if n == 0 {
			return -1, false
		}
		if classOf(r)&isLetter == 0 {
			break
		}
		wide = wide || n > 2
		i += n
	}
	return i, wide
}

// symbols returns the end of the run of characters that are no letters, numbers or spaces, with what may follow it.
func (e *Encoding) symbols(text string, i int) (end int, wide bool) {
	start := i
	for i < len(text) {
		r, n := decode(text, i)
		if n == 0 {
			return -1, false
		}
		if classOf(r)&isWord != 0 {
			break
		}
		wide = wide || n > 2
		i += n
	}
	if i > start {
		i = e.symbolTail(text, i)
	}
	return i, wide
}

func (e *Encoding) symbolTail(text string, i int) int {
	for ; i < len(text); i++ {
		switch b := text[i]; {
		case (b == '\n' || b == '\r') && e.rules.tail&tailLines != 0:
		case b == '/' && e.rules.tail&tailSlash != 0:
		default:
			return i
		}
	}
	return i
}

// spaces returns the end of the piece of white space at i: up to the last line end, or all of it at the end of the text, or
// all but the last character, which is left to the next piece.
func spaces(text string, i int) (end int, wide bool) {
	start, line, last := i, -1, i
	for i < len(text) {
		r, n := decode(text, i)
		if n == 0 {
			return -1, false
		}
		if classOf(r)&isSpace == 0 {
			break
		}
		wide = wide || n > 2
		last = i
		i += n
		if r == '\n' || r == '\r' {
			line = i
		}
	}
	switch {
	case line >= 0:
		return line, wide
	case i == len(text) || last == start:
		return i, wide
	}
	return last, wide
}

// wordCases is the word of o200k_base: upper case letters, then lower case ones, then a contraction, where letters without
// case and marks are both. first is where the character before the word would be, word where the word begins then.
func (e *Encoding) wordCases(text string, first, word int) (end int, wide bool) {
	// At most two places to begin: a mark can be the character before, or belong to the word.
	end, wide, upper := casesAt(text, word)
	if end == 0 && first != word {
		// Only a mark makes another try worth it.
		if r, _ := decode(text, first); classOf(r)&isMark != 0 {
			if end1, w, _ := casesAt(text, first); end1 != 0 {
				end, wide = end1, w
			}
		}
	}
	if end == 0 && upper != 0 {
		end = upper
	}
	if end <= 0 {
		return end, wide
	}
	return end + e.suffix(text, end), wide
}

func (e *Encoding) suffix(text string, i int) int {
	if !e.rules.suffix {
		return 0
	}
	return e.contraction(text, i)
}

// casesAt returns the end of [Upper]*[Lower]+ at i, 0 if there is none; and the end of [Upper]+, 0 if there is none, which is
// that of [Upper]+[Lower]* wherever the former fails. end is -1 on bytes that are not UTF-8.
func casesAt(text string, i int) (end int, wide bool, upper int) {
	start := i
	both := 0 // end of the last character that is in both sets
	var c class
	for i < len(text) {
		r, n := decode(text, i)
		if n == 0 {
			return -1, false, 0
		}
		c = classOf(r)
		if c&isUpper == 0 {
			break
		}
		wide = wide || n > 2
		i += n
		if c&isLower != 0 {
			both = i
		}
	}
	if i > start {
		upper = i
	}
	lower := i
	for i < len(text) {
		r, n := decode(text, i)
		if n == 0 {
			return -1, false, 0
		}
		if classOf(r)&isLower == 0 {
			break
		}
		wide = wide || n > 2
		i += n
	}
	if i > lower {
		return i, wide, upper
	}
	return both, wide, upper
}
