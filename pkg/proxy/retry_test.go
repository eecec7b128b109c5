// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/session"
)

// deadURL is an address where nobody listens.
func deadURL(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return "http://" + ln.Addr().String()
}

// An engine that closes idle connections (uvicorn: after 5 s) is never an error, and no request runs twice.
func TestStaleKeepAlive(t *testing.T) {
	for _, tt := range []struct {
		name string
		late bool // closes after the request came, without reading it: the race that a look at the socket cannot see
	}{{"closed while idle", false}, {"closed as the request comes", true}} {
		t.Run(tt.name, func(t *testing.T) {
			closed := make(chan struct{}, 1)
			e := newEngine(t, func(p *peer) {
				g := p.request()
				if g == nil {
					return
				}
				_ = p.json(200, string(g.body))
				if tt.late {
					_, _ = p.br.Peek(1)
				}
				p.Close()
				if !tt.late {
					closed <- struct{}{}
				}
			})
			f := startFront(t, newFleet(t, "least_tokens", e.url()))
			c := f.dial()
			for i := range 100 {
				body := chat(fmt.Sprintf(`,"user":"%d"`, i))
				c.send(post(chatPath, body))
				if a := c.answer("POST"); a.StatusCode != 200 || a.body != body {
					t.Fatalf("round %d: %d %s", i, a.StatusCode, a.body)
				}
				if !tt.late {
					<-closed
				}
			}
			if n := e.requests.Load(); n != 100 {
				t.Errorf("100 requests ran %d times", n)
			}
			for _, r := range f.records(100) {
				if r.Attempts != 1 {
					t.Errorf("record %+v", r)
				}
			}
		})
	}
}

// On a fresh connection an end without an answer is no replay's business: another backend is tried, or nobody.
func TestFreshConnectionThatDies(t *testing.T) {
	dies := newEngine(t, func(p *peer) { p.request() })
	f := startFront(t, newFleet(t, "least_tokens", dies.url()))
	f.do(post(chatPath, chat(""))).want(t, 502, "upstream_error")
	if n := dies.requests.Load(); n != 1 {
		t.Errorf("sent %d times", n)
	}
	if r := f.records(1)[0]; r.Outcome != OutcomeUpstreamError || r.Attempts != 1 || r.Error == "" {
		t.Errorf("record %+v", r)
	}
}

// One of three is dead and holds the session: one further attempt, elsewhere, and the body whole.
func TestDeadBackend(t *testing.T) {
	var mu sync.Mutex
	sums := map[string]int{}
	serve := func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			mu.Lock()
			sums[fmt.Sprintf("%x", sha256.Sum256(g.body))]++
			mu.Unlock()
			_ = p.json(200, "{}")
		}
	}
	e2, e3 := newEngine(t, serve), newEngine(t, serve)
	fl := newFleet(t, "session", deadURL(t), e2.url(), e3.url())
	tracker := session.NewTracker(session.TrackerOptions{})
	id := session.NewIdentifier(nil)
	f := startFront(t, fl, func(o *Options) { o.Tracker, o.Identifier = tracker, id })
	for _, size := range []int{100, 30_000, 10 << 20} {
		body := chat(`,"pad":"` + strings.Repeat("x", size) + `"`)
		key, _ := id.Key(func(name string) []byte {
			if name == "x-session-id" {
				return []byte("s1")
			}
			return nil
		}, nil)
		tracker.Assign(key, fl.Backends()[0], false)
		a := f.do(post(chatPath, body, "x-session-id: s1"))
		a.want(t, 200, "")
		if a.Header.Get(headerBackend) == "b1" {
			t.Error("served by the dead one")
		}
		mu.Lock()
		if n := sums[fmt.Sprintf("%x", sha256.Sum256([]byte(body)))]; n != 1 {
			t.Errorf("%d bytes: the body came whole %d times", size, n)
		}
		mu.Unlock()
	}
	for _, r := range f.records(3) {
		if r.Attempts != 2 || r.Outcome != OutcomeOK || r.Session != "header" {
			t.Errorf("record %+v", r)
		}
	}
}

func TestNoBackend(t *testing.T) {
	fl := newFleet(t, "least_tokens", deadURL(t))
	f := startFront(t, fl)
	f.do(post(chatPath, chat(""))).want(t, 502, "upstream_error")
	fl.Backends()[0].SetHealth(fleet.HealthDown)
	a := f.do(post(chatPath, chat("")))
	a.want(t, 503, "no_backend")
	if a.Header.Get("Retry-After") == "" {
		t.Error("503 without Retry-After")
	}
}

// 4xx pass; 429 and 503 are tried elsewhere, and passed on with Retry-After when all are full.
func TestBusyBackends(t *testing.T) {
	var mu sync.Mutex
	status := map[string]int{}
	make := func(name string) *engine {
		return newEngine(t, func(p *peer) {
			for g := p.request(); g != nil; g = p.request() {
				mu.Lock()
				s := status[name]
				mu.Unlock()
				body := `{"from":"` + name + `"}`
				_ = p.send(fmt.Sprintf("HTTP/1.1 %d X\r\nContent-Type: application/json\r\nRetry-After: 3\r\nContent-Length: %d\r\n\r\n%s", s, len(body), body))
			}
		})
	}
	e1, e2 := make("e1"), make("e2")
	set := func(a, b int) {
		mu.Lock()
		defer mu.Unlock()
		status["e1"], status["e2"] = a, b
	}
	var reports sync.Map
	for _, tt := range []struct {
		a, b, want int
		calls      int64 // of both engines for two requests
	}{{503, 200, 200, 3}, {429, 200, 200, 3}, {503, 503, 503, 4}, {429, 429, 429, 4}, {400, 400, 400, 2}, {401, 401, 401, 2}, {500, 500, 500, 2}} {
		f := startFront(t, newFleet(t, "round_robin", e1.url(), e2.url()), func(o *Options) {
			o.Report = func(t *fleet.Ticket, oc Outcome) { reports.Store(oc, t.Backend().Name()) }
		})
		set(tt.a, tt.b)
		before := e1.requests.Load() + e2.requests.Load()
		for range 2 {
			a := f.do(post(chatPath, chat("")))
			if a.StatusCode != tt.want || !strings.HasPrefix(a.body, `{"from":"e`) || a.Header.Get("Retry-After") != "3" || a.Header.Get(headerBackend) == "" {
				t.Errorf("%d %d: %d %q %v", tt.a, tt.b, a.StatusCode, a.body, a.Header)
			}
		}
		if n := e1.requests.Load() + e2.requests.Load() - before; n != tt.calls {
			t.Errorf("%d %d: %d attempts for two requests, want %d", tt.a, tt.b, n, tt.calls)
		}
	}
	if _, ok := reports.Load(OutcomeTimeout); ok {
		t.Error("a timeout was reported")
	}
	if _, ok := reports.Load(OutcomeBusy); !ok {
		t.Error("nobody was reported as busy")
	}
}

// What an attempt tells of a backend's health: no connection is not an error of the server, and what this host lacks is
// nobody's fault.
func TestAttemptOutcome(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want Outcome
	}{
		{fmt.Errorf("%w to backend: %w", errNoConnection, syscall.ECONNREFUSED), OutcomeConnectFailed},
		{fmt.Errorf("%w to backend: %w", errNoConnection, os.ErrDeadlineExceeded), OutcomeConnectFailed},
		{fmt.Errorf("%w to backend: %w", errNoConnection, syscall.EMFILE), OutcomeLocalFault},
		{fmt.Errorf("%w to backend: %w", errNoConnection, syscall.EADDRNOTAVAIL), OutcomeLocalFault},
		{io.ErrUnexpectedEOF, OutcomeUpstreamError},
		{os.ErrDeadlineExceeded, OutcomeTimeout},
	} {
		if got := attemptOutcome(tt.err); got != tt.want {
			t.Errorf("%v: %v, want %v", tt.err, got, tt.want)
		}
	}
	var got sync.Map
	f := startFront(t, newFleet(t, "round_robin", "http://127.0.0.1:1"), func(o *Options) {
		o.Report = func(_ *fleet.Ticket, oc Outcome) { got.Store(oc, true) }
	})
	f.do(post(chatPath, chat(""))).want(t, 502, "")
	if _, ok := got.Load(OutcomeConnectFailed); !ok {
		t.Error("a refused connection was not reported as one")
	}
}

// In an outage the retries stay within a fifth of the requests.
func TestRetriesStayWithinTheBudget(t *testing.T) {
	dies := func(p *peer) { p.request() }
	e := []*engine{newEngine(t, dies), newEngine(t, dies), newEngine(t, dies)}
	f := startFront(t, newFleet(t, "round_robin", e[0].url(), e[1].url(), e[2].url()))
	const n = 200
	for range n {
		f.do(post(chatPath, chat(""))).want(t, 502, "upstream_error")
	}
	total := int64(0)
	for _, e := range e {
		total += e.requests.Load()
	}
	if total > n*12/10 || total <= n {
		t.Errorf("%d requests made %d attempts", n, total)
	}
}

// A client that says that it is trying again is retried less.
func TestClientThatRetries(t *testing.T) {
	dies := func(p *peer) { p.request() }
	e := []*engine{newEngine(t, dies), newEngine(t, dies), newEngine(t, dies)}
	f := startFront(t, newFleet(t, "round_robin", e[0].url(), e[1].url(), e[2].url()))
	f.do(post(chatPath, chat(""), "x-stainless-retry-count: 0"))
	f.do(post(chatPath, chat(""), "x-stainless-retry-count: 1"))
	r := f.records(2)
	if r[0].Attempts != 3 || r[1].Attempts != 2 {
		t.Errorf("%d and %d attempts, want 3 and 2", r[0].Attempts, r[1].Attempts)
	}
}

// An engine may answer before it has read the request, and close.
func TestEarlyAnswerOfTheEngine(t *testing.T) {
	for _, closes := range []bool{true, false} {
		t.Run(fmt.Sprint(closes), func(t *testing.T) {
			hold := make(chan struct{})
			e := newEngine(t, func(p *peer) {
				for {
					line, err := p.br.ReadString('\n')
					if err != nil {
						return
					}
					if line == "\r\n" {
						break
					}
				}
				_ = p.json(413, `{"early":1}`)
				if closes {
					_ = p.Conn.(*net.TCPConn).CloseWrite()
				}
				<-hold // never reads the body
			})
			f := startFront(t, newFleet(t, "least_tokens", e.url()))
			t.Cleanup(func() { close(hold) })
			a := f.do(post(chatPath, chat(`,"pad":"`+strings.Repeat("x", 8<<20)+`"`)))
			if a.StatusCode != 413 || a.body != `{"early":1}` {
				t.Errorf("%d %s %v", a.StatusCode, a.body, a.err)
			}
			f.settle()
		})
	}
}

func TestInvalidAnswers(t *testing.T) {
	for name, raw := range map[string]string{
		"two framings": "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
		"two lengths":  "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
		"no http":      "hello\r\n\r\n",
		"upgrade":      "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
		"injected":     "HTTP/1.1 200 OK\r\nA: b\rSet-Cookie: x\r\nContent-Length: 3\r\n\r\nabc",
	} {
		t.Run(name, func(t *testing.T) {
			e := newEngine(t, func(p *peer) {
				p.request()
				_ = p.send(raw)
			})
			f := startFront(t, newFleet(t, "round_robin", e.url(), e.url()+"/2"))
			f.do(post(chatPath, chat(""))).want(t, 502, "upstream_invalid_response")
			if e.requests.Load() != 1 {
				t.Error("sent again after an answer had begun")
			}
		})
	}
}

// Bytes after the end of an answer are not the next answer.
func TestSurplusBytesOfTheEngine(t *testing.T) {
	e := newEngine(t, func(p *peer) {
		g := p.request()
		for g != nil {
			_ = p.send(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%sHTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison", len(g.body), g.body))
			g = p.request()
		}
	})
	f := startFront(t, newFleet(t, "least_tokens", e.url()))
	c := f.dial()
	for i := range 20 {
		body := chat(fmt.Sprintf(`,"user":"%d"`, i))
		c.send(post(chatPath, body))
		if a := c.answer("POST"); a.body != body {
			t.Fatalf("round %d: %q", i, a.body)
		}
	}
}

func TestIPv6AndNames(t *testing.T) {
	ln, err := net.Listen("tcp6", "[::1]:0")
	if err != nil {
		t.Skipf("no IPv6 here: %v", err)
	}
	port := ln.Addr().(*net.TCPAddr).Port
	ln.Close()
	newEngineOn(t, fmt.Sprintf("[::1]:%d", port), echo)
	hosts := []string{"[::1]"}
	if a, err := net.LookupHost("localhost"); err == nil && slices.Contains(a, "::1") {
		hosts = append(hosts, "localhost") // its IPv4 address refuses, so both families must be tried
	}
	for _, host := range hosts {
		f := startFront(t, newFleet(t, "least_tokens", fmt.Sprintf("http://%s:%d", host, port)), func(o *Options) { o.Timeouts.Connect = 2 * time.Second })
		f.do(post(chatPath, chat(""))).want(t, 200, "")
	}
}

// An ejected backend is probed by one request at a time. Its client does not pay for what it finds out, and however the
// probe ends the next one tries.
func TestProbeOfAnEjectedBackend(t *testing.T) {
	var mode atomic.Int64 // status of the sick one's answers; 0 = none comes
	mode.Store(500)
	hold := make(chan struct{})
	sick := newEngine(t, func(p *peer) {
		for p.request() != nil {
			m := int(mode.Load())
			if m == 0 {
				<-hold
				return
			}
			if p.json(m, `{"sick":true}`) != nil {
				return
			}
		}
	})
	well := newEngine(t, echo)
	f := newFleet(t, "least_tokens", sick.url(), well.url())
	b := f.Backend("b1")
	type verdict struct {
		probe bool
		o     Outcome
	}
	var mu sync.Mutex
	var seen []verdict
	fr := startFront(t, f, func(o *Options) {
		o.Report = func(t *fleet.Ticket, oc Outcome) {
			if t.Backend() != b {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			seen = append(seen, verdict{t.Probe(), oc})
		}
	})
	check := func(what string, want ...verdict) {
		t.Helper()
		mu.Lock()
		defer mu.Unlock()
		if !slices.Equal(seen, want) {
			t.Errorf("%s: reports of the sick backend: %v, want %v", what, seen, want)
		}
		seen = nil
	}
	b.Eject(0)
	fr.do("GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
	check("a list of models is no probe")
	a := fr.do(post(chatPath, chat("")))
	a.want(t, 200, "")
	check("a probe that fails", verdict{true, OutcomeUpstreamError})

	mode.Store(0)
	c := fr.dial()
	before := sick.requests.Load()
	c.send(post(chatPath, chat("")))
	eventually(t, "the probe to arrive", func() bool { return sick.requests.Load() > before })
	fr.do(post(chatPath, chat(""))).want(t, 200, "") // elsewhere, while the probe is out
	c.Close()
	fr.settle()
	check("a client that leaves", verdict{true, OutcomeClientGone})
	close(hold)

	mode.Store(200)
	if a := fr.do(post(chatPath, chat(""))); !strings.Contains(a.body, "sick") || a.StatusCode != 200 {
		t.Errorf("the next one is no probe: %d %s", a.StatusCode, a.body)
	}
	check("a probe that is served", verdict{true, OutcomeOK})
}
