// SPDX-License-Identifier: Apache-2.0

//go:build linux

package datapath

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/pkg/datapath/dptest"
)

// TestPacketTooBig: a router on either side says that a packet was too big; its sender has to hear it.
func TestPacketTooBig(t *testing.T) {
	eachPath(t, func(t *testing.T, fam family) {
		r := newRig(t, fam, rigOptions{flows: 64})
		c := r.open(fam.client).establish()
		router, macRouter := fam.client.Addr().Next().Next(), dptest.MAC{2, 0, 0, 0, 0, 9}
		big := strings.Repeat("z", 600)
		head := 20
		if fam.name == "v6" {
			head = 40
		}
		up := c.fromClient(dptest.ACK, big) // as it left towards the backend
		down := c.backend(dptest.ACK, big)  // as it left towards the client
		for _, tc := range []struct {
			name             string
			lost             dptest.Packet // the packet that was too big
			from, to         netip.AddrPort
			innerSrc, inDst  netip.AddrPort
			toMAC, fromMAC   dptest.MAC
			arriving, answer dptest.MAC
		}{
			// Lost on the way to the client: the backend hears it, about what it sent to the NAT port.
			{"to the client", down, c.nat, fam.backend, fam.backend, c.nat, macBackend, macLB2, macRouter, macLB},
			{"to the backend", up, fam.vip, c.client, c.client, fam.vip, macClient, macLB, macRouter, macLB2},
		} {
			for quoteName, quote := range map[string]int{"whole": 0, "ports only": head + 8, "without the sum": head + 16, "TCP header": head + 20, "odd": head + 33} {
				t.Run(tc.name+" "+quoteName, func(t *testing.T) {
					frame := dptest.TooBig(tc.arriving, tc.answer, router, 1280, tc.lost.Bytes(), quote)
					verdict, out, err := r.run(frame)
					if err != nil || verdict != dptest.Redirect {
						t.Fatalf("verdict %d, %v", verdict, err)
					}
					q, err := dptest.ParseTooBig(out)
					if err != nil {
						t.Fatal(err)
					}
					want := dptest.Quoted{FromMAC: tc.fromMAC, ToMAC: tc.toMAC, From: tc.from.Addr(), To: tc.to.Addr(), MTU: 1280, InnerSrc: tc.innerSrc, InnerDst: tc.inDst}
					if q != want {
						t.Fatalf("got  %+v\nwant %+v", q, want)
					}
				})
			}
		}
		// Of no flow, about someone else's packet, or not an error of that kind: the stack's.
		r.TB = t
		stranger := down
		stranger.Dst = netip.AddrPortFrom(stranger.Dst.Addr(), 1)
		r.wantReason(dptest.TooBig(macRouter, macLB, router, 1280, stranger.Bytes(), 0), steerShuntReasonSHUNT_PASS_ICMP)
		frame := dptest.TooBig(macRouter, macLB, router, 1280, down.Bytes(), head+2)
		r.wantReason(frame, steerShuntReasonSHUNT_PASS_ICMP)
		frame = dptest.TooBig(macRouter, macLB, router, 1280, down.Bytes(), 0)
		frame[14+head-1]++ // sent to another address than the quoted source
		r.wantReason(frame, steerShuntReasonSHUNT_PASS_ICMP)
		frame = dptest.TooBig(macRouter, macLB, router, 1280, down.Bytes(), 0)
		frame[14+head]++ // another type
		r.wantReason(frame, steerShuntReasonSHUNT_PASS_NOT_TCP)
		if fam.name == "v4" {
			frame = dptest.TooBig(macRouter, macLB, router, 1280, down.Bytes(), 0)
			frame[14+head+1] = 3 // port unreachable
			r.wantReason(frame, steerShuntReasonSHUNT_PASS_NOT_TCP)
		}
		// A port that is only held has no connection to tell.
		c.backend(fin, "")
		c.fromClient(fin, "")
		r.open(fam.client)
		r.wantReason(dptest.TooBig(macRouter, macLB2, router, 1280, up.Bytes(), 0), steerShuntReasonSHUNT_DROP_ICMP)
	})
}

// TestPacketBackendMoves: a flow follows its backend's MAC address when the epoch says so, and nothing else.
func TestPacketBackendMoves(t *testing.T) {
	eachFamily(t, func(t *testing.T, fam family) {
		r := newRig(t, fam, rigOptions{flows: 64})
		c := r.open(fam.client).establish()
		moved, src := dptest.MAC{2, 0, 0, 0, 1, 1}, dptest.MAC{2, 0, 0, 0, 1, 2}
		epoch := uint32(0)
		bump := func() { epoch++; r.put(r.o.ShuntEpochs, uint32(worldBackend), steerEpoch{Value: epoch}) }
		expect := func(to, from dptest.MAC) {
			t.Helper()
			if p := c.fromClient(dptest.ACK, "x"); p.To != to || p.From != from {
				t.Fatalf("left from %v to %v, want %v, %v", p.From, p.To, from, to)
			}
		}
		r.be.Mac, r.be.SrcMac = moved, src
		r.setBackend()
		expect(macBackend, macLB2)
		bump()
		expect(moved, src)

		r.be.Mac = dptest.MAC{} // neighbour lost: the old one is the best there is
		r.setBackend()
		bump()
		expect(moved, src)

		// The id was given to another backend: the flow goes on to where it went.
		r.be.Mac = macBackend
		r.be.Addr = fam.backend.Addr().Next().As16()
		r.be.Generation++
		r.setBackend()
		bump()
		expect(moved, src)
		c.backend(dptest.ACK, "y")

		// A new generation of the same backend drains, and its packets still follow it.
		r.be.Addr = fam.backend.Addr().As16()
		r.setBackend()
		bump()
		expect(macBackend, src)
		r.wantReason(r.syn(r.port(1)).Bytes(), steerShuntReasonSHUNT_PASS_GENERATION)
	})
}

// TestPacketClientMoves: answers go to whoever the client's packets come from, if those packets fit the connection.
func TestPacketClientMoves(t *testing.T) {
	eachFamily(t, func(t *testing.T, fam family) {
		r := newRig(t, fam, rigOptions{flows: 64})
		c := r.open(fam.client).establish()
		gateway, own := dptest.MAC{2, 0, 0, 0, 2, 1}, dptest.MAC{2, 0, 0, 0, 2, 2}
		from := func(seq uint32) {
			t.Helper()
			r.run.Forwarded(t, dptest.Packet{From: gateway, To: own, Src: c.client, Dst: fam.vip, Seq: seq, Ack: c.bseq, Flags: dptest.ACK})
		}
		answer := func(to, src dptest.MAC) {
			t.Helper()
			p := r.run.Forwarded(t, dptest.Packet{From: macBackend, To: macLB2, Src: fam.backend, Dst: c.nat, Seq: c.bseq, Ack: c.cseq, Flags: dptest.ACK})
			if p.To != to || p.From != src {
				t.Fatalf("answer left from %v to %v, want %v, %v", p.From, p.To, src, to)
			}
		}
		answer(macClient, macLB)
		from(c.cseq + 1<<30)
		answer(macClient, macLB)
		from(c.cseq)
		answer(gateway, own)
		c.fromClient(dptest.ACK, "back again")
		answer(macClient, macLB)
	})
}

// TestPacketTableFull: a full table costs nobody a connection.
func TestPacketTableFull(t *testing.T) {
	r := newRig(t, families[0], rigOptions{flows: 16})
	var open []*conn
	for i := range 8 {
		open = append(open, r.open(r.port(i)).establish())
	}
	full := steerWeight{Limit: 1000, KernelTokens: 8 * worldTokens, KernelFlows: 8}
	// A preallocated table may have a spare entry or two on each processor.
	for i := 8; i < 64; i++ {
		v, _, err := r.run(r.syn(r.port(i)).Bytes())
		if err != nil {
			t.Fatal(err)
		}
		if v == dptest.Redirect {
			full.KernelTokens += worldTokens
			full.KernelFlows++
			full.KernelHalfOpen += worldTokens
		}
		r.setWeightLimit(1000 + int64(i)*worldTokens)
	}
	if r.drops(steerShuntReasonSHUNT_PASS_TABLE_FULL) < 40 {
		t.Fatalf("%d SYNs met a full table", r.drops(steerShuntReasonSHUNT_PASS_TABLE_FULL))
	}
	r.wantKernel(full.KernelTokens, full.KernelHalfOpen, full.KernelFlows)
	if u, _ := r.use(); int64(u.Open) != full.KernelFlows {
		t.Fatalf("open is %d, want %d", u.Open, full.KernelFlows)
	}
	if n := r.countFlows(); int64(n) != 2*full.KernelFlows {
		t.Fatalf("%d entries for %d flows", n, full.KernelFlows)
	}
	if len(r.events()[3]) == 0 {
		t.Fatal("no event")
	}
	for _, c := range open {
		c.fromClient(dptest.ACK, "still")
		c.backend(dptest.ACK, "there")
	}

	// The table of use records is full.
	r = newRig(t, families[0], rigOptions{flows: 64, uses: 1})
	other := r.sessionKey()
	other.VipId++
	r.put(r.o.ShuntSessUse, other, steerSessionUse{})
	for {
		other.VipId++
		if r.o.ShuntSessUse.Put(other, steerSessionUse{}) != nil {
			break
		}
	}
	r.wantReason(r.syn(r.fam.client).Bytes(), steerShuntReasonSHUNT_PASS_TABLE_FULL)
	r.wantKernel(0, 0, 0)
}

// setWeightLimit changes the limit and leaves the kernel's words alone, as the L7 does.
func (r *rig) setWeightLimit(limit int64) {
	r.Helper()
	w := r.weight()
	w.Limit = limit
	r.setWeight(w)
}

func TestPacketLeaseConnections(t *testing.T) {
	r := newRig(t, families[0], rigOptions{flows: 256})
	r.setWeight(steerWeight{Limit: 1 << 40})
	r.pin.Connections = 3
	r.setPin()
	for i := range 3 {
		r.open(r.port(i))
	}
	r.wantReason(r.syn(r.port(3)).Bytes(), steerShuntReasonSHUNT_PASS_LEASE_USED_UP)
	// A repetition of an open one is not a new one.
	r.open(r.port(2))
	// A SYN that failed later has used nothing up.
	r.pin.Serial++
	r.setPin()
	r.setWeight(steerWeight{})
	r.wantReason(r.syn(r.port(3)).Bytes(), steerShuntReasonSHUNT_PASS_OVER_LIMIT)
	r.setWeight(steerWeight{Limit: 1 << 40})
	for i := range 3 {
		r.open(r.port(4 + i))
	}
	r.wantReason(r.syn(r.port(8)).Bytes(), steerShuntReasonSHUNT_PASS_LEASE_USED_UP)
	if u, _ := r.use(); u.Open != 6 || u.Serial != r.pin.Serial || u.Connections != 3 {
		t.Fatalf("use record: %+v", u)
	}
}
