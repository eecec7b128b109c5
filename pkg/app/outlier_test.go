// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// An engine whose checks are good while its generation fails does not draw the load: to a policy that counts tokens it looks
// idle. When it works again, it is used again.
func TestFailingEngineIsNoBlackHole(t *testing.T) {
	for _, policy := range []string{"session", "least_tokens", "least_cost"} {
		t.Run(policy, func(t *testing.T) {
			var broken atomic.Bool
			var served atomic.Int64
			broken.Store(true)
			sick := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				if r.Method == http.MethodPost && broken.Load() {
					w.WriteHeader(http.StatusInternalServerError)
					return
				}
				if r.Method == http.MethodPost {
					served.Add(1)
				}
				w.Header().Set("Content-Type", "application/json")
				fmt.Fprint(w, `{"usage":{"prompt_tokens":3,"completion_tokens":2}}`)
			}))
			defer sick.Close()
			front, adm, file := freePort(t), freePort(t), filepath.Join(t.TempDir(), "shunt.yaml")
			text := strings.Replace(configText(front, adm, "", engine(t, "a"), engine(t, "b"), sick.URL), "policy: round_robin",
				"policy: "+policy+"\n    slow_start: 0s\n    outlier: {hold: 100ms, max_hold: 200ms}", 1)
			write(t, file, text)
			d := start(t, file, front, adm)
			client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 10}}
			defer client.CloseIdleConnections()
			var failed atomic.Int64
			load := func(n int) {
				var wg sync.WaitGroup
				for c := range 10 {
					wg.Go(func() {
						for i := range n / 10 {
							body := fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":"client %d turn %d"}]}`, c, i)
							resp, err := client.Post("http://"+front+"/v1/chat/completions", "application/json", strings.NewReader(body))
							if err != nil {
								t.Error(err)
								return
							}
							_, _ = io.Copy(io.Discard, resp.Body)
							resp.Body.Close()
							if resp.StatusCode != http.StatusOK {
								failed.Add(1)
							}
						}
					})
				}
				wg.Wait()
			}
			load(100)
			failed.Store(0)
			load(500)
			if n := failed.Load(); n > 25 {
				t.Errorf("%d of 500 requests failed after the first hundred", n)
			}
			if body, _ := d.get("/api/v1/backends"); !strings.Contains(body, "requests in a row failed") && !strings.Contains(body, "probe failed") {
				t.Errorf("the list of backends does not say why one is out: %s", body)
			}
			if body, _ := d.get("/metrics"); !strings.Contains(body, "shunt_backend_ejected{backend=") || !strings.Contains(body, "} 1\n") {
				t.Error("the metrics do not show the ejection")
			}
			broken.Store(false)
			d.wait("the engine to be used again", func() bool {
				load(20)
				body, _ := d.get("/api/v1/backends")
				return served.Load() > 0 && !strings.Contains(body, `"ejected"`)
			})
		})
	}
}
