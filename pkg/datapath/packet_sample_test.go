// SPDX-License-Identifier: Apache-2.0

//go:build linux

package datapath

import (
	"math/rand/v2"
	"testing"

	"github.com/shunt-lb/shunt/pkg/datapath/dptest"
)

// samples sends n SYNs of one address and says which of them passed to the L7 as samples. No flow is opened: without
// a limit every other SYN passes too, but later and for that reason.
func (r *rig) samples(every, seed uint32, n int) []bool {
	r.Helper()
	r.cfg.Sample = every
	r.setConfig()
	r.setWeight(steerWeight{})
	r.put(r.o.ShuntSessUse, r.sessionKey(), steerSessionUse{Seed: seed})
	frame := r.syn(r.fam.client).Bytes()
	out := make([]bool, n)
	last := uint32(0)
	for i := range out {
		if v, _, err := r.run(frame); err != nil || v != dptest.Pass {
			r.Fatalf("verdict %d, %v", v, err)
		}
		u, _ := r.use()
		if u.Seen != uint32(i+1) {
			r.Fatalf("seen %d of %d", u.Seen, i+1)
		}
		out[i] = u.Sampled != last
		last = u.Sampled
	}
	return out
}

// TestPacketSampleFindsSecondSession: one address, two sessions. The pin is of session 0; a sample on a connection of
// session 1 shows it to the L7.
func TestPacketSampleFindsSecondSession(t *testing.T) {
	r := newRig(t, families[0], rigOptions{flows: 64})
	const runs = 100
	for _, every := range []int{2, 3, 16} {
		turns, random := 0, 0
		for seed := range uint32(runs) {
			got := r.samples(uint32(every), seed*2654435761, 8*every)
			rnd := rand.New(rand.NewPCG(uint64(seed), uint64(every)))
			foundTurns, foundRandom := -1, -1
			for i, sampled := range got {
				second := rnd.IntN(2) == 1
				if sampled && foundTurns < 0 && i%2 == int(seed%2) {
					foundTurns = i
				}
				if sampled && foundRandom < 0 && second {
					foundRandom = i
				}
			}
			if foundTurns >= 2*every {
				t.Errorf("sample 1/%d, seed %d: sessions that take turns found after %d connections only", every, seed, foundTurns)
			}
			if foundTurns >= 0 {
				turns++
			}
			if foundRandom >= 0 {
				random++
			}
		}
		if turns < 99 || random < 99 {
			t.Errorf("sample 1/%d: found %d of %d that take turns and %d random ones within %d connections", every, turns, runs, random, 8*every)
		}
	}
}

// TestPacketSampleRate: each window has one sample, each place of it is as likely as any other, and two windows have
// samples of both parities.
func TestPacketSampleRate(t *testing.T) {
	r := newRig(t, families[0], rigOptions{flows: 64})
	spared := map[int]int{8: 2, 16: 4, 64: 4} // of the first window
	for _, every := range []int{1, 2, 5, 8, 16, 64} {
		const seeds, windows = 300, 4
		places := make([]int, every)
		for seed := range uint32(seeds) {
			got := r.samples(uint32(every), seed*0x9e3779b1+1, windows*every)
			parity := -1
			for w := range windows {
				at := -1
				for i, sampled := range got[w*every : (w+1)*every] {
					if sampled {
						if at >= 0 {
							t.Fatalf("sample 1/%d: two samples in window %d", every, w)
						}
						at = i
					}
				}
				if at < 0 {
					t.Fatalf("sample 1/%d: none in window %d", every, w)
				}
				if w > 0 {
					places[at]++
				} else if at < spared[every] {
					t.Fatalf("sample 1/%d: connection %d of a new pin is a sample", every, at+1)
				}
				if p := (w*every + at) % 2; p == parity {
					t.Fatalf("sample 1/%d, seed %d: samples of windows %d and %d have one parity", every, seed, w-1, w)
				} else {
					parity = p
				}
			}
		}
		// Binomial with n = 900: five standard deviations.
		mean := float64(seeds*(windows-1)) / float64(every)
		for place, n := range places {
			// The windows of one seed share their parity's draw, so the deviation is up to twice a binomial one.
			if d := float64(n) - mean; d*d > 4*25*mean {
				t.Errorf("sample 1/%d: place %d was sampled %d times, expected %.0f", every, place, n, mean)
			}
		}
	}
}
