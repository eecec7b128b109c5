// SPDX-License-Identifier: Apache-2.0

package metricstest

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shunt-lb/shunt/pkg/metrics"
)

func TestLint(t *testing.T) {
	Lint(t, metrics.NewRegistry("1.2.3"))
	for _, test := range []struct {
		name, help, want string
	}{
		{"shunt_things_total", "Things.", ""},
		{"things_total", "Things.", "does not begin with shunt_"},
		{"shunt_things", "Things.", "counter metrics should have"},
		{"shunt_things_total", "Things", "is not a sentence"},
		{"shunt_thing_milliseconds_total", "Things.", "base unit"},
	} {
		r := prometheus.NewRegistry()
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: test.name, Help: test.help})
		r.MustRegister(c)
		got := strings.Join(problems(r), "\n")
		if test.want == "" && got != "" || !strings.Contains(got, test.want) {
			t.Errorf("%s, %q: %q, want %q", test.name, test.help, got, test.want)
		}
	}
}
