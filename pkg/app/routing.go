// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	engines "github.com/shunt-lb/shunt/pkg/engine"
	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/policy"
	"github.com/shunt-lb/shunt/pkg/prefix"
)

// routing is what the daemon believes of its engines: who holds which prompts, and what they report of their load.
type routing struct {
	a       *app
	index   *prefix.Index
	scraper *engines.Scraper
}

// blockTokens is about what a block of the index stands for, to size it by an engine's cache.
const blockTokens = prefix.BlockBytes / 4

func newRouting(a *app) *routing { return &routing{a: a, index: prefix.New(prefix.Options{})} }

// watch makes the scraper, once there is a fleet to ask.
func (r *routing) watch() {
	r.scraper = engines.New(engines.Options{Backends: r.asked, Clock: r.a.fleet.Clock, OnFigures: r.figures})
}

// asked are the backends of pools whose policy makes something of an engine's figures.
func (r *routing) asked() []*fleet.Backend {
	needs := *r.a.needs.Load()
	all := r.a.fleet.Backends()
	list := make([]*fleet.Backend, 0, len(all))
	for _, b := range all {
		if n := needs[b.Pool()]; n.Has(policy.EngineLoad) || n.Has(policy.PrefixIndex) {
			list = append(list, b)
		}
	}
	return list
}

func (r *routing) figures(b *fleet.Backend, f engines.Figures, restarted bool) {
	if restarted {
		r.forget(b)
	}
	if f.KVTokens > 0 {
		r.index.Resize(b.ID(), int(f.KVTokens/blockTokens))
	}
}

// forget drops what the backend was believed to hold: it is down, or its engine has begun anew.
func (r *routing) forget(b *fleet.Backend) { r.index.Forget(b.ID()) }

func (r *routing) run(ctx context.Context) error { return r.scraper.Run(ctx) }

// signal says in one line by what the backend's load is known.
func (r *routing) signal(b *fleet.Backend) string {
	n := (*r.a.needs.Load())[b.Pool()]
	if !n.Has(policy.EngineLoad) && !n.Has(policy.PrefixIndex) {
		return "own counts; the policy needs no more"
	}
	st := r.scraper.Status(b)
	switch {
	case st.Age < 0 && st.Err != nil:
		return fmt.Sprintf("own counts only: %v", st.Err)
	case st.Age < 0:
		return "own counts only so far"
	case st.Age >= fleet.StaleGauges:
		return fmt.Sprintf("own counts only: %s's figures are %s old: %v", st.Engine, st.Age.Round(time.Second), st.Err)
	}
	return fmt.Sprintf("own counts and %s's figures, %s old", st.Engine, st.Age.Round(100*time.Millisecond))
}

var (
	telemetryDesc = prometheus.NewDesc("shunt_backend_telemetry_age_seconds", "Age of the figures that the engine reported last.", []string{"backend"}, nil)
	engineDesc    = prometheus.NewDesc("shunt_backend_engine_requests", "Requests in the engine by its own report.", []string{"backend", "state"}, nil)
	prefillDesc   = prometheus.NewDesc("shunt_backend_prefill_tokens_per_second", "Learned speed of prefill.", []string{"backend"}, nil)
	decodeDesc    = prometheus.NewDesc("shunt_backend_decode_seconds", "Learned time per token of an answer on an idle backend.", []string{"backend"}, nil)
	driftDesc     = prometheus.NewDesc("shunt_backend_first_token_prediction_ratio", "Recent predicted over observed times to the first token.", []string{"backend"}, nil)
	heldDesc      = prometheus.NewDesc("shunt_backend_prefix_blocks", "Blocks of prompts that the backend is believed to hold.", []string{"backend"}, nil)
	queuedDesc    = prometheus.NewDesc("shunt_backend_queued_prompt_tokens", "Prompt tokens sent whose answer has not begun, less those believed cached.", []string{"backend"}, nil)
)

// Describe implements prometheus.Collector.
func (r *routing) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{telemetryDesc, engineDesc, prefillDesc, decodeDesc, driftDesc, heldDesc, queuedDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (r *routing) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	now := r.a.fleet.Clock()
	for _, b := range r.a.fleet.Backends() {
		if g, ok := b.Gauges(); ok {
			gauge(telemetryDesc, (now - g.At).Seconds(), b.Name())
			gauge(engineDesc, float64(g.Waiting), b.Name(), "waiting")
			gauge(engineDesc, float64(g.Running), b.Name(), "running")
		}
		s := b.Speed()
		gauge(prefillDesc, float64(s.PrefillRate), b.Name())
		gauge(decodeDesc, float64(s.DecodeBase), b.Name())
		if predicted, observed := b.Drift(); observed > 0 {
			gauge(driftDesc, predicted/observed, b.Name())
		}
		gauge(heldDesc, float64(r.index.Len(b.ID())), b.Name())
		_, queued := b.Waiting()
		gauge(queuedDesc, float64(queued), b.Name())
	}
}
