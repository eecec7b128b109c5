// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// ServerOptions describe one simulated server.
type ServerOptions struct {
	Engine       Options
	Name         string        // said in answers (header x-sim-engine) and in the debug output
	Models       []string      // names that it serves; empty: any
	Speed        float64       // model seconds per real second; default 1
	AnswerTokens int           // length of an answer that max_tokens does not end; 0: 32 to 287, depending on the prompt
	IdleTimeout  time.Duration // keep-alive of idle connections; default 5 s, as uvicorn's
	Grace        time.Duration // how long Run lets open requests go on after its context ends; default 30 s
	MaxRecords   int           // requests kept for /debug/requests; default 4,096
	FailHealth   bool          // /health answers 503 from the start
}

// Server is a simulated inference server: an Engine on the real clock behind the HTTP interfaces of OpenAI and Anthropic, with vLLM's
// metrics.
type Server struct {
	o       ServerOptions
	started time.Time
	metrics *metrics
	log     *requestLog
	fail    failures
	ids     atomic.Uint64
	wake    chan struct{} // cap 1: an arrival

	mu     sync.Mutex // guards what follows
	engine *Engine
}

// NewServer returns a server that answers once Run is called.
func NewServer(o ServerOptions) (*Server, error) {
	e, err := NewEngine(o.Engine)
	if err != nil {
		return nil, err
	}
	if o.Speed == 0 {
		o.Speed = 1
	}
	if o.Speed < 0 || o.AnswerTokens < 0 || o.IdleTimeout < 0 || o.Grace < 0 || o.MaxRecords < 0 {
		return nil, fmt.Errorf("make server: %w: negative value", ErrOptions)
	}
	if o.Name == "" {
		o.Name = "sim"
	}
	if o.IdleTimeout == 0 {
		o.IdleTimeout = 5 * time.Second
	}
	if o.Grace == 0 {
		o.Grace = 30 * time.Second
	}
	if o.MaxRecords == 0 {
		o.MaxRecords = 4096
	}
	s := &Server{o: o, engine: e, started: time.Now(), wake: make(chan struct{}, 1), log: newRequestLog(o.MaxRecords)}
	if o.FailHealth {
		s.fail.health.Store(http.StatusServiceUnavailable)
	}
	s.metrics = newMetrics(s)
	return s, nil
}

// Run serves the listeners until ctx ends, then lets open requests finish for at most the grace time. It closes the
// listeners.
func (s *Server) Run(ctx context.Context, lns ...net.Listener) error {
	srv := &http.Server{
		Handler:           s.handler(),
		IdleTimeout:       s.o.IdleTimeout,
		ReadHeaderTimeout: 60 * time.Second,
		ConnContext:       s.log.connContext,
		ConnState:         s.log.connState,
	}
	driverCtx, stopDriver := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() { s.drive(driverCtx) })
	errs := make(chan error, len(lns))
	for _, ln := range lns {
		wg.Go(func() { errs <- srv.Serve(ln) })
	}
	var err error
	select {
	case <-ctx.Done():
	case err = <-errs:
		err = fmt.Errorf("serve: %w", err)
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.o.Grace)
	if serr := srv.Shutdown(grace); serr != nil {
		if cerr := srv.Close(); err == nil && !errors.Is(serr, context.DeadlineExceeded) {
			err = errors.Join(serr, cerr)
		}
	}
	cancel()
	stopDriver()
	wg.Wait()
	return err
}

// now is the engine's time.
func (s *Server) now() time.Duration {
	return time.Duration(float64(time.Since(s.started)) * s.o.Speed)
}

// real is the real time at which the engine's time is t.
func (s *Server) real(t time.Duration) time.Duration { return time.Duration(float64(t) / s.o.Speed) }

// maxLag is how far (real time) the engine's steps may fall behind the clock and still be caught up: late timers, not an
// overloaded machine.
const maxLag = 50 * time.Millisecond

// drive runs the engine's steps on the real clock.
func (s *Server) drive(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var last time.Duration // end of the last step
	busy := false
	for {
		s.mu.Lock()
		now := s.now()
		if busy && s.real(now-last) < maxLag {
			now = last
		}
		step, ok := s.engine.Begin(now)
		s.mu.Unlock()
		busy = ok && !step.Idle

		var wake <-chan struct{}
		var due <-chan time.Time
		if !busy {
			wake = s.wake
		}
		if ok {
			if d := s.real(step.End - s.now()); d > 0 {
				timer.Reset(d)
				due = timer.C
			} else if ctx.Err() == nil {
				s.finish(step)
				last = step.End
				continue
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-wake:
		case <-due:
			s.finish(step)
			last = step.End
		}
	}
}

// finish ends a step and hands its tokens to the requests.
func (s *Server) finish(step Step) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := step.End
	if step.Idle {
		now = max(now, s.now())
	}
	for _, ev := range s.engine.Finish(now) {
		ev.Seq.Tag.(*choice).event(ev)
	}
	s.metrics.step(step)
}

// kick tells the driver that something arrived.
func (s *Server) kick() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}
