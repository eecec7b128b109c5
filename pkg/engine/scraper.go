// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"runtime/debug"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

// Defaults of Options.
const (
	DefaultInterval = time.Second
	DefaultTimeout  = 900 * time.Millisecond
	// maxInterval is how rarely an engine that answers nothing of use is asked.
	maxInterval = time.Minute
	// tick is the grain of the schedule.
	tick = 50 * time.Millisecond
	// atOnce bounds the scrapes under way.
	atOnce = 32
)

// Options of New. Zero values mean the defaults.
type Options struct {
	Backends func() []*fleet.Backend // those to ask, now
	Clock    func() time.Duration    // the fleet's
	Interval time.Duration           // between two scrapes of one engine
	Timeout  time.Duration           // of one scrape
	// OnFigures is told what came, and whether the engine has restarted since the time before. It may not block.
	OnFigures func(b *fleet.Backend, f Figures, restarted bool)
}

// Status is what is known of one backend's telemetry.
type Status struct {
	Engine string        // dialect; "" before the first good scrape
	Age    time.Duration // of the last good scrape; below 0 = there was none
	Err    error         // of the last scrape
}

// Scraper asks engines for their metrics.
type Scraper struct {
	o      Options
	client *http.Client
	slots  chan struct{}
	wg     sync.WaitGroup

	mu      sync.Mutex
	targets map[*fleet.Backend]*target
}

type target struct {
	next   time.Duration
	busy   bool
	fails  int
	engine string
	at     time.Duration
	good   bool
	err    error
	served float64
	url    string
}

// New returns a scraper that does nothing before Run.
func New(o Options) *Scraper {
	if o.Interval <= 0 {
		o.Interval = DefaultInterval
	}
	if o.Timeout <= 0 {
		o.Timeout = DefaultTimeout
	}
	if o.OnFigures == nil {
		o.OnFigures = func(*fleet.Backend, Figures, bool) {}
	}
	var d net.Dialer
	d.SetMultipathTCP(false)
	return &Scraper{o: o, targets: map[*fleet.Backend]*target{}, slots: make(chan struct{}, atOnce), client: &http.Client{
		Transport: &http.Transport{DialContext: d.DialContext, DisableCompression: true, MaxIdleConnsPerHost: 1,
			IdleConnTimeout: 10 * time.Second, ResponseHeaderTimeout: o.Timeout},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// Run scrapes until ctx ends, and returns when the last scrape has.
func (s *Scraper) Run(ctx context.Context) error {
	t := time.NewTicker(tick)
	defer t.Stop()
	defer s.client.CloseIdleConnections()
	defer s.wg.Wait()
	for {
		s.round(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
	}
}

// round starts the scrapes that are due.
func (s *Scraper) round(ctx context.Context) {
	now := s.o.Clock()
	backends := s.o.Backends()
	s.mu.Lock()
	defer s.mu.Unlock()
	for b := range s.targets {
		if b.Gone() {
			delete(s.targets, b)
		}
	}
	for i, b := range backends {
		t := s.targets[b]
		if t == nil { // spread over the interval, so that a fleet is not asked all at once
			t = &target{next: now + s.o.Interval*time.Duration(i%16)/16, url: b.URL().Scheme + "://" + b.URL().Host + "/metrics"}
			s.targets[b] = t
		}
		if t.busy || now < t.next {
			continue
		}
		select {
		case s.slots <- struct{}{}:
		default:
			return // the rest comes with a later tick
		}
		t.busy = true
		s.wg.Go(func() { s.scrape(ctx, b, t) })
	}
}

// scrape asks one engine and enters what it says.
func (s *Scraper) scrape(ctx context.Context, b *fleet.Backend, t *target) {
	sent, at := b.Requests(), s.o.Clock()
	var f Figures
	err := errors.New("panic in a scrape")
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("scrape: panic: %v\n%s", r, debug.Stack())
		}
		<-s.slots
		s.mu.Lock()
		defer s.mu.Unlock()
		t.busy, t.err = false, err
		wait := s.o.Interval
		if err != nil {
			t.fails = min(t.fails+1, 6)
			wait = min(s.o.Interval<<t.fails, maxInterval)
			if t.good { // it did answer before: it may be back any moment
				wait = min(wait, 4*s.o.Interval)
			}
		} else {
			t.fails, t.good, t.engine, t.at, t.served = 0, true, f.Engine, at, f.Served
		}
		t.next = s.o.Clock() + wait
	}()
	if f, err = s.fetch(ctx, t.url); err != nil {
		return
	}
	// A NaN, the counter that is not reported, is smaller than nothing.
	restarted := t.good && f.Served < t.served
	g := fleet.Gauges{Waiting: count(f.Waiting), Running: count(f.Running), KVUse: -1, KVTokens: count(f.KVTokens), Sent: sent, At: at}
	if !math.IsNaN(f.KVUse) {
		g.KVUse = f.KVUse
	}
	b.SetGauges(g)
	s.o.OnFigures(b, f, restarted)
}

func count(v float64) int64 {
	if math.IsNaN(v) {
		return 0
	}
	return int64(min(v, 1e15))
}

func (s *Scraper) fetch(ctx context.Context, url string) (Figures, error) {
	ctx, cancel := context.WithTimeout(ctx, s.o.Timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return Figures{}, fmt.Errorf("make request: %w", err)
	}
	res, err := s.client.Do(req)
	if err != nil {
		return Figures{}, fmt.Errorf("ask engine: %w", err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		_, _ = io.CopyN(io.Discard, res.Body, 4<<10)
		return Figures{}, fmt.Errorf("ask engine: status %d", res.StatusCode)
	}
	return Parse(res.Body)
}

// Status returns what is known of the backend's telemetry.
func (s *Scraper) Status(b *fleet.Backend) Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.targets[b]
	if t == nil || !t.good {
		st := Status{Age: -1}
		if t != nil {
			st.Err = t.err
		}
		return st
	}
	return Status{Engine: t.engine, Age: s.o.Clock() - t.at, Err: t.err}
}
