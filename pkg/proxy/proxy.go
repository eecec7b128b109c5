// SPDX-License-Identifier: Apache-2.0

// Package proxy is the front end: it reads each request, finds out which model, session and how many tokens it is
// about, takes a ticket on a backend, and relays the answer as it comes.
//
// The client's side is a fasthttp.Server. The backends' side is this package's own: plain connections, one exchange at
// a time on each, with a strict reader of the answer's framing. That makes cancelling the close of a connection,
// keeps a connection whose last body was not read to its end out of the pool, and leaves retries to one place.
//
// Bodies are never changed. The request goes out with the target as it came, the header names in the client's spelling,
// and the client's Host (with https backends the backend's own, since their certificates and virtual hosts go by it).
// Hop-by-hop headers are dropped both ways; X-Forwarded-For is set to the client's address, which is the connection's unless
// that is a trusted proxy's; Forwarded and the other X-Forwarded headers are dropped. A target must be a path (no absolute form).
//
// A client that closes its sending side has left: what is done for it ends at once.
//
// An answer that breaks off in mid-stream is never made to look whole: an event stream gets one error event, and then
// the connection is closed without the last chunk.
package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/policy"
	"github.com/shunt-lb/shunt/pkg/prefix"
	"github.com/shunt-lb/shunt/pkg/request"
	"github.com/shunt-lb/shunt/pkg/session"
	"github.com/shunt-lb/shunt/pkg/tokens"
	"github.com/valyala/fasthttp"
)

// Limits bound what a client may send and hold. Zero fields take the defaults.
type Limits struct {
	MaxBody        int64 // bytes of a request's body; 32 MiB
	MaxHeader      int   // bytes of a request's or an answer's header; 64 KiB. Fixed at New: each open connection has a buffer of that size
	MaxConnections int   // client connections at a time; as many as file descriptors allow
	MaxPerClient   int   // connections of one client address, other shunts' excepted; no limit
	MinBodyRate    int   // bytes per second that a request's body must arrive with; 1 KiB
	BodyMemory     int64 // bytes of all buffered request bodies; 1 GiB
}

// Timeouts are the clocks. Zero fields take the defaults. There is none for a request as a whole.
type Timeouts struct {
	Connect    time.Duration // to a backend, TLS included; 5 s
	FirstByte  time.Duration // from the request's dispatch to the first byte of the answer's body (its head, if it is no event stream); 10 min
	Idle       time.Duration // between two bytes of an answer; 5 min
	Header     time.Duration // for a request's header to arrive; 10 s
	Body       time.Duration // in which MinBodyRate is measured; 10 s
	KeepAlive  time.Duration // a client connection may wait for its next request; 75 s
	Write      time.Duration // a client may take to accept a write; 2 min
	Heartbeat  time.Duration // a comment is sent in an event stream that was quiet for so long; off
	BackendUse time.Duration // a backend connection may be idle and used again; 4 s, as engines close theirs after 5
}

// Dynamic is what Update can change.
type Dynamic struct {
	Paths              []string // allow-list; empty: DefaultPaths. "*" stands for a segment, a last "**" for one or more
	Limits             Limits
	Timeouts           Timeouts
	Retries            int                 // attempts on further backends after the first; where none took a connection, any number
	RetryBudget        float64             // retries of what was sent, as a share of the requests; a fifth
	StripAuthorization bool                // do not pass the client's credentials on
	Identifier         *session.Identifier // nil: no sessions

	ProxyProtocol  []netip.Prefix // balancers whose connections begin with a PROXY header
	TrustedProxies []netip.Prefix // proxies whose X-Forwarded-For is believed

	Keys *Keys // what clients must show one of; nil: nothing
	// BackendKeys is what the backends of a pool are shown, by its name, instead of the client's own credentials.
	BackendKeys map[string]string
}

// Options of New. Fleet is required.
type Options struct {
	Dynamic
	Fleet   *fleet.Fleet
	Counter *tokens.Counter // nil: prompts count as 0 tokens
	// Family names the family of models whose chat template frames a pool's prompts. nil: it goes by the model's name.
	Family func(pool, model string) request.Family
	// Calibration relates counts to the engines' own. nil: counts are taken as they are.
	Calibration Calibration
	Tracker     *session.Tracker // nil: sessions have no home
	Index       *prefix.Index    // the fleet's, told what engines report of their caches; nil: nobody is told
	Pins        *session.Pins    // nil: no steering
	// Needs says what a pool's policy must know of a request; nil: everything.
	Needs func(pool string) policy.Needs
	// TLS is the base of the configuration for https backends.
	TLS *tls.Config
	// ListenTLS makes the listeners speak TLS. nil: they do not.
	ListenTLS *tls.Config

	Metrics   prometheus.Registerer // nil: not registered
	AccessLog func(*Record)         // called at each request's end; must not keep the record
	Logger    *slog.Logger
	// Ingress reports whether connections from the address were steered here by another shunt.
	Ingress func(netip.Addr) bool
	// Report is told how each attempt ended, for passive health. 429 and 503 are OutcomeBusy,
	// 500, 502 and 504 OutcomeUpstreamError, and answers of any other status are OK.
	// OutcomeClientGone and OutcomeLocalFault say nothing of the backend. What asks for no work, like a list of models, is
	// reported only where it got no answer.
	Report func(*fleet.Ticket, Outcome)
	// PeerInfo returns the JSON of GET /.well-known/shunt. nil: the path is not served.
	PeerInfo func() []byte
	// OnProbe is told of a shunt that asked there and means to steer to us.
	OnProbe func(remote netip.Addr)
}

// Calibration learns what the engines of a pool count for what the Counter counts. The model is one that the pool lists, or
// "other". It must be safe for concurrent use.
type Calibration interface {
	// Scale returns a counted prompt in the model's own tokens.
	Scale(pool, model string, counted int64) int64
	// Observe is told what an engine reported of a prompt that was counted whole, with no part of it estimated.
	Observe(pool, model string, counted int64, u tokens.Usage)
}

var (
	errNoFleet = errors.New("no fleet")
	errShut    = errors.New("server was shut down")
)

// Server is the front end.
type Server struct {
	o          Options
	http       *fasthttp.Server
	logger     *slog.Logger
	metrics    *metrics
	upstreams  *upstreams
	watch      *watcher
	settings   atomic.Pointer[settings]
	exchanges  sync.Pool
	budget     retryBudget
	bodyMemory atomic.Int64
	draining   atomic.Bool

	connections    atomic.Int64
	maxConnections atomic.Int64
	shedding       atomic.Int64

	connMu sync.Mutex
	conns  map[*clientConn]struct{}
	perIP  map[netip.Addr]int

	wait sync.WaitGroup
	stop chan struct{}
	once sync.Once

	fault func(piece []byte) // tests make the meter fail with it
}

// settings is the part of the options that a reload replaces as a whole.
type settings struct {
	Dynamic
	paths *allowList
}

// New returns a server that does not listen yet. It starts a goroutine or two, which Shutdown ends.
func New(o Options) (*Server, error) {
	if o.Fleet == nil {
		return nil, fmt.Errorf("make proxy: %w", errNoFleet)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Server{o: o, logger: o.Logger, conns: map[*clientConn]struct{}{}, perIP: map[netip.Addr]int{}, stop: make(chan struct{})}
	s.upstreams = &upstreams{tls: o.TLS, all: map[*fleet.Backend]*upstream{}}
	s.exchanges.New = func() any { return newExchange(s) }
	s.budget.init()
	if err := s.Update(o.Dynamic); err != nil {
		return nil, err
	}
	var err error
	if s.metrics, err = newMetrics(o.Metrics, s); err != nil {
		return nil, err
	}
	if s.watch, err = newWatcher(); err != nil {
		return nil, fmt.Errorf("watch client connections: %w", err)
	}
	set := s.settings.Load()
	s.http = &fasthttp.Server{
		Handler:                       s.handle,
		ErrorHandler:                  s.handleError,
		HeaderReceived:                s.headerReceived,
		ExpectHandler:                 s.expect,
		Logger:                        quietLogger{s.logger},
		ReadBufferSize:                set.Limits.MaxHeader,
		WriteBufferSize:               16 << 10,
		ReadTimeout:                   set.Timeouts.Header,
		IdleTimeout:                   set.Timeouts.KeepAlive,
		MaxRequestBodySize:            math.MaxInt,
		Concurrency:                   1 << 30,
		StreamRequestBody:             true,
		DisablePreParseMultipartForm:  true,
		DisableHeaderNamesNormalizing: true,
		NoDefaultServerHeader:         true,
		NoDefaultContentType:          true,
		SecureErrorLogMessage:         true,
		CloseOnShutdown:               true,
		LazyRequestTime:               true,
	}
	s.wait.Go(s.prune)
	return s, nil
}

// quietLogger takes fasthttp's messages, which are about single client connections.
type quietLogger struct{ *slog.Logger }

func (l quietLogger) Printf(format string, args ...any) {
	l.Debug("client connection", "message", fmt.Sprintf(format, args...))
}

// Update replaces the settings for requests that come from now on. Limits.MaxHeader, Timeouts.Header and
// Timeouts.KeepAlive stay as they were.
func (s *Server) Update(d Dynamic) error {
	paths, err := newAllowList(d.Paths)
	if err != nil {
		return err
	}
	def(&d.Limits.MaxBody, 32<<20)
	def(&d.Limits.MaxHeader, 64<<10)
	def(&d.Limits.MaxConnections, connectionLimit())
	def(&d.Limits.MinBodyRate, 1<<10)
	def(&d.Limits.BodyMemory, 1<<30)
	def(&d.Timeouts.Connect, 5*time.Second)
	def(&d.Timeouts.FirstByte, 10*time.Minute)
	def(&d.Timeouts.Idle, 5*time.Minute)
	def(&d.Timeouts.Header, 10*time.Second)
	def(&d.Timeouts.Body, 10*time.Second)
	def(&d.Timeouts.KeepAlive, 75*time.Second)
	def(&d.Timeouts.Write, 2*time.Minute)
	def(&d.Timeouts.BackendUse, 4*time.Second)
	if d.RetryBudget <= 0 {
		d.RetryBudget = retryShare
	}
	s.budget.set(d.RetryBudget)
	s.settings.Store(&settings{Dynamic: d, paths: paths})
	s.upstreams.idleLimit.Store(int64(d.Timeouts.BackendUse))
	s.maxConnections.Store(int64(d.Limits.MaxConnections))
	return nil
}

func def[T int | int64 | time.Duration](v *T, d T) {
	if *v <= 0 {
		*v = d
	}
}

// Serve serves the listener's connections until Shutdown, and closes it. It may be called for several listeners.
func (s *Server) Serve(ln net.Listener) error {
	select {
	case <-s.stop:
		return fmt.Errorf("serve %s: %w", ln.Addr(), errShut)
	default:
	}
	if err := s.http.Serve(&listener{Listener: ln, s: s}); err != nil {
		return fmt.Errorf("serve %s: %w", ln.Addr(), err)
	}
	return nil
}

// Drain asks clients to reconnect elsewhere: answers carry Connection: close from now on. The listeners stay open.
func (s *Server) Drain() { s.draining.Store(true) }

// Connections returns the open client connections.
func (s *Server) Connections() int { return int(s.connections.Load()) }

// Shutdown closes the listeners and waits for the requests in flight. When ctx ends first they are cut off, and its
// error is returned.
func (s *Server) Shutdown(ctx context.Context) error {
	s.draining.Store(true)
	err := s.http.ShutdownWithContext(ctx)
	s.idle(ctx) // fasthttp does not wait for all of them
	if ctx.Err() != nil {
		for _, c := range s.openConns() {
			c.kill()
		}
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		s.idle(last) // what was cut off gives its tickets back
		cancel()
	}
	s.once.Do(func() {
		close(s.stop)
		s.watch.close()
	})
	s.wait.Wait()
	s.upstreams.closeIdle()
	if err != nil {
		return fmt.Errorf("shut the front end down: %w", err)
	}
	return nil
}

// idle waits until no client connection is left, or ctx ends.
func (s *Server) idle(ctx context.Context) {
	for s.connections.Load() > 0 {
		select {
		case <-ctx.Done():
			return
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func (s *Server) openConns() []*clientConn {
	s.connMu.Lock()
	defer s.connMu.Unlock()
	list := make([]*clientConn, 0, len(s.conns))
	for c := range s.conns {
		list = append(list, c)
	}
	return list
}

// prune closes backend connections that have been idle too long, and forgets backends that left.
func (s *Server) prune() {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-s.stop:
			return
		case now := <-tick.C:
			s.upstreams.prune(now)
		}
	}
}
