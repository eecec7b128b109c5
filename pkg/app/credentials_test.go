// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/shunt-lb/shunt/pkg/config"
)

// A client's keys reach backends only where the file says so, and no log or interface of the operator ever holds one.
func TestCredentials(t *testing.T) {
	const marker = "sk-marker-key"
	var seen atomic.Pointer[http.Header]
	capture := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		h := r.Header.Clone()
		if r.Method == http.MethodPost {
			seen.Store(&h)
		}
		if strings.Contains(string(body), "be unwell") {
			w.WriteHeader(http.StatusUnauthorized)
			fmt.Fprintf(w, `{"error":{"message":"no such key: %s"}}`, r.Header.Get("Authorization"))
			return
		}
		fmt.Fprint(w, "{}")
	}))
	t.Cleanup(capture.Close)
	front, adm, file := freePort(t), freePort(t), filepath.Join(t.TempDir(), "shunt.yaml")
	text := func(more string) string {
		return configText(front, adm, "log: {level: debug}\n"+more, capture.URL)
	}
	write(t, file, text(""))
	d := start(t, file, front, adm)
	names := []string{"Authorization", "X-Api-Key", "Api-Key"}
	ask := func(content string) {
		t.Helper()
		req, err := http.NewRequest(http.MethodPost, "http://"+front+"/v1/chat/completions",
			strings.NewReader(fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":%q}]}`, content)))
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range names {
			req.Header.Set(n, "Bearer "+marker)
		}
		req.Header.Set("X-Other", "other")
		resp, err := d.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
	for _, tt := range []struct {
		more   string
		passed bool
	}{{"", false}, {"credentials: pass\n", true}, {"credentials: strip\n", false}, {"credentials: auto\n", false}} {
		write(t, file, text(tt.more))
		if body, status := d.do(http.MethodPost, "/-/reload"); status != http.StatusOK {
			t.Fatalf("%q: %d %s", tt.more, status, body)
		}
		for _, content := range []string{"be well", "be unwell"} {
			ask(content)
			h := *seen.Load()
			for _, n := range names {
				if got := h.Get(n); (got == "Bearer "+marker) != tt.passed || !tt.passed && got != "" {
					t.Errorf("%q: the backend got %s %q", tt.more, n, got)
				}
			}
			if !tt.passed && strings.Contains(fmt.Sprint(h), marker) || h.Get("X-Other") != "other" {
				t.Errorf("%q: the backend got %v", tt.more, h)
			}
		}
	}
	for _, path := range []string{"/metrics", "/api/v1/status", "/api/v1/backends", "/api/v1/sessions", "/api/v1/config"} {
		if body, status := d.get(path); status != http.StatusOK || strings.Contains(body, marker) {
			t.Errorf("%s: status %d, or the key is in it", path, status)
		}
	}
	if err := d.finish(); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(d.log.String(), `"path":"/v1/chat/completions"`); n != 8 {
		t.Errorf("the access log has %d of 8 requests", n)
	}
	if strings.Contains(d.log.String(), marker) {
		t.Error("a key is in the log")
	}
}

// What auto means depends on what the kernel does with a steered connection.
func TestCredentialsOfSteeredTargets(t *testing.T) {
	for steering, strip := range map[string]bool{
		"{mode: off}":                                     true,
		"{mode: off, target: engine}":                     true,
		"{mode: nat, target: peer, interfaces: [eth0]}":   true,
		"{mode: nat, target: engine, interfaces: [eth0]}": false,
	} {
		for word, want := range map[string]bool{"": strip, "credentials: auto\n": strip, "credentials: pass\n": false} {
			cfg, err := config.Parse("test", []byte(fmt.Sprintf("listen: 10.0.0.1:8080\n%ssteering: %s\n"+
				"pools: [{backends: [{url: 'http://10.0.0.11:8000', steer: '10.0.0.11:8080'}]}]\n", word, steering)))
			if err != nil {
				t.Fatal(err)
			}
			if got := cfg.StripCredentials(); got != want {
				t.Errorf("%s %s: strip %v, want %v", steering, word, got, want)
			}
		}
	}
}
