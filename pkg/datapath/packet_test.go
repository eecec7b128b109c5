// SPDX-License-Identifier: Apache-2.0

//go:build linux

package datapath

import (
	"bytes"
	"errors"
	"net/netip"
	"os"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"github.com/shunt-lb/shunt/pkg/datapath/dptest"
	"github.com/shunt-lb/shunt/pkg/netdev"
	"golang.org/x/sys/unix"
)

// The world that the packet tests play in. It is a table of plain values: a test changes one and looks at what follows.
const (
	worldVIP     = 7
	worldBackend = 3
	worldTokens  = 50
	worldOIF     = 1
)

var (
	macClient  = dptest.MAC{2, 0, 0, 0, 0, 1}
	macLB      = dptest.MAC{2, 0, 0, 0, 0, 2}
	macBackend = dptest.MAC{2, 0, 0, 0, 0, 3}
	macLB2     = dptest.MAC{2, 0, 0, 0, 0, 4}
)

// family is one address family's set of addresses.
type family struct {
	name                 string
	client, vip, backend netip.AddrPort
	snat                 netip.Addr
	tcx                  bool // the other attach point
}

var families = []family{
	{"v4", netip.MustParseAddrPort("198.51.100.5:40000"), netip.MustParseAddrPort("192.0.2.1:8080"), netip.MustParseAddrPort("192.0.2.67:8000"), netip.MustParseAddr("192.0.2.9"), false},
	{"v6", netip.MustParseAddrPort("[2001:db8:1::5]:40000"), netip.MustParseAddrPort("[2001:db8::1]:8080"), netip.MustParseAddrPort("[2001:db8:2:3::67]:8000"), netip.MustParseAddr("2001:db8::9"), false},
}

func eachFamily(t *testing.T, f func(t *testing.T, fam family)) {
	for _, fam := range families {
		t.Run(fam.name, func(t *testing.T) { f(t, fam) })
	}
}

// eachPath is eachFamily at both attach points.
func eachPath(t *testing.T, f func(t *testing.T, fam family)) {
	eachFamily(t, f)
	for _, fam := range families {
		fam.tcx = true
		t.Run(fam.name+" tcx", func(t *testing.T) { f(t, fam) })
	}
}

// rigOptions change what is loaded, not what the maps hold.
type rigOptions struct {
	flows int
	uses  int
	vars  map[string]any
}

type rig struct {
	testing.TB
	o   steerObjects
	run dptest.Runner
	fam family
	cfg steerConfig
	vip steerVip
	be  steerBackend
	pin steerSession
}

// xdpMd is struct xdp_md.
type xdpMd struct{ Data, DataEnd, DataMeta, IngressIfindex, RxQueueIndex, EgressIfindex uint32 }

// skBuff is struct __sk_buff.
type skBuff struct {
	_       [10]uint32
	Ifindex uint32
	_       [35]uint32
}

// newRig loads the program with maps of its own, and sets up a pin that steers fam's client.
func newRig(t testing.TB, fam family, opts rigOptions) *rig {
	t.Helper()
	need(t, probeBPF())
	spec, err := loadSteer()
	if err != nil {
		t.Fatalf("read object: %v", err)
	}
	for _, m := range spec.Maps {
		m.Pinning = ebpf.PinNone
	}
	if opts.flows == 0 {
		opts.flows = 4096
	}
	spec.Maps["shunt_flows"].MaxEntries = uint32(opts.flows)
	spec.Maps["shunt_flows6"].MaxEntries = uint32(opts.flows)
	spec.Maps["shunt_sessions"].MaxEntries = 4096
	spec.Maps["shunt_sess_use"].MaxEntries = 4096
	if opts.uses > 0 {
		spec.Maps["shunt_sess_use"].MaxEntries = uint32(opts.uses)
	}
	for name, v := range opts.vars {
		if err := spec.Variables[name].Set(v); err != nil {
			t.Fatalf("set %s: %v", name, err)
		}
	}
	r := &rig{TB: t, fam: fam}
	if err := spec.LoadAndAssign(&r.o, nil); err != nil {
		t.Fatalf("load programs: %+v", err)
	}
	t.Cleanup(func() { _ = r.o.Close() })
	r.run = func(frame []byte) (uint32, []byte, error) {
		// The kernel wants at least an Ethernet header; contents of short frames are its own business.
		out := make([]byte, len(frame)+64)
		if fam.tcx {
			ro := ebpf.RunOptions{Data: frame, DataOut: out, Context: &skBuff{Ifindex: worldOIF}}
			v, err := r.o.ShuntTcx.Run(&ro)
			switch int32(v) { // TCX_*
			case -1:
				v = dptest.Pass
			case 2:
				v = dptest.Drop
			case 7:
				v = dptest.Redirect
			default:
				v += 100
			}
			return v, ro.DataOut, err
		}
		ro := ebpf.RunOptions{Data: frame, DataOut: out, Context: &xdpMd{DataEnd: uint32(len(frame)), IngressIfindex: worldOIF}}
		v, err := r.o.ShuntXdp.Run(&ro)
		return v, ro.DataOut, err
	}
	r.reset()
	return r
}

// reset empties the maps and sets the world up anew.
func (r *rig) reset() {
	r.Helper()
	for _, m := range []*ebpf.Map{r.o.ShuntFlows, r.o.ShuntFlows6, r.o.ShuntSessions, r.o.ShuntSessUse, r.o.ShuntVips, r.o.ShuntBackends} {
		var keys [][]byte
		var k, v []byte
		for it := m.Iterate(); it.Next(&k, &v); {
			keys = append(keys, bytes.Clone(k))
		}
		for _, k := range keys {
			if err := m.Delete(k); err != nil {
				r.Fatalf("empty %v: %v", m, err)
			}
		}
	}
	r.put(r.o.ShuntAdmin, uint32(worldBackend), steerAdminWord{})
	r.put(r.o.ShuntEpochs, uint32(worldBackend), steerEpoch{})
	var ports portBits
	ports.add(netdev.PortRange{First: 20000, Last: 20999})
	ports.add(netdev.PortRange{First: r.fam.vip.Port(), Last: r.fam.vip.Port()})
	r.put(r.o.ShuntPorts, uint32(0), unsafe.Slice((*byte)(unsafe.Pointer(&ports)), unsafe.Sizeof(ports)))
	fam, now := r.fam, monotonic()
	r.cfg = steerConfig{Abi: uint32(steerShuntSizesSHUNT_ABI), SessionIdleNs: uint64(time.Minute), HeartbeatNs: now + uint64(time.Hour), HeartbeatMaxNs: uint64(time.Second)}
	r.vip = steerVip{Id: worldVIP, Mode: uint32(steerShuntModeNAT), Snat: fam.snat.As16(), PortBase: 20000, PortCount: 1000}
	r.be = steerBackend{Addr: fam.backend.Addr().As16(), Mac: macBackend, SrcMac: macLB2, Ifindex: worldOIF, Port: fam.backend.Port(), State: uint32(steerShuntStateUP), Generation: 4}
	r.pin = steerSession{Backend: worldBackend, Generation: 4, SinceNs: now, Tokens: worldTokens, Sessions: 1, Serial: 1}
	r.setConfig()
	r.put(r.o.ShuntVips, steerVipKey{Addr: fam.vip.Addr().As16(), Port: fam.vip.Port()}, r.vip)
	r.setBackend()
	r.setWeight(steerWeight{Limit: 1000})
	r.setPin()
}

// Enumerators whose generated names are long.
const (
	steerShuntModeNAT = 1
	steerShuntStateUP = 1
)

func monotonic() uint64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(err)
	}
	return uint64(ts.Nano())
}

func (r *rig) put(m *ebpf.Map, k, v any) {
	r.Helper()
	if err := m.Put(k, v); err != nil {
		r.Fatalf("write %v: %v", m, err)
	}
}

func (r *rig) setConfig()              { r.Helper(); r.put(r.o.ShuntConfig, uint32(0), r.cfg) }
func (r *rig) setBackend()             { r.Helper(); r.put(r.o.ShuntBackends, uint32(worldBackend), r.be) }
func (r *rig) setWeight(w steerWeight) { r.Helper(); r.put(r.o.ShuntWeights, uint32(worldBackend), w) }
func (r *rig) setPin()                 { r.Helper(); r.put(r.o.ShuntSessions, r.sessionKey(), r.pin) }

func (r *rig) sessionKey() steerSessionKey {
	return steerSessionKey{Client: r.fam.client.Addr().As16(), VipId: worldVIP, Port: r.fam.vip.Port()}
}

func (r *rig) weight() steerWeight {
	r.Helper()
	var w steerWeight
	if err := r.o.ShuntWeights.Lookup(uint32(worldBackend), &w); err != nil {
		r.Fatalf("read weight: %v", err)
	}
	return w
}

// wantKernel compares the kernel's words of the backend's weight.
func (r *rig) wantKernel(tokens, halfOpen, flows int64) {
	r.Helper()
	if w := r.weight(); w.KernelTokens != tokens || w.KernelHalfOpen != halfOpen || w.KernelFlows != flows {
		r.Fatalf("kernel tokens %d, half open %d, flows %d; want %d, %d, %d", w.KernelTokens, w.KernelHalfOpen, w.KernelFlows, tokens, halfOpen, flows)
	}
}

func (r *rig) use() (u steerSessionUse, ok bool) {
	r.Helper()
	err := r.o.ShuntSessUse.Lookup(r.sessionKey(), &u)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		r.Fatalf("read use: %v", err)
	}
	return u, err == nil
}

func (r *rig) drops(why steerShuntReason) (n uint64) {
	r.Helper()
	var per []steerDrop
	if err := r.o.ShuntDrops.Lookup(uint32(why), &per); err != nil {
		r.Fatalf("read drops: %v", err)
	}
	for _, d := range per {
		if d.Count > 0 && d.Reason != why {
			r.Fatalf("drops of %d say reason %d", why, d.Reason)
		}
		n += d.Count
	}
	return n
}

// wantReason runs a frame that must be left alone, for that reason and no other.
func (r *rig) wantReason(frame []byte, why steerShuntReason) {
	r.Helper()
	var before [steerShuntReasonSHUNT_REASON_MAX]uint64
	for i := range before {
		before[i] = r.drops(steerShuntReason(i))
	}
	want := uint32(dptest.Pass)
	if why >= steerShuntReasonSHUNT_DROP_ODD_HEADER {
		want = dptest.Drop
	}
	verdict, out, err := r.run(frame)
	if err != nil {
		r.Fatalf("run frame: %v", err)
	}
	for i := range before {
		grown, should := r.drops(steerShuntReason(i))-before[i], uint64(0)
		if steerShuntReason(i) == why {
			should = 1
		}
		if grown != should {
			r.Errorf("reason %d counted %d times, want reason %d once", i, grown, why)
		}
	}
	if verdict != want {
		r.Fatalf("verdict is %d, want %d", verdict, want)
	}
	if string(out) != string(frame) {
		r.Fatalf("a packet that is not forwarded changed:\n%x\n%x", frame, out)
	}
}

func flowKey(src, dst netip.AddrPort) steerFlowKey {
	return steerFlowKey{Src: src.Addr().As16(), Dst: dst.Addr().As16(), Sport: src.Port(), Dport: dst.Port()}
}

func (r *rig) flow(src, dst netip.AddrPort) (f steerFlow, ok bool) {
	r.Helper()
	f, err := r.o.flow(flowKey(src, dst))
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		r.Fatalf("read flow: %v", err)
	}
	return f, err == nil
}

// putFlow writes an entry of either family.
func (r *rig) putFlow(k steerFlowKey, f steerFlow) {
	r.Helper()
	src, dst := fromBytes(k.Src), fromBytes(k.Dst)
	if !src.Is4() {
		r.put(r.o.ShuntFlows6, k, f)
		return
	}
	r.put(r.o.ShuntFlows, steerFlowKey4{Src: src.As4(), Dst: dst.As4(), Sport: k.Sport, Dport: k.Dport}, f)
}

func (r *rig) wantFlags(src, dst netip.AddrPort, set, clear steerShuntFlowFlags) steerFlow {
	r.Helper()
	f, ok := r.flow(src, dst)
	if !ok {
		r.Fatalf("no flow %v > %v", src, dst)
	}
	if got := steerShuntFlowFlags(f.Flags); got&set != set || got&clear != 0 {
		r.Fatalf("flow %v > %v has flags %#x, want %#x and not %#x", src, dst, got, set, clear)
	}
	return f
}

func (r *rig) countFlows() (n int) {
	r.Helper()
	if err := r.o.scanFlows(func(steerFlowKey, *steerFlow) { n++ }); err != nil {
		r.Fatalf("walk flows: %v", err)
	}
	return n
}

// events drains the ring.
func (r *rig) events() map[uint32][]steerEvent {
	r.Helper()
	rd, err := ringbuf.NewReader(r.o.ShuntEvents)
	if err != nil {
		r.Fatalf("open events: %v", err)
	}
	defer rd.Close()
	rd.SetDeadline(time.Now())
	got := map[uint32][]steerEvent{}
	for {
		rec, err := rd.Read()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return got
		}
		if err != nil {
			r.Fatalf("read event: %v", err)
		}
		e := decodeEvent(rec.RawSample)
		got[e.Kind] = append(got[e.Kind], e)
	}
}

// conn is one steered connection, seen from both its ends.
type conn struct {
	r          *rig
	client     netip.AddrPort // as the client sees itself
	nat        netip.AddrPort // as the backend sees the client
	cseq, bseq uint32         // next byte of each side
}

func (r *rig) syn(client netip.AddrPort) dptest.Packet {
	return dptest.Packet{From: macClient, To: macLB, Src: client, Dst: r.fam.vip, Seq: 1000, Flags: dptest.SYN, Options: mss}
}

// open sends a SYN that must be steered.
func (r *rig) open(client netip.AddrPort) *conn {
	r.Helper()
	p := r.run.Forwarded(r, r.syn(client))
	if p.Dst != r.fam.backend || p.Src.Addr() != r.fam.snat || p.From != macLB2 || p.To != macBackend {
		r.Fatalf("SYN left as %+v", p)
	}
	if n := p.Src.Port() - r.vip.PortBase; n >= r.vip.PortCount {
		r.Fatalf("NAT port %d is out of range", p.Src.Port())
	}
	return &conn{r: r, client: client, nat: p.Src, cseq: 1001, bseq: 5000}
}

// establish completes the handshake.
func (c *conn) establish() *conn {
	c.r.Helper()
	c.backend(dptest.SYN|dptest.ACK, "")
	c.fromClient(dptest.ACK, "")
	return c
}

// fromClient sends a segment of the client, which acknowledges all that the backend sent.
func (c *conn) fromClient(flags uint8, payload string) dptest.Packet {
	c.r.Helper()
	p := dptest.Packet{From: macClient, To: macLB, Src: c.client, Dst: c.r.fam.vip, Seq: c.cseq, Ack: c.bseq, Flags: flags, Payload: []byte(payload)}
	q := c.r.run.Forwarded(c.r, p)
	if q.Src != c.nat || q.Dst != c.r.fam.backend {
		c.r.Fatalf("client's segment left as %v > %v", q.Src, q.Dst)
	}
	c.cseq = p.End()
	return q
}

// backend sends a segment of the backend, which acknowledges all that the client sent.
func (c *conn) backend(flags uint8, payload string) dptest.Packet {
	c.r.Helper()
	p := dptest.Packet{From: macBackend, To: macLB2, Src: c.r.fam.backend, Dst: c.nat, Seq: c.bseq, Ack: c.cseq, Flags: flags, Payload: []byte(payload)}
	q := c.r.run.Forwarded(c.r, p)
	if q.Src != c.r.fam.vip || q.Dst != c.client || q.To != macClient || q.From != macLB {
		c.r.Fatalf("backend's segment left as %+v", q)
	}
	c.bseq = p.End()
	return q
}

// port is the client's address with another port.
func (r *rig) port(n int) netip.AddrPort {
	return netip.AddrPortFrom(r.fam.client.Addr(), r.fam.client.Port()+uint16(n))
}

// eventually waits for the sweep, which runs in the kernel's own time.
func (r *rig) eventually(what string, ok func() bool) {
	r.Helper()
	for end := time.Now().Add(10 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			r.Fatalf("never happened: %s", what)
		}
	}
}
