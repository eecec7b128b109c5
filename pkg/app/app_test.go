// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/shunt-lb/shunt/pkg/admin"
	"github.com/shunt-lb/shunt/pkg/config"
	"github.com/shunt-lb/shunt/pkg/metrics/metricstest"
	"github.com/shunt-lb/shunt/pkg/policy"
)

func TestMain(m *testing.M) {
	// fasthttp keeps one goroutine for the Date header, and lets a worker pool's janitor sleep out its interval.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*workerPool).Start.func2"),
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.updateServerDate.func1"))
}

// engine answers every request with its name.
func engine(t *testing.T, name string) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"engine":%q,"usage":{"prompt_tokens":3,"completion_tokens":2}}`, name)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) { b.mu.Lock(); defer b.mu.Unlock(); return b.b.Write(p) }
func (b *buffer) String() string              { b.mu.Lock(); defer b.mu.Unlock(); return b.b.String() }

// daemon is a running app with its file.
type daemon struct {
	t            *testing.T
	file         string
	front, admin string
	log          buffer
	states       buffer
	hangup       chan struct{}
	stop         context.CancelFunc
	done         chan error
	client       *http.Client
}

func start(t *testing.T, file, front, adminAddr string) *daemon {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	d := &daemon{t: t, file: file, front: front, admin: adminAddr, hangup: make(chan struct{}), stop: cancel, done: make(chan error, 1),
		client: &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}}
	cfg, err := config.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		d.done <- Run(ctx, cfg, Options{Version: "test", ConfigPath: file, Stderr: &d.log, ReloadRequests: d.hangup,
			Reload: func() (*config.Config, error) { return config.Load(file) },
			Notify: func(s string) { fmt.Fprintln(&d.states, s) }})
	}()
	t.Cleanup(func() {
		d.finish()
		if t.Failed() {
			t.Log(d.log.String())
		}
	})
	d.wait("ready", func() bool { _, status := d.get("/readyz"); return status == http.StatusOK })
	return d
}

func (d *daemon) finish() error {
	d.stop()
	select {
	case err := <-d.done:
		d.done <- err
		return err
	case <-time.After(20 * time.Second):
		d.t.Error("the daemon does not end")
		return nil
	}
}

func (d *daemon) wait(what string, ok func() bool) {
	d.t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if ok() {
			return
		}
	}
	d.t.Fatalf("still not: %s", what)
}

func (d *daemon) do(method, path string) (string, int) {
	req, err := http.NewRequest(method, "http://"+d.admin+path, nil)
	if err != nil {
		d.t.Fatal(err)
	}
	resp, err := d.client.Do(req)
	if err != nil {
		return err.Error(), 0
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return string(b), resp.StatusCode
}

func (d *daemon) get(path string) (string, int) { return d.do(http.MethodGet, path) }

func (d *daemon) backends() (list []admin.BackendStatus) {
	d.t.Helper()
	body, _ := d.get("/api/v1/backends")
	if err := json.Unmarshal([]byte(body), &list); err != nil {
		d.t.Fatalf("%v in %s", err, body)
	}
	return list
}

// chat sends one request and returns the answering engine and the status.
func (d *daemon) chat(content string) (string, int) {
	resp, err := d.client.Post("http://"+d.front+"/v1/chat/completions", "application/json",
		strings.NewReader(fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":%q}]}`, content)))
	if err != nil {
		return err.Error(), 0
	}
	defer resp.Body.Close()
	var v struct{ Engine string }
	b, _ := io.ReadAll(resp.Body)
	_ = json.Unmarshal(b, &v)
	return v.Engine, resp.StatusCode
}

func configText(front, adminAddr, more string, urls ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "listen: %s\nadmin: {listen: %s}\n%spools:\n  - name: p\n    policy: round_robin\n    health: {interval: 100ms}\n    backends:\n", front, adminAddr, more)
	for i, u := range urls {
		fmt.Fprintf(&b, "      - {name: e%d, url: '%s'}\n", i, u)
	}
	return b.String()
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestServeAndStop(t *testing.T) {
	front, adm, file := freePort(t), freePort(t), filepath.Join(t.TempDir(), "shunt.yaml")
	write(t, file, configText(front, adm, "", engine(t, "a"), engine(t, "b")))
	d := start(t, file, front, adm)
	seen := map[string]int{}
	for range 4 {
		name, status := d.chat("secret-marker")
		if status != http.StatusOK {
			t.Fatalf("status %d", status)
		}
		seen[name]++
	}
	if seen["a"] != 2 || seen["b"] != 2 {
		t.Errorf("round robin served %v", seen)
	}
	for _, path := range []string{"/healthz", "/metrics", "/api/v1/status", "/api/v1/sessions", "/api/v1/flows", "/api/v1/config"} {
		if body, status := d.get(path); status != http.StatusOK {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
	if err := d.finish(); err != nil {
		t.Errorf("run: %v", err)
	}
	if s := d.states.String(); !strings.Contains(s, "READY=1\nSTOPPING=1") {
		t.Errorf("service manager was told %q", s)
	}
	lines := 0
	for line := range strings.Lines(d.log.String()) {
		var v map[string]any
		if err := json.Unmarshal([]byte(line), &v); err != nil {
			t.Errorf("log line is no JSON: %s", line)
		}
		if v["path"] == "/v1/chat/completions" {
			lines++
			for _, k := range []string{"request_id", "backend", "reason", "status", "outcome", "prompt_tokens", "total_ms"} {
				if _, ok := v[k]; !ok {
					t.Errorf("access log line has no %s: %s", k, line)
				}
			}
		}
	}
	if lines != 4 {
		t.Errorf("%d access log lines for 4 requests", lines)
	}
	if strings.Contains(d.log.String(), "secret-marker") {
		t.Error("a prompt is in the log")
	}
}

// Every way of changing the file is seen: in place, renamed over, and by the links of a Kubernetes ConfigMap.
func TestConfigFileChangesAreSeen(t *testing.T) {
	a, b := engine(t, "a"), engine(t, "b")
	front, adm, dir := freePort(t), freePort(t), t.TempDir()
	version := func(n int, urls ...string) {
		v := filepath.Join(dir, fmt.Sprintf("v%d", n))
		if err := os.Mkdir(v, 0o755); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(v, "shunt.yaml"), configText(front, adm, "", urls...))
		link := filepath.Join(dir, "data.tmp")
		if err := os.Symlink(v, link); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(link, filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	version(1, a)
	file := filepath.Join(dir, "shunt.yaml")
	if err := os.Symlink(filepath.Join("..data", "shunt.yaml"), file); err != nil {
		t.Fatal(err)
	}
	d := start(t, file, front, adm)
	count := func(n int) func() bool { return func() bool { return len(d.backends()) == n } }
	d.wait("one backend", count(1))
	version(2, a, b)
	d.wait("two after the link was swapped", count(2))
	version(3, b)
	d.wait("one after it was swapped again", count(1))
	write(t, file, configText(front, adm, "", a, b))
	d.wait("two after writing in place", count(2))
	other := filepath.Join(dir, "v3", "new.yaml")
	write(t, other, configText(front, adm, "", a))
	if err := os.Rename(other, filepath.Join(dir, "v3", "shunt.yaml")); err != nil {
		t.Fatal(err)
	}
	d.wait("one after renaming over it", count(1))
	if name, status := d.chat("x"); status != http.StatusOK || name != "a" {
		t.Errorf("served by %q, status %d", name, status)
	}
}

func TestReloadIsWholeOrNotAtAll(t *testing.T) {
	a, b := engine(t, "a"), engine(t, "b")
	front, adm, file := freePort(t), freePort(t), filepath.Join(t.TempDir(), "shunt.yaml")
	good := configText(front, adm, "", a, b)
	write(t, file, good)
	d := start(t, file, front, adm)
	before := d.backends()
	for _, c := range []struct{ name, text, want string }{
		{"no YAML", "pools: [", "shunt.yaml:"},
		{"unknown key", good + "tpyo: 1\n", "tpyo"},
		{"no backend", configText(front, adm, ""), "backends"},
		{"another listener", configText(freePort(t), adm, "", a), "listen takes a restart"},
		{"another vocabulary", configText(front, adm, "tokens: {default: cl100k_base}\n", a), "tokens takes a restart"},
		{"a bad path", configText(front, adm, "paths: ['/v1/../admin']\n", a), "paths"},
	} {
		write(t, file, c.text)
		body, status := d.do(http.MethodPost, "/-/reload")
		if status != http.StatusUnprocessableEntity || !strings.Contains(body, c.want) {
			t.Errorf("%s: status %d, %s", c.name, status, body)
		}
		if s, _ := d.get("/api/v1/status"); !strings.Contains(s, `"reload_error":"reload: `) {
			t.Errorf("%s: status does not show the refusal: %s", c.name, s)
		}
		after := d.backends()
		if len(after) != 2 || after[0].ID != before[0].ID || after[1].Generation != before[1].Generation {
			t.Errorf("%s: a refused file changed the fleet: %+v", c.name, after)
		}
		if _, status := d.chat("x"); status != http.StatusOK {
			t.Errorf("%s: requests fail: %d", c.name, status)
		}
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(file, 0o644); err != nil {
		t.Fatal(err)
	}
	if body, status := d.do(http.MethodPost, "/-/reload"); status != http.StatusUnprocessableEntity || !strings.Contains(body, "not a regular file") {
		t.Errorf("a pipe: %d %s", status, body)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	write(t, file, configText(front, adm, "limits: {max_body: 1KiB}\n", a))
	if body, status := d.do(http.MethodPost, "/-/reload"); status != http.StatusOK {
		t.Fatalf("good file: %d %s", status, body)
	}
	if _, status := d.chat(strings.Repeat("x", 4096)); status != http.StatusRequestEntityTooLarge {
		t.Errorf("the new body limit is not in force: %d", status)
	}
	if s, _ := d.get("/api/v1/status"); strings.Contains(s, "reload_error") {
		t.Errorf("status keeps an old refusal: %s", s)
	}
}

// A backend that moves is checked before it serves, while the former one still does; the operator's word moves with it.
func TestReloadMovesABackend(t *testing.T) {
	front, adm, file := freePort(t), freePort(t), filepath.Join(t.TempDir(), "shunt.yaml")
	urls := []string{engine(t, "a"), engine(t, "b")}
	write(t, file, configText(front, adm, "", urls...))
	d := start(t, file, front, adm)
	if body, status := d.do(http.MethodPost, "/api/v1/backends/e0/drain"); status != http.StatusOK {
		t.Fatalf("drain: %d %s", status, body)
	}
	for i := range 8 {
		urls[i%2] = engine(t, "moved")
		write(t, file, configText(front, adm, "", urls...))
		if body, status := d.do(http.MethodPost, "/-/reload"); status != http.StatusOK {
			t.Fatalf("reload: %d %s", status, body)
		}
		if _, status := d.chat("x"); status != http.StatusOK {
			t.Errorf("move %d: status %d right after the reload", i, status)
		}
		if b := d.backends(); b[0].Admin != "drain" || b[1].Admin != "ready" || b[1].Health != "up" {
			t.Errorf("move %d: %s and %s, the second %s", i, b[0].Admin, b[1].Admin, b[1].Health)
		}
	}
}

// A hundred reloads under load lose no request and no count.
func TestReloadsUnderLoad(t *testing.T) {
	a, b, c := engine(t, "a"), engine(t, "b"), engine(t, "c")
	front, adm, file := freePort(t), freePort(t), filepath.Join(t.TempDir(), "shunt.yaml")
	write(t, file, configText(front, adm, "", a, b))
	d := start(t, file, front, adm)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, status := d.chat("load"); status != http.StatusOK {
					t.Errorf("status %d during reloads", status)
					return
				}
			}
		})
	}
	for i := range 100 {
		urls := []string{a, b}
		if i%2 == 0 {
			urls = append(urls, c)
		}
		write(t, file, configText(front, adm, "", urls...))
		if body, status := d.do(http.MethodPost, "/-/reload"); status != http.StatusOK {
			t.Fatalf("reload %d: %d %s", i, status, body)
		}
	}
	close(stop)
	wg.Wait()
	d.wait("all counts are 0", func() bool {
		for _, b := range d.backends() {
			if b.L7Tokens != 0 || b.Requests != 0 {
				return false
			}
		}
		return true
	})
}

func TestOperator(t *testing.T) {
	front, adm, file := freePort(t), freePort(t), filepath.Join(t.TempDir(), "shunt.yaml")
	write(t, file, configText(front, adm, "", engine(t, "a"), engine(t, "b")))
	d := start(t, file, front, adm)
	for _, c := range []struct {
		method, path string
		status       int
	}{
		{http.MethodPost, "/api/v1/backends/e0/drain", http.StatusOK},
		{http.MethodPost, "/api/v1/backends/nobody/drain", http.StatusNotFound},
		{http.MethodPost, "/api/v1/backends/e0/halt", http.StatusNotFound},
		{http.MethodDelete, "/api/v1/sessions/10.0.0.1", http.StatusServiceUnavailable},
	} {
		if body, status := d.do(c.method, c.path); status != c.status {
			t.Errorf("%s %s: %d %s, want %d", c.method, c.path, status, body, c.status)
		}
	}
	for range 6 {
		if name, _ := d.chat("x"); name != "b" {
			t.Errorf("a drained backend served: %q", name)
		}
	}
	if body, status := d.do(http.MethodPost, "/api/v1/backends/e1/maint"); status != http.StatusOK {
		t.Fatalf("maint: %d %s", status, body)
	}
	if _, status := d.chat("x"); status != http.StatusServiceUnavailable {
		t.Errorf("with no backend left: %d", status)
	}
	if body, status := d.get("/readyz"); status != http.StatusServiceUnavailable || !strings.Contains(body, "no backend") {
		t.Errorf("readyz: %d %s", status, body)
	}
	if _, status := d.get("/healthz"); status != http.StatusOK {
		t.Errorf("healthz: %d", status)
	}
}

func TestCannotStart(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for name, text := range map[string]string{
		"listener in use":      configText(taken.Addr().String(), freePort(t), "", engine(t, "a")),
		"admin in use":         configText(freePort(t), taken.Addr().String(), "", engine(t, "a")),
		"access log in a file": configText(freePort(t), freePort(t), "access_log: /nowhere/at/all.log\n", engine(t, "a")),
	} {
		cfg, err := config.Parse(name, []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		err = Run(ctx, cfg, Options{Stderr: io.Discard})
		if err == nil || ctx.Err() != nil {
			t.Errorf("%s: %v, %v", name, err, ctx.Err())
		}
		cancel()
	}
}

// Metrics have good names, and each policy that the schema names exists.
func TestMetricsAndPolicies(t *testing.T) {
	cfg, err := config.Parse("x", []byte(configText("127.0.0.1:1", "127.0.0.1:2", "", "http://127.0.0.1:3")))
	if err != nil {
		t.Fatal(err)
	}
	a, err := build(cfg, Options{Version: "test", Stderr: io.Discard})
	if err != nil {
		t.Fatal(err)
	}
	defer a.close()
	metricstest.Lint(t, a.registry)
	for _, name := range policy.Names() {
		text := strings.Replace(configText("127.0.0.1:1", "127.0.0.1:2", "", "http://127.0.0.1:3"), "round_robin", name, 1)
		c, err := config.Parse("x", []byte(text))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if err := c.Validate(Host()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
