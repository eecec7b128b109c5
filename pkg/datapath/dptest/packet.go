// SPDX-License-Identifier: Apache-2.0

// Package dptest makes and checks packets for tests of the datapath.
//
// Packets are built with gopacket; checksums of what comes back are computed anew, by code that shares nothing with
// the datapath. The package knows no BPF: the tests hand it a function that runs a frame through a program.
package dptest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
)

// TCP flags, as in the header.
const (
	FIN = 1 << iota
	SYN
	RST
	PSH
	ACK
	URG
)

// MAC is an Ethernet address that can be compared.
type MAC [6]byte

// Packet is a TCP segment in an Ethernet frame. The zero values of the odd fields make a plain one.
type Packet struct {
	From, To MAC
	Src, Dst netip.AddrPort
	Seq, Ack uint32
	Flags    uint8
	Options  []layers.TCPOption
	Payload  []byte

	VLANs     []uint16 // tags, outermost first
	IPOptions int      // 32-bit words of IPv4 options
	Fragment  uint16   // IPv4 flags and offset field: 0x2000 = more fragments
	Extension []layers.IPProtocol
	BadIPSum  bool
	BadTCPSum bool
	Cut       int // bytes cut off the end of the frame
	Pad       int // bytes added to it
}

// Reply is a segment in the other direction, from whoever received p, with the flags given.
func (p Packet) Reply(flags uint8) Packet {
	return Packet{From: p.To, To: p.From, Src: p.Dst, Dst: p.Src, Seq: p.Ack, Ack: p.End(), Flags: flags}
}

// End is the sequence number after the segment.
func (p Packet) End() uint32 {
	end := p.Seq + uint32(len(p.Payload))
	if p.Flags&SYN != 0 {
		end++
	}
	if p.Flags&FIN != 0 {
		end++
	}
	return end
}

// Bytes builds the frame.
func (p Packet) Bytes() []byte {
	v4 := p.Src.Addr().Is4()
	eth := &layers.Ethernet{SrcMAC: net.HardwareAddr(p.From[:]), DstMAC: net.HardwareAddr(p.To[:])}
	network := layers.EthernetTypeIPv6
	if v4 {
		network = layers.EthernetTypeIPv4
	}
	stack := []gopacket.SerializableLayer{eth}
	eth.EthernetType = network
	for i, id := range p.VLANs {
		tag := &layers.Dot1Q{VLANIdentifier: id, Type: network}
		if i == 0 {
			eth.EthernetType = layers.EthernetTypeDot1Q
		} else {
			stack[i].(*layers.Dot1Q).Type = layers.EthernetTypeDot1Q
		}
		stack = append(stack, tag)
	}
	tcp := &layers.TCP{SrcPort: layers.TCPPort(p.Src.Port()), DstPort: layers.TCPPort(p.Dst.Port()), Seq: p.Seq, Ack: p.Ack,
		Window: 65535, Options: p.Options,
		FIN: p.Flags&FIN != 0, SYN: p.Flags&SYN != 0, RST: p.Flags&RST != 0, PSH: p.Flags&PSH != 0, ACK: p.Flags&ACK != 0, URG: p.Flags&URG != 0}
	if v4 {
		ip := &layers.IPv4{Version: 4, TTL: 64, Protocol: layers.IPProtocolTCP, SrcIP: p.Src.Addr().AsSlice(), DstIP: p.Dst.Addr().AsSlice(),
			Flags: layers.IPv4Flag(p.Fragment >> 13), FragOffset: p.Fragment & 0x1fff}
		if p.IPOptions > 0 { // router alert, then padding of no operations
			ip.Options = append(ip.Options, layers.IPv4Option{OptionType: 148, OptionLength: 4, OptionData: []byte{0, 0}})
			for range (p.IPOptions - 1) * 4 {
				ip.Options = append(ip.Options, layers.IPv4Option{OptionType: 1, OptionLength: 1})
			}
		}
		must(tcp.SetNetworkLayerForChecksum(ip))
		stack = append(stack, ip)
	} else {
		ip := &layers.IPv6{Version: 6, HopLimit: 64, NextHeader: layers.IPProtocolTCP, SrcIP: p.Src.Addr().AsSlice(), DstIP: p.Dst.Addr().AsSlice()}
		must(tcp.SetNetworkLayerForChecksum(ip))
		stack = append(stack, ip)
		if len(p.Extension) > 0 {
			ip.NextHeader = p.Extension[0]
			stack = append(stack, gopacket.Payload(extensions(p.Extension)))
		}
	}
	stack = append(stack, tcp, gopacket.Payload(p.Payload))
	buf := gopacket.NewSerializeBuffer()
	must(gopacket.SerializeLayers(buf, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}, stack...))
	frame := unpad(buf.Bytes(), 14+4*len(p.VLANs))
	if p.BadIPSum && v4 {
		frame[14+10] ^= 0x5a
	}
	if p.BadTCPSum {
		frame[len(frame)-len(p.Payload)-int(tcp.DataOffset)*4+16] ^= 0x5a
	}
	return append(frame[:len(frame)-p.Cut], make([]byte, p.Pad)...)
}

// unpad cuts off what is not of the IP packet that starts at l3.
func unpad(frame []byte, l3 int) []byte {
	n := len(frame)
	switch ip := frame[l3:]; ip[0] >> 4 {
	case 4:
		n = l3 + int(binary.BigEndian.Uint16(ip[2:]))
	case 6:
		n = l3 + 40 + int(binary.BigEndian.Uint16(ip[4:]))
	}
	return frame[:min(n, len(frame))]
}

// extensions makes a chain of eight-byte headers in front of TCP. A fragment header is one of a first fragment.
func extensions(chain []layers.IPProtocol) []byte {
	var out []byte
	for i := range chain {
		next := layers.IPProtocolTCP
		if i+1 < len(chain) {
			next = chain[i+1]
		}
		h := []byte{byte(next), 0, 1, 4, 0, 0, 0, 0}
		if chain[i] == layers.IPProtocolIPv6Fragment {
			h = []byte{byte(next), 0, 0, 1, 0, 0, 0, 9}
		}
		out = append(out, h...)
	}
	return out
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

// Parse reads a plain TCP frame back and checks every sum and length in it.
func Parse(frame []byte) (Packet, error) {
	var p Packet
	if err := Verify(frame); err != nil {
		return p, err
	}
	frame = unpad(frame, 14)
	copy(p.To[:], frame)
	copy(p.From[:], frame[6:])
	l4, src, dst, proto := network(frame)
	if proto != 6 {
		return p, fmt.Errorf("read TCP: protocol is %d", proto)
	}
	t := frame[l4:]
	p.Src = netip.AddrPortFrom(src, binary.BigEndian.Uint16(t))
	p.Dst = netip.AddrPortFrom(dst, binary.BigEndian.Uint16(t[2:]))
	p.Seq = binary.BigEndian.Uint32(t[4:])
	p.Ack = binary.BigEndian.Uint32(t[8:])
	p.Flags = t[13] & 0x3f
	p.Payload = t[int(t[12]>>4)*4:]
	return p, nil
}

// network finds the end of a plain IP header and what it says. A frame that is not IP has protocol 0.
func network(frame []byte) (l4 int, src, dst netip.Addr, proto byte) {
	ip := frame[14:]
	switch ip[0] >> 4 {
	case 4:
		src, _ = netip.AddrFromSlice(ip[12:16])
		dst, _ = netip.AddrFromSlice(ip[16:20])
		return 14 + int(ip[0]&15)*4, src, dst, ip[9]
	case 6:
		src, _ = netip.AddrFromSlice(ip[8:24])
		dst, _ = netip.AddrFromSlice(ip[24:40])
		return 14 + 40, src, dst, ip[6]
	}
	return 0, src, dst, 0
}

// Verify computes all sums of a frame anew: IPv4 header, TCP or ICMP, and, in an ICMP error, those of the packet that
// it quotes as far as they are quoted whole.
func Verify(frame []byte) error {
	if len(frame) < 14+20 {
		return errors.New("verify frame: too short")
	}
	frame = unpad(frame, 14)
	l4, src, dst, proto := network(frame)
	if proto == 0 {
		return errors.New("verify frame: not IP")
	}
	if src.Is4() {
		if s := sum(0, frame[14:l4]); s != 0xffff {
			return fmt.Errorf("verify IPv4 header: sum is %#04x", s)
		}
	}
	body := frame[l4:]
	if proto == 1 {
		if s := sum(0, body); s != 0xffff {
			return fmt.Errorf("verify ICMP: sum is %#04x", s)
		}
		return verifyQuoted(body[8:])
	}
	if s := sum(pseudo(src, dst, proto, len(body)), body); s != 0xffff {
		return fmt.Errorf("verify protocol %d: sum is %#04x", proto, s)
	}
	if proto == 58 {
		return verifyQuoted(body[8:])
	}
	return nil
}

func verifyQuoted(ip []byte) error {
	l4, src, dst, proto := network(append(make([]byte, 14), ip...))
	l4 -= 14
	if src.Is4() {
		if s := sum(0, ip[:l4]); s != 0xffff {
			return fmt.Errorf("verify quoted IPv4 header: sum is %#04x", s)
		}
	}
	whole := int(binary.BigEndian.Uint16(ip[2:])) == len(ip)
	if src.Is6() {
		whole = int(binary.BigEndian.Uint16(ip[4:])) == len(ip)-l4
	}
	if !whole {
		return nil
	}
	if s := sum(pseudo(src, dst, proto, len(ip)-l4), ip[l4:]); s != 0xffff {
		return fmt.Errorf("verify quoted TCP: sum is %#04x", s)
	}
	return nil
}

func pseudo(src, dst netip.Addr, proto byte, length int) uint32 {
	h := append(src.AsSlice(), dst.AsSlice()...)
	h = append(h, byte(length>>8), byte(length), 0, proto)
	return uint32(sum(0, h))
}

// sum is RFC 1071's, byte by byte; of intact data it is 0xffff.
func sum(start uint32, data []byte) uint16 {
	s := start
	for i, b := range data {
		if i%2 == 0 {
			s += uint32(b) << 8
		} else {
			s += uint32(b)
		}
		s = s&0xffff + s>>16
	}
	return uint16(s)
}
