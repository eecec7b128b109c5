// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/admin"
	"github.com/shunt-lb/shunt/pkg/netdev/lab"
)

// connecting opens connections one after the other until stop is called, which returns how they went.
func (w *world) connecting(from *lab.Host, url string) (stop func() map[string]int) {
	end, done := make(chan struct{}), make(chan map[string]int, 1)
	go func() {
		went := map[string]int{}
		for {
			select {
			case <-end:
				done <- went
				return
			default:
			}
			switch r, err := tryChat(from, url, []message{{"user", longPrompt}}, 2); {
			case err != nil:
				went["refused"]++
				went[err.Error()]++
			case r.backend != "":
				went["l7"]++
			default:
				went["steered"]++
			}
		}
	}()
	return sync.OnceValue(func() map[string]int { close(end); return <-done })
}

// A pinned client that opens connections all the time while the daemon is killed and starts again is never refused.
func TestRestartRefusesNobody(t *testing.T) {
	w := newWorld(t, 1, 1)
	w.engine(0)
	d := w.serve(w.Balancer, w.vipConfig(false, ", lease: {sample: 60000, connections: 100000}"))
	url, client := vipURL(w, false), w.Clients[0]
	w.chat(client, url, []message{{"user", longPrompt}}, 4)
	stop := w.connecting(client, url)
	defer stop()
	time.Sleep(200 * time.Millisecond) // some before it
	if err := d.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = d.Wait()
	time.Sleep(700 * time.Millisecond) // longer than the heartbeat is believed
	d = d.restart()
	time.Sleep(300 * time.Millisecond)
	went := stop()
	if went["refused"] != 0 || went["steered"] == 0 {
		t.Errorf("connections: %v", went)
	}
	d.weightsReturn()
}

// While the daemon lets a long request end, pinned clients are not left to the listener that it has closed.
func TestStoppingRefusesNobodyPinned(t *testing.T) {
	w := newWorld(t, 2, 1)
	w.engine(0, "--ttft", "4s", "--speed", "1")
	d := w.serve(w.Balancer, w.vipConfig(false, ", lease: {sample: 2, connections: 100000}, handoff: keep"))
	url := vipURL(w, false)
	w.chat(w.Clients[0], url, []message{{"user", "short"}}, 2)
	long := make(chan error, 1)
	go func() {
		_, err := tryChat(w.Clients[1], url, []message{{"user", "another short one"}}, 2)
		long <- err
	}()
	wait(t, 10*time.Second, "the long request is open", func() bool { return d.backends()[engineName(0)].Requests == 1 })
	if err := d.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	wait(t, 10*time.Second, "the listener is closed", func() bool {
		resp, err := httpClient(w.Clients[1].Namespace, false).Get(url + "/v1/models")
		if err == nil {
			drain(resp)
		}
		return err != nil
	})
	for i := range 20 {
		resp, err := httpClient(w.Clients[0].Namespace, false).Get(url + "/v1/models")
		if err != nil {
			t.Fatalf("connection %d of the pinned client: %v", i, err)
		}
		drain(resp)
	}
	if err := <-long; err != nil {
		t.Errorf("the open request was cut: %v", err)
	}
	if err := d.Wait(); err != nil {
		t.Errorf("the daemon ended with %v", err)
	}
}

// A client on the balancer's own host meets no program on the way to the VIP: it is not asked to reconnect.
func TestLocalClientKeepsItsConnection(t *testing.T) {
	w := newWorld(t, 1, 1)
	w.engine(0)
	d := w.serve(w.Balancer, w.vipConfig(false, ""))
	for range 3 {
		if r := w.chat(w.Balancer, vipURL(w, false), []message{{"user", longPrompt}}, 4); r.status != http.StatusOK || r.closed {
			t.Errorf("status %d, asked to reconnect %v", r.status, r.closed)
		}
	}
	if s := decode[[]admin.Session](d, "/api/v1/sessions"); len(s) != 0 {
		t.Errorf("pinned: %+v", s)
	}
}

// A backend that leaves the configuration gets nothing new, and its open flow runs to its end.
func TestRemovedBackendsFlowGoesOn(t *testing.T) {
	const size = 150 << 20
	w := newWorld(t, 1, 2)
	w.engine(0)
	w.engine(1)
	d := w.serve(w.Balancer, w.vipConfig(false, rareSample))
	url, client := vipURL(w, false), w.Clients[0]
	one := w.chat(client, url, []message{{"user", longPrompt}}, 4)
	done := make(chan error, 1)
	go func() {
		resp, err := httpClient(client.Namespace, false).Get(fmt.Sprintf("%s/debug/blob?bytes=%d", url, size))
		if err == nil {
			var n int64
			if n, err = io.Copy(io.Discard, resp.Body); err == nil && n != size {
				err = fmt.Errorf("%d bytes of %d", n, size)
			}
			_ = resp.Body.Close()
		}
		done <- err
	}()
	wait(t, 20*time.Second, "the download is steered", func() bool {
		f := decode[[]admin.Flow](d, "/api/v1/flows")
		return len(f) == 1 && f[0].Bytes > 1<<20
	})
	var keep []string
	for line := range strings.Lines(w.vipConfig(false, rareSample)) {
		if !strings.Contains(line, "name: "+one.backend+",") {
			keep = append(keep, line)
		}
	}
	if err := os.WriteFile(d.file, []byte(strings.Join(keep, "")), 0o644); err != nil {
		t.Fatal(err)
	}
	if body, status := post(d, "/-/reload"); status != http.StatusOK {
		t.Fatalf("reload: %d %s", status, body)
	}
	if r := w.chat(client, url, []message{{"user", longPrompt}}, 4); r.backend == "" || r.backend == one.backend {
		t.Errorf("after the removal served by %q", r.backend)
	}
	if err := <-done; err != nil {
		t.Errorf("download from the removed backend: %v", err)
	}
	d.weightsReturn()
}

// Every node is ingress and peer with one configuration. What one steers to another is served there and goes no further,
// also when the ingress's daemon has died and its kernel alone steers.
func TestPeersThatSteerToo(t *testing.T) {
	w := newWorld(t, 1, 2)
	w.engine(0)
	w.engine(1)
	config := func(h *lab.Host, instance string) string {
		var b strings.Builder
		fmt.Fprintf(&b, "listen: '%s:8080'\nadmin: {listen: 127.0.0.1:9090}\npools:\n  - name: main\n    policy: session\n    health: {interval: 200ms, fall: 2}\n    backends:\n", h.V4)
		for i, e := range w.Engines {
			fmt.Fprintf(&b, "      - {name: %s, url: 'http://%s:8000', steer: '%s:8080'}\n", engineName(i), e.V4, e.V4)
		}
		fmt.Fprintf(&b, "steering: {mode: nat, target: peer, interfaces: [%s], vip: '%s', bpffs: %s, instance: %s, require: true, lease: {sample: 60000}}\n", h.Iface, h.V4, w.bpffs, instance)
		return b.String()
	}
	peers := make([]*daemon, 2)
	for i, e := range w.Engines {
		peers[i] = w.serve(e, config(e, fmt.Sprintf("peer%d", i)))
	}
	d := w.serve(w.Balancer, config(w.Balancer, "ingress"))
	url, client := vipURL(w, false), w.Clients[0]
	wait(t, 20*time.Second, "peers are known", func() bool {
		n := 0
		for _, b := range d.backends() {
			if b.Steerable {
				n++
			}
		}
		return n == 2
	})
	one := w.chat(client, url, []message{{"user", longPrompt}}, 16)
	if !one.closed {
		t.Fatal("turn 1 was not pinned")
	}
	turns := func() {
		t.Helper()
		for range 4 {
			if r := w.chat(client, url, []message{{"user", longPrompt}}, 4); r.closed || r.backend != one.backend {
				t.Errorf("served by %q (home %q), asked to reconnect %v", r.backend, one.backend, r.closed)
			}
		}
		for i, p := range peers {
			if s := decode[[]admin.Session](p, "/api/v1/sessions"); len(s) != 0 {
				t.Errorf("peer %d knows the ingress as a client: %+v", i+1, s)
			}
			if n := p.metric("shunt_steered_connections_total"); n != 0 {
				t.Errorf("peer %d steered %v connections again", i+1, n)
			}
		}
	}
	turns()
	if n := d.metric("shunt_requests_total"); n != 1 {
		t.Errorf("the ingress's L7 served %v requests, want 1", n)
	}
	if err := d.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = d.Wait()
	turns()
}
