// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"crypto/tls"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"sync/atomic"
	"testing"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/session"
)

type firstChooser struct{}

func (firstChooser) Pick(*fleet.Query, []fleet.Candidate) (int, fleet.Reason) { return 0, "first" }

func TestPeers(t *testing.T) {
	var answer atomic.Value
	var probes, marked atomic.Int64
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		probes.Add(1)
		if r.URL.Path == session.PeerPath && r.Header.Get(session.IngressHeader) == "1" {
			marked.Add(1)
		}
		body := answer.Load().(string)
		if body == "" {
			w.WriteHeader(http.StatusNotFound)
		}
		_, _ = w.Write([]byte(body))
	}))
	u, _ := url.Parse(srv.URL)
	f := fleet.New(fleet.Options{})
	if err := f.Apply([]fleet.PoolSpec{{Name: "p", Chooser: firstChooser{}, Backends: []fleet.BackendSpec{
		{Name: "peer", URL: u, Steer: netip.MustParseAddrPort(u.Host)},
		{Name: "none", URL: u},
	}}}); err != nil {
		t.Fatal(err)
	}
	var changes []bool
	p := NewPeers(PeersOptions{Backends: f.Backends, ABI: 3, OnChange: func(_ *fleet.Backend, ready bool, _ string) { changes = append(changes, ready) }})
	peer, none := f.Backend("peer"), f.Backend("none")
	steps := []struct {
		name, answer string
		ready        bool
	}{
		{"another server", "", false},
		{"not JSON", "hello", false},
		{"foreign product", `{"product":"other","abi":3,"ready":true}`, false},
		{"other layout", `{"product":"shunt","abi":4,"ready":true}`, false},
		{"nothing to serve with", `{"product":"shunt","abi":3}`, false},
		{"a shunt", `{"product":"shunt","abi":3,"ready":true}`, true},
		{"one failure", "", true},
		{"two failures", "", false},
		{"back", `{"product":"shunt","abi":3,"ready":true}`, true},
	}
	for _, s := range steps {
		answer.Store(s.answer)
		p.CheckAll(context.Background())
		if p.Ready(peer) != s.ready {
			t.Errorf("%s: ready %v, want %v (%s)", s.name, p.Ready(peer), s.ready, p.Detail(peer))
		}
		if p.Ready(none) {
			t.Errorf("%s: a backend without a steered address is ready", s.name)
		}
	}
	if n := int64(len(steps)); probes.Load() != n || marked.Load() != n {
		t.Errorf("%d probes, %d marked, want %d: only the steered address is asked", probes.Load(), marked.Load(), n)
	}
	if want := []bool{true, false, true}; len(changes) != 3 || changes[0] != want[0] || changes[1] != want[1] || changes[2] != want[2] {
		t.Errorf("changes %v, want %v", changes, want)
	}
	srv.Close()
	p.CheckAll(context.Background())
	p.CheckAll(context.Background())
	if p.Ready(peer) {
		t.Error("a dead peer stays ready")
	}
}

// A client that is steered goes on speaking TLS, so a peer must too.
func TestPeersUnderTLS(t *testing.T) {
	answer := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"product":"shunt","abi":3,"ready":true}`))
	})
	secure, plain := httptest.NewTLSServer(answer), httptest.NewServer(answer)
	defer secure.Close()
	defer plain.Close()
	secure.Config.ErrorLog, plain.Config.ErrorLog = log.New(io.Discard, "", 0), log.New(io.Discard, "", 0)
	f := fleet.New(fleet.Options{})
	spec := fleet.PoolSpec{Name: "p", Chooser: firstChooser{}}
	for name, s := range map[string]*httptest.Server{"secure": secure, "plain": plain} {
		spec.Backends = append(spec.Backends, fleet.BackendSpec{Name: name, URL: &url.URL{Scheme: "http", Host: "192.0.2.1:80"},
			Steer: netip.MustParseAddrPort(s.Listener.Addr().String())})
	}
	if err := f.Apply([]fleet.PoolSpec{spec}); err != nil {
		t.Fatal(err)
	}
	trusted := secure.Client().Transport.(*http.Transport).TLSClientConfig
	for _, tt := range []struct {
		name          string
		cfg           *tls.Config
		secure, plain bool
	}{{"TLS here", trusted, true, false}, {"another certificate", &tls.Config{}, false, false}, {"no TLS here", nil, false, true}} {
		p := NewPeers(PeersOptions{Backends: f.Backends, ABI: 3, TLS: tt.cfg})
		p.CheckAll(t.Context())
		if s, pl := p.Ready(f.Backend("secure")), p.Ready(f.Backend("plain")); s != tt.secure || pl != tt.plain {
			t.Errorf("%s: with TLS ready %v, without %v", tt.name, s, pl)
		}
	}
}
