// SPDX-License-Identifier: Apache-2.0

//go:build linux

package datapath

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"
	"github.com/shunt-lb/shunt/pkg/datapath/dptest"
)

var mss = []layers.TCPOption{{OptionType: layers.TCPOptionKindMSS, OptionLength: 4, OptionData: []byte{5, 180}}, {OptionType: layers.TCPOptionKindSACKPermitted, OptionLength: 2}}

func decodeEvent(raw []byte) (e steerEvent) {
	if err := binary.Read(bytes.NewReader(raw), binary.LittleEndian, &e); err != nil {
		panic(err)
	}
	return e
}

func TestPacketConnection(t *testing.T) {
	eachPath(t, func(t *testing.T, fam family) {
		r := newRig(t, fam, rigOptions{})
		c := r.open(fam.client)
		r.wantKernel(worldTokens, worldTokens, 1)
		c.backend(dptest.SYN|dptest.ACK, "")
		r.wantKernel(worldTokens, worldTokens, 1)
		c.fromClient(dptest.ACK, "")
		r.wantKernel(worldTokens, 0, 1)
		for _, body := range []string{"", "a", "abc", strings.Repeat("xyz", 400), "\xff\xff", "\x00"} {
			c.fromClient(dptest.ACK|dptest.PSH, body)
			c.backend(dptest.ACK|dptest.PSH, body+"0")
		}
		if u, ok := r.use(); !ok || u.Open != 1 || u.Connections != 1 || u.Serial != 1 || u.LastNs == 0 {
			t.Fatalf("use record is %+v, %v", u, ok)
		}
		c.fromClient(dptest.FIN|dptest.ACK, "")
		c.backend(dptest.FIN|dptest.ACK, "")
		c.fromClient(dptest.ACK, "")
		r.wantKernel(0, 0, 0)
		if u, _ := r.use(); u.Open != 0 {
			t.Fatalf("use record is %+v", u)
		}
		ev := r.events()
		opened, closed := ev[uint32(1)], ev[uint32(2)]
		if len(opened) != 1 || len(closed) != 1 {
			t.Fatalf("events: %+v", ev)
		}
		if o := opened[0]; o.Backend != worldBackend || o.Client != fam.client.Addr().As16() || o.ClientPort != fam.client.Port() || o.VipPort != fam.vip.Port() || o.Tokens != worldTokens {
			t.Fatalf("open event: %+v", o)
		}
		if e := closed[0]; e.Tokens != worldTokens || e.BytesIn < 1200 || e.BytesOut < 1200 || e.VipId != worldVIP {
			t.Fatalf("close event: %+v", e)
		}
		var per []steerStat
		if err := r.o.ShuntStats.Lookup(uint32(worldBackend), &per); err != nil {
			t.Fatal(err)
		}
		var sum steerStat
		for _, s := range per {
			sum.PacketsIn += s.PacketsIn
			sum.PacketsOut += s.PacketsOut
			sum.Opened += s.Opened
			sum.Closed += s.Closed
		}
		if sum.PacketsIn != 10 || sum.PacketsOut != 8 || sum.Opened != 1 || sum.Closed != 1 {
			t.Fatalf("stats: %+v", sum)
		}
	})
}

// TestPacketSumCorners sends segments whose checksums come out as 0 and 0xffff on either side of the rewrite.
func TestPacketSumCorners(t *testing.T) {
	eachPath(t, func(t *testing.T, fam family) {
		r := newRig(t, fam, rigOptions{})
		c := r.open(fam.client).establish()
		corners := map[uint16]bool{}
		l4 := 14 + 20
		if fam.client.Addr().Is6() {
			l4 = 14 + 40
		}
		for i := range 1 << 16 {
			p := dptest.Packet{From: macClient, To: macLB, Src: c.client, Dst: fam.vip, Seq: c.cseq, Ack: c.bseq, Flags: dptest.ACK, Payload: []byte{byte(i >> 8), byte(i)}}
			frame := p.Bytes()
			sum := binary.BigEndian.Uint16(frame[l4+16:])
			near := sum == 0 || sum == 1 || sum >= 0xfffe
			if !near && i%1021 != 0 {
				// What leaves may be a corner too: its sum differs by a constant.
				continue
			}
			corners[sum] = true
			v, out, err := r.run(frame)
			if err != nil || v != dptest.Redirect {
				t.Fatal(v, err)
			}
			if err := dptest.Verify(out); err != nil {
				t.Fatalf("sum %#04x: %v", sum, err)
			}
		}
		if !corners[0] && !corners[0xffff] {
			t.Fatal("met no corner")
		}
	})
}

// TestPacketReasons changes one thing of a world in which the SYN would be steered.
func TestPacketReasons(t *testing.T) {
	type frame = []byte
	later := func(d time.Duration) uint64 { return uint64(int64(monotonic()) + int64(d)) }
	rigs := sharedRigs(t)
	for _, tc := range []struct {
		name string
		why  steerShuntReason
		edit func(r *rig, p *dptest.Packet)
		raw  func(f frame) frame
	}{
		{"not IP", steerShuntReasonSHUNT_PASS_NOT_IP, nil, func(f frame) frame { f[12], f[13] = 0x08, 0x06; return f }},
		{"no IP version", steerShuntReasonSHUNT_PASS_NOT_IP, nil, func(f frame) frame { f[14] &= 0x0f; return f }},
		{"one tag", steerShuntReasonSHUNT_PASS_VLAN, func(r *rig, p *dptest.Packet) { p.VLANs = []uint16{5} }, nil},
		{"two tags", steerShuntReasonSHUNT_PASS_VLAN, func(r *rig, p *dptest.Packet) { p.VLANs = []uint16{5, 6} }, nil},
		{"three tags", steerShuntReasonSHUNT_PASS_VLAN, func(r *rig, p *dptest.Packet) { p.VLANs = []uint16{5, 6, 7} }, nil},
		{"UDP", steerShuntReasonSHUNT_PASS_NOT_TCP, nil, func(f frame) frame {
			if f[14]>>4 == 4 {
				f[14+9] = 17
			} else {
				f[14+6] = 17
			}
			return f
		}},
		{"cut in the ports", steerShuntReasonSHUNT_PASS_ODD_HEADER, func(r *rig, p *dptest.Packet) { p.Options = nil; p.Cut = 18 }, nil},
		{"cut in the TCP header", steerShuntReasonSHUNT_PASS_ODD_HEADER, func(r *rig, p *dptest.Packet) { p.Options = nil; p.Cut = 1 }, nil},
		{"multicast frame", steerShuntReasonSHUNT_PASS_ODD_HEADER, func(r *rig, p *dptest.Packet) { p.To[0] = 3 }, nil},
		{"plain ACK", steerShuntReasonSHUNT_PASS_NO_FLOW, func(r *rig, p *dptest.Packet) { p.Flags = dptest.ACK }, nil},
		{"SYN-ACK", steerShuntReasonSHUNT_PASS_NO_FLOW, func(r *rig, p *dptest.Packet) { p.Flags |= dptest.ACK }, nil},
		{"SYN-FIN", steerShuntReasonSHUNT_PASS_NO_FLOW, func(r *rig, p *dptest.Packet) { p.Flags |= dptest.FIN }, nil},
		{"SYN-RST", steerShuntReasonSHUNT_PASS_NO_FLOW, func(r *rig, p *dptest.Packet) { p.Flags |= dptest.RST }, nil},
		{"SYN-URG", steerShuntReasonSHUNT_PASS_NO_FLOW, func(r *rig, p *dptest.Packet) { p.Flags |= dptest.URG }, nil},
		{"other port", steerShuntReasonSHUNT_PASS_OTHER_PORT, func(r *rig, p *dptest.Packet) { p.Dst = netip.AddrPortFrom(p.Dst.Addr(), 8081) }, nil},
		{"other address", steerShuntReasonSHUNT_PASS_NO_VIP, func(r *rig, p *dptest.Packet) { p.Dst = netip.AddrPortFrom(p.Dst.Addr().Next(), p.Dst.Port()) }, nil},
		{"VIP is off", steerShuntReasonSHUNT_PASS_NO_VIP, func(r *rig, p *dptest.Packet) {
			r.vip.Mode = 0
			r.put(r.o.ShuntVips, steerVipKey{Addr: r.fam.vip.Addr().As16(), Port: r.fam.vip.Port()}, r.vip)
		}, nil},
		{"other client", steerShuntReasonSHUNT_PASS_NO_SESSION, func(r *rig, p *dptest.Packet) { p.Src = netip.AddrPortFrom(p.Src.Addr().Next(), p.Src.Port()) }, nil},
		{"idle since written", steerShuntReasonSHUNT_PASS_LEASE_IDLE, func(r *rig, p *dptest.Packet) { r.pin.SinceNs = 1; r.cfg.SessionIdleNs = 1; r.setConfig() }, nil},
		{"idle since used", steerShuntReasonSHUNT_PASS_LEASE_IDLE, func(r *rig, p *dptest.Packet) {
			r.pin.SinceNs = 1
			r.cfg.SessionIdleNs = 1
			r.setConfig()
			r.put(r.o.ShuntSessUse, r.sessionKey(), steerSessionUse{LastNs: 2})
		}, nil},
		{"expired", steerShuntReasonSHUNT_PASS_LEASE_EXPIRED, func(r *rig, p *dptest.Packet) { r.pin.ExpiresNs = later(-1) }, nil},
		{"connections used up", steerShuntReasonSHUNT_PASS_LEASE_USED_UP, func(r *rig, p *dptest.Packet) {
			r.pin.Connections = 2
			r.put(r.o.ShuntSessUse, r.sessionKey(), steerSessionUse{Serial: 1, Connections: 2})
		}, nil},
		{"other generation", steerShuntReasonSHUNT_PASS_GENERATION, func(r *rig, p *dptest.Packet) { r.pin.Generation = 3 }, nil},
		{"backend unknown", steerShuntReasonSHUNT_PASS_BACKEND_UNKNOWN, func(r *rig, p *dptest.Packet) { r.pin.Backend = 9 }, nil},
		{"backend out of range", steerShuntReasonSHUNT_PASS_BACKEND_UNKNOWN, func(r *rig, p *dptest.Packet) { r.pin.Backend = 5000 }, nil},
		{"backend down", steerShuntReasonSHUNT_PASS_BACKEND_DOWN, func(r *rig, p *dptest.Packet) { r.be.State = 2; r.setBackend() }, nil},
		{"backend not yet up", steerShuntReasonSHUNT_PASS_BACKEND_DOWN, func(r *rig, p *dptest.Packet) { r.be.State = 0; r.setBackend() }, nil},
		{"drained", steerShuntReasonSHUNT_PASS_BACKEND_ADMIN, func(r *rig, p *dptest.Packet) { r.put(r.o.ShuntAdmin, uint32(worldBackend), steerAdminWord{State: 1}) }, nil},
		{"maintenance", steerShuntReasonSHUNT_PASS_BACKEND_ADMIN, func(r *rig, p *dptest.Packet) { r.put(r.o.ShuntAdmin, uint32(worldBackend), steerAdminWord{State: 2}) }, nil},
		{"odd admin word", steerShuntReasonSHUNT_PASS_BACKEND_ADMIN, func(r *rig, p *dptest.Packet) { r.put(r.o.ShuntAdmin, uint32(worldBackend), steerAdminWord{State: 77}) }, nil},
		{"backend is here", steerShuntReasonSHUNT_PASS_BACKEND_LOCAL, func(r *rig, p *dptest.Packet) { r.be.Flags = 1; r.setBackend() }, nil},
		{"backend of the other family", steerShuntReasonSHUNT_PASS_BACKEND_FAMILY, func(r *rig, p *dptest.Packet) {
			other := families[0]
			if r.fam.name == "v4" {
				other = families[1]
			}
			r.be.Addr = other.backend.Addr().As16()
			r.setBackend()
		}, nil},
		{"neighbour unknown", steerShuntReasonSHUNT_PASS_NO_NEIGHBOUR, func(r *rig, p *dptest.Packet) { r.be.Mac = dptest.MAC{}; r.setBackend() }, nil},
		{"interface unknown", steerShuntReasonSHUNT_PASS_NO_NEIGHBOUR, func(r *rig, p *dptest.Packet) { r.be.Ifindex = 0; r.setBackend() }, nil},
		{"sampled", steerShuntReasonSHUNT_PASS_SAMPLED, func(r *rig, p *dptest.Packet) { r.cfg.Sample = 1; r.setConfig() }, nil},
		{"too many open flows", steerShuntReasonSHUNT_PASS_OPEN_FLOWS, func(r *rig, p *dptest.Packet) {
			r.cfg.FlowsPerSession, r.cfg.FlowsSlack = 2, 2
			r.setConfig()
			r.put(r.o.ShuntSessUse, r.sessionKey(), steerSessionUse{Open: 4})
		}, nil},
		{"no limit set", steerShuntReasonSHUNT_PASS_OVER_LIMIT, func(r *rig, p *dptest.Packet) { r.setWeight(steerWeight{}) }, nil},
		{"over the limit by the L7", steerShuntReasonSHUNT_PASS_OVER_LIMIT, func(r *rig, p *dptest.Packet) { r.setWeight(steerWeight{Limit: 100, L7Tokens: 51}) }, nil},
		{"over the limit by flows", steerShuntReasonSHUNT_PASS_OVER_LIMIT, func(r *rig, p *dptest.Packet) { r.setWeight(steerWeight{Limit: 100, KernelTokens: 51}) }, nil},
		{"bad TCP sum", steerShuntReasonSHUNT_PASS_BAD_CHECKSUM, func(r *rig, p *dptest.Packet) { p.BadTCPSum = true }, nil},
		{"SYN with data", steerShuntReasonSHUNT_PASS_SYN_DATA, func(r *rig, p *dptest.Packet) { p.Payload = []byte("x") }, nil},
		{"no ports", steerShuntReasonSHUNT_PASS_NO_PORT, func(r *rig, p *dptest.Packet) {
			r.vip.PortCount = 0
			r.put(r.o.ShuntVips, steerVipKey{Addr: r.fam.vip.Addr().As16(), Port: r.fam.vip.Port()}, r.vip)
		}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			eachPath(t, func(t *testing.T, fam family) {
				r := rigs(t, fam)
				p := r.syn(fam.client)
				if tc.edit != nil {
					tc.edit(r, &p)
					r.setPin()
				}
				f := p.Bytes()
				if tc.raw != nil {
					f = tc.raw(f)
				}
				w := r.weight()
				r.wantReason(f, tc.why)
				if r.weight() != w || r.countFlows() != 0 {
					t.Fatalf("a SYN that passes left traces: weight %+v, %d flows", r.weight(), r.countFlows())
				}
				if u, ok := r.use(); ok && tc.name != "too many open flows" && u.Open != 0 {
					t.Fatalf("a SYN that passes left traces: %+v", u)
				}
			})
		})
	}
}

// TestPacketSteeredAnyway changes things that must not stop a SYN.
func TestPacketSteeredAnyway(t *testing.T) {
	rigs := sharedRigs(t)
	for _, tc := range []struct {
		name string
		edit func(r *rig, p *dptest.Packet)
	}{
		{"nothing changed", func(r *rig, p *dptest.Packet) {}},
		{"any generation", func(r *rig, p *dptest.Packet) { r.pin.Generation = 0 }},
		{"lease not over yet", func(r *rig, p *dptest.Packet) { r.pin.ExpiresNs = monotonic() + uint64(time.Hour) }},
		{"old pin, fresh use", func(r *rig, p *dptest.Packet) {
			r.pin.SinceNs = 1
			r.put(r.o.ShuntSessUse, r.sessionKey(), steerSessionUse{LastNs: monotonic()})
		}},
		{"static pins have no idle limit", func(r *rig, p *dptest.Packet) { r.pin.SinceNs, r.pin.Flags = 1, 1 }},
		{"static pins are not sampled", func(r *rig, p *dptest.Packet) { r.pin.Flags = 1; r.cfg.Sample = 1; r.setConfig() }},
		{"no heartbeat, no samples", func(r *rig, p *dptest.Packet) { r.cfg.Sample, r.cfg.HeartbeatNs = 1, 1; r.setConfig() }},
		{"no heartbeat, no bound on flows", func(r *rig, p *dptest.Packet) {
			r.cfg.FlowsSlack, r.cfg.HeartbeatNs = 1, 1
			r.setConfig()
			r.put(r.o.ShuntSessUse, r.sessionKey(), steerSessionUse{Open: 4})
		}},
		{"bound on flows grows with the sessions", func(r *rig, p *dptest.Packet) {
			r.cfg.FlowsPerSession, r.cfg.FlowsSlack = 2, 2
			r.setConfig()
			r.pin.Sessions = 2
			r.put(r.o.ShuntSessUse, r.sessionKey(), steerSessionUse{Open: 5})
		}},
		{"connections of an earlier pin", func(r *rig, p *dptest.Packet) {
			r.pin.Connections, r.pin.Serial = 2, 9
			r.put(r.o.ShuntSessUse, r.sessionKey(), steerSessionUse{Serial: 8, Connections: 2})
		}},
		{"exactly the limit", func(r *rig, p *dptest.Packet) { r.setWeight(steerWeight{Limit: 100, L7Tokens: 25, KernelTokens: 25}) }},
		{"longest options", func(r *rig, p *dptest.Packet) {
			p.Options = []layers.TCPOption{{OptionType: 253, OptionLength: 40, OptionData: make([]byte, 38)}}
		}},
		{"no options", func(r *rig, p *dptest.Packet) { p.Options = nil }},
		{"padded frame", func(r *rig, p *dptest.Packet) { p.Options, p.Pad = nil, 6 }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			eachPath(t, func(t *testing.T, fam family) {
				r := rigs(t, fam)
				p := r.syn(fam.client)
				tc.edit(r, &p)
				r.setPin()
				r.run.Forwarded(t, p)
			})
		})
	}
}

// sharedRigs loads one program a family, for tables of many small cases; each case gets a fresh world.
func sharedRigs(t *testing.T) func(t *testing.T, fam family) *rig {
	loaded := map[family]*rig{}
	return func(sub *testing.T, fam family) *rig {
		r := loaded[fam]
		if r == nil {
			r = newRig(t, fam, rigOptions{flows: 64})
			loaded[fam] = r
		}
		r.TB = sub
		r.reset()
		return r
	}
}

func TestPacketBadIPSum(t *testing.T) {
	r := newRig(t, families[0], rigOptions{flows: 64})
	p := r.syn(r.fam.client)
	p.BadIPSum = true
	r.wantReason(p.Bytes(), steerShuntReasonSHUNT_PASS_BAD_CHECKSUM)
}

func TestPacketIPv6Off(t *testing.T) {
	r := newRig(t, families[1], rigOptions{flows: 64, vars: map[string]any{"ipv6_on": uint8(0)}})
	r.wantReason(r.syn(r.fam.client).Bytes(), steerShuntReasonSHUNT_PASS_NOT_IP)
}

// TestPacketLiveSocket: a SYN on the tuple of a connection that the stack has must reach the stack.
func TestPacketLiveSocket(t *testing.T) {
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0"} {
		t.Run(addr, func(t *testing.T) {
			need(t, probeBPF())
			ln, err := net.Listen("tcp", addr)
			need(t, err)
			defer ln.Close()
			c, err := net.Dial("tcp", ln.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			fam := families[0]
			if c.LocalAddr().(*net.TCPAddr).IP.To4() == nil {
				fam = families[1]
			}
			fam.client = unmapped(c.LocalAddr())
			fam.vip = unmapped(ln.Addr())
			r := newRig(t, fam, rigOptions{flows: 64})
			r.wantReason(r.syn(fam.client).Bytes(), steerShuntReasonSHUNT_PASS_LIVE_SOCKET)
			// The listener alone does not hold it back.
			r.open(r.port(-1))
		})
	}
}

func unmapped(a net.Addr) netip.AddrPort {
	ap := a.(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

func TestPacketMidFlowIsNeverPassed(t *testing.T) {
	eachFamily(t, func(t *testing.T, fam family) {
		r := newRig(t, fam, rigOptions{flows: 64})
		c := r.open(fam.client).establish()
		// Everything that would stop a SYN is no business of an open flow.
		r.be.State = 2
		r.setBackend()
		r.put(r.o.ShuntAdmin, uint32(worldBackend), steerAdminWord{State: 1})
		r.setWeight(steerWeight{KernelTokens: worldTokens, KernelFlows: 1})
		if err := r.o.ShuntSessions.Delete(r.sessionKey()); err != nil {
			t.Fatal(err)
		}
		c.fromClient(dptest.ACK|dptest.PSH, "hello")
		c.backend(dptest.ACK|dptest.PSH, "world")
		if err := r.o.ShuntBackends.Delete(uint32(worldBackend)); err != nil {
			t.Fatal(err)
		}
		r.put(r.o.ShuntEpochs, uint32(worldBackend), steerEpoch{Value: 5})
		c.fromClient(dptest.ACK|dptest.PSH, "hello")
		c.backend(dptest.ACK|dptest.PSH, "world")
		// Headers that cannot be rewritten die, and only with a flow.
		odd := dptest.Packet{From: macClient, To: macLB, Src: c.client, Dst: fam.vip, Seq: c.cseq, Ack: c.bseq, Flags: dptest.ACK, Payload: []byte("some data that is long enough")}
		variants := map[string]func(p *dptest.Packet){
			"cut": func(p *dptest.Packet) { p.Cut = len(p.Payload) + 6 },
		}
		if fam.name == "v4" {
			variants["options"] = func(p *dptest.Packet) { p.IPOptions = 1 }
			variants["most options"] = func(p *dptest.Packet) { p.IPOptions = 10 }
			variants["first fragment"] = func(p *dptest.Packet) { p.Fragment = 0x2000 }
		} else {
			variants["hop by hop"] = func(p *dptest.Packet) { p.Extension = []layers.IPProtocol{layers.IPProtocolIPv6HopByHop} }
			variants["first fragment"] = func(p *dptest.Packet) { p.Extension = []layers.IPProtocol{layers.IPProtocolIPv6Fragment} }
			variants["four headers"] = func(p *dptest.Packet) {
				p.Extension = []layers.IPProtocol{layers.IPProtocolIPv6HopByHop, layers.IPProtocolIPv6Destination, layers.IPProtocolIPv6Routing, layers.IPProtocolIPv6Destination}
			}
		}
		for name, edit := range variants {
			t.Run(name, func(t *testing.T) {
				r.TB = t
				p := odd
				edit(&p)
				r.wantReason(p.Bytes(), steerShuntReasonSHUNT_DROP_ODD_HEADER)
				p.Src = netip.AddrPortFrom(p.Src.Addr(), 1)
				r.wantReason(p.Bytes(), steerShuntReasonSHUNT_PASS_ODD_HEADER)
			})
		}
		r.TB = t
		if fam.name == "v4" { // has no ports
			odd.Fragment = 5
			r.wantReason(odd.Bytes(), steerShuntReasonSHUNT_PASS_ODD_HEADER)
		}
	})
}
