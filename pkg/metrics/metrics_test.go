// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

func TestRegistry(t *testing.T) {
	r := NewRegistry("1.2.3")
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]bool{}
	for _, f := range families {
		have[f.GetName()] = true
		if f.GetName() == "shunt_build_info" {
			if s := f.GetMetric()[0].String(); !strings.Contains(s, "1.2.3") {
				t.Errorf("build info: %s", s)
			}
		}
	}
	for _, name := range []string{"shunt_build_info", "go_goroutines", "process_open_fds"} {
		if !have[name] {
			t.Errorf("no %s", name)
		}
	}
	if _, err := prometheus.DefaultGatherer.Gather(); err != nil {
		t.Fatal(err)
	}
	NewRegistry("1.2.3") // a second one in one process does not collide
}

// A client that invents names makes no series.
func TestLabelBounds(t *testing.T) {
	l := NewLabel("a", "b")
	c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "shunt_test_total", Help: "Test."}, []string{"model"})
	for i := range 10000 {
		c.WithLabelValues(l.Value(fmt.Sprintf("model-%d", i))).Inc()
	}
	for _, name := range []string{"a", "b", "", "A"} {
		c.WithLabelValues(l.Value(name)).Inc()
	}
	if n := testutil.CollectAndCount(c); n != 3 {
		t.Errorf("%d series, want a, b and other", n)
	}
	if v := testutil.ToFloat64(c.WithLabelValues(Other)); v != 10002 {
		t.Errorf("other counts %v", v)
	}
	var many []string
	for i := range MaxLabelValues * 2 {
		many = append(many, fmt.Sprint(i))
	}
	l.Admit(many...)
	if n := len(*l.names.Load()); n != MaxLabelValues {
		t.Errorf("%d names are remembered", n)
	}
}

// A gauge that was raised before a reload is lowered under the same name after it.
func TestLabelIsSticky(t *testing.T) {
	l := NewLabel("old")
	l.Admit("new")
	if l.Value("old") != "old" || l.Value("new") != "new" || l.Value("x") != Other {
		t.Errorf("after a reload: %s %s %s", l.Value("old"), l.Value("new"), l.Value("x"))
	}
}

func TestLabelKeepsNoCallerMemory(t *testing.T) {
	l := NewLabel("abc")
	b := []byte("abc")
	v := l.ValueOf(b)
	b[0] = 'x'
	if v != "abc" || l.ValueOf(b) != Other {
		t.Errorf("%q, %q", v, l.ValueOf(b))
	}
	b[0] = 'a'
	if n := testing.AllocsPerRun(100, func() { l.ValueOf(b); l.Value("none") }); n != 0 {
		t.Errorf("%v allocations a look-up", n)
	}
}

func TestLabelConcurrent(t *testing.T) {
	l := NewLabel()
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for j := range 100 {
				l.Admit(fmt.Sprintf("%d-%d", i, j))
				l.Value("0-0")
			}
		})
	}
	wg.Wait()
	if n := len(*l.names.Load()); n != 400 {
		t.Errorf("%d names, want 400", n)
	}
}
