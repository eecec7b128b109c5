// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

type first struct{}

func (first) Pick(*fleet.Query, []fleet.Candidate) (int, fleet.Reason) { return 0, "first" }

// newFleet makes a fleet of one pool with backends at the given URLs, by name in alphabetical order.
func newFleet(t *testing.T, urls map[string]string) *fleet.Fleet {
	t.Helper()
	f := fleet.New(fleet.Options{})
	apply(t, f, urls)
	return f
}

func apply(t *testing.T, f *fleet.Fleet, urls map[string]string) {
	t.Helper()
	spec := fleet.PoolSpec{Name: "p", Chooser: first{}}
	for name, s := range urls {
		u, err := url.Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		spec.Backends = append(spec.Backends, fleet.BackendSpec{Name: name, URL: u})
	}
	slices.SortFunc(spec.Backends, func(a, b fleet.BackendSpec) int { return strings.Compare(a.Name, b.Name) })
	if err := f.Apply([]fleet.PoolSpec{spec}); err != nil {
		t.Fatal(err)
	}
}

// engine is a scripted transport: answer is called for each request, with its number from 1.
type engine struct {
	mu     sync.Mutex
	calls  map[string]int
	answer func(host, path string, n int) (status int, delay time.Duration)
}

func (e *engine) RoundTrip(r *http.Request) (*http.Response, error) {
	e.mu.Lock()
	if e.calls == nil {
		e.calls = map[string]int{}
	}
	e.calls[r.URL.Host]++
	status, delay := e.answer(r.URL.Host, r.URL.Path, e.calls[r.URL.Host])
	e.mu.Unlock()
	select {
	case <-time.After(delay):
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	if status == 0 {
		return nil, errors.New("connection refused")
	}
	return &http.Response{StatusCode: status, Body: io.NopCloser(strings.NewReader(""))}, nil
}

func (e *engine) count(host string) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.calls[host]
}

type changes struct {
	mu   sync.Mutex
	list []string
}

func (c *changes) add(b *fleet.Backend, from, to fleet.Health, _ string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.list = append(c.list, fmt.Sprintf("%s %s-%s", b.Name(), from, to))
}

func (c *changes) get() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.list)
}

// run starts a Checker in the current bubble and stops it when the test ends.
func run(t *testing.T, o Options) *Checker {
	t.Helper()
	c := New(o)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return c
}

func settings(s Settings) func(*fleet.Backend) Settings {
	return func(*fleet.Backend) Settings { return s }
}

// after lets time pass, up to just before or after a check of an interval of 1 s: checks stray by 10 %.
func after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func TestFallAndRise(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, map[string]string{"a": "http://a"})
		b := f.Backend("a")
		// Good, two bad (stays), good, three bad (out), one good, one bad, two good (back).
		script := []int{200, 500, 500, 200, 500, 0, 503, 200, 500, 200, 200}
		e := &engine{answer: func(_, path string, n int) (int, time.Duration) {
			if n > len(script) {
				return 200, 0
			}
			return script[n-1], 0
		}}
		var ch changes
		c := run(t, Options{Backends: f.Backends, Settings: settings(Settings{Interval: 10 * time.Second, Fall: 3, Rise: 2}),
			OnChange: ch.add, Transport: e})
		var got []fleet.Health
		for n := 1; n <= len(script); n++ {
			for e.count("a") < n {
				after(time.Second)
			}
			got = append(got, b.Health())
			if r := c.Last(b); (r.Err == nil) != (script[n-1] == 200) || r.At.IsZero() {
				t.Errorf("check %d: last result %+v", n, r)
			}
		}
		up, down := fleet.HealthUp, fleet.HealthDown
		want := []fleet.Health{up, up, up, up, up, up, down, down, down, down, up}
		if !slices.Equal(got, want) {
			t.Errorf("states %v, want %v", got, want)
		}
		if w := []string{"a unknown-up", "a up-down", "a down-up"}; !slices.Equal(ch.get(), w) {
			t.Errorf("changes %v, want %v", ch.get(), w)
		}
	})
}

func TestFirstGoodCheckIsEnough(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, map[string]string{"a": "http://a"})
		b := f.Backend("a")
		// A model that loads: out after three, up with the first good check, since it was never up before.
		e := &engine{answer: func(_, _ string, n int) (int, time.Duration) {
			if n <= 5 {
				return 503, 0
			}
			return 200, 0
		}}
		run(t, Options{Backends: f.Backends, Settings: settings(Settings{Rise: 100}), Transport: e})
		synctest.Wait()
		if b.Health() != fleet.HealthUnknown || b.Eligible() {
			t.Errorf("after one failure: %s", b.Health())
		}
		for e.count("a") < 5 {
			after(time.Second)
		}
		if b.Health() != fleet.HealthDown {
			t.Errorf("after five failures: %s", b.Health())
		}
		for e.count("a") < 6 {
			after(time.Second)
		}
		if b.Health() != fleet.HealthUp {
			t.Errorf("after the first good check: %s", b.Health())
		}
	})
}

// TestSlowProbe: one slow check of three leaves the backend in, three take it out, and no other is delayed.
func TestSlowProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, map[string]string{"a": "http://a", "b": "http://b"})
		var hang atomic.Bool
		e := &engine{answer: func(host, _ string, n int) (int, time.Duration) {
			if host == "a" && (hang.Load() || n%3 == 0) {
				return 200, time.Hour
			}
			return 200, 0
		}}
		run(t, Options{Backends: f.Backends, Settings: settings(Settings{Interval: 2 * time.Second, Timeout: time.Second}), Transport: e})
		after(time.Minute)
		if f.Backend("a").Health() != fleet.HealthUp {
			t.Error("one slow check of three took the backend out")
		}
		before := e.count("b")
		hang.Store(true)
		after(time.Minute)
		if f.Backend("a").Health() != fleet.HealthDown {
			t.Error("a backend that never answers is not out")
		}
		if n := e.count("b") - before; n < 27 || n > 34 || f.Backend("b").Health() != fleet.HealthUp {
			t.Errorf("the other one was checked %d times in a minute and is %s", n, f.Backend("b").Health())
		}
		hang.Store(false)
		after(time.Minute)
		if f.Backend("a").Health() != fleet.HealthUp {
			t.Error("a backend that answers again is not back")
		}
	})
}

func TestJitter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, map[string]string{"a": "http://a", "b": "http://b", "c": "http://c"})
		var mu sync.Mutex
		at := map[string][]time.Time{}
		e := &engine{answer: func(host, _ string, _ int) (int, time.Duration) {
			mu.Lock()
			defer mu.Unlock()
			at[host] = append(at[host], time.Now())
			return 200, 0
		}}
		run(t, Options{Backends: f.Backends, Settings: settings(Settings{Interval: 10 * time.Second}), Transport: e})
		after(10 * time.Minute)
		mu.Lock()
		defer mu.Unlock()
		gaps := map[time.Duration]bool{}
		for host, times := range at {
			for i := 1; i < len(times); i++ {
				gap := times[i].Sub(times[i-1])
				if gap < 9*time.Second || gap > 11*time.Second+look {
					t.Errorf("%s: checks %s apart", host, gap)
				}
				gaps[gap] = true
			}
		}
		if len(gaps) < 50 {
			t.Errorf("only %d different gaps", len(gaps))
		}
	})
}

func TestMaintenance(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, map[string]string{"a": "http://a"})
		b := f.Backend("a")
		e := &engine{answer: func(_, _ string, _ int) (int, time.Duration) { return 200, 0 }}
		c := run(t, Options{Backends: f.Backends, Settings: settings(Settings{Interval: time.Second, Rise: 50}), Transport: e})
		after(time.Minute)
		b.SetAdmin(fleet.AdminDrain)
		n := e.count("a")
		after(time.Minute)
		if got := e.count("a") - n; got < 50 || b.Health() != fleet.HealthUp {
			t.Errorf("draining: %d checks, health %s", got, b.Health())
		}
		b.SetAdmin(fleet.AdminMaint)
		after(5 * time.Second)
		n = e.count("a")
		after(time.Minute)
		c.CheckAll(t.Context())
		if got := e.count("a") - n; got != 0 || b.Health() != fleet.HealthUnknown {
			t.Errorf("in maintenance: %d checks, health %s", got, b.Health())
		}
		b.SetAdmin(fleet.AdminNone)
		after(2 * time.Second)
		if !b.Eligible() {
			t.Errorf("2 s after maintenance: health %s", b.Health())
		}
	})
}

func TestReport(t *testing.T) {
	tests := []struct {
		name     string
		outcomes []Outcome
		want     fleet.Health
	}{
		{"three refusals", []Outcome{ConnectFailed, ConnectFailed, ConnectFailed}, fleet.HealthDown},
		{"two refusals", []Outcome{ConnectFailed, ConnectFailed}, fleet.HealthUp},
		{"refusals with an answer between", []Outcome{ConnectFailed, ConnectFailed, Answered, ConnectFailed, ConnectFailed}, fleet.HealthUp},
		{"busy is alive", []Outcome{ConnectFailed, ConnectFailed, Busy, ConnectFailed, Busy, Busy, Busy}, fleet.HealthUp},
		{"clients that leave say nothing", []Outcome{ConnectFailed, ClientGone, ConnectFailed, ClientGone, ServerError, ConnectFailed}, fleet.HealthDown},
		{"fifty aborts", slices.Repeat([]Outcome{ClientGone}, 50), fleet.HealthUp},
		{"a hundred rejections", slices.Repeat([]Outcome{Answered}, 100), fleet.HealthUp},
		{"server errors are neutral", slices.Repeat([]Outcome{ServerError}, 100), fleet.HealthUp},
		{"three hangs", []Outcome{Hung, Hung, Hung}, fleet.HealthDown},
		{"hangs with an answer between", []Outcome{Hung, Hung, Answered, Hung, Hung}, fleet.HealthUp},
		{"an answer does not bring it up", []Outcome{ConnectFailed, ConnectFailed, ConnectFailed, Answered, Answered}, fleet.HealthDown},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := newFleet(t, map[string]string{"a": "http://a"})
			b := f.Backend("a")
			e := &engine{answer: func(_, _ string, _ int) (int, time.Duration) { return 200, 0 }}
			c := New(Options{Backends: f.Backends, Transport: e})
			c.Report(b, ConnectFailed) // of a backend that is not checked: no effect
			c.CheckAll(t.Context())
			for _, o := range tt.outcomes {
				c.Report(b, o)
			}
			if b.Health() != tt.want {
				t.Errorf("health %s, want %s", b.Health(), tt.want)
			}
		})
	}
}

// TestHangs: checks stay good while generation is stuck. They bring the backend back only after a pause, which grows
// until it answers again.
func TestHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, map[string]string{"a": "http://a"})
		b := f.Backend("a")
		e := &engine{answer: func(_, _ string, _ int) (int, time.Duration) { return 200, 0 }}
		c := run(t, Options{Backends: f.Backends, Settings: settings(Settings{Interval: time.Second}), Transport: e})
		after(10 * time.Second) // good checks between the hangs do not count for it
		for range 3 {
			if !b.Eligible() {
				t.Fatal("out too early")
			}
			c.Report(b, Hung)
			after(5 * time.Second)
		}
		outFor := func() (d time.Duration) {
			for !b.Eligible() {
				after(time.Second)
				d += time.Second
			}
			return d
		}
		if b.Eligible() {
			t.Fatal("three hangs in a row: not out")
		}
		if d := outFor() + 5*time.Second; d < firstHold || d > firstHold+4*time.Second {
			t.Errorf("out for %s at first", d)
		}
		c.Report(b, Hung)
		if d := outFor(); d < 2*firstHold || d > 2*firstHold+4*time.Second {
			t.Errorf("out for %s after it hung again", d)
		}
		c.Report(b, Answered)
		c.Report(b, Hung)
		c.Report(b, Hung)
		if !b.Eligible() {
			t.Error("two hangs after an answer took it out")
		}
		for range 20 {
			c.Report(b, Hung)
			after(10 * time.Minute)
		}
		if !b.Eligible() {
			t.Errorf("not back after more than %s", maxHold)
		}
	})
}

// TestRecoveryAlwaysChecked: what requests met takes the backend out; checks go on, and bring it back.
func TestRecoveryAlwaysChecked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, map[string]string{"a": "http://a"})
		b := f.Backend("a")
		var dead atomic.Bool
		e := &engine{answer: func(_, _ string, _ int) (int, time.Duration) {
			if dead.Load() {
				return 0, 0
			}
			return 200, 0
		}}
		c := run(t, Options{Backends: f.Backends, Settings: settings(Settings{Interval: 10 * time.Second}), Transport: e})
		synctest.Wait()
		dead.Store(true)
		for range 3 {
			c.Report(b, ConnectFailed)
		}
		if b.Eligible() {
			t.Fatal("in, with its port closed")
		}
		after(time.Minute)
		dead.Store(false)
		after(25 * time.Second)
		if !b.Eligible() {
			t.Error("not back after two good checks")
		}
	})
}

// TestLoadUntouched: rounds of checks, with the backend going down and up, leave tickets and weights alone.
func TestLoadUntouched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, map[string]string{"a": "http://a"})
		b := f.Backend("a")
		e := &engine{answer: func(_, _ string, n int) (int, time.Duration) { return 200 + 300*(n/5%2), 0 }}
		var ch changes
		run(t, Options{Backends: f.Backends, Settings: settings(Settings{Interval: time.Second}), OnChange: ch.add, Transport: e})
		synctest.Wait()
		ticket, err := f.Pool("p").Take(&fleet.Query{PromptTokens: 1000, OutputTokens: 50})
		if err != nil {
			t.Fatal(err)
		}
		after(time.Minute)
		if len(ch.get()) < 5 {
			t.Fatalf("the backend did not go down and up: %v", ch.get())
		}
		if l7, _ := b.Load(); l7 != 1050 || b.Requests() != 1 {
			t.Errorf("after a minute of checks: %d tokens, %d requests", l7, b.Requests())
		}
		ticket.Release()
		if l7, _ := b.Load(); l7 != 0 || b.Requests() != 0 {
			t.Errorf("after the release: %d tokens, %d requests", l7, b.Requests())
		}
	})
}

// TestReload: state belongs to the instance, settings change under way, and those that leave are checked no more.
func TestReload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, map[string]string{"a": "http://a", "b": "http://b"})
		old := f.Backend("b")
		var set atomic.Pointer[Settings]
		set.Store(&Settings{Interval: time.Hour})
		e := &engine{answer: func(host, path string, _ int) (int, time.Duration) {
			if path == "/broken" {
				return 500, 0
			}
			return 200, 0
		}}
		c := run(t, Options{Backends: f.Backends, Settings: func(*fleet.Backend) Settings { return *set.Load() }, Transport: e})
		after(time.Minute)
		if e.count("a") != 1 || !f.Backend("a").Eligible() {
			t.Fatalf("%d checks in a minute of an hour", e.count("a"))
		}
		apply(t, f, map[string]string{"a": "http://a", "b": "http://b2", "c": "http://c"})
		if !f.Backend("a").Eligible() || f.Backend("b").Eligible() {
			t.Error("the reload took health to the wrong instances")
		}
		set.Store(&Settings{Interval: time.Second, Path: "/ok"})
		after(3 * time.Second)
		if n := e.count("a"); n < 2 {
			t.Errorf("the shorter interval has no effect: %d checks", n)
		}
		if !f.Backend("b").Eligible() || !f.Backend("c").Eligible() {
			t.Error("new instances are not checked")
		}
		if n := e.count("b"); n != 1 {
			t.Errorf("the instance that left was checked %d times", n)
		}
		c.Report(old, ConnectFailed)
		if _, ok := c.states.Load(old); ok {
			t.Error("the state of the instance that left is still there")
		}
		set.Store(&Settings{Interval: time.Second, Path: "/broken"})
		after(10 * time.Second)
		if f.Backend("a").Eligible() {
			t.Error("the new path has no effect")
		}
	})
}

func TestReportConcurrent(t *testing.T) {
	f := newFleet(t, map[string]string{"a": "http://a"})
	b := f.Backend("a")
	e := &engine{answer: func(_, _ string, _ int) (int, time.Duration) { return 200, 0 }}
	var ch changes
	c := New(Options{Backends: f.Backends, OnChange: ch.add, Transport: e})
	c.CheckAll(t.Context())
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 500 {
				c.Report(b, Outcome((g+i)%6))
				if i%100 == 0 {
					c.CheckAll(t.Context())
				}
			}
		})
	}
	wg.Wait()
	// Each change starts where the one before it ended.
	state := "unknown"
	for _, s := range ch.get() {
		from, to, _ := strings.Cut(strings.TrimPrefix(s, "a "), "-")
		if from != state {
			t.Fatalf("change %q after state %s", s, state)
		}
		state = to
	}
	if a := testing.AllocsPerRun(100, func() { c.Report(b, Answered) }); a != 0 {
		t.Errorf("a good report allocates %v times", a)
	}
}
