// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"testing"

	"github.com/shunt-lb/shunt/pkg/session"
	"golang.org/x/sys/unix"
)

// TestDSR: the client's own address reaches the engine, and what the engine answers does not come back here.
func TestDSR(t *testing.T) {
	for _, tc := range []struct {
		attach string
		v6     bool
	}{{AttachNative, false}, {AttachTCX, false}, {AttachTCX, true}} {
		t.Run(fmt.Sprint(tc.attach, " v6 ", tc.v6), func(t *testing.T) {
			w := newWorldAt(t, tc.attach, 1, 1)
			// The VIP is an address apart: a host does not answer ARP from an address that it takes for its own.
			vip := netip.MustParseAddrPort(map[bool]string{false: "10.77.0.100:8080", true: "[fd77::100]:8080"}[tc.v6])
			must(t, w.Balancer.AddVIP("eth0", vip.Addr()))
			w.vips = map[bool]netip.AddrPort{tc.v6: vip}
			w.serveAt(w.Balancer, vip, "l7")
			e := w.Engines[0]
			must(t, e.Answer(vip.Addr()))
			ln, err := e.Listen("tcp", vip.String())
			must(t, err)
			srv := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				fmt.Fprint(rw, "e1 ", r.RemoteAddr)
				if r.URL.Path == "/big" {
					_, _ = rw.Write(make([]byte, 4<<20))
				}
			})}
			go srv.Serve(ln)
			t.Cleanup(func() { srv.Close() })

			o := w.options()
			o.VIPs = []VIP{{Addr: vip, DSR: true}}
			o.NATPorts.First, o.NATPorts.Last = 0, 0 // needs none
			d := w.open(o)
			records := w.records(tc.v6)
			must(t, d.SetBackends(records)) // with the engine's other port
			must(t, d.Attach())
			d.Table().Slots[1].Limit.Store(1 << 40)
			w.run(d)
			eventually(t, "the wrong port is a problem", func() bool { return d.Status().Backends[0].Problem != "" })
			records[0].Steer = netip.AddrPortFrom(records[0].Steer.Addr(), vip.Port())
			must(t, d.SetBackends(records))
			w.steerable(d)

			w.expect(w.client(0, false), tc.v6, "l7")
			key := w.pinKey(0, tc.v6)
			must(t, d.PinTable().Put(key, session.Pin{Backend: 1, Generation: 7, Tokens: 100, Sessions: 1}))
			keep := w.client(0, true)
			if name, remote := ask(t, keep, vip); name != "e1" || remote.Addr() != key.Client {
				t.Fatalf("%s answered, and saw %s", name, remote)
			}
			resp, err := keep.Get("http://" + vip.String() + "/big")
			must(t, err)
			n, err := io.Copy(io.Discard, resp.Body)
			must(t, err)
			must(t, resp.Body.Close())
			flows, err := d.Flows(0)
			must(t, err)
			if len(flows) != 1 || flows[0].State != "open" || flows[0].Steer != records[0].Steer || flows[0].PacketsOut != 0 ||
				int64(flows[0].BytesOut) < n*9/10 || flows[0].Tokens != 100 {
				t.Fatalf("%d bytes read; flows %+v", n, flows)
			}
			if s := d.Status(); s.VIPs[0].Mode != "dsr" || s.Interfaces[0].Mode != map[string]string{AttachNative: "native", AttachTCX: "tcx"}[tc.attach] {
				t.Errorf("status %+v", s)
			}
			keep.CloseIdleConnections()
			eventually(t, "tokens and flow given back", func() bool {
				s := &d.Table().Slots[1]
				return s.KernelFlows.Load() == 0 && s.KernelTokens.Load() == 0
			})

			// The host vanishes: its next hop does not answer any more, and the client is told.
			var c net.Conn = w.hold(tc.v6)
			must(t, w.Switch.SetDown(e.Port))
			w.down(d, tc.v6)
			if _, err := io.ReadAll(c); !errors.Is(err, unix.ECONNRESET) {
				t.Fatalf("the client reads %v", err)
			}
		})
	}
}
