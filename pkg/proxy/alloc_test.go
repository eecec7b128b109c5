// SPDX-License-Identifier: Apache-2.0

//go:build !race

// Under the race detector a sync.Pool throws some of what it gets away, so that counts mean nothing.

package proxy

import (
	"testing"

	"github.com/shunt-lb/shunt/pkg/session"
)

// A request costs a handful of allocations: the ticket, and what fasthttp makes. (Counting is pkg/tokens' matter.)
func TestAllocationsPerRequest(t *testing.T) {
	body := chat("")
	answer := "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 3\r\n\r\n{}\n"
	f := startFront(t, newFleet(t, "session", quiet(t, body, answer)), func(o *Options) {
		o.AccessLog = nil
		o.Tracker, o.Identifier = session.NewTracker(session.TrackerOptions{}), session.NewIdentifier(nil)
	})
	c := f.dial()
	request := []byte(post(chatPath, body, "X-Session-Id: s"))
	buf := make([]byte, 4<<10)
	round := func() {
		if _, err := c.Write(request); err != nil {
			t.Fatal(err)
		}
		for n := 0; n == 0 || buf[n-1] != '\n' || buf[n-2] != '}'; {
			k, err := c.Read(buf[n:])
			if err != nil {
				t.Fatal(err)
			}
			n += k
		}
	}
	for range 100 {
		round()
	}
	// Two are the engine's: it makes strings of what it reads.
	if n := testing.AllocsPerRun(500, round); n > 5 {
		t.Errorf("%v allocations a request", n)
	}
}
