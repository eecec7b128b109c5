// SPDX-License-Identifier: Apache-2.0

package prefix

import (
	"encoding/binary"
	"math/rand/v2"

	"github.com/cespare/xxhash/v2"
)

// BlockBytes is the text that one block of Hasher covers: about 128 tokens of English. Smaller blocks would find a few tokens
// more and cost memory for each.
const BlockBytes = 512

// Hasher cuts a request's texts into blocks and hashes them. Text that ends within a block is part of none, as in an engine's
// cache. The zero value is ready after Reset.
type Hasher struct {
	digest xxhash.Digest
	hash   uint64
	filled int
	bytes  int
	blocks []uint64
}

// root keeps clients from making texts whose hashes meet those of others on purpose.
var root = rand.Uint64()

// Reset begins a new prompt. What separates caches that share no blocks, such as models, goes in first by Add.
func (h *Hasher) Reset() {
	h.hash, h.filled, h.bytes, h.blocks = root, 0, 0, h.blocks[:0]
	h.digest.ResetWithSeed(h.hash)
}

// Add appends a text. Two texts never give the blocks of their concatenation, but a text gives those of its own beginnings.
func (h *Hasher) Add(text string) {
	h.bytes += len(text)
	length := uint64(len(text))
	for len(text) > 0 {
		n := min(BlockBytes-h.filled, len(text))
		h.digest.WriteString(text[:n])
		text = text[n:]
		h.grow(n)
	}
	// The length comes last: a text that goes on has the same blocks up to here.
	var end [8]byte
	binary.LittleEndian.PutUint64(end[:], length)
	h.digest.Write(end[:])
}

// grow counts n more bytes of text, and ends the block that they fill.
func (h *Hasher) grow(n int) {
	if h.filled += n; h.filled == BlockBytes {
		h.hash = h.digest.Sum64()
		h.blocks = append(h.blocks, h.hash)
		h.digest.ResetWithSeed(h.hash)
		h.filled = 0
	}
}

// Blocks returns the prompt's blocks, valid until Reset, and the bytes of all texts.
func (h *Hasher) Blocks() (blocks []uint64, bytes int) { return h.blocks, h.bytes }
