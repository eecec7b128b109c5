// SPDX-License-Identifier: Apache-2.0

package session_test

import (
	"fmt"
	"net/netip"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

type first struct{}

func (first) Pick(*fleet.Query, []fleet.Candidate) (int, fleet.Reason) { return 0, "first" }

// newBackends makes a fleet of n healthy backends.
func newBackends(t testing.TB, n int) (*fleet.Fleet, []*fleet.Backend) {
	t.Helper()
	f := fleet.New(fleet.Options{})
	applyBackends(t, f, n)
	return f, f.Backends()
}

// applyBackends makes the first n of b0, b1, ... the fleet.
func applyBackends(t testing.TB, f *fleet.Fleet, n int) {
	t.Helper()
	spec := fleet.PoolSpec{Name: "p", Chooser: first{}}
	for i := range n {
		addr := fmt.Sprintf("10.0.0.%d:8000", i+1)
		spec.Backends = append(spec.Backends, fleet.BackendSpec{Name: fmt.Sprintf("b%d", i),
			URL: &url.URL{Scheme: "http", Host: addr}, Steer: netip.MustParseAddrPort(addr)})
	}
	if err := f.Apply([]fleet.PoolSpec{spec}); err != nil {
		t.Fatal(err)
	}
	for _, b := range f.Backends() {
		b.SetHealth(fleet.HealthUp)
	}
}

// clock is set by hand.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func newClock() *clock { return &clock{now: time.Unix(1_700_000_000, 0)} }

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}
