// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/metrics"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a daemon of one backend.
type fake struct {
	notReady error
	admin    fleet.AdminState
	pinned   bool
	reload   error
	reloads  int
}

func (f *fake) options() Options {
	return Options{
		Registry: metrics.NewRegistry("test"),
		Version:  "test",
		Ready:    func() error { return f.notReady },
		Status:   func() Status { return Status{Version: "test", Kernel: Kernel{Mode: "nat", Reason: "no permission"}} },
		Backends: func() []BackendStatus { return []BackendStatus{{Name: "gpu-1", ID: 1, Admin: f.admin.String()}} },
		Sessions: func(limit int) ([]Session, error) {
			if !f.pinned {
				return nil, nil
			}
			return []Session{{Client: "10.0.0.7", Backend: "gpu-1", State: "pinned", Tokens: int64(limit)}}, nil
		},
		Flows:  func(int) ([]Flow, error) { return nil, fmt.Errorf("list flows: kernel path %w", ErrUnavailable) },
		Config: func() any { return map[string]any{"listen": "0.0.0.0:8080"} },
		SetAdmin: func(name string, state fleet.AdminState) error {
			if name != "gpu-1" {
				return fmt.Errorf("backend %q %w", name, ErrNotFound)
			}
			f.admin = state
			return nil
		},
		Unpin: func(a netip.Addr) error {
			if !f.pinned || a != netip.MustParseAddr("10.0.0.7") {
				return fmt.Errorf("session of %s %w", a, ErrNotFound)
			}
			f.pinned = false
			return nil
		},
		Reload: func() error { f.reloads++; return f.reload },
	}
}

// start serves on listeners until the test ends.
func start(t *testing.T, o Options, listeners ...net.Listener) *Server {
	t.Helper()
	s := New(o)
	done := make(chan error, len(listeners))
	for _, ln := range listeners {
		go func() { done <- s.Serve(ln) }()
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := s.Shutdown(ctx); err != nil {
			t.Error(err)
		}
		for range listeners {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	})
	return s
}

func listen(t *testing.T, addr string) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

type answer struct {
	status int
	header http.Header
	body   string
}

// request makes one request; header is pairs, Host among them.
func request(t *testing.T, method, addr, path string, header ...string) answer {
	t.Helper()
	req, err := http.NewRequest(method, "http://"+addr+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		if header[i] == "Host" {
			req.Host = header[i+1]
		}
		req.Header.Set(header[i], header[i+1])
	}
	c := http.Client{
		Transport:     &http.Transport{DisableKeepAlives: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{resp.StatusCode, resp.Header, strings.TrimSpace(string(body))}
}

func TestRoutes(t *testing.T) {
	f := &fake{}
	ln := listen(t, "127.0.0.1:0")
	start(t, f.options(), ln)
	for _, test := range []struct {
		method, path string
		status       int
		body         string
	}{
		{"GET", "/healthz", 200, `{"status":"ok","version":"test"}`},
		{"HEAD", "/healthz", 200, ``},
		{"GET", "/readyz", 200, `{"ready":true}`},
		{"GET", "/metrics", 200, `shunt_build_info{`},
		{"GET", "/api/v1/status", 200, `"reason":"no permission"`},
		{"GET", "/api/v1/backends", 200, `[{"name":"gpu-1",`},
		{"GET", "/api/v1/sessions", 200, `[]`},
		{"GET", "/api/v1/sessions?limit=0", 400, `{"error":"limit \"0\" is not between`},
		{"GET", "/api/v1/sessions?limit=x", 400, `{"error":"limit`},
		{"GET", "/api/v1/flows", 503, `{"error":"list flows: kernel path not available"}`},
		{"GET", "/api/v1/config", 200, `{"listen":"0.0.0.0:8080"}`},
		{"POST", "/api/v1/backends/gpu-1/drain", 200, `{"admin":"drain","name":"gpu-1"}`},
		{"POST", "/api/v1/backends/gpu-9/drain", 404, `{"error":"backend \"gpu-9\" not found"}`},
		{"POST", "/api/v1/backends/gpu-1/stop", 404, `{"error":"\"stop\" is not ready, drain or maint"}`},
		{"POST", "/api/v1/backends/gpu-1/invalid", 404, `{"error":`},
		{"GET", "/api/v1/backends/gpu-1/drain", 405, `{"error":"method not allowed"}`},
		{"POST", "/api/v1/status", 405, `{"error":"method not allowed"}`},
		{"GET", "/-/reload", 405, `{"error":"method not allowed"}`},
		{"DELETE", "/api/v1/sessions/10.0.0.9", 404, `{"error":"session of 10.0.0.9 not found"}`},
		{"DELETE", "/api/v1/sessions/nobody", 400, `{"error":"\"nobody\" is not an IP address"}`},
		{"DELETE", "/api/v1/sessions/fe80::1%25eth0", 400, `is not an IP address`},
		{"POST", "/-/reload", 200, `{"reloaded":true}`},
		{"GET", "/", 404, `{"error":"not found"}`},
		{"GET", "/debug/pprof/", 404, `{"error":"not found"}`},
		{"GET", "/api/v1/../../metrics", 404, `{"error":"not found"}`},
		{"GET", "//metrics", 404, `{"error":"not found"}`},
		{"GET", "/metrics/", 404, `{"error":"not found"}`},
	} {
		got := request(t, test.method, ln.Addr().String(), test.path)
		if got.status != test.status || !strings.Contains(got.body, test.body) {
			t.Errorf("%s %s: %d %.200s, want %d %s", test.method, test.path, got.status, got.body, test.status, test.body)
		}
		if ct := got.header.Get("Content-Type"); test.path != "/metrics" && ct != "application/json" {
			t.Errorf("%s %s: content type %q", test.method, test.path, ct)
		}
		if test.status == 405 && got.header.Get("Allow") == "" {
			t.Errorf("%s %s: no Allow", test.method, test.path)
		}
	}
	if f.admin != fleet.AdminDrain || f.reloads != 1 {
		t.Errorf("state %v, %d reloads: a refused request had an effect or a good one none", f.admin, f.reloads)
	}
	f.notReady, f.reload = errors.New("no backend is up"), errors.New("shunt.yaml:1:1: unknown key")
	if got := request(t, "GET", ln.Addr().String(), "/readyz"); got.status != 503 || got.body != `{"ready":false,"reason":"no backend is up"}` {
		t.Errorf("not ready: %+v", got)
	}
	if got := request(t, "GET", ln.Addr().String(), "/healthz"); got.status != 200 {
		t.Errorf("not ready is not dead: %+v", got)
	}
	if got := request(t, "POST", ln.Addr().String(), "/-/reload"); got.status != 422 || !strings.Contains(got.body, "unknown key") {
		t.Errorf("bad reload: %+v", got)
	}
}

// A daemon without a part answers 404 there and serves the rest.
func TestNoCallbacks(t *testing.T) {
	ln := listen(t, "127.0.0.1:0")
	start(t, Options{}, ln)
	for path, status := range map[string]int{"/healthz": 200, "/readyz": 200, "/metrics": 404, "/api/v1/status": 404, "/api/v1/flows": 404} {
		if got := request(t, "GET", ln.Addr().String(), path); got.status != status {
			t.Errorf("%s: %+v", path, got)
		}
	}
}

// Each row is a way to reach each kind of path, and what must come of it.
func TestAccess(t *testing.T) {
	f := &fake{}
	loop, wide := listen(t, "127.0.0.1:0"), listen(t, "0.0.0.0:0")
	start(t, f.options(), loop, wide)
	o := f.options()
	o.Token = "marker"
	withToken, loopToken := listen(t, "0.0.0.0:0"), listen(t, "127.0.0.1:0")
	start(t, o, withToken, loopToken)
	port := func(ln net.Listener) string { return fmt.Sprintf("127.0.0.1:%d", ln.Addr().(*net.TCPAddr).Port) }
	for _, test := range []struct {
		name                   string
		ln                     net.Listener
		header                 []string
		health, status, reload int
	}{
		{"loopback", loop, nil, 200, 200, 200},
		{"loopback by name", loop, []string{"Host", "localhost:9090"}, 200, 200, 200},
		{"loopback v6 literal", loop, []string{"Host", "[::1]:9090"}, 200, 200, 200},
		{"rebound name", loop, []string{"Host", "evil.example:9090"}, 403, 403, 403},
		{"rebound name that looks local", loop, []string{"Host", "127.0.0.1.evil.example"}, 403, 403, 403},
		{"other address in Host", loop, []string{"Host", "10.0.0.1:9090"}, 403, 403, 403},
		{"cross-origin page", loop, []string{"Origin", "http://evil.example"}, 200, 200, 403},
		{"cross-site fetch", loop, []string{"Sec-Fetch-Site", "cross-site"}, 200, 200, 403},
		{"wide without token", wide, nil, 200, 403, 403},
		{"wide without token, any header", wide, []string{"Authorization", "Bearer "}, 200, 403, 403},
		{"wide by service name", wide, []string{"Host", "shunt.svc:9090"}, 200, 403, 403},
		{"wide, token missing", withToken, nil, 200, 401, 401},
		{"wide, token wrong", withToken, []string{"Authorization", "Bearer markes"}, 200, 401, 401},
		{"wide, token right", withToken, []string{"Authorization", "Bearer marker"}, 200, 200, 200},
		{"loopback, token missing", loopToken, nil, 200, 401, 401},
		{"loopback, token right", loopToken, []string{"Authorization", "Bearer marker"}, 200, 200, 200},
	} {
		addr := port(test.ln)
		got := [3]int{
			request(t, "GET", addr, "/healthz", test.header...).status,
			request(t, "GET", addr, "/api/v1/status", test.header...).status,
			request(t, "POST", addr, "/-/reload", test.header...).status,
		}
		if want := [3]int{test.health, test.status, test.reload}; got != want {
			t.Errorf("%s: health, status, reload = %v, want %v", test.name, got, want)
		}
	}
	if a, b := request(t, "GET", port(withToken), "/api/v1/status"), request(t, "GET", port(withToken), "/api/v1/status", "Authorization", "Bearer x"); a.body != b.body || strings.Contains(a.body, "marker") {
		t.Errorf("answers tell a missing token from a wrong one: %s, %s", a.body, b.body)
	}
}

func TestClient(t *testing.T) {
	f := &fake{pinned: true}
	path := filepath.Join(t.TempDir(), "admin.sock")
	unix, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	tcp := listen(t, "127.0.0.1:0")
	start(t, f.options(), unix, tcp)
	t.Setenv("HTTP_PROXY", "http://127.0.0.1:1")
	ctx := context.Background()
	for _, addr := range []string{path, tcp.Addr().String(), fmt.Sprintf(":%d", tcp.Addr().(*net.TCPAddr).Port)} {
		f.pinned = true
		c := Client{Addr: addr}
		st, err := c.Status(ctx)
		if err != nil || st.Version != "test" || st.Kernel.Reason != "no permission" {
			t.Errorf("%s: status %+v, %v", addr, st, err)
		}
		if b, err := c.Backends(ctx); err != nil || len(b) != 1 || b[0].Name != "gpu-1" {
			t.Errorf("%s: backends %+v, %v", addr, b, err)
		}
		if s, err := c.Sessions(ctx, 7); err != nil || len(s) != 1 || s[0].Tokens != 7 {
			t.Errorf("%s: sessions %+v, %v", addr, s, err)
		}
		var refused *RefusedError
		if _, err := c.Flows(ctx, 0); !errors.As(err, &refused) || refused.Status != 503 {
			t.Errorf("%s: flows: %v", addr, err)
		}
		if raw, err := c.Config(ctx); err != nil || !json.Valid(raw) {
			t.Errorf("%s: config %s, %v", addr, raw, err)
		}
		if err := c.SetAdmin(ctx, "gpu-1", fleet.AdminMaint); err != nil || f.admin != fleet.AdminMaint {
			t.Errorf("%s: maint: %v, %v", addr, f.admin, err)
		}
		if err := c.SetAdmin(ctx, "../x/y?z", fleet.AdminMaint); !errors.As(err, &refused) || !strings.Contains(err.Error(), `"../x/y?z" not found`) {
			t.Errorf("%s: odd name: %v", addr, err)
		}
		if err := c.Unpin(ctx, "10.0.0.7"); err != nil || f.pinned {
			t.Errorf("%s: unpin: %v", addr, err)
		}
		if err := c.Reload(ctx); err != nil {
			t.Errorf("%s: reload: %v", addr, err)
		}
	}
}

func TestClientErrors(t *testing.T) {
	other := listen(t, "127.0.0.1:0")
	go func() { _ = http.Serve(other, http.NotFoundHandler()) }()
	defer other.Close()
	for addr, want := range map[string]string{
		"127.0.0.1:1":         "is the daemon running?",
		"/nonexistent/socket": "is the daemon running?",
		"not an address":      "neither host:port nor the path of a socket",
		other.Addr().String(): "status 404",
		"/" + t.TempDir()[1:]: "connection refused",
	} {
		_, err := Client{Addr: addr}.Status(context.Background())
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want %q", addr, err, want)
		}
	}
}

func TestListenUnix(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "s")
	ln, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(path)
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	if _, err := ListenUnix(path); err == nil || !strings.Contains(err.Error(), "another process answers") {
		t.Errorf("second listener: %v", err)
	}
	// A process that died leaves its socket behind.
	stale := filepath.Join(dir, "stale")
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	_ = dead.Close()
	again, err := ListenUnix(stale)
	if err != nil {
		t.Fatalf("stale socket: %v", err)
	}
	// Closing removes its own path only.
	if err := os.Rename(path, stale); err != nil {
		t.Fatal(err)
	}
	_ = again.Close()
	if _, err := os.Stat(stale); err != nil {
		t.Errorf("closing removed another listener's socket: %v", err)
	}
	_ = ln.Close()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("keep"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ListenUnix(file); err == nil || !strings.Contains(err.Error(), "not a socket") {
		t.Errorf("a file: %v", err)
	}
	if data, _ := os.ReadFile(file); string(data) != "keep" {
		t.Error("the file is gone")
	}
}

// TestNames: every field of the API has a snake_case name of its own.
func TestNames(t *testing.T) {
	for _, v := range []any{Status{}, Kernel{}, BackendStatus{}, Session{}, Flow{}, Readiness{}} {
		typ, seen := reflect.TypeOf(v), map[string]bool{}
		for i := range typ.NumField() {
			name, _, _ := strings.Cut(typ.Field(i).Tag.Get("json"), ",")
			if name == "" || name != strings.ToLower(name) || seen[name] {
				t.Errorf("%s.%s: JSON name %q", typ.Name(), typ.Field(i).Name, name)
			}
			seen[name] = true
		}
	}
}
