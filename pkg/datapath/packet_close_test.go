// SPDX-License-Identifier: Apache-2.0

//go:build linux

package datapath

import (
	"sync"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/datapath/dptest"
)

const (
	flagSynAck  = steerShuntFlowFlagsSHUNT_FLOW_SYNACK
	flagEstab   = steerShuntFlowFlagsSHUNT_FLOW_ESTAB
	flagBFin1   = steerShuntFlowFlagsSHUNT_FLOW_BFIN1
	flagRST     = steerShuntFlowFlagsSHUNT_FLOW_RST
	flagSuspect = steerShuntFlowFlagsSHUNT_FLOW_SUSPECT
	flagClosed  = steerShuntFlowFlagsSHUNT_FLOW_CLOSED
	flagHeld    = steerShuntFlowFlagsSHUNT_FLOW_HELD
	fin         = dptest.FIN | dptest.ACK
	rst         = dptest.RST | dptest.ACK
)

// TestPacketClose: every way a connection ends gives its tokens back, and says whether the backend keeps the NAT port.
func TestPacketClose(t *testing.T) {
	rigs := sharedRigs(t)
	for _, tc := range []struct {
		name       string
		end        func(c *conn)
		set, clear steerShuntFlowFlags
	}{
		{"client first", func(c *conn) { c.fromClient(fin, ""); c.backend(fin, ""); c.fromClient(dptest.ACK, "") }, flagClosed, flagBFin1},
		{"client first, with data", func(c *conn) { c.fromClient(fin, "bye"); c.backend(dptest.ACK, "rest"); c.backend(fin, "last") }, flagClosed, flagBFin1},
		{"backend first", func(c *conn) { c.backend(fin, "last"); c.fromClient(dptest.ACK, ""); c.fromClient(fin, "") }, flagClosed | flagBFin1, 0},
		{"both at once", func(c *conn) {
			// The backend's FIN does not acknowledge the client's: it goes to TIME_WAIT too.
			before := c.cseq
			c.fromClient(fin, "")
			after := c.cseq
			c.cseq = before
			c.backend(fin, "")
			c.cseq = after
			c.fromClient(dptest.ACK, "")
		}, flagClosed | flagBFin1, 0},
		{"FINs repeated", func(c *conn) {
			for range 3 {
				c.backend(fin, "")
				c.bseq--
				c.fromClient(fin, "")
				c.cseq--
			}
		}, flagClosed | flagBFin1, 0},
		{"client's RST", func(c *conn) { c.fromClient(rst, "") }, flagClosed | flagRST, flagSuspect},
		{"backend's RST", func(c *conn) { c.backend(rst, "") }, flagClosed | flagRST, flagSuspect},
		{"RST after FIN", func(c *conn) { c.backend(fin, ""); c.fromClient(rst, "") }, flagClosed | flagRST, 0},
		{"FIN far out of the window", func(c *conn) {
			c.cseq += 1 << 30
			c.fromClient(fin, "")
			c.bseq += 1 << 30
			c.backend(fin, "")
		}, 0, flagClosed | flagBFin1},
		{"client's RST out of order", func(c *conn) { c.cseq += 7; c.fromClient(rst, "") }, flagSuspect, flagClosed | flagRST},
		{"backend's RST out of order", func(c *conn) { c.bseq -= 7; c.backend(rst, "") }, flagSuspect, flagClosed | flagRST},
		{"one FIN is not the end", func(c *conn) { c.fromClient(fin, "") }, 0, flagClosed},
	} {
		t.Run(tc.name, func(t *testing.T) {
			eachPath(t, func(t *testing.T, fam family) {
				r := rigs(t, fam)
				other := r.open(r.port(1)).establish()
				c := r.open(fam.client).establish()
				c.fromClient(dptest.ACK, "question")
				c.backend(dptest.ACK, "answer")
				c.fromClient(dptest.ACK, "") // acknowledges the answer
				c.backend(dptest.ACK, "")
				r.wantKernel(2*worldTokens, 0, 2)
				tc.end(c)
				f := r.wantFlags(fam.client, fam.vip, tc.set, tc.clear)
				if tc.set&flagClosed != 0 {
					r.wantKernel(worldTokens, 0, 1)
					if u, _ := r.use(); f.Charge != 0 || u.Open != 1 {
						t.Fatalf("charge left %d, open %d", f.Charge, u.Open)
					}
				} else {
					r.wantKernel(2*worldTokens, 0, 2)
				}
				other.fromClient(dptest.ACK, "still there")
			})
		})
	}
}

// TestPacketCloseConcurrent ends each of many connections from both sides and both ways at once.
func TestPacketCloseConcurrent(t *testing.T) {
	const conns = 300
	r := newRig(t, families[0], rigOptions{})
	r.setWeight(steerWeight{Limit: conns * worldTokens})
	all := make([]*conn, conns)
	for i := range all {
		all[i] = r.open(r.port(i))
		if i%3 > 0 {
			all[i].establish()
		} else {
			all[i].backend(dptest.SYN|dptest.ACK, "")
		}
	}
	r.wantKernel(conns*worldTokens, conns/3*worldTokens, conns)
	// One goroutine a kind of end, all over the same connections.
	ends := []func(c *conn) dptest.Packet{
		func(c *conn) dptest.Packet {
			return dptest.Packet{From: macClient, To: macLB, Src: c.client, Dst: r.fam.vip, Seq: c.cseq, Ack: c.bseq, Flags: fin}
		},
		func(c *conn) dptest.Packet {
			return dptest.Packet{From: macBackend, To: macLB2, Src: r.fam.backend, Dst: c.nat, Seq: c.bseq, Ack: c.cseq, Flags: fin}
		},
		func(c *conn) dptest.Packet {
			return dptest.Packet{From: macClient, To: macLB, Src: c.client, Dst: r.fam.vip, Seq: c.cseq, Ack: c.bseq, Flags: rst}
		},
		func(c *conn) dptest.Packet {
			return dptest.Packet{From: macClient, To: macLB, Src: c.client, Dst: r.fam.vip, Seq: c.cseq, Ack: c.bseq, Flags: dptest.ACK}
		},
	}
	var wg sync.WaitGroup
	for _, end := range ends {
		wg.Go(func() {
			for _, c := range all {
				if v, _, err := r.run(end(c).Bytes()); err != nil || v != dptest.Redirect {
					t.Errorf("verdict %d, %v", v, err)
				}
			}
		})
	}
	wg.Wait()
	r.wantKernel(0, 0, 0)
	if u, _ := r.use(); u.Open != 0 {
		t.Fatalf("open is %d", u.Open)
	}
	if ev := r.events(); len(ev[2]) != conns {
		t.Fatalf("%d close events, want %d", len(ev[2]), conns)
	}
}

// TestPacketLimitConcurrent: 400 SYNs at once under a limit for 100.
func TestPacketLimitConcurrent(t *testing.T) {
	r := newRig(t, families[0], rigOptions{})
	r.setWeight(steerWeight{Limit: 100*worldTokens + worldTokens/2, L7Tokens: worldTokens / 4})
	var steered, passed sync.Map
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := g; i < 400; i += 8 {
				v, _, err := r.run(r.syn(r.port(i)).Bytes())
				if err != nil {
					t.Error(err)
				}
				if v == dptest.Redirect {
					steered.Store(i, true)
				} else {
					passed.Store(i, true)
				}
			}
		})
	}
	wg.Wait()
	n := 0
	steered.Range(func(any, any) bool { n++; return true })
	if n != 100 {
		t.Fatalf("%d of 400 SYNs steered, want 100", n)
	}
	r.wantKernel(100*worldTokens, 100*worldTokens, 100)
	if got := r.drops(steerShuntReasonSHUNT_PASS_OVER_LIMIT); got != 300 {
		t.Fatalf("%d over the limit, want 300", got)
	}
}

// TestPacketSameSynConcurrent: the same SYN on many processors opens one flow.
func TestPacketSameSynConcurrent(t *testing.T) {
	r := newRig(t, families[0], rigOptions{})
	for i := range 200 {
		frame := r.syn(r.port(i)).Bytes()
		r.setWeight(steerWeight{Limit: 1000})
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				if v, _, err := r.run(frame); err != nil || v != dptest.Redirect {
					t.Errorf("verdict %d, %v", v, err)
				}
			})
		}
		wg.Wait()
		r.wantKernel(worldTokens, worldTokens, 1)
	}
	if n := r.countFlows(); n != 400 {
		t.Fatalf("%d entries, want 400", n)
	}
}

// TestPacketPortQuarantine: a client's tuple is free again at once, the NAT port only when the backend has forgotten it.
func TestPacketPortQuarantine(t *testing.T) {
	eachFamily(t, func(t *testing.T, fam family) {
		r := newRig(t, fam, rigOptions{vars: map[string]any{"held_ns": uint64(time.Hour), "closed_ns": uint64(time.Nanosecond)}})
		r.vip.PortCount = 2
		r.put(r.o.ShuntVips, steerVipKey{Addr: fam.vip.Addr().As16(), Port: fam.vip.Port()}, r.vip)
		first := r.open(fam.client).establish()
		first.backend(fin, "")
		first.fromClient(fin, "")

		second := r.open(fam.client)
		if second.nat == first.nat {
			t.Fatal("the NAT port that the backend's TIME_WAIT holds was used again")
		}
		r.wantKernel(worldTokens, worldTokens, 1)
		r.wantFlags(fam.backend, first.nat, flagHeld|flagBFin1, 0)
		// Stragglers of the old connection reach nobody: not the client's new connection, not the stack.
		r.wantReason(dptest.Packet{From: macBackend, To: macLB2, Src: fam.backend, Dst: first.nat, Seq: first.bseq - 1, Ack: first.cseq, Flags: fin}.Bytes(), steerShuntReasonSHUNT_DROP_FLOW_CLOSED)
		second.establish()

		// Both ports are taken: one by a live connection, one held.
		r.wantReason(r.syn(r.port(1)).Bytes(), steerShuntReasonSHUNT_PASS_NO_PORT)
		r.wantKernel(worldTokens, 0, 1)

		// A port whose connection the client closed is free as soon as it is overdue, without a sweep.
		second.fromClient(fin, "")
		second.backend(fin, "")
		for from := monotonic() >> tickShift; monotonic()>>tickShift < from+2; { // flows count in ticks of a millisecond
			time.Sleep(time.Millisecond)
		}
		third := r.open(r.port(2))
		if third.nat != second.nat {
			t.Fatalf("NAT port %v, want the overdue %v", third.nat, second.nat)
		}
		if _, ok := r.flow(fam.client, fam.vip); ok {
			t.Fatal("the overdue client's half is still there")
		}
	})
}

func TestPacketConnectFailover(t *testing.T) {
	for _, tc := range []struct {
		name string
		vars map[string]any
		fail func(r *rig, c *conn)
	}{
		{"refused", nil, func(r *rig, c *conn) {
			p := dptest.Packet{From: macBackend, To: macLB2, Src: r.fam.backend, Dst: c.nat, Ack: 1000, Flags: rst}
			r.run.Forwarded(r, p) // acknowledges nothing that was sent: the client ignores it as well
			p.Ack = 1001
			r.wantReason(p.Bytes(), steerShuntReasonSHUNT_DROP_CONNECT_RESET)
		}},
		{"no answer", map[string]any{"retry_ns": uint64(0)}, func(r *rig, c *conn) {
			r.wantReason(r.syn(c.client).Bytes(), steerShuntReasonSHUNT_PASS_CONNECT_FAILED)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			eachPath(t, func(t *testing.T, fam family) {
				r := newRig(t, fam, rigOptions{flows: 64, vars: tc.vars})
				c := r.open(fam.client)
				tc.fail(r, c)
				r.wantKernel(0, 0, 0)
				if n := r.countFlows(); n != 0 {
					t.Fatalf("%d entries left", n)
				}
				// The pin is gone: the client's next SYN meets the L7.
				r.wantReason(r.syn(c.client).Bytes(), steerShuntReasonSHUNT_PASS_NO_SESSION)
				if ev := r.events(); len(ev[5]) != 1 {
					t.Fatalf("events: %+v", ev)
				}

				// The operator's pin stays, but rests.
				r.pin.Flags = 1
				r.setPin()
				c = r.open(r.port(1))
				tc.fail(r, c)
				r.wantReason(r.syn(c.client).Bytes(), steerShuntReasonSHUNT_PASS_CONNECT_FAILED)
				// A pin that has moved on is not the one that failed.
				r.reset()
				c = r.open(r.port(2))
				r.pin.Backend = 9
				r.setPin()
				tc.fail(r, c)
				r.wantReason(r.syn(c.client).Bytes(), steerShuntReasonSHUNT_PASS_BACKEND_UNKNOWN)
			})
		})
	}
}

// TestPacketSynRepeated: soon after the first it is the same connection, and after the SYN-ACK it always is.
func TestPacketSynRepeated(t *testing.T) {
	r := newRig(t, families[0], rigOptions{flows: 64})
	c := r.open(r.fam.client)
	again := r.open(r.fam.client)
	if again.nat != c.nat {
		t.Fatal("a repeated SYN got another NAT port")
	}
	r.wantKernel(worldTokens, worldTokens, 1)

	r = newRig(t, families[0], rigOptions{flows: 64, vars: map[string]any{"retry_ns": uint64(0)}})
	c = r.open(r.fam.client)
	// A stray segment of an earlier connection is no answer, and does not hide the real one.
	r.run.Forwarded(t, dptest.Packet{From: macBackend, To: macLB2, Src: r.fam.backend, Dst: c.nat, Seq: 77, Ack: 88, Flags: dptest.ACK})
	r.wantFlags(c.client, r.fam.vip, 0, flagSynAck)
	c.backend(dptest.SYN|dptest.ACK, "")
	if again = r.open(r.fam.client); again.nat != c.nat {
		t.Fatal("a repeated SYN got another NAT port")
	}
	r.wantFlags(c.client, r.fam.vip, flagSynAck, flagEstab)
}
