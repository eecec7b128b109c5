// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/config"
	"github.com/shunt-lb/shunt/pkg/datapath"
	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/proxy"
	"github.com/shunt-lb/shunt/pkg/session"
)

const everySetting = `
listen: 10.0.0.1:8080
pools:
  - name: p
    models: [m]
    tokenizer: {encoding: cl100k_base}
    backends: [{name: a, url: "http://10.0.0.11:8000", steer: "10.0.0.11:8080"}]
tokens: {models: {x: cl100k_base}}
steering: {mode: nat, target: peer, interfaces: [eth0], snat: 10.0.0.1, ingress: 10.0.0.9}
`

// keys calls fn with the path of each key of the schema that is no section, and its value in c.
func keys(v reflect.Value, path string, fn func(path string, v reflect.Value)) {
	for i := range v.NumField() {
		name, f := v.Type().Field(i).Tag.Get("yaml"), v.Field(i)
		if name == "" {
			continue
		}
		name = strings.TrimPrefix(path+"."+name, ".")
		switch {
		case f.Kind() == reflect.Struct && f.Type().Field(0).Tag.Get("yaml") != "":
			keys(f, name, fn)
		case f.Kind() == reflect.Slice && f.Type().Elem().Kind() == reflect.Struct && f.Type().Elem().Field(0).Tag.Get("yaml") != "":
			keys(f.Index(0), name+"[]", fn)
		default:
			fn(name, f)
		}
	}
}

// change gives v another value of its type.
func change(t *testing.T, path string, v reflect.Value) {
	t.Helper()
	switch x := v.Addr().Interface().(type) {
	case *string:
		switch *x += "x"; path {
		case "pools[].policy":
			*x = "round_robin"
		case "credentials":
			*x = "pass"
		case "pools[].tokenizer.family":
			*x = "qwen"
		}
	case *bool:
		*x = !*x
	case *[]string:
		*x = append(slices.Clone(*x), "/more")
	case *map[string]string:
		*x = map[string]string{"y": "cl100k_base"}
	case **url.URL:
		u := **x
		u.Host = "10.0.0.12:8000"
		*x = &u
	case *netip.AddrPort:
		*x = netip.MustParseAddrPort("10.0.0.99:99")
	case *[]netip.Addr:
		*x = []netip.Addr{netip.MustParseAddr("10.0.0.99")}
	case *[]netip.Prefix:
		*x = []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")}
	case *config.PortRange:
		*x = config.PortRange{First: 7, Last: 8}
	default:
		switch v.Kind() {
		case reflect.Int, reflect.Int64:
			v.SetInt(v.Int() + 1)
		case reflect.Float64:
			v.SetFloat(v.Float() * 1.5)
		default:
			t.Fatalf("%s: a type that the test cannot change: %s", path, v.Type())
		}
	}
}

// A reload changes each key of the schema, or is refused and names it: no setting can be changed in the file only.
func TestEverySettingIsAppliedOrRefused(t *testing.T) {
	parse := func() *config.Config {
		cfg, err := config.Parse("test", []byte(everySetting))
		if err != nil {
			t.Fatal(err)
		}
		return cfg
	}
	a := &app{identifier: session.NewIdentifier([]string{"x-session-id"})}
	a.secrets.Store(&secrets{})
	applied := func(cfg *config.Config) string {
		d := a.dynamic(cfg)
		// What proxy.Update says that it leaves as it was.
		d.Limits.MaxHeader, d.Timeouts.Header, d.Timeouts.KeepAlive = 0, 0, 0
		d.Identifier = nil // its headers are hidden in it
		specs, states, err := pools(cfg, nil)
		if err != nil {
			t.Fatal(err)
		}
		text := fmt.Sprintf("%+v %v ", d, cfg.Session.Headers)
		text += fmt.Sprint(families(cfg), secretsOf(cfg))
		text += fmt.Sprint(cfg.Timeouts.StopDelay, cfg.Timeouts.StopGrace) // stop reads them then
		for i := range specs {
			specs[i].Chooser = nil
			text += fmt.Sprintf("%+v %v %s ", specs[i], specs[i].Backends[0].URL, states[specs[i].Name].policy)
			f := fleet.New(fleet.Options{})
			if err := f.Apply(func() []fleet.PoolSpec { s, _, _ := pools(cfg, nil); return s }()); err != nil {
				t.Fatal(err)
			}
			text += fmt.Sprintf("%+v", healthSettings(cfg)(f.Backends()[0]))
		}
		return text
	}
	base, before := parse(), applied(parse())
	live := []string{}
	keys(reflect.ValueOf(parse()).Elem(), "", func(path string, _ reflect.Value) {
		cfg := parse()
		keys(reflect.ValueOf(cfg).Elem(), "", func(p string, v reflect.Value) {
			if p == path {
				change(t, path, v)
			}
		})
		names := fixed(base, cfg)
		refused := slices.ContainsFunc(names, func(n string) bool { return path == n || strings.HasPrefix(path, n+".") })
		switch changed := applied(cfg) != before; {
		case !refused && !changed:
			t.Errorf("%s: a change is neither applied nor refused (%v)", path, names)
		case !refused:
			if live = append(live, path); len(names) > 0 && path != "pools[].models" { // its encoding goes with it
				t.Errorf("%s: refused as %v", path, names)
			}
		case len(names) != 1:
			t.Errorf("%s: refused as %v", path, names)
		}
	})
	for _, want := range []string{"limits.max_connections", "limits.max_body", "session.headers", "timeouts.first_byte", "pools[].backends[].weight"} {
		if !slices.Contains(live, want) {
			t.Errorf("%s takes a restart; live are %v", want, live)
		}
	}
}

// A refused change leaves the daemon as it was, and says which key it was.
func TestReloadRefusesWhatIsFixed(t *testing.T) {
	front, adm := freePort(t), freePort(t)
	file := filepath.Join(t.TempDir(), "c.yaml")
	url := engine(t, "a")
	write(t, file, configText(front, adm, "", url))
	d := start(t, file, front, adm)
	for more, want := range map[string]string{
		"timeouts: {client_idle: 1s}\n":  "timeouts.client_idle",
		"timeouts: {header_read: 1s}\n":  "timeouts.header_read",
		"limits: {max_connections: 7}\n": "",
		"session: {headers: [x-mine]}\n": "",
	} {
		write(t, file, configText(front, adm, more, url))
		body, status := d.do(http.MethodPost, "/-/reload")
		if want == "" && status != http.StatusOK || want != "" && (status == http.StatusOK || !strings.Contains(body, want)) {
			t.Errorf("%sreload: %d %s", more, status, body)
		}
		write(t, file, configText(front, adm, "", url))
		if body, status := d.do(http.MethodPost, "/-/reload"); status != http.StatusOK {
			t.Fatalf("back: %d %s", status, body)
		}
	}
}

// The file's check and the front end accept the same patterns of paths: a file that shunt check accepts is served.
func TestPathPatternsAgree(t *testing.T) {
	s, err := proxy.New(proxy.Options{Fleet: fleet.New(fleet.Options{})})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Shutdown(t.Context()) }()
	patterns := map[string]bool{"/v1/models/**": true, "/v1/*/x": true, "/a/**/b": false, "/a/***": false, "/a/x*": false,
		"/**": true, "/*": true, "/": true, "": false, "*": false, "a": false, "/ü": true, "/a;b": true, "/a/": false, "/..": false}
	words := []string{""}
	for range 3 { // every short pattern of these characters
		for _, w := range slices.Clone(words) {
			for _, c := range "/a*.%?#\\ ;\x01\x7f" {
				words = append(words, w+string(c))
			}
		}
		slices.Sort(words)
		words = slices.Compact(words)
	}
	words = append(words, slices.Collect(maps.Keys(patterns))...)
	refused := map[string]bool{}
	for chunk := range slices.Chunk(words, 40) { // not all problems of a file are listed
		var quoted []string
		for _, w := range chunk {
			quoted = append(quoted, yamlString(w))
		}
		_, err := config.Parse("test", []byte("pools: [{backends: [{url: 'http://a'}]}]\npaths: ["+strings.Join(quoted, ", ")+"]\n"))
		var e *config.Error
		if !errors.As(err, &e) {
			continue
		}
		for _, p := range e.Problems {
			var i int
			if _, err := fmt.Sscanf(p.Path, "paths[%d]", &i); err != nil {
				t.Fatalf("%s: %s", p.Path, p.Message)
			}
			refused[chunk[i]] = true
		}
	}
	for _, w := range words {
		got := s.Update(proxy.Dynamic{Paths: []string{w}}) == nil
		if got == refused[w] {
			t.Errorf("pattern %q: the check accepts it: %v, the front end: %v", w, !refused[w], got)
		}
		if want, ok := patterns[w]; ok && got != want {
			t.Errorf("pattern %q: accepted %v", w, got)
		}
	}
}

func yamlString(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r < ' ' || r == 0x7f:
			fmt.Fprintf(&b, "\\x%02x", r)
		default:
			b.WriteRune(r)
		}
	}
	return b.String() + `"`
}

// The directory that the README sends its readers to is the one where this version's maps are.
func TestReadmeNamesTheMaps(t *testing.T) {
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile(`shunt/default/v(\d+)`).FindAllStringSubmatch(string(text), -1)
	for _, m := range found {
		if m[1] != fmt.Sprint(datapath.ABI) {
			t.Errorf("README.md has %s; the maps' layout is version %d", m[0], datapath.ABI)
		}
	}
	if len(found) == 0 {
		t.Error("README.md does not say where the maps are")
	}
}

// Everybody who asks for the status is told of the requests that the front end has served.
func TestStatusCountsRequests(t *testing.T) {
	front, adm := freePort(t), freePort(t)
	file := filepath.Join(t.TempDir(), "c.yaml")
	write(t, file, configText(front, adm, "", engine(t, "a")))
	d := start(t, file, front, adm)
	for range 3 {
		d.chat("hello")
	}
	deadline := time.Now().Add(10 * time.Second)
	for body, _ := d.get("/api/v1/status"); !strings.Contains(body, `"requests":3`) && !strings.Contains(body, `"requests": 3`); body, _ = d.get("/api/v1/status") {
		if time.Now().After(deadline) {
			t.Fatalf("status after 3 requests: %s", body)
		}
	}
}
