// SPDX-License-Identifier: Apache-2.0

package health

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

// Defaults of Outlier.
const (
	DefaultFailures = 5
	DefaultShare    = 0.5
	DefaultVolume   = 10
	DefaultWindow   = 30 * time.Second
	DefaultHold     = 10 * time.Second
	DefaultMaxHold  = 5 * time.Minute
)

// Outlier says which failures of requests eject a backend whose checks are good: an engine whose generation is broken may go
// on answering them, and to a policy that counts tokens it looks idle. Zero values mean the defaults.
type Outlier struct {
	Failures int           // in a row; below 0 = never for that
	Share    float64       // of the requests within Window, if there are at least Volume; below 0 = never for that
	Volume   int           // requests
	Window   time.Duration // in which Share is measured
	// Hold is how long an ejected backend is left alone. Then one request at a time probes it. A failed probe doubles the hold,
	// up to MaxHold, and so does an ejection soon after the one before.
	Hold    time.Duration
	MaxHold time.Duration
}

func (o Outlier) withDefaults() Outlier {
	if o.Failures == 0 {
		o.Failures = DefaultFailures
	}
	if o.Share == 0 {
		o.Share = DefaultShare
	}
	if o.Volume <= 0 {
		o.Volume = DefaultVolume
	}
	if o.Window <= 0 {
		o.Window = DefaultWindow
	}
	if o.Hold <= 0 {
		o.Hold = DefaultHold
	}
	o.MaxHold = max(o.MaxHold, o.Hold)
	return o
}

// Ejections of a backend.
type Ejections struct {
	Reason string // of the ejection in force, or that of a probe that failed since; "" = not ejected
	Row    int64  // ejections for failures in a row
	Share  int64  // ejections for the share of failures
}

// Ejections returns what requests did to the backend's eligibility.
func (c *Checker) Ejections(b *fleet.Backend) Ejections {
	v, ok := c.states.Load(b)
	if !ok {
		return Ejections{}
	}
	st := v.(*state)
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.outlier.Ejections
}

// outlier is what requests met at one backend. All but answers is guarded by the state's lock.
type outlier struct {
	answers atomic.Int64 // good ones, since the start
	Ejections
	row      int       // failures in a row
	begun    time.Time // of the window
	base     int64     // answers then
	failures int64     // since then
	hold     time.Duration
	restored time.Time
}

// failedRequest enters a request that an eligible backend did not serve. What fails later at one that is ejected already
// says nothing new.
func (s *state) failedRequest(c *Checker, set Outlier, detail string) {
	o := &s.outlier
	if s.backend.Health() != fleet.HealthUp || o.Reason != "" {
		return
	}
	now := time.Now()
	if o.begun.IsZero() || now.Sub(o.begun) > set.Window {
		o.begun, o.base, o.failures = now, o.answers.Load(), 0
	}
	o.row++
	o.failures++
	s.note()
	total := o.failures + o.answers.Load() - o.base
	switch {
	case set.Failures > 0 && o.row >= set.Failures:
		o.Row++
		detail = fmt.Sprintf("%d requests in a row failed, the last: %s", o.row, detail)
	case set.Share > 0 && total >= int64(set.Volume) && float64(o.failures) >= set.Share*float64(total):
		o.Share++
		detail = fmt.Sprintf("%d of %d requests failed, the last: %s", o.failures, total, detail)
	default:
		return
	}
	if o.hold > 0 && now.Sub(o.restored) < 2*o.hold {
		o.hold = min(2*o.hold, set.MaxHold)
	} else {
		o.hold = set.Hold
	}
	o.row, o.begun = 0, time.Time{}
	s.eject(c, detail)
}

func (s *state) eject(c *Checker, detail string) {
	s.outlier.Reason = detail
	s.backend.Eject(s.outlier.hold)
	s.note()
	c.o.OnEject(s.backend, true, fmt.Sprintf("%s; probed in %s", detail, s.outlier.hold))
}

// probed enters the verdict of a probe.
func (s *state) probed(c *Checker, set Outlier, outcome Outcome) {
	o := &s.outlier
	if o.Reason == "" {
		return
	}
	switch outcome {
	case Answered, Busy:
		s.restore(c, "a request was served again")
	case ServerError, ConnectFailed, Hung:
		o.hold = min(2*max(o.hold, set.Hold), max(set.MaxHold, o.hold))
		s.eject(c, "a probe failed: "+outcome.String())
	}
}

// restore ends the ejection.
func (s *state) restore(c *Checker, detail string) {
	o := &s.outlier
	if o.Reason == "" {
		return
	}
	o.Reason, o.row, o.begun, o.restored = "", 0, time.Time{}, time.Now()
	s.note()
	s.backend.Restore()
	c.o.OnEject(s.backend, false, detail)
}
