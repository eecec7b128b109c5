// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/admin"
)

const rareSample = ", lease: {sample: 60000}" // no connection of these tests is a sample

func vipURL(w *world, v6 bool) string {
	a := w.Balancer.V4
	if v6 {
		a = w.Balancer.V6
	}
	return "http://" + netip.AddrPortFrom(a, 8080).String()
}

var longPrompt = strings.Repeat("The quick brown fox jumps over the lazy dog. ", 40)

// The main job: turn 1 through the L7, turns 2 and 3 in the kernel, to the engine that holds the prefix.
func TestConversationIsSteered(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		t.Run(map[bool]string{false: "v4", true: "v6"}[v6], func(t *testing.T) {
			w := newWorld(t, 1, 3)
			for i := range w.Engines {
				w.engine(i)
			}
			d := w.serve(w.Balancer, w.vipConfig(v6, ""))
			url, client := vipURL(w, v6), w.Clients[0]

			history := []message{{"system", "You are terse."}, {"user", longPrompt}}
			one := w.chat(client, url, history, 16)
			if one.status != http.StatusOK || one.backend == "" || !one.closed {
				t.Fatalf("turn 1: status %d, backend %q, asked to reconnect %v: %s", one.status, one.backend, one.closed, one.text)
			}
			if n := d.metric("shunt_requests_total"); n != 1 {
				t.Fatalf("turn 1: the L7 counts %v requests, want 1", n)
			}
			sessions := decode[[]admin.Session](d, "/api/v1/sessions")
			if len(sessions) != 1 || sessions[0].Backend != one.backend {
				t.Fatalf("pins after turn 1: %+v", sessions)
			}
			for turn := 2; turn <= 3; turn++ {
				history = talk(history, one.text, fmt.Sprintf("And turn %d?", turn))
				r := w.chat(client, url, history, 16)
				if r.status != http.StatusOK || r.backend != "" || r.closed {
					t.Errorf("turn %d went through the L7: status %d, backend %q", turn, r.status, r.backend)
				}
				if r.cached == 0 {
					t.Errorf("turn %d found no prefix in the engine's cache", turn)
				}
			}
			if n := d.metric("shunt_requests_total"); n != 1 {
				t.Errorf("the L7 counts %v requests, want 1", n)
			}
			if n := d.metric("shunt_steered_connections_total"); n != 2 {
				t.Errorf("%v steered connections, want 2", n)
			}
			for i := range w.Engines {
				want := 0
				if engineName(i) == one.backend {
					want = 3
				}
				if n := len(w.served(i)); n != want {
					t.Errorf("%s served %d requests, want %d", engineName(i), n, want)
				}
			}
			d.weightsReturn()
		})
	}
}

// An open steered connection stands in shunt_flows and charges its backend.
func TestOpenFlowIsVisible(t *testing.T) {
	w := newWorld(t, 1, 1)
	w.engine(0)
	d := w.serve(w.Balancer, w.vipConfig(false, ""))
	url, client := vipURL(w, false), w.Clients[0]
	w.chat(client, url, []message{{"user", longPrompt}}, 16)

	keep := httpClient(client.Namespace, true)
	resp, err := keep.Get(url + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	drain(resp)
	flows := decode[[]admin.Flow](d, "/api/v1/flows")
	if len(flows) != 1 || flows[0].Backend != engineName(0) || !strings.HasPrefix(flows[0].Client, client.V4.String()+":") || flows[0].Charge <= 0 {
		t.Errorf("flows: %+v", flows)
	}
	b := d.backends()[engineName(0)]
	if b.KernelTokens <= 0 || b.SteeredFlows != 1 {
		t.Errorf("kernel's weight: %d tokens, %d flows", b.KernelTokens, b.SteeredFlows)
	}
	keep.CloseIdleConnections()
	d.weightsReturn()
}

func post(d *daemon, path string) ([]byte, int) {
	resp, err := d.admin.Post("http://127.0.0.1:9090"+path, "application/json", nil)
	if err != nil {
		return []byte(err.Error()), 0
	}
	defer resp.Body.Close()
	var b [4096]byte
	n, _ := resp.Body.Read(b[:])
	return b[:n], resp.StatusCode
}

// A drained, a down and an over-limit backend get no new steered connection.
func TestUnwillingBackendGetsNoFlow(t *testing.T) {
	w := newWorld(t, 1, 2)
	engines := []*proc{w.engine(0), w.engine(1)}
	d := w.serve(w.Balancer, w.vipConfig(false, rareSample))
	url, client := vipURL(w, false), w.Clients[0]
	pinned := func() string {
		t.Helper()
		r := w.chat(client, url, []message{{"user", longPrompt}}, 4)
		if r.backend == "" {
			t.Fatal("the connection was steered; the L7 should have served it")
		}
		if r = w.chat(client, url, []message{{"user", longPrompt}}, 4); r.backend != "" {
			t.Fatal("the next connection was not steered")
		}
		return decode[[]admin.Session](d, "/api/v1/sessions")[0].Backend
	}
	home := pinned()

	// Drained by the operator.
	if body, status := post(d, "/api/v1/backends/"+home+"/drain"); status != http.StatusOK {
		t.Fatalf("drain: %d %s", status, body)
	}
	if r := w.chat(client, url, []message{{"user", longPrompt}}, 4); r.backend == "" || r.backend == home {
		t.Fatalf("drained: served by %q", r.backend)
	}
	if body, status := post(d, "/api/v1/backends/"+home+"/ready"); status != http.StatusOK {
		t.Fatalf("ready: %d %s", status, body)
	}

	// Down: the engine is killed; once the checks know, no SYN goes there.
	var i int
	wait(t, 10*time.Second, "steered again", func() bool {
		r := w.chat(client, url, []message{{"user", longPrompt}}, 4)
		if s := decode[[]admin.Session](d, "/api/v1/sessions"); len(s) == 1 {
			home = s[0].Backend
		}
		return r.backend == ""
	})
	for i = range engines {
		if engineName(i) == home {
			_ = engines[i].Signal(syscall.SIGKILL)
			_ = engines[i].Wait()
		}
	}
	wait(t, 10*time.Second, "backend is down", func() bool { return d.backends()[home].Health == "down" })
	if r := w.chat(client, url, []message{{"user", longPrompt}}, 4); r.status != http.StatusOK || r.backend == home || r.backend == "" {
		t.Fatalf("down: status %d by %q", r.status, r.backend)
	}
	d.weightsReturn()
}

// Over its limit of tokens in flight a backend gets no new flow; the L7 decides.
func TestOverLimitBackendGetsNoFlow(t *testing.T) {
	w := newWorld(t, 2, 1)
	w.engine(0, "--ttft", "3s")
	config := strings.Replace(w.vipConfig(false, rareSample), "    backends:\n", "    limits: {max_inflight_tokens: 1000}\n    backends:\n", 1)
	d := w.serve(w.Balancer, config)
	url := vipURL(w, false)
	if r := w.chat(w.Clients[0], url, []message{{"user", "short"}}, 4); r.backend == "" {
		t.Fatal("turn 1 was steered")
	}
	if r := w.chat(w.Clients[0], url, []message{{"user", "short"}}, 4); r.backend != "" {
		t.Fatal("turn 2 was not steered")
	}
	d.weightsReturn() // an idle backend takes a request above the limit
	done := make(chan error, 1)
	go func() { // a big request of another client holds the backend over its limit
		_, err := tryChat(w.Clients[1], url, []message{{"user", strings.Repeat(longPrompt, 10)}}, 4)
		done <- err
	}()
	wait(t, 10*time.Second, "the big request is in flight", func() bool { return d.backends()[engineName(0)].L7Tokens > 1000 })
	resp, err := httpClient(w.Clients[0].Namespace, false).Get(url + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.Header.Get("x-request-id") == "" {
		t.Error("a connection was steered to a backend over its limit")
	}
	if n := d.metric("shunt_drops_total", "over_limit"); n == 0 {
		t.Error("no SYN was counted as over the limit")
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	d.weightsReturn()
}

// A backend without a steer address is never steered to with target peer.
func TestBackendWithoutPeerIsNotSteered(t *testing.T) {
	w := newWorld(t, 1, 1)
	w.engine(0)
	d := w.serve(w.Balancer, strings.Replace(w.vipConfig(false, ""), "target: engine", "target: peer", 1))
	url := vipURL(w, false)
	for turn := range 4 {
		if r := w.chat(w.Clients[0], url, []message{{"user", longPrompt}}, 4); r.backend == "" || r.closed {
			t.Errorf("turn %d: backend %q, asked to reconnect %v", turn, r.backend, r.closed)
		}
	}
	if n := d.metric("shunt_steered_connections_total"); n != 0 {
		t.Errorf("%v steered connections", n)
	}
}

// When the engine's host is unreachable before the checks know, the client's connect fails over to the L7.
func TestConnectFailsOver(t *testing.T) {
	w := newWorld(t, 1, 2)
	w.engine(0)
	w.engine(1)
	d := w.serve(w.Balancer, strings.Replace(w.vipConfig(false, rareSample), "interval: 200ms", "interval: 1h", 1))
	url, client := vipURL(w, false), w.Clients[0]
	one := w.chat(client, url, []message{{"user", longPrompt}}, 4)
	for i, e := range w.Engines {
		if engineName(i) == one.backend {
			if err := e.SetDown(e.Iface); err != nil {
				t.Fatal(err)
			}
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	c, err := client.Dial(ctx, "tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatalf("connect to the VIP while the pinned engine is unreachable: %v", err)
	}
	_ = c.Close()
	if n := d.metric("shunt_drops_total", "connect_failed"); n == 0 {
		t.Error("the repeated SYN was not handed to the L7")
	}
}
