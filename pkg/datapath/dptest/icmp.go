// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
)

// TooBig is the error that a router at from sends for frame: "fragmentation needed" or "packet too big", with the MTU
// given and the first quote bytes of the packet (0 = all of it).
func TooBig(fromMAC, toMAC MAC, from netip.Addr, mtu uint16, frame []byte, quote int) []byte {
	quoted := frame[14:]
	if quote > 0 && quote < len(quoted) {
		quoted = quoted[:quote]
	}
	_, src, _, _ := network(frame)
	eth := &layers.Ethernet{SrcMAC: fromMAC[:], DstMAC: toMAC[:], EthernetType: layers.EthernetTypeIPv4}
	buf := gopacket.NewSerializeBuffer()
	opt := gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}
	if src.Is4() {
		ip := &layers.IPv4{Version: 4, TTL: 60, Protocol: layers.IPProtocolICMPv4, SrcIP: from.AsSlice(), DstIP: src.AsSlice()}
		icmp := &layers.ICMPv4{TypeCode: layers.CreateICMPv4TypeCode(3, 4), Seq: mtu}
		must(gopacket.SerializeLayers(buf, opt, eth, ip, icmp, gopacket.Payload(quoted)))
		return buf.Bytes()
	}
	eth.EthernetType = layers.EthernetTypeIPv6
	ip := &layers.IPv6{Version: 6, HopLimit: 60, NextHeader: layers.IPProtocolICMPv6, SrcIP: from.AsSlice(), DstIP: src.AsSlice()}
	icmp := &layers.ICMPv6{TypeCode: layers.CreateICMPv6TypeCode(2, 0)}
	must(icmp.SetNetworkLayerForChecksum(ip))
	word := binary.BigEndian.AppendUint32(nil, uint32(mtu))
	must(gopacket.SerializeLayers(buf, opt, eth, ip, icmp, gopacket.Payload(append(word, quoted...))))
	return buf.Bytes()
}

// Quoted is an ICMP error read back: who it says it is from, whom it is for, and the tuple of the packet that it quotes.
type Quoted struct {
	FromMAC, ToMAC     MAC
	From, To           netip.Addr
	MTU                uint16
	InnerSrc, InnerDst netip.AddrPort
}

// ParseTooBig reads an error that TooBig made and checks its sums.
func ParseTooBig(frame []byte) (Quoted, error) {
	var q Quoted
	if err := Verify(frame); err != nil {
		return q, err
	}
	copy(q.ToMAC[:], frame)
	copy(q.FromMAC[:], frame[6:])
	l4, src, dst, proto := network(frame)
	if proto != 1 && proto != 58 {
		return q, fmt.Errorf("read ICMP: protocol is %d", proto)
	}
	q.From, q.To = src, dst
	q.MTU = binary.BigEndian.Uint16(frame[l4+6:])
	inner := append(make([]byte, 14), frame[l4+8:]...)
	in4, isrc, idst, _ := network(inner)
	q.InnerSrc = netip.AddrPortFrom(isrc, binary.BigEndian.Uint16(inner[in4:]))
	q.InnerDst = netip.AddrPortFrom(idst, binary.BigEndian.Uint16(inner[in4+2:]))
	return q, nil
}
