// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/shunt-lb/shunt/pkg/fleet"
)

// metrics are the front end's. Labels come from the configuration and from bounded sets only.
type metrics struct {
	requests     *prometheus.CounterVec
	attempts     *prometheus.CounterVec
	picks        *prometheus.CounterVec
	ttft         *prometheus.HistogramVec
	firstByte    *prometheus.HistogramVec
	tokens       *prometheus.CounterVec
	inflight     prometheus.Gauge
	shed         prometheus.Counter
	retries      prometheus.Counter
	replays      prometheus.Counter
	meterOff     prometheus.Counter
	badProxy     prometheus.Counter
	unauthorized prometheus.Counter

	served atomic.Int64 // sum of requests
	pools  sync.Map     // name -> *poolMetrics
}

// poolMetrics keeps a pool's series at hand: looking one up by its labels costs more than counting.
type poolMetrics struct {
	m         *metrics
	pool      string
	ttft      prometheus.Observer
	firstByte prometheus.Observer
	prompt    prometheus.Counter
	output    prometheus.Counter
	requests  [6 * len(outcomeNames)]lazyCounter // by class of status and outcome
	attempts  [len(outcomeNames)]lazyCounter
	picks     sync.Map // fleet.Reason -> prometheus.Counter
}

type lazyCounter struct {
	once sync.Once
	c    prometheus.Counter
}

func (l *lazyCounter) inc(v *prometheus.CounterVec, labels ...string) {
	l.once.Do(func() { l.c = v.WithLabelValues(labels...) })
	l.c.Inc()
}

var codeClasses = [6]string{"none", "1xx", "2xx", "3xx", "4xx", "5xx"}

func newMetrics(r prometheus.Registerer, s *Server) (*metrics, error) {
	latency := []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40, 80, 160}
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "shunt_requests_total",
			Help: "Requests that the front end served, by pool, class of status and outcome."}, []string{"pool", "code", "outcome"}),
		attempts: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "shunt_attempts_total",
			Help: "Attempts on backends, by pool and outcome. A request may take several."}, []string{"pool", "outcome"}),
		picks: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "shunt_picks_total",
			Help: "Backends picked, by pool and the policy's reason."}, []string{"pool", "reason"}),
		ttft: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "shunt_time_to_first_token_seconds",
			Help: "From a request's head to the first event of its stream that carries generated text.", Buckets: latency}, []string{"pool"}),
		firstByte: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "shunt_first_byte_seconds",
			Help: "From a request's head to the first byte of its answer.", Buckets: latency}, []string{"pool"}),
		tokens: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "shunt_request_tokens_total",
			Help: "Tokens of answered requests, as the engines reported them, else as counted."}, []string{"pool", "kind"}),
		inflight: prometheus.NewGauge(prometheus.GaugeOpts{Name: "shunt_inflight_requests",
			Help: "Requests that the front end is serving."}),
		shed: prometheus.NewCounter(prometheus.CounterOpts{Name: "shunt_connections_shed_total",
			Help: "Client connections turned away because there were too many."}),
		retries: prometheus.NewCounter(prometheus.CounterOpts{Name: "shunt_retries_total",
			Help: "Attempts on a further backend."}),
		replays: prometheus.NewCounter(prometheus.CounterOpts{Name: "shunt_stale_replays_total",
			Help: "Requests sent again on a fresh connection because the backend had closed the kept one."}),
		meterOff: prometheus.NewCounter(prometheus.CounterOpts{Name: "shunt_meter_failures_total",
			Help: "Answers whose usage could not be read because of a fault in the meter."}),
		badProxy: prometheus.NewCounter(prometheus.CounterOpts{Name: "shunt_proxy_protocol_errors_total",
			Help: "Connections of configured balancers that did not begin with a valid PROXY header."}),
		unauthorized: prometheus.NewCounter(prometheus.CounterOpts{Name: "shunt_unauthorized_requests_total",
			Help: "Requests that were refused for lack of a valid client key."}),
	}
	if r == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.requests, m.attempts, m.picks, m.ttft, m.firstByte, m.tokens, m.inflight,
		m.shed, m.retries, m.replays, m.meterOff, m.badProxy, m.unauthorized,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "shunt_client_connections",
			Help: "Open client connections."}, func() float64 { return float64(s.connections.Load()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "shunt_buffered_request_bytes",
			Help: "Memory that holds request bodies."}, func() float64 { return float64(s.bodyMemory.Load()) }),
	} {
		if err := r.Register(c); err != nil {
			return nil, fmt.Errorf("register the front end's metrics: %w", err)
		}
	}
	return m, nil
}

// Served is the number of requests that were served: the sum of shunt_requests_total.
func (s *Server) Served() int64 { return s.metrics.served.Load() }

func (m *metrics) pool(name string) *poolMetrics {
	if p, ok := m.pools.Load(name); ok {
		return p.(*poolMetrics)
	}
	p, _ := m.pools.LoadOrStore(name, &poolMetrics{m: m, pool: name,
		ttft: m.ttft.WithLabelValues(name), firstByte: m.firstByte.WithLabelValues(name),
		prompt: m.tokens.WithLabelValues(name, "prompt"), output: m.tokens.WithLabelValues(name, "output")})
	return p.(*poolMetrics)
}

func (p *poolMetrics) request(status int, o Outcome) {
	p.m.served.Add(1)
	class := min(max(status/100, 0), 5)
	p.requests[class*len(outcomeNames)+int(o)].inc(p.m.requests, p.pool, codeClasses[class], o.String())
}

func (p *poolMetrics) attempt(o Outcome) { p.attempts[o].inc(p.m.attempts, p.pool, o.String()) }

func (p *poolMetrics) pick(why fleet.Reason) {
	c, ok := p.picks.Load(why)
	if !ok {
		c, _ = p.picks.LoadOrStore(why, p.m.picks.WithLabelValues(p.pool, string(why)))
	}
	c.(prometheus.Counter).Inc()
}
