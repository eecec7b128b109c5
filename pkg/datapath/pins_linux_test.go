// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/session"
	"github.com/shunt-lb/shunt/pkg/session/pintest"
)

// tables opens a datapath that is attached to nothing, for tests of its tables.
func tables(t *testing.T) *Datapath {
	t.Helper()
	w := newWorld(t, 0, 0)
	o := w.options()
	for _, v := range []netip.AddrPort{pintest.VIP4, pintest.VIP6} {
		o.VIPs = append(o.VIPs, VIP{Addr: v})
	}
	d := w.open(o)
	d.mu.Lock()
	defer d.mu.Unlock()
	must(t, d.syncVIPs())
	return d
}

func TestPinTableContract(t *testing.T) { pintest.Run(t, tables(t).PinTable()) }

func TestPinTableFull(t *testing.T) {
	if testing.Short() {
		t.Skip("fills a table of 65,536 pins")
	}
	d := tables(t)
	pintest.RunFull(t, d.PinTable(), int(d.m.ShuntSessions.MaxEntries()))
}

func TestStaticPin(t *testing.T) {
	d := tables(t)
	key, pins := session.PinKey{Client: netip.MustParseAddr("192.0.2.77"), VIP: pintest.VIP4}, d.PinTable()
	static := session.Pin{Backend: 3, Sessions: 1, Static: true}
	must(t, pins.Put(key, static))
	if err := pins.Put(key, session.Pin{Backend: 4}); !errors.Is(err, ErrStaticPin) {
		t.Errorf("overwrite: %v", err)
	}
	if err := pins.Touch(key, session.Pin{Backend: 3, Sessions: 9}); !errors.Is(err, ErrStaticPin) {
		t.Errorf("touch: %v", err)
	}
	must(t, d.pins.tidy(d.generation)) // backend 3 is not even known
	if got, live := pins.Get(key); !live || got != static {
		t.Errorf("pin %+v, live %v", got, live)
	}
}

func TestLeaseHolds(t *testing.T) {
	const now, idle = 1000, 100
	static := uint32(steerShuntPinFlagsSHUNT_PIN_STATIC)
	for _, tc := range []struct {
		name string
		s    steerSession
		u    steerSessionUse
		idle uint64
		want bool
	}{
		{"fresh", steerSession{SinceNs: 950}, steerSessionUse{}, idle, true},
		{"at the idle bound", steerSession{SinceNs: 900}, steerSessionUse{}, idle, true},
		{"idle", steerSession{SinceNs: 899}, steerSessionUse{}, idle, false},
		{"used lately", steerSession{SinceNs: 100}, steerSessionUse{LastNs: 950}, idle, true},
		{"no idle bound", steerSession{SinceNs: 1}, steerSessionUse{}, 0, true},
		{"static is never idle", steerSession{SinceNs: 1, Flags: static}, steerSessionUse{}, idle, true},
		{"before its end", steerSession{SinceNs: 950, ExpiresNs: 1001}, steerSessionUse{}, idle, true},
		{"at its end", steerSession{SinceNs: 950, ExpiresNs: 1000}, steerSessionUse{}, idle, false},
		{"used up", steerSession{SinceNs: 950, Connections: 3, Serial: 5}, steerSessionUse{Serial: 5, Connections: 3}, idle, false},
		{"one left", steerSession{SinceNs: 950, Connections: 3, Serial: 5}, steerSessionUse{Serial: 5, Connections: 2}, idle, true},
		{"used up by the pin before", steerSession{SinceNs: 950, Connections: 3, Serial: 6}, steerSessionUse{Serial: 5, Connections: 3}, idle, true},
		{"written after now was read", steerSession{SinceNs: 1001}, steerSessionUse{}, idle, true},
	} {
		if got := leaseHolds(&tc.s, &tc.u, now, tc.idle); got != tc.want {
			t.Errorf("%s: %v", tc.name, got)
		}
	}
}

func TestTidy(t *testing.T) {
	d := tables(t)
	pins := d.PinTable()
	backends := func(id fleet.ID) (uint32, bool) { return 7, id == 1 }
	client := netip.MustParseAddr("192.0.2.1")
	for _, tc := range []struct {
		name string
		pin  session.Pin
		use  *steerSessionUse
		keep bool
	}{
		{"live", session.Pin{Backend: 1, Generation: 7}, nil, true},
		{"any generation", session.Pin{Backend: 1}, nil, true},
		{"expired", session.Pin{Backend: 1, Expires: 1}, nil, false},
		{"another generation", session.Pin{Backend: 1, Generation: 6}, nil, false},
		{"backend gone", session.Pin{Backend: 2, Generation: 7}, nil, false},
		{"used up", session.Pin{Backend: 1, Connections: 2}, &steerSessionUse{Connections: 2}, false},
		{"not used up", session.Pin{Backend: 1, Connections: 2}, &steerSessionUse{Connections: 1}, true},
	} {
		client = client.Next()
		key := session.PinKey{Client: client, VIP: pintest.VIP4}
		must(t, pins.Put(key, tc.pin))
		k, err := d.pins.key(key)
		must(t, err)
		if tc.use != nil {
			s, err := d.pins.read(k)
			must(t, err)
			tc.use.Serial, tc.use.LastNs = s.Serial, d.clock.now()
			must(t, d.m.ShuntSessUse.Put(k, tc.use))
		}
		must(t, d.pins.tidy(backends))
		if _, err := d.pins.read(k); errors.Is(err, ebpf.ErrKeyNotExist) == tc.keep {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
	if n := d.npins.Load(); n != 3 {
		t.Errorf("%d pins counted", n)
	}
	now := d.clock.now()
	const ago = 1 // when the machine started
	for i, tc := range []struct {
		u      steerSessionUse
		pinned bool
		keep   bool
	}{
		{steerSessionUse{LastNs: ago}, false, false},
		{steerSessionUse{LastNs: ago, Open: 1}, false, true},
		{steerSessionUse{LastNs: now}, false, true}, // a SYN may be on its way
		{steerSessionUse{LastNs: ago}, true, true},
	} {
		client = client.Next()
		key := session.PinKey{Client: client, VIP: pintest.VIP4}
		k, err := d.pins.key(key)
		must(t, err)
		must(t, d.m.ShuntSessUse.Put(k, &tc.u))
		if tc.pinned {
			must(t, pins.Put(key, session.Pin{Backend: 1}))
		}
		must(t, d.pins.tidy(backends))
		if _, ok := d.pins.use(k); ok != tc.keep {
			t.Errorf("use %d: there %v", i, ok)
		}
	}
}

func TestScan(t *testing.T) {
	for _, n := range []int{0, 1, 5000} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			need(t, Probe())
			m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 8, MaxEntries: 6000})
			must(t, err)
			defer m.Close()
			for i := range n {
				must(t, m.Put(uint32(i), uint64(i)*3))
			}
			seen := map[uint32]bool{}
			must(t, scan(m, func(k uint32, v *uint64) {
				if *v != uint64(k)*3 || seen[k] {
					t.Errorf("entry %d: %d, seen %v", k, *v, seen[k])
				}
				seen[k] = true
			}))
			if len(seen) != n {
				t.Errorf("%d of %d entries", len(seen), n)
			}
		})
	}
}
