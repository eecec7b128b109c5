// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

const (
	upBufSize      = 16 << 10
	upBufKeep      = 64 << 10 // a larger buffer is not kept with an idle connection
	maxIdlePerHost = 1024
)

// upConn is a connection to a backend. It belongs to one exchange at a time; only raw may be closed by another
// goroutine, which ends the owner's reads and writes.
type upConn struct {
	nc    net.Conn // what is read and written: the socket, or TLS over it
	raw   net.Conn // the socket
	ctl   syscall.RawConn
	probe func(fd uintptr)
	alive bool // result of probe
	peek  [1]byte

	buf    []byte
	r, w   int
	headAt int   // where the head of the answer begins, until the body is read
	got    int64 // bytes read since the request went out
	reused bool
	spent  bool // not to be used again after this answer

	idleLimit time.Duration // between bytes of the body; 0 while the clock of the first byte runs
	beat      time.Duration // a read that waits so long ends with errBeat; 0 = never
	deadline  time.Time     // the end of the wait for the first byte
	armed     time.Time
	heard     time.Time // of the last byte, where beats are asked for
	idleSince time.Time
}

// more reads once into the free end of the buffer, which the caller provides.
func (c *upConn) more() error {
	if c.beat > 0 {
		return c.moreOrBeat()
	}
	if c.idleLimit > 0 {
		// Renewing at every read would cost a timer each; an eighth of the limit is precise enough.
		if now := time.Now(); now.Sub(c.armed) > c.idleLimit/8 {
			c.armed = now
			if err := c.nc.SetReadDeadline(now.Add(c.idleLimit)); err != nil {
				return err
			}
		}
	}
	n, err := c.nc.Read(c.buf[c.w:])
	c.w += n
	c.got += int64(n)
	if n > 0 {
		return nil // an error comes again at the next read
	}
	return err
}

// errBeat ends a wait that is long, but not too long. Nothing was read, and the read may be tried again.
var errBeat = errors.New("nothing came for a while")

// moreOrBeat is more with an interruption at each beat.
func (c *upConn) moreOrBeat() error {
	now := time.Now()
	end := c.deadline
	if c.idleLimit > 0 {
		if c.heard.IsZero() {
			c.heard = now
		}
		end = c.heard.Add(c.idleLimit)
	}
	limit := now.Add(c.beat)
	last := !limit.Before(end)
	if last {
		limit = end
	}
	if err := c.nc.SetReadDeadline(limit); err != nil {
		return err
	}
	n, err := c.nc.Read(c.buf[c.w:])
	c.w += n
	c.got += int64(n)
	switch {
	case n > 0:
		c.heard = time.Now()
		return nil
	case isTimeout(err) && !last:
		return errBeat
	}
	return err
}

// upstream is the connections to one backend instance.
type upstream struct {
	backend *fleet.Backend
	address string // host:port
	host    []byte // Host header instead of the client's; nil for plain HTTP
	prefix  string // path before every target
	tls     *tls.Config

	mu   sync.Mutex
	idle []*upConn
}

// upstreams holds the connection pools of all backends.
type upstreams struct {
	dialer    net.Dialer
	tls       *tls.Config
	idleLimit atomic.Int64 // ns

	mu  sync.RWMutex
	all map[*fleet.Backend]*upstream
}

func (u *upstreams) get(b *fleet.Backend) (*upstream, error) {
	u.mu.RLock()
	up := u.all[b]
	u.mu.RUnlock()
	if up != nil {
		return up, nil
	}
	up, err := u.make(b)
	if err != nil {
		return nil, err
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if was := u.all[b]; was != nil {
		return was, nil
	}
	u.all[b] = up
	return up, nil
}

func (u *upstreams) make(b *fleet.Backend) (*upstream, error) {
	url := b.URL()
	up := &upstream{backend: b, prefix: strings.TrimSuffix(url.EscapedPath(), "/")}
	port := url.Port()
	switch url.Scheme {
	case "http":
		if port == "" {
			port = "80"
		}
	case "https":
		if port == "" {
			port = "443"
		}
		up.tls = &tls.Config{MinVersion: tls.VersionTLS12}
		if u.tls != nil {
			up.tls = u.tls.Clone()
		}
		up.tls.NextProtos = []string{"http/1.1"}
		if up.tls.ServerName == "" {
			up.tls.ServerName = url.Hostname()
		}
		up.host = []byte(url.Host)
	default:
		return nil, fmt.Errorf("connect to backend %s: scheme %q is not http or https", b.Name(), url.Scheme)
	}
	up.address = net.JoinHostPort(url.Hostname(), port)
	return up, nil
}

// take returns an idle connection that is still good, or nil.
func (u *upstream) take(limit time.Duration) *upConn {
	for {
		u.mu.Lock()
		n := len(u.idle)
		if n == 0 {
			u.mu.Unlock()
			return nil
		}
		c := u.idle[n-1]
		u.idle[n-1] = nil
		u.idle = u.idle[:n-1]
		u.mu.Unlock()
		if time.Since(c.idleSince) < limit && c.usable() {
			c.reused = true
			return c
		}
		c.close()
	}
}

// usable asks the socket whether the backend has closed it or sent something that nobody asked for. Under TLS a
// record may lie there rightly (session tickets), so only an end is looked for, by the read that follows.
func (c *upConn) usable() bool {
	if c.ctl == nil {
		return true
	}
	c.alive = false
	if err := c.ctl.Control(c.probe); err != nil {
		return false
	}
	return c.alive
}

// put keeps a connection whose last answer was read to its end.
func (u *upstream) put(c *upConn) {
	if c.spent || c.r != c.w || u.backend.Gone() {
		c.close()
		return
	}
	c.r, c.w = 0, 0
	if len(c.buf) > upBufKeep {
		c.buf = make([]byte, upBufSize)
	}
	c.idleSince = time.Now()
	u.mu.Lock()
	if len(u.idle) < maxIdlePerHost {
		u.idle = append(u.idle, c)
		c = nil
	}
	u.mu.Unlock()
	if c != nil {
		c.close()
	}
}

// prune closes what has been idle for too long; everything with limit 0.
func (u *upstream) prune(now time.Time, limit time.Duration) {
	u.mu.Lock()
	n := 0
	for n < len(u.idle) && now.Sub(u.idle[n].idleSince) >= limit {
		n++
	}
	old := append([]*upConn(nil), u.idle[:n]...)
	rest := copy(u.idle, u.idle[n:])
	clear(u.idle[rest:])
	u.idle = u.idle[:rest]
	u.mu.Unlock()
	for _, c := range old {
		c.close()
	}
}

func (u *upstreams) prune(now time.Time) {
	u.mu.Lock()
	list := make([]*upstream, 0, len(u.all))
	for b, up := range u.all {
		list = append(list, up)
		if b.Gone() {
			delete(u.all, b)
		}
	}
	u.mu.Unlock()
	for _, up := range list {
		limit := time.Duration(u.idleLimit.Load())
		if up.backend.Gone() {
			limit = 0
		}
		up.prune(now, limit)
	}
}

func (u *upstreams) closeIdle() {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, up := range u.all {
		up.prune(time.Now(), 0)
	}
}

// dial opens a connection. Names are resolved anew each time, both address families are tried, and nothing is cached:
// a backend that moved is found at its new address by the next connection.
func (u *upstreams) dial(ctx context.Context, up *upstream) (*upConn, error) {
	raw, err := u.dialer.DialContext(ctx, "tcp", up.address)
	if err != nil {
		return nil, err
	}
	c := &upConn{nc: raw, raw: raw, buf: make([]byte, upBufSize)}
	if up.tls != nil {
		t := tls.Client(raw, up.tls)
		if err := t.HandshakeContext(ctx); err != nil {
			raw.Close()
			return nil, fmt.Errorf("tls handshake: %w", err)
		}
		c.nc = t
		return c, nil
	}
	if sc, ok := raw.(syscall.Conn); ok {
		if ctl, err := sc.SyscallConn(); err == nil {
			c.ctl = ctl
			c.probe = func(fd uintptr) { c.alive = socketQuiet(fd, &c.peek) }
		}
	}
	return c, nil
}

// close ends the connection at once, without a farewell that could block.
func (c *upConn) close() { c.raw.Close() }

// arm sets both deadlines for sending a request and waiting for the answer's first byte.
func (c *upConn) arm(firstByte time.Duration) error {
	c.idleLimit, c.got, c.spent = 0, 0, false
	c.beat, c.heard = 0, time.Time{}
	c.deadline = time.Now().Add(firstByte)
	return c.nc.SetDeadline(c.deadline)
}

// flowing switches from the first byte's clock to the one between bytes.
func (c *upConn) flowing(idle time.Duration) {
	if c.idleLimit == 0 {
		c.idleLimit = idle
		c.armed = time.Time{}
	}
}

var errNoConnection = errors.New("connect")
