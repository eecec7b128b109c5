// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/pkg/netdev"
)

// doctor collects findings.
type doctor struct {
	o    Options
	net  *netdev.Net
	list []Finding
}

func (d *doctor) add(verdict, what, remedy, detail string, args ...any) {
	d.list = append(d.list, Finding{Verdict: verdict, What: what, Detail: fmt.Sprintf(detail, args...), Remedy: remedy})
}

// Diagnose looks at all that the kernel path needs on this machine, for these options and backends, and says what to do
// about what is missing. It changes nothing, but asks for the backends' neighbours; it may run beside a daemon.
func Diagnose(ctx context.Context, o Options, backends []BackendRecord) []Finding {
	d := &doctor{o: o}
	d.kernel()
	d.privileges()
	d.pins()
	n, err := netdev.Open()
	if err != nil {
		d.add(FindingFail, "network", "", "%v", err)
		return d.list
	}
	defer n.Close()
	d.net = n
	for _, name := range o.Interfaces {
		d.nic(name)
	}
	if len(o.Interfaces) == 0 {
		d.add(FindingWarn, "interfaces", "name them in steering.interfaces", "none is configured: nothing is steered")
	}
	d.vips()
	for _, b := range backends {
		d.backend(ctx, b)
	}
	return d.list
}

func (d *doctor) kernel() {
	major, minor, release := kernelVersion()
	switch at := major*1000 + minor; {
	case at < 5018:
		d.add(FindingFail, "kernel", "run Linux 5.18 or later", "%s has no XDP for frames of several buffers", release)
	case at < 6006:
		d.add(FindingWarn, "kernel", "run Linux 6.6 or later for virtual devices", "%s has no tcx: on virtual devices XDP is used", release)
	default:
		d.add(FindingOK, "kernel", "", "%s", release)
	}
	if _, err := os.Stat("/sys/kernel/btf/vmlinux"); err != nil {
		d.add(FindingWarn, "BTF", "use a kernel with CONFIG_DEBUG_INFO_BTF", "the kernel has none: bpftool cannot name what maps hold")
	}
	switch jit := sysctl("net/core/bpf_jit_enable"); jit {
	case "0":
		d.add(FindingWarn, "JIT", "sysctl -w net.core.bpf_jit_enable=1", "off: the program is interpreted, many times slower")
	case "":
		d.add(FindingOK, "JIT", "", "always on")
	default:
		d.add(FindingOK, "JIT", "", "on")
	}
	clock, _ := os.ReadFile("/sys/devices/system/clocksource/clocksource0/current_clocksource")
	switch c := strings.TrimSpace(string(clock)); c {
	case "hpet", "acpi_pm", "jiffies", "refined-jiffies":
		d.add(FindingWarn, "clock", "find out why the kernel distrusts the processor's clock (dmesg)", "%s is slow to read", c)
	default:
		d.add(FindingOK, "clock", "", "%s", c)
	}
}

func kernelVersion() (major, minor int, release string) {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return 0, 0, "unknown"
	}
	release = unix.ByteSliceToString(u.Release[:])
	_, _ = fmt.Sscanf(release, "%d.%d", &major, &minor)
	return major, minor, release
}

// sysctl returns a value, "" when there is none.
func sysctl(key string) string {
	b, err := os.ReadFile("/proc/sys/" + key)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func (d *doctor) privileges() {
	if err := checkCapabilities(); err != nil {
		d.add(FindingFail, "capabilities", "give them to the process (AmbientCapabilities= of the unit, securityContext of the pod)", "%v", err)
		return
	}
	if hasCapability(unix.CAP_NET_RAW) {
		d.add(FindingOK, "capabilities", "", "all there")
	} else {
		d.add(FindingWarn, "capabilities", "add CAP_NET_RAW", "without CAP_NET_RAW clients of a dead host hear of it only when they send")
	}
	if err := Probe(); err != nil {
		d.add(FindingFail, "program", "", "%v", err)
		return
	}
	d.add(FindingOK, "program", "", "the verifier takes it")
}

func (d *doctor) pins() {
	places := []string{d.o.BPFFS}
	if d.o.BPFFS == "" {
		places = []string{systemBPFFS, ownBPFFS}
	}
	instance, err := checkInstance(d.o.Instance)
	if err != nil {
		d.add(FindingFail, "instance", "", "%v", err)
		return
	}
	for _, p := range places {
		if !isBPFFS(p) {
			continue
		}
		d.add(FindingOK, "bpffs", "", "%s", p)
		dir := p + "/" + pinRoot + "/" + instance
		list, _ := os.ReadDir(dir)
		for _, e := range list {
			var v uint32
			if n, _ := fmt.Sscanf(e.Name(), "v%d", &v); n == 1 && v != abi {
				d.add(FindingFail, "pinned maps", "let their flows end and run `shunt cleanup` with the former version",
					"%s holds maps of abi %d, this shunt has abi %d", dir, v, abi)
			}
		}
		return
	}
	switch private, err := privateMounts(); {
	case d.o.BPFFS != "":
		d.add(FindingFail, "bpffs", "mount -t bpf bpf "+d.o.BPFFS, "%s is no bpf file system", d.o.BPFFS)
	case err == nil && private:
		d.add(FindingFail, "bpffs", "mount it on the host: mount -t bpf bpf "+systemBPFFS, "none, and one that is mounted here would end with this process")
	case hasCapability(unix.CAP_SYS_ADMIN):
		d.add(FindingOK, "bpffs", "", "none yet; the daemon mounts one")
	default:
		d.add(FindingFail, "bpffs", "mount -t bpf bpf "+systemBPFFS, "none, and mounting one needs CAP_SYS_ADMIN")
	}
}

func (d *doctor) nic(name string) {
	l, err := d.net.Link(name)
	if err != nil {
		d.add(FindingFail, name, "correct steering.interfaces", "%v", err)
		return
	}
	want := (&Datapath{opt: d.o}).wantedModes(l)
	about := fmt.Sprintf("%s, driver %q, MTU %d, wants %s", l.Kind, l.Driver, l.MTU, want[0])
	switch {
	case !l.Up:
		d.add(FindingFail, name, "ip link set "+name+" up", "%s: it is down", about)
	case l.MAC.IsZero():
		d.add(FindingFail, name, "choose an Ethernet interface", "%s: it has no hardware address", about)
	default:
		d.add(FindingOK, name, "", "%s", about)
	}
	d.foreignProgram(name, l, want)
	if l.XDP == netdev.XDPNone && want[0] == modeTCX {
		return // what follows concerns XDP
	}
	off, err := d.net.Offloads(name)
	if err != nil {
		return
	}
	if off.LRO {
		d.add(FindingFail, name, "ethtool -K "+name+" lro off", "LRO is on: drivers refuse XDP with it")
	}
	if off.RxVLAN && want[0] != modeTCX {
		d.add(FindingWarn, name, "ethtool -K "+name+" rxvlan off, if clients come in on a VLAN", "the card takes VLAN tags off before the program sees a frame")
	}
}

func (d *doctor) foreignProgram(name string, l netdev.Link, want []attachMode) {
	if l.XDP == netdev.XDPNone {
		return
	}
	err := foreign(l)
	if strings.Contains(err.Error(), steerProgShuntXdp) {
		d.add(FindingOK, name, "", "a shunt is attached (%s XDP)", l.XDP)
		return
	}
	verdict := FindingFail
	if want[0] == modeTCX {
		verdict = FindingWarn
	}
	d.add(verdict, name, "use attach: tcx beside it, or another interface; shunt never replaces it", "%v", err)
}

func (d *doctor) vips() {
	dp := &Datapath{opt: d.o, net: d.net}
	if len(d.o.VIPs) == 0 {
		return
	}
	if err := dp.checkSettings(d.o.Settings); err != nil {
		d.add(FindingFail, "vips and ports", "", "%v", err)
	} else {
		d.add(FindingOK, "vips and ports", "", "%d VIPs, NAT ports %s", len(d.o.VIPs), d.o.NATPorts)
	}
	for _, v := range d.o.VIPs {
		for _, a := range []netip.Addr{v.Addr.Addr(), v.snat()} {
			if local, err := d.net.IsLocal(a); err == nil && !local {
				d.add(FindingWarn, "address "+a.String(), "ip addr add "+a.String()+" dev NIC", "is not this host's: nothing is sent to it here")
			}
			if v.DSR || a == v.Addr.Addr() && v.snat() == a {
				break
			}
		}
	}
	if len(d.o.Interfaces) > 1 && (sysctl("net/ipv4/conf/all/rp_filter") == "1") {
		d.add(FindingWarn, "rp_filter", "sysctl -w net.ipv4.conf.all.rp_filter=2",
			"strict: what passes to the L7 on an interface that does not lead back to the client is dropped by the stack")
	}
}

func (d *doctor) backend(ctx context.Context, b BackendRecord) {
	what := "backend " + b.Name
	if !b.Steer.IsValid() {
		d.add(FindingWarn, what, "give it a steer: address", "has no address to steer to")
		return
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	r, mac, err := d.net.Resolve(ctx, b.Steer.Addr())
	switch {
	case errors.Is(err, netdev.ErrNoNeighbour):
		d.add(FindingFail, what, "look whether the host is up and on that network", "%v", err)
		return
	case err != nil:
		d.add(FindingFail, what, "add a route", "%v", err)
		return
	case r.Local:
		d.add(FindingOK, what, "", "%s is on this host: the local L7 serves it", b.Steer)
		return
	}
	l, err := d.net.LinkByIndex(r.Index)
	if err != nil {
		d.add(FindingFail, what, "", "%v", err)
		return
	}
	listed := false
	for _, name := range d.o.Interfaces {
		listed = listed || name == l.Name
		if n, err := d.net.Link(name); err == nil && n.MTU > l.MTU {
			d.add(FindingWarn, what, "give both networks the same MTU", "%s is reached through %s with MTU %d, clients come in with %d on %s", b.Steer, l.Name, l.MTU, n.MTU, name)
		}
	}
	if !listed {
		d.add(FindingFail, what, "add "+l.Name+" to steering.interfaces", "%s is reached through %s, where the program would miss its answers", b.Steer, l.Name)
		return
	}
	if ports := d.o.dsr(); len(ports) > 0 && (r.Next != b.Steer.Addr().Unmap() || !ports[b.Steer.Port()]) {
		d.add(FindingFail, what, "use mode nat for it", "%s: with dsr it must be on the same network and have the VIP's port", b.Steer)
		return
	}
	d.add(FindingOK, what, "", "%s through %s, next hop %s (%s)", b.Steer, l.Name, r.Next, mac)
}
