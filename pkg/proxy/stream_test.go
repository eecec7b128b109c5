// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

var streamRequest = post(chatPath, chat(`,"stream":true`), "Accept-Encoding: gzip, deflate")

// Each event is sent only after the client has read the one before: a proxy that holds events back never ends this.
func TestEventsAreRelayedOneByOne(t *testing.T) {
	const n = 40
	read := make(chan struct{}, n)
	e := newEngine(t, func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			_ = p.send(streamHead)
			<-read // the head is relayed before there is a body
			for i := range n {
				_ = p.send(chunk(event(fmt.Sprint(i))))
				<-read
			}
			_ = p.send("0\r\n\r\n")
		}
	})
	f := startFront(t, newFleet(t, "least_tokens", e.url()))
	c := f.dial()
	for range 2 {
		c.send(streamRequest)
		r := c.head("POST")
		if r.Header.Get("Cache-Control") != "no-cache" || r.Header.Get("X-Accel-Buffering") != "no" || r.Header.Get("Content-Encoding") != "" {
			t.Errorf("header %v", r.Header)
		}
		read <- struct{}{}
		for i := range n {
			want := event(fmt.Sprint(i))
			b := make([]byte, len(want))
			if _, err := io.ReadFull(r.Body, b); err != nil || string(b) != want {
				t.Fatalf("event %d: %q, %v", i, b, err)
			}
			read <- struct{}{}
		}
		if rest, err := io.ReadAll(r.Body); len(rest) > 0 || err != nil {
			t.Errorf("end: %q %v", rest, err)
		}
	}
	for _, r := range f.records(2) {
		if r.OutputTokens != n || !r.Stream || r.Outcome != OutcomeOK {
			t.Errorf("record %+v", r)
		}
	}
	if e.accepted.Load() != 1 {
		t.Errorf("%d backend connections", e.accepted.Load())
	}
}

// What one read brought goes on in one piece, however it was cut into chunks, and vLLM's head does not end the prefill.
func TestTicketFollowsTheStream(t *testing.T) {
	step := make(chan struct{})
	e := newEngine(t, func(p *peer) {
		p.request()
		_ = p.send(streamHead)
		<-step
		_ = p.send(chunk("data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n"))
		<-step
		_ = p.send(chunk(event("a")) + chunk(event("b")))
		<-step
		_ = p.send("0\r\n\r\n")
		p.request()
	})
	fl := newFleet(t, "least_tokens", e.url())
	f := startFront(t, fl, withCounter(t))
	b := fl.Backends()[0]
	load := func() int64 { l, _ := b.Load(); return l }
	c := f.dial()
	c.send(post(chatPath, `{"model":"m","max_tokens":10,"stream":true,"messages":[{"role":"user","content":"`+strings.Repeat("word ", 500)+`"}]}`))
	r := c.head("POST")
	if l := load(); l < 510 {
		t.Errorf("before the first byte of the body the weight is %d, want at least 510", l)
	}
	step <- struct{}{}
	eventually(t, "the prompt's part to come back", func() bool { return load() == 10 })
	step <- struct{}{}
	eventually(t, "two decoded tokens to come back", func() bool { return load() == 8 })
	step <- struct{}{}
	_, _ = io.ReadAll(r.Body)
	eventually(t, "the rest to come back", func() bool { return load() == 0 })
}

func TestLongLinesAndLargeStreams(t *testing.T) {
	line := event(strings.Repeat("x", 1<<20))
	e := newEngine(t, func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			_ = p.send(streamHead)
			for range 20 {
				_ = p.send(chunk(line))
			}
			_ = p.send(chunk("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":6}}\n\n") + "0\r\n\r\n")
		}
	})
	f := startFront(t, newFleet(t, "least_tokens", e.url()))
	c := f.dial()
	c.send(streamRequest)
	n, err := io.Copy(io.Discard, c.head("POST").Body)
	if err != nil || n < int64(20*len(line)) {
		t.Errorf("%d bytes, %v", n, err)
	}
	if r := f.records(1)[0]; r.PromptTokens != 5 || r.OutputTokens != 6 || r.BytesOut != n {
		t.Errorf("record %+v", r)
	}
}

// The loss of the backend shows: one error event, and no last chunk.
func TestUpstreamLossInMidStream(t *testing.T) {
	for _, tt := range []struct {
		name    string
		events  int
		tail    string // sent before the loss
		reset   bool
		wantGap string
	}{
		{"reset after the head", 0, "", true, ""},
		{"end after the head", 0, "", false, ""},
		{"reset after one event", 1, "", true, ""},
		{"end after three events", 3, "", false, ""},
		{"end within an event", 2, `data: {"choices":[{"del`, false, "\n\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			read := make(chan struct{})
			e := newEngine(t, func(p *peer) {
				p.request()
				_ = p.send(streamHead)
				for i := range tt.events {
					_ = p.send(chunk(event(fmt.Sprint(i))))
				}
				if tt.tail != "" {
					_ = p.send(chunk(tt.tail))
				}
				<-read // a reset throws away what was not read
				if tt.reset {
					_ = p.Conn.(*net.TCPConn).SetLinger(0)
				}
			})
			f := startFront(t, newFleet(t, "least_tokens", e.url()))
			c := f.dial()
			c.send(streamRequest)
			r := c.head("POST")
			want := ""
			for i := range tt.events {
				want += event(fmt.Sprint(i))
			}
			want += tt.tail
			b := make([]byte, len(want))
			if _, err := io.ReadFull(r.Body, b); err != nil || string(b) != want {
				t.Fatalf("%q %v", b, err)
			}
			close(read)
			rest, err := io.ReadAll(r.Body)
			if !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("the body ended with %v, want an unexpected end", err)
			}
			if !strings.HasPrefix(string(rest), tt.wantGap+"data: {\"error\":{") || !strings.HasSuffix(string(rest), "}}\n\n") || strings.Count(string(rest), "data:") != 1 {
				t.Errorf("farewell %q", rest)
			}
			if rec := f.records(1)[0]; rec.Outcome != OutcomeUpstreamError || rec.Attempts != 1 {
				t.Errorf("record %+v", rec)
			}
			f.settle()
		})
	}
}

func TestUpstreamLossInUnaryBody(t *testing.T) {
	for name, head := range map[string]string{
		"length":  "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{\"half\":",
		"chunked": "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n8\r\n{\"half\":\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			e := newEngine(t, func(p *peer) {
				p.request()
				_ = p.send(head)
			})
			f := startFront(t, newFleet(t, "least_tokens", e.url(), e.url()+"/2"))
			if body := f.broken(post(chatPath, chat(""))); strings.Contains(body, "error") {
				t.Errorf("got %q", body)
			}
			if rec := f.records(1)[0]; rec.Outcome != OutcomeUpstreamError || rec.Attempts != 1 {
				t.Errorf("record %+v", rec)
			}
			if e.requests.Load() != 1 {
				t.Error("a request was sent again after its answer had begun")
			}
		})
	}
}

func TestErrorsOfTheEngineInAStream(t *testing.T) {
	e := newEngine(t, func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			_ = p.send(streamHead + chunk("data: {\"error\":{\"message\":\"no\",\"code\":"+g.value("x-code")+"}}\n\n") + "0\r\n\r\n")
		}
	})
	var reports []Outcome
	f := startFront(t, newFleet(t, "least_tokens", e.url()), func(o *Options) {
		o.Report = func(_ *fleet.Ticket, oc Outcome) { reports = append(reports, oc) }
	})
	for _, code := range []string{"400", "500"} {
		f.do(post(chatPath, chat(`,"stream":true`), "X-Code: "+code)).want(t, 200, "")
	}
	for _, r := range f.records(2) {
		if r.Outcome != OutcomeUpstreamError {
			t.Errorf("record %+v", r)
		}
	}
	if len(reports) != 2 || reports[0] != OutcomeOK || reports[1] != OutcomeUpstreamError {
		t.Errorf("reports %v", reports)
	}
}

// Status and type are the backend's, whatever the client asked for.
func TestErrorsOfTheEnginePassUnchanged(t *testing.T) {
	e := newEngine(t, func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			if g.value("x-html") != "" {
				_ = p.send("HTTP/1.1 401 Unauthorized\r\nContent-Type: text/html\r\nWWW-Authenticate: Bearer\r\nContent-Length: 6\r\n\r\n<html>")
				continue
			}
			_ = p.send("HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nRetry-After: 7\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(`{"object":"error"}`) + "0\r\n\r\n")
		}
	})
	f := startFront(t, newFleet(t, "least_tokens", e.url()))
	a := f.do(post(chatPath, chat(`,"stream":true`), "x-html: 1"))
	if a.StatusCode != 401 || a.body != "<html>" || a.Header.Get("Content-Type") != "text/html" || a.Header.Get("Www-Authenticate") != "Bearer" {
		t.Errorf("%d %q %v", a.StatusCode, a.body, a.Header)
	}
	a = f.do(post(chatPath, chat(`,"stream":true`)))
	if a.StatusCode != 400 || a.body != `{"object":"error"}` || a.Header.Get("Retry-After") != "7" {
		t.Errorf("%d %q %v", a.StatusCode, a.body, a.Header)
	}
	for _, r := range f.records(2) {
		if r.Outcome != OutcomeOK {
			t.Errorf("a 4xx is no failure: %+v", r)
		}
	}
}

// A fault in the meter ends the metering of that stream, and nothing else.
func TestPanicInTheMeter(t *testing.T) {
	e := newEngine(t, func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			_ = p.send(streamHead)
			for _, s := range []string{"a", "b", "c"} {
				_ = p.send(chunk(event(s)))
			}
			_ = p.send("0\r\n\r\n")
		}
	})
	f := startFront(t, newFleet(t, "least_tokens", e.url()), func(*Options) {})
	f.s.fault = func(piece []byte) {
		if bytes.Contains(piece, []byte(`"b"`)) {
			panic("injected")
		}
	}
	a := f.do(streamRequest)
	if a.err != nil || a.body != event("a")+event("b")+event("c") {
		t.Errorf("%q %v", a.body, a.err)
	}
	f.settle()
	f.do(streamRequest).want(t, 200, "")
}

// The two clocks: first byte and idle. There is none for the whole.
func TestClocks(t *testing.T) {
	hold := make(chan struct{})
	e := newEngine(t, func(p *peer) {
		if g := p.request(); g != nil {
			switch g.value("x-case") {
			case "silent":
				<-hold
			case "head only":
				_ = p.send(streamHead)
				<-hold
			case "one event":
				_ = p.send(streamHead + chunk(event("a")))
				<-hold
			case "half":
				_ = p.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
				<-hold
			case "slow but steady":
				_ = p.send(streamHead)
				for range 8 {
					time.Sleep(50 * time.Millisecond)
					_ = p.send(chunk(event("a")))
				}
				_ = p.send("0\r\n\r\n")
			}
		}
	})
	t.Cleanup(func() { close(hold) })
	f := startFront(t, newFleet(t, "least_tokens", e.url()), func(o *Options) {
		o.Timeouts.FirstByte = 300 * time.Millisecond
		o.Timeouts.Idle = 200 * time.Millisecond
	})
	ask := func(name string) answer { return f.do(post(chatPath, chat(`,"stream":true`), "x-case: "+name)) }
	ask("silent").want(t, 504, "upstream_timeout")
	for _, name := range []string{"head only", "one event"} {
		a := ask(name)
		if !errors.Is(a.err, io.ErrUnexpectedEOF) || !strings.Contains(a.body, "upstream_timeout") {
			t.Errorf("%s: %q %v", name, a.body, a.err)
		}
	}
	f.broken(post(chatPath, chat(""), "x-case: half"))
	for _, r := range f.records(4) {
		if r.Outcome != OutcomeTimeout || r.Attempts != 1 {
			t.Errorf("record %+v", r)
		}
	}
	// 400 ms in all, longer than either clock.
	if a := ask("slow but steady"); a.err != nil || strings.Count(a.body, "data:") != 8 {
		t.Errorf("steady: %q %v", a.body, a.err)
	}
}

func TestStreamsWithLengthAndToTheClose(t *testing.T) {
	e := newEngine(t, func(p *peer) {
		g := p.request()
		body := event("a") + event("b")
		if strings.Contains(g.header, "x-length") {
			_ = p.send(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%s", len(body), body))
			p.request()
			return
		}
		_ = p.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + body)
	})
	f := startFront(t, newFleet(t, "least_tokens", e.url()))
	for _, h := range []string{"x-length: 1", "x-close: 1"} {
		a := f.do(post(chatPath, chat(`,"stream":true`), h))
		a.want(t, 200, "")
		if a.body != event("a")+event("b") || a.Header.Get("Content-Length") != "" {
			t.Errorf("%s: %q %v", h, a.body, a.Header)
		}
	}
}

// The big one goes to one engine; before its first byte the small ones must not queue behind it.
func TestLeastTokensAgainstRoundRobin(t *testing.T) {
	for _, tt := range []struct {
		policy   string
		min, max int // small ones beside the big one
	}{{"least_tokens", 0, 0}, {"round_robin", 8, 12}} {
		t.Run(tt.policy, func(t *testing.T) {
			release := make(chan struct{})
			serve := func(p *peer) {
				for g := p.request(); g != nil; g = p.request() {
					if len(g.body) > 10_000 {
						<-release
					}
					_ = p.json(200, `{}`)
				}
			}
			e1, e2 := newEngine(t, serve), newEngine(t, serve)
			fl := newFleet(t, tt.policy, e1.url(), e2.url())
			f := startFront(t, fl, withCounter(t))
			c := f.dial()
			c.send(post(chatPath, `{"model":"m","max_tokens":16,"messages":[{"role":"user","content":"`+strings.Repeat("word ", 4000)+`"}]}`))
			var big *fleet.Backend
			eventually(t, "the big request to be placed", func() bool {
				for _, b := range fl.Backends() {
					if l, _ := b.Load(); l > 4000 {
						big = b
					}
				}
				return big != nil
			})
			beside := 0
			for range 20 {
				a := f.do(post(chatPath, `{"model":"m","max_tokens":16,"messages":[{"role":"user","content":"one two three four five six"}]}`))
				a.want(t, 200, "")
				if a.Header.Get(headerBackend) == big.Name() {
					beside++
				}
			}
			close(release)
			if a := c.answer("POST"); a.StatusCode != http.StatusOK {
				t.Errorf("big: %d", a.StatusCode)
			}
			if beside < tt.min || beside > tt.max {
				t.Errorf("%d of 20 small requests went beside the big one, want %d to %d", beside, tt.min, tt.max)
			}
		})
	}
}

// A quiet stream is kept alive by comments, which never stand within an event, and the clocks go on.
func TestHeartbeat(t *testing.T) {
	step := make(chan struct{})
	e := newEngine(t, func(p *peer) {
		p.request()
		_ = p.send(streamHead)
		for _, piece := range []string{"id: 7\n" + event("a"), `data: {"choi`, "ces\":[]}\n\n"} {
			<-step
			_ = p.send(chunk(piece))
		}
		<-step
	})
	f := startFront(t, newFleet(t, "least_tokens", e.url()), func(o *Options) {
		o.Timeouts.Heartbeat = 20 * time.Millisecond
		o.Timeouts.Idle = 400 * time.Millisecond
	})
	c := f.dial()
	c.send(streamRequest)
	r := c.head("POST")
	read := func(want string) {
		t.Helper()
		b := make([]byte, len(want))
		if _, err := io.ReadFull(r.Body, b); err != nil || string(b) != want {
			t.Fatalf("%q %v, want %q", b, err, want)
		}
	}
	read(heartbeat + heartbeat)
	step <- struct{}{}
	var got []byte
	one := make([]byte, 1)
	until := func(end string) {
		t.Helper()
		for !bytes.HasSuffix(got, []byte(end)) {
			if _, err := io.ReadFull(r.Body, one); err != nil {
				t.Fatalf("%q: %v", got, err)
			}
			got = append(got, one...)
		}
	}
	until("id: 7\n" + event("a"))
	until("\n\n" + heartbeat)
	step <- struct{}{}
	until(`data: {"choi`)
	time.Sleep(100 * time.Millisecond) // beats would come here
	step <- struct{}{}
	read("ces\":[]}\n\n")
	rest, err := io.ReadAll(r.Body)
	if !errors.Is(err, io.ErrUnexpectedEOF) || !bytes.HasPrefix(rest, []byte(heartbeat)) || !bytes.Contains(rest, []byte("upstream_timeout")) {
		t.Errorf("%q %v", rest, err)
	}
	close(step)
}

// Nothing of ours stands between a backend and as many streams as it can bear.
func TestManyStreamsToOneBackend(t *testing.T) {
	const n = 600
	release := make(chan struct{})
	e := newEngine(t, func(p *peer) {
		p.request()
		_ = p.send(streamHead + chunk(event("a")))
		<-release
		_ = p.send("0\r\n\r\n")
	})
	f := startFront(t, newFleet(t, "least_tokens", e.url()))
	var held []*http.Response
	for range n {
		c := f.dial()
		c.send(streamRequest)
		held = append(held, c.head("POST"))
	}
	if b := f.fleet.Backends()[0]; b.Requests() != n {
		t.Errorf("%d requests in flight, want %d", b.Requests(), n)
	}
	close(release)
	for _, r := range held {
		if b, err := io.ReadAll(r.Body); err != nil || string(b) != event("a") {
			t.Fatalf("%q %v", b, err)
		}
	}
}
