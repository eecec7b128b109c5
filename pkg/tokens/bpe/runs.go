// SPDX-License-Identifier: Apache-2.0

package bpe

import "math/bits"

// Rulers (-----, =====) have tokens of over a hundred bytes and some dozens of lengths, and to merge a long ruler goes through
// many of them at each place. What is asked there again and again is looked up here.

// byteRun is the way through the trie along one byte again and again: the cell after each step, and the longest token (+ 1)
// up to there. Rulers (----) have tokens of over a hundred bytes, and without it the way would be walked anew for each place.
type byteRun struct {
	cells  []uint32
	tokens []uint32
}

func newByteRuns(t trie) (runs [256]byteRun) {
	for b := range uint32(256) {
		r := &runs[b]
		last := uint32(0)
		for s := uint32(0); ; {
			next := cellBase(t[s]) + b
			if cellParent(t[next]) != s {
				break
			}
			s = next
			if tok := cellToken(t[s]); tok != 0 {
				last = tok
			}
			r.cells, r.tokens = append(r.cells, s), append(r.tokens, last)
		}
	}
	return runs
}

// runLength counts how often text repeats its first byte, most at the most. text repeats it 8 times.
func runLength(text string, most int) int {
	n := 8
	w := uint64(text[0]) * ones
	most = min(most, len(text))
	for ; n+8 <= most; n += 8 {
		if x := load64(text, n) ^ w; x != 0 {
			return n + bits.TrailingZeros64(x)>>3
		}
	}
	for n < most && text[n] == text[0] {
		n++
	}
	return n
}

// tokenInfo.size is a token's length and, for a token that repeats one byte, the group of the tokens that
// repeat the same, from 1 on.
const (
	sizeBits   = 10
	maxSize    = 1<<sizeBits - 1
	maxGroups  = 1<<(16-sizeBits) - 1
	groupLeast = 5 // members from which a group is worth it
	groupMost  = 64
)

func (e *Encoding) size(t uint32) int { return int(e.tokens[t].size & maxSize) }

// runGroup answers valid for two tokens that repeat the same byte.
type runGroup struct {
	tokens []uint32 // the shortest first
	index  []uint8  // by length
	valid  []uint64 // by the first token's index, a bit for the second's
}

// newRunGroups enters the groups' numbers in the tokens' sizes.
func (e *Encoding) newRunGroups() {
	work := 0
	for b := range e.runs {
		r := &e.runs[b]
		var tokens []uint32
		for i, t := range r.tokens {
			if t != 0 && (i == 0 || t != r.tokens[i-1]) {
				tokens = append(tokens, t-1)
			}
		}
		if len(tokens) < groupLeast || len(tokens) > groupMost || len(e.groups) >= maxGroups {
			continue
		}
		g := runGroup{tokens: tokens, index: make([]uint8, len(r.tokens)+1), valid: make([]uint64, len(tokens))}
		for i, x := range tokens {
			g.index[e.size(x)] = uint8(i)
			for j, y := range tokens {
				if e.valid(x, y, &work) {
					g.valid[i] |= 1 << j
				}
			}
		}
		e.groups = append(e.groups, g)
		for _, t := range tokens {
			e.tokens[t].size |= uint16(len(e.groups)) << sizeBits
		}
	}
}

// sameRun reports whether both tokens are of one group.
func (e *Encoding) sameRun(a, b uint32) bool {
	x, y := e.tokens[a].size>>sizeBits, e.tokens[b].size>>sizeBits
	return x != 0 && x == y
}

// nextRun returns the longest token that can stand at pos behind the token last, is b or shorter, and ends where a way may
// lead on; or none.
func (e *Encoding) nextRun(last, b uint32, pos int, dead []uint64, work *int) uint32 {
	g := &e.groups[e.tokens[last].size>>sizeBits-1]
	for m := g.valid[g.index[e.size(last)]] << (63 - g.index[e.size(b)]); m != 0; {
		*work++
		i := bits.Len64(m) - 1
		t := g.tokens[i-63+int(g.index[e.size(b)])]
		if end := pos + e.size(t); dead[end>>6]>>(end&63)&1 == 0 {
			return t
		}
		m &^= 1 << i
	}
	return none
}
