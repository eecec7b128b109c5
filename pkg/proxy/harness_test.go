// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/policy"
	"github.com/shunt-lb/shunt/pkg/tokens"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	// fasthttp's worker pool cleaner and its clock have no end of their own.
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*workerPool).Start.func2"),
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.updateServerDate.func1"))
}

// wait is how long a test waits for what must come. Nothing is measured with it.
const wait = 10 * time.Second

// engine is a backend made by hand: each connection is the test's to serve.
type engine struct {
	t        *testing.T
	ln       net.Listener
	accepted atomic.Int64
	requests atomic.Int64
	wg       sync.WaitGroup
	mu       sync.Mutex
	open     map[net.Conn]struct{}
}

// peer is one connection to the engine.
type peer struct {
	net.Conn
	e  *engine
	br *bufio.Reader
}

func newEngine(t *testing.T, serve func(p *peer)) *engine {
	return newEngineOn(t, "127.0.0.1:0", serve)
}

func newEngineOn(t *testing.T, address string, serve func(p *peer)) *engine {
	t.Helper()
	ln, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	e := &engine{t: t, ln: ln, open: map[net.Conn]struct{}{}}
	e.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			e.accepted.Add(1)
			e.mu.Lock()
			e.open[c] = struct{}{}
			e.mu.Unlock()
			e.wg.Go(func() {
				defer func() {
					c.Close()
					e.mu.Lock()
					delete(e.open, c)
					e.mu.Unlock()
				}()
				serve(&peer{c, e, bufio.NewReader(c)})
			})
		}
	})
	t.Cleanup(e.close)
	return e
}

func (e *engine) close() {
	e.ln.Close()
	e.mu.Lock()
	for c := range e.open {
		c.Close()
	}
	e.mu.Unlock()
	e.wg.Wait()
}

func (e *engine) url() string { return "http://" + e.ln.Addr().String() }

// got is a request as the engine saw it.
type got struct {
	line   string
	header string // as it came, names in their case
	body   []byte
}

func (g *got) value(name string) string {
	for line := range strings.SplitSeq(g.header, "\r\n") {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.EqualFold(k, name) {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

func (g *got) count(name string) (n int) {
	for line := range strings.SplitSeq(g.header, "\r\n") {
		if k, _, ok := strings.Cut(line, ":"); ok && strings.EqualFold(k, name) {
			n++
		}
	}
	return n
}

// request reads a request, which must have a plain framing. It returns nil at the connection's end.
func (p *peer) request() *got {
	g := &got{}
	line, err := p.br.ReadString('\n')
	if err != nil {
		return nil
	}
	g.line = strings.TrimSpace(line)
	for {
		line, err := p.br.ReadString('\n')
		if err != nil {
			return nil
		}
		if line == "\r\n" {
			break
		}
		g.header += line
	}
	if v := g.value("content-length"); v != "" {
		n, ok := parseDecimal([]byte(v))
		if !ok {
			p.e.t.Errorf("engine got content-length %q", v)
			return nil
		}
		g.body = make([]byte, n)
		if _, err := io.ReadFull(p.br, g.body); err != nil {
			return nil
		}
	}
	if g.value("transfer-encoding") != "" {
		p.e.t.Errorf("engine got a chunked request")
	}
	p.e.requests.Add(1)
	return g
}

func (p *peer) send(s string) error {
	_, err := io.WriteString(p, s)
	return err
}

func (p *peer) json(status int, body string) error {
	return p.send(fmt.Sprintf("HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
		status, http.StatusText(status), len(body), body))
}

const streamHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"

func chunk(s string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(s), s) }

func event(text string) string {
	return fmt.Sprintf("data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":%q}}]}\n\n", text)
}

// echo serves unary requests with what it got, for as long as the connection lasts.
func echo(p *peer) {
	for {
		g := p.request()
		if g == nil {
			return
		}
		if p.json(200, string(g.body)) != nil {
			return
		}
	}
}

type front struct {
	t      *testing.T
	s      *Server
	fleet  *fleet.Fleet
	addr   string
	mu     sync.Mutex
	record []Record
	log    bytes.Buffer
}

// lockedWriter lets the log be read while the server runs.
type lockedWriter struct{ f *front }

func (w lockedWriter) Write(p []byte) (int, error) {
	w.f.mu.Lock()
	defer w.f.mu.Unlock()
	return w.f.log.Write(p)
}

func spec(t testing.TB, name, rawURL string) fleet.BackendSpec {
	t.Helper()
	u, err := url.Parse(rawURL)
	if err != nil {
		t.Fatal(err)
	}
	return fleet.BackendSpec{Name: name, URL: u}
}

func chooser(t testing.TB, name string) fleet.Chooser {
	t.Helper()
	p, err := policy.New(name, policy.Params{})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func newFleet(t testing.TB, policyName string, urls ...string) *fleet.Fleet {
	t.Helper()
	p := fleet.PoolSpec{Name: "pool", Chooser: chooser(t, policyName)}
	for i, u := range urls {
		p.Backends = append(p.Backends, spec(t, fmt.Sprintf("b%d", i+1), u))
	}
	return applyFleet(t, p)
}

func applyFleet(t testing.TB, pools ...fleet.PoolSpec) *fleet.Fleet {
	t.Helper()
	f := fleet.New(fleet.Options{})
	if err := f.Apply(pools); err != nil {
		t.Fatal(err)
	}
	for _, b := range f.Backends() {
		b.SetHealth(fleet.HealthUp)
	}
	return f
}

func startFront(t *testing.T, f *fleet.Fleet, change ...func(*Options)) *front {
	t.Helper()
	fr := &front{t: t, fleet: f}
	o := Options{Fleet: f, AccessLog: func(r *Record) {
		fr.mu.Lock()
		defer fr.mu.Unlock()
		fr.record = append(fr.record, *r)
	}, Logger: slog.New(slog.NewTextHandler(lockedWriter{fr}, nil))}
	o.Retries = 2
	for _, c := range change {
		c(&o)
	}
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	fr.s = s
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	fr.addr = ln.Addr().String()
	served := make(chan error, 1)
	go func() { served <- s.Serve(ln) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := s.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
		fr.balanced()
	})
	return fr
}

// balanced fails the test if any ticket is still out.
func (f *front) balanced() {
	f.t.Helper()
	for _, b := range f.fleet.Backends() {
		if l7, _ := b.Load(); l7 != 0 || b.Requests() != 0 {
			f.t.Errorf("backend %s has %d tokens and %d requests left", b.Name(), l7, b.Requests())
		}
	}
	if n := f.s.bodyMemory.Load(); n != 0 {
		f.t.Errorf("%d bytes of bodies are still charged", n)
	}
}

// settle waits until no ticket is out.
func (f *front) settle() {
	f.t.Helper()
	eventually(f.t, "tickets to come back", func() bool {
		for _, b := range f.fleet.Backends() {
			if l7, _ := b.Load(); l7 != 0 || b.Requests() != 0 {
				return false
			}
		}
		return true
	})
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(wait); !ok(); {
		if time.Now().After(end) {
			t.Fatalf("waited in vain for %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

// records waits for n lines of the access log and returns them.
func (f *front) records(n int) []Record {
	f.t.Helper()
	eventually(f.t, fmt.Sprintf("%d records", n), func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return len(f.record) >= n
	})
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]Record(nil), f.record...)
}

// client is a connection to the front end.
type client struct {
	net.Conn
	t  *testing.T
	br *bufio.Reader
}

func (f *front) dial() *client {
	f.t.Helper()
	c, err := net.Dial("tcp", f.addr)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(2 * wait))
	return &client{c, f.t, bufio.NewReader(c)}
}

func (c *client) send(s string) {
	c.t.Helper()
	if _, err := io.WriteString(c, s); err != nil {
		c.t.Fatalf("send: %v", err)
	}
}

func post(path, body string, headers ...string) string {
	h := strings.Join(headers, "\r\n")
	if h != "" {
		h += "\r\n"
	}
	return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: api.test\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n%s",
		path, h, len(body), body)
}

const chatPath = "/v1/chat/completions"

func chat(extra string) string {
	return `{"model":"m","messages":[{"role":"user","content":"hi"}]` + extra + `}`
}

// head reads the head of an answer to a request with that method.
func (c *client) head(method string) *http.Response {
	c.t.Helper()
	r, err := http.ReadResponse(c.br, &http.Request{Method: method})
	if err != nil {
		c.t.Fatalf("read answer: %v", err)
	}
	return r
}

type answer struct {
	*http.Response
	body string
	err  error // of the body
}

func (c *client) answer(method string) answer {
	c.t.Helper()
	r := c.head(method)
	b, err := io.ReadAll(r.Body)
	return answer{r, string(b), err}
}

// do sends one request on a connection of its own.
func (f *front) do(request string) answer {
	f.t.Helper()
	c := f.dial()
	defer c.Close()
	c.send(request)
	method, _, _ := strings.Cut(request, " ")
	return c.answer(method)
}

// broken sends a request whose answer must not come whole, and returns what there was of it.
func (f *front) broken(request string) string {
	f.t.Helper()
	c := f.dial()
	defer c.Close()
	c.send(request)
	r, err := http.ReadResponse(c.br, &http.Request{Method: "POST"})
	if err != nil {
		return ""
	}
	b, err := io.ReadAll(r.Body)
	if err == nil {
		f.t.Errorf("a broken answer looks whole: %d %q", r.StatusCode, b)
	}
	return string(b)
}

func (a answer) want(t *testing.T, status int, code string) {
	t.Helper()
	if a.err != nil {
		t.Errorf("body: %v", a.err)
	}
	if a.StatusCode != status || code != "" && !strings.Contains(a.body, `"code":"`+code+`"`) {
		t.Errorf("got %d %s, want %d %s", a.StatusCode, a.body, status, code)
	}
	if code != "" {
		if ct := a.Header.Get("Content-Type"); ct != "application/json" {
			t.Errorf("content type of an error is %q", ct)
		}
		if a.Header.Get("X-Request-Id") == "" {
			t.Error("an error without request id")
		}
	}
}

// closed reports whether the front end has closed the connection.
func (c *client) closed() bool {
	_, err := c.br.ReadByte()
	return err == io.EOF || err != nil && !os.IsTimeout(err)
}

var counterOnce = sync.OnceValues(func() (*tokens.Counter, error) { return tokens.New(tokens.Options{}) })

func withCounter(t testing.TB) func(*Options) {
	t.Helper()
	c, err := counterOnce()
	if err != nil {
		t.Fatal(err)
	}
	return func(o *Options) { o.Counter = c }
}
