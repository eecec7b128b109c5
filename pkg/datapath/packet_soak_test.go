// SPDX-License-Identifier: Apache-2.0

//go:build linux

package datapath

import (
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/datapath/dptest"
)

// TestPacketSoak opens many more connections than the tables hold, ends them in every way or not at all, uses client
// ports again, and kills the backend now and then. In the end nothing is charged and nothing is left. SHUNT_SOAK=1 makes
// it 200,000 connections.
func TestPacketSoak(t *testing.T) {
	conns := 6_000
	if os.Getenv("SHUNT_SOAK") == "1" {
		conns = 200_000
	}
	for _, fam := range families {
		t.Run(fam.name, func(t *testing.T) {
			ms := func(n int) uint64 { return uint64(n) * uint64(time.Millisecond) }
			r := newRig(t, fam, rigOptions{flows: 512, vars: map[string]any{
				"sweep_ns": ms(5), "half_open_ns": ms(20), "established_ns": ms(200), "fin_ns": ms(50), "closed_ns": ms(20), "held_ns": ms(40), "wait_ns": ms(100)}})
			r.charging()
			r.setWeight(steerWeight{Limit: 1 << 40})
			r.arm()
			rng := rand.New(rand.NewPCG(1, 2))
			epoch, opened, passed := uint32(0), 0, 0
			for i := range conns {
				client := r.port(rng.IntN(300))
				v, out, err := r.run(r.syn(client).Bytes())
				if err != nil {
					t.Fatal(err)
				}
				if v != dptest.Redirect {
					passed++ // the table is full, or the former connection of this port is
					continue
				}
				q, err := dptest.Parse(out)
				if err != nil {
					t.Fatal(err)
				}
				opened++
				both := func(fromClient bool, seq, ack uint32, flags uint8, payload string) {
					p := dptest.Packet{From: macBackend, To: macLB2, Src: fam.backend, Dst: q.Src, Seq: seq, Ack: ack, Flags: flags, Payload: []byte(payload)}
					if fromClient {
						p.From, p.To, p.Src, p.Dst = macClient, macLB, client, fam.vip
					}
					v, out, err := r.run(p.Bytes())
					if err != nil {
						t.Fatal(v, err)
					}
					if v == dptest.Redirect {
						if err := dptest.Verify(out); err != nil {
							t.Fatal(err)
						}
					}
				}
				kind := rng.IntN(8)
				if kind == 0 {
					continue // half open
				}
				both(false, 5000, 1001, dptest.SYN|dptest.ACK, "")
				both(true, 1001, 5001, dptest.ACK, "")
				both(true, 1001, 5001, dptest.ACK|dptest.PSH, "question")
				both(false, 5001, 1009, dptest.ACK|dptest.PSH, "answer")
				both(true, 1009, 5007, dptest.ACK, "")
				switch kind {
				case 1, 2:
					both(true, 1009, 5007, fin, "")
					both(false, 5007, 1010, fin, "")
				case 3, 4:
					both(false, 5007, 1009, fin, "")
					both(true, 1009, 5008, fin, "")
				case 5:
					both(true, 1009, 5007, rst, "")
				case 6:
					both(false, 5007, 1009, rst, "")
				}
				if i%1000 == 999 {
					epoch++
					r.put(r.o.ShuntEpochs, uint32(worldBackend), steerEpoch{Value: epoch, Kill: 1})
					r.afterSweeps()
					r.put(r.o.ShuntEpochs, uint32(worldBackend), steerEpoch{Value: epoch})
				}
			}
			r.eventually("all flows are gone", func() bool { return r.countFlows() == 0 })
			r.wantKernel(0, 0, 0)
			if u, _ := r.use(); u.Open != 0 {
				t.Errorf("%d open flows in the use record", u.Open)
			}
			var per []steerStat
			if err := r.o.ShuntStats.Lookup(uint32(worldBackend), &per); err != nil {
				t.Fatal(err)
			}
			var sum steerStat
			for _, s := range per {
				sum.Opened += s.Opened
				sum.Closed += s.Closed
			}
			if sum.Opened != sum.Closed || sum.Opened == 0 {
				t.Errorf("%d opened, %d closed", sum.Opened, sum.Closed)
			}
			t.Logf("%d connections opened, %d SYNs passed", sum.Opened, passed)
			if opened < conns/10 {
				t.Errorf("only %d of %d were steered", opened, conns)
			}
		})
	}
}
