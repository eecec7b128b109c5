// SPDX-License-Identifier: Apache-2.0

package session_test

import (
	"encoding/binary"
	"net/netip"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/session"
)

// soak says whether a long test goes on: for n rounds, and with SHUNT_SOAK=1 for the time as well.
func soak(n int, long time.Duration) func(round int) bool {
	start, all := time.Now(), os.Getenv("SHUNT_SOAK") == "1"
	return func(round int) bool { return round < n || all && time.Since(start) < long }
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// No two requests have a session, an address or a prober in common: what is remembered is bounded all the same.
func TestSoakUniqueKeys(t *testing.T) {
	_, b := newBackends(t, 3)
	c := newClock()
	r := newRig(t, func(o *session.PinsOptions) { o.MaxAddresses = 2048 })
	tr := session.NewTracker(session.TrackerOptions{Max: 4096, Idle: time.Hour, Now: c.Now})
	in := session.NewIngresses(nil, c.Now)
	address := func(n uint64) netip.Addr {
		var a [16]byte
		a[0], a[1] = 0x20, 0x01
		binary.BigEndian.PutUint64(a[8:], n)
		return netip.AddrFrom16(a)
	}
	const block = 10_000
	more := soak(5, 3*time.Minute)
	n, early := uint64(0), uint64(0)
	for round := 0; more(round); round++ {
		for range block {
			n++
			k, home := session.Key(n*0x9e3779b97f4a7c15), b[n%3]
			tr.Assign(k, home, false)
			tr.Observe(k, 100, 10)
			r.pins.Offer(netip.AddrPortFrom(address(n), 1), vip, k, r.b[n%3], 10, false)
			if n%100 == 0 {
				in.Probed(address(n))
			}
			c.add(time.Millisecond)
			r.clock.add(time.Millisecond)
		}
		if round == 2 {
			early = heap()
		}
	}
	late := heap()
	t.Logf("%d keys; heap %d KiB, then %d KiB", n, early>>10, late>>10)
	if late > early+4<<20 {
		t.Errorf("the heap grew from %d to %d bytes over %d keys", early, late, n)
	}
	if tr.Len() > 4096 || r.pins.Stats().Addresses > 2048 || r.table.Len() > 2048 {
		t.Errorf("%d sessions, %d addresses, %d pins are remembered", tr.Len(), r.pins.Stats().Addresses, r.table.Len())
	}
}
