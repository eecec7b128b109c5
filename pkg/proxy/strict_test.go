// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// Whatever is ambiguous is answered with 400 and a closed connection, and nothing of it reaches a backend, neither the
// request itself nor what hides behind it.
func TestSmuggling(t *testing.T) {
	e := newEngine(t, echo)
	f := startFront(t, newFleet(t, "least_tokens", e.url()))
	const hidden = "GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n"
	head := "POST " + chatPath + " HTTP/1.1\r\nHost: h\r\n"
	for name, raw := range map[string]string{
		"both lengths":                 head + "Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + hidden,
		"both, other order":            head + "Transfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n0\r\n\r\n" + hidden,
		"two lengths":                  head + "Content-Length: 2\r\nContent-Length: 30\r\n\r\n{}" + hidden,
		"equal lengths":                head + "Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}" + hidden,
		"length list":                  head + "Content-Length: 2, 2\r\n\r\n{}" + hidden,
		"length with plus":             head + "Content-Length: +2\r\n\r\n{}" + hidden,
		"negative length":              head + "Content-Length: -2\r\n\r\n{}" + hidden,
		"hex length":                   head + "Content-Length: 0x2\r\n\r\n{}" + hidden,
		"length with space inside":     head + "Content-Length: 1 2\r\n\r\n{}" + hidden,
		"empty length":                 head + "Content-Length:\r\n\r\n{}" + hidden,
		"huge length":                  head + "Content-Length: 18446744073709551618\r\n\r\n{}" + hidden,
		"space before colon":           head + "Content-Length : 2\r\n\r\n{}" + hidden,
		"tab before colon":             head + "Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n" + hidden,
		"folded header":                head + "X-A: b\r\n Content-Length: 2\r\n\r\n{}" + hidden,
		"folded transfer-encoding":     head + "Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n" + hidden,
		"first header folded":          "POST " + chatPath + " HTTP/1.1\r\n Host: h\r\n\r\n" + hidden,
		"bare lf":                      head + "X-A: b\nContent-Length: 2\r\n\r\n{}" + hidden,
		"bare lf ends the head":        head + "X-A: b\r\n\nContent-Length: 2\r\n\r\n{}" + hidden,
		"bare cr":                      head + "X-A: b\rContent-Length: 2\r\n\r\n{}" + hidden,
		"nul in a value":               head + "X-A: b\x00\r\nContent-Length: 2\r\n\r\n{}" + hidden,
		"vertical tab":                 head + "Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n" + hidden,
		"unknown coding":               head + "Transfer-Encoding: gzip\r\n\r\n" + hidden,
		"coding list":                  head + "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + hidden,
		"identity":                     head + "Transfer-Encoding: identity\r\nContent-Length: 2\r\n\r\n{}" + hidden,
		"coding twice":                 head + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + hidden,
		"coding with suffix":           head + "Transfer-Encoding: chunkedx\r\n\r\n0\r\n\r\n" + hidden,
		"lookalike":                    head + "Transfer_Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}" + hidden,
		"no host":                      "POST " + chatPath + " HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}" + hidden,
		"two hosts":                    head + "Host: h2\r\nContent-Length: 2\r\n\r\n{}" + hidden,
		"host with a path":             "POST " + chatPath + " HTTP/1.1\r\nHost: h/x\r\nContent-Length: 2\r\n\r\n{}" + hidden,
		"chunked in 1.0":               "POST " + chatPath + " HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + hidden,
		"chunk size not hex":           head + "Transfer-Encoding: chunked\r\n\r\nxyz\r\n" + hidden,
		"chunk size with prefix":       head + "Transfer-Encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n" + hidden,
		"chunk size too long":          head + "Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}" + hidden,
		"negative chunk size":          head + "Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n" + hidden,
		"lf in a chunk extension":      head + "Transfer-Encoding: chunked\r\n\r\n2;a\n{}\r\n0\r\n\r\n" + hidden,
		"chunk longer than its size":   head + "Transfer-Encoding: chunked\r\n\r\n2\r\n{}x\r\n0\r\n\r\n" + hidden,
		"bare lf after a chunk size":   head + "Transfer-Encoding: chunked\r\n\r\n2\n{}\r\n0\r\n\r\n" + hidden,
		"length in the trailer":        head + "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nContent-Length: 5\r\n\r\n" + hidden,
		"request line without version": "POST " + chatPath + "\r\nHost: h\r\n\r\n" + hidden,
		"garbage":                      "\x16\x03\x01\x02\x00\x01\x00\r\n\r\n" + hidden,
	} {
		t.Run(name, func(t *testing.T) {
			before := e.requests.Load()
			c := f.dial()
			c.send(raw)
			a := c.answer("POST")
			a.want(t, 400, "invalid_http")
			if a.Header.Get("Connection") != "close" && !a.Close {
				t.Error("the answer does not say that the connection is closed")
			}
			_ = c.Conn.(*net.TCPConn).CloseWrite()
			if !c.closed() {
				t.Error("a second answer came")
			}
			if n := e.requests.Load() - before; n != 0 {
				t.Errorf("%d requests reached the backend", n)
			}
		})
	}
}

func TestTargetsThatAreRefused(t *testing.T) {
	e := newEngine(t, echo)
	f := startFront(t, newFleet(t, "least_tokens", e.url()))
	for _, target := range []string{"//v1/models", "/v1//models", "/v1/../v1/models", "/v1/./models", "/%2e%2e/v1/models", "/v1%2fmodels", "/v1%5cmodels",
		"/v1\\models", "/v1/%252e/models", "/v1/models%00", "/v1/models/../../flush_cache", "/v1/chat/completions/", "/flush_cache", "/V1/models",
		"http://h/v1/models", "/v1/models#frag"} {
		a := f.do("GET " + target + " HTTP/1.1\r\nHost: h\r\n\r\n")
		if a.StatusCode != 400 && a.StatusCode != 404 || !strings.Contains(a.body, `{"error":{"message":`) {
			t.Errorf("%s: %d %s", target, a.StatusCode, a.body)
		}
	}
	if n := e.requests.Load(); n != 0 {
		t.Errorf("%d requests reached the backend", n)
	}
}

// A refused request's body is drained within bounds: what it holds is not run, and the client reads the answer.
func TestEarlyAnswers(t *testing.T) {
	e := newEngine(t, echo)
	f := startFront(t, newFleet(t, "least_tokens", e.url()))
	t.Run("a request inside the body is not run", func(t *testing.T) {
		body := strings.Repeat(" ", 8<<10-100) + "GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n"
		body += strings.Repeat(" ", 8<<10-len(body))
		c := f.dial()
		c.send(post("/flush_cache", body) + post(chatPath, chat("")))
		c.answer("POST").want(t, 404, "unknown_url")
		c.answer("POST").want(t, 200, "")
		if n := e.requests.Load(); n != 1 {
			t.Errorf("%d requests ran, want 1", n)
		}
	})
	t.Run("a long upload", func(t *testing.T) {
		for i := range 50 {
			c := f.dial()
			body := strings.Repeat("x", 2<<20)
			done := make(chan error, 1)
			go func() {
				_, err := io.WriteString(c, post("/flush_cache", body))
				done <- err
			}()
			if i%2 == 0 { // reads only when all is written
				if err := <-done; err != nil {
					t.Fatalf("round %d: the upload was cut off: %v", i, err)
				}
			}
			c.answer("POST").want(t, 404, "unknown_url")
			c.Close()
			if i%2 == 1 {
				<-done
			}
		}
	})
}

func TestExpectContinue(t *testing.T) {
	e := newEngine(t, func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			if g.value("expect") != "" {
				t.Error("Expect reached the backend")
			}
			_ = p.json(200, fmt.Sprint(len(g.body)))
		}
	})
	f := startFront(t, newFleet(t, "least_tokens", e.url()), func(o *Options) { o.Limits.MaxBody = 4 << 20 })
	body := chat(`,"pad":"` + strings.Repeat("x", 2<<20) + `"`)
	ask := func(c *client, path string, length int) {
		c.send(fmt.Sprintf("POST %s HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n", path, length))
	}
	c := f.dial()
	for range 2 {
		ask(c, chatPath, len(body))
		line, err := c.br.ReadString('\n')
		if err != nil || line != "HTTP/1.1 100 Continue\r\n" {
			t.Fatalf("%q %v", line, err)
		}
		_, _ = c.br.ReadString('\n')
		c.send(body)
		if a := c.answer("POST"); a.body != fmt.Sprint(len(body)) {
			t.Errorf("%d %s", a.StatusCode, a.body)
		}
	}
	for _, tt := range []struct {
		path, code     string
		length, status int
	}{{"/flush_cache", "unknown_url", 2 << 20, 404}, {chatPath, "request_too_large", 5 << 20, 413}} {
		c := f.dial()
		ask(c, tt.path, tt.length)
		a := c.answer("POST") // the final status, without a 100 before it
		a.want(t, tt.status, tt.code)
		if !a.Close {
			t.Error("the connection stays open, though a body may follow")
		}
	}
}

func TestBodyLimit(t *testing.T) {
	const limit = 100_000
	e := newEngine(t, func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			_ = p.json(200, fmt.Sprint(len(g.body)))
		}
	})
	f := startFront(t, newFleet(t, "least_tokens", e.url()), func(o *Options) { o.Limits.MaxBody = limit })
	for _, n := range []int{limit - 1, limit, limit + 1, 3 * limit} {
		body := chat(`,"pad":"` + strings.Repeat("x", n-len(chat(`,"pad":""`))) + `"`)
		for name, request := range map[string]string{
			"length":  post(chatPath, body),
			"chunked": "POST " + chatPath + " HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(body[:n/2]) + chunk(body[n/2:]) + "0\r\n\r\n",
		} {
			a := f.do(request)
			if n <= limit && (a.StatusCode != 200 || a.body != fmt.Sprint(n)) {
				t.Errorf("%s %d: %d %s", name, n, a.StatusCode, a.body)
			}
			if n > limit {
				a.want(t, 413, "request_too_large")
			}
		}
	}
}

func TestHeaderLimits(t *testing.T) {
	e := newEngine(t, func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			n, _ := parseDecimal([]byte(g.value("x-size")))
			_ = p.send(fmt.Sprintf("HTTP/1.1 200 OK\r\nX-Big: %s\r\nContent-Length: %d\r\n\r\n%s", strings.Repeat("y", int(n)), len(g.value("x-in")), g.value("x-in")))
		}
	})
	f := startFront(t, newFleet(t, "least_tokens", e.url()))
	for _, n := range []int{3 << 10, 12 << 10, 60 << 10, 70 << 10} {
		in := f.do(post(chatPath, chat(""), "X-Size: 0", "X-In: "+strings.Repeat("x", n)))
		out := f.do(post(chatPath, chat(""), fmt.Sprintf("X-Size: %d", n)))
		if n < 64<<10 {
			in.want(t, 200, "")
			if len(in.body) != n {
				t.Errorf("%d: %d bytes arrived", n, len(in.body))
			}
			out.want(t, 200, "")
			if len(out.Header.Get("X-Big")) != n {
				t.Errorf("%d: %d bytes came back", n, len(out.Header.Get("X-Big")))
			}
			continue
		}
		in.want(t, 431, "header_too_large")
		out.want(t, 502, "upstream_header_too_large")
	}
}

// Slow clients lose their place; those that keep the pace do not.
func TestSlowClients(t *testing.T) {
	e := newEngine(t, echo)
	f := startFront(t, newFleet(t, "least_tokens", e.url()), func(o *Options) {
		o.Timeouts.Header = 200 * time.Millisecond
		o.Timeouts.Body = 200 * time.Millisecond
		o.Timeouts.KeepAlive = 200 * time.Millisecond
		o.Limits.MinBodyRate = 100_000
	})
	t.Run("header", func(t *testing.T) {
		c := f.dial()
		c.send("POST /v1/chat/completions HTTP/1.1\r\nHost:")
		c.answer("POST").want(t, 408, "request_timeout")
	})
	for name, request := range map[string]string{
		"start of the body": "POST " + chatPath + " HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\n{",
		"body":              "POST " + chatPath + " HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\n" + strings.Repeat(" ", 19_000),
		"chunks":            "POST " + chatPath + " HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			c := f.dial()
			c.send(request)
			c.answer("POST").want(t, 408, "request_timeout")
		})
	}
	t.Run("steady", func(t *testing.T) {
		body := chat(`,"pad":"` + strings.Repeat("x", 400_000) + `"`)
		c := f.dial()
		request := post(chatPath, body)
		for len(request) > 0 {
			n := min(40_000, len(request))
			c.send(request[:n])
			request = request[n:]
			time.Sleep(30 * time.Millisecond)
		}
		if a := c.answer("POST"); a.StatusCode != 200 || a.body != body {
			t.Errorf("%d, %d bytes", a.StatusCode, len(a.body))
		}
	})
	t.Run("idle", func(t *testing.T) {
		c := f.dial()
		c.send(post(chatPath, chat("")))
		c.answer("POST").want(t, 200, "")
		if !c.closed() {
			t.Error("an idle connection stays open")
		}
	})
}

func TestConnectionLimit(t *testing.T) {
	e := newEngine(t, echo)
	f := startFront(t, newFleet(t, "least_tokens", e.url()), func(o *Options) { o.Limits.MaxConnections = 3 })
	var held []*client
	for range 3 {
		c := f.dial()
		c.send(post(chatPath, chat("")))
		c.answer("POST").want(t, 200, "")
		held = append(held, c)
	}
	for range 5 {
		c := f.dial()
		_, _ = io.WriteString(c, post(chatPath, chat("")))
		r, err := http.ReadResponse(c.br, nil)
		if err != nil || r.StatusCode != 503 || r.Header.Get("Retry-After") == "" {
			t.Errorf("%v %v", r, err)
		}
		c.Close()
	}
	for _, c := range held {
		c.Close()
	}
	eventually(t, "the places to be free", func() bool { return f.s.Connections() == 0 })
	f.do(post(chatPath, chat(""))).want(t, 200, "")
}

func TestBodyMemory(t *testing.T) {
	release := make(chan struct{})
	var held atomic.Int64
	e := newEngine(t, func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			held.Add(1)
			<-release
			_ = p.json(200, "{}")
		}
	})
	f := startFront(t, newFleet(t, "least_tokens", e.url()), func(o *Options) { o.Limits.BodyMemory = 1 << 20 })
	c := f.dial()
	big := post(chatPath, chat(`,"pad":"`+strings.Repeat("x", 700_000)+`"`))
	c.send(big)
	eventually(t, "the first to be on its way", func() bool { return held.Load() == 1 })
	f.do(big).want(t, 503, "overloaded")
	close(release)
	c.answer("POST").want(t, 200, "")
	f.do(big).want(t, 200, "")
}

func TestConnectionsPerClient(t *testing.T) {
	e := newEngine(t, echo)
	var ingress atomic.Bool
	f := startFront(t, newFleet(t, "least_tokens", e.url()), func(o *Options) {
		o.Limits.MaxPerClient = 2
		o.Ingress = func(netip.Addr) bool { return ingress.Load() }
	})
	for range 2 {
		c := f.dial()
		c.send(post(chatPath, chat("")))
		c.answer("POST").want(t, 200, "")
	}
	c := f.dial()
	if r := c.head("GET"); r.StatusCode != 503 {
		t.Errorf("the third connection got %d", r.StatusCode)
	}
	ingress.Store(true)
	f.do(post(chatPath, chat(""))).want(t, 200, "")
}

// failing is a listener that runs out of descriptors before it delivers a connection.
type failing struct {
	net.Listener
	errors atomic.Int64
}

func (f *failing) Accept() (net.Conn, error) {
	if f.errors.Add(-1) >= 0 {
		return nil, &net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", syscall.EMFILE)}
	}
	return f.Listener.Accept()
}

func TestAcceptSurvivesALackOfDescriptors(t *testing.T) {
	served := make(chan error, 1)
	t.Cleanup(func() { // after the front end's shutdown
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	e := newEngine(t, echo)
	f := startFront(t, newFleet(t, "least_tokens", e.url()))
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &failing{Listener: ln}
	l.errors.Store(3)
	go func() { served <- f.s.Serve(l) }()
	f.addr = ln.Addr().String()
	f.do(post(chatPath, chat(""))).want(t, 200, "")
}
