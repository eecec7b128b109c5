// SPDX-License-Identifier: Apache-2.0

package bpe

import "math"

// none is no token.
const none = math.MaxUint32

// pairTable maps two tokens to the one that they merge into: open addressing in words of left, right and token, with a
// bitmap in front that answers most of the questions about pairs that do not merge from a closer cache.
type pairTable struct {
	filter []uint64
	words  []uint64
	fshift uint8
	shift  uint8
}

func newPairTable(n int) pairTable {
	size, shift := 1, uint8(64)
	for size < 2*n {
		size, shift = size*2, shift-1
	}
	fbits := max(size*4, 1<<12)
	fshift := shift - 2
	if fbits != size*4 {
		fshift = 64 - 12
	}
	p := pairTable{filter: make([]uint64, fbits/64), words: make([]uint64, size), shift: shift, fshift: fshift}
	return p
}

const pairFactor = 0x9e3779b97f4a7c15

func pairHash(a, b uint32) uint64 { return (uint64(a)<<32 | uint64(b)) * pairFactor }

func (p *pairTable) add(a, b, t uint32) {
	h := pairHash(a, b)
	f := h >> p.fshift
	p.filter[f>>6] |= 1 << (f & 63)
	i := h >> p.shift
	for p.words[i] != 0 {
		i = (i + 1) & uint64(len(p.words)-1)
	}
	p.words[i] = pairWord(a, b) | uint64(t+1)
}

func pairWord(a, b uint32) uint64 { return uint64(a)<<(2*tokenBits) | uint64(b)<<tokenBits }

// find returns the token of a pair, or none.
func (p *pairTable) find(a, b uint32) uint32 {
	h := pairHash(a, b)
	f := h >> p.fshift
	if p.filter[f>>6]>>(f&63)&1 == 0 {
		return none
	}
	return p.probe(h>>p.shift, pairWord(a, b))
}

func (p *pairTable) probe(i, key uint64) uint32 {
	for {
		w := p.words[i]
		if w == 0 {
			return none
		}
		if w&^tokenMask == key {
			return uint32(w&tokenMask) - 1
		}
		i = (i + 1) & uint64(len(p.words)-1)
	}
}

// tokenInfo is what merging asks about a token, in one place of the memory.
type tokenInfo struct {
	left, right uint32 // the two tokens that it is merged from; of a single byte, twice itself
	shorter     uint32 // the longest other token that its text begins with, or none
	size        uint16 // the text's length, and the token's group; see runs.go
}

// valid reports whether the text of a followed by b is encoded as just a and b. Tokens are numbered in the order of their
// merges, bytes first. It takes the last merges of the two apart in turn, and looks whether the tokens that then met at the
// border would have merged before.
func (e *Encoding) valid(a, b uint32, work *int) bool {
	limit := uint32(none)
	for {
		*work++
		if t := e.pairs.find(a, b); t < limit {
			return false
		}
		if a > b {
			limit = a
			if a = e.tokens[a].right; a == limit {
				limit = b + 1
				if b = e.tokens[b].left; b+1 == limit {
					return true
				}
			}
		} else {
			limit = b + 1
			if b = e.tokens[b].left; b+1 == limit {
				limit = a
				if a = e.tokens[a].right; a == limit {
					return true
				}
			}
		}
	}
}

// follows is valid with a memory.
func (e *Encoding) follows(st *state, a, b uint32) bool {
	st.work++
	key := pairWord(a, b) | 2
	m := &st.pairs[pairHash(a, b)>>(64-followBits)]
	if *m&^1 == key {
		return *m&1 != 0
	}
	ok := e.valid(a, b, &st.work)
	*m = key
	if ok {
		*m |= 1
	}
	return ok
}

// longest returns the longest token that text begins with.
func (e *Encoding) longest(text string, work *int) uint32 {
	if len(text) < 2 {
		return uint32(text[0])
	}
	// Most ways end within a few bytes; the first two are one step.
	s := e.heads[uint(text[0])<<8|uint(text[1])]
	if s == 0 {
		*work++
		return uint32(text[0])
	}
	cells := e.trie
	i := 2
	c := cells[s]
	last := cellToken(c)
	if last == 0 {
		last = uint32(text[0]) + 1
	}
	if len(text) >= 8 && load64(text, 0) == uint64(text[0])*ones {
		if r := &e.runs[text[0]]; len(r.cells) > 8 {
			i = runLength(text, len(r.cells))
			last, s = r.tokens[i-1], r.cells[i-1]
			c = cells[s]
			*work += i / 8
		}
	}
	start := i
	for ; i < len(text); i++ {
		next := cellBase(c) + uint32(text[i])
		c = cells[next]
		if cellParent(c) != s {
			break
		}
		s = next
		if t := cellToken(c); t != 0 {
			last = t
		}
	}
	*work += i - start + 1
	return last - 1
}

// newHeads finds the cell of each two bytes, 0 for those that no token begins with.
func newHeads(t trie) []uint32 {
	heads := make([]uint32, 1<<16)
	for a := range uint32(256) {
		first := cellBase(t[0]) + a
		if cellParent(t[first]) != 0 {
			continue
		}
		for b := range uint32(256) {
			if next := cellBase(t[first]) + b; cellParent(t[next]) == first {
				heads[a<<8|b] = next
			}
		}
	}
	return heads
}

// merged counts the tokens of one piece: the longest token first, and where two neighbours cannot stand so, a shorter one.
// A place from which no way leads on is marked, so that none is tried twice.
func (e *Encoding) merged(st *state, piece string) int {
	n := len(piece)
	toks, dead := st.room(n)
	depth, pos := 0, 0
	last := uint32(none)
	next := e.longest(piece, &st.work)
	for {
		ok := false
		if last != none && e.sameRun(last, next) {
			next = e.nextRun(last, next, pos, dead, &st.work)
			ok = next != none
		} else {
			for ; next != none; next = e.tokens[next].shorter {
				end := pos + e.size(next)
				if dead[end>>6]>>(end&63)&1 == 0 && (last == none || e.follows(st, last, next)) {
					ok = true
					break
				}
			}
		}
		if ok {
			toks[depth] = next
			depth++
			pos += e.size(next)
			if pos == n {
				return depth
			}
			last, next = next, e.longest(piece[pos:], &st.work)
			continue
		}
		dead[pos>>6] |= 1 << (pos & 63)
		depth--
		next = toks[depth]
		pos -= e.size(next)
		last = none
		if depth > 0 {
			last = toks[depth-1]
		}
	}
}
