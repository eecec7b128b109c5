// SPDX-License-Identifier: Apache-2.0

//go:build linux

package datapath

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/datapath/dptest"
)

// model is the verdict function once more, in Go and in the plainest way, for a world of one VIP and one backend in
// which no time passes. It shares no code with the program.
type model struct {
	fam                      family
	limit                    int64
	pinned                   map[netip.Addr]bool
	up                       bool
	killing                  bool
	epoch                    uint32
	ports                    uint16 // handed out
	conns                    map[netip.AddrPort]*modelConn
	byNAT                    map[uint16]*modelConn // of conns, and of those whose client's half is gone
	tokens, halfOpen, flows  int64
	opened, closed, released int // for the test to see that something happened
}

type modelConn struct {
	client                           netip.AddrPort
	nat                              uint16
	epoch                            uint32
	synack, estab, cfin, bfin, reset bool
	settled, killed, held            bool
	cack, back                       uint32 // what the client and the backend acknowledged last
}

const modelWindow = 1 << 26

// fate is what becomes of a packet.
type fate struct {
	verdict  uint32
	src, dst netip.AddrPort // as it leaves
	rst      bool           // it comes back as a RST
}

func (m *model) settle(c *modelConn) {
	if c.settled {
		return
	}
	c.settled = true
	m.closed++
	m.tokens -= worldTokens
	m.flows--
	if !c.estab {
		m.halfOpen -= worldTokens
	}
}

func (m *model) remove(c *modelConn) {
	m.settle(c)
	delete(m.conns, c.client)
	delete(m.byNAT, c.nat)
}

func (m *model) dead(p dptest.Packet) fate {
	if p.Flags&dptest.ACK != 0 && p.Flags&(dptest.RST|dptest.SYN) == 0 {
		return fate{verdict: dptest.Redirect, src: p.Dst, dst: p.Src, rst: true}
	}
	return fate{verdict: dptest.Drop}
}

func (m *model) packet(p dptest.Packet) fate {
	pass, drop := fate{verdict: dptest.Pass}, fate{verdict: dptest.Drop}
	reverse := p.Src == m.fam.backend
	var c *modelConn
	if reverse {
		c = m.byNAT[p.Dst.Port()]
	} else {
		c = m.conns[p.Src]
	}
	if c != nil && reverse && c.held {
		return drop
	}
	if c != nil && c.killed && p.Flags&(dptest.SYN|dptest.ACK) != dptest.SYN {
		return m.dead(p)
	}
	if c != nil {
		switch {
		case p.Flags&dptest.RST != 0:
			switch {
			case reverse && !c.synack:
				if p.Flags&dptest.ACK != 0 && p.Ack == c.back {
					delete(m.pinned, c.client.Addr())
					m.remove(c)
					return drop
				}
			case reverse && p.Seq == c.cack, !reverse && p.Seq == c.back:
				c.reset = true
				m.settle(c)
			}
		case p.Flags&dptest.SYN != 0 && reverse:
			if p.Flags&dptest.ACK != 0 && p.Ack == c.back && !c.synack {
				c.synack, c.cack = true, p.Seq+1
			}
		case p.Flags&dptest.SYN != 0:
			if p.Flags&dptest.ACK == 0 && (c.reset || c.cfin && c.bfin) {
				m.settle(c)
				c.held = true
				m.released++
				delete(m.conns, c.client)
				c = nil
			}
		case p.Flags&dptest.FIN != 0:
			other := c.back
			if reverse {
				other = c.cack
			}
			if p.Seq-other < modelWindow {
				c.cfin, c.bfin = c.cfin || !reverse, c.bfin || reverse
				if c.cfin && c.bfin || c.reset {
					m.settle(c)
				}
			}
		}
	}
	if c == nil {
		if p.Flags&0x3f != dptest.SYN || reverse {
			return pass
		}
		if !m.pinned[p.Src.Addr()] || !m.up || len(p.Payload) > 0 || p.BadTCPSum || m.tokens+worldTokens > m.limit {
			return pass
		}
		c = &modelConn{client: p.Src, nat: 20000 + m.ports, epoch: m.epoch, back: p.Seq + 1}
		m.ports++
		m.opened++
		m.conns[c.client], m.byNAT[c.nat] = c, c
		m.tokens += worldTokens
		m.halfOpen += worldTokens
		m.flows++
	}
	open := p.Flags&dptest.ACK != 0 && p.Flags&(dptest.SYN|dptest.RST) == 0
	if !reverse {
		if c.epoch != m.epoch {
			c.epoch = m.epoch
			if m.killing {
				c.killed, c.reset = true, true
				m.settle(c)
				return m.dead(p)
			}
		}
		if open && c.synack && !c.estab {
			c.estab = true
			if !c.settled {
				m.halfOpen -= worldTokens
			}
		}
	}
	if open && c.synack {
		if reverse {
			c.back = p.Ack
		} else {
			c.cack = p.Ack
		}
	}
	if reverse {
		return fate{verdict: dptest.Redirect, src: m.fam.vip, dst: c.client}
	}
	return fate{verdict: dptest.Redirect, src: netip.AddrPortFrom(m.fam.snat, c.nat), dst: m.fam.backend}
}

// TestPacketModel sends random packets through the program and the model, in a world that changes at random: both must
// say the same, forward the same tuple, and charge the same tokens, after every single packet.
func TestPacketModel(t *testing.T) {
	rounds, length := 12, 400
	if testing.Short() {
		rounds = 2
	}
	flagSets := []uint8{dptest.SYN, dptest.SYN, dptest.SYN | dptest.ACK, dptest.SYN | dptest.ACK, dptest.ACK, dptest.ACK, dptest.ACK | dptest.PSH, fin, fin, rst, dptest.RST, dptest.FIN, 0, dptest.SYN | dptest.FIN, dptest.SYN | dptest.RST}
	eachPath(t, func(t *testing.T, fam family) {
		var opened, closed, released int
		r := newRig(t, fam, rigOptions{vars: map[string]any{"retry_ns": uint64(time.Hour), "half_open_ns": uint64(time.Hour), "closed_ns": uint64(time.Hour), "held_ns": uint64(time.Hour)}})
		for round := range rounds {
			seed := uint64(round)*7919 + 1
			rng := rand.New(rand.NewPCG(seed, seed))
			r.reset()
			r.put(r.o.ShuntState, uint32(0), steerState{}) // the first NAT port is the range's
			m := &model{fam: fam, limit: 6 * worldTokens, pinned: map[netip.Addr]bool{}, up: true, conns: map[netip.AddrPort]*modelConn{}, byNAT: map[uint16]*modelConn{}}
			r.setWeight(steerWeight{Limit: m.limit})
			addrs := []netip.Addr{fam.client.Addr(), fam.client.Addr().Next()}
			key := func(a netip.Addr) steerSessionKey {
				return steerSessionKey{Client: a.As16(), VipId: worldVIP, Port: fam.vip.Port()}
			}
			pin := func(a netip.Addr, on bool) {
				if m.pinned[a] = on; on {
					r.put(r.o.ShuntSessions, key(a), r.pin)
				} else {
					_ = r.o.ShuntSessions.Delete(key(a))
				}
			}
			pin(addrs[0], true)
			pin(addrs[1], rng.IntN(2) == 0)
			near := func(n uint32) uint32 {
				switch rng.IntN(8) {
				case 0:
					return n + uint32(rng.IntN(3)) - 1
				case 1:
					return rng.Uint32()
				}
				return n
			}
			for step := range length {
				switch rng.IntN(40) {
				case 0:
					a := addrs[rng.IntN(len(addrs))]
					pin(a, !m.pinned[a] || rng.IntN(3) > 0)
				case 1:
					m.up = !m.up || rng.IntN(4) > 0
					if r.be.State = 2; m.up {
						r.be.State = steerShuntStateUP
					}
					r.setBackend()
				case 2:
					if !m.up || m.killing {
						m.killing = !m.killing && !m.up
						m.epoch++
						e := steerEpoch{Value: m.epoch}
						if m.killing {
							e.Kill = 1
						}
						r.put(r.o.ShuntEpochs, uint32(worldBackend), e)
					}
				}
				p := dptest.Packet{Flags: flagSets[rng.IntN(len(flagSets))], Seq: rng.Uint32(), Ack: rng.Uint32()}
				client := netip.AddrPortFrom(addrs[rng.IntN(len(addrs))], 40000+uint16(rng.IntN(4)))
				c := m.conns[client]
				if rng.IntN(2) == 0 && c != nil {
					p.From, p.To, p.Src, p.Dst = macBackend, macLB2, fam.backend, netip.AddrPortFrom(fam.snat, c.nat)
					p.Seq, p.Ack = near(c.cack), near(c.back)
				} else {
					p.From, p.To, p.Src, p.Dst = macClient, macLB, client, fam.vip
					if c != nil {
						p.Seq, p.Ack = near(c.back), near(c.cack)
					}
				}
				if rng.IntN(12) == 0 && m.ports > 0 { // any NAT port that was ever used
					p.From, p.To, p.Src, p.Dst = macBackend, macLB2, fam.backend, netip.AddrPortFrom(fam.snat, 20000+uint16(rng.IntN(int(m.ports))))
				}
				if rng.IntN(4) == 0 {
					p.Payload = make([]byte, rng.IntN(40))
				}
				at := fmt.Sprintf("seed %d, packet %d: %v > %v flags %#x", seed, step, p.Src, p.Dst, p.Flags)
				want, frame := m.packet(p), p.Bytes()
				verdict, out, err := r.run(frame)
				if err != nil || verdict != want.verdict {
					t.Fatalf("%s: verdict %d, the model says %d; %v", at, verdict, want.verdict, err)
				}
				if verdict == dptest.Redirect {
					q, err := dptest.Parse(out)
					if err != nil || q.Src != want.src || q.Dst != want.dst {
						t.Fatalf("%s: left as %v > %v, the model says %v > %v; %v", at, q.Src, q.Dst, want.src, want.dst, err)
					}
					if want.rst && (q.Flags != dptest.RST || q.Seq != p.Ack) || !want.rst && (q.Flags != p.Flags || q.Seq != p.Seq || q.Ack != p.Ack || !bytes.Equal(q.Payload, p.Payload)) {
						t.Fatalf("%s: %+v became %+v", at, p, q)
					}
				} else if !bytes.Equal(out, frame) {
					t.Fatalf("%s: not forwarded, yet changed", at)
				}
				if w := r.weight(); w.KernelTokens != m.tokens || w.KernelHalfOpen != m.halfOpen || w.KernelFlows != m.flows {
					t.Fatalf("%s: tokens %d, half open %d, flows %d; the model says %d, %d, %d", at, w.KernelTokens, w.KernelHalfOpen, w.KernelFlows, m.tokens, m.halfOpen, m.flows)
				}
			}
			opened, closed, released = opened+m.opened, closed+m.closed, released+m.released
		}
		t.Logf("%d connections opened, %d ended, %d client ports used again", opened, closed, released)
		if opened < 8*rounds || closed < 6*rounds || released < 3*rounds {
			t.Errorf("too little happened: %d opened, %d ended, %d released", opened, closed, released)
		}
	})
}
