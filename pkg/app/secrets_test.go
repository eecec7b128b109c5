// SPDX-License-Identifier: Apache-2.0

package app

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
)

// Keys that were replaced in their files are in force soon after, files that cannot be used change nothing, and no key is shown
// anywhere.
func TestKeyFilesAreFollowed(t *testing.T) {
	var shown atomic.Value
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			shown.Store(r.Header.Get("Authorization"))
		}
		fmt.Fprint(w, "{}")
	}))
	t.Cleanup(srv.Close)
	front, adm, dir := freePort(t), freePort(t), t.TempDir()
	file, keys, backend := filepath.Join(dir, "shunt.yaml"), filepath.Join(dir, "keys"), filepath.Join(dir, "backend")
	hash := func(key string) string { return fmt.Sprintf("%x %s\n", sha256.Sum256([]byte(key)), "team") }
	text := func(from string) string {
		return strings.Replace(configText(front, adm, "keys: "+keys+"\n", srv.URL), "policy: round_robin", "policy: round_robin\n    key_from: "+from, 1)
	}
	write(t, keys, hash("marker-one"))
	write(t, backend, "marker-engine-one\n")
	write(t, file, text(backend))
	d := start(t, file, front, adm)
	ask := func(key string) int {
		req, err := http.NewRequest(http.MethodPost, "http://"+front+"/v1/chat/completions", strings.NewReader(`{"model":"m","messages":[]}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+key)
		resp, err := d.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	if one, none := ask("marker-one"), ask(""); one != 200 || none != 401 || shown.Load() != "Bearer marker-engine-one" {
		t.Fatalf("with the key %d, without %d, the engine was shown %v", one, none, shown.Load())
	}
	// A broken file refuses a reload, and is not taken by itself.
	write(t, keys, "marker-two\n")
	if body, status := d.do(http.MethodPost, "/-/reload"); status == http.StatusOK || strings.Contains(body, "marker-two") {
		t.Errorf("reload with a key in the clear: %d %s", status, body)
	}
	d.wait("the broken file to be seen", func() bool { return strings.Contains(d.log.String(), "keys cannot be read") })
	if one := ask("marker-one"); one != 200 {
		t.Errorf("after a broken file: %d", one)
	}
	write(t, keys, hash("marker-two"))
	write(t, backend, "marker-engine-two")
	d.wait("the new keys", func() bool {
		return ask("marker-two") == 200 && ask("marker-one") == 401 && shown.Load() == "Bearer marker-engine-two"
	})
	t.Setenv("SHUNT_TEST_ENGINE_KEY", "marker-engine-three")
	write(t, file, text("env:SHUNT_TEST_ENGINE_KEY"))
	if body, status := d.do(http.MethodPost, "/-/reload"); status != http.StatusOK {
		t.Fatalf("reload: %d %s", status, body)
	}
	if status := ask("marker-two"); status != 200 || shown.Load() != "Bearer marker-engine-three" {
		t.Errorf("%d, the engine was shown %v", status, shown.Load())
	}
	write(t, file, text("env:SHUNT_TEST_NO_SUCH_KEY"))
	if _, status := d.do(http.MethodPost, "/-/reload"); status == http.StatusOK {
		t.Error("a key that is not there was accepted")
	}
	for _, path := range []string{"/metrics", "/api/v1/status", "/api/v1/backends", "/api/v1/config"} {
		if body, _ := d.get(path); strings.Contains(body, "marker-") {
			t.Errorf("%s shows a key", path)
		}
	}
	if err := d.finish(); err != nil {
		t.Fatal(err)
	}
	if log := d.log.String(); strings.Contains(log, "marker-") || !strings.Contains(log, `"key":"team"`) {
		t.Error("the log has a key, or lacks its name")
	}
	if err := os.Remove(keys); err != nil {
		t.Fatal(err)
	}
}
