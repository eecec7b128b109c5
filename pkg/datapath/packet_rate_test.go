// SPDX-License-Identifier: Apache-2.0

//go:build linux

package datapath

import (
	"sync"
	"testing"

	"github.com/shunt-lb/shunt/pkg/datapath/dptest"
)

// TestPacketRate: a burst is steered, the rest passes to the L7 and takes nothing; time makes room again.
func TestPacketRate(t *testing.T) {
	for _, tc := range []struct {
		name          string
		client, vip   Rate
		why           steerShuntReason
		steered, left int // of 20 SYNs
	}{
		{"client", Rate{0.001, 5}, Rate{}, steerShuntReasonSHUNT_PASS_CLIENT_RATE, 5, 15},
		{"vip", Rate{}, Rate{0.001, 7}, steerShuntReasonSHUNT_PASS_VIP_RATE, 7, 13},
		{"no burst", Rate{0.001, 0}, Rate{}, steerShuntReasonSHUNT_PASS_CLIENT_RATE, 1, 19},
		{"none", Rate{}, Rate{}, steerShuntReasonSHUNT_PASS_CLIENT_RATE, 20, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, families[0], rigOptions{flows: 256})
			r.setWeight(steerWeight{Limit: 1 << 40})
			r.cfg.ClientEveryNs, r.cfg.ClientBurstNs = tc.client.nanoseconds()
			r.cfg.VipEveryNs, r.cfg.VipBurstNs = tc.vip.nanoseconds()
			r.setConfig()
			for i := range 20 {
				v, _, err := r.run(r.syn(r.port(i)).Bytes())
				if err != nil || v == dptest.Redirect != (i < tc.steered) {
					t.Fatalf("SYN %d: verdict %d, %v", i, v, err)
				}
			}
			if n := r.drops(tc.why); n != uint64(tc.left) {
				t.Fatalf("%d passed for it, want %d", n, tc.left)
			}
			r.wantKernel(int64(tc.steered)*worldTokens, int64(tc.steered)*worldTokens, int64(tc.steered))
			if tc.left == 0 {
				return
			}
			// A repetition of an open connection's SYN is not a new one.
			r.open(r.port(0))
			// Later there is room for one.
			r.cfg.ClientEveryNs, r.cfg.VipEveryNs = min(r.cfg.ClientEveryNs, 1), min(r.cfg.VipEveryNs, 1)
			r.cfg.ClientBurstNs, r.cfg.VipBurstNs = 1<<62, 1<<62
			r.setConfig()
			r.open(r.port(30))
		})
	}
}

// TestPacketRateWithoutDaemon: nobody would serve what a client's bound passed up.
func TestPacketRateWithoutDaemon(t *testing.T) {
	r := newRig(t, families[0], rigOptions{flows: 256})
	r.setWeight(steerWeight{Limit: 1 << 40})
	r.cfg.ClientEveryNs, r.cfg.ClientBurstNs = Rate{0.001, 1}.nanoseconds()
	r.cfg.HeartbeatNs = 0
	r.setConfig()
	for i := range 20 {
		r.open(r.port(i))
	}
}

// TestPacketRateConcurrent: many processors take no more than there is.
func TestPacketRateConcurrent(t *testing.T) {
	r := newRig(t, families[0], rigOptions{flows: 1024})
	r.setWeight(steerWeight{Limit: 1 << 40})
	r.cfg.ClientEveryNs, r.cfg.ClientBurstNs = Rate{1.0 / 3600, 50}.nanoseconds()
	r.setConfig()
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 60 {
				if _, _, err := r.run(r.syn(r.port(g*60 + i)).Bytes()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if w := r.weight(); w.KernelFlows > 50 || w.KernelFlows < 1 {
		t.Fatalf("%d flows, at most 50 are allowed", w.KernelFlows)
	}
}
