// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Bounds of the drain after an answer that was given before the request had been read. Closing a socket that holds
// unread bytes resets the connection, and the client may lose the answer.
const (
	lingerTotal = 10 * time.Second
	lingerQuiet = 2 * time.Second
	lingerBytes = 64 << 20
	shedAtOnce  = 64 // connections that are being told to come back later
)

// listener hands out client connections up to the limit and survives a lack of file descriptors.
type listener struct {
	net.Listener
	s *Server
}

// Accept returns the next connection that may be served.
func (l *listener) Accept() (net.Conn, error) {
	delay := time.Duration(0)
	for {
		nc, err := l.Listener.Accept()
		if err != nil {
			if !passing(err) {
				return nil, err
			}
			// The connection stays in the backlog until others have ended.
			delay = min(max(2*delay, 5*time.Millisecond), time.Second)
			l.s.logger.Warn("accept connection", "error", err, "retry_in", delay)
			time.Sleep(delay)
			continue
		}
		delay = 0
		if n := l.s.connections.Add(1); n > l.s.maxConnections.Load() {
			l.s.connections.Add(-1)
			l.s.metrics.shed.Inc()
			l.s.shed(nc)
			continue
		}
		if c := l.s.newClientConn(nc); c != nil {
			return c, nil
		}
		l.s.connections.Add(-1)
		l.s.metrics.shed.Inc()
		l.s.shed(nc)
	}
}

// passing reports whether accept failed for a reason that goes away.
func passing(err error) bool {
	for _, e := range []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

var shedAnswer = func() []byte {
	body := errOverloadedConnections.append(nil)
	b := []byte("HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: ")
	b = appendInt(b, int64(len(body)))
	return append(append(b, "\r\n\r\n"...), body...)
}()

var errOverloadedConnections = &apiError{status: 503, kind: kindServer, code: "overloaded",
	message: "Too many connections. Try again later."}

// shed tells a client that there is no room, without a place among the connections.
func (s *Server) shed(nc net.Conn) {
	if s.o.ListenTLS != nil { // a handshake for it would cost more than the place
		nc.Close()
		return
	}
	if s.shedding.Add(1) > shedAtOnce {
		s.shedding.Add(-1)
		nc.Close()
		return
	}
	s.wait.Go(func() {
		defer s.shedding.Add(-1)
		defer nc.Close()
		_ = nc.SetDeadline(time.Now().Add(200 * time.Millisecond))
		if _, err := nc.Write(shedAnswer); err == nil {
			linger(nc, 200*time.Millisecond, 200*time.Millisecond)
		}
	})
}

// linger closes the sending side and reads until the client has closed its own, within bounds.
func linger(nc net.Conn, total, quiet time.Duration) {
	cw, ok := nc.(interface{ CloseWrite() error })
	if !ok || cw.CloseWrite() != nil {
		return
	}
	end := time.Now().Add(total)
	var buf [16 << 10]byte
	for n := 0; n < lingerBytes; {
		limit := time.Now().Add(quiet)
		if limit.After(end) {
			limit = end
		}
		if nc.SetReadDeadline(limit) != nil {
			return
		}
		k, err := nc.Read(buf[:])
		if err != nil {
			return
		}
		n += k
	}
}

// clientConn is a client's connection. The goroutine that serves it owns it; peerGone and kill may come from others.
type clientConn struct {
	net.Conn
	s        *Server
	ctl      syscall.RawConn
	watchID  uint64
	remote   netip.AddrPort
	local    netip.AddrPort
	origin   netip.Addr // the client's: remote's, or what a balancer told
	address  string     // the same as text
	balanced bool       // by a balancer that tells it

	lingers bool // unread bytes may be left when the connection is closed
	armed   time.Time
	closed  atomic.Bool

	mu   sync.Mutex
	gone bool
	ex   *exchange
}

// newClientConn returns nil if the client's address has as many connections as it may.
func (s *Server) newClientConn(nc net.Conn) *clientConn {
	c := &clientConn{Conn: nc, s: s, remote: addrPort(nc.RemoteAddr()), local: addrPort(nc.LocalAddr())}
	c.setOrigin(c.remote.Addr())
	if sc, ok := nc.(syscall.Conn); ok {
		if ctl, err := sc.SyscallConn(); err == nil {
			c.ctl = ctl
		}
	}
	ip, set := c.remote.Addr(), s.settings.Load()
	if c.balanced = within(set.ProxyProtocol, ip.WithZone("")); c.balanced {
		c.Conn = &proxiedConn{Conn: nc, c: c}
	}
	if s.o.ListenTLS != nil {
		c.Conn = tls.Server(c.Conn, s.o.ListenTLS) // the handshake comes with the first read, under its deadline
	}
	limit := set.Limits.MaxPerClient
	exempt := limit <= 0 || c.balanced || s.o.Ingress != nil && s.o.Ingress(ip)
	s.connMu.Lock()
	if !exempt && s.perIP[ip] >= limit {
		s.connMu.Unlock()
		return nil
	}
	s.conns[c] = struct{}{}
	s.perIP[ip]++
	s.connMu.Unlock()
	s.watch.add(c)
	return c
}

func addrPort(a net.Addr) netip.AddrPort {
	if t, ok := a.(*net.TCPAddr); ok {
		p := t.AddrPort()
		return netip.AddrPortFrom(p.Addr().Unmap(), p.Port())
	}
	return netip.AddrPort{}
}

// Write writes under a deadline that each write renews: a client that reads is never cut off.
func (c *clientConn) Write(p []byte) (int, error) {
	if limit := c.s.settings.Load().Timeouts.Write; limit > 0 {
		if now := time.Now(); now.Sub(c.armed) > limit/8 {
			c.armed = now
			if err := c.Conn.SetWriteDeadline(now.Add(limit)); err != nil {
				return 0, err
			}
		}
	}
	return c.Conn.Write(p)
}

// SetWriteDeadline does nothing: Write sets the deadlines.
func (c *clientConn) SetWriteDeadline(time.Time) error { return nil }

// SetDeadline sets the read deadline; see SetWriteDeadline.
func (c *clientConn) SetDeadline(t time.Time) error { return c.SetReadDeadline(t) }

// Close closes the connection, after a bounded drain if the client may still be sending.
func (c *clientConn) Close() error {
	if c.closed.Swap(true) {
		return net.ErrClosed
	}
	if c.lingers {
		total := lingerTotal
		if c.s.draining.Load() {
			total = time.Second
		}
		linger(c.Conn, total, lingerQuiet)
	}
	return c.release()
}

func (c *clientConn) release() error {
	c.s.connMu.Lock()
	_, mine := c.s.conns[c]
	delete(c.s.conns, c)
	if ip := c.remote.Addr(); mine {
		if c.s.perIP[ip]--; c.s.perIP[ip] <= 0 {
			delete(c.s.perIP, ip)
		}
	}
	c.s.connMu.Unlock()
	if !mine {
		return net.ErrClosed
	}
	c.s.watch.remove(c)
	err := c.Conn.Close()
	c.s.connections.Add(-1)
	return err
}

// kill ends the connection and what it is waiting for, from any goroutine.
func (c *clientConn) kill() {
	c.peerGone()
	c.Conn.Close()
}

// peerGone is called when the client has closed its end. Whatever is being done for it ends.
func (c *clientConn) peerGone() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gone = true
	if c.ex != nil {
		c.ex.interrupt()
	}
}

// begin makes the exchange the one that peerGone ends.
func (c *clientConn) begin(ex *exchange) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ex = ex
	if c.gone {
		ex.interrupt()
	}
}

func (c *clientConn) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ex = nil
}

var _ io.Closer = (*clientConn)(nil)
