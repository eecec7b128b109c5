// SPDX-License-Identifier: Apache-2.0

package bpe

// exactTable holds the texts of all tokens of up to 15 bytes that begin with a space, packed as in the cache of pieces. It says
// with one load or two from memory that a piece is a token as a whole, as rare words mostly are, where the way through the
// trie takes one for each byte. A bitmap in front answers for most pieces that are none.
type exactTable struct {
	filter []uint64
	texts  []shortEntry
}

const (
	// exactSize is the longest text that the table holds.
	exactSize = 15

	exactFilterBits = 19
)

func newExactTable(tokens []string) exactTable {
	n := 0
	for _, t := range tokens {
		if isExact(t) {
			n++
		}
	}
	size := 1
	for size < n+n/4 {
		size *= 2
	}
	x := exactTable{filter: make([]uint64, 1<<exactFilterBits/64), texts: make([]shortEntry, size)}
	for _, t := range tokens {
		x.add(t)
	}
	return x
}

func isExact(t string) bool { return len(t) >= 2 && len(t) <= exactSize && t[0] == ' ' }

func (x *exactTable) add(t string) {
	if !isExact(t) {
		return
	}
	lo, hi := pack(t)
	hi |= uint64(len(t)) << 56
	h := exactHash(lo, hi)
	f := h >> (64 - exactFilterBits)
	x.filter[f>>6] |= 1 << (f & 63)
	mask := uint64(len(x.texts) - 1)
	i := h & mask
	for x.texts[i].hi != 0 {
		i = (i + 1) & mask
	}
	x.texts[i] = shortEntry{lo, hi}
}

func exactHash(lo, hi uint64) uint64 {
	h := (lo ^ hi*hashFactor) * pairFactor
	h ^= h >> 29
	return h * hashFactor2
}

// holds reports whether the text is in the table: lo and hi with the length in its top byte.
func (x *exactTable) holds(lo, hi uint64) bool {
	h := exactHash(lo, hi)
	f := h >> (64 - exactFilterBits)
	if x.filter[f>>6]>>(f&63)&1 == 0 {
		return false
	}
	mask := uint64(len(x.texts) - 1)
	for i := h & mask; ; i = (i + 1) & mask {
		if x.texts[i].lo == lo && x.texts[i].hi == hi {
			return true
		}
		if x.texts[i].hi == 0 {
			return false
		}
	}
}
