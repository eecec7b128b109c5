// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"

	"github.com/shunt-lb/shunt/pkg/netdev"
	"github.com/shunt-lb/shunt/pkg/netdev/lab"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// testbed returns a lab with one client and one engine and the balancer's view of it.
func testbed(t *testing.T) (*lab.Testbed, *netdev.Net) {
	t.Helper()
	l := lab.New()
	t.Cleanup(func() { l.Close() })
	tb, err := l.Steering(lab.SteeringOptions{Clients: 1, Engines: 1})
	if err != nil {
		if os.Getenv("SHUNT_REQUIRE_ALL") == "1" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	var n *netdev.Net
	err = tb.Balancer.Do(func() (err error) {
		n, err = netdev.Open()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return tb, n
}

func TestLink(t *testing.T) {
	_, n := testbed(t)
	l, err := n.Link("eth0")
	if err != nil {
		t.Fatal(err)
	}
	if l.MAC.IsZero() || l.MTU != 1500 || l.Kind != "veth" || l.Driver != "veth" || !l.Up || l.XDPID != 0 {
		t.Errorf("eth0 = %+v", l)
	}
	if same, err := n.LinkByIndex(l.Index); err != nil || same != l {
		t.Errorf("by index: %+v, %v", same, err)
	}
	for _, missing := range []string{"nosuch0", ""} {
		if _, err := n.Link(missing); err == nil {
			t.Errorf("found link %q", missing)
		}
	}
	if _, err := n.Link("nosuch0"); !errors.Is(err, netdev.ErrNoLink) {
		t.Errorf("missing link: %v", err)
	}
	if _, err := n.LinkByIndex(99999); !errors.Is(err, netdev.ErrNoLink) {
		t.Errorf("missing index: %v", err)
	}
}

func TestRoute(t *testing.T) {
	tb, n := testbed(t)
	eth0, err := n.Link("eth0")
	if err != nil {
		t.Fatal(err)
	}
	gw, gw6 := tb.Engines[0].V4, tb.Engines[0].V6
	for _, g := range []netip.Addr{gw, gw6} {
		if err := tb.Balancer.DefaultRoute(g); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		to, src, next string
		local         bool
	}{
		{"10.77.2.1", "10.77.0.1", "10.77.2.1", false},
		{"::ffff:10.77.2.1", "10.77.0.1", "10.77.2.1", false},
		{"fd77::2:1", "fd77::1", "fd77::2:1", false},
		{"192.0.2.7", "10.77.0.1", gw.String(), false},
		{"2001:db8::7", "fd77::1", gw6.String(), false},
		{"10.77.0.1", "10.77.0.1", "10.77.0.1", true},
		{"127.0.0.1", "127.0.0.1", "127.0.0.1", true},
		{"fd77::1", "fd77::1", "fd77::1", true},
	} {
		r, err := n.Route(netip.MustParseAddr(c.to))
		if err != nil {
			t.Errorf("route to %s: %v", c.to, err)
			continue
		}
		if r.Source.String() != c.src || r.Next.String() != c.next || r.Local != c.local || (!c.local && r.Index != eth0.Index) {
			t.Errorf("route to %s = %+v", c.to, r)
		}
		if local, err := n.IsLocal(netip.MustParseAddr(c.to)); err != nil || local != c.local {
			t.Errorf("%s is local: %v, %v", c.to, local, err)
		}
	}
	if _, err := engineView(t, tb).Route(netip.MustParseAddr("192.0.2.7")); !errors.Is(err, netdev.ErrNoRoute) {
		t.Errorf("no route: %v", err)
	}
}

func engineView(t *testing.T, tb *lab.Testbed) *netdev.Net {
	t.Helper()
	var n *netdev.Net
	err := tb.Engines[0].Do(func() (err error) {
		n, err = netdev.Open()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}

func TestResolve(t *testing.T) {
	tb, n := testbed(t)
	eth0, err := engineView(t, tb).Link("eth0")
	if err != nil {
		t.Fatal(err)
	}
	for _, addr := range []netip.Addr{tb.Engines[0].V4, tb.Engines[0].V6} {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		r, mac, err := n.Resolve(ctx, addr)
		if err != nil || mac != eth0.MAC || r.Next != addr {
			t.Errorf("resolve %s: %+v %s, want %s: %v", addr, r, mac, eth0.MAC, err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if _, _, err := n.Resolve(ctx, netip.MustParseAddr("10.77.9.9")); !errors.Is(err, netdev.ErrNoNeighbour) {
		t.Errorf("host that is not there: %v", err)
	}
	if r, mac, err := n.Resolve(context.Background(), tb.Balancer.V4); err != nil || !r.Local || !mac.IsZero() {
		t.Errorf("own address: %+v %s %v", r, mac, err)
	}
}

func TestPortRangeOfNamespace(t *testing.T) {
	tb, n := testbed(t)
	if err := tb.Balancer.Sysctl("net.ipv4.ip_local_port_range", "40000 50001"); err != nil {
		t.Fatal(err)
	}
	if err := tb.Balancer.Sysctl("net/ipv4/ip_local_reserved_ports", "45000-45010"); err != nil {
		t.Fatal(err)
	}
	if r, err := n.IPLocalPortRange(); err != nil || r != (netdev.PortRange{First: 40000, Last: 50001}) {
		t.Errorf("local ports %v, %v", r, err)
	}
	if r, err := n.IPLocalReservedPorts(); err != nil || len(r) != 1 || r[0] != (netdev.PortRange{First: 45000, Last: 45010}) {
		t.Errorf("reserved ports %v, %v", r, err)
	}
}

func TestWatch(t *testing.T) {
	tb, n := testbed(t)
	ctx, cancel := context.WithCancel(context.Background())
	changes, done := make(chan netdev.Change, 1000), make(chan error, 1)
	go func() { done <- n.Watch(ctx, 0, func(c netdev.Change) { changes <- c }) }()
	wait := func(want netdev.ChangeKind, addr netip.Addr) {
		t.Helper()
		limit := time.After(5 * time.Second)
		for {
			select {
			case c := <-changes:
				if c.Kind == want && (!addr.IsValid() || c.Addr == addr) {
					return
				}
			case <-limit:
				t.Fatalf("no %v change seen", want)
			}
		}
	}
	wait(netdev.ChangeResync, netip.Addr{})
	if err := n.Poke(tb.Engines[0].V4); err != nil {
		t.Fatal(err)
	}
	wait(netdev.ChangeNeighbour, tb.Engines[0].V4)
	if err := tb.Balancer.AddAddr("eth0", netip.MustParsePrefix("10.77.0.9/16")); err != nil {
		t.Fatal(err)
	}
	wait(netdev.ChangeAddr, netip.Addr{})
	if err := tb.Balancer.SetMTU("eth0", 1400); err != nil {
		t.Fatal(err)
	}
	wait(netdev.ChangeLink, netip.Addr{})
	if err := tb.Balancer.DefaultRoute(tb.Engines[0].V4); err != nil {
		t.Fatal(err)
	}
	wait(netdev.ChangeRoute, netip.Addr{})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// With a tiny buffer and a reader that is slow for once, changes are lost: the watch must say so and go on.
func TestWatchOverflow(t *testing.T) {
	tb, n := testbed(t)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var kinds []netdev.ChangeKind
	flood, done := make(chan struct{}), make(chan error, 1)
	resync := make(chan struct{})
	go func() {
		done <- n.Watch(ctx, 4096, func(c netdev.Change) {
			kinds = append(kinds, c.Kind)
			switch {
			case len(kinds) == 1:
				close(flood) // hold the reader until the buffer is full
				<-resync
			case c.Kind == netdev.ChangeResync:
				cancel()
			}
		})
	}()
	<-flood
	err := tb.Balancer.Do(func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		for i := range 2000 {
			dst := &net.IPNet{IP: net.IPv4(10, 99, byte(i>>8), byte(i)), Mask: net.CIDRMask(32, 32)}
			if err := netlink.RouteAdd(&netlink.Route{LinkIndex: eth0.Attrs().Index, Dst: dst}); err != nil {
				return err
			}
		}
		return nil
	})
	close(resync)
	if err != nil {
		cancel()
		t.Error(err)
	}
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("no resync after an overflow")
	}
	if len(kinds) >= 2000 {
		t.Errorf("%d changes seen: nothing overflowed", len(kinds))
	}
}
