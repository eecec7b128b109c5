// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

var testHost = Host{
	LocalPortRange: [2]int{32768, 60999},
	Addrs:          []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("10.0.0.1")},
	Interfaces:     []string{"lo", "eth0"},
	Policies:       []string{"least_cost", "least_requests", "least_tokens", "round_robin", "session"},
}

// marks are the comments "# want MESSAGE" or "# warn MESSAGE" of a file: the beginnings of the problems that must be
// reported for that line.
func marks(data, word string) map[int][]string {
	m := map[int][]string{}
	for i, line := range strings.Split(data, "\n") {
		parts := strings.Split(line, "# "+word+" ")
		for _, s := range parts[1:] {
			m[i+1] = append(m[i+1], strings.TrimSpace(s))
		}
	}
	return m
}

func compare(t *testing.T, what string, want map[int][]string, got []Problem) {
	t.Helper()
	for _, p := range got {
		text := p.Message
		if p.Path != "" {
			text = p.Path + ": " + text
		}
		i := slices.IndexFunc(want[p.Line], func(s string) bool { return strings.HasPrefix(text, s) })
		if i < 0 {
			t.Errorf("%s not expected:\n%s", what, p)
			continue
		}
		want[p.Line] = slices.Delete(want[p.Line], i, i+1)
		if p.Column < 1 || p.Column > len(p.Source)+1 || !strings.Contains(p.Source[p.Column-1:], "# "+what+" ") {
			t.Errorf("%s at column %d is not before its mark:\n%s", what, p.Column, p)
		}
	}
	for line, left := range want {
		for _, s := range left {
			t.Errorf("%s missing: line %d: %s", what, line, s)
		}
	}
}

func TestFiles(t *testing.T) {
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal("no test files", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			c, warnings, err := Check(file, data, testHost)
			if strings.HasSuffix(file, ".bad.yaml") {
				var e *Error
				if !errors.As(err, &e) || c != nil {
					t.Fatalf("not refused: %v", err)
				}
				compare(t, "want", marks(string(data), "want"), e.Problems)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			compare(t, "warn", marks(string(data), "warn"), warnings)
			if err := c.Validate(testHost); err != nil {
				t.Errorf("validate: %v", err)
			}
			if again := c.Warnings(testHost); !reflect.DeepEqual(again, warnings) {
				t.Errorf("warnings differ the second time: %v", again)
			}
			roundTrip(t, c)
		})
	}
}

// roundTrip: the configuration in force, written out, means the same.
func roundTrip(t *testing.T, c *Config) {
	t.Helper()
	text, err := c.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	again, err := Parse("effective", text)
	if err != nil {
		t.Fatalf("written configuration is refused: %v\n%s", err, text)
	}
	if a, b := fmt.Sprint(c.Effective()), fmt.Sprint(again.Effective()); a != b {
		t.Errorf("round trip:\n%s\n%s", a, b)
	}
}

func TestFull(t *testing.T) {
	c, err := Load("testdata/full.good.yaml")
	if err != nil {
		t.Fatal(err)
	}
	// Each key of the schema is in the file, so a key that is decoded to nowhere shows here.
	walk(reflect.TypeFor[Config](), "", func(path string, _ reflect.Type, _ field) {
		if strings.HasSuffix(path, "session_ports") {
			return // would warn
		}
		path = strings.NewReplacer("pools[]", "pools[0]", "backends[]", "backends[0]").Replace(path)
		if !c.src.wrote(path) {
			t.Errorf("%s is not in full.good.yaml", path)
		}
	})
	b := c.Pools[0].Backends[1]
	if b.URL.String() != "https://10.0.0.12:8000/prefix" || b.Weight != 2 || b.Steer.IsValid() {
		t.Errorf("backend: %+v", b)
	}
	if n := c.Pools[1].Backends[0].Name; n != "gpu-3.example.org:80" {
		t.Errorf("derived name %q", n)
	}
	if c.Timeouts.Idle != 90*time.Second || c.Limits.MaxBody != 64<<20 || c.Tokens.MaxBytes != 1e6 {
		t.Errorf("values: %+v %+v %+v", c.Timeouts, c.Limits, c.Tokens)
	}
	if got := c.AllowedPaths([]string{"/v1/a", "/tokenize"}); !slices.Equal(got, []string{"/v1/a", "/tokenize", "/v2/models/*/generate"}) {
		t.Errorf("paths: %v", got)
	}
	if !slices.Contains(c.Steering.Ingress, netip.MustParsePrefix("10.0.8.7/32")) {
		t.Errorf("ingress: %v", c.Steering.Ingress)
	}
	def, models := c.Encodings()
	if def != "cl100k_base" || models["llama-3.1-8b"] != "/models/tokenizer.json" || models["*"] != "cl100k_base" || models["gpt-4"] != "cl100k_base" || models["llama*"] != "o200k_base" {
		t.Errorf("encodings: %s %v", def, models)
	}
	if files := c.TokenizerFiles(); !slices.Equal(files, []string{"/models/tokenizer.json"}) {
		t.Errorf("tokenizer files: %v", files)
	}
}

func TestDefaults(t *testing.T) {
	c, err := Load("testdata/minimal.good.yaml")
	if err != nil {
		t.Fatal(err)
	}
	p := c.Pools[0]
	if p.Name != "default" || p.Policy != "least_cost" || p.Health.Interval != 2*time.Second || p.Backends[0].Weight != 1 {
		t.Errorf("pool: %+v", p)
	}
	if c.Steering.Mode != ModeOff || c.Steering.NATPorts != (PortRange{20000, 32767}) || c.Admin.Listen.String() != "127.0.0.1:9090" {
		t.Errorf("%+v", c)
	}
	if !slices.Equal(c.AllowedPaths([]string{"/v1/a"}), []string{"/v1/a"}) || len(c.Session.Headers) != 7 {
		t.Errorf("lists: %v %v", c.Paths, c.Session.Headers)
	}
}

func TestDerived(t *testing.T) {
	base := "pools: [{backends: [{url: %q}]}]\n%s"
	for _, test := range []struct {
		url, more string
		get       func(*Config) string
		want      string
	}{
		{"http://10.0.0.11", "", func(c *Config) string { return c.Pools[0].Backends[0].Name }, "10.0.0.11:80"},
		{"https://GPU", "", func(c *Config) string { return c.Pools[0].Backends[0].Name }, "gpu:443"},
		{"http://[2001:db8::1]:8000", "", func(c *Config) string { return c.Pools[0].Backends[0].Name }, "2001:db8::1:8000"},
		{"http://engine-0.engine.inference.svc.cluster.local:8000", "", func(c *Config) string { return c.Pools[0].Backends[0].Name }, "engine-0.engine.infere-ea161f54"},
		{"http://a", "admin: {socket: /run/s}", func(c *Config) string { return c.Admin.Listen.String() }, "invalid AddrPort"},
		{"http://a", "admin: {listen: off}", func(c *Config) string { return c.Admin.Listen.String() }, "invalid AddrPort"},
		{"http://a", "admin: {socket: /run/s, listen: '127.0.0.1:1'}", func(c *Config) string { return c.Admin.Listen.String() }, "127.0.0.1:1"},
		{"http://a", "listen: 10.0.0.1:80", func(c *Config) string { return fmt.Sprint(c.Steering.VIP) }, "[10.0.0.1]"},
		{"http://a", "listen: :80", func(c *Config) string { return fmt.Sprint(c.Listen, c.Steering.VIP) }, "[::]:80 []"},
		{"http://a", "steering: {snat: 10.0.0.2}", func(c *Config) string {
			return fmt.Sprint(c.Steering.SNATFor(netip.MustParseAddr("10.0.0.1")), c.Steering.SNATFor(netip.MustParseAddr("2001:db8::1")))
		}, "10.0.0.2 2001:db8::1"},
	} {
		c, err := Parse("test", fmt.Appendf(nil, base, test.url, test.more))
		if err != nil {
			t.Errorf("%s %s: %v", test.url, test.more, err)
		} else if got := test.get(c); got != test.want {
			t.Errorf("%s %s: %q, want %q", test.url, test.more, got, test.want)
		}
	}
}

// The rule of the kernel path: ports that the host's own stack may choose are no NAT ports, unless it was told to leave
// them alone, or the source address is not its own.
func TestNATPortsAndTheHost(t *testing.T) {
	for _, test := range []struct {
		ports, snat string
		local       [2]int
		reserved    [][2]int
		bad         bool
	}{
		{ports: "20000-32767", local: [2]int{32768, 60999}},
		{ports: "20000-32768", local: [2]int{32768, 60999}, bad: true},
		{ports: "60999-61000", local: [2]int{32768, 60999}, bad: true},
		{ports: "61000-61010", local: [2]int{32768, 60999}},
		{ports: "40000-41000", local: [2]int{32768, 60999}, bad: true},
		{ports: "40000-41000", local: [2]int{32768, 60999}, reserved: [][2]int{{8080, 8080}, {40000, 41000}}},
		{ports: "40000-41000", local: [2]int{32768, 60999}, reserved: [][2]int{{40000, 40999}}, bad: true},
		{ports: "30000-41000", local: [2]int{32768, 60999}, reserved: [][2]int{{32000, 42000}}}, // what both hold is reserved
		{ports: "40000-41000", local: [2]int{32768, 60999}, snat: "10.0.0.77"},
		{ports: "40000-41000"}, // unknown
	} {
		text := "listen: 10.0.0.1:8080\npools: [{backends: [{url: 'http://10.0.0.2'}]}]\n" +
			"steering: {mode: nat, target: engine, interfaces: [eth0], nat_ports: " + test.ports + ", snat: [" + test.snat + "]}\n"
		c, err := Parse("test", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		host := testHost
		host.LocalPortRange, host.ReservedPorts = test.local, test.reserved
		if err := c.Validate(host); (err != nil) != test.bad || test.bad && !strings.Contains(err.Error(), "ip_local_reserved_ports") {
			t.Errorf("%+v: %v", test, err)
		}
	}
}

func TestProblemText(t *testing.T) {
	_, err := Parse("shunt.yaml", []byte("pools:\n  - backends: [{url: 'http://a', wait: 1}]\n"))
	want := `shunt.yaml:2:34: pools[0].backends[0].wait: unknown key "wait": known here are name, url, weight, steer
     2 |   - backends: [{url: 'http://a', wait: 1}]
       |                                  ^`
	if err == nil || err.Error() != want {
		t.Errorf("got\n%v", err)
	}
	if strings.Contains(fmt.Sprint(Parse("x", []byte("pools: [{backends: [{url: 'http://u:marker@h h'}]}]"))), "url: \"") {
		t.Error("an unreadable URL is repeated in the message")
	}
}

func TestFromFlags(t *testing.T) {
	c, err := FromFlags([]string{"http://127.0.0.1:8000", "b=http://127.0.0.1:8001/x=y"}, ":8081", "round_robin", "/run/s")
	if err != nil {
		t.Fatal(err)
	}
	p := c.Pools[0]
	if c.Listen.String() != "[::]:8081" || p.Policy != "round_robin" || p.Backends[0].Name != "127.0.0.1:8000" ||
		p.Backends[1].Name != "b" || p.Backends[1].URL.Path != "/x=y" || c.Admin.Socket != "/run/s" || c.Admin.Listen.IsValid() {
		t.Errorf("%+v", c)
	}
	_, err = FromFlags([]string{"127.0.0.1:8000", "*x: &y", "http://h?q=1"}, "", "", "x")
	var e *Error
	if !errors.As(err, &e) || len(e.Problems) != 4 || strings.Contains(err.Error(), "|") {
		t.Errorf("bad flags: %v", err)
	}
	if _, err := FromFlags(nil, "", "", ""); err == nil {
		t.Error("no backend is not refused")
	}
}

// TestSchema demands that each key says what it does and how it is bounded, that its default obeys that, and that no key
// holds a secret itself.
func TestSchema(t *testing.T) {
	walk(reflect.TypeFor[Config](), "", func(path string, typ reflect.Type, f field) {
		if len(f.doc) < 15 || !strings.HasSuffix(f.doc, ".") || strings.Contains(f.doc, "|") {
			t.Errorf("%s: doc %q is not a sentence", path, f.doc)
		}
		switch typ.Kind() {
		case reflect.Int, reflect.Int64, reflect.Float64:
			if f.span == "" {
				t.Errorf("%s: a number without a range", path)
			} else if f.def == "" {
				t.Errorf("%s: a number without a default", path)
			} else if err := inRange(mustScalar(typ, f.def), f.span); err != nil {
				t.Errorf("%s: default: %v", path, err)
			}
		}
		if f.enum != nil && typ.Kind() == reflect.String && !slices.Contains(f.enum, f.def) {
			t.Errorf("%s: default %q is not allowed", path, f.def)
		}
		for _, word := range []string{"secret", "password", "token_", "_key", "credential"} {
			if strings.Contains(f.key, word) && !strings.HasSuffix(f.key, "_file") && f.enum == nil { // a word of a list is none
				t.Errorf("%s: looks like a secret: take the name of a file, and say so in Effective", path)
			}
		}
	})
	if ref := Reference(); strings.Count(ref, "\n") != len(Keys())+2 || !strings.Contains(ref, "| `pools[].health.interval` | duration 100ms to 1h | `2s` |") {
		t.Errorf("reference:\n%s", ref)
	}
}

func TestReadFile(t *testing.T) {
	if _, err := Load(filepath.Join(t.TempDir(), "none.yaml")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing file: %v", err)
	}
	big := filepath.Join(t.TempDir(), "big.yaml")
	if err := os.WriteFile(big, make([]byte, maxFile+1), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(big); err == nil || !strings.Contains(err.Error(), "larger than 1MiB") {
		t.Errorf("big file: %v", err)
	}
}

func TestAliasBomb(t *testing.T) {
	var b strings.Builder
	b.WriteString("pools:\n  - &p\n    backends: &b\n")
	for i := range 2000 {
		fmt.Fprintf(&b, "      - {url: 'http://10.0.0.1:%d'}\n", 1000+i)
	}
	b.WriteString(strings.Repeat("  - *p\n", 2000))
	_, err := Parse("bomb", []byte(b.String()))
	if err == nil || len(err.Error()) > 1<<20 {
		t.Errorf("alias bomb: %.300v", err)
	}
}

func FuzzParse(f *testing.F) {
	files, _ := filepath.Glob("testdata/*.yaml")
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse("fuzz", data)
		var e *Error
		switch {
		case err == nil:
			roundTrip(t, c)
		case !errors.As(err, &e) || len(e.Problems) == 0 || err.Error() == "":
			t.Errorf("error without a problem: %v", err)
		}
	})
}

// The reference in the README is the one that the schema makes (shunt check --reference).
func TestReadme(t *testing.T) {
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), Reference()) {
		t.Error("the table of keys in README.md is old: replace it by the output of shunt check --reference")
	}
}
