// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/netdev"
	"github.com/shunt-lb/shunt/pkg/netdev/lab"
	"github.com/shunt-lb/shunt/pkg/session"
)

func (w *world) nic() netdev.Link {
	w.t.Helper()
	var l netdev.Link
	must(w.t, w.Balancer.Do(func() error {
		n, err := netdev.Open()
		if err != nil {
			return err
		}
		defer n.Close()
		l, err = n.Link("eth0")
		return err
	}))
	return l
}

func TestCleanup(t *testing.T) {
	w := newWorld(t, 0, 1)
	_, stop := w.start(w.options(), false)
	dir := filepath.Join(w.bpffs, "shunt", "default", fmt.Sprintf("v%d", ABI))
	for path, mode := range map[string]os.FileMode{filepath.Dir(dir): 0o700, dir: 0o700, filepath.Join(dir, "shunt_backends"): 0o600} {
		st, err := os.Stat(path)
		must(t, err)
		if st.Mode().Perm() != mode {
			t.Errorf("%s has mode %v", path, st.Mode())
		}
	}
	stop()
	if w.nic().XDP != netdev.XDPNative {
		t.Error("Close detached the program")
	}
	must(t, Cleanup(w.bpffs, ""))
	if l := w.nic(); l.XDP != netdev.XDPNone {
		t.Errorf("left attached: %+v", l)
	}
	if _, err := os.Stat(filepath.Join(w.bpffs, "shunt")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left pinned: %v", err)
	}
	must(t, Cleanup(w.bpffs, ""))

	// Beside a daemon, by force: no program may stay behind without its maps.
	w.start(w.options(), false)
	must(t, CleanupForced(w.bpffs, ""))
	if l := w.nic(); l.XDP != netdev.XDPNone {
		t.Errorf("left attached: %+v", l)
	}
}

// A packet must meet the program once: not on a port and again on the bridge above it.
func TestStackedInterfaces(t *testing.T) {
	w := newWorldAt(t, AttachTCX, 0, 0)
	b := w.Balancer
	must(t, b.Bridge("br1"))
	must(t, lab.Veth(b.Namespace, "p0", w.Switch, "p1"))
	must(t, b.Enslave("p0", "br1"))
	o := w.options()
	o.Interfaces = []string{"eth0", "p0", "br1"}
	d := w.open(o)
	if err := d.Attach(); !errors.Is(err, ErrStacked) || !strings.Contains(err.Error(), "port of br1") {
		t.Errorf("attach to a bridge and its port: %v", err)
	}
	must(t, d.Close())
	o.Interfaces = []string{"eth0", "br1"}
	d = w.open(o)
	must(t, d.Attach())
	for _, i := range d.Status().Interfaces {
		if i.Mode != "tcx" {
			t.Errorf("%s: %+v", i.Name, i)
		}
	}
	must(t, d.Close())
}

func passProgram(t *testing.T) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "somebody_elses", Type: ebpf.XDP, License: "MIT",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, xdpPass), asm.Return()},
	})
	must(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

func TestForeignProgram(t *testing.T) {
	w := newWorld(t, 0, 0)
	var theirs link.Link
	must(t, w.Balancer.Do(func() error {
		l, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		theirs, err = link.AttachXDP(link.XDPOptions{Program: passProgram(t), Interface: l.Index, Flags: link.XDPGenericMode})
		return err
	}))
	defer theirs.Close()
	before := w.nic().XDPID
	d := w.open(w.options())
	err := d.Attach()
	if !errors.Is(err, ErrForeignProgram) || !strings.Contains(err.Error(), "somebody_elses") {
		t.Errorf("attach: %v", err)
	}
	if after := w.nic(); after.XDPID != before || after.XDP != netdev.XDPGeneric {
		t.Errorf("their program changed: %+v", after)
	}
	must(t, theirs.Close())
	must(t, d.Attach())
}

func TestAttachModes(t *testing.T) {
	w := newWorld(t, 0, 0)
	for _, tc := range []struct {
		attach  string
		mode    string
		xdp     netdev.XDPMode
		notices int // of a gap
	}{
		{AttachNative, "native", netdev.XDPNative, 0},
		{AttachGeneric, "generic", netdev.XDPGeneric, 1},
		{AttachGeneric, "generic", netdev.XDPGeneric, 0},
		{AttachAuto, "tcx", netdev.XDPNone, 1}, // veth is no hardware
		{AttachTCX, "tcx", netdev.XDPNone, 0},
		{AttachNative, "native", netdev.XDPNative, 1},
		{AttachAuto, "native", netdev.XDPNative, 0}, // works, and a change would let packets pass by
	} {
		o := w.options()
		o.Attach = tc.attach
		d := w.open(o)
		must(t, d.Attach())
		s := d.Status()
		if got := s.Interfaces[0].Mode; got != tc.mode || w.nic().XDP != tc.xdp || len(s.Notices) != tc.notices {
			t.Errorf("attach %s: mode %s, notices %q", tc.attach, got, s.Notices)
		}
		must(t, d.Close())
	}
	// An interface that is not configured any more is let go.
	must(t, w.Balancer.Do(func() error { return nil }))
	o := w.options()
	o.Interfaces = []string{"lo"}
	o.Attach = AttachGeneric
	d := w.open(o)
	must(t, d.Attach())
	if l := w.nic(); l.XDP != netdev.XDPNone {
		t.Errorf("still attached to eth0: %+v", l)
	}
	must(t, d.Close())
	o.Interfaces = []string{"lo", "nosuch0"}
	d = w.open(o)
	if err := d.Attach(); !errors.Is(err, netdev.ErrNoLink) {
		t.Errorf("attach to an interface that is not there: %v", err)
	}
}

// An interface name may hold a dot, a file of a bpffs may not.
func TestLinkPath(t *testing.T) {
	for _, name := range []string{"eth0", "eth0.100", "a%2eb", "%", "br-1"} {
		file := filepath.Base(linkPath("/x", name))
		if back, ok := linkIface(file); !ok || back != name || strings.Contains(file, ".") {
			t.Errorf("%q -> %q -> %q", name, file, back)
		}
	}
	if _, ok := linkIface("v1"); ok {
		t.Error("a directory of maps taken for a link")
	}
}

// The backend's host gets another network card while a connection is steered to it.
func TestNeighbourChange(t *testing.T) {
	w := newWorld(t, 1, 1)
	d, _ := w.start(w.options(), false)
	must(t, d.PinTable().Put(w.pinKey(0, false), session.Pin{Backend: 1, Generation: 7, Sessions: 1}))
	keep := w.client(0, true)
	_, port := ask(t, keep, w.vip(false))

	must(t, w.Engines[0].SetMAC("eth0", net.HardwareAddr{2, 0, 0, 0, 0x77, 1}))
	// The new card makes itself known, as real ones do.
	must(t, w.Engines[0].FlushNeighbours("eth0"))
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	c, err := w.Engines[0].Dial(ctx, "tcp", w.vip(false).String())
	must(t, err)
	c.Close()
	eventually(t, "the kernel knows the new address", func() bool {
		return d.Status().Backends[0].NextHop == "02:00:00:00:77:01"
	})
	if name, again := ask(t, keep, w.vip(false)); name != "e1" || again != port {
		t.Errorf("%s answered at %s, not the same connection as %s", name, again, port)
	}

	// A table that was flushed is filled again, and nobody notices.
	must(t, w.Balancer.FlushNeighbours("eth0"))
	w.expect(w.client(0, false), false, "e1")
	if name, again := ask(t, keep, w.vip(false)); name != "e1" || again != port {
		t.Errorf("%s answered at %s, not the same connection as %s", name, again, port)
	}
	w.steerable(d)
}

// The balancer's own NIC goes away and comes back as another one.
func TestInterfaceReturns(t *testing.T) {
	w := newWorld(t, 1, 1)
	d, _ := w.start(w.options(), false)
	must(t, d.PinTable().Put(w.pinKey(0, false), session.Pin{Backend: 1, Generation: 7, Sessions: 1}))
	w.expect(w.client(0, false), false, "e1")
	must(t, w.Balancer.Delete("eth0"))
	eventually(t, "the loss is seen", func() bool { s := d.Status().Interfaces[0]; return s.Mode == "none" && s.Problem != "" })
	must(t, w.Testbed.Plug(w.Balancer))
	eventually(t, "attached again", func() bool {
		s := d.Status()
		return s.Interfaces[0].Mode == "native" && s.Interfaces[0].Problem == "" && s.Backends[0].Problem == ""
	})
	must(t, w.Clients[0].FlushNeighbours("eth0"))
	must(t, w.Engines[0].FlushNeighbours("eth0"))
	w.expect(w.client(0, false), false, "e1")
}

// The same while no daemon runs: the next one finds a link that leads nowhere.
func TestSeveredLink(t *testing.T) {
	w := newWorld(t, 0, 1)
	_, stop := w.start(w.options(), false)
	stop()
	must(t, w.Replug(w.Balancer))
	d := w.open(w.options())
	must(t, d.SetBackends(w.records(false)))
	must(t, d.Attach())
	if s := d.Status(); s.Interfaces[0].Adopted || s.Interfaces[0].Mode != "native" || w.nic().XDP != netdev.XDPNative {
		t.Errorf("status %+v", s)
	}
}

func TestIncompatiblePins(t *testing.T) {
	w := newWorld(t, 0, 0)
	spec, err := loadSteer()
	must(t, err)
	dir := filepath.Join(w.bpffs, "shunt", "default", fmt.Sprintf("v%d", ABI))
	for _, tc := range []struct {
		name   string
		change func(*ebpf.MapSpec)
		want   string
	}{
		{steerMapShuntFlows, func(m *ebpf.MapSpec) { m.MaxEntries = 77 }, "77 changed to 262144"},
		{steerMapShuntSessions, func(m *ebpf.MapSpec) { m.ValueSize, m.Value = 40, nil }, "40 changed to 48"},
		{steerMapShuntBackends, func(m *ebpf.MapSpec) { m.Flags = unix.BPF_F_NO_PREALLOC }, "1 changed to 0"},
	} {
		must(t, os.MkdirAll(dir, 0o700))
		m := spec.Maps[tc.name].Copy()
		m.Pinning = ebpf.PinNone
		tc.change(m)
		old, err := ebpf.NewMap(m)
		must(t, err)
		must(t, old.Pin(filepath.Join(dir, tc.name)))
		old.Close()
		if _, err := w.tryOpen(w.options()); !errors.Is(err, ErrIncompatible) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v", tc.name, err)
		}
		must(t, Cleanup(w.bpffs, ""))
	}
	// Numbers are not worth refusing to start.
	must(t, os.MkdirAll(dir, 0o700))
	m := spec.Maps[steerMapShuntStats].Copy()
	m.Pinning, m.MaxEntries = ebpf.PinNone, 3
	old, err := ebpf.NewMap(m)
	must(t, err)
	must(t, old.Pin(filepath.Join(dir, steerMapShuntStats)))
	old.Close()
	d := w.open(w.options())
	if n := d.Status().Notices; len(n) != 1 || !strings.Contains(n[0], steerMapShuntStats) {
		t.Errorf("notices %q", n)
	}
	must(t, d.Close())
	must(t, Cleanup(w.bpffs, ""))

	must(t, os.MkdirAll(filepath.Join(w.bpffs, "shunt", "default", "v99"), 0o700))
	if _, err := w.tryOpen(w.options()); !errors.Is(err, ErrIncompatible) || !strings.Contains(err.Error(), "abi 99") {
		t.Errorf("another abi: %v", err)
	}
}

// A daemon sees which capability is missing, by name.
func TestCapabilities(t *testing.T) {
	if os.Getenv("SHUNT_TEST_PROBE") == "1" {
		if err := Probe(); err != nil {
			os.Stdout.WriteString("probe: " + err.Error() + "\n")
		}
		return
	}
	need(t, Probe())
	if os.Geteuid() != 0 {
		need(t, errors.New("needs root to become somebody else"))
	}
	for _, tc := range []struct {
		name string
		caps []uintptr
		want string
	}{
		{"none", nil, "needs CAP_BPF and CAP_NET_ADMIN and CAP_PERFMON"},
		{"net_admin", []uintptr{unix.CAP_NET_ADMIN}, "needs CAP_BPF and CAP_PERFMON"},
		{"no perfmon", []uintptr{unix.CAP_NET_ADMIN, unix.CAP_BPF}, "needs CAP_PERFMON"},
		{"sys_admin", []uintptr{unix.CAP_SYS_ADMIN}, "needs CAP_NET_ADMIN"},
		{"all", []uintptr{unix.CAP_NET_ADMIN, unix.CAP_BPF, unix.CAP_PERFMON}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cmd := exec.Command("/proc/self/exe", "-test.run=^TestCapabilities$")
			cmd.Env = []string{"SHUNT_TEST_PROBE=1"}
			cmd.Dir = "/"
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}, AmbientCaps: tc.caps}
			out, err := cmd.CombinedOutput()
			must(t, err)
			_, said, _ := strings.Cut(string(out), "probe: ")
			if tc.want == "" {
				// The machine may have no bpffs mounted; that is all that may be missing then.
				if said != "" && !strings.Contains(said, "no bpf file system") {
					t.Errorf("probe says %s", said)
				}
				return
			}
			if !strings.Contains(said, tc.want+"\n") {
				t.Errorf("probe says %q, want %q", said, tc.want)
			}
		})
	}
}

// Backends that leave keep their records while flows need them, and not longer.
func TestBackendLeaves(t *testing.T) {
	w := newWorld(t, 1, 2)
	d, _ := w.start(w.options(), false)
	must(t, d.PinTable().Put(w.pinKey(0, false), session.Pin{Backend: 1, Generation: 7, Sessions: 1}))
	keep := w.client(0, true)
	w.expect(keep, false, "e1")
	must(t, d.SetBackends(w.records(false)[1:]))
	w.expect(keep, false, "e1")
	var b steerBackend
	if err := d.m.ShuntBackends.Lookup(uint32(1), &b); err != nil || b.State != uint32(fleet.HealthDown) {
		t.Errorf("record of a backend with a flow: %+v, %v", b, err)
	}
	eventually(t, "its pin is gone", func() bool { _, live := d.PinTable().Get(w.pinKey(0, false)); return !live })
	w.expect(w.client(0, false), false, "l7")
	keep.CloseIdleConnections()
	eventually(t, "its record is gone", func() bool {
		return errors.Is(d.m.ShuntBackends.Lookup(uint32(1), &b), ebpf.ErrKeyNotExist)
	})
	for _, bad := range [][]BackendRecord{
		{{ID: 0, Name: "x"}}, {{ID: fleet.MaxBackends, Name: "x"}}, {{ID: 1, Name: strings.Repeat("x", 32)}},
		{{ID: 1, Name: "x"}, {ID: 1, Name: "y"}},
	} {
		if err := d.SetBackends(bad); err == nil {
			t.Errorf("took %+v", bad)
		}
	}
}

// The next daemon may have other VIPs: pins of one that stays are kept, those of one that is gone go for good.
func TestOtherVIPsAfterRestart(t *testing.T) {
	w := newWorld(t, 1, 1)
	d, stop := w.start(w.options(), false)
	pin := session.Pin{Backend: 1, Generation: 7, Sessions: 1}
	for _, v6 := range []bool{false, true} {
		must(t, d.PinTable().Put(w.pinKey(0, v6), pin))
	}
	stop()
	o := w.options()
	o.VIPs = o.VIPs[:1]
	d, stop = w.start(o, false)
	if _, live := d.PinTable().Get(w.pinKey(0, false)); !live {
		t.Error("the pin of the VIP that stays is gone")
	}
	w.expect(w.client(0, false), false, "e1")
	if err := d.PinTable().Put(w.pinKey(0, true), pin); !errors.Is(err, ErrUnknownVIP) {
		t.Errorf("pin on a VIP that is gone: %v", err)
	}
	stop()
	d, _ = w.start(w.options(), false)
	if _, live := d.PinTable().Get(w.pinKey(0, true)); live {
		t.Error("a pin came back with its VIP")
	}
	if _, live := d.PinTable().Get(w.pinKey(0, false)); !live {
		t.Error("the pin of the VIP that stayed is gone")
	}
	w.expect(w.client(0, false), false, "e1")
}
