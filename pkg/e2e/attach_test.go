// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"testing"
)

// Every attach point steers; the other tests use the one that auto chooses.
func TestAttachPointsSteer(t *testing.T) {
	for _, attach := range []string{"xdp", "xdp-generic", "tcx"} {
		t.Run(attach, func(t *testing.T) {
			w := newWorld(t, 1, 1)
			w.engine(0)
			if attach == "xdp-generic" {
				// Merged segments carry sums that are left to a card.
				if err := w.Balancer.Offload(w.Balancer.Iface, true, false); err != nil {
					t.Fatal(err)
				}
			}
			d := w.serve(w.Balancer, w.vipConfig(false, rareSample+", attach: "+attach))
			client, url := w.Clients[0], vipURL(w, false)
			if r := w.chat(client, url, []message{{"user", longPrompt}}, 4); r.backend == "" || !r.closed {
				t.Fatalf("turn 1: backend %q, asked to reconnect %v", r.backend, r.closed)
			}
			if r := w.chat(client, url, []message{{"user", longPrompt}}, 4); r.backend != "" {
				t.Error("turn 2 was not steered")
			}
			mode := map[string]string{"xdp": "native", "xdp-generic": "generic", "tcx": "tcx"}[attach]
			if n := d.metric("shunt_attach_info", `mode="`+mode+`"`); n != 1 {
				t.Errorf("shunt_attach_info does not say %s", mode)
			}
			d.weightsReturn()
		})
	}
}
