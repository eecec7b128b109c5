// SPDX-License-Identifier: Apache-2.0

package tokens

import (
	"hash/maphash"
	"math/bits"
	"sync/atomic"
)

// minCached is the length from which a text is worth a place in the cache.
const minCached = 8

// cache remembers the counts of texts in a table of fixed size, without locks: an entry's first word is the text's hash
// XOR the second word, so that words from two writers never match a hash. With a random seed of 64 bits nobody outside can
// choose texts that collide, and by chance one look-up in 2^64 does.
type cache struct {
	seed    maphash.Seed
	entries []cacheEntry
}

type cacheEntry struct{ check, value atomic.Uint64 }

func newCache(n int) *cache {
	if n < 0 {
		return nil
	}
	return &cache{seed: maphash.MakeSeed(), entries: make([]cacheEntry, 1<<bits.Len(uint(max(n, 1)-1)))}
}

func (c *cache) get(text string) (Count, bool) {
	if c == nil || len(text) < minCached {
		return Count{}, false
	}
	key := maphash.String(c.seed, text)
	e := &c.entries[key&uint64(len(c.entries)-1)]
	v := e.value.Load()
	if v == 0 || e.check.Load()^v != key {
		return Count{}, false
	}
	return Count{Tokens: int(v >> 2), Estimated: v&2 != 0}, true
}

func (c *cache) put(text string, n Count) {
	if c == nil || len(text) < minCached {
		return
	}
	key := maphash.String(c.seed, text)
	v := uint64(n.Tokens)<<2 | 1
	if n.Estimated {
		v |= 2
	}
	e := &c.entries[key&uint64(len(c.entries)-1)]
	e.check.Store(key ^ v)
	e.value.Store(v)
}
