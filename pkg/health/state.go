// SPDX-License-Identifier: Apache-2.0

package health

import (
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

// state is the state machine of one backend instance.
type state struct {
	backend *fleet.Backend
	client  sync.Once
	rt      *http.Transport

	// troubled is set while an answer would change something, so that the ordinary one takes no lock.
	troubled atomic.Bool

	mu      sync.Mutex
	last    Result
	wasUp   bool
	fails   int           // failed checks and connections in a row
	goods   int           // good checks in a row
	hangs   int           // hung requests in a row; good checks do not break the row, answers do
	hold    time.Duration // the last pause after hangs; 0 = it answers
	heldTil time.Time
	outlier outlier
}

// good enters a good check.
func (s *state) good(c *Checker, set Settings) {
	s.fails = 0
	s.note()
	if s.backend.Health() == fleet.HealthUp {
		s.goods = 0
		return
	}
	if time.Now().Before(s.heldTil) {
		return
	}
	s.goods++
	if s.goods < set.Rise && s.wasUp {
		return
	}
	detail := "first good check"
	if s.wasUp {
		detail = fmt.Sprintf("%d good checks in a row", s.goods)
	}
	s.goods, s.hangs, s.wasUp = 0, 0, true
	s.outlier.row = 0
	s.restore(c, "the checks saw it down and up again")
	s.change(c, fleet.HealthUp, detail)
}

// failed enters a failed check or connection.
func (s *state) failed(c *Checker, set Settings, detail string) {
	s.goods = 0
	s.fails = min(s.fails+1, set.Fall)
	s.note()
	if s.fails >= set.Fall {
		s.change(c, fleet.HealthDown, fmt.Sprintf("%d failures in a row, the last: %s", s.fails, detail))
	}
}

// hung enters a request that got no byte. After a recovery from hangs one more is enough, until an answer comes.
func (s *state) hung(c *Checker, set Settings) {
	s.goods = 0
	s.hangs++
	s.note()
	if s.backend.Health() != fleet.HealthUp || s.hangs < set.Fall && s.hold == 0 {
		return
	}
	s.hold = min(max(2*s.hold, firstHold), maxHold)
	s.heldTil = time.Now().Add(s.hold)
	s.change(c, fleet.HealthDown, fmt.Sprintf("%d requests in a row got no byte; checks count again in %s", s.hangs, s.hold))
}

// answered enters a request that the backend answered. It ends any row of failures, but only checks bring a backend up.
func (s *state) answered(o Outcome) {
	if !s.troubled.Load() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.heard(o)
}

func (s *state) heard(o Outcome) {
	if o == Answered { // one that has no room has served nothing
		s.outlier.row = 0
	}
	s.hangs, s.hold, s.heldTil = 0, 0, time.Time{}
	if s.backend.Health() != fleet.HealthDown {
		s.fails = 0
	}
	s.note()
}

// maintained forgets what was known: the operator has the backend, and the next good check is the first one again.
func (s *state) maintained(c *Checker) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fails, s.goods, s.hangs, s.wasUp, s.hold, s.heldTil = 0, 0, 0, false, 0, time.Time{}
	s.note()
	s.restore(c, "in maintenance")
	s.outlier.hold = 0
	s.change(c, fleet.HealthUnknown, "in maintenance, not checked")
}

func (s *state) note() {
	s.troubled.Store(s.fails > 0 || s.hangs > 0 || s.hold > 0 || s.outlier.row > 0)
}

func (s *state) change(c *Checker, to fleet.Health, detail string) {
	if from := s.backend.SetHealth(to); from != to {
		c.o.OnChange(s.backend, from, to, detail)
	}
}

// transport makes a connection for each check, so that a check proves that the backend still accepts one.
func (s *state) transport() *http.Transport {
	s.client.Do(func() {
		s.rt = &http.Transport{
			DisableKeepAlives:      true,
			DisableCompression:     true,
			MaxResponseHeaderBytes: 64 << 10,
		}
	})
	return s.rt
}
