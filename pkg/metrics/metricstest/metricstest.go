// SPDX-License-Identifier: Apache-2.0

// Package metricstest checks the names, help texts and label values of a registry's metrics.
package metricstest

import (
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/shunt-lb/shunt/pkg/metrics"
)

// Lint reports what Prometheus' own linter finds, metrics without the prefix shunt_ (those of the Go runtime and the
// process apart), and families with more than metrics.MaxLabelValues series.
func Lint(t testing.TB, g prometheus.Gatherer) {
	t.Helper()
	for _, p := range problems(g) {
		t.Error(p)
	}
}

func problems(g prometheus.Gatherer) []string {
	var list []string
	lint, err := testutil.GatherAndLint(g)
	if err != nil {
		return []string{fmt.Sprintf("gather metrics: %s", err)}
	}
	for _, p := range lint {
		if !foreign(p.Metric) {
			list = append(list, fmt.Sprintf("%s: %s", p.Metric, p.Text))
		}
	}
	families, err := g.Gather()
	if err != nil {
		return append(list, fmt.Sprintf("gather metrics: %s", err))
	}
	for _, f := range families {
		if foreign(f.GetName()) {
			continue
		}
		if !strings.HasPrefix(f.GetName(), metrics.Prefix) {
			list = append(list, fmt.Sprintf("%s: does not begin with %s", f.GetName(), metrics.Prefix))
		}
		if n := len(f.GetMetric()); n > metrics.MaxLabelValues {
			list = append(list, fmt.Sprintf("%s: has %d series", f.GetName(), n))
		}
		if help := f.GetHelp(); !strings.HasSuffix(help, ".") {
			list = append(list, fmt.Sprintf("%s: help %q is not a sentence", f.GetName(), help))
		}
	}
	return list
}

func foreign(name string) bool {
	return strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_")
}
