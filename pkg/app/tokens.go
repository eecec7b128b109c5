// SPDX-License-Identifier: Apache-2.0

package app

import (
	"slices"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shunt-lb/shunt/pkg/admin"
	"github.com/shunt-lb/shunt/pkg/config"
	"github.com/shunt-lb/shunt/pkg/request"
	"github.com/shunt-lb/shunt/pkg/tokens"
)

// otherModel stands for every model that a pool does not list.
const otherModel = "other"

// largePrompt is the size in bytes from which a prompt must not be counted beside too many others like it: a core is busy
// with so many bytes for a millisecond or more, and small requests wait.
const largePrompt = 64 << 10

// calibration scales the prompts of the pools whose encoding is auto. For the others it only learns: the file says how
// they are to be counted.
type calibration struct {
	*tokens.Calibration
	auto atomic.Pointer[map[string]bool] // pools
}

func newCalibration() *calibration {
	c := &calibration{Calibration: tokens.NewCalibration()}
	c.auto.Store(&map[string]bool{})
	return c
}

// Scale implements proxy.Calibration.
func (c *calibration) Scale(pool, model string, counted int64) int64 {
	if !(*c.auto.Load())[pool] {
		return counted
	}
	return c.Calibration.Scale(pool, model, counted)
}

// apply follows a configuration: what was learned of pools and models that are gone is forgotten.
func (c *calibration) apply(cfg *config.Config) {
	auto, models := map[string]bool{}, map[string][]string{}
	for _, p := range cfg.Pools {
		auto[p.Name] = p.Tokenizer.Encoding == "auto" && p.Tokenizer.File == ""
		models[p.Name] = p.Models
	}
	c.auto.Store(&auto)
	c.Keep(func(pool, model string) bool {
		list, ok := models[pool]
		return ok && (model == otherModel || slices.Contains(list, model))
	})
}

// families are the pools whose family the file names.
func families(cfg *config.Config) map[string]request.Family {
	m := map[string]request.Family{}
	for _, p := range cfg.Pools {
		if f, ok := request.ParseFamily(p.Tokenizer.Family); ok {
			m[p.Name] = f
		}
	}
	return m
}

// family implements proxy.Options.Family.
func (a *app) family(pool, model string) request.Family {
	if f, ok := (*a.families.Load())[pool]; ok {
		return f
	}
	return request.FamilyOf(model)
}

// tokensStatus is the part of the status that says how prompts are counted.
func (a *app) tokensStatus() admin.Tokens {
	var s admin.Tokens
	var hit, all uint64
	for _, st := range a.counter.Stats() {
		hit += st.HitBytes
		all += st.HitBytes + st.MissBytes
		s.EstimatedBytes += int64(st.EstimatedBytes)
	}
	if all > 0 {
		s.CacheHitRatio = float64(hit) / float64(all)
	}
	auto := *a.calibration.auto.Load()
	for _, f := range a.calibration.Factors() {
		c := admin.Calibration{Pool: f.Group, Model: f.Model, Factor: f.Value, Confidence: f.Confidence, Spread: f.Spread,
			Samples: int64(f.Samples), Rejected: int64(f.Rejected), Applied: auto[f.Group]}
		s.Calibration = append(s.Calibration, c)
	}
	return s
}

// tokensCollector shows how prompts are counted.
type tokensCollector struct{ a *app }

var (
	factorDesc = prometheus.NewDesc("shunt_token_calibration_factor",
		"Prompt tokens that the engines report for one that was counted, as far as it can be trusted.", []string{"pool", "model"}, nil)
	confidenceDesc = prometheus.NewDesc("shunt_token_calibration_confidence",
		"How far the calibration factor is trusted, 0 to 1.", []string{"pool", "model"}, nil)
	samplesDesc = prometheus.NewDesc("shunt_token_calibration_samples_total",
		"Requests whose reported usage was compared with the count, by whether it was believed.", []string{"pool", "model", "result"}, nil)
	cacheTextsDesc = prometheus.NewDesc("shunt_token_cache_texts_total",
		"Texts of prompts that were to be counted, by whether their count was remembered.", []string{"encoding", "result"}, nil)
	cacheBytesDesc = prometheus.NewDesc("shunt_token_cache_bytes_total",
		"Bytes of prompts that were to be counted, by whether their count was remembered.", []string{"encoding", "result"}, nil)
	hitRatioDesc = prometheus.NewDesc("shunt_token_cache_hit_ratio",
		"Bytes of prompts whose count was remembered, as a share of all since the start.", []string{"encoding"}, nil)
	estimatedDesc = prometheus.NewDesc("shunt_token_estimated_bytes_total",
		"Bytes of prompts that were estimated and not encoded.", []string{"encoding"}, nil)
	refusedDesc = prometheus.NewDesc("shunt_token_large_counts_refused_total",
		"Large prompts that were estimated because enough of them were being counted.", []string{"encoding"}, nil)
)

// Describe implements prometheus.Collector.
func (c *tokensCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{factorDesc, confidenceDesc, samplesDesc, cacheTextsDesc, cacheBytesDesc, hitRatioDesc,
		estimatedDesc, refusedDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *tokensCollector) Collect(ch chan<- prometheus.Metric) {
	show := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, kind, v, labels...)
	}
	for _, f := range c.a.calibration.Factors() {
		show(factorDesc, prometheus.GaugeValue, f.Value, f.Group, f.Model)
		show(confidenceDesc, prometheus.GaugeValue, f.Confidence, f.Group, f.Model)
		show(samplesDesc, prometheus.CounterValue, float64(f.Samples), f.Group, f.Model, "taken")
		show(samplesDesc, prometheus.CounterValue, float64(f.Rejected), f.Group, f.Model, "rejected")
	}
	for name, s := range c.a.counter.Stats() {
		show(cacheTextsDesc, prometheus.CounterValue, float64(s.Hits), name, "hit")
		show(cacheTextsDesc, prometheus.CounterValue, float64(s.Misses), name, "miss")
		show(cacheBytesDesc, prometheus.CounterValue, float64(s.HitBytes), name, "hit")
		show(cacheBytesDesc, prometheus.CounterValue, float64(s.MissBytes), name, "miss")
		if all := s.HitBytes + s.MissBytes; all > 0 {
			show(hitRatioDesc, prometheus.GaugeValue, float64(s.HitBytes)/float64(all), name)
		}
		show(estimatedDesc, prometheus.CounterValue, float64(s.EstimatedBytes), name)
		show(refusedDesc, prometheus.CounterValue, float64(s.RefusedLargeCounts), name)
	}
}
