// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

// Whoever is told of a request may panic: the answers are as they should be, nothing leaks, and the process lives.
func TestListenersThatPanic(t *testing.T) {
	stall := make(chan struct{})
	e := newEngine(t, func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			switch {
			case strings.Contains(string(g.body), "leaves"):
				_ = p.send(streamHead + chunk(event("a")))
				<-stall
				return
			case strings.Contains(string(g.body), "breaks"):
				_ = p.send(streamHead + chunk(event("a")))
				return
			case strings.Contains(string(g.body), "stream"):
				_ = p.send(streamHead + chunk(event("a")) + "0\r\n\r\n")
			default:
				_ = p.json(200, string(g.body))
			}
		}
	})
	var told atomic.Int64
	f := startFront(t, newFleet(t, "round_robin", e.url()), func(o *Options) {
		o.AccessLog = func(*Record) { told.Add(1); panic("injected into the log") }
		o.Report = func(*fleet.Ticket, Outcome) { panic("injected into the report") }
	})
	for _, tt := range []struct {
		name, request string
		status        int
	}{
		{"unary", post(chatPath, chat("")), 200},
		{"stream", streamRequest, 200},
		{"of HTTP/1.0", fmt.Sprintf("POST %s HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s", chatPath, len(chat("")), chat("")), 200},
		{"unframed", strings.Replace(streamRequest, "HTTP/1.1", "HTTP/1.0", 1), 200},
		{"rejected", post("/flush_cache", ""), 404},
		{"no HTTP", "POST " + chatPath + " HTTP/1.1\r\nHost: h\r\nContent-Length: x\r\n\r\n", 400},
		{"asks first", "POST /flush_cache HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n", 404},
	} {
		before := told.Load()
		if a := f.do(tt.request); a.StatusCode != tt.status || a.err != nil || a.body == "" {
			t.Errorf("%s: %d %q %v", tt.name, a.StatusCode, a.body, a.err)
		}
		eventually(t, "the log to be told of "+tt.name, func() bool { return told.Load() == before+1 })
	}
	f.broken(post(chatPath, chat(`,"stream":true,"user":"breaks"`)))
	c := f.dial()
	c.send(post(chatPath, chat(`,"stream":true,"user":"leaves"`)))
	c.head("POST")
	c.Close()
	eventually(t, "the log to be told of those that did not end well", func() bool { return told.Load() == 9 })
	close(stall)
	f.settle()
	f.do(post(chatPath, chat(""))).want(t, 200, "")
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, want := range []string{"panic while ending a request", "panic while reporting an attempt", "injected into the log", "injected into the report"} {
		if !strings.Contains(f.log.String(), want) {
			t.Errorf("the log does not say %q", want)
		}
	}
}
