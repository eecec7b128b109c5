// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"slices"
	"time"
)

// Busy keeps new requests from the backend for so long, as far as its pool has others that may take them: it said that it
// has no room. A longer time that was set before stays.
func (b *Backend) Busy(d time.Duration) {
	until := int64(b.now() + d)
	for {
		old := b.busyUntil.Load()
		if until <= old || b.busyUntil.CompareAndSwap(old, until) {
			return
		}
	}
}

func (b *Backend) busy(now time.Duration) bool { return b.busyUntil.Load() > int64(now) }

// leaveBusy takes the busy backends out of the candidates, unless all are busy: one of them says then what to tell the client.
func leaveBusy(q *Query, c []Candidate, now time.Duration) []Candidate {
	busy := 0
	for i := range c {
		if c[i].Backend.busy(now) {
			busy++
		}
	}
	left := len(c)
	if busy == 0 || busy == left {
		return c
	}
	return slices.DeleteFunc(c, func(c Candidate) bool {
		if left == 1 || !c.Backend.busy(now) { // they may have become busy meanwhile
			return false
		}
		left--
		q.HomeFull = q.HomeFull || c.ID == q.Home
		return true
	})
}
