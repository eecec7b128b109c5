// SPDX-License-Identifier: Apache-2.0

// Package pintest is the contract of session.PinTable as a test, for tables of the heap and of the kernel alike.
package pintest

import (
	"errors"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/session"
)

// The VIPs that the suite uses. A table that knows only configured ones must know these.
var (
	VIP4 = netip.MustParseAddrPort("192.0.2.1:8080")
	VIP6 = netip.MustParseAddrPort("[2001:db8::1]:8080")
)

// Clients of the suite; the table must hold no pin of theirs.
var (
	client4 = netip.MustParseAddr("198.51.100.7")
	client6 = netip.MustParseAddr("2001:db8::c")
)

// Run checks the table's contract. It needs room for 64 pins, and removes every pin that it wrote.
func Run(t *testing.T, table session.PinTable) {
	for _, tt := range []struct {
		name   string
		key    session.PinKey
		others []session.PinKey
	}{
		{"ipv4", session.PinKey{Client: client4, VIP: VIP4}, []session.PinKey{{Client: client4.Next(), VIP: VIP4}}},
		{"ipv6", session.PinKey{Client: client6, VIP: VIP6}, []session.PinKey{{Client: client6.Next(), VIP: VIP6}}},
	} {
		t.Run(tt.name, func(t *testing.T) { runKey(t, table, tt.key, tt.others) })
	}
	t.Run("mapped addresses", func(t *testing.T) { testMapped(t, table) })
	t.Run("concurrent", func(t *testing.T) { testConcurrent(t, table) })
}

// RunFull checks what a table does that holds at most max pins and is empty.
func RunFull(t *testing.T, table session.PinTable, max int) {
	a := netip.MustParseAddr("198.51.0.0")
	var keys []session.PinKey
	defer func() {
		for _, k := range keys {
			_ = table.Delete(k)
		}
	}()
	next := func() session.PinKey {
		a = a.Next()
		k := session.PinKey{Client: a, VIP: VIP4}
		keys = append(keys, k)
		return k
	}
	for i := range max {
		if err := table.Put(next(), pin(fleet.ID(1+i%100))); err != nil {
			t.Fatalf("pin %d of %d: %v", i+1, max, err)
		}
	}
	over := next()
	if err := table.Put(over, pin(1)); !errors.Is(err, session.ErrPinTableFull) {
		t.Errorf("one pin more: error %v, want %v", err, session.ErrPinTableFull)
	}
	if p, live := table.Get(over); live || p.Backend != 0 {
		t.Errorf("the pin that did not fit is there: %+v", p)
	}
	if err := table.Put(keys[0], pin(77)); err != nil {
		t.Errorf("replace a pin of a full table: %v", err)
	}
	if p, live := table.Get(keys[0]); !live || p.Backend != 77 {
		t.Errorf("the replaced pin is %+v", p)
	}
	if err := table.Delete(keys[1]); err != nil {
		t.Error(err)
	}
	if err := table.Put(over, pin(1)); err != nil {
		t.Errorf("after a removal: %v", err)
	}
}

func pin(id fleet.ID) session.Pin {
	return session.Pin{Backend: id, Generation: 3, Expires: time.Hour, Tokens: 1234, Connections: 64, Sessions: 2}
}

func runKey(t *testing.T, table session.PinTable, key session.PinKey, others []session.PinKey) {
	t.Cleanup(func() {
		for _, k := range append(others, key) {
			_ = table.Delete(k)
		}
	})
	put := func(p session.Pin) {
		t.Helper()
		if err := table.Put(key, p); err != nil {
			t.Fatal(err)
		}
	}
	// same leaves out Expires, which runs.
	same := func(want session.Pin, wantLive bool) {
		t.Helper()
		got, live := table.Get(key)
		if live != wantLive {
			t.Errorf("live = %v, want %v", live, wantLive)
		}
		if want.Expires > 0 && (got.Expires > want.Expires || live && got.Expires < want.Expires-time.Minute) {
			t.Errorf("expires in %s, want just under %s", got.Expires, want.Expires)
		}
		if want.Expires == 0 && got.Expires != 0 {
			t.Errorf("expires in %s, want never", got.Expires)
		}
		got.Expires = want.Expires
		if got != want {
			t.Errorf("pin %+v, want %+v", got, want)
		}
	}

	same(session.Pin{}, false)
	if err := table.Delete(key); err != nil {
		t.Errorf("delete a pin that is not there: %v", err)
	}
	if err := table.Touch(key, pin(5)); !errors.Is(err, session.ErrNoPin) {
		t.Errorf("touch a pin that is not there: error %v", err)
	}
	same(session.Pin{}, false)

	put(pin(5))
	same(pin(5), true)
	if _, live := table.Get(others[0]); live {
		t.Error("another address is pinned too")
	}
	other := session.PinKey{Client: key.Client, VIP: VIP6}
	if key.VIP == VIP6 {
		other.VIP = VIP4
	}
	if p, live := table.Get(other); live || p.Backend != 0 {
		t.Error("another VIP is pinned too")
	}

	t.Run("touch", func(t *testing.T) {
		if err := table.Touch(key, session.Pin{Backend: 5, Generation: 3, Tokens: 99, Sessions: 7}); err != nil {
			t.Error(err)
		}
		want := pin(5)
		want.Tokens, want.Sessions = 99, 7
		same(want, true)
		for _, p := range []session.Pin{{Backend: 6, Generation: 3, Tokens: 1, Sessions: 1}, {Backend: 5, Generation: 4, Tokens: 1, Sessions: 1}} {
			if err := table.Touch(key, p); !errors.Is(err, session.ErrNoPin) {
				t.Errorf("touch for backend %d generation %d: error %v", p.Backend, p.Generation, err)
			}
		}
		same(want, true)
	})
	t.Run("replace", func(t *testing.T) {
		p := session.Pin{Backend: 9, Generation: 1, Sessions: 1}
		put(p)
		same(p, true)
	})
	t.Run("expired", func(t *testing.T) {
		p := pin(5)
		p.Expires = 1
		put(p)
		for begun := time.Now(); time.Since(begun) < time.Millisecond; {
		}
		same(p, false)
		if err := table.Touch(key, pin(5)); !errors.Is(err, session.ErrNoPin) {
			t.Errorf("touch: error %v", err)
		}
		if _, live := table.Get(key); live {
			t.Error("touch gave it life again")
		}
		put(pin(5))
		same(pin(5), true)
	})
	t.Run("static", func(t *testing.T) {
		p := session.Pin{Backend: 5, Sessions: 1, Static: true}
		put(p)
		same(p, true)
	})
	t.Run("delete", func(t *testing.T) {
		if err := table.Delete(key); err != nil {
			t.Error(err)
		}
		same(session.Pin{}, false)
	})
}

func testMapped(t *testing.T, table session.PinTable) {
	plain := session.PinKey{Client: client4, VIP: VIP4}
	mapped := session.PinKey{Client: netip.AddrFrom16(client4.As16()),
		VIP: netip.AddrPortFrom(netip.AddrFrom16(VIP4.Addr().As16()), VIP4.Port())}
	t.Cleanup(func() { _ = table.Delete(plain) })
	for _, k := range [][2]session.PinKey{{plain, mapped}, {mapped, plain}} {
		if err := table.Put(k[0], pin(5)); err != nil {
			t.Fatal(err)
		}
		if p, live := table.Get(k[1]); !live || p.Backend != 5 {
			t.Errorf("put %s, get %s: %+v, live %v", k[0].Client, k[1].Client, p, live)
		}
		if err := table.Delete(k[1]); err != nil {
			t.Error(err)
		}
		if _, live := table.Get(k[0]); live {
			t.Errorf("put %s, delete %s: still there", k[0].Client, k[1].Client)
		}
	}
}

func testConcurrent(t *testing.T, table session.PinTable) {
	var wg sync.WaitGroup
	a := netip.MustParseAddr("198.51.100.100")
	for g := range 8 {
		key := session.PinKey{Client: a, VIP: VIP4}
		a = a.Next()
		wg.Go(func() {
			defer func() { _ = table.Delete(key) }()
			for i := range 200 {
				id := fleet.ID(1 + g*10 + i%5)
				if err := table.Put(key, pin(id)); err != nil {
					t.Error(err)
					return
				}
				if err := table.Touch(key, session.Pin{Backend: id, Generation: 3, Sessions: uint32(i), Tokens: 8}); err != nil {
					t.Error(err)
				}
				if p, live := table.Get(key); !live || p.Backend != id || p.Sessions != uint32(i) || p.Tokens != 8 {
					t.Errorf("pin of %s: %+v, live %v, want backend %d", key.Client, p, live, id)
				}
				if i%7 == 0 {
					if err := table.Delete(key); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
}
