// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Net is a view of one network namespace. Its methods may be called concurrently.
type Net struct {
	ns     netns.NsHandle
	nl     *netlink.Handle
	udp4   int
	udp6   int // -1 without IPv6
	closed bool
}

// Open returns a view of the calling thread's network namespace.
func Open() (*Net, error) {
	n := &Net{ns: netns.None(), udp4: -1, udp6: -1}
	var err error
	if n.ns, err = netns.Get(); err != nil {
		return nil, fmt.Errorf("open network namespace: %w", err)
	}
	if n.nl, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		n.Close()
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	const udp = unix.SOCK_DGRAM | unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK
	if n.udp4, err = unix.Socket(unix.AF_INET, udp, 0); err != nil {
		n.Close()
		return nil, fmt.Errorf("open socket: %w", err)
	}
	if n.udp6, err = unix.Socket(unix.AF_INET6, udp, 0); err != nil {
		n.udp6 = -1
	}
	return n, nil
}

// Close releases the view.
func (n *Net) Close() error {
	if n.closed {
		return nil
	}
	n.closed = true
	if n.nl != nil {
		n.nl.Close()
	}
	for _, fd := range []int{n.udp4, n.udp6} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	return n.ns.Close()
}

// Do runs fn with the OS thread in the namespace of the view; sockets that fn opens stay there. It costs nothing when
// the thread is there already, else it needs CAP_SYS_ADMIN.
func (n *Net) Do(fn func() error) (err error) {
	runtime.LockOSThread()
	old, err := netns.Get()
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("open network namespace: %w", err)
	}
	defer old.Close()
	if old.Equal(n.ns) {
		defer runtime.UnlockOSThread()
		return fn()
	}
	if err := netns.Set(n.ns); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter network namespace: %w", err)
	}
	defer func() {
		if back := netns.Set(old); back != nil {
			// Stay locked: this thread must run nothing else.
			err = errors.Join(err, fmt.Errorf("leave network namespace: %w", back))
			return
		}
		runtime.UnlockOSThread()
	}()
	return fn()
}

// Link returns the link of that name, or ErrNoLink.
func (n *Net) Link(name string) (Link, error) {
	l, err := n.nl.LinkByName(name)
	if err != nil {
		return Link{}, linkError(name, err)
	}
	return n.link(l), nil
}

// LinkByIndex returns the link with that index, or ErrNoLink.
func (n *Net) LinkByIndex(index int) (Link, error) {
	l, err := n.nl.LinkByIndex(index)
	if err != nil {
		return Link{}, linkError(fmt.Sprint(index), err)
	}
	return n.link(l), nil
}

func linkError(name string, err error) error {
	var missing netlink.LinkNotFoundError
	if errors.As(err, &missing) || errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("find link %s: %w", name, ErrNoLink)
	}
	return fmt.Errorf("find link %s: %w", name, err)
}

func (n *Net) link(l netlink.Link) Link {
	a := l.Attrs()
	out := Link{
		Index: a.Index, Name: a.Name, MTU: a.MTU, Kind: l.Type(),
		Up: a.Flags&net.FlagUp != 0, Parent: a.ParentIndex, Master: a.MasterIndex,
	}
	copyMAC(&out.MAC, a.HardwareAddr)
	if a.Xdp != nil {
		out.XDP, out.XDPID = XDPMode(a.Xdp.AttachMode), a.Xdp.ProgId
	}
	if info, err := unix.IoctlGetEthtoolDrvinfo(n.udp4, a.Name); err == nil {
		out.Driver = unix.ByteSliceToString(info.Driver[:])
	}
	return out
}

func copyMAC(m *MAC, hw net.HardwareAddr) bool {
	if len(hw) != len(m) {
		return false
	}
	copy(m[:], hw)
	return !m.IsZero()
}

// Route asks the kernel how it would send to addr: ErrNoRoute when it would not.
func (n *Net) Route(addr netip.Addr) (Route, error) {
	addr = addr.Unmap()
	list, err := n.nl.RouteGet(addr.AsSlice())
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.EACCES), errors.Is(err, unix.EINVAL):
		return Route{}, fmt.Errorf("look up route to %s: %w (%w)", addr, ErrNoRoute, err)
	case err != nil:
		return Route{}, fmt.Errorf("look up route to %s: %w", addr, err)
	case len(list) == 0:
		return Route{}, fmt.Errorf("look up route to %s: %w", addr, ErrNoRoute)
	}
	r := list[0]
	out := Route{Index: r.LinkIndex, Next: addr, Local: r.Type == unix.RTN_LOCAL}
	if src, ok := netip.AddrFromSlice(r.Src); ok {
		out.Source = src.Unmap()
	}
	if gw, ok := netip.AddrFromSlice(r.Gw); ok && !gw.IsUnspecified() {
		out.Next = gw.Unmap()
	} else if via, ok := r.Via.(*netlink.Via); ok && via != nil {
		if gw, ok := netip.AddrFromSlice(via.Addr); ok {
			out.Next = gw.Unmap()
		}
	}
	return out, nil
}

// Neighbours returns all that the kernel knows of its neighbours on link index (0 = on all links).
func (n *Net) Neighbours(index int) ([]Neighbour, error) {
	var out []Neighbour
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		list, err := n.nl.NeighList(index, family)
		for try := 0; errors.Is(err, netlink.ErrDumpInterrupted) && try < 5; try++ {
			list, err = n.nl.NeighList(index, family)
		}
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			return nil, fmt.Errorf("list neighbours: %w", err)
		}
		for i := range list {
			if nb, ok := neighbour(&list[i]); ok {
				out = append(out, nb)
			}
		}
	}
	return out, nil
}

func neighbour(e *netlink.Neigh) (Neighbour, bool) {
	addr, ok := netip.AddrFromSlice(e.IP)
	if !ok {
		return Neighbour{}, false
	}
	nb := Neighbour{Index: e.LinkIndex, Addr: addr.Unmap()}
	const (
		confirmed = netlink.NUD_REACHABLE | netlink.NUD_PERMANENT
		usable    = confirmed | netlink.NUD_STALE | netlink.NUD_DELAY | netlink.NUD_PROBE
	)
	if e.State&usable != 0 && copyMAC(&nb.MAC, e.HardwareAddr) {
		nb.Usable, nb.Confirmed = true, e.State&confirmed != 0
	} else {
		nb.MAC = MAC{}
	}
	return nb, true
}

// Poke makes the kernel resolve the next hop to addr, or confirm what it knows, by one UDP datagram to the discard port.
// It waits for nothing; an address that cannot be sent to is an error.
func (n *Net) Poke(addr netip.Addr) error {
	addr = addr.Unmap()
	const discard = 9
	var err error
	switch {
	case addr.Is4():
		err = unix.Sendto(n.udp4, []byte{0}, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, &unix.SockaddrInet4{Port: discard, Addr: addr.As4()})
	case n.udp6 < 0:
		err = unix.EAFNOSUPPORT
	default:
		err = unix.Sendto(n.udp6, []byte{0}, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, &unix.SockaddrInet6{Port: discard, Addr: addr.As16()})
	}
	if err != nil && !errors.Is(err, unix.EAGAIN) {
		return fmt.Errorf("poke %s: %w", addr, err)
	}
	return nil
}

// Resolve returns the route to addr and the hardware address of its next hop, which it makes the kernel ask for when
// it is not known. It waits until ctx ends: ErrNoNeighbour then. A local address has a zero MAC.
func (n *Net) Resolve(ctx context.Context, addr netip.Addr) (Route, MAC, error) {
	r, err := n.Route(addr)
	if err != nil || r.Local {
		return r, MAC{}, err
	}
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		list, err := n.Neighbours(r.Index)
		if err != nil {
			return r, MAC{}, err
		}
		for _, nb := range list {
			if nb.Addr == r.Next && nb.Usable {
				return r, nb.MAC, nil
			}
		}
		if err := n.Poke(addr); err != nil {
			return r, MAC{}, err
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return r, MAC{}, fmt.Errorf("resolve %s on link %d: %w", r.Next, r.Index, ErrNoNeighbour)
		case <-t.C:
		}
	}
}

// IsLocal says whether packets to addr stay on this host.
func (n *Net) IsLocal(addr netip.Addr) (bool, error) {
	r, err := n.Route(addr)
	if errors.Is(err, ErrNoRoute) {
		return false, nil
	}
	return r.Local, err
}

// IPLocalPortRange is the package's IPLocalPortRange in the view's namespace.
func (n *Net) IPLocalPortRange() (r PortRange, err error) {
	err = n.Do(func() (err error) {
		r, err = IPLocalPortRange()
		return err
	})
	return r, err
}

// IPLocalReservedPorts is the package's IPLocalReservedPorts in the view's namespace.
func (n *Net) IPLocalReservedPorts() (r []PortRange, err error) {
	err = n.Do(func() (err error) {
		r, err = IPLocalReservedPorts()
		return err
	})
	return r, err
}

// IPLocalPortRange returns the ports that the kernel gives to sockets that ask for any (ip_local_port_range).
func IPLocalPortRange() (PortRange, error) {
	const path = "/proc/sys/net/ipv4/ip_local_port_range"
	b, err := os.ReadFile(path)
	if err != nil {
		return PortRange{}, fmt.Errorf("read local port range: %w", err)
	}
	var r PortRange
	if _, err := fmt.Sscan(string(b), &r.First, &r.Last); err != nil || r.First > r.Last {
		return PortRange{}, fmt.Errorf("read local port range: %s holds %q", path, b)
	}
	return r, nil
}

// IPLocalReservedPorts returns the ports that the kernel leaves out of IPLocalPortRange (ip_local_reserved_ports).
func IPLocalReservedPorts() ([]PortRange, error) {
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_reserved_ports")
	if err != nil {
		return nil, fmt.Errorf("read reserved ports: %w", err)
	}
	return parsePorts(strings.TrimSpace(string(b)))
}
