// SPDX-License-Identifier: Apache-2.0

package tokens

import (
	"crypto/sha1"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const offlineEnv = "SHUNT_TEST_TOKENS_OFFLINE"

type refuse struct{ called bool }

func (r *refuse) RoundTrip(*http.Request) (*http.Response, error) {
	r.called = true
	return nil, errors.New("no network in this test")
}

// A process of its own, as the tables are built once: a poisoned vocabulary where the library would cache its downloads,
// and a network that answers nothing.
func TestNoNetworkAndNoCacheFile(t *testing.T) {
	if os.Getenv(offlineEnv) != "" {
		var r refuse
		http.DefaultTransport = &r
		e := encoder(t, CL100kBase, Options{})
		if got := e.Count("hello world"); got != (Count{Tokens: 2}) || r.called {
			t.Fatalf("got %+v, network asked: %v", got, r.called)
		}
		return
	}
	dir := t.TempDir()
	for _, name := range []string{CL100kBase, O200kBase} {
		url := "https://openaipublic.blob.core.windows.net/encodings/" + name + ".tiktoken"
		poison := base64.StdEncoding.EncodeToString([]byte("hello")) + " 0\n"
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%x", sha1.Sum([]byte(url)))), []byte(poison), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestNoNetworkAndNoCacheFile$", "-test.v")
	cmd.Env = append(os.Environ(), offlineEnv+"=1", "TIKTOKEN_CACHE_DIR="+dir, "DATA_GYM_CACHE_DIR="+dir,
		"http_proxy=http://127.0.0.1:1", "https_proxy=http://127.0.0.1:1")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS") {
		t.Fatalf("%v\n%s", err, out)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 {
		t.Errorf("cache directory: %v, %v", entries, err)
	}
}
