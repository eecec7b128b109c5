// SPDX-License-Identifier: Apache-2.0

package session_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/session"
	"github.com/shunt-lb/shunt/pkg/session/pintest"
)

func TestHeapPinsContract(t *testing.T) {
	pintest.Run(t, session.NewHeapPins())
	small := session.NewHeapPins()
	small.Max = 10
	pintest.RunFull(t, small, 10)
	if n := small.Len(); n != 0 {
		t.Errorf("%d pins are left", n)
	}
}

func TestHeapPinsUse(t *testing.T) {
	now := time.Unix(1000, 0)
	h := session.NewHeapPins()
	h.Now = func() time.Time { return now }
	h.Idle = time.Minute
	k := session.PinKey{Client: netip.MustParseAddr("198.51.100.1"), VIP: pintest.VIP4}
	if _, ok := h.Use(k); ok {
		t.Error("used a pin that is not there")
	}
	use := func(want bool) {
		t.Helper()
		if _, ok := h.Use(k); ok != want {
			t.Errorf("used = %v, want %v", ok, want)
		}
	}
	put := func(p session.Pin) {
		t.Helper()
		if err := h.Put(k, p); err != nil {
			t.Fatal(err)
		}
	}
	put(session.Pin{Backend: 1, Connections: 3})
	use(true)
	now = now.Add(59 * time.Second)
	use(true)
	now = now.Add(59 * time.Second)
	use(true)
	use(false) // used up
	put(session.Pin{Backend: 1, Connections: 3})
	use(true)
	now = now.Add(time.Minute)
	use(false) // idle
	put(session.Pin{Backend: 1, Expires: 90 * time.Second})
	now = now.Add(50 * time.Second)
	use(true)
	now = now.Add(40 * time.Second)
	use(false) // expired
}
