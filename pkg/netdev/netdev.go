// SPDX-License-Identifier: Apache-2.0

// Package netdev reads the host's network: links, addresses, routes and neighbours, and tells when they change. It
// only reads and, for a neighbour that is not known, makes the kernel ask for it; it changes nothing.
//
// A Net is a view of the network namespace in which Open was called, whatever namespace its caller is in later. The
// package functions look at the namespace of the calling thread. Everything needs Linux but LocalAddrs and IsLocal.
package netdev

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
)

// Errors of this package.
var (
	// ErrNoLink: there is no link of that name or index.
	ErrNoLink = errors.New("no such network interface")
	// ErrNoRoute: the kernel has no route to the address.
	ErrNoRoute = errors.New("no route to address")
	// ErrNoNeighbour: the next hop did not answer ARP or neighbour discovery in time.
	ErrNoNeighbour = errors.New("next hop does not answer")
)

// MAC is a 48-bit hardware address; all zero means unknown.
type MAC [6]byte

// IsZero says whether the address is unknown.
func (m MAC) IsZero() bool { return m == MAC{} }

func (m MAC) String() string { return net.HardwareAddr(m[:]).String() }

// XDPMode says how an XDP program is attached.
type XDPMode uint8

// The modes, numbered as in the kernel's XDP_ATTACHED_* .
const (
	XDPNone XDPMode = iota
	XDPNative
	XDPGeneric
	XDPOffload
	XDPMulti // more than one of the others
)

func (m XDPMode) String() string {
	return [...]string{"none", "native", "generic", "offload", "multi", "unknown"}[min(m, 5)]
}

// Link is a network interface.
type Link struct {
	Index  int
	Name   string
	MAC    MAC
	MTU    int
	Kind   string // "device" for hardware, else the kernel's name: veth, bridge, vlan, bond, ...
	Driver string // "" when the driver does not say
	Up     bool   // administratively
	Parent int    // index of the lower link (vlan, ...) or of a veth's peer; 0 = none
	Master int    // index of the bridge or bond; 0 = none
	XDP    XDPMode
	XDPID  uint32 // id of the XDP program; 0 = none
}

// Route is how packets to one address leave.
type Route struct {
	Index  int        // of the link
	Source netip.Addr // that the kernel would choose
	Next   netip.Addr // next hop: the gateway, or the address itself
	Local  bool       // the address is this host's own
}

// Neighbour is what the kernel knows of a host on a link.
type Neighbour struct {
	Index     int // of the link
	Addr      netip.Addr
	MAC       MAC  // zero when not Usable
	Usable    bool // the kernel would send to MAC now
	Confirmed bool // and has heard of it lately
}

// ChangeKind says what may have changed.
type ChangeKind uint8

// The kinds of changes.
const (
	// ChangeResync: changes may have been missed, or the watch begins: read everything anew.
	ChangeResync ChangeKind = iota
	ChangeLink
	ChangeAddr
	ChangeNeighbour
	ChangeRoute
)

func (k ChangeKind) String() string {
	return [...]string{"resync", "link", "address", "neighbour", "route", "unknown"}[min(k, 5)]
}

// Change is a hint to look again; it says where. The receiver reads the state itself, as a change may be old.
type Change struct {
	Kind  ChangeKind
	Index int        // of the link; 0 = unknown
	Addr  netip.Addr // of ChangeNeighbour
}

// PortRange is an inclusive range of ports; the zero value is empty.
type PortRange struct {
	First, Last uint16
}

// Overlaps says whether the ranges share a port.
func (r PortRange) Overlaps(o PortRange) bool {
	return r != (PortRange{}) && o != (PortRange{}) && r.First <= o.Last && o.First <= r.Last
}

// Contains says whether all of o lies in r.
func (r PortRange) Contains(o PortRange) bool { return r.First <= o.First && o.Last <= r.Last }

func (r PortRange) String() string { return fmt.Sprintf("%d-%d", r.First, r.Last) }

// LocalAddrs returns the addresses of the host's interfaces.
func LocalAddrs() ([]netip.Addr, error) {
	list, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("list local addresses: %w", err)
	}
	addrs := make([]netip.Addr, 0, len(list))
	for _, a := range list {
		n, ok := a.(*net.IPNet)
		if !ok {
			continue
		}
		if addr, ok := netip.AddrFromSlice(n.IP); ok {
			addrs = append(addrs, addr.Unmap())
		}
	}
	return addrs, nil
}

// AddrSet is this host's addresses, read once for many questions.
type AddrSet map[netip.Addr]bool

// LocalSet returns LocalAddrs as a set.
func LocalSet() (AddrSet, error) {
	list, err := LocalAddrs()
	if err != nil {
		return nil, err
	}
	set := make(AddrSet, len(list))
	for _, a := range list {
		set[a.WithZone("")] = true
	}
	return set, nil
}

// Has says whether addr is an address of this host (loopback included).
func (s AddrSet) Has(addr netip.Addr) bool {
	addr = addr.Unmap().WithZone("")
	return addr.IsLoopback() || s[addr]
}
