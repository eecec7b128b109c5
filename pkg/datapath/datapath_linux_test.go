// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"io"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/session"
)

// One pin, all its consequences: who answers, what the tables hold while the connection is open and after it.
func TestSteer(t *testing.T) {
	for _, f := range []struct {
		name   string
		v6     bool
		attach string
		mode   string
	}{
		{"v4", false, AttachNative, "native"}, {"v6", true, AttachNative, "native"},
		{"v4 tcx", false, AttachTCX, "tcx"}, {"v6 tcx", true, AttachTCX, "tcx"},
	} {
		t.Run(f.name, func(t *testing.T) {
			w := newWorldAt(t, f.attach, 2, 2)
			ignore := goleak.IgnoreCurrent()
			var mu sync.Mutex
			var events []Event
			o := w.options()
			o.OnEvent = func(e Event) { mu.Lock(); events = append(events, e); mu.Unlock() }
			d, stop := w.start(o, f.v6)
			key, pins := w.pinKey(0, f.v6), d.PinTable()

			w.expect(w.client(0, false), f.v6, "l7")
			must(t, pins.Put(key, session.Pin{Backend: 2, Generation: 7, Tokens: 100, Sessions: 1}))
			keep := w.client(0, true)
			name, remote := ask(t, keep, w.vip(f.v6))
			if name != "e2" {
				t.Fatalf("%s answered a pinned client", name)
			}
			if remote.Addr() != w.vip(f.v6).Addr() || remote.Port() < 20000 || remote.Port() > 29999 {
				t.Errorf("backend saw %s", remote)
			}
			slot := &d.Table().Slots[2]
			if flows, tokens := slot.KernelFlows.Load(), slot.KernelTokens.Load(); flows != 1 || tokens != 100 {
				t.Errorf("%d flows, %d tokens charged", flows, tokens)
			}
			flows, err := d.Flows(0)
			must(t, err)
			if len(flows) != 1 {
				t.Fatalf("flows %+v", flows)
			}
			got := flows[0]
			if got.Client.Addr() != key.Client || got.VIP != w.vip(f.v6) || got.NAT != remote || got.Backend != 2 || got.Name != "e2" ||
				got.State != "open" || got.Tokens != 100 || got.PacketsIn < 3 || got.PacketsOut < 2 || got.BytesOut < 100 {
				t.Errorf("flow %+v", got)
			}
			sessions, err := d.Sessions(10)
			must(t, err)
			if len(sessions) != 1 || !sessions[0].Live || sessions[0].Used != 1 || sessions[0].Open != 1 || sessions[0].Name != "e2" {
				t.Errorf("sessions %+v", sessions)
			}
			w.expect(w.client(1, false), f.v6, "l7") // another address

			keep.CloseIdleConnections()
			eventually(t, "tokens and flow given back", func() bool {
				return slot.KernelFlows.Load() == 0 && slot.KernelTokens.Load() == 0
			})
			eventually(t, "two events", func() bool { mu.Lock(); defer mu.Unlock(); return len(events) >= 2 })
			st := d.Status()
			if st.Opened != 1 || st.Closed != 1 || st.Events["open"] != 1 || st.Interfaces[0].Mode != f.mode || st.Flows != 0 {
				t.Errorf("status %+v", st)
			}
			mu.Lock()
			if events[0].Kind != EventOpen || events[1].Kind != EventClose || events[0].Client.Addr() != key.Client ||
				events[0].VIP != w.vip(f.v6) || events[1].BytesOut < 100 || events[1].Backend != 2 {
				t.Errorf("events %+v", events)
			}
			mu.Unlock()
			stop()
			goleak.VerifyNone(t, ignore, goleak.IgnoreAnyFunction("net/http.(*conn).serve"), goleak.IgnoreAnyFunction("net/http.(*persistConn).readLoop"),
				goleak.IgnoreAnyFunction("net/http.(*persistConn).writeLoop"))
		})
	}
}

// Whatever speaks against steering leaves the connection to the L7, and is counted by name.
func TestNotSteered(t *testing.T) {
	w := newWorld(t, 1, 1)
	d, _ := w.start(w.options(), false)
	key, pins, c := w.pinKey(0, false), d.PinTable(), w.client(0, false)
	pin := session.Pin{Backend: 1, Generation: 7, Tokens: 10, Sessions: 1}
	up := w.records(false)
	change := func(f func(*BackendRecord)) []BackendRecord {
		list := w.records(false)
		f(&list[0])
		return list
	}
	for _, tc := range []struct {
		name, reason string
		set          func()
		undo         func()
	}{
		{"drained by the operator", "pass_backend_admin",
			func() { d.Table().Admin[1].State.Store(uint32(fleet.AdminDrain)) },
			func() { d.Table().Admin[1].State.Store(uint32(fleet.AdminNone)) }},
		{"down", "pass_backend_down",
			func() { must(t, d.SetBackends(change(func(r *BackendRecord) { r.State = fleet.HealthDown }))) }, nil},
		{"another generation", "pass_generation",
			func() { must(t, d.SetBackends(change(func(r *BackendRecord) { r.Generation = 8 }))) }, nil},
		{"on this host, as configured", "pass_backend_local",
			func() { must(t, d.SetBackends(change(func(r *BackendRecord) { r.Local = true }))) }, nil},
		{"on this host, as routed", "pass_backend_local",
			func() { must(t, d.SetBackends(change(func(r *BackendRecord) { r.Steer = w.vip(false) }))) }, nil},
		{"no steer address", "pass_backend_family",
			func() { must(t, d.SetBackends(change(func(r *BackendRecord) { r.Steer = netip.AddrPort{} }))) }, nil},
		{"next hop that does not answer", "pass_no_neighbour",
			func() {
				must(t, d.SetBackends(change(func(r *BackendRecord) { r.Steer = netip.MustParseAddrPort("10.77.9.9:8000") })))
			}, nil},
		{"over the limit", "pass_over_limit",
			func() { d.Table().Slots[1].Limit.Store(9) },
			func() { d.Table().Slots[1].Limit.Store(1 << 40) }},
		{"expired", "pass_lease_expired",
			func() { p := pin; p.Expires = 1; must(t, pins.Put(key, p)) }, nil},
		{"idle for too long", "pass_lease_idle",
			func() { d.writeConfig(Settings{Lease: Lease{Idle: 1}}) },
			func() { d.writeConfig(Settings{Lease: Lease{}}) }},
		{"sampled", "pass_sampled",
			func() { d.writeConfig(Settings{Lease: Lease{Sample: 1}}) },
			func() { d.writeConfig(Settings{Lease: Lease{}}) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			must(t, pins.Put(key, pin))
			w.expect(c, false, "e1")
			before := d.drops()[tc.reason]
			tc.set()
			w.expect(c, false, "l7")
			if after := d.drops()[tc.reason]; after != before+1 {
				t.Errorf("%s counted %d times", tc.reason, after-before)
			}
			if tc.undo != nil {
				tc.undo()
			}
			must(t, d.SetBackends(up))
			w.steerable(d)
		})
	}
}

// A daemon that ends and the ones after it take nothing from a connection, and keep pins, ids and the program's place.
func TestRestart(t *testing.T) {
	w := newWorld(t, 1, 2)
	d, stop := w.start(w.options(), false)
	must(t, d.PinTable().Put(w.pinKey(0, false), session.Pin{Backend: 2, Generation: 7, Tokens: 5, Sessions: 1}))
	resp, err := w.client(0, true).Get("http://" + w.vip(false).String() + "/stream")
	must(t, err)
	defer resp.Body.Close()
	read := make(chan int64, 1)
	go func() {
		n, err := io.Copy(io.Discard, resp.Body)
		if err != nil {
			t.Error(err)
		}
		read <- n
	}()
	var last *Datapath
	for i := range 4 {
		stop()
		d2 := w.open(w.options())
		if k := d2.Known()["e2"]; k != (fleet.Known{ID: 2, Generation: 7, Steer: w.records(false)[1].Steer}) || len(d2.Known()) != 2 {
			t.Fatalf("known %+v", d2.Known())
		}
		if n := d2.Table().Slots[2].KernelFlows.Load(); n != 1 {
			t.Fatalf("restart %d: %d flows", i, n)
		}
		must(t, d2.SetBackends(w.records(false)))
		must(t, d2.Attach())
		if s := d2.Status().Interfaces[0]; !s.Adopted || s.Mode != "native" {
			t.Errorf("interface %+v", s)
		}
		d2.Table().Slots[2].Limit.Store(1 << 40)
		stop, last = w.run(d2), d2
		w.expect(w.client(0, false), false, "e2")
	}
	const want = 16 * 20 << 16
	select {
	case n := <-read:
		if n != want {
			t.Errorf("read %d bytes, not %d", n, want)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("download stalls")
	}
	if s := last.Status(); len(s.Notices) > 0 {
		t.Errorf("notices %q", s.Notices)
	}
}

func TestLocked(t *testing.T) {
	w := newWorld(t, 0, 0)
	d := w.open(w.options())
	if _, err := w.tryOpen(w.options()); !errors.Is(err, ErrLocked) {
		t.Errorf("second open: %v", err)
	}
	other := w.options()
	other.Instance = "other"
	d2, err := w.tryOpen(other)
	must(t, err)
	must(t, d2.Close())
	must(t, Cleanup(w.bpffs, "other"))
	if err := Cleanup(w.bpffs, ""); !errors.Is(err, ErrLocked) {
		t.Errorf("cleanup beside a daemon: %v", err)
	}
	must(t, d.Close())
	must(t, d.Close())
	must(t, w.open(w.options()).Close())
}

func TestOptionsRefused(t *testing.T) {
	w := newWorld(t, 0, 0)
	if err := w.Balancer.Sysctl("net.ipv4.ip_local_port_range", "25000 60000"); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name, want string
		change     func(*Options)
	}{
		{"instance", "may hold letters", func(o *Options) { o.Instance = "a/b" }},
		{"dot", "may hold letters", func(o *Options) { o.Instance = ".." }},
		{"attach", "no attach mode", func(o *Options) { o.Attach = "tc" }},
		{"interfaces", "no interface", func(o *Options) { o.Interfaces = nil }},
		{"no vip", "0 given", func(o *Options) { o.VIPs = nil }},
		{"vip twice", "twice", func(o *Options) { o.NATPorts.Last = 24999; o.VIPs = append(o.VIPs, o.VIPs[0]) }},
		{"no port", "needs an address and a port", func(o *Options) { o.VIPs = []VIP{{Addr: netip.MustParseAddrPort("10.77.0.1:0")}} }},
		{"any address", "needs an address", func(o *Options) { o.VIPs = []VIP{{Addr: netip.MustParseAddrPort("0.0.0.0:80")}} }},
		{"family", "another family", func(o *Options) { o.VIPs[0].SNAT = w.Balancer.V6 }},
		{"nat ports", "no range", func(o *Options) { o.NATPorts.Last = 1 }},
		{"port of the vip", "hold the port", func(o *Options) { o.NATPorts.First = 8000 }},
		{"ports of the stack", "ip_local_port_range 25000-60000", func(o *Options) {}},
		{"bpffs", "no bpf file system", func(o *Options) { o.NATPorts.Last = 24999; o.BPFFS = t.TempDir() }},
	} {
		o := w.options()
		tc.change(&o)
		if _, err := w.tryOpen(o); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
	// The shared ports are reserved: the stack never gives them away.
	must(t, w.Balancer.Sysctl("net.ipv4.ip_local_reserved_ports", "25000-29999"))
	must(t, w.open(w.options()).Close())
}

func TestCollector(t *testing.T) {
	w := newWorld(t, 1, 1)
	d, stop := w.start(w.options(), false)
	must(t, d.PinTable().Put(w.pinKey(0, false), session.Pin{Backend: 1, Generation: 7, Sessions: 1}))
	keep := w.client(0, true)
	w.expect(keep, false, "e1")
	eventually(t, "pins counted", func() bool { return d.npins.Load() == 1 })
	reg := prometheus.NewPedanticRegistry()
	must(t, reg.Register(d.Collector()))
	got := gather(t, reg)
	for name, want := range map[string]float64{
		"shunt_steered_flows":                               1,
		"shunt_steered_connections_total":                   1,
		`shunt_backend_steered_flows{backend="e1"}`:         1,
		`shunt_backend_steerable{backend="e1"}`:             1,
		`shunt_attach_info{interface="eth0",mode="native"}`: 1,
		`shunt_map_max_entries{map="shunt_flows"}`:          float64(steerShuntSizesSHUNT_MAX_FLOWS),
		`shunt_map_entries{map="shunt_sessions"}`:           1,
		`shunt_drops_total{reason="drop_odd_header"}`:       0,
		`shunt_datapath_events_total{kind="failover"}`:      0,
		`shunt_map_max_entries{map="shunt_sessions"}`:       float64(steerShuntSizesSHUNT_MAX_SESSIONS),
		`shunt_drops_total{reason="pass_backend_local"}`:    0,
	} {
		if v, ok := got[name]; !ok || v != want {
			t.Errorf("%s = %v (there: %v), want %v", name, v, ok, want)
		}
	}
	for _, name := range []string{`shunt_backend_packets_total{backend="e1",direction="in"}`, `shunt_backend_bytes_total{backend="e1",direction="out"}`} {
		if got[name] < 2 {
			t.Errorf("%s = %v", name, got[name])
		}
	}
	if _, ok := got[`shunt_drops_total{reason="reason_none"}`]; ok {
		t.Error("forwarded packets counted as drops")
	}
	stop()
	if n := len(gather(t, reg)); n != 0 {
		t.Errorf("%d metrics of a closed datapath", n)
	}
}

func gather(t *testing.T, reg *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := reg.Gather()
	must(t, err)
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			if len(m.GetLabel()) > 0 {
				var labels []string
				for _, l := range m.GetLabel() {
					labels = append(labels, l.GetName()+`="`+l.GetValue()+`"`)
				}
				name += "{" + strings.Join(labels, ",") + "}"
			}
			out[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return out
}
