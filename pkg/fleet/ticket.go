// SPDX-License-Identifier: Apache-2.0

package fleet

import "sync"

// Ticket is one request's share of a backend's weight: its prompt's tokens and the output expected of it. It belongs
// to a backend instance, not to a name, so a late release never touches a successor. All methods may be called late,
// twice and from several goroutines: what was taken is given back exactly once.
type Ticket struct {
	backend *Backend
	reason  Reason
	prompt  int64
	output  int64

	mu       sync.Mutex
	left     int64 // still charged
	decoding bool  // the prompt's part is given back
	released bool
}

// Backend returns the backend that the ticket charges.
func (t *Ticket) Backend() *Backend { return t.backend }

// Reason returns why the policy chose the backend.
func (t *Ticket) Reason() Reason { return t.reason }

// Tokens returns what the ticket took: the prompt's tokens and the expected output's.
func (t *Ticket) Tokens() (prompt, output int64) { return t.prompt, t.output }

// FirstByte gives back the prompt's part: the backend has done its prefill.
func (t *Ticket) FirstByte() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.released || t.decoding {
		return
	}
	t.decoding = true
	t.giveBack(t.prompt)
}

// Decoded gives back n tokens of the expected output, until none is left. It implies FirstByte.
func (t *Ticket) Decoded(n int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.released || n <= 0 {
		return
	}
	if !t.decoding {
		t.decoding = true
		t.giveBack(t.prompt)
	}
	t.giveBack(min(n, t.left))
}

// Release gives back what is left. Only the first call has an effect.
func (t *Ticket) Release() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.released {
		return
	}
	t.released = true
	t.giveBack(t.left)
	t.backend.requests.Add(-1)
}

func (t *Ticket) giveBack(n int64) {
	t.left -= n
	t.backend.slot.L7Tokens.Add(-n)
}
