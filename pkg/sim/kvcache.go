// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"encoding/binary"

	"github.com/cespare/xxhash/v2"
)

// BlockTokens is the number of tokens in a block of the KV cache (vLLM's usual default).
const BlockTokens = 16

// BlockHash names a full block: it depends on the block's tokens and on everything before them.
type BlockHash uint64

// HashBlocks returns the chained hashes of the full blocks of tokens. Root separates what must not share blocks, such
// as two models.
func HashBlocks(root uint64, tokens []uint32) []BlockHash {
	out := make([]BlockHash, 0, len(tokens)/BlockTokens)
	var buf [8 + 4*BlockTokens]byte
	parent := root
	for ; len(tokens) >= BlockTokens; tokens = tokens[BlockTokens:] {
		binary.LittleEndian.PutUint64(buf[:], parent)
		for i, t := range tokens[:BlockTokens] {
			binary.LittleEndian.PutUint32(buf[8+4*i:], t)
		}
		parent = xxhash.Sum64(buf[:])
		out = append(out, BlockHash(parent))
	}
	return out
}

// kvBlock is one block of the cache. Blocks that no sequence holds are linked in order of eviction.
type kvBlock struct {
	hash       BlockHash
	cached     bool // hash is in the table and names this block
	refs       int32
	prev, next int32
}

// kvCache is a paged KV cache with prefix caching, after vLLM's block pool: a freed block keeps its content until it is
// evicted, least recently used first, and of one sequence the tail before the head.
type kvCache struct {
	blocks []kvBlock // the last one is the sentinel of the eviction list
	table  map[BlockHash]int32
	free   int
}

func newKVCache(n int) *kvCache {
	c := &kvCache{blocks: make([]kvBlock, n+1), table: make(map[BlockHash]int32), free: n}
	for i := range c.blocks {
		c.blocks[i].prev, c.blocks[i].next = int32(i)-1, int32(i)+1
	}
	c.blocks[0].prev, c.blocks[n].next = int32(n), 0
	return c
}

func (c *kvCache) size() int { return len(c.blocks) - 1 }

// match returns the blocks that hold the longest cached prefix of hashes, without taking them.
func (c *kvCache) match(dst []int32, hashes []BlockHash) []int32 {
	for _, h := range hashes {
		b, ok := c.table[h]
		if !ok {
			break
		}
		dst = append(dst, b)
	}
	return dst
}

// unused counts those of ids that no sequence holds: taking them uses up free blocks.
func (c *kvCache) unused(ids []int32) (n int) {
	for _, id := range ids {
		if c.blocks[id].refs == 0 {
			n++
		}
	}
	return n
}

func (c *kvCache) unlink(id int32) {
	b := &c.blocks[id]
	c.blocks[b.prev].next, c.blocks[b.next].prev = b.next, b.prev
	c.free--
}

// hold takes one more reference on a cached block.
func (c *kvCache) hold(id int32) {
	if c.blocks[id].refs == 0 {
		c.unlink(id)
	}
	c.blocks[id].refs++
}

// take evicts the least recently used block and gives it to the caller. The caller checks free first.
func (c *kvCache) take() int32 {
	id := c.blocks[c.size()].next
	c.unlink(id)
	c.forget(id)
	c.blocks[id].refs = 1
	return id
}

func (c *kvCache) forget(id int32) {
	if b := &c.blocks[id]; b.cached {
		delete(c.table, b.hash)
		b.cached = false
	}
}

// publish makes a full block findable by its hash. A second block with the same content stays private.
func (c *kvCache) publish(id int32, h BlockHash) {
	b := &c.blocks[id]
	if b.cached {
		return
	}
	if _, dup := c.table[h]; dup {
		return
	}
	b.hash, b.cached = h, true
	c.table[h] = id
}

// release gives a sequence's blocks back, its tail first, so that the tail is evicted before the head.
func (c *kvCache) release(ids []int32) {
	s := int32(c.size())
	for i := len(ids) - 1; i >= 0; i-- {
		id := ids[i]
		b := &c.blocks[id]
		if b.refs--; b.refs > 0 {
			continue
		}
		c.free++
		if !b.cached { // holds nothing of use: first to go
			b.prev, b.next = s, c.blocks[s].next
		} else {
			b.prev, b.next = c.blocks[s].prev, s
		}
		c.blocks[b.prev].next, c.blocks[b.next].prev = id, id
	}
}

// reset forgets the content of all blocks that no sequence holds.
func (c *kvCache) reset() {
	s := int32(c.size())
	for id := c.blocks[s].next; id != s; id = c.blocks[id].next {
		c.forget(id)
	}
}
