// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"math"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/pkg/sim"
)

// SLO is what makes a request a good one. For prompts beyond LongPrompt the time of an idle server's uncached prefill is added
// to TTFT.
type SLO struct {
	TTFT       time.Duration
	PerToken   time.Duration
	LongPrompt int
}

// DefaultSLO is what published comparisons use.
var DefaultSLO = SLO{TTFT: 2 * time.Second, PerToken: 50 * time.Millisecond, LongPrompt: 32 << 10}

// Report is a run in figures. Times are in seconds.
type Report struct {
	Trace    string  `json:"trace"`
	Policy   string  `json:"policy"`
	Backends int     `json:"backends"`
	Load     float64 `json:"load"`
	Speedup  float64 `json:"speedup"`
	Seed     uint64  `json:"seed"`
	Requests int     `json:"requests"`
	Failed   int     `json:"failed"`
	Seconds  float64 `json:"seconds"` // of the simulated run

	Goodput     float64 `json:"goodput"` // share of all requests that met the SLO
	TTFTMean    float64 `json:"ttft_mean"`
	TTFTP50     float64 `json:"ttft_p50"`
	TTFTP90     float64 `json:"ttft_p90"`
	TTFTP95     float64 `json:"ttft_p95"`
	TTFTP99     float64 `json:"ttft_p99"`
	PerTokenP50 float64 `json:"per_token_p50"`
	PerTokenP90 float64 `json:"per_token_p90"`
	LatencyMean float64 `json:"latency_mean"`
	LatencyP90  float64 `json:"latency_p90"`

	Prefilled   float64 `json:"prefilled_per_token"` // prompt tokens computed per token asked
	Cached      float64 `json:"cached_share"`        // of prompt tokens
	Imbalance   float64 `json:"busiest_over_mean"`   // prompt tokens computed
	InFlight    float64 `json:"in_flight_busiest_over_mean"`
	Utilisation float64 `json:"utilisation"`
	Preemptions int64   `json:"preemptions"`
	Drift       float64 `json:"predicted_over_observed"` // times to the first token; 0 = no predictions
}

// Summarise makes the figures of a run.
func Summarise(t *Trace, o Options, run *Run, slo SLO) *Report {
	r := &Report{Trace: t.Name, Policy: o.Policy, Backends: len(run.Busy), Load: o.Load, Speedup: run.Speedup, Seed: o.Seed,
		Requests: len(run.Outcomes), Seconds: run.Span.Seconds(), Preemptions: run.Preempts, InFlight: run.Peak}
	var ttft, per, latency []float64
	var asked, cached, computed, busiest, good float64
	profile := sim.Profile{}
	if len(o.Profiles) > 0 {
		profile = o.Profiles[0]
	} else {
		profile, _ = sim.LookupProfile(sim.DefaultProfile)
	}
	for i := range run.Outcomes {
		out := &run.Outcomes[i]
		if out.Failed || out.Request == nil {
			r.Failed++
			continue
		}
		asked += float64(out.Request.Prompt)
		cached += float64(out.Cached)
		ttft = append(ttft, out.TTFT.Seconds())
		latency = append(latency, out.Latency.Seconds())
		if out.Request.Output > 1 {
			per = append(per, out.PerTok.Seconds())
		}
		limit := slo.TTFT
		if out.Request.Prompt > slo.LongPrompt {
			limit += profile.Prefill(out.Request.Prompt, 2048)
		}
		if out.TTFT <= limit && out.PerTok <= slo.PerToken {
			good++
		}
	}
	for i := range run.Computed {
		computed += float64(run.Computed[i])
		busiest = max(busiest, float64(run.Computed[i]))
		r.Utilisation += run.Busy[i].Seconds() / max(run.Span.Seconds(), 1e-9) / float64(len(run.Busy))
	}
	slices.Sort(ttft)
	slices.Sort(per)
	slices.Sort(latency)
	r.Goodput = good / max(float64(len(run.Outcomes)), 1)
	r.TTFTMean, r.TTFTP50, r.TTFTP90, r.TTFTP95, r.TTFTP99 = mean(ttft), quantile(ttft, .5), quantile(ttft, .9), quantile(ttft, .95), quantile(ttft, .99)
	r.PerTokenP50, r.PerTokenP90 = quantile(per, .5), quantile(per, .9)
	r.LatencyMean, r.LatencyP90 = mean(latency), quantile(latency, .9)
	r.Prefilled, r.Cached = computed/max(asked, 1), cached/max(asked, 1)
	r.Imbalance = busiest * float64(len(run.Computed)) / max(computed, 1)
	if run.Observed > 0 {
		r.Drift = run.Predicted / run.Observed
	}
	return r
}

func mean(x []float64) (m float64) {
	for _, v := range x {
		m += v / float64(len(x))
	}
	return m
}

// quantile of a sorted list; NaN-free: 0 for an empty one.
func quantile(x []float64, q float64) float64 {
	if len(x) == 0 {
		return 0
	}
	return x[min(int(math.Ceil(q*float64(len(x))))-1, len(x)-1)]
}

// Median returns the report whose figures are each the median of those given, which are of one trace and policy.
func Median(reports []*Report) *Report {
	m := *reports[0]
	for _, f := range [...]func(*Report) *float64{
		func(r *Report) *float64 { return &r.Goodput }, func(r *Report) *float64 { return &r.TTFTMean },
		func(r *Report) *float64 { return &r.TTFTP50 }, func(r *Report) *float64 { return &r.TTFTP90 },
		func(r *Report) *float64 { return &r.TTFTP95 }, func(r *Report) *float64 { return &r.TTFTP99 },
		func(r *Report) *float64 { return &r.PerTokenP50 }, func(r *Report) *float64 { return &r.PerTokenP90 },
		func(r *Report) *float64 { return &r.LatencyMean }, func(r *Report) *float64 { return &r.LatencyP90 },
		func(r *Report) *float64 { return &r.Prefilled }, func(r *Report) *float64 { return &r.Cached },
		func(r *Report) *float64 { return &r.Imbalance }, func(r *Report) *float64 { return &r.InFlight },
		func(r *Report) *float64 { return &r.Utilisation }, func(r *Report) *float64 { return &r.Drift },
	} {
		var x []float64
		for _, r := range reports {
			x = append(x, *f(r))
		}
		slices.Sort(x)
		*f(&m) = x[len(x)/2]
	}
	return &m
}
