// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// instant answers as fast as the machine can.
var instant = Options{Fixed: &FixedTiming{}}

type harness struct {
	t      *testing.T
	s      *Server
	url    string
	client *http.Client
	stop   func()
}

func start(t *testing.T, o ServerOptions, listen string) *harness {
	t.Helper()
	s, err := NewServer(o)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", listen)
	if err != nil {
		t.Skipf("listen on %s: %v", listen, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, ln) }()
	tr := &http.Transport{}
	h := &harness{t: t, s: s, url: "http://" + ln.Addr().String(), client: &http.Client{Transport: tr}}
	h.stop = sync.OnceFunc(func() {
		cancel()
		tr.CloseIdleConnections()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
	})
	t.Cleanup(h.stop)
	return h
}

func (h *harness) do(method, path, body string, header ...string) (int, []byte, http.Header) {
	h.t.Helper()
	req, err := http.NewRequest(method, h.url+path, strings.NewReader(body))
	if err != nil {
		h.t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := h.client.Do(req)
	if err != nil {
		h.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		h.t.Fatal(err)
	}
	return resp.StatusCode, b, resp.Header
}

func (h *harness) post(path, body string) map[string]any {
	h.t.Helper()
	code, b, _ := h.do("POST", path, body)
	if code != 200 {
		h.t.Fatalf("%s: %d %s", path, code, b)
	}
	return decode(h.t, b)
}

func decode(t *testing.T, b []byte) map[string]any {
	t.Helper()
	var v map[string]any
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatalf("%v in %s", err, b)
	}
	return v
}

// at follows keys and indexes into decoded JSON.
func at(v any, path ...any) any {
	for _, p := range path {
		switch p := p.(type) {
		case string:
			m, _ := v.(map[string]any)
			v = m[p]
		case int:
			l, _ := v.([]any)
			if p >= len(l) {
				return nil
			}
			v = l[p]
		}
	}
	return v
}

type event struct {
	name string
	data map[string]any
	done bool
}

func events(t *testing.T, body []byte) (out []event) {
	t.Helper()
	sc := bufio.NewScanner(bytes.NewReader(body))
	var e event
	for sc.Scan() {
		line := sc.Text()
		switch {
		case strings.HasPrefix(line, "event: "):
			e.name = line[7:]
		case line == "data: [DONE]":
			e.done = true
		case strings.HasPrefix(line, "data: "):
			e.data = decode(t, []byte(line[6:]))
		case line == "":
			out = append(out, e)
			e = event{}
		default:
			t.Fatalf("odd line %q", line)
		}
	}
	return out
}
