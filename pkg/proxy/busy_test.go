// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/session"
)

// full answers that it has no room and asks to be left alone for a minute.
func full(p *peer) {
	for p.request() != nil {
		_ = p.send("HTTP/1.1 503 Service Unavailable\r\nRetry-After: 60\r\nContent-Length: 2\r\n\r\n{}")
	}
}

// One of two backends is full, the other free: nobody is turned away, whatever the policy, and the full one is left alone.
func TestFullBackendIsLeftAlone(t *testing.T) {
	for _, policy := range []string{"least_tokens", "least_requests", "session", "round_robin"} {
		t.Run(policy, func(t *testing.T) {
			busy, free := newEngine(t, full), newEngine(t, echo)
			f := startFront(t, newFleet(t, policy, busy.url(), free.url()))
			for i := range 60 {
				f.do(post(chatPath, chat(fmt.Sprintf(`,"user":"u%d"`, i)))).want(t, 200, "")
			}
			if n := busy.requests.Load(); n == 0 || n > 5 {
				t.Errorf("the full one was asked %d times by 60 requests", n)
			}
		})
	}
}

// A busy home keeps its session, which is served elsewhere meanwhile; a home that is gone loses it.
func TestBusyHomeKeepsItsSession(t *testing.T) {
	busy, free := newEngine(t, full), newEngine(t, echo)
	fl := newFleet(t, "session", busy.url(), free.url())
	tracker, id := session.NewTracker(session.TrackerOptions{}), session.NewIdentifier(nil)
	f := startFront(t, fl, func(o *Options) { o.Tracker, o.Identifier = tracker, id })
	key, _ := id.Key(func(string) []byte { return []byte("s1") }, nil)
	home := fl.Backends()[0]
	tracker.Assign(key, home, false)
	for range 3 {
		f.do(post(chatPath, chat(""), "X-Session-Id: s1")).want(t, 200, "")
		if tracker.Home(key) != home.ID() {
			t.Fatal("the session left its home because that was busy")
		}
	}
	if n := busy.requests.Load(); n != 1 {
		t.Errorf("the busy home was asked %d times", n)
	}
	home.SetHealth(fleet.HealthDown)
	f.do(post(chatPath, chat(""), "X-Session-Id: s1")).want(t, 200, "")
	if tracker.Home(key) != fl.Backends()[1].ID() {
		t.Error("the session stays with a home that is down")
	}
	for i, want := range []string{"session_spill", "session_spill", "session_spill", "session_moved"} {
		if r := f.records(4)[i]; r.Reason != want {
			t.Errorf("request %d: %s, want %s", i, r.Reason, want)
		}
	}
}

// A backend that refuses connections costs no request and no retry of others, however many requests meet it.
func TestRefusedConnectionsCostNoBudget(t *testing.T) {
	e := newEngine(t, echo)
	f := startFront(t, newFleet(t, "least_tokens", deadURL(t), e.url()))
	before := f.s.budget.credit.Load()
	for i := range 60 {
		f.do(post(chatPath, chat(fmt.Sprintf(`,"user":"u%d"`, i)))).want(t, 200, "")
	}
	if after := f.s.budget.credit.Load(); after < before {
		t.Errorf("the budget went from %d to %d", before, after)
	}
	retried := 0
	for _, r := range f.records(60) {
		retried += r.Attempts - 1
	}
	if retried == 0 {
		t.Error("no request met the dead backend")
	}
}

// How far a request goes: on while nobody has seen it, else within retries.max.
func TestAttemptsAreBounded(t *testing.T) {
	const plain = "x-stainless-retry-count: 0"
	dies := func(p *peer) { p.request() }
	for _, tt := range []struct {
		name     string
		retries  int
		header   string
		backends string // in the order in which they are tried: x dead, d dies with the request, o well
		status   int
		attempts int
	}{
		{"all but the last refuse", 2, plain, "xxxxxo", 200, 6},
		{"all but the last refuse, and the client retries too", 1, "x-stainless-retry-count: 1", "xxxo", 200, 4},
		{"all refuse", 2, plain, "xxxx", 502, 4},
		{"no retries", 0, plain, "xo", 502, 1},
		{"one saw the request", 2, plain, "dxxo", 502, 3},
		{"one saw the request late", 2, plain, "xxxdo", 502, 4},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var urls []string
			for _, kind := range tt.backends {
				switch kind {
				case 'x':
					urls = append(urls, deadURL(t))
				case 'd':
					urls = append(urls, newEngine(t, dies).url())
				default:
					urls = append(urls, newEngine(t, echo).url())
				}
			}
			f := startFront(t, newFleet(t, "round_robin", urls...), func(o *Options) { o.Retries = tt.retries })
			f.do(post(chatPath, chat(""), tt.header)).want(t, tt.status, "")
			if r := f.records(1)[0]; r.Attempts != tt.attempts {
				t.Errorf("%d attempts, want %d", r.Attempts, tt.attempts)
			}
		})
	}
}

func TestRetryAfter(t *testing.T) {
	now := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	for value, want := range map[string]time.Duration{
		"":                              busyTime,
		"soon":                          busyTime,
		"0":                             busyTime,
		"-3":                            busyTime,
		"3":                             3 * time.Second,
		"5":                             maxBusyTime,
		"86400":                         maxBusyTime,
		"999999999999999999":            maxBusyTime,
		"9999999999999999999999":        busyTime,
		"Wed, 02 Jan 2030 03:04:07 GMT": 2 * time.Second,
		"Wed, 02 Jan 2030 04:04:05 GMT": maxBusyTime,
		"Wed, 02 Jan 2030 03:04:05 GMT": busyTime,
	} {
		if got := retryAfter([]field{{[]byte("Retry-After"), []byte(value)}}, now); got != want {
			t.Errorf("%q: %s, want %s", value, got, want)
		}
	}
	if got := retryAfter(nil, now); got != busyTime {
		t.Errorf("none: %s", got)
	}
}

// What a client is told when every backend is busy, and what the log says of whom.
func TestEveryBackendIsBusy(t *testing.T) {
	const head, rest = "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 3\r\n", "Content-Length: 4\r\n\r\nbusy"
	for _, tt := range []struct {
		name   string
		answer string
		closes bool
		code   string // of the proxy's own error; "" = theirs is passed on
	}{
		{"whole", head + rest, false, ""},
		{"after an interim answer", "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + head + rest, false, ""},
		{"after several", strings.Repeat("HTTP/1.1 102 Processing\r\n\r\n", 3) + head + rest, false, ""},
		{"in chunks", head + "Transfer-Encoding: chunked\r\n\r\n4\r\nbusy\r\n0\r\n\r\n", false, ""},
		{"until close", head + "Connection: close\r\n\r\nbusy", true, ""},
		{"broken off", head + "Content-Length: 40\r\n\r\nbusy", true, "upstream_busy"},
		{"too long", head + "Transfer-Encoding: chunked\r\n\r\n" + strings.Repeat(chunk(strings.Repeat("x", 8<<10)), 10), false, "upstream_busy"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := func(p *peer) {
				for p.request() != nil && p.send(tt.answer) == nil && !tt.closes {
				}
			}
			f := startFront(t, newFleet(t, "round_robin", newEngine(t, e).url(), newEngine(t, e).url()))
			a := f.do(post(chatPath, chat("")))
			a.want(t, 503, tt.code)
			if a.Header.Get("Retry-After") != "3" || tt.code == "" && a.body != "busy" {
				t.Errorf("%q %v", a.body, a.Header)
			}
			r := f.records(1)[0]
			if r.Backend != "b2" || r.Reason != "round_robin" || r.Attempts != 2 || r.Outcome != OutcomeUpstreamError || r.Status != 503 {
				t.Errorf("record %+v", r)
			}
			if tt.code == "" && a.Header.Get(headerBackend) != r.Backend {
				t.Errorf("the answer is said to be of %s, in the log of %s", a.Header.Get(headerBackend), r.Backend)
			}
		})
	}
}

// The answer that is passed on names the backend that gave it, though another was tried later.
func TestSavedAnswerNamesItsBackend(t *testing.T) {
	busy := newEngine(t, full)
	f := startFront(t, newFleet(t, "round_robin", busy.url(), deadURL(t)))
	a := f.do(post(chatPath, chat("")))
	a.want(t, 503, "")
	if r := f.records(1)[0]; a.Header.Get(headerBackend) != "b1" || r.Backend != "b1" || r.Attempts != 2 {
		t.Errorf("header %v, record %+v", a.Header, r)
	}
}

// A retry that is not made costs nothing: where the answer is too long to be put aside, or no other backend is left.
func TestUnusedRetriesCostNoBudget(t *testing.T) {
	long := fmt.Sprintf("HTTP/1.1 503 Service Unavailable\r\nContent-Length: %d\r\n\r\n%s", 100<<10, strings.Repeat("x", 100<<10))
	for _, tt := range []struct {
		name     string
		answer   string
		backends int
	}{
		{"too long", long, 2},
		{"the only backend", "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}", 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var urls []string
			for range tt.backends {
				urls = append(urls, newEngine(t, func(p *peer) {
					for p.request() != nil && p.send(tt.answer) == nil {
					}
				}).url())
			}
			reg := prometheus.NewRegistry()
			f := startFront(t, newFleet(t, "round_robin", urls...), func(o *Options) { o.Metrics = reg })
			before := f.s.budget.credit.Load()
			for range 10 {
				if a := f.do(post(chatPath, chat(""))); a.StatusCode != 503 || !strings.HasSuffix(tt.answer, a.body) || a.body == "" {
					t.Fatalf("%d, %d bytes", a.StatusCode, len(a.body))
				}
			}
			if after := f.s.budget.credit.Load(); after < before {
				t.Errorf("the budget went from %d to %d", before, after)
			}
			for _, r := range f.records(10) {
				if r.Attempts != 1 {
					t.Errorf("record %+v", r)
				}
			}
			if n, err := gathered(reg, "shunt_retries_total"); n != 0 || err != nil {
				t.Errorf("%v retries are counted, %v", n, err)
			}
		})
	}
}

// gathered returns the sum of a counter's series.
func gathered(reg *prometheus.Registry, name string) (sum float64, err error) {
	families, err := reg.Gather()
	for _, m := range families {
		if m.GetName() == name {
			for _, s := range m.GetMetric() {
				sum += s.GetCounter().GetValue()
			}
		}
	}
	return sum, err
}
