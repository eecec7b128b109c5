// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/pkg/admin"
)

// A conversation with direct server return: turn 1 through the L7, the next ones straight to the engine, which sees
// the client's own address.
func TestDirectServerReturn(t *testing.T) {
	for _, vip := range []netip.AddrPort{netip.MustParseAddrPort("10.77.0.100:8000"), netip.MustParseAddrPort("[fd77::100]:8000")} {
		t.Run(vip.String(), func(t *testing.T) {
			w := newWorld(t, 1, 2)
			if err := w.Balancer.AddVIP(w.Balancer.Iface, vip.Addr()); err != nil {
				t.Fatal(err)
			}
			backends := ""
			client := w.Clients[0].V4
			for i, e := range w.Engines {
				if err := e.Answer(vip.Addr()); err != nil {
					t.Fatal(err)
				}
				w.engine(i)
				a := e.V4
				if vip.Addr().Is6() {
					a, client = e.V6, w.Clients[0].V6
				}
				backends += fmt.Sprintf("      - {name: %s, url: 'http://%s'}\n", engineName(i), netip.AddrPortFrom(a, vip.Port()))
			}
			d := w.serve(w.Balancer, fmt.Sprintf(`listen: '%s'
admin: {listen: 127.0.0.1:9090}
pools:
  - name: main
    policy: session
    health: {interval: 200ms, timeout: 1s, fall: 2}
    backends:
%ssteering: {mode: dsr, target: engine, interfaces: [%s], vip: '%s', bpffs: %s, require: true%s}
`, vip, backends, w.Balancer.Iface, vip.Addr(), w.bpffs, rareSample))
			url := "http://" + vip.String()
			history := []message{{"user", longPrompt}}
			first := w.chat(w.Clients[0], url, history, 16)
			if first.backend == "" || !first.closed {
				t.Fatalf("turn 1: backend %q, asked to reconnect %v", first.backend, first.closed)
			}
			for turn := 2; turn <= 4; turn++ {
				history = talk(history, first.text, "go on")
				if r := w.chat(w.Clients[0], url, history, 16); r.backend != "" || r.cached == 0 {
					t.Errorf("turn %d: steered %v, %d tokens cached", turn, r.backend == "", r.cached)
				}
			}
			for i := range w.Engines {
				if engineName(i) != first.backend {
					continue
				}
				seen := w.served(i)
				if len(seen) != 4 || !strings.Contains(seen[3].Remote, client.String()) {
					t.Errorf("the engine saw %+v", seen)
				}
			}

			keep := httpClient(w.Clients[0].Namespace, true)
			resp, err := keep.Get(url + "/v1/models")
			if err != nil {
				t.Fatal(err)
			}
			drain(resp)
			open := 0
			for _, f := range decode[[]admin.Flow](d, "/api/v1/flows") {
				if f.State == "open" && f.Backend == first.backend && f.Charge > 0 {
					open++
				}
			}
			if open != 1 {
				t.Errorf("%d open flows", open)
			}
			keep.CloseIdleConnections()
			d.weightsReturn()
		})
	}
}
