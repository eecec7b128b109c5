// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// WatchBuffer is the receive buffer of Watch in bytes, about 10,000 changes.
const WatchBuffer = 4 << 20

// Watch calls fn for each change of links, addresses, neighbours and routes until ctx ends, from this goroutine. The
// first call is a ChangeResync, and so is the next one after the kernel dropped changes because the buffer (in bytes,
// 0 = WatchBuffer) was full. It returns nil when ctx ends.
func (n *Net) Watch(ctx context.Context, buffer int, fn func(Change)) error {
	if buffer == 0 {
		buffer = WatchBuffer
	}
	var f *os.File
	err := n.Do(func() (err error) {
		f, err = subscribe(buffer)
		return err
	})
	if err != nil {
		return fmt.Errorf("watch network: %w", err)
	}
	defer f.Close()
	stop := context.AfterFunc(ctx, func() { f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()

	fn(Change{Kind: ChangeResync})
	buf := make([]byte, 64<<10)
	for {
		k, err := f.Read(buf)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ENOBUFS):
			fn(Change{Kind: ChangeResync})
			continue
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fmt.Errorf("watch network: %w", err)
		}
		msgs, err := syscall.ParseNetlinkMessage(buf[:k])
		if err != nil {
			fn(Change{Kind: ChangeResync})
			continue
		}
		for i := range msgs {
			if c, ok := change(&msgs[i]); ok {
				fn(c)
			}
		}
	}
}

func subscribe(buffer int) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	// Beyond net.core.rmem_max only with CAP_NET_ADMIN; less than asked for only means an earlier resync.
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, buffer)
	}
	const groups = unix.RTMGRP_LINK | unix.RTMGRP_NEIGH | unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR |
		unix.RTMGRP_IPV4_ROUTE | unix.RTMGRP_IPV6_ROUTE
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("subscribe to netlink: %w", err)
	}
	return os.NewFile(uintptr(fd), "netlink"), nil
}

func change(m *syscall.NetlinkMessage) (Change, bool) {
	switch m.Header.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		return Change{Kind: ChangeLink, Index: indexAt(m.Data)}, true
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		return Change{Kind: ChangeAddr, Index: indexAt(m.Data)}, true
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		return Change{Kind: ChangeRoute}, true
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		if len(m.Data) < unix.SizeofNdMsg || (m.Data[0] != unix.AF_INET && m.Data[0] != unix.AF_INET6) {
			return Change{}, false // a bridge's forwarding table
		}
		e, err := netlink.NeighDeserialize(m.Data)
		if err != nil {
			return Change{Kind: ChangeResync}, true
		}
		addr, _ := netip.AddrFromSlice(e.IP)
		return Change{Kind: ChangeNeighbour, Index: e.LinkIndex, Addr: addr.Unmap()}, true
	case unix.NLMSG_OVERRUN:
		return Change{Kind: ChangeResync}, true
	}
	return Change{}, false
}

// indexAt reads ifi_index of struct ifinfomsg or ifa_index of struct ifaddrmsg: both at offset 4.
func indexAt(b []byte) int {
	if len(b) < 8 {
		return 0
	}
	return int(binary.NativeEndian.Uint32(b[4:]))
}
