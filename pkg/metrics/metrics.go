// SPDX-License-Identifier: Apache-2.0

// Package metrics holds the daemon's Prometheus registry and labels with bounded values.
//
// Every metric of shunt begins with shunt_, and no label takes a value that a client can choose: what is not of a
// configured set becomes Other (see Label). metricstest checks both on whatever a test has registered.
package metrics

import (
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// Prefix begins every metric of shunt.
const Prefix = "shunt_"

// Other is the label value for everything that is not of the configured set.
const Other = "other"

// MaxLabelValues bounds what one Label remembers over all reloads.
const MaxLabelValues = 4096

// NewRegistry returns a registry of its own (the global default one is not used) with the Go runtime's and the process's
// figures and shunt_build_info.
func NewRegistry(version string) *prometheus.Registry {
	r := prometheus.NewRegistry()
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name:        Prefix + "build_info",
		Help:        "Always 1; the labels say which shunt this is.",
		ConstLabels: prometheus.Labels{"version": version, "go_version": runtime.Version()},
	})
	info.Set(1)
	r.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		info,
	)
	return r
}

// Label maps names to label values of a bounded set. It is safe for concurrent use; looking up allocates nothing.
//
// Admission is sticky: a name that a reload removes stays itself, so that a gauge which was raised under it is lowered
// under it too.
type Label struct {
	mu    sync.Mutex // writers
	names atomic.Pointer[map[string]string]
}

// NewLabel returns a label with the given values admitted.
func NewLabel(names ...string) *Label {
	l := new(Label)
	l.names.Store(&map[string]string{})
	l.Admit(names...)
	return l
}

// Admit adds names. Beyond MaxLabelValues names are left out and stay Other.
func (l *Label) Admit(names ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	old := *l.names.Load()
	m := make(map[string]string, len(old)+len(names))
	for k, v := range old {
		m[k] = v
	}
	for _, n := range names {
		if len(m) < MaxLabelValues {
			m[n] = n
		}
	}
	l.names.Store(&m)
}

// Value is the name itself if it is admitted, else Other.
func (l *Label) Value(name string) string {
	if _, ok := (*l.names.Load())[name]; ok {
		return name
	}
	return Other
}

// ValueOf is Value for bytes that may change later: the result never shares their memory.
func (l *Label) ValueOf(name []byte) string {
	if v, ok := (*l.names.Load())[string(name)]; ok {
		return v
	}
	return Other
}
