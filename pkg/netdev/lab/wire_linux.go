// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"runtime"
	"unsafe"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// setDefaults brings lo up and takes the delays out of IPv6, in the current namespace.
func setDefaults() error {
	// A kernel without IPv6 has no such files; adding a v6 address says so then.
	for _, key := range []string{"accept_dad", "accept_ra"} {
		for _, conf := range []string{"all", "default"} {
			_ = sysctl("net/ipv6/conf/"+conf+"/"+key, "0")
		}
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return nil
}

// Bridge makes a bridge in the namespace, up, without spanning tree and without multicast snooping.
func (n *Namespace) Bridge(name string) error {
	return n.Do(func() error {
		la := netlink.NewLinkAttrs()
		la.Name = name
		off := false
		if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: la, MulticastSnooping: &off}); err != nil {
			return fmt.Errorf("make bridge %s: %w%s", name, err, hint(err))
		}
		return setUp(name)
	})
}

// Veth makes a veth pair, one end in each namespace, both up.
func Veth(a *Namespace, aName string, b *Namespace, bName string) error {
	err := a.Do(func() error {
		la := netlink.NewLinkAttrs()
		la.Name = aName
		v := netlink.NewVeth(la)
		v.PeerName, v.PeerNamespace = bName, netlink.NsFd(int(b.handle))
		if err := netlink.LinkAdd(v); err != nil {
			return fmt.Errorf("make veth pair %s - %s: %w%s", aName, bName, err, hint(err))
		}
		return setUp(aName)
	})
	if err != nil {
		return err
	}
	return b.Do(func() error { return setUp(bName) })
}

// Enslave makes link a port of bridge.
func (n *Namespace) Enslave(link, bridge string) error {
	return n.onLink(link, func(l netlink.Link) error {
		br, err := netlink.LinkByName(bridge)
		if err != nil {
			return fmt.Errorf("find bridge %s: %w", bridge, err)
		}
		return netlink.LinkSetMaster(l, br)
	})
}

// AddAddr gives link an address (IPv6: without duplicate detection, usable at once).
func (n *Namespace) AddAddr(link string, p netip.Prefix) error {
	return n.onLink(link, func(l netlink.Link) error {
		a := &netlink.Addr{IPNet: ipNet(p)}
		if p.Addr().Is6() {
			a.Flags = unix.IFA_F_NODAD
		}
		return netlink.AddrAdd(l, a)
	})
}

// AddVIP gives link an address that the host does not use as a source by itself (of IPv6: a deprecated one).
func (n *Namespace) AddVIP(link string, vip netip.Addr) error {
	if vip.Is4() {
		return n.AddAddr(link, netip.PrefixFrom(vip, vip.BitLen()))
	}
	return n.onLink(link, func(l netlink.Link) error {
		const forever = math.MaxUint32
		return netlink.AddrAdd(l, &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(vip, vip.BitLen())), Flags: unix.IFA_F_NODAD, ValidLft: forever})
	})
}

// DelAddr takes an address away.
func (n *Namespace) DelAddr(link string, p netip.Prefix) error {
	return n.onLink(link, func(l netlink.Link) error { return netlink.AddrDel(l, &netlink.Addr{IPNet: ipNet(p)}) })
}

// DefaultRoute adds a default route of the gateway's family.
func (n *Namespace) DefaultRoute(gw netip.Addr) error {
	return n.Do(func() error {
		dst := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		if gw.Is6() {
			dst = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
		if err := netlink.RouteAdd(&netlink.Route{Dst: ipNet(dst), Gw: gw.AsSlice()}); err != nil {
			return fmt.Errorf("add default route via %s: %w", gw, err)
		}
		return nil
	})
}

// SetMAC changes the link's hardware address.
func (n *Namespace) SetMAC(link string, mac net.HardwareAddr) error {
	return n.onLink(link, func(l netlink.Link) error { return netlink.LinkSetHardwareAddr(l, mac) })
}

// SetMTU changes the link's MTU.
func (n *Namespace) SetMTU(link string, mtu int) error {
	return n.onLink(link, func(l netlink.Link) error { return netlink.LinkSetMTU(l, mtu) })
}

// Delete removes the link (of a veth pair: both ends).
func (n *Namespace) Delete(link string) error {
	return n.onLink(link, netlink.LinkDel)
}

// FlushNeighbours forgets all that link has learnt of its neighbours' hardware addresses.
func (n *Namespace) FlushNeighbours(link string) error {
	return n.onLink(link, func(l netlink.Link) error {
		list, err := netlink.NeighList(l.Attrs().Index, 0)
		if err != nil {
			return err
		}
		for _, e := range list {
			if e.State&netlink.NUD_NOARP == 0 {
				if err := netlink.NeighDel(&e); err != nil && !errors.Is(err, unix.ENOENT) {
					return err
				}
			}
		}
		return nil
	})
}

// Offload does what `ethtool -K LINK tx on|off gro on|off` does: transmit checksums and receive aggregation.
func (n *Namespace) Offload(link string, tx, gro bool) error {
	return n.Do(func() error {
		if err := ethtoolSet(link, unix.ETHTOOL_STXCSUM, tx); err != nil {
			return fmt.Errorf("set tx checksum offload of %s: %w%s", link, err, hint(err))
		}
		if err := ethtoolSet(link, unix.ETHTOOL_SGRO, gro); err != nil {
			return fmt.Errorf("set gro of %s: %w%s", link, err, hint(err))
		}
		return nil
	})
}

func ethtoolSet(link string, cmd uint32, on bool) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	value := struct{ cmd, data uint32 }{cmd: cmd}
	if on {
		value.data = 1
	}
	var req struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}
	if copy(req.name[:unix.IFNAMSIZ-1], link) < len(link) {
		return unix.ENAMETOOLONG
	}
	req.data = unsafe.Pointer(&value)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req)))
	runtime.KeepAlive(&value)
	if errno != 0 {
		return errno
	}
	return nil
}

// Pfifo gives link a root queue of limit packets.
func (n *Namespace) Pfifo(link string, limit uint32) error {
	return n.onLink(link, func(l netlink.Link) error {
		req := nl.NewNetlinkRequest(unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_REPLACE|unix.NLM_F_ACK)
		req.AddData(&nl.TcMsg{
			Family:  nl.FAMILY_ALL,
			Ifindex: int32(l.Attrs().Index),
			Parent:  netlink.HANDLE_ROOT,
		})
		req.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated("pfifo")))
		req.AddData(nl.NewRtAttr(nl.TCA_OPTIONS, nl.Uint32Attr(limit)))
		_, err := req.Execute(unix.NETLINK_ROUTE, 0)
		return err
	})
}

func (n *Namespace) onLink(name string, fn func(netlink.Link) error) error {
	return n.Do(func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return fmt.Errorf("find link %s: %w", name, err)
		}
		if err := fn(l); err != nil {
			return fmt.Errorf("set up link %s: %w%s", name, err, hint(err))
		}
		return nil
	})
}

// SetUp brings the link up, SetDown down.
func (n *Namespace) SetUp(link string) error { return n.onLink(link, netlink.LinkSetUp) }

// SetDown brings the link down.
func (n *Namespace) SetDown(link string) error { return n.onLink(link, netlink.LinkSetDown) }

func setUp(name string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find link %s: %w", name, err)
	}
	if err := netlink.LinkSetUp(l); err != nil {
		return fmt.Errorf("set link %s up: %w", name, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
