// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Prober sends bare TCP segments with any source address. It needs CAP_NET_RAW.
type Prober struct{ v4, v6 int } // -1 without IPv6

// Prober opens the sockets in the view's namespace.
func (n *Net) Prober() (*Prober, error) {
	p := &Prober{-1, -1}
	err := n.Do(func() (err error) {
		const raw = unix.SOCK_RAW | unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK
		if p.v4, err = unix.Socket(unix.AF_INET, raw, unix.IPPROTO_RAW); err != nil {
			return fmt.Errorf("open raw socket: %w", err)
		}
		if p.v6, err = unix.Socket(unix.AF_INET6, raw, unix.IPPROTO_RAW); err != nil {
			p.v6 = -1
		}
		return nil
	})
	if err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// Close closes the sockets.
func (p *Prober) Close() {
	for _, fd := range []int{p.v4, p.v6} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	p.v4, p.v6 = -1, -1
}

// ACK sends an acknowledgement without data from src to dst. When seq is before what dst expects next, dst answers with
// its own exact numbers (RFC 9293, 3.10.7.4). It does not wait; a full queue loses the segment.
func (p *Prober) ACK(src, dst netip.AddrPort, seq, ack uint32) error {
	pkt, to := segment(src, dst, seq, ack)
	fd := p.v4
	if dst.Addr().Is6() {
		fd = p.v6
	}
	if fd < 0 {
		return fmt.Errorf("probe %s: %w", dst, unix.EAFNOSUPPORT)
	}
	if err := unix.Sendto(fd, pkt, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, to); err != nil && !errors.Is(err, unix.EAGAIN) {
		return fmt.Errorf("probe %s: %w", dst, err)
	}
	return nil
}

// segment is an ACK with its IP header.
func segment(src, dst netip.AddrPort, seq, ack uint32) ([]byte, unix.Sockaddr) {
	t := binary.BigEndian.AppendUint16(nil, src.Port())
	t = binary.BigEndian.AppendUint16(t, dst.Port())
	t = binary.BigEndian.AppendUint32(t, seq)
	t = binary.BigEndian.AppendUint32(t, ack)
	t = append(t, 5<<4, 0x10, 0xff, 0xff, 0, 0, 0, 0)
	pseudo := append(src.Addr().AsSlice(), dst.Addr().AsSlice()...)
	pseudo = append(pseudo, 0, 0, 0, byte(len(t)), 0, 0, 0, unix.IPPROTO_TCP)
	binary.BigEndian.PutUint16(t[16:], ^onesSum(append(pseudo, t...)))
	if dst.Addr().Is4() {
		ip := make([]byte, 20, 40) // the kernel fills in length, id and checksum
		ip[0], ip[6], ip[8], ip[9] = 0x45, 0x40, 64, unix.IPPROTO_TCP
		copy(ip[12:], src.Addr().AsSlice())
		copy(ip[16:], dst.Addr().AsSlice())
		return append(ip, t...), &unix.SockaddrInet4{Addr: dst.Addr().As4()}
	}
	ip := make([]byte, 40, 60)
	ip[0], ip[5], ip[6], ip[7] = 0x60, byte(len(t)), unix.IPPROTO_TCP, 64
	copy(ip[8:], src.Addr().AsSlice())
	copy(ip[24:], dst.Addr().AsSlice())
	return append(ip, t...), &unix.SockaddrInet6{Addr: dst.Addr().As16()}
}

// onesSum is RFC 1071's sum of an even number of bytes.
func onesSum(b []byte) uint16 {
	s := uint32(0)
	for i := 0; i+1 < len(b); i += 2 {
		s += uint32(b[i])<<8 | uint32(b[i+1])
		s = s&0xffff + s>>16
	}
	return uint16(s)
}
