// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/admin"
	"github.com/shunt-lb/shunt/pkg/app"
	"github.com/shunt-lb/shunt/pkg/config"
	"github.com/shunt-lb/shunt/pkg/fleet"
)

var update = flag.Bool("update", false, "write the golden files")

type outcome struct {
	code     int
	out, err string
}

// shunt runs a command line.
func shunt(t *testing.T, stdin string, args ...string) outcome {
	t.Helper()
	return shuntEnv(t, map[string]string{}, stdin, args...)
}

func shuntEnv(t *testing.T, vars map[string]string, stdin string, args ...string) outcome {
	t.Helper()
	var out, errs bytes.Buffer
	e := &env{stdin: strings.NewReader(stdin), stdout: &out, stderr: &errs, getenv: func(k string) string { return vars[k] },
		serve: func(context.Context, *config.Config, app.Options) error {
			t.Error("the daemon was started")
			return nil
		}}
	code := e.main(t.Context(), args)
	return outcome{code, out.String(), errs.String()}
}

// golden compares an output with a file of testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (-update writes it):\n%s\nwant:\n%s", file, got, want)
	}
}

// daemon is an admin listener with made-up answers.
type daemon struct {
	addr   string
	status admin.Status
	admin  map[string]fleet.AdminState
	reload error
}

func newDaemon(t *testing.T, ln net.Listener) *daemon {
	t.Helper()
	d := &daemon{addr: ln.Addr().String(), admin: map[string]fleet.AdminState{}, status: admin.Status{
		Version: "1.2.3", UptimeSeconds: 11000, Listen: "10.0.0.1:8080", Ready: true, ConfigFile: "/etc/shunt/shunt.yaml",
		Backends: 2, BackendsUp: 1, Requests: 1234, InflightRequests: 5, SteeredConnections: 99, SteeredFlows: 3, Pins: 2,
		Kernel: admin.Kernel{Live: true, Mode: "nat", Target: "engine", Interfaces: []string{"eth0 (xdp)"}, VIPs: []string{"10.0.0.1:8080"},
			NATPorts: "20000-32767", Instance: "default", PinDir: "/sys/fs/bpf/shunt/default/v1"},
		Tokens: admin.Tokens{CacheHitRatio: 0.75, EstimatedBytes: 12, Calibration: []admin.Calibration{
			{Pool: "llama", Model: "llama-3", Factor: 1.0731, Applied: true, Confidence: 0.925, Spread: 0.02, Samples: 40, Rejected: 3},
			{Pool: "llama", Model: "other", Factor: 1, Confidence: 0.1, Samples: 2}}},
	}}
	s := admin.New(admin.Options{
		Status: func() admin.Status { return d.status },
		Backends: func() []admin.BackendStatus {
			return []admin.BackendStatus{
				{Name: "gpu-1", Pool: "llama", ID: 1, URL: "http://10.0.0.11:8000", Steer: "10.0.0.11:8080", Health: "up", Admin: "ready",
					L7Tokens: 4096, KernelTokens: 512, Limit: 100000, Requests: 3, SteeredFlows: 2, Steerable: true},
				{Name: "gpu-2", Pool: "llama", ID: 2, URL: "http://10.0.0.12:8000", Health: "down", Admin: "drain",
					Detail: "get /health: \x1b[31mrefused\nby\thost"},
			}
		},
		Sessions: func(limit int) ([]admin.Session, error) {
			list := []admin.Session{
				{Client: "10.0.9.7", VIP: "10.0.0.1:8080", Backend: "gpu-1", State: "pinned", Sessions: 1, Tokens: 700, ExpiresSeconds: 95.2, Connections: 4, OpenFlows: 1},
				{Client: "2001:db8::7", VIP: "[2001:db8::1]:8080", State: "mixed", Sessions: 2},
				{Client: "10.0.9.9", VIP: "10.0.0.1:8080", Backend: "gpu-2", State: "static", Sessions: 1},
			}
			return list[:min(limit, len(list))], nil
		},
		Flows: func(int) ([]admin.Flow, error) {
			return []admin.Flow{{Client: "10.0.9.7:41000", VIP: "10.0.0.1:8080", Backend: "gpu-1", NATPort: 20017, State: "open",
				AgeSeconds: 12.34, IdleSeconds: 0.25, Packets: 120, Bytes: 65000, Charge: 700}}, nil
		},
		SetAdmin: func(name string, s fleet.AdminState) error {
			if !strings.HasPrefix(name, "gpu-") {
				return fmt.Errorf("backend %q: %w", name, admin.ErrNotFound)
			}
			d.admin[name] = s
			return nil
		},
		Unpin: func(a netip.Addr) error {
			if a != netip.MustParseAddr("10.0.9.7") {
				return fmt.Errorf("address %s has no pin: %w", a, admin.ErrNotFound)
			}
			return nil
		},
		Reload: func() error { return d.reload },
	})
	done := make(chan error, 1)
	go func() { done <- s.Serve(ln) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := s.Shutdown(ctx); err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return d
}

func loopback(t *testing.T) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

func TestTables(t *testing.T) {
	d := newDaemon(t, loopback(t))
	for _, cmd := range []string{"status", "backends", "sessions", "flows"} {
		got := shunt(t, "", cmd, "--admin", d.addr)
		if got.code != exitDone || got.err != "" {
			t.Errorf("%s: %+v", cmd, got)
		}
		golden(t, cmd, got.out)
		got = shunt(t, "", cmd, "--json", "--admin", d.addr)
		if got.code != exitDone || got.err != "" {
			t.Errorf("%s --json: %+v", cmd, got)
		}
		golden(t, cmd+"-json", got.out)
	}
	if got := shunt(t, "", "sessions", "--limit", "1", "--admin", d.addr); strings.Count(got.out, "\n") != 2 {
		t.Errorf("sessions --limit 1: %+v", got)
	}
	d.status.Ready, d.status.NotReady = false, "no backend is up"
	d.status.ReloadError = "shunt.yaml:3:1: unknown key\n   3 | x"
	d.status.Kernel = admin.Kernel{Mode: "nat", Reason: "load programs: operation not permitted (needs CAP_BPF)"}
	golden(t, "status-not-live", shunt(t, "", "status", "--admin", d.addr).out)
	d.status.Kernel = admin.Kernel{Mode: "off"}
	if got := shunt(t, "", "status", "--admin", d.addr).out; !strings.Contains(got, "kernel path    off\n") {
		t.Errorf("status off:\n%s", got)
	}
}

func TestControl(t *testing.T) {
	d := newDaemon(t, loopback(t))
	d.reload = errors.New("reload: shunt.yaml:3:1: unknown key\n     3 | x\n       | ^")
	for _, test := range []struct {
		args     string
		code     int
		out, err string
	}{
		{"drain gpu-1", 0, "gpu-1: drain\n", ""},
		{"maint gpu-2 gpu-3", 0, "gpu-2: maint\ngpu-3: maint\n", ""},
		{"ready gpu-1", 0, "gpu-1: ready\n", ""},
		{"drain gpu-4 none", 1, "gpu-4: drain\n", "shunt: backend \"none\": not found\n"},
		{"unpin 10.0.9.7", 0, "10.0.9.7: unpinned\n", ""},
		{"unpin 10.0.9.8", 1, "", "shunt: address 10.0.9.8 has no pin: not found\n"},
		{"reload", 1, "", "shunt: reload: shunt.yaml:3:1: unknown key\n     3 | x\n       | ^\n"},
		{"unpin gpu-1", 2, "", "shunt: \"gpu-1\" is not an IP address (see shunt unpin --help)\n"},
		{"drain", 2, "", "shunt: requires at least 1 arg(s), only received 0 (see shunt drain --help)\n"},
		{"flows x", 2, "", "shunt: unknown command \"x\" for \"shunt flows\" (see shunt flows --help)\n"},
	} {
		got := shunt(t, "", append(strings.Fields(test.args), "--admin", d.addr)...)
		if got != (outcome{test.code, test.out, test.err}) {
			t.Errorf("%s:\n%+v, want\n%+v", test.args, got, outcome{test.code, test.out, test.err})
		}
	}
	if d.admin["gpu-1"] != fleet.AdminNone || d.admin["gpu-3"] != fleet.AdminMaint || d.admin["gpu-4"] != fleet.AdminDrain {
		t.Errorf("states: %v", d.admin)
	}
	d.reload = nil
	if got := shunt(t, "", "reload", "--admin", d.addr); got != (outcome{0, "reloaded\n", ""}) {
		t.Errorf("reload: %+v", got)
	}
}

// The daemon is found by flag, by environment, on a socket, and its absence has a code of its own.
func TestAdminAddress(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "admin.sock")
	ln, err := admin.ListenUnix(socket)
	if err != nil {
		t.Fatal(err)
	}
	newDaemon(t, ln)
	if got := shunt(t, "", "status", "--admin", socket); got.code != exitDone {
		t.Errorf("socket: %+v", got)
	}
	if got := shuntEnv(t, map[string]string{"SHUNT_ADMIN": socket}, "", "status"); got.code != exitDone {
		t.Errorf("environment: %+v", got)
	}
	token := filepath.Join(t.TempDir(), "token")
	if got := shunt(t, "", "status", "--admin", socket, "--token-file", token); got.code != exitNotDone || !strings.Contains(got.err, "read admin token") {
		t.Errorf("no token file: %+v", got)
	}
	for _, addr := range []string{"127.0.0.1:1", socket + ".none"} {
		got := shunt(t, "", "drain", "x", "--admin", addr)
		if got.code != exitUnreachable || !strings.Contains(got.err, "is the daemon running?") || strings.Count(got.err, "\n") != 1 {
			t.Errorf("%s: %+v", addr, got)
		}
	}
}

func TestUsage(t *testing.T) {
	for _, test := range []struct {
		args, err string
	}{
		{"frobnicate", `unknown command "frobnicate"`},
		{"status --frob", "unknown flag: --frob"},
		{"serve", "give --config FILE, or --backend URL"},
		{"serve --config f --backend http://a", "--backend does not go with --config"},
		{"serve --config f --admin off", "--admin does not go with --config"},
		{"serve x", `unknown command "x"`},
		{"check", "accepts 1 arg(s)"},
		{"check a b", "accepts 1 arg(s)"},
		{"count --model m --encoding e", "none of the others can be"},
		{"count a b", "accepts at most 1 arg(s)"},
		{"cleanup --config f --instance x", "none of the others can be"},
	} {
		got := shunt(t, "", strings.Fields(test.args)...)
		if got.code != exitUsage || got.out != "" || !strings.Contains(got.err, test.err) || strings.Count(got.err, "\n") != 1 {
			t.Errorf("%s: %+v, want %s", test.args, got, test.err)
		}
	}
	got := shunt(t, "", "--help")
	if got.code != exitDone || got.err != "" {
		t.Errorf("--help: %+v", got)
	}
	golden(t, "help", got.out)
	if got := shunt(t, "", "version"); got.code != exitDone || !strings.HasPrefix(got.out, "shunt dev (go1.") {
		t.Errorf("version: %+v", got)
	}
}

func TestCheck(t *testing.T) {
	dir := t.TempDir()
	good, bad := filepath.Join(dir, "good.yaml"), filepath.Join(dir, "bad.yaml")
	write := func(file, text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(good, "admin: {listen: 0.0.0.0:9090}\npools: [{backends: [{url: 'http://127.0.0.1:8000'}]}]\n")
	write(bad, "listn: :8080\npools:\n  - policy: sesion\n    backends: [{url: 'http://127.0.0.1:8000'}]\n")
	got := shunt(t, "", "check", good)
	if got.code != exitDone || got.out != good+": ok\n" || !strings.HasPrefix(got.err, "warning: "+good+":1:17: admin.listen: ") {
		t.Errorf("good: %+v", got)
	}
	got = shunt(t, "", "check", bad)
	if got.code != exitNotDone || got.out != "" {
		t.Errorf("bad: %+v", got)
	}
	golden(t, "check-bad", strings.ReplaceAll(got.err, dir+"/", ""))
	if got = shunt(t, "pools: x", "check", "-"); got.code != exitNotDone || !strings.HasPrefix(got.err, "stdin:1:8: pools: ") {
		t.Errorf("standard input: %+v", got)
	}
	if got = shunt(t, "", "check", filepath.Join(dir, "none")); got.code != exitNotDone || !strings.HasPrefix(got.err, "shunt: read configuration: ") {
		t.Errorf("missing: %+v", got)
	}
	if got = shunt(t, "", "check", "--reference"); got.code != exitDone || got.out != config.Reference() {
		t.Errorf("reference: %+v", got)
	}
	got = shunt(t, "", "check", "--effective", good)
	if got.code != exitDone {
		t.Errorf("effective: %+v", got)
	}
	if again := shunt(t, got.out, "check", "--effective", "-"); again.out != got.out {
		t.Errorf("effective configuration read again:\n%s\nwas:\n%s", again.out, got.out)
	}
}

// tokenizerFile writes a tokenizer of 256 bytes and two merges, "he" and "hel".
func tokenizerFile(t *testing.T) string {
	t.Helper()
	vocab, next := map[string]int{}, rune(0x100)
	for b := range 256 {
		r := rune(b)
		if b < '!' || b > '~' && b < 0xa1 || b == 0xad {
			r, next = next, next+1
		}
		vocab[string(r)] = b
	}
	vocab["he"], vocab["hel"] = 256, 257
	text, err := json.Marshal(map[string]any{
		"pre_tokenizer": map[string]any{"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
		"model":         map[string]any{"type": "BPE", "vocab": vocab, "merges": []string{"h e", "he l"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "tokenizer.json")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestCountWithATokenizerFile(t *testing.T) {
	file := tokenizerFile(t)
	for _, test := range []struct {
		stdin, args string
		want        outcome
	}{
		{"hello", "count --tokenizer " + file, outcome{0, "3\n", ""}},
		{`{"model":"gpt-4o","messages":[{"role":"user","content":"hello"}]}`, "count --request --tokenizer " + file, outcome{0, "10\n", ""}},
	} {
		if got := shunt(t, test.stdin, strings.Fields(test.args)...); got != test.want {
			t.Errorf("%s: %+v, want %+v", test.args, got, test.want)
		}
	}
	for _, args := range []string{"--tokenizer " + file + ".none", "--tokenizer " + os.Args[0], "--encoding cl100k_base --tokenizer " + file} {
		if got := shunt(t, "x", strings.Fields("count "+args)...); got.code == exitDone || got.out != "" || !strings.HasPrefix(got.err, "shunt: ") {
			t.Errorf("%s: %+v", args, got)
		}
	}
}

func TestCount(t *testing.T) {
	file := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(file, []byte("hello world"), 0o600); err != nil {
		t.Fatal(err)
	}
	request := `{"model":"gpt-4o","messages":[{"role":"user","content":"hello world"}]}`
	for _, test := range []struct {
		stdin, args string
		want        outcome
	}{
		{"", "count " + file, outcome{0, "2\n", ""}},
		{"hello world", "count", outcome{0, "2\n", ""}},
		{"hello world", "count -", outcome{0, "2\n", ""}},
		{"", "count", outcome{0, "0\n", ""}},
		{"こんにちは世界", "count --model gpt-4o", outcome{0, "2\n", ""}},
		{"こんにちは世界", "count --encoding cl100k_base", outcome{0, "4\n", ""}},
		{request, "count --request", outcome{0, "9\n", ""}},
		{request, "count --request --model gpt-4", outcome{0, "9\n", ""}},
		{request, "count --request --model Qwen/Qwen3-8B", outcome{0, "10\n", ""}},
		{request, "count --request --family llama3", outcome{0, "12\n", ""}},
		{request, "count --request --family gpt", outcome{1, "", "shunt: unknown family \"gpt\" (known: [openai claude llama3 qwen deepseek gemma mistral])\n"}},
		{"hello world", "count --json", outcome{0, `{
  "tokens": 2,
  "estimated": false,
  "encoding": "o200k_base"
}
`, ""}},
		{`{"model":"gpt-4o","messages":[{"role":"user","content":[{"type":"text","text":"hello world"},{"type":"image_url","image_url":{"url":"http://x","detail":"low"}}]}],
			"tools":[{"type":"function","function":{"name":"hello"}}]}`, "count --request --json", outcome{0, `{
  "tokens": 115,
  "estimated": true,
  "encoding": "o200k_base",
  "model": "gpt-4o",
  "api": "chat",
  "family": "openai",
  "parts": {
    "text": 2,
    "ids": 0,
    "tools": 21,
    "images": 85,
    "media": 0,
    "framing": 7,
    "unread": 0,
    "estimated": true
  }
}
`, ""}},
		{"x", "count --encoding gpt2", outcome{1, "", "shunt: unknown encoding \"gpt2\" (known: cl100k_base, o200k_base, o200k_harmony)\n"}},
	} {
		got := shunt(t, test.stdin, strings.Fields(test.args)...)
		if got != test.want {
			t.Errorf("%s < %q: %+v, want %+v", test.args, test.stdin, got, test.want)
		}
	}
	for _, in := range []string{"", "{", "[]", strings.Repeat("[", 10000)} {
		if got := shunt(t, in, "count", "--request"); got.code != exitNotDone || got.out != "" || !strings.HasPrefix(got.err, "shunt: read request: ") || strings.Count(got.err, "\n") != 1 {
			t.Errorf("bad request %.20q: %+v", in, got)
		}
	}
	if got := shunt(t, "", "count", file+".none"); got.code != exitNotDone || !strings.HasPrefix(got.err, "shunt: read input: ") {
		t.Errorf("missing file: %+v", got)
	}
}
