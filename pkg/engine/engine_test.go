// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

var nan = math.NaN()

func TestParseKnowsTheDialects(t *testing.T) {
	for _, tt := range []struct {
		name, body string
		want       Figures
	}{
		{"vllm", `# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a {b} \"c\""} 3.0
vllm:num_requests_running{engine="1",model_name="a"} 4.0
vllm:num_requests_waiting{engine="0",model_name="a"} 2.0
vllm:num_requests_waiting{engine="1",model_name="a"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a"} 0.75
vllm:gpu_cache_usage_perc{engine="0",model_name="a"} 0.99
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="1000",num_gpu_blocks_override="None"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="1000",num_gpu_blocks_override="None"} 1.0
vllm:time_to_first_token_seconds_bucket{le="0.1"} 7
vllm:prompt_tokens_total{engine="0"} 100
`, Figures{"vllm", 2, 7, 0.5, 32000, 100}},
		{"vllm, old names", "vllm:num_requests_running{model_name=\"a\"} 1\nvllm:num_requests_waiting{model_name=\"a\"} 0 1700000000000\nvllm:gpu_cache_usage_perc{model_name=\"a\"} 0.4\n",
			Figures{"vllm", 0, 1, 0.4, nan, nan}},
		{"sglang", "sglang:num_queue_reqs{model_name=\"m\"} 5\nsglang:num_running_reqs{model_name=\"m\"} 6\nsglang:token_usage{model_name=\"m\"} 0.28\nsglang:max_total_num_tokens{model_name=\"m\"} 437512\n",
			Figures{"sglang", 5, 6, 0.28, 437512, nan}},
		{"sglang, pages", "sglang:num_queue_reqs 0\nsglang:cache_config_info{num_pages=\"100\",page_size=\"64\"} 1\n", Figures{"sglang", 0, nan, nan, 6400, nan}},
		{"tgi", "tgi_queue_size 4\ntgi_batch_current_size 9\ntgi_batch_current_max_tokens 100\ntgi_request_count 77", Figures{"tgi", 4, 9, nan, nan, 77}},
		{"triton with trt-llm", `nv_trt_llm_request_metrics{model="m",request_type="waiting",version="1"} 1
nv_trt_llm_request_metrics{model="m",request_type="scheduled",version="1"} 2
nv_trt_llm_request_metrics{model="m",request_type="max",version="1"} 512
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="m",version="1"} 0.5
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="m",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="m",version="1"} 100
nv_inference_pending_request_count{model="m"} 50
`, Figures{"triton", 1, 2, 0.5, 6400, nan}},
		{"plain triton", "nv_inference_pending_request_count{model=\"a\"} 5\nnv_inference_pending_request_count{model=\"b\"} 6\n", Figures{"triton", 11, nan, nan, nan, nan}},
		{"trt-llm serve", "trtllm_num_requests_waiting 1\ntrtllm_num_requests_running 2\ntrtllm_kv_cache_utilization 0.1\ntrtllm_kv_cache_tokens_per_block 32\ntrtllm_kv_cache_max_blocks 10\n",
			Figures{"trtllm", 1, 2, 0.1, 320, nan}},
		{"llama.cpp", "llamacpp:requests_processing 1\nllamacpp:requests_deferred 3\nllamacpp:kv_cache_usage_ratio 0.5\nllamacpp:prompt_tokens_total 9\n", Figures{"llama.cpp", 3, 1, 0.5, nan, 9}},
		{"ray serve", "ray_serve_deployment_queued_queries{deployment=\"a\"} 2\nray_serve_replica_processing_queries{deployment=\"a\",replica=\"x\"} 3\nray_serve_replica_processing_queries{deployment=\"a\",replica=\"y\"} 4\n",
			Figures{"rayserve", 2, 7, nan, nan, nan}},
		{"nonsense values", "vllm:num_requests_running NaN\nvllm:num_requests_waiting -3\nvllm:kv_cache_usage_perc 45\nvllm:prompt_tokens_total{x=\"} 5\n", Figures{"vllm", nan, nan, 0.45, nan, nan}},
	} {
		got, err := Parse(strings.NewReader(tt.body))
		if err != nil || !same(got, tt.want) {
			t.Errorf("%s: got %+v, %v, want %+v", tt.name, got, err, tt.want)
		}
	}
}

func same(a, b Figures) bool { return fmt.Sprint(a) == fmt.Sprint(b) }

func TestParseRefuses(t *testing.T) {
	if _, err := Parse(strings.NewReader("go_goroutines 5\nprocess_open_fds 3\n")); !errors.Is(err, ErrNoDialect) {
		t.Errorf("foreign metrics: %v", err)
	}
	if _, err := Parse(strings.NewReader(strings.Repeat("x", MaxBody+5))); !errors.Is(err, ErrTooLarge) {
		t.Errorf("a line without an end: %v", err)
	}
	long := strings.Repeat("y", 100<<10) + "\ntgi_queue_size 4\n"
	if f, err := Parse(strings.NewReader(long)); err != nil || f.Waiting != 4 {
		t.Errorf("after a long line: %+v, %v", f, err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add("vllm:num_requests_running{engine=\"0\"} 3.0\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"10\"} 1\n")
	f.Add("tgi_queue_size 4")
	f.Fuzz(func(t *testing.T, body string) {
		g, err := Parse(strings.NewReader(body))
		if err == nil && (g.Waiting < 0 || g.Running < 0 || g.KVUse < 0 || g.KVUse > 1 || g.KVTokens < 0) {
			t.Fatalf("figures %+v", g)
		}
	})
}

// body is as long as that of a vLLM with many histograms.
func body() string {
	var b strings.Builder
	for h := range 25 {
		fmt.Fprintf(&b, "# HELP vllm:histogram_%d_seconds Histogram of something in seconds.\n# TYPE vllm:histogram_%d_seconds histogram\n", h, h)
		for e := range 4 {
			for i := range 20 {
				fmt.Fprintf(&b, "vllm:histogram_%d_seconds_bucket{engine=\"%d\",le=\"%d.0\",model_name=\"meta-llama/Llama-3.1-8B-Instruct\"} 123456.0\n", h, e, i)
			}
		}
	}
	b.WriteString("vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 3.0\nvllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 3.0\n")
	return b.String()
}

func BenchmarkParse(b *testing.B) {
	text := body()
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Parse(strings.NewReader(text)); err != nil {
			b.Fatal(err)
		}
	}
}

func newFleet(t *testing.T, urls ...string) *fleet.Fleet {
	t.Helper()
	f := fleet.New(fleet.Options{})
	spec := fleet.PoolSpec{Name: "p", Chooser: first{}}
	for i, u := range urls {
		at, err := url.Parse(u)
		if err != nil {
			t.Fatal(err)
		}
		spec.Backends = append(spec.Backends, fleet.BackendSpec{Name: fmt.Sprintf("b%d", i), URL: at})
	}
	if err := f.Apply([]fleet.PoolSpec{spec}); err != nil {
		t.Fatal(err)
	}
	return f
}

type first struct{}

func (first) Pick(*fleet.Query, []fleet.Candidate) (int, fleet.Reason) { return 0, "first" }

func TestScraper(t *testing.T) {
	defer goleak.VerifyNone(t)
	var served atomic.Int64
	served.Store(1000)
	good := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/metrics" {
			w.WriteHeader(http.StatusTeapot)
		}
		fmt.Fprintf(w, "vllm:num_requests_running 3\nvllm:num_requests_waiting 2\nvllm:prompt_tokens_total %d\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"10\"} 1\n", served.Load())
	}))
	defer good.Close()
	none := httptest.NewServer(http.NotFoundHandler())
	defer none.Close()
	hung := make(chan struct{})
	slow := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-hung:
		case <-r.Context().Done():
		}
	}))
	defer slow.Close()
	defer close(hung)

	f := newFleet(t, slow.URL, none.URL, good.URL)
	restarts := make(chan string, 8)
	got := make(chan struct{}, 1024)
	s := New(Options{Backends: f.Backends, Clock: f.Clock, Interval: 20 * time.Millisecond, Timeout: 100 * time.Millisecond,
		OnFigures: func(b *fleet.Backend, _ Figures, restarted bool) {
			if restarted {
				restarts <- b.Name()
			}
			got <- struct{}{}
		}})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	for range 3 {
		<-got
	}
	served.Store(5)
	if name := <-restarts; name != "b2" {
		t.Errorf("%s has restarted, want b2", name)
	}
	b := f.Backend("b2")
	g, ok := b.Gauges()
	if !ok || g.Running != 3 || g.Waiting != 2 || g.KVTokens != 160 || g.KVUse != -1 || g.At <= 0 {
		t.Errorf("gauges %+v, %v", g, ok)
	}
	if st := s.Status(b); st.Engine != "vllm" || st.Age < 0 || st.Err != nil {
		t.Errorf("status %+v", st)
	}
	for _, name := range []string{"b0", "b1"} {
		if _, ok := f.Backend(name).Gauges(); ok {
			t.Errorf("%s has gauges", name)
		}
	}
	if st := s.Status(f.Backend("b1")); st.Age >= 0 || st.Err == nil {
		t.Errorf("status of one that has no metrics: %+v", st)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
