// SPDX-License-Identifier: Apache-2.0

package bpe

import (
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"
)

// statePool keeps work space between calls. Its slots, unlike a sync.Pool, outlive collections of garbage, since what the
// caches of pieces have learned is worth more than their memory; there is one for each core, and a sync.Pool for more calls
// at a time.
type statePool struct {
	slots []stateSlot // a power of two
	more  sync.Pool
}

// stateSlot has a line of the processor's cache for itself.
type stateSlot struct {
	st atomic.Pointer[state]
	_  [56]byte
}

// maxSlots bounds what an encoding keeps on large machines.
const maxSlots = 64

func newStatePool() *statePool {
	n := 1
	for n < runtime.GOMAXPROCS(0) && n < maxSlots {
		n *= 2
	}
	return &statePool{slots: make([]stateSlot, n)}
}

// first is the slot where the calling goroutine looks first: by its stack, so that goroutines keep out of each other's way
// and mostly find the work space that they had before.
func (p *statePool) first() int {
	var here byte
	return int(uint64(uintptr(unsafe.Pointer(&here))) >> 11 * pairFactor >> 32 & uint64(len(p.slots)-1))
}

func (p *statePool) get() *state {
	i := p.first()
	for range p.slots {
		s := &p.slots[i]
		if st := s.st.Load(); st != nil && s.st.CompareAndSwap(st, nil) {
			return st
		}
		i = (i + 1) & (len(p.slots) - 1)
	}
	if st, ok := p.more.Get().(*state); ok {
		return st
	}
	return newState()
}

func (p *statePool) put(st *state) {
	i := p.first()
	for range p.slots {
		if s := &p.slots[i]; s.st.Load() == nil && s.st.CompareAndSwap(nil, st) {
			return
		}
		i = (i + 1) & (len(p.slots) - 1)
	}
	p.more.Put(st)
}
