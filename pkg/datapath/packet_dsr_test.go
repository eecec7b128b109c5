// SPDX-License-Identifier: Apache-2.0

//go:build linux

package datapath

import (
	"bytes"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/datapath/dptest"
)

// dsr makes the rig's VIP one of direct server return.
func (r *rig) dsr() {
	r.Helper()
	r.vip.Mode = modeDSR
	r.put(r.o.ShuntVips, steerVipKey{Addr: r.fam.vip.Addr().As16(), Port: r.fam.vip.Port()}, r.vip)
	r.be.Port = r.fam.vip.Port()
	r.setBackend()
}

// direct runs a packet of the client that must go to the backend with other hardware addresses only.
func (r *rig) direct(p dptest.Packet) {
	r.Helper()
	q := r.run.Forwarded(r, p)
	if q.Src != p.Src || q.Dst != p.Dst || q.From != macLB2 || q.To != macBackend {
		r.Fatalf("left as %+v", q)
	}
}

func TestPacketDSR(t *testing.T) {
	for _, tc := range []struct {
		name    string
		end     uint8 // flags of the client's last packet
		off     uint32
		settled bool
	}{
		{"FIN", fin, 0, true},
		{"RST", rst, 0, true},
		{"RST out of order", rst, 5, false},
		{"FIN out of the window", fin, 1 << 30, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			eachPath(t, func(t *testing.T, fam family) {
				r := newRig(t, fam, rigOptions{flows: 64})
				r.dsr()
				p := r.syn(fam.client)
				r.direct(p)
				r.wantKernel(worldTokens, worldTokens, 1)
				if n := r.countFlows(); n != 1 {
					t.Fatalf("%d entries", n)
				}
				p.Options, p.Flags, p.Seq, p.Ack = nil, dptest.ACK, 1001, 5001
				r.direct(p)
				r.wantKernel(worldTokens, 0, 1)
				p.Payload = []byte("question")
				r.direct(p)
				p.Seq, p.Payload = p.End(), nil
				for _, ack := range []uint32{6001, 9001, 9001, 8001} { // the last one is late
					p.Ack = ack
					r.direct(p)
				}
				if f := r.wantFlags(fam.client, fam.vip, flagEstab|steerShuntFlowFlagsSHUNT_FLOW_DSR, flagClosed); f.Answered != 4000 || f.Packets != 7 {
					t.Fatalf("%d bytes answered, %d packets", f.Answered, f.Packets)
				}
				p.Flags, p.Ack = tc.end, 9001
				p.Seq += tc.off
				r.direct(p)
				if !tc.settled {
					r.wantKernel(worldTokens, 0, 1)
					return
				}
				r.wantKernel(0, 0, 0)
				p.Flags, p.Seq = dptest.ACK, p.End()
				r.direct(p)
				ev := r.events()
				if len(ev[1]) != 1 || len(ev[2]) != 1 || ev[2][0].BytesOut < 4000 {
					t.Fatalf("events: %+v", ev)
				}
				// The same client port again.
				r.direct(r.syn(fam.client))
				r.wantKernel(worldTokens, worldTokens, 1)
			})
		})
	}
}

func TestPacketDSRPasses(t *testing.T) {
	eachPath(t, func(t *testing.T, fam family) {
		r := newRig(t, fam, rigOptions{flows: 64, vars: map[string]any{"retry_ns": uint64(0)}})
		r.dsr()
		r.be.Port++
		r.setBackend()
		r.wantReason(r.syn(fam.client).Bytes(), steerShuntReasonSHUNT_PASS_BACKEND_PORT)
		r.dsr()
		// A backend that does not answer loses the connection to the L7.
		r.direct(r.syn(fam.client))
		r.wantReason(r.syn(fam.client).Bytes(), steerShuntReasonSHUNT_PASS_CONNECT_FAILED)
		r.wantKernel(0, 0, 0)
		if n := r.countFlows(); n != 0 {
			t.Fatalf("%d entries left", n)
		}

		// A router complains to the VIP about what the backend has sent: the backend has to hear it, as it is.
		r.setPin()
		p := r.syn(fam.client)
		r.direct(p)
		lost := dptest.Packet{From: macBackend, To: macClient, Src: fam.vip, Dst: fam.client, Seq: 7, Ack: 8, Flags: dptest.ACK, Payload: make([]byte, 1400)}
		frame := dptest.TooBig(macClient, macLB, fam.client.Addr().Next().Next(), 1280, lost.Bytes(), 0)
		verdict, out, err := r.run(frame)
		if err != nil || verdict != dptest.Redirect {
			t.Fatalf("verdict %d, %v", verdict, err)
		}
		if !bytes.Equal(out[:6], macBackend[:]) || !bytes.Equal(out[6:12], macLB2[:]) || !bytes.Equal(out[12:], frame[12:]) {
			t.Fatalf("the error changed:\n%x\n%x", frame, out)
		}
	})
}

// TestPacketDSREnds: what nobody closes is ended by time or by the daemon.
func TestPacketDSREnds(t *testing.T) {
	r := newRig(t, families[0], rigOptions{flows: 64, vars: map[string]any{"sweep_ns": uint64(5 * time.Millisecond)}})
	r.dsr()
	p := r.syn(r.fam.client)
	r.direct(p)
	p.Options, p.Flags, p.Seq, p.Ack = nil, dptest.ACK, 1001, 5001
	r.direct(p)
	r.put(r.o.ShuntEpochs, uint32(worldBackend), steerEpoch{Value: 1, Kill: 1})
	r.killed(p)
	r.wantKernel(0, 0, 0)
	f, _ := r.flow(r.fam.client, r.fam.vip)
	f.Last -= uint32(7 * time.Second >> tickShift)
	r.putFlow(flowKey(r.fam.client, r.fam.vip), f)
	r.arm()
	r.afterSweeps()
	if n := r.countFlows(); n != 0 {
		t.Fatalf("%d entries left", n)
	}
}
