// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

func TestProbeRules(t *testing.T) {
	if new(state).transport().Proxy != nil {
		t.Error("checks ask the environment for a proxy")
	}
	tests := []struct {
		name   string
		path   string // setting
		prefix string // of the backend's URL
		status map[string]int
		good   bool
	}{
		{"health", "", "", map[string]int{"/health": 200}, true},
		{"health with 204", "", "", map[string]int{"/health": 204}, true},
		{"model still loads", "", "", map[string]int{"/health": 503, "/v1/models": 200}, false},
		{"health broken", "", "", map[string]int{"/health": 500, "/v1/models": 200}, false},
		{"no health, models", "", "", map[string]int{"/v1/models": 200}, true},
		{"health not allowed", "", "", map[string]int{"/health": 405, "/v1/models": 200}, true},
		{"health not implemented", "", "", map[string]int{"/health": 501, "/v1/models": 200}, true},
		{"neither, but HTTP", "", "", map[string]int{}, true},
		{"models want a key", "", "", map[string]int{"/v1/models": 401}, true},
		{"models broken", "", "", map[string]int{"/v1/models": 502}, false},
		{"explicit", "/ping", "", map[string]int{"/ping": 200, "/health": 500}, true},
		{"explicit with query", "/ping?deep=1", "", map[string]int{"/ping?deep=1": 200}, true},
		{"explicit missing", "/ping", "", map[string]int{"/health": 200}, false},
		{"explicit redirect", "/ping", "", map[string]int{"/ping": 302, "/elsewhere": 200}, false},
		{"under a prefix", "", "/engine/", map[string]int{"/engine/health": 200, "/health": 500}, true},
		{"explicit under a prefix", "/ping", "/engine", map[string]int{"/engine/ping": 200}, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				status, ok := tt.status[r.RequestURI]
				if !ok {
					status = 404
				}
				w.Header().Set("Location", "/elsewhere")
				w.WriteHeader(status)
			}))
			defer srv.Close()
			f := newFleet(t, map[string]string{"a": srv.URL + tt.prefix})
			c := New(Options{Backends: f.Backends, Settings: settings(Settings{Path: tt.path})})
			c.CheckAll(t.Context())
			if got := f.Backend("a").Health() == fleet.HealthUp; got != tt.good {
				t.Errorf("good = %v, want %v (%v)", got, tt.good, c.Last(f.Backend("a")).Err)
			}
		})
	}
}

// TestRealConnections: a closed port, a listener that never answers, and a good server, all at once; nothing is left.
func TestRealConnections(t *testing.T) {
	ignore := goleak.IgnoreCurrent()
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {}))
	f := newFleet(t, map[string]string{"closed": "http://" + closed.Addr().String(), "good": srv.URL, "mute": "http://" + mute.Addr().String()})
	up := make(chan struct{})
	var once sync.Once
	var down sync.WaitGroup
	down.Add(2)
	c := New(Options{Backends: f.Backends,
		Settings: settings(Settings{Interval: 20 * time.Millisecond, Timeout: 100 * time.Millisecond, Fall: 2}),
		OnChange: func(b *fleet.Backend, _, to fleet.Health, detail string) {
			switch {
			case to == fleet.HealthUp && b.Name() == "good":
				once.Do(func() { close(up) })
			case to == fleet.HealthDown && detail != "":
				down.Done()
			}
		}})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- c.Run(ctx) }()
	<-up
	down.Wait()
	if !errors.Is(c.Last(f.Backend("mute")).Err, context.DeadlineExceeded) {
		t.Errorf("mute: %v", c.Last(f.Backend("mute")).Err)
	}
	if !f.Backend("good").Eligible() || f.Backend("closed").Eligible() || f.Backend("mute").Eligible() {
		t.Error("wrong states")
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	srv.Close()
	mute.Close()
	goleak.VerifyNone(t, ignore)
}

func TestProbePanics(t *testing.T) {
	f := newFleet(t, map[string]string{"a": "http://a"})
	e := &engine{answer: func(string, string, int) (int, time.Duration) { panic("boom") }}
	c := New(Options{Backends: f.Backends, Transport: e})
	c.CheckAll(t.Context())
	if err := c.Last(f.Backend("a")).Err; err == nil || !strings.Contains(err.Error(), "boom") {
		t.Errorf("error %v", err)
	}
}
