// SPDX-License-Identifier: Apache-2.0

package session

import (
	"sync"
	"time"
)

// HeapPins is a PinTable of ordinary memory, for running without BPF and for tests. It obeys pins as the kernel does,
// through Use. Set its fields before the first call.
type HeapPins struct {
	Max  int           // pins; 0 = no bound
	Idle time.Duration // a pin unused for so long is void, as lease.idle; 0 = never
	Now  func() time.Time

	mu   sync.Mutex
	pins map[PinKey]*heapPin
}

type heapPin struct {
	Pin
	expires time.Time // zero = never
	last    time.Time // written or used
	used    uint32
}

// NewHeapPins returns an empty table.
func NewHeapPins() *HeapPins {
	return &HeapPins{Now: time.Now, pins: map[PinKey]*heapPin{}}
}

// Put implements PinTable.
func (h *HeapPins) Put(k PinKey, p Pin) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	k = k.Normal()
	if h.pins[k] == nil && h.Max > 0 && len(h.pins) >= h.Max {
		return ErrPinTableFull
	}
	e := &heapPin{Pin: p, last: h.Now()}
	if p.Expires > 0 {
		e.expires = e.last.Add(p.Expires)
	}
	h.pins[k] = e
	return nil
}

// Touch implements PinTable.
func (h *HeapPins) Touch(k PinKey, p Pin) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	e := h.pins[k.Normal()]
	if e == nil || !h.live(e) || e.Backend != p.Backend || e.Generation != p.Generation {
		return ErrNoPin
	}
	e.Sessions, e.Tokens = p.Sessions, p.Tokens
	return nil
}

// Delete implements PinTable.
func (h *HeapPins) Delete(k PinKey) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.pins, k.Normal())
	return nil
}

// Get implements PinTable.
func (h *HeapPins) Get(k PinKey) (Pin, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	e := h.pins[k.Normal()]
	if e == nil {
		return Pin{}, false
	}
	p := e.Pin
	p.Used = e.used
	if !e.expires.IsZero() {
		p.Expires = e.expires.Sub(h.Now())
	}
	return p, h.live(e)
}

// Use is a new connection that meets the table: it returns the pin if its lease holds, and counts as a use of it.
func (h *HeapPins) Use(k PinKey) (Pin, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	e := h.pins[k.Normal()]
	if e == nil || !h.live(e) {
		return Pin{}, false
	}
	e.used++
	e.last = h.Now()
	return e.Pin, true
}

// Len returns how many pins the table holds, void ones included.
func (h *HeapPins) Len() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.pins)
}

func (h *HeapPins) live(e *heapPin) bool {
	now := h.Now()
	return (e.expires.IsZero() || now.Before(e.expires)) &&
		(h.Idle <= 0 || now.Sub(e.last) < h.Idle) &&
		(e.Connections == 0 || e.used < e.Connections)
}
