// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are vLLM's names and labels (model_name, engine), as its V1 engine exports them. Times are real time.
type metrics struct {
	registry *prometheus.Registry

	ttft, itl, e2e, tpot    prometheus.Observer
	promptHist, outputHist  prometheus.Observer
	iteration               prometheus.Observer
	aborted, stopped, ended prometheus.Counter
}

// secondsBuckets are those of vLLM for time to first token; smaller and larger latencies fall into them as well.
var secondsBuckets = []float64{0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560}

var tokenBuckets = []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000}

func newMetrics(s *Server) *metrics {
	model := "sim"
	if len(s.o.Models) > 0 {
		model = s.o.Models[0]
	}
	labels := prometheus.Labels{"model_name": model, "engine": "0"}
	m := &metrics{registry: prometheus.NewRegistry()}
	hist := func(name, help string, buckets []float64) prometheus.Histogram {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, ConstLabels: labels, Buckets: buckets})
		m.registry.MustRegister(h)
		return h
	}
	m.ttft = hist("vllm:time_to_first_token_seconds", "Time to first token.", secondsBuckets)
	m.itl = hist("vllm:inter_token_latency_seconds", "Time between two tokens.", secondsBuckets)
	m.tpot = hist("vllm:request_time_per_output_token_seconds", "Mean time per output token of a request.", secondsBuckets)
	m.e2e = hist("vllm:e2e_request_latency_seconds", "Time of a request from end to end.", secondsBuckets)
	m.promptHist = hist("vllm:request_prompt_tokens", "Prompt tokens of a request.", tokenBuckets)
	m.outputHist = hist("vllm:request_generation_tokens", "Generated tokens of a request.", tokenBuckets)
	m.iteration = hist("vllm:iteration_tokens_total", "Tokens of a step.", tokenBuckets)

	success := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "vllm:request_success_total",
		Help: "Finished requests by reason.", ConstLabels: labels}, []string{"finished_reason"})
	m.registry.MustRegister(success)
	m.stopped, m.ended, m.aborted = success.WithLabelValues("stop"), success.WithLabelValues("length"), success.WithLabelValues("abort")

	stat := func(f func(Stats) float64) func() float64 {
		return func() float64 {
			s.mu.Lock()
			defer s.mu.Unlock()
			return f(s.engine.Stats())
		}
	}
	gauge := func(name, help string, f func(Stats) float64) {
		m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: labels}, stat(f)))
	}
	counter := func(name, help string, f func(Stats) float64) {
		m.registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help, ConstLabels: labels}, stat(f)))
	}
	gauge("vllm:num_requests_running", "Requests in the batch.", func(s Stats) float64 { return float64(s.Running) })
	gauge("vllm:num_requests_waiting", "Requests that wait for a place in the batch.", func(s Stats) float64 { return float64(s.Waiting) })
	gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", func(s Stats) float64 { return s.KVUsage })
	counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", func(s Stats) float64 { return float64(s.Queries) })
	counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", func(s Stats) float64 { return float64(s.Hits) })
	counter("vllm:prompt_tokens_total", "Prompt tokens processed.", func(s Stats) float64 { return float64(s.PromptTokens) })
	counter("vllm:generation_tokens_total", "Tokens generated.", func(s Stats) float64 { return float64(s.OutputTokens) })
	counter("vllm:num_preemptions_total", "Sequences that lost their blocks to another.", func(s Stats) float64 { return float64(s.Preemptions) })

	info := prometheus.NewGauge(prometheus.GaugeOpts{Name: "vllm:cache_config_info", Help: "The KV cache's size.",
		ConstLabels: prometheus.Labels{"engine": "0", "block_size": strconv.Itoa(BlockTokens),
			"num_gpu_blocks": strconv.Itoa(s.engine.KVBlocks()), "enable_prefix_caching": "True"}})
	info.Set(1)
	m.registry.MustRegister(info)
	return m
}

func (m *metrics) step(st Step) {
	if n := st.Prefill + st.Decode; n > 0 {
		m.iteration.Observe(float64(n))
	}
}

func (m *metrics) finished(ch *choice, d time.Duration) {
	m.e2e.Observe(d.Seconds())
	m.promptHist.Observe(float64(ch.req.PromptTokens))
	m.outputHist.Observe(float64(ch.produced))
	if ch.produced > 1 {
		m.tpot.Observe(ch.last.Sub(ch.first).Seconds() / float64(ch.produced-1))
	}
	if ch.reason == "length" {
		m.ended.Inc()
	} else {
		m.stopped.Inc()
	}
}
