// SPDX-License-Identifier: Apache-2.0

// Package health says which backends are alive.
//
// Two sources feed one state machine for each backend instance: active checks, which always run, whatever the state;
// and what requests met (Report), which takes a dead or stuck backend out sooner. A backend whose checks are good but
// whose requests fail is ejected (Outlier): that is a word of its own beside the checks', and only a request that is served,
// or a recovery that the checks saw, takes it back. Nothing here touches the ledger of tokens: a check can be wrong, a ticket
// cannot.
package health

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

// Defaults of Settings. The timeout is above what a busy engine takes to answer: checks share its event loop.
const (
	DefaultInterval = 2 * time.Second
	DefaultTimeout  = time.Second
	DefaultFall     = 3
	DefaultRise     = 2
)

const (
	// jitter spreads the checks of many backends, and of many balancers, as a share of the interval.
	jitter = 0.1
	// look is how often a waiting checker looks for a changed list of backends, interval or operator's word.
	look = time.Second
	// checksAtOnce bounds CheckAll.
	checksAtOnce = 64
	// A backend that hung while its checks were good is believed again only after a pause, doubled each time it hangs
	// again without an answer in between.
	firstHold = 15 * time.Second
	maxHold   = 5 * time.Minute
)

// Settings say how a backend is checked. Zero values mean the defaults.
type Settings struct {
	// Path must answer 2xx. Empty: /health; where that answers neither 2xx nor 5xx (501 is no 5xx here) /v1/models, which
	// may answer anything but 5xx.
	// It is appended to the path of the backend's URL.
	Path     string
	Interval time.Duration
	Timeout  time.Duration // of one check in all
	Fall     int           // failures in a row that take a backend out
	Rise     int           // good checks in a row that bring it back. The first time ever, one is enough
	Outlier  Outlier       // what requests may say against good checks
}

func (s Settings) withDefaults() Settings {
	if s.Interval <= 0 {
		s.Interval = DefaultInterval
	}
	if s.Timeout <= 0 {
		s.Timeout = DefaultTimeout
	}
	if s.Fall <= 0 {
		s.Fall = DefaultFall
	}
	if s.Rise <= 0 {
		s.Rise = DefaultRise
	}
	s.Outlier = s.Outlier.withDefaults()
	return s
}

// Options configure a Checker.
type Options struct {
	Backends func() []*fleet.Backend       // all that there are now
	Settings func(*fleet.Backend) Settings // as the last reload left them. nil: the defaults
	OnChange func(b *fleet.Backend, from, to fleet.Health, detail string)
	// OnEject is told when requests take a backend out or bring it back, and of each failed probe.
	OnEject func(b *fleet.Backend, out bool, detail string)
	// Transport carries the checks. nil: a connection of its own for each check, without any proxy.
	Transport http.RoundTripper
}

// Outcome is what a request met at a backend.
type Outcome uint8

// The outcomes.
const (
	Answered      Outcome = iota // any clean answer below 500, 4xx included: the backend is alive
	Busy                         // 429 or 503: alive, and under pressure
	ServerError                  // other 5xx, or an answer that broke off or never came: only Outlier minds
	ClientGone                   // the client left first: neutral
	ConnectFailed                // no connection
	Hung                         // connected, but no byte within the limit for the first one
)

func (o Outcome) String() string {
	return [...]string{"answered", "busy", "server error", "client gone", "connection failed", "no byte in time"}[min(o, Hung)]
}

// Result is the last active check of a backend.
type Result struct {
	At      time.Time // zero: none yet
	Latency time.Duration
	Err     error // nil: it was good
}

// Checker checks backends. Methods are safe for concurrent use.
type Checker struct {
	o      Options
	states sync.Map // *fleet.Backend -> *state
}

// New returns a checker that does nothing yet. OnChange and OnEject are called one at a time for a backend, in order, from
// Run, CheckAll or Report; they must not call the Checker.
func New(o Options) *Checker {
	if o.Settings == nil {
		o.Settings = func(*fleet.Backend) Settings { return Settings{} }
	}
	if o.OnChange == nil {
		o.OnChange = func(*fleet.Backend, fleet.Health, fleet.Health, string) {}
	}
	if o.OnEject == nil {
		o.OnEject = func(*fleet.Backend, bool, string) {}
	}
	return &Checker{o: o}
}

// Run checks all backends, each in its own rhythm so that a slow one delays no other, until ctx ends. Backends that
// come and go are noticed within a second.
func (c *Checker) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	running := map[*fleet.Backend]bool{}
	tick := time.NewTicker(look)
	defer tick.Stop()
	for {
		for b := range running {
			if b.Gone() {
				delete(running, b)
			}
		}
		for _, b := range c.o.Backends() {
			if !running[b] && !b.Gone() {
				running[b] = true
				wg.Go(func() { c.watch(ctx, b) })
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// CheckAll checks every backend once, at the same time, and returns when all have a result. It is for the start,
// before anything is served.
func (c *Checker) CheckAll(ctx context.Context) { c.CheckEach(ctx, c.o.Backends()) }

// CheckEach is CheckAll for some backends, which need not be among Options.Backends yet: a reload checks those that it
// is about to add.
func (c *Checker) CheckEach(ctx context.Context, list []*fleet.Backend) {
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, checksAtOnce)
	for _, b := range list {
		if b.Admin() == fleet.AdminMaint || b.Gone() {
			continue
		}
		st := c.state(b)
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			c.check(ctx, b, st)
		})
	}
}

// Last returns the backend's last active check.
func (c *Checker) Last(b *fleet.Backend) Result {
	if v, ok := c.states.Load(b); ok {
		st := v.(*state)
		st.mu.Lock()
		defer st.mu.Unlock()
		return st.last
	}
	return Result{}
}

// Report enters what a request met at b. Good outcomes cost a few atomic instructions.
func (c *Checker) Report(b *fleet.Backend, o Outcome) { c.report(b, o, false) }

// ReportProbe is Report for a request whose ticket is a probe.
func (c *Checker) ReportProbe(b *fleet.Backend, o Outcome) { c.report(b, o, true) }

func (c *Checker) report(b *fleet.Backend, o Outcome, probe bool) {
	v, ok := c.states.Load(b)
	if !ok || o == ClientGone {
		return // a backend that is gone, or nothing learned
	}
	st := v.(*state)
	if o == Answered {
		st.outlier.answers.Add(1)
	}
	if (o == Answered || o == Busy) && !probe {
		st.answered(o)
		return
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	set := c.o.Settings(b).withDefaults()
	switch o {
	case Answered, Busy:
		st.heard(o)
	case ConnectFailed:
		st.failed(c, set, "connections to it failed")
	case Hung:
		st.hung(c, set)
	}
	switch {
	case probe:
		st.probed(c, set.Outlier, o)
	case o != Answered && o != Busy:
		st.failedRequest(c, set.Outlier, o.String())
	}
}

func (c *Checker) state(b *fleet.Backend) *state {
	v, _ := c.states.LoadOrStore(b, &state{backend: b})
	return v.(*state)
}

// watch checks one backend until it is gone or ctx ends.
func (c *Checker) watch(ctx context.Context, b *fleet.Backend) {
	st := c.state(b)
	defer c.states.Delete(b)
	timer := time.NewTimer(0)
	defer timer.Stop()
	share := 1 + jitter*(2*rand.Float64()-1)
	var begun time.Time
	if !c.Last(b).At.IsZero() { // by CheckAll, a moment ago
		begun, share = time.Now(), rand.Float64()
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-b.Done():
			return
		case <-timer.C:
		}
		if b.Admin() == fleet.AdminMaint {
			st.maintained(c)
			begun = time.Time{} // checked at once when it returns
			timer.Reset(look)
			continue
		}
		interval := c.o.Settings(b).withDefaults().Interval
		wait := time.Duration(float64(interval)*share) - time.Since(begun)
		if wait <= 0 {
			begun = time.Now()
			c.check(ctx, b, st)
			share = 1 + jitter*(2*rand.Float64()-1)
			// A check that took longer than the interval is not followed by the next one at once.
			wait = max(time.Duration(float64(interval)*share)-time.Since(begun), interval/10)
		}
		timer.Reset(min(wait, look))
	}
}

// check runs one active check and enters its result.
func (c *Checker) check(ctx context.Context, b *fleet.Backend, st *state) {
	s := c.o.Settings(b).withDefaults()
	begun := time.Now()
	err := c.probe(ctx, b, st, s)
	if ctx.Err() != nil {
		return // we stopped, not the backend
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	st.last = Result{At: time.Now(), Latency: time.Since(begun), Err: err}
	if err != nil {
		st.failed(c, s, err.Error())
	} else {
		st.good(c, s)
	}
}

func (c *Checker) probe(ctx context.Context, b *fleet.Backend, st *state, s Settings) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("check %s: panic: %v", b.Name(), r)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, s.Timeout)
	defer cancel()
	rt := c.o.Transport
	if rt == nil {
		rt = st.transport()
	}
	return probe(ctx, rt, b.URL(), s.Path)
}
