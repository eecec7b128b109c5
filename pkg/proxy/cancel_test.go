// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

// The engine sees its connection end when the client leaves, wherever the request is.
func TestClientLeaves(t *testing.T) {
	for _, tt := range []struct {
		name  string
		reply string // sent before the client leaves
	}{
		{"before the head", ""},
		{"after the head", streamHead},
		{"between tokens", streamHead + chunk(event("a"))},
		{"within a plain body", "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc"},
	} {
		for _, how := range []string{"close", "reset"} {
			t.Run(tt.name+" by "+how, func(t *testing.T) {
				ready, ended := make(chan struct{}), make(chan struct{})
				e := newEngine(t, func(p *peer) {
					p.request()
					_ = p.send(tt.reply)
					close(ready)
					_ = p.SetReadDeadline(time.Now().Add(wait))
					if _, err := p.br.ReadByte(); err == io.EOF || err != nil && strings.Contains(err.Error(), "reset") {
						close(ended)
					}
				})
				fl := newFleet(t, "least_tokens", e.url())
				var reports atomic.Int64
				f := startFront(t, fl, func(o *Options) {
					o.Report = func(_ *fleet.Ticket, oc Outcome) {
						if oc != OutcomeClientGone {
							reports.Add(1)
						}
					}
				})
				c := f.dial()
				c.send(streamRequest)
				<-ready
				if how == "reset" {
					_ = c.Conn.(*net.TCPConn).SetLinger(0)
				}
				c.Close()
				select {
				case <-ended:
				case <-time.After(wait):
					t.Fatal("the engine's connection is still open")
				}
				f.settle()
				if r := f.records(1)[0]; r.Outcome != OutcomeClientGone || r.Attempts != 1 {
					t.Errorf("record %+v", r)
				}
				if reports.Load() != 0 {
					t.Error("the client's leaving was held against the backend")
				}
			})
		}
	}
}

// A client that leaves while a backend cannot be reached is not served by the next one.
func TestClientLeavesDuringARetry(t *testing.T) {
	ready, leave := make(chan struct{}), make(chan struct{})
	first := newEngine(t, func(p *peer) {
		p.request()
		close(ready)
		<-leave // then it breaks off without an answer, which would be tried elsewhere
	})
	second := newEngine(t, echo)
	f := startFront(t, newFleet(t, "round_robin", first.url(), second.url()))
	c := f.dial()
	c.send(post(chatPath, chat("")))
	select {
	case <-ready:
	case <-time.After(wait):
		t.Fatal("not asked")
	}
	c.Close()
	f.settle()
	close(leave)
	if r := f.records(1)[0]; r.Outcome != OutcomeClientGone {
		t.Errorf("record %+v", r)
	}
	if second.requests.Load() != 0 {
		t.Error("the request of a client that left was sent on")
	}
}

// Pipelined bytes are not eaten, and do not hide that the client has left.
func TestWatcherAndPipelinedBytes(t *testing.T) {
	var ended atomic.Int64
	release := make(chan struct{}, 10)
	e := newEngine(t, func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			<-release
			_ = p.json(200, string(g.body))
		}
		ended.Add(1)
	})
	f := startFront(t, newFleet(t, "least_tokens", e.url()))
	c := f.dial()
	for i := range 3 {
		c.send(post(chatPath, chat(fmt.Sprintf(`,"user":"u%d"`, i))))
	}
	for i := range 3 {
		release <- struct{}{}
		if a := c.answer("POST"); !strings.Contains(a.body, fmt.Sprintf(`"u%d"`, i)) {
			t.Errorf("answer %d: %q", i, a.body)
		}
	}
	c.send(post(chatPath, chat("")) + post(chatPath, chat("")) + "GET ")
	eventually(t, "the fourth request", func() bool { return e.requests.Load() == 4 })
	c.Close()
	f.settle()
	release <- struct{}{}
	eventually(t, "the engine's connection to end", func() bool { return ended.Load() == 1 })
}

// Streams that are left half-way never lend their connection to the next request.
func TestAbandonedConnectionsAreNotReused(t *testing.T) {
	e := newEngine(t, func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			if strings.Contains(string(g.body), `"stream":true`) {
				_ = p.send(streamHead + chunk(event("first")))
				for p.send(chunk(event("more"))) == nil {
					time.Sleep(time.Millisecond)
				}
				return
			}
			_ = p.json(200, string(g.body))
		}
	})
	f := startFront(t, newFleet(t, "least_tokens", e.url()))
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 12 {
				c := f.dial()
				c.send(streamRequest)
				_, _ = c.br.ReadByte()
				c.Close()
			}
		})
	}
	c := f.dial()
	for i := range 500 {
		body := chat(fmt.Sprintf(`,"user":"%d"`, i))
		c.send(post(chatPath, body))
		if a := c.answer("POST"); a.body != body {
			t.Fatalf("round %d: %q, want %q", i, a.body, body)
		}
	}
	wg.Wait()
	f.settle()
}

// The storm: clients leave at random points of uploads, waits, streams and bodies, while backends break off at random
// and good requests go on. Every ticket comes back, no answer carries another's bytes.
func TestAbortStorm(t *testing.T) {
	var mode atomic.Int64
	serve := func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			marker, _, _ := strings.Cut(string(g.body), "|")
			marker = marker[strings.LastIndex(marker, `"`)+1:]
			switch mode.Add(1) % 7 {
			case 0:
				time.Sleep(time.Millisecond)
				return // breaks off before the answer
			case 1:
				_ = p.send(streamHead + chunk(event(marker)))
				return // breaks off within
			case 2, 3:
				if p.json(200, `{"m":"`+marker+`"}`) != nil {
					return
				}
			default:
				if p.send(streamHead) != nil {
					return
				}
				for range 4 {
					if p.send(chunk(event(marker))) != nil {
						return
					}
					time.Sleep(200 * time.Microsecond)
				}
				if p.send("0\r\n\r\n") != nil {
					return
				}
			}
		}
	}
	e1, e2, e3 := newEngine(t, serve), newEngine(t, serve), newEngine(t, serve)
	f := startFront(t, newFleet(t, "least_tokens", e1.url(), e2.url(), e3.url()), withCounter(t), func(o *Options) { o.AccessLog = nil })
	f.s.fault = func(piece []byte) {
		if rand.IntN(50) == 0 {
			panic("injected")
		}
	}
	const workers, rounds = 8, 150
	var wg sync.WaitGroup
	var crossed, whole atomic.Int64
	for w := range workers {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), 7))
			for i := range rounds {
				marker := fmt.Sprintf("w%dr%dx", w, i)
				body := `{"model":"m","stream":true,"messages":[{"role":"user","content":"` + marker + `|"}],"pad":"` + strings.Repeat("x", rng.IntN(100_000)) + `"}`
				request := post(chatPath, body)
				c, err := net.Dial("tcp", f.addr)
				if err != nil {
					t.Errorf("dial: %v", err)
					return
				}
				_ = c.SetDeadline(time.Now().Add(2 * wait))
				leaves := rng.IntN(10) > 1
				n := len(request)
				if leaves && rng.IntN(4) == 0 {
					n = rng.IntN(n)
				}
				_, _ = io.WriteString(c, request[:n])
				var got []byte
				buf := make([]byte, 1+rng.IntN(400))
				for reads := rng.IntN(8); n == len(request) && (!leaves || reads > 0); reads-- {
					k, err := c.Read(buf)
					got = append(got, buf[:k]...)
					if err != nil || strings.HasSuffix(string(got), "0\r\n\r\n") || strings.HasSuffix(string(got), "\"}") || strings.HasSuffix(string(got), "}}") {
						break
					}
				}
				for part := range strings.SplitSeq(string(got), `"content":"`) {
					if m, _, ok := strings.Cut(part, `"}`); ok && strings.HasPrefix(m, "w") && m != marker {
						crossed.Add(1)
					}
				}
				if strings.HasSuffix(string(got), "0\r\n\r\n") {
					whole.Add(1)
				}
				if rng.IntN(2) == 0 {
					_ = c.(*net.TCPConn).SetLinger(0)
				}
				c.Close()
			}
		})
	}
	wg.Wait()
	f.settle()
	if crossed.Load() > 0 {
		t.Errorf("%d answers carried another request's text", crossed.Load())
	}
	if whole.Load() == 0 {
		t.Error("no stream came whole: the storm tested nothing")
	}
}

// Shutdown lets requests end, and cuts them off when its time is over.
func TestShutdownCutsOff(t *testing.T) {
	ready := make(chan struct{})
	e := newEngine(t, func(p *peer) {
		p.request()
		_ = p.send(streamHead + chunk(event("a")))
		close(ready)
		_, _ = p.br.ReadByte()
	})
	fl := newFleet(t, "least_tokens", e.url())
	s, err := New(Options{Fleet: fl})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(ln) }()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, _ = io.WriteString(c, streamRequest)
	<-ready
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if err := s.Shutdown(ctx); err == nil {
		t.Error("no error, though a request was cut off")
	}
	if err := <-served; err != nil {
		t.Errorf("serve: %v", err)
	}
	if l, _ := fl.Backends()[0].Load(); l != 0 || fl.Backends()[0].Requests() != 0 {
		t.Errorf("%d tokens left", l)
	}
	if err := s.Serve(ln); err == nil {
		t.Error("a server that was shut down serves again")
	}
}
