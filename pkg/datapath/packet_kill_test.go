// SPDX-License-Identifier: Apache-2.0

//go:build linux

package datapath

import (
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/datapath/dptest"
)

// killed runs a packet of a flow that the daemon has ended and returns the RST that comes back.
func (r *rig) killed(p dptest.Packet) dptest.Packet {
	r.Helper()
	before := r.drops(steerShuntReasonSHUNT_DROP_FLOW_KILLED)
	verdict, out, err := r.run(p.Bytes())
	if err != nil || verdict != dptest.Redirect {
		r.Fatalf("verdict %d, %v", verdict, err)
	}
	q, err := dptest.Parse(out)
	if err != nil {
		r.Fatal(err)
	}
	want := dptest.Packet{From: p.To, To: p.From, Src: p.Dst, Dst: p.Src, Seq: p.Ack, Flags: dptest.RST}
	if q.From != want.From || q.To != want.To || q.Src != want.Src || q.Dst != want.Dst || q.Seq != want.Seq || q.Ack != 0 || q.Flags != want.Flags || len(q.Payload) != 0 {
		r.Fatalf("answered with %+v", q)
	}
	if n := r.drops(steerShuntReasonSHUNT_DROP_FLOW_KILLED) - before; n != 1 {
		r.Fatalf("counted %d times", n)
	}
	return q
}

// TestPacketKill: the daemon ends what a backend has open; whoever sends on it is told with the sequence number that
// it accepts.
func TestPacketKill(t *testing.T) {
	eachPath(t, func(t *testing.T, fam family) {
		r := newRig(t, fam, rigOptions{flows: 64})
		c, other := r.open(fam.client).establish(), r.open(r.port(1)).establish()
		c.fromClient(dptest.ACK, "question")
		kill := func(epoch, on uint32) {
			r.put(r.o.ShuntEpochs, uint32(worldBackend), steerEpoch{Value: epoch, Kill: on})
		}
		kill(1, 1)
		fromClient := dptest.Packet{From: macClient, To: macLB, Src: c.client, Dst: fam.vip, Seq: c.cseq, Ack: c.bseq, Flags: dptest.ACK | dptest.PSH}
		for _, body := range []string{"", "x", string(make([]byte, 1400))} {
			fromClient.Payload = []byte(body)
			r.killed(fromClient)
		}
		r.wantKernel(worldTokens, 0, 1)
		r.wantFlags(c.client, fam.vip, flagClosed|flagRST|steerShuntFlowFlagsSHUNT_FLOW_KILLED, 0)
		r.killed(dptest.Packet{From: macBackend, To: macLB2, Src: fam.backend, Dst: c.nat, Seq: c.bseq, Ack: c.cseq, Flags: dptest.ACK, Payload: []byte("late")})
		// A RST is not answered.
		fromClient.Flags, fromClient.Payload = dptest.RST|dptest.ACK, nil
		r.wantReason(fromClient.Bytes(), steerShuntReasonSHUNT_DROP_FLOW_KILLED)

		// The client comes again from the same port while the backend is still being emptied: not to it.
		r.be.State = 2
		r.setBackend()
		r.wantReason(r.syn(c.client).Bytes(), steerShuntReasonSHUNT_PASS_BACKEND_DOWN)

		// The backend is back: what was open there before it was ended and told nobody stays ended only if it was seen.
		r.be.State = steerShuntStateUP
		r.setBackend()
		kill(1, 0)
		fresh := r.open(c.client).establish()
		fresh.fromClient(dptest.ACK, "anew")
		other.fromClient(dptest.ACK, "still there")
		r.wantKernel(2*worldTokens, 0, 2)
	})
}

// TestPacketKillSweep: connections on which nobody sends are ended by the sweep.
func TestPacketKillSweep(t *testing.T) {
	eachFamily(t, func(t *testing.T, fam family) {
		r := newRig(t, fam, rigOptions{flows: 64, vars: map[string]any{"sweep_ns": uint64(5 * time.Millisecond)}})
		c := r.open(fam.client).establish()
		r.put(r.o.ShuntEpochs, uint32(worldBackend), steerEpoch{Value: 1, Kill: 1})
		r.arm()
		r.afterSweeps()
		r.wantKernel(0, 0, 0)
		r.killed(dptest.Packet{From: macClient, To: macLB, Src: c.client, Dst: fam.vip, Seq: c.cseq, Ack: c.bseq, Flags: dptest.ACK})
		r.age(c, 7*time.Second, true, true)
		r.afterSweeps()
		if n := r.countFlows(); n != 0 {
			t.Fatalf("%d entries left", n)
		}
	})
}
