// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/admin"
	"github.com/shunt-lb/shunt/pkg/netdev/lab"
)

// peerConfig is the configuration of a shunt on an engine's host, as in a DaemonSet: all know the whole pool, and each
// steers what comes to its own address.
func (w *world) peerConfig(h *lab.Host) string {
	var b strings.Builder
	b.WriteString("listen: 0.0.0.0:8080\nadmin: {listen: 127.0.0.1:9090}\npools:\n  - name: main\n    policy: session\n    health: {interval: 200ms, timeout: 1s, fall: 2}\n    backends:\n")
	for i, e := range w.Engines {
		fmt.Fprintf(&b, "      - {name: %s, url: 'http://%s:8000', steer: '%s:8080'}\n", engineName(i), e.V4, e.V4)
	}
	fmt.Fprintf(&b, "steering: {mode: nat, target: peer, interfaces: [%s], vip: '%s', bpffs: %s, instance: %s, require: true%s}\n",
		h.Iface, h.V4, w.bpffs, h.Port, rareSample)
	return b.String()
}

// The peer: a shunt on the engine's host serves what the ingress steers to it, on its own engine, and steers nothing
// again, though it steers what its own clients send; when it dies, the ingress serves the session itself.
func TestSteerToPeer(t *testing.T) {
	w := newWorld(t, 2, 2)
	w.engine(0)
	w.engine(1)
	peers := make([]*daemon, 2)
	for i, e := range w.Engines {
		peers[i] = w.serve(e, w.peerConfig(e))
	}
	d := w.serve(w.Balancer, w.peerConfig(w.Balancer))
	for _, x := range append([]*daemon{d}, peers...) {
		wait(t, 20*time.Second, "every shunt knows the others as peers", func() bool {
			n := 0
			for _, b := range x.backends() {
				if b.Steerable || strings.Contains(b.NotSteerable, "on this host") {
					n++
				}
			}
			return n == len(w.Engines)
		})
	}
	url, client := vipURL(w, false), w.Clients[0]

	one := w.chat(client, url, []message{{"user", longPrompt}}, 16)
	if one.backend == "" || !one.closed {
		t.Fatalf("turn 1: backend %q, closed %v", one.backend, one.closed)
	}
	home := 0
	if one.backend == engineName(1) {
		home = 1
	}
	const turns = 6
	history := []message{{"user", longPrompt}}
	for turn := 2; turn <= turns; turn++ {
		history = talk(history, one.text, "go on")
		r := w.chat(client, url, history, 16)
		if r.status != http.StatusOK || r.backend != one.backend || r.closed {
			t.Errorf("turn %d: status %d, backend %q (home %q), asked to reconnect %v", turn, r.status, r.backend, one.backend, r.closed)
		}
	}
	if n := d.metric("shunt_requests_total"); n != 1 {
		t.Errorf("the ingress's L7 served %v requests, want 1", n)
	}
	if n := peers[home].metric("shunt_requests_total"); n != turns-1 {
		t.Errorf("the peer served %v requests, want %d", n, turns-1)
	}
	if n := peers[1-home].metric("shunt_requests_total"); n != 0 {
		t.Errorf("the other peer served %v requests", n)
	}
	if n := len(w.served(home)); n != turns {
		t.Errorf("the home engine served %d requests, want %d", n, turns)
	}
	for i, p := range peers {
		if s := decode[[]admin.Session](p, "/api/v1/sessions"); len(s) != 0 {
			t.Errorf("peer %d pinned %+v", i, s)
		}
		if n := p.metric("shunt_steered_connections_total"); n != 0 {
			t.Errorf("peer %d steered %v connections", i, n)
		}
	}

	// The same peer, a client of its own, and an engine on the other host: it pins and steers.
	if body, status := post(peers[home], "/api/v1/backends/"+one.backend+"/drain"); status != http.StatusOK {
		t.Fatalf("drain: %d %s", status, body)
	}
	own := fmt.Sprintf("http://%s:8080", w.Engines[home].V4)
	if r := w.chat(w.Clients[1], own, []message{{"user", longPrompt}}, 4); r.backend != engineName(1-home) || !r.closed {
		t.Errorf("the peer's own client: backend %q, asked to reconnect %v", r.backend, r.closed)
	}
	if r := w.chat(w.Clients[1], own, []message{{"user", longPrompt}}, 4); r.backend != engineName(1-home) {
		t.Errorf("the peer's own client, turn 2: backend %q", r.backend)
	}
	if n := peers[home].metric("shunt_steered_connections_total"); n != 1 {
		t.Errorf("the peer steered %v connections of its own client, want 1", n)
	}
	if body, status := post(peers[home], "/api/v1/backends/"+one.backend+"/ready"); status != http.StatusOK {
		t.Fatalf("ready: %d %s", status, body)
	}

	if err := peers[home].Stop(10 * time.Second); err != nil {
		t.Fatal(err)
	}
	wait(t, 20*time.Second, "the ingress serves the session again", func() bool {
		r, err := tryChat(client, url, history, 4)
		return err == nil && r.status == http.StatusOK && r.backend == one.backend && d.metric("shunt_requests_total") > 1
	})
	d.weightsReturn()
}
