// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/pkg/admin"
	"github.com/shunt-lb/shunt/pkg/datapath"
	"github.com/shunt-lb/shunt/pkg/netdev/lab"
)

// need skips the test with the reason, or fails it where nothing may be left out.
func need(t testing.TB, err error) {
	t.Helper()
	if err == nil {
		return
	}
	if os.Getenv("SHUNT_REQUIRE_ALL") == "1" {
		t.Fatalf("needed here: %v", err)
	}
	t.Skip(err.Error())
}

// binaries is a folder with shunt and shuntsim: those that SHUNT_BIN and SHUNTSIM_BIN name, or built here. Every user can
// run them there, whatever the folder that they came from allows.
var binaries = sync.OnceValues(func() (dir string, err error) {
	dir, err = os.MkdirTemp("", "shunt-e2e-")
	if err != nil {
		return "", err
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		return dir, err
	}
	for name, env := range map[string]string{"shunt": "SHUNT_BIN", "shuntsim": "SHUNTSIM_BIN"} {
		to := filepath.Join(dir, name)
		if from := os.Getenv(env); from != "" {
			b, err := os.ReadFile(from)
			if err != nil {
				return dir, fmt.Errorf("copy %s: %w", env, err)
			}
			if err := os.WriteFile(to, b, 0o755); err != nil {
				return dir, err
			}
			continue
		}
		cmd := exec.Command("go", "build", "-buildvcs=false", "-o", to, "../../cmd/"+name)
		if out, err := cmd.CombinedOutput(); err != nil {
			return dir, fmt.Errorf("build %s: %w\n%s", name, err, out)
		}
	}
	return dir, nil
})

var binariesUsed atomic.Bool

func TestMain(m *testing.M) {
	code := m.Run()
	if binariesUsed.Load() {
		if dir, _ := binaries(); dir != "" {
			_ = os.RemoveAll(dir)
		}
	}
	os.Exit(code)
}

func binary(t testing.TB, name string) string {
	t.Helper()
	binariesUsed.Store(true)
	dir, err := binaries()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, name)
}

// wait polls until ok, for at most the given time: generous, since machines are slow, and no time is asserted.
func wait(t testing.TB, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("after %v still not: %s", limit, what)
}

// world is a testbed with a bpffs of its own.
type world struct {
	*lab.Testbed
	t     testing.TB
	lab   *lab.Lab
	bpffs string
	n     int
}

// newWorld makes clients, one balancer and engines; on a machine that cannot, the test is skipped.
func newWorld(t testing.TB, clients, engines int) *world {
	t.Helper()
	need(t, lab.Probe())
	need(t, datapath.Probe())
	l := lab.New()
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	bed, err := l.Steering(lab.SteeringOptions{Clients: clients, Engines: engines})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{Testbed: bed, t: t, lab: l, bpffs: t.TempDir()}
	need(t, unix.Mount("bpf", w.bpffs, "bpf", 0, "mode=0700"))
	t.Cleanup(func() {
		_ = l.Close() // processes first: they hold the maps
		if err := unix.Unmount(w.bpffs, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return w
}

// proc is a process of the test with its output, which is shown when the test fails.
type proc struct {
	*lab.Process
	out *output
}

type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

func (w *world) start(ns *lab.Namespace, attr *syscall.SysProcAttr, name string, args ...string) *proc {
	w.t.Helper()
	p := &proc{out: &output{}}
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = p.out, p.out
	cmd.SysProcAttr = attr
	var err error
	if p.Process, err = ns.Start(cmd); err != nil {
		w.t.Fatal(err)
	}
	w.n++
	label := fmt.Sprintf("%s #%d", filepath.Base(name), w.n)
	w.t.Cleanup(func() {
		if w.t.Failed() {
			w.t.Logf("--- %s %s (%v)\n%s", label, strings.Join(args, " "), p.Cmd.ProcessState, tail(p.out.String(), 6000))
		}
	})
	return p
}

func tail(s string, n int) string {
	if len(s) > n {
		return "..." + s[len(s)-n:]
	}
	return s
}

// engine starts a simulated engine on port 8000 of engine host i, of both families, and waits for it.
func (w *world) engine(i int, args ...string) *proc {
	w.t.Helper()
	h := w.Engines[i]
	args = append([]string{"engine", "--listen", "[::]:8000", "--name", engineName(i), "--speed", "50"}, args...)
	p := w.start(h.Namespace, nil, binary(w.t, "shuntsim"), args...)
	wait(w.t, 20*time.Second, engineName(i)+" listens", func() bool {
		c, err := h.Dial(context.Background(), "tcp", netip.AddrPortFrom(h.V4, 8000).String())
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	})
	return p
}

func engineName(i int) string { return fmt.Sprintf("engine-%d", i+1) }

// daemon is a running shunt.
type daemon struct {
	*proc
	w     *world
	host  *lab.Host
	admin *http.Client
	file  string
}

// vipConfig is the usual configuration: target engine, the balancer's address of the family as the VIP.
func (w *world) vipConfig(v6 bool, more string) string {
	var b strings.Builder
	vip := w.Balancer.V4
	if v6 {
		vip = w.Balancer.V6
	}
	fmt.Fprintf(&b, "listen: '%s'\nadmin: {listen: 127.0.0.1:9090}\npools:\n  - name: main\n    policy: session\n    health: {interval: 200ms, timeout: 1s, fall: 2}\n    backends:\n", netip.AddrPortFrom(vip, 8080))
	for i, e := range w.Engines {
		a := e.V4
		if v6 {
			a = e.V6
		}
		fmt.Fprintf(&b, "      - {name: %s, url: 'http://%s'}\n", engineName(i), netip.AddrPortFrom(a, 8000))
	}
	fmt.Fprintf(&b, "steering: {mode: nat, target: engine, interfaces: [%s], vip: '%s', bpffs: %s, require: true%s}\n", w.Balancer.Iface, vip, w.bpffs, more)
	return b.String()
}

// serve starts a shunt on the host with the configuration and waits until it is ready.
func (w *world) serve(h *lab.Host, config string) *daemon {
	w.t.Helper()
	d := w.launch(h, nil, config)
	d.waitReady()
	return d
}

func (d *daemon) waitReady() {
	d.w.t.Helper()
	wait(d.w.t, 30*time.Second, "shunt is ready", func() bool {
		select {
		case <-d.Done():
			d.w.t.Fatalf("shunt ended: %v\n%s", d.Wait(), d.out)
		default:
		}
		return d.status("/readyz") == http.StatusOK
	})
}

// launch starts a shunt without waiting for it.
func (w *world) launch(h *lab.Host, attr *syscall.SysProcAttr, config string) *daemon {
	w.t.Helper()
	w.n++
	f, err := os.CreateTemp("", "shunt-*.yaml") // not in TempDir, which other users may not enter
	if err != nil {
		w.t.Fatal(err)
	}
	file := f.Name()
	w.t.Cleanup(func() { _ = os.Remove(file) })
	if err := errors.Join(f.Close(), os.WriteFile(file, []byte(config), 0o644), os.Chmod(file, 0o644)); err != nil {
		w.t.Fatal(err)
	}
	d := &daemon{w: w, host: h, file: file}
	d.proc = w.start(h.Namespace, attr, binary(w.t, "shunt"), "serve", "--config", file)
	d.admin = httpClient(h.Namespace, false)
	return d
}

// restart starts the daemon anew with the same file.
func (d *daemon) restart() *daemon {
	d.w.t.Helper()
	config, err := os.ReadFile(d.file)
	if err != nil {
		d.w.t.Fatal(err)
	}
	return d.w.serve(d.host, string(config))
}

func (d *daemon) get(path string) ([]byte, int) {
	resp, err := d.admin.Get("http://127.0.0.1:9090" + path)
	if err != nil {
		return []byte(err.Error()), 0
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	return body, resp.StatusCode
}

func (d *daemon) status(path string) int { _, s := d.get(path); return s }

func decode[T any](d *daemon, path string) T {
	d.w.t.Helper()
	var v T
	body, status := d.get(path)
	if status != http.StatusOK {
		d.w.t.Fatalf("GET %s: %d %s", path, status, body)
	}
	if err := json.Unmarshal(body, &v); err != nil {
		d.w.t.Fatalf("GET %s: %v in %s", path, err, body)
	}
	return v
}

func (d *daemon) backends() map[string]admin.BackendStatus {
	d.w.t.Helper()
	m := map[string]admin.BackendStatus{}
	for _, b := range decode[[]admin.BackendStatus](d, "/api/v1/backends") {
		m[b.Name] = b
	}
	return m
}

// metric returns the sum of a metric's series whose labels contain all the given texts.
func (d *daemon) metric(name string, labels ...string) float64 {
	d.w.t.Helper()
	body, status := d.get("/metrics")
	if status != http.StatusOK {
		d.w.t.Fatalf("GET /metrics: %d %s", status, body)
	}
	sum := 0.0
lines:
	for line := range strings.Lines(string(body)) {
		series, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if i := strings.LastIndexByte(strings.TrimSpace(line), ' '); i > 0 {
			series, value = strings.TrimSpace(line)[:i], strings.TrimSpace(line)[i+1:]
		}
		base, rest, _ := strings.Cut(series, "{")
		if base != name {
			continue
		}
		for _, l := range labels {
			if !strings.Contains(rest, l) {
				continue lines
			}
		}
		var f float64
		if _, err := fmt.Sscan(value, &f); err == nil {
			sum += f
		}
	}
	return sum
}

// weights waits until nothing is charged to any backend.
func (d *daemon) weightsReturn() {
	d.w.t.Helper()
	var last map[string]admin.BackendStatus
	defer func() {
		if d.w.t.Failed() {
			d.w.t.Logf("weights: %+v", last)
		}
	}()
	wait(d.w.t, 20*time.Second, "all weights are 0", func() bool {
		last = d.backends()
		for _, b := range last {
			if b.L7Tokens != 0 || b.KernelTokens != 0 || b.Requests != 0 {
				return false
			}
		}
		return true
	})
}

// httpClient returns a client inside the namespace. Without keep every request has a connection of its own.
func httpClient(ns *lab.Namespace, keep bool) *http.Client {
	return &http.Client{Timeout: 60 * time.Second, Transport: &http.Transport{DialContext: ns.Dial, DisableKeepAlives: !keep}}
}

// drain reads the answer to its end, so that the client keeps the connection.
func drain(resp *http.Response) {
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
}

// reply is one answer of a chat.
type reply struct {
	status  int
	header  http.Header
	text    string
	prompt  int
	cached  int
	closed  bool // the answer asked to reconnect
	backend string
}

type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// chat sends one request over a connection of its own from the host, as an SDK would: keep-alive is offered.
func (w *world) chat(from *lab.Host, url string, messages []message, maxTokens int, header ...string) reply {
	w.t.Helper()
	r, err := tryChat(from, url, messages, maxTokens, header...)
	if err != nil {
		w.t.Fatal(err)
	}
	return r
}

func tryChat(from *lab.Host, url string, messages []message, maxTokens int, header ...string) (reply, error) {
	body, _ := json.Marshal(map[string]any{"model": "gpt-4", "messages": messages, "max_tokens": maxTokens})
	req, err := http.NewRequest(http.MethodPost, url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return reply{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	tr := &http.Transport{DialContext: from.Dial}
	defer tr.CloseIdleConnections()
	resp, err := (&http.Client{Transport: tr, Timeout: 60 * time.Second}).Do(req)
	if err != nil {
		return reply{}, err
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		return reply{}, err
	}
	var v struct {
		Choices []struct {
			Message message `json:"message"`
		} `json:"choices"`
		Usage struct {
			Prompt  int `json:"prompt_tokens"`
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	r := reply{status: resp.StatusCode, header: resp.Header, closed: resp.Close, backend: resp.Header.Get("x-shunt-backend")}
	if err := json.Unmarshal(raw, &v); err != nil {
		return r, fmt.Errorf("decode answer (status %d): %w in %s", resp.StatusCode, err, raw)
	}
	r.text = string(raw)
	if len(v.Choices) > 0 {
		r.text = v.Choices[0].Message.Content
	}
	r.prompt, r.cached = v.Usage.Prompt, v.Usage.Details.Cached
	return r, nil
}

// served is one request as an engine saw it.
type served struct {
	N         int    `json:"n"`
	Conn      int    `json:"conn"`
	Remote    string `json:"remote_addr"`
	Path      string `json:"path"`
	RequestID string `json:"x_request_id"`
	Cached    int    `json:"cached_tokens"`
}

func (w *world) served(i int) []served {
	w.t.Helper()
	h := w.Engines[i]
	resp, err := httpClient(h.Namespace, false).Get("http://" + netip.AddrPortFrom(h.V4, 8000).String() + "/debug/requests")
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	var v struct {
		Requests []served `json:"requests"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&v); err != nil {
		w.t.Fatal(err)
	}
	return v.Requests
}

// talk grows a conversation by one answered turn.
func talk(history []message, answer, next string) []message {
	return append(history, message{"assistant", answer}, message{"user", next})
}
