// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/policy"
	"github.com/shunt-lb/shunt/pkg/request"
	"github.com/valyala/fasthttp"
)

var errGone = errors.New("client has gone")

// run tries backends until one answers, and begins the answer. No attempt is made after an answer's first byte, for a
// client that has left, on a backend that was tried, or beyond what mayRetry and mayReconnect allow.
func (ex *exchange) run(ctx *fasthttp.RequestCtx) {
	ex.stats = ex.s.metrics.pool(ex.pool.Name())
	ex.query.MayProbe = string(ex.method) == "POST" // the others ask for no work, and an engine that can do none may answer them
	var last error
	lastAnswer := errUpstream
	for {
		if ex.gone() {
			ex.abandon(ctx)
			return
		}
		t, err := ex.pool.Take(&ex.query)
		if err != nil {
			if ex.drew {
				ex.s.budget.giveBack()
			}
			ex.giveUp(ctx, err, last, lastAnswer)
			return
		}
		ex.ticket, ex.drew = t, false
		ex.picked(t)
		before := ex.dispatched
		err = ex.try(t.Backend())
		if err == nil {
			// The client of a probe need not bear what it has found out.
			if failed := t.Probe() && ex.failedStatus(); failed || ex.busy() {
				o, pause := OutcomeUpstreamError, time.Duration(0)
				if !failed {
					o, pause = OutcomeBusy, retryAfter(ex.head.fields, time.Now())
					t.Backend().Busy(pause)
				}
				if ex.head.length <= maxSaved && ex.mayRetry() {
					ex.report(o)
					if err := ex.save(); err != nil {
						last, lastAnswer = err, errUpstream
						if !failed {
							lastAnswer = upstreamBusy(ex.head.status, pause)
						}
					}
					ex.ticket.Release()
					continue
				}
			}
			ex.deliver(ctx)
			return
		}
		answered := ex.conn != nil && ex.conn.got > 0
		ex.dropConn()
		if ex.gone() {
			ex.report(OutcomeClientGone)
			ex.abandon(ctx)
			return
		}
		if isTimeout(err) && !errors.Is(err, errNoConnection) {
			// The backend may be at work on it: a second one would do the same work again.
			ex.report(OutcomeTimeout)
			ex.fail(ctx, errUpstreamTimeout, OutcomeTimeout, err)
			return
		}
		o := attemptOutcome(err)
		ex.report(o)
		last, lastAnswer = err, answerFor(err)
		unsent := errors.Is(err, errNoConnection) && ex.dispatched.Equal(before)
		if answered || unsent && !ex.mayReconnect(o) || !unsent && !ex.mayRetry() {
			ex.giveUp(ctx, nil, last, lastAnswer)
			return
		}
		ex.ticket.Release()
	}
}

// attemptOutcome classifies an attempt that brought no answer.
func attemptOutcome(err error) Outcome {
	for _, e := range []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.EADDRNOTAVAIL} {
		if errors.Is(err, e) {
			return OutcomeLocalFault
		}
	}
	switch {
	case errors.Is(err, errNoConnection):
		return OutcomeConnectFailed
	case isTimeout(err):
		return OutcomeTimeout
	}
	return OutcomeUpstreamError
}

// picked notes the backend as the session's and as tried.
func (ex *exchange) picked(t *fleet.Ticket) {
	b := t.Backend()
	if ex.attempts++; ex.attempts > 1 {
		ex.s.metrics.retries.Inc()
	}
	ex.query.Exclude = append(ex.query.Exclude, b.ID())
	ex.stats.pick(t.Reason())
	spilled := policy.Spilled(t.Reason())
	if ex.s.o.Tracker != nil {
		ex.s.o.Tracker.Assign(ex.key, b, spilled)
	}
	if ex.pinnable() {
		ex.s.o.Pins.Seen(ex.client.remote, ex.client.local, ex.key, b, spilled)
	}
}

// pinnable reports whether the request says something of where its client's sessions live.
func (ex *exchange) pinnable() bool {
	return ex.s.o.Pins != nil && !ex.client.balanced && ex.api != request.Other && !ex.query.LocalOnly
}

// mayRetry reports whether a further backend may be tried after one that may have worked on the request.
func (ex *exchange) mayRetry() bool {
	ex.drew = ex.attempts <= ex.retries() && ex.s.budget.take()
	return ex.drew
}

// mayReconnect reports whether a further backend may be tried after one to which there was no connection. Nothing was sent, so
// this multiplies no work and needs no budget, and while no backend at all has seen the request every one may be tried.
func (ex *exchange) mayReconnect(o Outcome) bool {
	if o == OutcomeConnectFailed && ex.dispatched.IsZero() {
		return ex.set.Retries > 0
	}
	return ex.attempts <= ex.retries()
}

// retries is how many further attempts the request may have.
func (ex *exchange) retries() int {
	if n := lookup(ex.fields, "x-stainless-retry-count"); len(n) > 0 && string(n) != "0" {
		return ex.set.Retries / 2 // the client retries by itself; both together would multiply
	}
	return ex.set.Retries
}

func (ex *exchange) report(o Outcome) {
	ex.stats.attempt(o)
	if ex.s.o.Report == nil || ex.ticket == nil || !ex.query.MayProbe && (o == OutcomeOK || o == OutcomeBusy || o == OutcomeUpstreamError) {
		return
	}
	defer ex.s.recovered("reporting an attempt")
	ex.s.o.Report(ex.ticket, o)
}

// giveUp answers when no backend is left to try.
func (ex *exchange) giveUp(ctx *fasthttp.RequestCtx, err, last error, answer *apiError) {
	switch {
	case ex.saved.ticket != nil:
		ex.deliverSaved(ctx)
	case last != nil:
		o := OutcomeUpstreamError
		if isTimeout(last) {
			o = OutcomeTimeout
		}
		ex.fail(ctx, answer, o, last)
	case errors.Is(err, fleet.ErrOverloaded):
		ex.reject(ctx, errOverloaded)
	default:
		ex.reject(ctx, errNoBackend)
		ex.failure = "no_backend: " + err.Error()
	}
}

func answerFor(err error) *apiError {
	var bad messageError
	switch {
	case errors.Is(err, errHeadTooBig):
		return errUpstreamHeader
	case errors.As(err, &bad):
		return errUpstreamInvalid
	case isTimeout(err):
		return errUpstreamTimeout
	}
	return errUpstream
}

func isTimeout(err error) bool {
	return errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded)
}

// try sends the request to the backend and reads the head of its answer. When the backend had closed a kept
// connection, which shows as an end without a single byte, the request goes out once more on a fresh one.
func (ex *exchange) try(b *fleet.Backend) error {
	up, err := ex.s.upstreams.get(b)
	if err != nil {
		return fmt.Errorf("%w to backend: %w", errNoConnection, err)
	}
	ex.up = up
	c := up.take(ex.set.Timeouts.BackendUse)
	for {
		if c == nil {
			if c, err = ex.dial(up); err != nil {
				return fmt.Errorf("%w to backend: %w", errNoConnection, err)
			}
		}
		if !ex.hold(c) {
			c.close()
			return errGone
		}
		err := ex.roundTrip(c)
		if err == nil || !c.reused || c.got > 0 || isTimeout(err) || ex.gone() {
			return err
		}
		ex.dropConn()
		ex.s.metrics.replays.Inc()
		c = nil
	}
}

func (ex *exchange) dial(up *upstream) (*upConn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), ex.set.Timeouts.Connect)
	defer cancel()
	ex.mu.Lock()
	ex.cancel = cancel
	departed := ex.departed
	ex.mu.Unlock()
	if departed {
		return nil, errGone
	}
	defer func() {
		ex.mu.Lock()
		ex.cancel = nil
		ex.mu.Unlock()
	}()
	return ex.s.upstreams.dial(ctx, up)
}

const (
	joinBody  = 16 << 10 // a body up to this size is sent with the head in one buffer
	asideBody = 64 << 10 // a larger one is sent by a goroutine of its own, as the answer may come before its end
)

// roundTrip sends the request and reads the answer's head.
func (ex *exchange) roundTrip(c *upConn) error {
	ex.dispatched = time.Now()
	if err := c.arm(ex.set.Timeouts.FirstByte); err != nil {
		return err
	}
	ex.buildHead()
	var err error
	switch {
	case len(ex.body) <= joinBody:
		ex.out = append(ex.out, ex.body...)
		_, err = c.nc.Write(ex.out)
	case len(ex.body) <= asideBody:
		err = ex.send(c)
	default:
		done := make(chan error, 1)
		ex.writing = done
		go func() {
			err := errors.New("panic while sending a body")
			defer func() {
				if r := recover(); r != nil {
					ex.s.logger.Error("panic while sending a body", "panic", r)
				}
				done <- err
			}()
			err = ex.send(c)
		}()
	}
	// A backend that refuses a request may close before it has read all of it. Its answer is there nevertheless.
	if readErr := c.readHead(&ex.head, ex.set.Limits.MaxHeader); readErr != nil {
		if err != nil {
			return fmt.Errorf("send request: %w", err)
		}
		return fmt.Errorf("read answer: %w", readErr)
	}
	// After a failed write it is not known what the backend has read.
	c.spent = err != nil || ex.head.http10 || hasToken(ex.head.fields, "connection", "close")
	return nil
}

// send writes head and body in one system call where the connection can.
func (ex *exchange) send(c *upConn) error {
	if c.nc != c.raw {
		if _, err := c.nc.Write(ex.out); err != nil {
			return err
		}
		_, err := c.nc.Write(ex.body)
		return err
	}
	ex.vec[0], ex.vec[1] = ex.out, ex.body
	ex.bufs = ex.vec[:]
	_, err := ex.bufs.WriteTo(c.nc)
	ex.bufs, ex.vec[0], ex.vec[1] = nil, nil, nil
	return err
}

// buildHead writes the head that goes to the backend.
func (ex *exchange) buildHead() {
	b := append(ex.out[:0], ex.method...)
	b = append(b, ' ')
	b = append(b, ex.up.prefix...)
	b = append(b, ex.target...)
	b = append(b, " HTTP/1.1\r\nHost: "...)
	if host := ex.up.host; host != nil {
		b = append(b, host...)
	} else if host := lookup(ex.fields, "host"); host != nil {
		b = append(b, host...)
	} else {
		b = append(b, ex.up.address...)
	}
	b = append(b, '\r', '\n')
	backendKey := ex.set.BackendKeys[ex.pool.Name()]
	strip := ex.set.StripAuthorization || backendKey != ""
	for i := range ex.fields {
		f := &ex.fields[i]
		if hopByHop(f.name) || ours(f.name) || len(ex.named) > 0 && named(ex.named, f.name) {
			continue
		}
		if strip && isCredential(f.name) {
			continue
		}
		b = appendField(b, f.name, f.value)
	}
	if backendKey != "" {
		b = append(b, "Authorization: Bearer "...)
		b = append(b, backendKey...)
		b = append(b, '\r', '\n')
	}
	b = append(b, "X-Forwarded-For: "...)
	b = ex.appendClient(b)
	b = append(b, "\r\nX-Request-Id: "...)
	b = append(b, ex.id...)
	if len(ex.body) > 0 || ex.framing.length >= 0 || ex.framing.chunked || string(ex.method) == "POST" {
		b = append(b, "\r\nContent-Length: "...)
		b = appendInt(b, int64(len(ex.body)))
	}
	ex.out = append(b, "\r\n\r\n"...)
}

func appendField(b, name, value []byte) []byte {
	b = append(b, name...)
	b = append(b, ':', ' ')
	b = append(b, value...)
	return append(b, '\r', '\n')
}

// failedStatus reports whether the backend answered that it failed.
func (ex *exchange) failedStatus() bool {
	return ex.head.status == 500 || ex.head.status == 502 || ex.head.status == 504
}

// busy reports whether the backend answered that it has no room.
func (ex *exchange) busy() bool { return ex.head.status == 429 || ex.head.status == 503 }

const (
	busyTime    = time.Second     // a backend that says it has no room is left alone for so long, if it does not say how long
	maxBusyTime = 5 * time.Second // and never longer than this: it may have room again before it thinks
)

// retryAfter is how long a busy backend is left alone, by its Retry-After: seconds or a date.
func retryAfter(fields []field, now time.Time) time.Duration {
	v := lookup(fields, "retry-after")
	if n, ok := parseDecimal(v); ok && n > 0 {
		return time.Duration(min(n, int64(maxBusyTime/time.Second))) * time.Second
	}
	if at, err := fasthttp.ParseHTTPDate(v); err == nil && at.After(now) {
		return min(at.Sub(now), maxBusyTime)
	}
	return busyTime
}

// maxSaved bounds the body of an answer that is put aside.
const maxSaved = 64 << 10

var errNotSaved = errors.New("answer of a busy backend is too long to be put aside")

// save puts a busy backend's answer aside, to be passed on if no other backend does better. An answer that breaks off or is
// too long is not worth that, and an error.
func (ex *exchange) save() error {
	c := ex.conn
	head := bytes.Clone(c.buf[c.headAt:c.r])
	ex.reader.start(c, &ex.head, ex.isHead)
	c.flowing(min(ex.set.Timeouts.Idle, time.Second))
	var body []byte
	for !ex.reader.finished {
		p, err := ex.reader.next()
		body = append(body, p...)
		if err == nil && len(body) > maxSaved {
			err = errNotSaved
		}
		if err != nil && !ex.reader.finished {
			ex.dropConn()
			return fmt.Errorf("read answer %d: %w", ex.head.status, err)
		}
	}
	ex.keepConn()
	ex.saved = savedAnswer{ticket: ex.ticket, head: head, body: body}
	return nil
}
