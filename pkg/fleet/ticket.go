// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"sync"
	"time"
)

// Ticket is one request's share of a backend's weight: its prompt's tokens and the output expected of it. It belongs
// to a backend instance, not to a name, so a late release never touches a successor. All methods may be called late,
// twice and from several goroutines: what was taken is given back exactly once.
type Ticket struct {
	backend *Backend
	reason  Reason
	prompt  int64
	output  int64
	cached  int64 // of prompt, as believed when it was taken
	streams bool
	probe   bool
	now     func() time.Duration
	taken   time.Duration
	expects float64 // predicted time to the first byte, in seconds
	queued  int64   // prompt tokens to compute

	before, after *Ticket // see learned

	mu       sync.Mutex
	left     int64 // still charged
	dequeued bool
	decoding bool // the prompt's part is given back
	released bool
	first    time.Duration // when the answer began
	last     time.Duration // its last token
	tokens   int64         // of the answer so far
	context  int64         // at the backend when the answer began
}

// Backend returns the backend that the ticket charges.
func (t *Ticket) Backend() *Backend { return t.backend }

// Reason returns why the policy chose the backend.
func (t *Ticket) Reason() Reason { return t.reason }

// Tokens returns what the ticket took: the prompt's tokens and the expected output's.
func (t *Ticket) Tokens() (prompt, output int64) { return t.prompt, t.output }

// Probe reports whether the request finds out for everybody if an ejected backend serves again. Its end, whatever it is,
// lets the next one try.
func (t *Ticket) Probe() bool { return t.probe }

// Cached returns how many of the prompt's tokens the backend was believed to hold.
func (t *Ticket) Cached() int64 { return t.cached }

// FirstByte gives back the prompt's part: the backend has done its prefill.
func (t *Ticket) FirstByte() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.released {
		t.begin()
	}
}

// begin notes that the answer begins.
func (t *Ticket) begin() {
	if t.decoding {
		return
	}
	t.decoding = true
	t.giveBack(t.prompt)
	t.dequeue()
	b := t.backend
	t.first = t.now()
	t.last = t.first
	t.context = b.context.Load()
	if t.streams && t.prompt > 0 {
		b.learned.firstByte(float64(t.prompt-t.cached), t.taken, t.first)
		if t.expects > 0 {
			b.learned.predict(t.expects, (t.first - t.taken).Seconds())
		}
	}
}

// dequeue takes the prompt out of the backend's queue.
func (t *Ticket) dequeue() {
	if t.dequeued {
		return
	}
	t.dequeued = true
	t.backend.queued.Add(-t.queued)
	t.backend.waiting.Add(-1)
	t.backend.learned.dequeue(t)
}

// Decoded gives back n tokens of the expected output, until none is left. It implies FirstByte.
func (t *Ticket) Decoded(n int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.released || n <= 0 {
		return
	}
	t.begin()
	t.tokens += n
	t.last = t.now()
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
	t.dequeue()
	b := t.backend
	if t.probe {
		b.probing.Store(false)
	}
	b.requests.Add(-1)
	b.context.Add(-t.prompt - t.output)
	if t.streams && t.tokens >= minAnswer {
		b.learned.answered((t.last-t.first).Seconds()/float64(t.tokens-1), float64(t.context+b.context.Load()+t.prompt+t.output)/2)
	}
}

// minAnswer is the shortest answer that says something of the time per token.
const minAnswer = 8

func (t *Ticket) giveBack(n int64) {
	t.left -= n
	t.backend.slot.L7Tokens.Add(-n)
}
