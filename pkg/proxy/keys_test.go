// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/session"
)

func hashOf(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

func parseKeys(t *testing.T, lines ...string) *Keys {
	t.Helper()
	k, err := ParseKeys([]byte(strings.Join(lines, "\n")))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func TestParseKeys(t *testing.T) {
	k := parseKeys(t, "# keys", "", hashOf("one")+"  team one ", strings.ToUpper(hashOf("two")), "\t"+hashOf("three")+"\r")
	for key, want := range map[string]string{"one": "team one", "two": strings.ToUpper(hashOf("two"))[:8], "three": hashOf("three")[:8]} {
		if name, ok := k.find([]byte(key)); !ok || name != want {
			t.Errorf("%s: %q %v, want %q", key, name, ok, want)
		}
	}
	for _, key := range []string{"", "four", "One", hashOf("one")} {
		if _, ok := k.find([]byte(key)); ok {
			t.Errorf("%q is accepted", key)
		}
	}
	if k.Len() != 3 {
		t.Errorf("%d keys", k.Len())
	}
	for _, bad := range []string{"", "# none", "sk-secret", hashOf("one")[:63], hashOf("one") + "0", hashOf("one") + "\nsk-secret x"} {
		if _, err := ParseKeys([]byte(bad)); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %v", bad, err)
		}
	}
	key := []byte("one")
	if n := testing.AllocsPerRun(100, func() { k.find(key) }); n != 0 {
		t.Errorf("a look-up allocates %v times", n)
	}
}

// Without a valid key nothing is served, and nobody learns what was wrong with it.
func TestClientKeys(t *testing.T) {
	engine := newEngine(t, func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			_ = p.json(200, fmt.Sprintf("%q", g.value("authorization")+g.value("x-api-key")+g.value("api-key")))
		}
	})
	fr := startFront(t, newFleet(t, "round_robin", engine.url()), func(o *Options) {
		o.Keys = parseKeys(t, hashOf("sk-one")+" team")
		o.StripAuthorization = true
		o.PeerInfo = func() []byte { return []byte(`{"product":"shunt"}`) }
	})
	refused := map[string]string{}
	for name, headers := range map[string][]string{
		"none": nil, "wrong": {"Authorization: Bearer sk-two"}, "empty": {"Authorization: Bearer "}, "basic": {"Authorization: Basic sk-one"},
		"no scheme": {"Authorization: sk-one"}, "hash": {"Authorization: Bearer " + hashOf("sk-one")}, "x-api-key": {"X-Api-Key: sk-two"},
		"one wrong of two": {"Authorization: Bearer sk-two", "X-Api-Key: sk-one"}, "elsewhere": {"Cookie: sk-one"},
	} {
		for _, request := range []string{post(chatPath, chat(`,"api_key":"sk-one"`), append(headers, "X-Request-Id: req-1")...),
			strings.Replace(post("/none", "", append(headers, "X-Request-Id: req-1")...), "POST", "GET", 1)} {
			a := fr.do(request)
			a.want(t, 401, "invalid_api_key")
			if a.Header.Get("Www-Authenticate") != "Bearer" {
				t.Errorf("%s: no scheme is named", name)
			}
			refused[a.body] = name
		}
	}
	if len(refused) != 1 {
		t.Errorf("different answers: %v", refused)
	}
	if n := engine.requests.Load(); n != 0 {
		t.Errorf("%d requests without a key reached the backend", n)
	}
	for _, h := range []string{"Authorization: Bearer sk-one", "authorization: bearer  sk-one", "x-api-key: sk-one", "API-Key: sk-one"} {
		if a := fr.do(post(chatPath, chat(""), h)); a.StatusCode != 200 || a.body != `""` {
			t.Errorf("%s: %d, the backend got %s", h, a.StatusCode, a.body)
		}
	}
	if a := fr.do("GET " + session.PeerPath + " HTTP/1.1\r\nHost: a\r\n\r\n"); a.StatusCode != 200 {
		t.Errorf("another shunt's probe: %d", a.StatusCode)
	}
	// A body that nobody may send is not asked for.
	c := fr.dial()
	c.send("POST " + chatPath + " HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 100000\r\n\r\n")
	if a := c.answer("POST"); a.StatusCode != 401 {
		t.Errorf("expected 401 instead of 100, got %d", a.StatusCode)
	}
	keys := map[string]int{}
	for _, r := range fr.records(22) {
		keys[r.Key]++
		if text := fmt.Sprintf("%+v", r); strings.Contains(text, "sk-") {
			t.Errorf("a key is in the record: %s", text)
		}
	}
	if keys["team"] != 4 {
		t.Errorf("records by key: %v", keys)
	}
	if err := fr.s.Update(Dynamic{Keys: parseKeys(t, hashOf("sk-two"))}); err != nil {
		t.Fatal(err)
	}
	fr.do(post(chatPath, chat(""), "Authorization: Bearer sk-one")).want(t, 401, "invalid_api_key")
	fr.do(post(chatPath, chat(""), "Authorization: Bearer sk-two")).want(t, 200, "")
}

// A pool's backends are shown its own key, and nothing of the client's.
func TestBackendKeys(t *testing.T) {
	shown := func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			_ = p.json(200, fmt.Sprintf("%d %s|%s|%s", g.count("authorization"), g.value("authorization"), g.value("x-api-key"), g.value("api-key")))
		}
	}
	a, b := newEngine(t, shown), newEngine(t, shown)
	f := applyFleet(t,
		fleet.PoolSpec{Name: "a", Models: []string{"a"}, Chooser: chooser(t, "round_robin"), Backends: []fleet.BackendSpec{spec(t, "a", a.url())}},
		fleet.PoolSpec{Name: "b", Models: []string{"b"}, Chooser: chooser(t, "round_robin"), Backends: []fleet.BackendSpec{spec(t, "b", b.url())}})
	fr := startFront(t, f, func(o *Options) { o.BackendKeys = map[string]string{"a": "engine-key"} })
	for model, want := range map[string]string{"a": "1 Bearer engine-key||", "b": "1 Bearer mine|mine|mine"} {
		body := strings.Replace(chat(""), `"m"`, `"`+model+`"`, 1)
		got := fr.do(post(chatPath, body, "Authorization: Bearer mine", "X-Api-Key: mine", "API-Key: mine"))
		if got.body != want {
			t.Errorf("backend of pool %s was shown %q, want %q", model, got.body, want)
		}
	}
}
