// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"mime/multipart"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

func TestUnary(t *testing.T) {
	e := newEngine(t, func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			_ = p.json(200, `{"choices":[{"finish_reason":"stop","message":{"content":"hello"}}],"usage":{"prompt_tokens":9,"completion_tokens":3}}`)
		}
	})
	f := startFront(t, newFleet(t, "least_tokens", e.url()))
	c := f.dial()
	for i := range 3 {
		c.send(post(chatPath, chat(""), "X-Request-Id: my-id."+fmt.Sprint(i)))
		a := c.answer("POST")
		a.want(t, 200, "")
		if a.Header.Get(headerBackend) != "b1" || a.Header.Get(headerRequestID) != "my-id."+fmt.Sprint(i) {
			t.Errorf("headers %v", a.Header)
		}
	}
	if n := e.accepted.Load(); n != 1 {
		t.Errorf("three requests took %d backend connections", n)
	}
	for _, r := range f.records(3) {
		if r.Status != 200 || r.Outcome != OutcomeOK || r.Backend != "b1" || r.PromptTokens != 9 || r.OutputTokens != 3 ||
			r.Attempts != 1 || r.FinishReason != "stop" || r.Model != "other" || r.Path != chatPath || r.FirstByteTime <= 0 {
			t.Errorf("record %+v", r)
		}
	}
}

func TestHeadersAndTargetPassAsTheyCame(t *testing.T) {
	seen := make(chan *got, 10)
	e := newEngine(t, func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			seen <- g
			_ = p.send("HTTP/1.1 200 OK\r\nX-cUSTOM-answer: yes\r\nConnection: X-Secret-Hop\r\nX-Secret-Hop: 1\r\nKeep-Alive: timeout=5\r\nContent-Length: 2\r\nSet-Cookie: a=1\r\nSet-Cookie: a=2; Path=/x\r\nx-request-id: theirs\r\n\r\nok")
		}
	})
	f := startFront(t, newFleet(t, "round_robin", e.url()+"/base/"))
	target := "/v1/models/a%2Bb+c%20d?x=%2F..%2f&y=//"
	a := f.do("GET " + target + " HTTP/1.1\r\nHost: api.test:8080\r\nx-custom-ID: V1\r\nX-CuStOm-iD: v2\r\nConnection: keep-alive, X-Drop\r\nX-Drop: gone\r\n" +
		"TE: trailers\r\nUpgrade: h2c\r\nProxy-Authorization: p\r\nX-Forwarded-For: 6.6.6.6\r\nForwarded: for=6.6.6.6\r\nX-Real-IP: 6.6.6.6\r\nx-prefiller-host-port: evil:1\r\nAuthorization: Bearer k\r\n\r\n")
	a.want(t, 200, "")
	g := <-seen
	if g.line != "GET /base"+target+" HTTP/1.1" {
		t.Errorf("request line %q", g.line)
	}
	if !strings.Contains(g.header, "x-custom-ID: V1\r\n") || !strings.Contains(g.header, "X-CuStOm-iD: v2\r\n") {
		t.Errorf("header names changed:\n%s", g.header)
	}
	for _, name := range []string{"connection", "x-drop", "te", "upgrade", "proxy-authorization", "forwarded", "x-real-ip", "x-prefiller-host-port", "content-length", "transfer-encoding"} {
		if v := g.value(name); v != "" {
			t.Errorf("%s: %q reached the backend", name, v)
		}
	}
	if g.value("x-forwarded-for") != "127.0.0.1" || g.count("x-forwarded-for") != 1 || g.value("host") != "api.test:8080" || g.value("authorization") != "Bearer k" {
		t.Errorf("header:\n%s", g.header)
	}
	if g.value("x-request-id") == "" || g.value("x-request-id") != a.Header.Get("X-Request-Id") {
		t.Errorf("request id %q and %q", g.value("x-request-id"), a.Header.Get("X-Request-Id"))
	}
	if a.Header.Get("X-Custom-Answer") != "yes" || a.Header.Get("X-Secret-Hop") != "" || a.Header.Get("Keep-Alive") != "" || len(a.Header["Set-Cookie"]) != 2 || a.Header.Get(headerRequestID) == "theirs" {
		t.Errorf("answer's header: %v", a.Header)
	}
}

func TestStripAuthorization(t *testing.T) {
	seen := make(chan *got, 1)
	e := newEngine(t, func(p *peer) {
		seen <- p.request()
		_ = p.json(200, "{}")
	})
	f := startFront(t, newFleet(t, "round_robin", e.url()), func(o *Options) { o.StripAuthorization = true })
	f.do(post(chatPath, chat(""), "authorization: Bearer secret", "X-Api-Key: secret", "api-key: secret")).want(t, 200, "")
	if g := <-seen; strings.Contains(g.header, "secret") {
		t.Errorf("a credential reached the backend:\n%s", g.header)
	}
}

// The engine answers with the hash of what it got, so that no byte can have changed on the way.
func TestBodiesAreByteIdentical(t *testing.T) {
	e := newEngine(t, func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			_ = p.json(200, fmt.Sprintf(`{"sha":"%x"}`, sha256.Sum256(g.body)))
		}
	})
	f := startFront(t, newFleet(t, "least_tokens", e.url()))
	c := f.dial()
	rng := rand.New(rand.NewPCG(1, 2))
	shapes := []string{`1.0`, `1e5`, `123456789012345678901234567890`, `"\u00e9\n\/"`, `"é"`, `[ 1,  2 ,{"b":1,"a":2}]`, `{"z":1,"a":{"y" : null}}`, `"\ud83d\ude00"`, `-0`, `true`}
	for i := range 1000 {
		var b strings.Builder
		b.WriteString(`{ "tools":` + shapes[rng.IntN(len(shapes))])
		for k := range rng.IntN(6) {
			fmt.Fprintf(&b, ", %s\"k%d\":%s", strings.Repeat(" ", rng.IntN(3)), k, shapes[rng.IntN(len(shapes))])
		}
		if rng.IntN(10) == 0 {
			fmt.Fprintf(&b, `,"pad":"%s"`, strings.Repeat("x", rng.IntN(200_000)))
		}
		b.WriteString(`,"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("hi ", rng.IntN(2000)) + `"}]}` + strings.Repeat("\n", rng.IntN(2)))
		body := b.String()
		if i%3 == 0 { // chunked on the way in
			var w strings.Builder
			for rest := body; len(rest) > 0; {
				n := min(1+rng.IntN(3000), len(rest))
				fmt.Fprintf(&w, "%X;ext=1\r\n%s\r\n", n, rest[:n])
				rest = rest[n:]
			}
			c.send("POST " + chatPath + " HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + w.String() + "0\r\nX-Trailer: 1\r\n\r\n")
		} else {
			c.send(post(chatPath, body))
		}
		a := c.answer("POST")
		if want := fmt.Sprintf(`{"sha":"%x"}`, sha256.Sum256([]byte(body))); a.StatusCode != 200 || a.body != want {
			t.Fatalf("round %d: %d %s, want %s", i, a.StatusCode, a.body, want)
		}
	}
}

func TestRouting(t *testing.T) {
	named := func(name string) *engine {
		return newEngine(t, func(p *peer) {
			for g := p.request(); g != nil; g = p.request() {
				_ = p.json(200, `{"engine":"`+name+`"}`)
			}
		})
	}
	one, two := named("one"), named("two")
	twoPools := applyFleet(t,
		fleet.PoolSpec{Name: "p1", Models: []string{"alpha", "org/alpha-2"}, Chooser: chooser(t, "least_tokens"), Backends: []fleet.BackendSpec{spec(t, "b1", one.url())}},
		fleet.PoolSpec{Name: "p2", Models: []string{"beta"}, Chooser: chooser(t, "least_tokens"), Backends: []fleet.BackendSpec{spec(t, "b2", two.url())}})
	f := startFront(t, twoPools)
	anyPool := startFront(t, newFleet(t, "least_tokens", one.url()))
	both := startFront(t, applyFleet(t,
		fleet.PoolSpec{Name: "p1", Models: []string{"alpha"}, Chooser: chooser(t, "least_tokens"), Backends: []fleet.BackendSpec{spec(t, "b1", one.url())}},
		fleet.PoolSpec{Name: "p2", Chooser: chooser(t, "least_tokens"), Backends: []fleet.BackendSpec{spec(t, "b2", two.url())}}))
	form := func(path string, parts ...string) string {
		var b strings.Builder
		w := multipart.NewWriter(&b)
		for _, p := range parts {
			name, value, _ := strings.Cut(p, "=")
			if file, text, ok := strings.Cut(p, ";"); ok {
				fw, _ := w.CreateFormFile(file, "a.wav")
				_, _ = io.WriteString(fw, text)
				continue
			}
			_ = w.WriteField(name, value)
		}
		_ = w.Close()
		return strings.Replace(post(path, b.String()), "application/json", w.FormDataContentType(), 1)
	}
	tests := []struct {
		name    string
		f       *front
		request string
		status  int
		want    string
	}{
		{"first", f, post(chatPath, `{"model":"alpha","messages":[]}`), 200, "one"},
		{"second", f, post(chatPath, `{"messages":[],"model":"beta"}`), 200, "two"},
		{"unknown", f, post(chatPath, `{"model":"gamma","messages":[]}`), 404, `"code":"model_not_found"`},
		{"missing", f, post(chatPath, `{"messages":[]}`), 400, `"param":"model"`},
		{"any", anyPool, post(chatPath, `{"model":"gpt-4","messages":[]}`), 200, "one"},
		{"any, missing", anyPool, post(chatPath, `{"messages":[]}`), 200, "one"},
		{"infer", f, post("/v2/models/beta/infer", `{}`), 200, "two"},
		{"infer, unknown", f, post("/v2/models/gamma/infer", `{}`), 404, "model_not_found"},
		{"other route", f, post("/v1/rerank", `{"query":"q","model":"beta"}`), 200, "two"},
		{"other route, unknown", f, post("/v1/rerank", `{"model":"gamma"}`), 404, "model_not_found"},
		{"other route, missing", f, post("/v1/rerank", `{"query":"q"}`), 400, `"param":"model"`},
		{"other route, twice", f, post("/v1/rerank", `{"model":"alpha","model":"beta"}`), 400, "duplicate_key"},
		{"other route, not json", f, post("/v1/rerank", `not json`), 400, `"param":"model"`},
		{"other route, encoded", f, post("/v1/rerank", "\x1f\x8b", "Content-Encoding: gzip"), 415, "unsupported_content_encoding"},
		{"other route, any", anyPool, post("/v1/rerank", `not json`), 200, "one"},
		{"other route, listed", both, post("/v1/rerank", `{"model":"alpha"}`), 200, "one"},
		{"other route, not listed", both, post("/v1/rerank", `{"model":"gamma"}`), 200, "two"},
		{"other route, unnamed", both, post("/v1/moderations", `{"input":"q"}`), 200, "two"},
		{"other route, unnamed and encoded", both, post("/v1/moderations", "\x1f\x8b", "Content-Encoding: gzip"), 200, "two"},
		{"count of tokens", f, post("/v1/messages/count_tokens", `{"model":"beta","messages":[]}`), 200, "two"},
		{"form", f, form("/v1/audio/transcriptions", "file;speech", "model=beta"), 200, "two"},
		{"form, missing", f, form("/v1/audio/transcriptions", "file;model=beta"), 400, `"param":"model"`},
		{"form, twice", f, form("/v1/audio/transcriptions", "model=alpha", "model=beta"), 400, "duplicate_key"},
		{"form, unnamed", both, form("/v1/audio/transcriptions", "file;speech"), 200, "two"},
		{"stored response", f, "GET /v1/responses/resp_1 HTTP/1.1\r\nHost: h\r\n\r\n", 404, "no_route"},
		{"stored response, deleted", f, "DELETE /v1/responses/resp_1 HTTP/1.1\r\nHost: h\r\n\r\n", 404, "no_route"},
		{"stored response, any", anyPool, "GET /v1/responses/resp_1 HTTP/1.1\r\nHost: h\r\n\r\n", 200, "one"},
		{"stored response, unlisted pool", both, "GET /v1/responses/resp_1 HTTP/1.1\r\nHost: h\r\n\r\n", 200, "two"},
		{"options", f, "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: h\r\n\r\n", 200, "one"},
		{"model by path", f, "GET /v1/models/org/alpha-2 HTTP/1.1\r\nHost: h\r\n\r\n", 200, "one"},
		{"models of one pool come from its backend", anyPool, "GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n", 200, `"engine":"one"`},
		{"models of several pools", f, "GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n", 200, `{"object":"list","data":[{"id":"alpha",`},
		{"encoded, several pools", f, post(chatPath, "\x1f\x8b", "Content-Encoding: gzip"), 415, "unsupported_content_encoding"},
		{"encoded, one pool", anyPool, post(chatPath, "\x1f\x8b", "Content-Encoding: gzip"), 200, "one"},
		{"not json", anyPool, post(chatPath, `{"model"`), 400, "invalid_json"},
		{"twice", anyPool, post(chatPath, `{"model":"a","mo\u0064el":"b"}`), 400, "duplicate_key"},
		{"admin path", anyPool, post("/v1/load_lora_adapter", `{}`), 404, "unknown_url"},
		{"admin path of sglang", anyPool, post("/flush_cache", `{}`), 404, "unknown_url"},
		{"metrics of the engine", anyPool, "GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n", 404, "unknown_url"},
		{"method", anyPool, "PATCH /v1/models HTTP/1.1\r\nHost: h\r\n\r\n", 405, "method_not_allowed"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a := tt.f.do(tt.request)
			if a.StatusCode != tt.status || !strings.Contains(a.body, tt.want) {
				t.Errorf("got %d %s, want %d with %s", a.StatusCode, a.body, tt.status, tt.want)
			}
		})
	}
	for _, r := range f.records(3) {
		if r.Model != "alpha" && r.Model != "beta" && r.Model != "org/alpha-2" && r.Model != "other" && r.Model != "" {
			t.Errorf("a model that is not configured is in the record: %q", r.Model)
		}
	}
}

func TestHeadAndEmptyAnswers(t *testing.T) {
	e := newEngine(t, func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			switch {
			case strings.HasPrefix(g.line, "HEAD"):
				_ = p.send("HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n")
			case strings.HasPrefix(g.line, "OPTIONS"):
				_ = p.send("HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n")
			case strings.HasPrefix(g.line, "DELETE"):
				_ = p.send("HTTP/1.1 304 Not Modified\r\nContent-Length: 77\r\n\r\n")
			default:
				_ = p.send("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n")
				_ = p.json(200, `{"ok":1}`)
			}
		}
	})
	f := startFront(t, newFleet(t, "round_robin", e.url()))
	c := f.dial()
	for range 3 {
		c.send("HEAD /v1/models HTTP/1.1\r\nHost: h\r\n\r\n")
		if a := c.answer("HEAD"); a.StatusCode != 200 || a.Header.Get("Content-Length") != "1234" {
			t.Errorf("HEAD: %d %v", a.StatusCode, a.Header)
		}
		c.send("OPTIONS /v1/models HTTP/1.1\r\nHost: h\r\n\r\n")
		if a := c.answer("OPTIONS"); a.StatusCode != 204 || a.body != "" || a.Header.Get("Content-Length") != "" {
			t.Errorf("OPTIONS: %d %q %v", a.StatusCode, a.body, a.Header)
		}
		c.send("DELETE /v1/responses/x HTTP/1.1\r\nHost: h\r\n\r\n")
		if a := c.answer("DELETE"); a.StatusCode != 304 || a.body != "" {
			t.Errorf("304: %d %q", a.StatusCode, a.body)
		}
		c.send("GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n")
		if a := c.answer("GET"); a.StatusCode != 200 || a.body != `{"ok":1}` {
			t.Errorf("GET: %d %q", a.StatusCode, a.body)
		}
	}
	if n := e.accepted.Load(); n != 1 {
		t.Errorf("%d backend connections, want 1", n)
	}
}

func TestHTTP10(t *testing.T) {
	e := newEngine(t, func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			if strings.HasPrefix(g.line, "GET") {
				_ = p.json(200, `{"plain":1}`)
				continue
			}
			_ = p.send(streamHead + chunk(event("a")) + chunk(event("b")) + "0\r\n\r\n")
		}
	})
	f := startFront(t, newFleet(t, "round_robin", e.url()))
	c := f.dial()
	body := chat(`,"stream":true`)
	c.send(fmt.Sprintf("POST %s HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s", chatPath, len(body), body))
	raw, err := io.ReadAll(c.br)
	head, rest, _ := strings.Cut(string(raw), "\r\n\r\n")
	if err != nil || rest != event("a")+event("b") || strings.Contains(strings.ToLower(head), "transfer-encoding") || !strings.Contains(head, "Connection: close") {
		t.Errorf("got %q, %v", raw, err)
	}
	if a := f.do("GET /v1/models HTTP/1.0\r\n\r\n"); a.body != `{"plain":1}` {
		t.Errorf("plain: %q", a.body)
	}
	for _, r := range f.records(2) {
		if r.Outcome != OutcomeOK {
			t.Errorf("record %+v", r)
		}
	}
	if a := f.do("GET /v1/models HTTP/1.2\r\nHost: h\r\n\r\n"); a.StatusCode != http.StatusHTTPVersionNotSupported {
		t.Errorf("HTTP/1.2: %d", a.StatusCode)
	}
}

func TestPipelinedRequests(t *testing.T) {
	release := make(chan struct{})
	e := newEngine(t, func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			if string(g.body) == chat(`,"user":"second"`) {
				<-release
			}
			_ = p.json(200, string(g.body))
		}
	})
	f := startFront(t, newFleet(t, "round_robin", e.url()))
	c := f.dial()
	c.send(post(chatPath, chat(`,"user":"first"`)) + post(chatPath, chat(`,"user":"second"`)) + post(chatPath, chat(`,"user":"third"`)))
	// The first answer must not wait for the second.
	if a := c.answer("POST"); !strings.Contains(a.body, "first") {
		t.Errorf("first: %q", a.body)
	}
	close(release)
	for _, want := range []string{"second", "third"} {
		if a := c.answer("POST"); !strings.Contains(a.body, want) {
			t.Errorf("%s: %q", want, a.body)
		}
	}
}

func TestPeerProbe(t *testing.T) {
	probed := make(chan string, 1)
	f := startFront(t, newFleet(t, "round_robin", "http://127.0.0.1:1"), func(o *Options) {
		o.PeerInfo = func() []byte { return []byte(`{"product":"shunt"}`) }
		o.OnProbe = func(a netip.Addr) { probed <- a.String() }
	})
	if a := f.do("GET /.well-known/shunt HTTP/1.1\r\nHost: h\r\n\r\n"); a.StatusCode != 200 || a.body != `{"product":"shunt"}` {
		t.Errorf("%d %s", a.StatusCode, a.body)
	}
	select {
	case <-probed:
		t.Error("a request without the header counted as a probe")
	default:
	}
	f.do("GET /.well-known/shunt HTTP/1.1\r\nHost: h\r\nShunt-Ingress: 1\r\n\r\n").want(t, 200, "")
	if got := <-probed; got != "127.0.0.1" {
		t.Errorf("probe from %s", got)
	}
	f.do("GET /none HTTP/1.1\r\nHost: h\r\n\r\n").want(t, 404, "")
	if r := f.records(1); len(r) != 1 || r[0].Path != "/none" {
		t.Errorf("probes are in the access log: %+v", r)
	}
}

// The list of models is what can be asked for: of each pool that is up, its own and what its backends list of it.
func TestModelListIsTheUnion(t *testing.T) {
	named := func(name string) func(p *peer) {
		return func(p *peer) {
			for p.request() != nil {
				_ = p.json(200, `"`+name+`"`)
			}
		}
	}
	one, two, three := newEngine(t, named("one")), newEngine(t, named("two")), newEngine(t, named("three"))
	f := applyFleet(t,
		fleet.PoolSpec{Name: "p", Models: []string{"base", "alias"}, Chooser: chooser(t, "round_robin"),
			Backends: []fleet.BackendSpec{spec(t, "one", one.url()), spec(t, "two", two.url())}},
		fleet.PoolSpec{Name: "q", Models: []string{"other"}, Chooser: chooser(t, "round_robin"), Backends: []fleet.BackendSpec{spec(t, "three", three.url())}})
	fr := startFront(t, f)
	model := func(name, parent string) fleet.Model {
		return fleet.Model{Name: name, Parent: parent, Entry: []byte(`{"id":"` + name + `","own":1}`)}
	}
	f.SetModels(f.Backend("one"), []fleet.Model{model("base", ""), model("hidden", "")})
	f.SetModels(f.Backend("two"), []fleet.Model{model("base", ""), model("lora/1", "base")})
	list := func(want string) {
		t.Helper()
		if a := fr.do("GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n"); a.body != `{"object":"list","data":[`+want+`]}` {
			t.Errorf("models %s, want %s", a.body, want)
		}
	}
	made := func(name, pool string) string {
		return `{"id":"` + name + `","object":"model","created":0,"owned_by":"` + pool + `"}`
	}
	ask := func(name string, status int, want ...string) {
		t.Helper()
		for range 6 {
			a := fr.do(post(chatPath, strings.Replace(chat(""), `"m"`, `"`+name+`"`, 1)))
			if a.StatusCode != status || status == 200 && !slices.Contains(want, strings.Trim(a.body, `"`)) {
				t.Errorf("%s: %d %s, want %d by %v", name, a.StatusCode, a.body, status, want)
			}
		}
	}
	list(`{"id":"base","own":1},` + made("alias", "p") + `,{"id":"lora/1","own":1},` + made("other", "q"))
	ask("base", 200, "one", "two")
	ask("lora/1", 200, "two")
	ask("other", 200, "three")
	ask("hidden", 404)
	if a := fr.do("GET /v1/models/lora/1 HTTP/1.1\r\nHost: h\r\n\r\n"); a.body != `"two"` {
		t.Errorf("the adapter's own entry: %d %s", a.StatusCode, a.body)
	}
	f.Backend("two").SetHealth(fleet.HealthDown)
	f.Backend("three").SetHealth(fleet.HealthDown)
	list(`{"id":"base","own":1},` + made("alias", "p"))
	ask("base", 200, "one")
	ask("lora/1", 503)
}
