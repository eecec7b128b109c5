// SPDX-License-Identifier: Apache-2.0

package health

import (
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

// outlierWorld is a checked backend among three, and what was told of its ejections.
type outlierWorld struct {
	t    *testing.T
	c    *Checker
	b    *fleet.Backend
	dead atomic.Bool // to checks
	told []string
}

func newOutlierWorld(t *testing.T, set Settings) *outlierWorld {
	w := &outlierWorld{t: t}
	f := newFleet(t, map[string]string{"a": "http://a", "b": "http://b", "c": "http://c"})
	w.b = f.Backend("a")
	e := &engine{answer: func(host, _ string, _ int) (int, time.Duration) {
		if host == "a" && w.dead.Load() {
			return 500, 0
		}
		return 200, 0
	}}
	w.c = run(t, Options{Backends: f.Backends, Settings: settings(set), Transport: e, OnEject: func(b *fleet.Backend, out bool, detail string) {
		if b != w.b {
			t.Errorf("%s was ejected", b.Name())
		}
		w.told = append(w.told, detail)
	}})
	synctest.Wait()
	return w
}

func (w *outlierWorld) report(outcomes ...Outcome) {
	for _, o := range outcomes {
		w.c.Report(w.b, o)
	}
}

func (w *outlierWorld) out() bool {
	_, out := w.b.Ejected()
	if said := w.c.Ejections(w.b).Reason != ""; said != out || out == w.b.Eligible() && w.b.Health() == fleet.HealthUp {
		w.t.Errorf("ejected %v, says %v, eligible %v", out, said, w.b.Eligible())
	}
	return out
}

func mixed(n int, cycle ...Outcome) []Outcome { return slices.Repeat(cycle, n) }

func TestWhatEjects(t *testing.T) {
	for _, tt := range []struct {
		name     string
		set      Outlier
		outcomes []Outcome
		row      int64
		share    int64
	}{
		{"the first request fails", Outlier{}, mixed(1, ServerError), 0, 0},
		{"four of four", Outlier{}, mixed(4, ServerError), 0, 0},
		{"five in a row", Outlier{}, mixed(5, ServerError), 1, 0},
		{"in a row, full in between", Outlier{}, mixed(5, ServerError, Busy, ClientGone), 1, 0},
		{"refusals and answers broken off", Outlier{}, []Outcome{ServerError, ConnectFailed, ServerError, ConnectFailed, ServerError}, 1, 0},
		{"every other one of eight", Outlier{}, mixed(4, ServerError, Answered), 0, 0},
		{"every other one of ten", Outlier{}, mixed(6, Answered, ServerError), 0, 1},
		{"one of three", Outlier{}, mixed(50, ServerError, Answered, Answered), 0, 0},
		{"one of three is enough", Outlier{Share: 0.3, Volume: 30}, mixed(50, ServerError, Answered, Answered), 0, 1},
		{"what clients do wrong", Outlier{}, mixed(100, Answered), 0, 0},
		{"full", Outlier{}, mixed(100, Busy), 0, 0},
		{"clients that leave", Outlier{}, mixed(100, ClientGone), 0, 0},
		{"never for a row", Outlier{Failures: -1}, mixed(9, ServerError), 0, 0},
		{"never", Outlier{Failures: -1, Share: -1}, mixed(100, ServerError), 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newOutlierWorld(t, Settings{Outlier: tt.set})
				w.report(tt.outcomes...)
				e := w.c.Ejections(w.b)
				if e.Row != tt.row || e.Share != tt.share || w.out() != (tt.row+tt.share > 0) || len(w.told) != int(tt.row+tt.share) {
					t.Errorf("ejections %+v, told %q", e, w.told)
				}
			})
		})
	}
}

// Failures that are far apart are no share of anything.
func TestShareHasAWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newOutlierWorld(t, Settings{Outlier: Outlier{Window: 10 * time.Second}})
		for range 30 {
			w.report(Answered, ServerError)
			after(3 * time.Second)
		}
		if w.out() {
			t.Error("ejected by four failures in a window")
		}
	})
}

// Good checks do not bring an ejected backend back, served probes do; each failure doubles the hold up to its limit.
func TestHoldsDouble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newOutlierWorld(t, Settings{Outlier: Outlier{Hold: 10 * time.Second, MaxHold: time.Minute}})
		held := func() time.Duration {
			if !w.out() {
				t.Fatal("not ejected")
			}
			in, _ := w.b.Ejected()
			return in
		}
		w.report(mixed(20, ServerError)...) // those in flight when it was ejected say nothing new
		for _, want := range []time.Duration{10, 20, 40, 60, 60} {
			if d := held(); d != want*time.Second {
				t.Errorf("held for %s, want %ds", d, want)
			}
			after(want * time.Second)
			w.c.ReportProbe(w.b, ClientGone) // no verdict: the next one tries
			if d := held(); d != 0 {
				t.Errorf("a client that left held it for %s", d)
			}
			w.c.ReportProbe(w.b, []Outcome{ServerError, Hung, ConnectFailed}[int(want)/10%3])
		}
		after(time.Minute)
		w.report(Answered) // taken before the ejection
		if held() != 0 {
			t.Error("held again")
		}
		w.c.ReportProbe(w.b, Answered)
		if w.out() {
			t.Fatal("ejected after a probe was served")
		}
		after(10 * time.Second)
		w.report(mixed(5, ServerError)...)
		if d := held(); d != time.Minute {
			t.Errorf("failing again soon: held for %s", d)
		}
		after(time.Minute)
		w.c.ReportProbe(w.b, Busy)
		after(time.Hour)
		w.report(mixed(5, ServerError)...)
		if d := held(); d != 10*time.Second {
			t.Errorf("failing again after an hour: held for %s", d)
		}
		if n := w.c.Ejections(w.b).Row; n != 3 || !strings.Contains(w.told[0], "5 requests in a row failed") {
			t.Errorf("%d ejections, told %q", n, w.told)
		}
	})
}

// An engine that was restarted, as the checks saw, is a new one; so is one that was in maintenance.
func TestChecksEndAnEjection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newOutlierWorld(t, Settings{Interval: time.Second, Outlier: Outlier{Hold: time.Hour}})
		w.report(mixed(5, ServerError)...)
		after(10 * time.Second)
		if !w.out() {
			t.Fatal("good checks ended it")
		}
		w.dead.Store(true)
		after(5 * time.Second)
		w.dead.Store(false)
		after(5 * time.Second)
		if w.out() || !w.b.Eligible() {
			t.Error("not back after the checks saw it down and up")
		}
		w.report(mixed(5, ServerError)...)
		if !w.out() {
			t.Fatal("not ejected again")
		}
		w.b.SetAdmin(fleet.AdminMaint)
		after(3 * time.Second)
		w.b.SetAdmin(fleet.AdminNone)
		after(3 * time.Second)
		if w.out() || !w.b.Eligible() {
			t.Error("not back after maintenance")
		}
	})
}
