// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"fmt"
	"net/http"
	"slices"
	"testing"

	"github.com/shunt-lb/shunt/pkg/admin"
	"github.com/shunt-lb/shunt/pkg/netdev/lab"
)

// twoSessions are sessions A and B of one client address.
type twoSessions struct {
	*daemon
	client *lab.Host
	url    string
	home   map[string]string
}

// startA serves the first turn of session A, which pins the address to A's home.
func (w *world) startA(d *daemon) *twoSessions {
	w.t.Helper()
	s := &twoSessions{daemon: d, client: w.Clients[0], url: vipURL(w, false), home: map[string]string{}}
	r := s.turn("A")
	if r.backend == "" || !r.closed {
		w.t.Fatalf("A's first turn: backend %q, asked to reconnect %v", r.backend, r.closed)
	}
	if got := s.states(); !slices.Equal(got, []string{"pinned"}) {
		w.t.Fatalf("after A's first turn the address is %v", got)
	}
	s.home["A"] = r.backend
	return s
}

func (s *twoSessions) turn(session string) reply {
	s.w.t.Helper()
	r := s.w.chat(s.client, s.url, []message{{"user", session + " " + longPrompt}}, 4, "x-session-id", session)
	if r.status != http.StatusOK {
		s.w.t.Fatalf("session %s: status %d: %s", session, r.status, r.text)
	}
	return r
}

// other is the engine that is not A's home.
func (s *twoSessions) other() string {
	if s.home["A"] == engineName(0) {
		return engineName(1)
	}
	return engineName(0)
}

// states are those of what /api/v1/sessions lists, which is one address here.
func (s *twoSessions) states() (states []string) {
	s.w.t.Helper()
	for _, v := range decode[[]admin.Session](s.daemon, "/api/v1/sessions") {
		states = append(states, v.State)
	}
	return states
}

// hold opens a connection that is steered to A's home and stays open: its charge makes that the fuller engine.
func (s *twoSessions) hold() *http.Client {
	s.w.t.Helper()
	keep := httpClient(s.client.Namespace, true)
	s.w.t.Cleanup(keep.CloseIdleConnections)
	resp, err := keep.Get(s.url + "/v1/models")
	if err != nil {
		s.w.t.Fatal(err)
	}
	drain(resp)
	if resp.Header.Get("x-request-id") != "" {
		s.w.t.Fatal("a connection of the pinned address was not steered")
	}
	return keep
}

// staysMixed demands that from now on both sessions are served by the L7, each at its home, and nothing is steered.
func (s *twoSessions) staysMixed(turns int) {
	s.w.t.Helper()
	if got := s.states(); !slices.Equal(got, []string{"mixed"}) {
		s.w.t.Errorf("with sessions on two backends the address is %v, want mixed only", got)
	}
	before := s.metric("shunt_steered_connections_total")
	for i := range turns {
		for _, name := range []string{"A", "B"} {
			if r := s.turn(name); r.backend != s.home[name] || r.closed {
				s.w.t.Errorf("turn %d of session %s: backend %q, its home is %s; asked to reconnect %v", i, name, r.backend, s.home[name], r.closed)
			}
		}
	}
	if n := s.metric("shunt_steered_connections_total") - before; n != 0 {
		s.w.t.Errorf("%v connections of a mixed address were steered", n)
	}
	if got := s.states(); !slices.Equal(got, []string{"mixed"}) {
		s.w.t.Errorf("in the end the address is %v, want mixed only", got)
	}
}

// Two sessions of one address that live on two backends: the pin goes before the answer that makes them two, and the
// address is not steered from then on.
func TestMixedAddressIsNotSteered(t *testing.T) {
	w := newWorld(t, 1, 2)
	w.engine(0)
	w.engine(1)
	s := w.startA(w.serve(w.Balancer, w.vipConfig(false, rareSample)))
	// As many open flows as one session may have: the next connection passes to the L7, which has a new session to
	// place, and one engine that carries all of these.
	var held []*http.Client
	for range 4 {
		held = append(held, s.hold())
	}
	b := s.turn("B")
	if b.backend != s.other() {
		t.Fatalf("B's first turn: backend %q, want %s (A lives on %s)", b.backend, s.other(), s.home["A"])
	}
	s.home["B"] = b.backend
	if b.closed {
		t.Error("the answer that makes the address mixed asks to reconnect")
	}
	s.staysMixed(6)
	for _, keep := range held {
		resp, err := keep.Get(s.url + "/v1/models")
		if err != nil {
			t.Fatal(err)
		}
		drain(resp)
		if resp.Header.Get("x-request-id") != "" {
			t.Error("a connection that was steered before does not go on in the kernel")
		}
		keep.CloseIdleConnections()
	}
	s.weightsReturn()
}

// Two sessions that take turns behind one pin: the L7 meets the second one within 8 x sample connections, and once
// their homes differ nothing is steered.
func TestAlternatingSessionsAreFound(t *testing.T) {
	w := newWorld(t, 1, 2)
	w.engine(0)
	w.engine(1)
	const sample = 8
	s := w.startA(w.serve(w.Balancer, w.vipConfig(false, fmt.Sprintf(", lease: {sample: %d, connections: 100000}", sample))))
	// A's home is the fuller one throughout, so that B gets another when the L7 meets it.
	keep := s.hold()
	for n := 1; s.home["B"] == ""; n++ {
		if n > 8*sample {
			t.Fatalf("session B never met the L7 in %d connections", n-1)
		}
		name := "AB"[n%2 : n%2+1]
		switch r := s.turn(name); {
		case r.backend == "": // steered
		case name == "A" && r.backend != s.home["A"]:
			t.Errorf("session A moved from %s to %s", s.home["A"], r.backend)
		case name == "B":
			s.home["B"] = r.backend
		}
	}
	if s.home["B"] != s.other() {
		t.Fatalf("session B was placed on %s, where A and an open connection are", s.home["B"])
	}
	s.staysMixed(2 * sample)
	keep.CloseIdleConnections()
	s.weightsReturn()
}
