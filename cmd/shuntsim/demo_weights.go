// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/pkg/admin"
)

// sample is every backend's weight at one moment.
type sample struct {
	at       time.Duration
	backends []admin.BackendStatus
}

// sampler reads the weights while something happens.
type sampler struct {
	stop    context.CancelFunc
	wg      sync.WaitGroup
	samples []sample // after wg
}

const sampleEvery = 10 * time.Millisecond

func startSampler(ctx context.Context, c admin.Client) *sampler {
	s := &sampler{}
	ctx, s.stop = context.WithCancel(ctx)
	start := time.Now()
	take := func() {
		if list, err := c.Backends(ctx); err == nil {
			s.samples = append(s.samples, sample{time.Since(start), list})
		}
	}
	take() // one before anything happens
	s.wg.Go(func() {
		tick := time.NewTicker(sampleEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				take()
			}
		}
	})
	return s
}

func (s *sampler) end() []sample {
	s.stop()
	s.wg.Wait()
	return s.samples
}

func (s sample) of(name string) (admin.BackendStatus, bool) {
	i := slices.IndexFunc(s.backends, func(b admin.BackendStatus) bool { return b.Name == name })
	if i < 0 {
		return admin.BackendStatus{}, false
	}
	return s.backends[i], true
}

func weightOf(b admin.BackendStatus) int64 { return b.L7Tokens + b.KernelTokens }

// showWeights prints the moments at which the weight of one backend changed most, in order.
func showWeights(out io.Writer, samples []sample, name string) {
	if len(samples) == 0 {
		return
	}
	const rows = 7
	fmt.Fprintf(out, "   weights while it ran, in tokens (front end + kernel):\n   %9s", "")
	for _, b := range samples[0].backends {
		mark := " "
		if b.Name == name {
			mark = "*"
		}
		fmt.Fprintf(out, "  %16s", mark+b.Name)
	}
	fmt.Fprintln(out)
	for _, i := range turningPoints(samples, name, rows) {
		s := samples[i]
		fmt.Fprintf(out, "   %6d ms", s.at.Milliseconds())
		for _, b := range s.backends {
			fmt.Fprintf(out, "  %16s", fmt.Sprintf("%d + %d", b.L7Tokens, b.KernelTokens))
		}
		fmt.Fprintln(out)
	}
}

// turningPoints picks at most n samples, in order: the first, the last, and those before and after the largest steps of
// the backend's weight.
func turningPoints(samples []sample, name string, n int) []int {
	type step struct {
		index int
		size  int64
	}
	var steps []step
	for i := 1; i < len(samples); i++ {
		a, _ := samples[i-1].of(name)
		b, _ := samples[i].of(name)
		if d := max(weightOf(a)-weightOf(b), weightOf(b)-weightOf(a)); d > 0 {
			steps = append(steps, step{i, d})
		}
	}
	// What is small beside the largest step is decoding, token by token.
	var most int64
	for _, s := range steps {
		most = max(most, s.size)
	}
	steps = slices.DeleteFunc(steps, func(s step) bool { return s.size*20 < most })
	slices.SortStableFunc(steps, func(a, b step) int { return int(b.size - a.size) })
	picked := []int{0, len(samples) - 1}
	for _, s := range steps {
		for _, i := range []int{s.index, s.index - 1} {
			if len(picked) < n && !slices.Contains(picked, i) {
				picked = append(picked, i)
			}
		}
	}
	slices.Sort(picked)
	return slices.Compact(picked)
}
