// SPDX-License-Identifier: Apache-2.0

package bpe

import (
	"errors"
	"math/bits"
)

// A trie is a double array: the child of a node for byte b is the cell at the node's base + b, if that cell names the node
// as its parent. A cell packs parent, base and token (+ 1, 0 for none) into one word, so that a step is one load.
type trie []uint64

const (
	tokenBits = 20
	baseBits  = 22
	tokenMask = 1<<tokenBits - 1
	baseMask  = 1<<baseBits - 1
	noParent  = 1<<baseBits - 1

	maxTokens = tokenMask - 1
)

func cellParent(c uint64) uint32 { return uint32(c >> (tokenBits + baseBits)) }
func cellBase(c uint64) uint32   { return uint32(c>>tokenBits) & baseMask }
func cellToken(c uint64) uint32  { return uint32(c) & tokenMask }

var errTrieSize = errors.New("vocabulary too large: over 4 million prefixes")

// trieBuilder holds the free cells as a bitmap.
type trieBuilder struct {
	cells trie
	free  []uint64
	low   int // no cell below is free
	start int // where the search for several places begins
}

func (b *trieBuilder) grow(n int) {
	for len(b.cells) < n {
		for range 1024 {
			b.cells = append(b.cells, noParent<<(tokenBits+baseBits))
		}
		for range 1024 / 64 {
			b.free = append(b.free, ^uint64(0))
		}
	}
}

func (b *trieBuilder) isFree(i int) bool {
	b.grow(i + 1)
	return b.free[i>>6]>>(i&63)&1 != 0
}

// nextFree returns the first free cell from i on.
func (b *trieBuilder) nextFree(i int) int {
	for {
		b.grow(i + 64)
		if w := b.free[i>>6] >> (i & 63); w != 0 {
			return i + bits.TrailingZeros64(w)
		}
		i = (i | 63) + 1
	}
}

func (b *trieBuilder) take(i int) { b.free[i>>6] &^= 1 << (i & 63) }

// place finds a base where the cells of all children are free.
func (b *trieBuilder) place(children []byte) int {
	first := int(children[0])
	if len(children) == 1 {
		b.low = b.nextFree(b.low)
		return b.nextFree(max(b.low, first+1)) - first
	}
	tries := 0
	for i := b.nextFree(max(b.start, b.low, first+1)); ; i = b.nextFree(i + 1) {
		base, ok := i-first, true
		for _, c := range children[1:] {
			if !b.isFree(base + int(c)) {
				ok = false
				break
			}
		}
		if ok {
			if tries > 64 {
				b.start = max(b.start, i-256)
			}
			return base
		}
		tries++
	}
}

// trieNode is a range of sorted tokens that share their first depth bytes, and their cell.
type trieNode struct{ from, to, depth, cell int32 }

// newTrie builds the trie of tokens, which are sorted and distinct; ids[i] is the number of tokens[i]. The root is cell 0.
func newTrie(tokens []string, ids []uint32) (trie, error) {
	var b trieBuilder
	b.grow(1 << 16)
	b.take(0)
	queue := []trieNode{{0, int32(len(tokens)), 0, 0}}
	var children []byte
	var parts []trieNode
	for len(queue) > 0 {
		// A stack keeps the nodes of one token close to each other.
		n := queue[len(queue)-1]
		queue = queue[:len(queue)-1]
		if len(tokens[n.from]) == int(n.depth) {
			b.cells[n.cell] |= uint64(ids[n.from] + 1)
			n.from++
		}
		children, parts = children[:0], parts[:0]
		for i := n.from; i < n.to; {
			c := tokens[i][n.depth]
			j := i + 1
			for j < n.to && tokens[j][n.depth] == c {
				j++
			}
			children = append(children, c)
			parts = append(parts, trieNode{from: i, to: j, depth: n.depth + 1})
			i = j
		}
		if len(children) == 0 {
			continue
		}
		base := b.place(children)
		if base+256 >= noParent {
			return nil, errTrieSize
		}
		b.cells[n.cell] |= uint64(base) << tokenBits
		for i, c := range children {
			cell := base + int(c)
			b.take(cell)
			b.cells[cell] = uint64(n.cell) << (tokenBits + baseBits)
			parts[i].cell = int32(cell)
		}
		for i := len(parts) - 1; i >= 0; i-- {
			queue = append(queue, parts[i])
		}
	}
	last := len(b.cells)
	for last > 0 && cellParent(b.cells[last-1]) == noParent && last > 1 {
		last--
	}
	// A step reads up to 255 cells beyond a base.
	out := make(trie, last+256)
	copy(out, b.cells)
	for i := last; i < len(out); i++ {
		out[i] = noParent << (tokenBits + baseBits)
	}
	return out, nil
}
