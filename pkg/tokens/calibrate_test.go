// SPDX-License-Identifier: Apache-2.0

package tokens

import (
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
)

func theFactor(t testing.TB, c *Calibration) Factor {
	t.Helper()
	list := c.Factors()
	if len(list) != 1 {
		t.Fatalf("got %+v", list)
	}
	return list[0]
}

func TestCalibration(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	size := func() int64 { return 100 + r.Int64N(5000) }
	noisy := func(n int64, by float64) int64 { return int64(float64(n) * by * (0.95 + 0.1*r.Float64())) }
	for _, tc := range []struct {
		name    string
		samples int
		usage   func(i int, counted int64) Usage
		lo, hi  float64 // of the factor
		trust   float64 // least confidence
	}{
		{"nothing", 0, nil, 1, 1, 0},
		{"the same vocabulary", 100, func(_ int, n int64) Usage { return Usage{Prompt: n} }, 1, 1, 1},
		{"Chinese for another one", 100, func(_ int, n int64) Usage { return Usage{Prompt: noisy(n, 0.62)} }, 0.6, 0.64, 1},
		{"a coarse one", 100, func(_ int, n int64) Usage { return Usage{Prompt: noisy(n, 1.87)} }, 1.82, 1.92, 1},
		{"one sample is a quarter of a doubt", 1, func(_ int, n int64) Usage { return Usage{Prompt: 2 * n} }, 1.01, 1.1, 0},
		{"a hidden prompt", 200, func(_ int, n int64) Usage { return Usage{Prompt: n + 60} }, 1, 1.05, 1},
		{"a third are far off", 200, func(i int, n int64) Usage {
			if i%3 == 0 {
				return Usage{Prompt: 7 * n}
			}
			return Usage{Prompt: noisy(n, 1.2)}
		}, 1.14, 1.28, 0.9},
		{"mostly nonsense", 200, func(i int, n int64) Usage {
			if i%10 != 0 {
				return Usage{Prompt: 1 + r.Int64N(3)}
			}
			return Usage{Prompt: noisy(n, 1.2)}
		}, 1.1, 1.3, 0},
		{"nothing but nonsense", 200, func(_ int, _ int64) Usage { return Usage{Prompt: math.MaxInt64} }, 1, 1, 0},
		{"noise", 200, func(_ int, n int64) Usage { return Usage{Prompt: int64(float64(n) * math.Exp(4*r.Float64()-2))} }, 0.7, 1.4, 0},
		{"a liar", 200, func(_ int, n int64) Usage { return Usage{Prompt: 7 * n} }, 4, 4, 0},
		{"cached tokens within", 200, func(i int, n int64) Usage { return Usage{Prompt: noisy(n, 1.1), Cached: n * int64(i%4) / 4} }, 1.05, 1.15, 1},
		{"cached tokens apart, by the API", 200, func(_ int, n int64) Usage { return Usage{Prompt: n / 10, Cached: n - n/10, Apart: true} }, 0.98, 1.02, 1},
		{"all cached", 200, func(_ int, n int64) Usage { return Usage{Cached: n, Apart: true} }, 1, 1, 1},
		{"cached tokens apart, against the API", 300, func(i int, n int64) Usage {
			cached := n * int64(i%10) / 10 // now less, now more than the rest
			return Usage{Prompt: n - cached, Cached: cached}
		}, 0.98, 1.02, 0.9},
	} {
		c := NewCalibration()
		for i := range tc.samples {
			n := size()
			c.Observe("pool", "m", n, tc.usage(i, n))
		}
		if tc.samples == 0 {
			if got := c.Scale("pool", "m", 1000); got != 1000 {
				t.Errorf("%s: 1000 became %d", tc.name, got)
			}
			continue
		}
		f := theFactor(t, c)
		if f.Value < tc.lo || f.Value > tc.hi || f.Confidence < tc.trust || f.Confidence > 1 || f.Samples+f.Rejected != uint64(tc.samples) {
			t.Errorf("%s: got %+v, want a factor of %g to %g", tc.name, f, tc.lo, tc.hi)
		}
		if got, want := c.Scale("pool", "m", 100_000), int64(math.Round(100_000*f.Value)); got != want {
			t.Errorf("%s: scaled to %d, want %d", tc.name, got, want)
		}
		if got := c.Scale("pool", "other", 77); got != 77 {
			t.Errorf("%s: another model is scaled to %d", tc.name, got)
		}
	}
}

func TestCalibrationFollows(t *testing.T) {
	c := NewCalibration()
	for range 200 {
		c.Observe("p", "m", 1000, Usage{Prompt: 1000})
	}
	for range calibrationWindow {
		c.Observe("p", "m", 1000, Usage{Prompt: 1500})
	}
	if got := theFactor(t, c).Value; math.Abs(got-1.5) > 0.01 {
		t.Errorf("a new model under the name: factor %g", got)
	}
}

func TestCalibrationLeavesOut(t *testing.T) {
	c := NewCalibration()
	for _, n := range []int64{-5, 0, 1, minCalibrated - 1} {
		c.Observe("p", "m", n, Usage{Prompt: 10})
	}
	c.Observe("p", "m", 1000, Usage{})
	c.Observe("p", "m", 1000, Usage{Prompt: -3, Cached: -4})
	if list := c.Factors(); len(list) != 0 {
		t.Errorf("got %+v", list)
	}
	for i := range maxFactors + 10 {
		c.Observe("p", fmt.Sprint(i), 1000, Usage{Prompt: 1000})
	}
	if n := len(c.Factors()); n != maxFactors {
		t.Errorf("%d factors", n)
	}
	c.Keep(func(_, model string) bool { return model == "7" })
	if f := theFactor(t, c); f.Model != "7" {
		t.Errorf("got %+v", f)
	}
	for _, n := range []int64{0, -1} {
		if got := c.Scale("p", "7", n); got != n {
			t.Errorf("%d became %d", n, got)
		}
	}
}

func TestCalibrationAllocations(t *testing.T) {
	c := NewCalibration()
	run := func() {
		c.Observe("p", "m", 1000, Usage{Prompt: 1100, Cached: 300})
		c.Scale("p", "m", 1000)
	}
	run()
	if n := testing.AllocsPerRun(200, run); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestCalibrationConcurrently(t *testing.T) {
	c := NewCalibration()
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 500 {
				model := fmt.Sprint((i + w) % 5)
				c.Observe("p", model, 1000, Usage{Prompt: 1200})
				if got := c.Scale("p", model, 1000); got < 1000 || got > 1200 {
					t.Errorf("scaled to %d", got)
				}
				if i%100 == 0 {
					c.Keep(func(string, string) bool { return true })
					c.Factors()
				}
			}
		})
	}
	wg.Wait()
	for _, f := range c.Factors() {
		if math.Abs(f.Value-1.2) > 0.001 {
			t.Errorf("got %+v", f)
		}
	}
}

func FuzzCalibration(f *testing.F) {
	f.Add(int64(1000), int64(1100), int64(50), true)
	f.Add(int64(math.MaxInt64), int64(1), int64(math.MaxInt64), false)
	f.Add(int64(1000), int64(math.MaxInt64), int64(math.MaxInt64), true)
	f.Fuzz(func(t *testing.T, counted, prompt, cached int64, apart bool) {
		c := NewCalibration()
		for range 20 {
			c.Observe("p", "m", counted, Usage{prompt, cached, apart})
		}
		for _, f := range c.Factors() {
			if !(f.Value >= 1.0/maxFactor && f.Value <= maxFactor && f.Confidence >= 0 && f.Confidence <= 1) {
				t.Fatalf("got %+v", f)
			}
		}
		if got := c.Scale("p", "m", 1000); got < 250 || got > 4000 {
			t.Fatalf("1000 became %d", got)
		}
	})
}
