// SPDX-License-Identifier: Apache-2.0

// Package prefix remembers which backend holds the beginning of which prompt.
//
// A prompt is a chain of blocks. A block's hash covers the block and everything before it, so equal hashes mean equal
// beginnings. Index keeps for each backend the blocks that it was given, least recently used first out, as the engine itself does; it
// is entered when a request is sent and needs no word of the engine, but takes one (Resize, Correct). Hasher makes the blocks
// of a request's text.
//
// Within a chain a block is never older than the one after it: a backend that holds a block holds all before it, and a
// look-up is a search, not a walk.
package prefix

import (
	"math"
	"sync"
	"sync/atomic"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

// Defaults of Options.
const (
	// DefaultBlocks is the blocks that a backend is believed to hold while its cache's size is not known: half a million
	// tokens at about 128 tokens a block, what an 80 GB card keeps of an 8B model's context.
	DefaultBlocks = 4096
	// DefaultBytes bounds the memory of an index.
	DefaultBytes = 64 << 20
	// blockBytes is the most memory that one block of one backend takes: its entry and its places in a table that is at
	// least a quarter full, both with room to grow.
	blockBytes = 2*16 + 4*4
)

// Options of New. Zero values mean the defaults.
type Options struct {
	Blocks int // of one backend, while nothing better is known
	Bytes  int // of all backends together; shared evenly by those that hold anything
}

// Index is a fleet.Index. Look-ups do not allocate and do not keep each other out.
type Index struct {
	o      Options
	active atomic.Int64 // backends that hold anything
	caches [fleet.MaxBackends]cache
}

// New returns an empty index.
func New(o Options) *Index {
	if o.Blocks <= 0 {
		o.Blocks = DefaultBlocks
	}
	if o.Bytes <= 0 {
		o.Bytes = DefaultBytes
	}
	return &Index{o: o}
}

// Held returns how many of the first blocks the backend is believed to hold.
func (x *Index) Held(id fleet.ID, blocks []uint64) int {
	if int(id) >= len(x.caches) {
		return 0
	}
	c := &x.caches[id]
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.held(blocks)
}

// Enter records that the backend is given a prompt of these blocks.
func (x *Index) Enter(id fleet.ID, blocks []uint64) {
	if int(id) >= len(x.caches) || len(blocks) == 0 {
		return
	}
	c := &x.caches[id]
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.used == 0 {
		x.active.Add(1)
	}
	limit := x.limit(c)
	if len(blocks) > limit {
		blocks = blocks[:limit] // the tail is what an engine evicts first
	}
	for i := len(blocks) - 1; i >= 0; i-- {
		c.touch(blocks[i])
	}
	for c.used > limit {
		c.evict()
	}
}

// Correct enters an engine's word on a prompt: it found that much of what the index believed, in any unit. Where it found
// far less, the backend's cache is taken to be smaller than thought; where it found all, to be a little larger again.
func (x *Index) Correct(id fleet.ID, believed, found int) {
	if int(id) >= len(x.caches) || believed <= 0 {
		return
	}
	c := &x.caches[id]
	c.mu.Lock()
	defer c.mu.Unlock()
	size := c.size
	if size == 0 {
		size = x.o.Blocks
	}
	if found < believed/2 {
		c.learned = max(c.limitOr(size)*63/64, minBlocks)
	} else if c.learned > 0 {
		c.learned = min(c.learned+max(c.learned/256, 1), size)
	}
}

// minBlocks is the smallest cache that Correct arrives at.
const minBlocks = 64

// Resize tells how many blocks the backend's cache has room for; 0 or less: not known.
func (x *Index) Resize(id fleet.ID, blocks int) {
	if int(id) >= len(x.caches) {
		return
	}
	c := &x.caches[id]
	c.mu.Lock()
	defer c.mu.Unlock()
	c.size = max(blocks, 0)
}

// Forget drops all of a backend that has left or restarted.
func (x *Index) Forget(id fleet.ID) {
	if int(id) >= len(x.caches) {
		return
	}
	c := &x.caches[id]
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.used > 0 {
		x.active.Add(-1)
	}
	c.table, c.entries, c.used, c.free, c.size, c.learned = nil, nil, 0, 0, 0, 0
}

// Len returns how many blocks the backend is believed to hold.
func (x *Index) Len(id fleet.ID) int {
	if int(id) >= len(x.caches) {
		return 0
	}
	c := &x.caches[id]
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.used
}

func (x *Index) limit(c *cache) int {
	n := c.size
	if n == 0 {
		n = x.o.Blocks
	}
	n = min(c.limitOr(n), n)
	return max(min(n, x.o.Bytes/blockBytes/int(max(x.active.Load(), 1)), math.MaxInt32/8), 1)
}

// cache is one backend's blocks: an open-addressing table of entries that are linked by their last use.
type cache struct {
	mu      sync.RWMutex
	table   []int32 // entry numbers by hash, 0 = empty; a power of two, at most half full
	entries []entry // 0 is the list's sentinel: next is the most recently used
	used    int
	free    int32
	size    int // blocks that the engine has room for; 0 = unknown
	learned int // what answers say of it; 0 = nothing
}

type entry struct {
	hash       uint64
	prev, next int32
}

func (c *cache) limitOr(n int) int {
	if c.learned > 0 {
		return c.learned
	}
	return n
}

// held finds the longest chain: first by doubling, then by halving.
func (c *cache) held(blocks []uint64) int {
	if c.used == 0 || len(blocks) == 0 || c.find(blocks[0]) == 0 {
		return 0
	}
	lo, hi := 1, 2 // blocks[lo-1] is held
	for hi <= len(blocks) && c.find(blocks[hi-1]) != 0 {
		lo, hi = hi, hi*2
	}
	hi = min(hi, len(blocks)+1) // blocks[hi-1] is not, or is beyond the end
	for hi-lo > 1 {
		if mid := (lo + hi) / 2; c.find(blocks[mid-1]) != 0 {
			lo = mid
		} else {
			hi = mid
		}
	}
	return lo
}

func (c *cache) find(hash uint64) int32 {
	mask := uint64(len(c.table) - 1)
	for i := hash & mask; ; i = (i + 1) & mask {
		e := c.table[i]
		if e == 0 || c.entries[e].hash == hash {
			return e
		}
	}
}

// touch makes the block the most recently used.
func (c *cache) touch(hash uint64) {
	if len(c.table) == 0 {
		c.table, c.entries = make([]int32, 16), make([]entry, 1, 8)
	}
	e := c.find(hash)
	if e != 0 {
		c.unlink(e)
		c.pushFront(e)
		return
	}
	if 2*(c.used+1) > len(c.table) {
		c.grow()
	}
	if e = c.free; e != 0 {
		c.free = c.entries[e].next
		c.entries[e].hash = hash
	} else {
		c.entries = append(c.entries, entry{hash: hash})
		e = int32(len(c.entries) - 1)
	}
	c.place(e)
	c.used++
	c.pushFront(e)
}

func (c *cache) place(e int32) {
	mask := uint64(len(c.table) - 1)
	i := c.entries[e].hash & mask
	for c.table[i] != 0 {
		i = (i + 1) & mask
	}
	c.table[i] = e
}

func (c *cache) grow() {
	c.table = make([]int32, 2*len(c.table))
	for e := c.entries[0].next; e != 0; e = c.entries[e].next {
		c.place(e)
	}
}

// evict drops the least recently used block.
func (c *cache) evict() {
	e := c.entries[0].prev
	mask := uint64(len(c.table) - 1)
	i := c.entries[e].hash & mask
	for c.table[i] != e {
		i = (i + 1) & mask
	}
	// Entries behind the hole that the hole cuts off from their own place move up.
	for j := i; ; {
		j = (j + 1) & mask
		next := c.table[j]
		if next == 0 {
			break
		}
		home := c.entries[next].hash & mask
		if (j-home)&mask >= (j-i)&mask {
			c.table[i] = next
			i = j
		}
	}
	c.table[i] = 0
	c.unlink(e)
	c.entries[e].next = c.free
	c.free = e
	c.used--
}

func (c *cache) pushFront(e int32) {
	first := c.entries[0].next
	c.entries[e].prev, c.entries[e].next = 0, first
	c.entries[first].prev = e
	c.entries[0].next = e
}

func (c *cache) unlink(e int32) {
	n := &c.entries[e]
	c.entries[n.prev].next = n.next
	c.entries[n.next].prev = n.prev
}
