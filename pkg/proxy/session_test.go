// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/policy"
	"github.com/shunt-lb/shunt/pkg/session"
)

func usage(p *peer) {
	for g := p.request(); g != nil; g = p.request() {
		_ = p.json(200, `{"choices":[{"finish_reason":"stop","message":{"content":"x"}}],"usage":{"prompt_tokens":100,"completion_tokens":20}}`)
	}
}

func TestSessionsComeHome(t *testing.T) {
	e1, e2, e3 := newEngine(t, usage), newEngine(t, usage), newEngine(t, usage)
	fl := newFleet(t, "session", e1.url(), e2.url(), e3.url())
	tracker, id := session.NewTracker(session.TrackerOptions{}), session.NewIdentifier(nil)
	f := startFront(t, fl, withCounter(t), func(o *Options) { o.Tracker, o.Identifier = tracker, id })
	homes := map[string]string{}
	for turn := range 4 {
		for s := range 12 {
			name := fmt.Sprintf("s%d", s)
			var a answer
			switch s % 3 {
			case 0:
				a = f.do(post(chatPath, chat(""), "X-Session-Id: "+name))
			case 1:
				a = f.do(post(chatPath, chat(`,"prompt_cache_key":"`+name+`"`)))
			default: // known by its first user turn
				a = f.do(post(chatPath, `{"model":"m","messages":[{"role":"user","content":"`+name+`"}`+strings.Repeat(`,{"role":"assistant","content":"x"},{"role":"user","content":"more"}`, turn)+`]}`))
			}
			a.want(t, 200, "")
			b := a.Header.Get(headerBackend)
			if homes[name] == "" {
				homes[name] = b
			}
			if homes[name] != b {
				t.Errorf("turn %d of %s went to %s, its home is %s", turn, name, b, homes[name])
			}
		}
	}
	for _, r := range f.records(48) {
		if want := "session_home"; r.Reason != want && r.Reason != "session_new" {
			t.Errorf("record %+v", r)
		}
	}
	key, _ := id.Key(func(string) []byte { return []byte("s0") }, nil)
	if n := tracker.Expected(key); n != 140 {
		t.Errorf("the next turn is expected to bring %d tokens, want 140", n)
	}
}

// The pin is in the table before the answer's head leaves, and the client is asked to reconnect.
func TestPinsAreOffered(t *testing.T) {
	e1, e2 := newEngine(t, usage), newEngine(t, usage)
	fl := newFleet(t, "session", e1.url(), e2.url())
	table := session.NewHeapPins()
	pins := session.NewPins(session.PinsOptions{Table: table, Handoff: true})
	ingress := false
	f := startFront(t, fl, func(o *Options) {
		o.Tracker, o.Identifier, o.Pins = session.NewTracker(session.TrackerOptions{}), session.NewIdentifier(nil), pins
		o.Ingress = func(netip.Addr) bool { return ingress }
	})
	a := f.do("GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n")
	if a.Close || len(pins.List()) != 0 {
		t.Errorf("a list of models was pinned: %+v", pins.List())
	}
	ingress = true
	if a := f.do(post(chatPath, chat(""), "X-Session-Id: s1")); a.Close || len(pins.List()) != 0 {
		t.Errorf("what another shunt steered here was pinned: %+v", pins.List())
	}
	ingress = false
	a = f.do(post(chatPath, chat(""), "X-Session-Id: s1"))
	list := pins.List()
	if !a.Close || len(list) != 1 || !list[0].Live || list[0].VIP.String() != f.addr {
		t.Fatalf("close %v, pins %+v", a.Close, list)
	}
	if b := fl.Backend(a.Header.Get(headerBackend)); b == nil || list[0].Pin.Backend != b.ID() || list[0].Pin.Generation != b.Generation() {
		t.Errorf("pinned to %+v, served by %s", list[0].Pin, a.Header.Get(headerBackend))
	}
}

func TestMetricsHaveBoundedLabels(t *testing.T) {
	e := newEngine(t, usage)
	reg := prometheus.NewRegistry()
	f := startFront(t, newFleet(t, "least_tokens", e.url()), func(o *Options) { o.Metrics = reg })
	c := f.dial()
	series := func() (n int) {
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range families {
			if !strings.HasPrefix(m.GetName(), "shunt_") {
				t.Errorf("metric %s", m.GetName())
			}
			n += len(m.GetMetric())
		}
		return n
	}
	before := 0
	for i := range 300 {
		c.send(post(chatPath, strings.Replace(chat(""), `"m"`, fmt.Sprintf(`"model-%d"`, i), 1), fmt.Sprintf("X-Request-Id: %d", i)))
		c.answer("POST").want(t, 200, "")
		if i == 0 {
			f.records(1)
			before = series()
		}
	}
	f.records(300)
	if n := series(); n != before || before == 0 {
		t.Errorf("%d series after 300 model names, %d after one", n, before)
	}
	for _, want := range []string{"shunt_requests_total", "shunt_attempts_total", "shunt_picks_total", "shunt_request_tokens_total", "shunt_first_byte_seconds"} {
		found := false
		families, _ := reg.Gather()
		for _, m := range families {
			found = found || m.GetName() == want
		}
		if !found {
			t.Errorf("%s is missing", want)
		}
	}
}

func TestHTTPSBackend(t *testing.T) {
	srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s", r.Host, r.URL.Path)
	}))
	defer srv.Close()
	pool := x509.NewCertPool()
	pool.AddCert(srv.Certificate())
	f := startFront(t, newFleet(t, "least_tokens", srv.URL+"/api"), func(o *Options) { o.TLS = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12} })
	c := f.dial()
	for range 3 {
		c.send(post(chatPath, chat(`,"pad":"`+strings.Repeat("x", 100_000)+`"`)))
		if a := c.answer("POST"); a.StatusCode != 200 || a.body != strings.TrimPrefix(srv.URL, "https://")+" /api"+chatPath {
			t.Errorf("%d %s", a.StatusCode, a.body)
		}
	}
	untrusting := startFront(t, newFleet(t, "least_tokens", srv.URL))
	untrusting.do(post(chatPath, chat(""))).want(t, 502, "upstream_error")
}

// A backend that leaves during a stream serves it to its end; its late release touches nobody else.
func TestReloadDuringAStream(t *testing.T) {
	step := make(chan struct{})
	e := newEngine(t, func(p *peer) {
		p.request()
		_ = p.send(streamHead + chunk(event("a")))
		<-step
		_ = p.send(chunk(event("b")) + "0\r\n\r\n")
		if p.request() != nil {
			t.Error("the connection of a backend that left was used again")
		}
	})
	e2 := newEngine(t, usage)
	fl := newFleet(t, "least_tokens", e.url())
	f := startFront(t, fl)
	old := fl.Backends()[0]
	c := f.dial()
	c.send(streamRequest)
	r := c.head("POST")
	if err := fl.Apply([]fleet.PoolSpec{{Name: "pool", Chooser: chooser(t, "least_tokens"), Backends: []fleet.BackendSpec{spec(t, "b1", e2.url())}}}); err != nil {
		t.Fatal(err)
	}
	fl.Backends()[0].SetHealth(fleet.HealthUp)
	f.do(post(chatPath, chat(""))).want(t, 200, "")
	close(step)
	var b strings.Builder
	if _, err := io.Copy(&b, r.Body); err != nil || b.String() != event("a")+event("b") {
		t.Errorf("%q %v", b.String(), err)
	}
	eventually(t, "the old instance's ticket", func() bool { l, _ := old.Load(); return l == 0 && old.Requests() == 0 })
}

func TestUpdate(t *testing.T) {
	e := newEngine(t, echo)
	f := startFront(t, newFleet(t, "least_tokens", e.url()))
	f.do(post("/custom/x", "{}")).want(t, 404, "unknown_url")
	if err := f.s.Update(Dynamic{Paths: []string{"/custom/*"}, Limits: Limits{MaxBody: 5}}); err != nil {
		t.Fatal(err)
	}
	f.do(post("/custom/x", "{}")).want(t, 200, "")
	f.do(post("/custom/x", "{    }")).want(t, 413, "request_too_large")
	f.do(post(chatPath, "{}")).want(t, 404, "unknown_url")
	if err := f.s.Update(Dynamic{Paths: []string{"relative"}}); err == nil {
		t.Error("a bad pattern was accepted")
	}
	f.s.Drain()
	if a := f.do(post("/custom/x", "{}")); !a.Close {
		t.Error("a draining server does not ask to reconnect")
	}
}

// No prompt, answer, key or session value gets into the log or the record.
func TestNothingPrivateIsLogged(t *testing.T) {
	const marker = "SECRET-MARKER"
	e := newEngine(t, func(p *peer) {
		g := p.request()
		_ = p.json(500, `{"echo":"`+marker+`","finish_reason":"`+marker+`"}`)
		_ = g
	})
	f := startFront(t, newFleet(t, "session", e.url(), deadURL(t)), withCounter(t), func(o *Options) {
		o.Identifier = session.NewIdentifier(nil)
		o.Needs = func(string) policy.Needs { return policy.Session }
	})
	f.s.fault = func([]byte) { panic("injected") }
	f.do(post(chatPath, `{"model":"`+marker+`","messages":[{"role":"user","content":"`+marker+`"}]}`, "Authorization: Bearer "+marker, "X-Session-Id: "+marker,
		"X-Request-Id: a "+marker))
	f.do(post(chatPath, `{"model":"`+marker+`","messages":"`+marker))
	f.do(post(chatPath+"?key="+marker, "{"))
	rs := f.records(3)
	f.mu.Lock()
	defer f.mu.Unlock()
	if s := fmt.Sprintf("%+v %s", rs, f.log.String()); strings.Contains(s, marker) {
		t.Errorf("private text is in %s", s)
	}
	if rs[0].Session != "header" {
		t.Errorf("record %+v", rs[0])
	}
}

func TestFirstByteOfHistogramNeedsAnAnswer(t *testing.T) {
	f := startFront(t, newFleet(t, "least_tokens", deadURL(t)))
	f.do(post(chatPath, chat("")))
	if r := f.records(1)[0]; r.FirstByteTime != 0 || r.TotalTime <= 0 || time.Since(r.Time) < 0 {
		t.Errorf("record %+v", r)
	}
}
