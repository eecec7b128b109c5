// SPDX-License-Identifier: Apache-2.0

package tokens

import (
	"hash/maphash"
	"math/bits"
	"sync/atomic"
)

// minCached is the length from which a text is worth a place in the cache.
const minCached = 8

// cacheWays is the number of places where a text may stand: the entries of one cache line.
const cacheWays = 4

// cache remembers the counts of texts in a table of fixed size, without locks: an entry's first word is the text's hash
// XOR the second word, so that words from two writers never match a hash. With a random seed of 64 bits nobody outside can
// choose texts that collide, and by chance one look-up in 2^62 does. Each encoder has a cache, and thus a seed, of its own.
type cache struct {
	seed maphash.Seed
	sets [][cacheWays]cacheEntry
}

type cacheEntry struct{ check, value atomic.Uint64 }

func newCache(entries int) *cache {
	if entries < 0 {
		return nil
	}
	sets := 1 << bits.Len(uint(max(1, ceilDiv(entries, cacheWays))-1))
	return &cache{seed: maphash.MakeSeed(), sets: make([][cacheWays]cacheEntry, sets)}
}

// key returns the key of a text in one of its forms, never 0. What one form's key tells of another's is no help in finding
// a collision: the hashes themselves are secret.
func (c *cache) key(text string, form Form) uint64 {
	k := maphash.String(c.seed, text) + uint64(form)*0x9e3779b97f4a7c15
	if k == 0 {
		return 1
	}
	return k
}

func (c *cache) find(key uint64) (Count, bool) {
	set := &c.sets[key&uint64(len(c.sets)-1)]
	for i := range set {
		v := set[i].value.Load()
		if v != 0 && set[i].check.Load()^v == key {
			return Count{Tokens: int(v >> 2), Estimated: v&2 != 0}, true
		}
	}
	return Count{}, false
}

// store puts a count in a free place, or instead of one that the hash chooses.
func (c *cache) store(key uint64, n Count) {
	v := uint64(n.Tokens)<<2 | 1
	if n.Estimated {
		v |= 2
	}
	set := &c.sets[key&uint64(len(c.sets)-1)]
	e := &set[key>>62]
	for i := range set {
		if set[i].value.Load() == 0 {
			e = &set[i]
			break
		}
	}
	e.check.Store(key ^ v)
	e.value.Store(v)
}
