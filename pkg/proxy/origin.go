// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
)

// maxProxyHeader bounds what a balancer may say before a connection's own bytes, its extensions included.
const maxProxyHeader = 4 << 10

var (
	errProxyHeader = errors.New("the connection does not begin with a valid PROXY header")
	proxyV1        = []byte("PROXY ")
	proxyV2        = []byte("\r\n\r\n\x00\r\nQUIT\n")
)

// proxiedConn is a connection from a balancer that tells the client's address in a PROXY header, before anything else. The
// header is read by whoever reads first, under the deadline for a request's head: no other connection waits for it.
type proxiedConn struct {
	net.Conn
	c    *clientConn
	rest []byte // read with the header
	done bool
	err  error
}

// Read reads what follows the header.
func (p *proxiedConn) Read(b []byte) (int, error) {
	if !p.done {
		p.done = true
		if p.err = p.header(); errors.Is(p.err, errProxyHeader) {
			p.c.s.metrics.badProxy.Inc()
			p.c.s.logger.Debug("client connection", "message", p.err.Error(), "balancer", p.c.address)
		}
	}
	if p.err != nil {
		return 0, p.err
	}
	if len(p.rest) > 0 {
		n := copy(b, p.rest)
		if p.rest = p.rest[n:]; len(p.rest) == 0 {
			p.rest = nil
		}
		return n, nil
	}
	return p.Conn.Read(b)
}

// CloseWrite closes the sending side.
func (p *proxiedConn) CloseWrite() error {
	if cw, ok := p.Conn.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return errors.ErrUnsupported
}

func (p *proxiedConn) header() error {
	buf := make([]byte, 0, 256)
	for {
		if len(buf) == cap(buf) {
			if len(buf) >= maxProxyHeader {
				return fmt.Errorf("%w: it is too long", errProxyHeader)
			}
			buf = append(make([]byte, 0, 2*cap(buf)), buf...)
		}
		n, err := p.Conn.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		src, used, bad := parseProxyHeader(buf)
		switch {
		case bad != nil:
			return bad
		case used > 0:
			if p.rest = buf[used:]; src.IsValid() {
				p.c.setOrigin(src)
			}
			return nil
		case err != nil:
			return err
		}
	}
}

// parseProxyHeader reads a header of version 1 or 2 from the beginning of a connection. used is 0 while more is needed; src is
// not valid where the balancer speaks for itself.
func parseProxyHeader(b []byte) (src netip.Addr, used int, err error) {
	switch {
	case bytes.HasPrefix(b, proxyV1):
		return parseProxyV1(b)
	case bytes.HasPrefix(b, proxyV2):
		return parseProxyV2(b)
	case bytes.HasPrefix(proxyV1, b) || bytes.HasPrefix(proxyV2, b):
		return src, 0, nil
	}
	return src, 0, errProxyHeader
}

func parseProxyV1(b []byte) (src netip.Addr, used int, err error) {
	const longest = 107
	end := bytes.Index(b, crlf)
	switch {
	case end < 0 && len(b) < longest:
		return src, 0, nil
	case end < 0 || end > longest-2:
		return src, 0, fmt.Errorf("%w: its line has no end", errProxyHeader)
	}
	used = end + 2
	words := bytes.Split(b[len(proxyV1):end], []byte(" "))
	if string(words[0]) == "UNKNOWN" {
		return src, used, nil
	}
	if len(words) != 5 || string(words[0]) != "TCP4" && string(words[0]) != "TCP6" {
		return src, 0, errProxyHeader
	}
	var addrs [2]netip.Addr
	for i := range addrs {
		a, err := netip.ParseAddr(string(words[1+i]))
		if err != nil || a.Zone() != "" || a.Is4() != (string(words[0]) == "TCP4") {
			return src, 0, fmt.Errorf("%w: bad address", errProxyHeader)
		}
		if port, ok := parseDecimal(words[3+i]); !ok || port > 65535 {
			return src, 0, fmt.Errorf("%w: bad port", errProxyHeader)
		}
		addrs[i] = a
	}
	return addrs[0].Unmap(), used, nil
}

func parseProxyV2(b []byte) (src netip.Addr, used int, err error) {
	const fixed = 16
	if len(b) < fixed {
		return src, 0, nil
	}
	command, family := b[12], b[13]
	body := int(binary.BigEndian.Uint16(b[14:16]))
	switch {
	case command != 0x20 && command != 0x21:
		return src, 0, fmt.Errorf("%w: version and command %#x", errProxyHeader, command)
	case fixed+body > maxProxyHeader:
		return src, 0, fmt.Errorf("%w: it is too long", errProxyHeader)
	case command == 0x21 && (family == 0x11 && body < 12 || family == 0x21 && body < 36):
		return src, 0, fmt.Errorf("%w: its addresses are cut off", errProxyHeader)
	case len(b) < fixed+body:
		return src, 0, nil
	}
	used = fixed + body
	if command == 0x21 {
		switch family {
		case 0x11:
			src = netip.AddrFrom4([4]byte(b[16:20]))
		case 0x21:
			src = netip.AddrFrom16([16]byte(b[16:32])).Unmap()
		}
	}
	return src, used, nil
}

// setOrigin makes the address the client's. The connection's other end stays the balancer.
func (c *clientConn) setOrigin(a netip.Addr) {
	c.origin = a.WithZone("")
	c.address = c.origin.String()
}

func within(list []netip.Prefix, a netip.Addr) bool {
	for _, p := range list {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// appendClient appends the client's address as backends are told it: the connection's, or, where that is a trusted proxy's, the
// last one in its X-Forwarded-For that no trusted proxy has. What stands before that is the client's own word.
func (ex *exchange) appendClient(b []byte) []byte {
	c, trusted := ex.client, ex.set.TrustedProxies
	if !within(trusted, c.origin) {
		return append(b, c.address...)
	}
	last := c.origin
	for i := len(ex.fields) - 1; i >= 0; i-- {
		if !is(ex.fields[i].name, "x-forwarded-for") {
			continue
		}
		for list, more := ex.fields[i].value, true; more; {
			var word []byte
			if at := bytes.LastIndexByte(list, ','); at >= 0 {
				word, list = list[at+1:], list[:at]
			} else {
				word, more = list, false
			}
			a, ok := forwardedAddr(trimSpace(word))
			if !ok {
				return last.AppendTo(b)
			}
			if last = a; !within(trusted, a) {
				return last.AppendTo(b)
			}
		}
	}
	return last.AppendTo(b)
}

// forwardedAddr reads an address as proxies write it: bare, or with a port.
func forwardedAddr(word []byte) (netip.Addr, bool) {
	if len(word) > 64 {
		return netip.Addr{}, false
	}
	text := string(word)
	a, err := netip.ParseAddr(text)
	if err != nil {
		ap, err := netip.ParseAddrPort(text)
		if err != nil {
			return a, false
		}
		a = ap.Addr()
	}
	return a.Unmap().WithZone(""), true
}
