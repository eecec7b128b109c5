// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"
	"errors"
	"io"
	"net"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/shunt-lb/shunt/pkg/policy"
	"github.com/valyala/fasthttp"
)

// deliver begins the answer: its head goes into fasthttp's response, its body streams from the exchange.
func (ex *exchange) deliver(ctx *fasthttp.RequestCtx) {
	h := &ex.head
	c := ex.conn
	ex.status = h.status
	ex.reader.start(c, h, ex.isHead)
	contentType := lookup(h.fields, "content-type")
	plain := lookup(h.fields, "content-encoding") == nil
	ex.eventStream = hasMediaType(contentType, "text/event-stream")
	ex.metered = plain && (ex.eventStream || hasMediaType(contentType, "application/json"))
	ex.meter.reset(ex.eventStream)
	if !ex.eventStream || ex.reader.finished {
		// The head of an event stream may come before the prefill; that of another answer comes after all of it.
		ex.sawFirstByte()
	}
	b := ex.ticket.Backend()
	if ex.pinnable() && h.status < 300 {
		spilled := policy.Spilled(ex.ticket.Reason())
		if ex.s.o.Pins.Offer(ex.client.remote, ex.client.local, ex.key, b, ex.expected(), spilled) {
			ctx.SetConnectionClose()
		}
	}
	if ex.s.draining.Load() {
		ctx.SetConnectionClose()
	}
	ex.copyHead(&ctx.Response, h, b.Name())
	if ex.reader.finished { // no body
		if ex.isHead || h.status == 304 {
			if h.length >= 0 {
				ctx.Response.Header.Add("Content-Length", strconv.FormatInt(h.length, 10))
			}
			ctx.Response.SkipBody = true
		}
		ex.ended()
		return
	}
	ex.dropBody()
	if ex.eventStream && plain {
		c.beat = ex.set.Timeouts.Heartbeat
	}
	size := -1
	if h.length >= 0 && !ex.eventStream {
		size = int(h.length)
	}
	if size < 0 && ex.http10 {
		ex.unframed(ctx)
		return
	}
	ex.forget()
	ex.handedOver = true
	// Otherwise the head waits for the first piece of the body, which may be a prefill away.
	ctx.Response.ImmediateHeaderFlush = c.r == c.w && size < 0
	ctx.Response.SetBodyStream(ex, size)
}

// expected is the tokens that the session's next turn is likely to bring.
func (ex *exchange) expected() int64 {
	if ex.s.o.Tracker != nil {
		if n := ex.s.o.Tracker.Expected(ex.key); n > 0 {
			return n
		}
	}
	return ex.query.PromptTokens + ex.query.OutputTokens
}

// forget lets go of all that points into fasthttp's buffers, but for what the record wants, which is copied.
func (ex *exchange) forget() {
	ex.describe()
	ex.method, ex.target, ex.path = nil, nil, nil
	clear(ex.fields)
	clear(ex.named)
	ex.fields, ex.named = ex.fields[:0], ex.named[:0]
}

// copyHead copies the answer's end-to-end headers. Framing is fasthttp's.
func (ex *exchange) copyHead(r *fasthttp.Response, h *responseHead, backend string) {
	r.SetStatusCode(h.status)
	var tokens [][]byte
	if lookup(h.fields, "connection") != nil {
		tokens = connectionTokens(h.fields, nil)
	}
	cacheControl := false
	for i := range h.fields {
		f := &h.fields[i]
		if hopByHop(f.name) || len(tokens) > 0 && named(tokens, f.name) {
			continue
		}
		switch len(f.name) {
		case len(headerRequestID):
			if is(f.name, headerRequestID) {
				continue
			}
		case len(headerBackend):
			if is(f.name, headerBackend) {
				continue
			}
		case len("cache-control"):
			cacheControl = cacheControl || is(f.name, "cache-control")
		case len("x-accel-buffering"):
			if ex.eventStream && is(f.name, "x-accel-buffering") {
				continue
			}
		}
		r.Header.AddBytesKV(f.name, f.value)
	}
	r.Header.AddBytesV(headerRequestID, ex.id)
	r.Header.Add(headerBackend, backend)
	if ex.eventStream {
		if !cacheControl {
			r.Header.Add("Cache-Control", "no-cache")
		}
		r.Header.Add("X-Accel-Buffering", "no")
	}
}

// deliverSaved passes on the answer of a busy backend.
func (ex *exchange) deliverSaved(ctx *fasthttp.RequestCtx) {
	if err := parseHead(ex.saved.head, &ex.head); err != nil {
		ex.fail(ctx, errUpstreamInvalid, OutcomeUpstreamError, err)
		return
	}
	ex.ticket = ex.saved.ticket // for the record
	ex.copyHead(&ctx.Response, &ex.head, ex.ticket.Backend().Name())
	ex.status = ex.head.status
	ex.sent = int64(len(ex.saved.body))
	if ex.status >= 500 {
		ex.outcome = OutcomeUpstreamError
	}
	ctx.Response.SetBody(ex.saved.body)
}

func hasMediaType(contentType []byte, lower string) bool {
	if i := bytes.IndexByte(contentType, ';'); i >= 0 {
		contentType = contentType[:i]
	}
	return is(trimSpace(contentType), lower)
}

// sawFirstByte gives the prompt's part of the ticket back: the prefill is done.
func (ex *exchange) sawFirstByte() {
	if !ex.firstByte.IsZero() {
		return
	}
	ex.firstByte = time.Now()
	ex.ticket.FirstByte()
	ex.conn.flowing(ex.set.Timeouts.Idle)
}

// Read is part of io.Reader, which fasthttp asks for; it uses WriteTo.
func (ex *exchange) Read(p []byte) (int, error) {
	if len(ex.lastPiece) == 0 {
		piece, err := ex.reader.next()
		for err == errBeat {
			piece, err = ex.reader.next()
		}
		if len(piece) == 0 {
			return 0, err
		}
		ex.lastPiece = piece
	}
	n := copy(p, ex.lastPiece)
	ex.lastPiece = ex.lastPiece[n:]
	return n, nil
}

// SupportsBodyWriteTo lets fasthttp use WriteTo.
func (ex *exchange) SupportsBodyWriteTo() bool { return true }

// heartbeat keeps middleboxes from dropping a quiet stream. It is a comment of one line: an empty line after it would end
// an event, and some clients take that for one without data.
const heartbeat = ": \n"

var errAborted = errors.New("answer broken off")

// WriteTo relays the body piece by piece: what one read from the backend brought goes out in one write. An error makes
// fasthttp close the connection without ending the body.
func (ex *exchange) WriteTo(w io.Writer) (total int64, err error) {
	defer func() {
		if r := recover(); r != nil {
			ex.s.logger.Error("panic while relaying an answer", "panic", r, "stack", string(debug.Stack()))
			ex.broke(OutcomeUpstreamError, "panic")
			err = errAborted
		}
	}()
	for {
		piece, readErr := ex.reader.next()
		if len(piece) > 0 {
			ex.sawFirstByte()
			n, err := w.Write(piece)
			total += int64(n)
			ex.sent += int64(n)
			if err != nil {
				ex.broke(OutcomeClientGone, "write to the client")
				return total, err
			}
			ex.measure(piece)
		}
		switch {
		case readErr == nil:
		case readErr == errBeat:
			if ex.meter.off || ex.meter.gap() != "" {
				continue // never inside an event
			}
			if _, err := io.WriteString(w, heartbeat); err != nil {
				ex.broke(OutcomeClientGone, "write to the client")
				return total, err
			}
			total += int64(len(heartbeat))
		case readErr == io.EOF:
			ex.ended()
			return total, nil
		case ex.gone():
			ex.broke(OutcomeClientGone, "")
			return total, errAborted
		default:
			o := OutcomeUpstreamError
			if isTimeout(readErr) {
				o = OutcomeTimeout
			}
			ex.broke(o, readErr.Error())
			ex.farewell(w, o)
			return total, errAborted
		}
	}
}

// measure lets the meter see what was relayed. A fault in the meter switches it off and harms nothing else.
func (ex *exchange) measure(piece []byte) {
	if !ex.metered || ex.meter.off {
		return
	}
	defer func() {
		if r := recover(); r != nil {
			ex.meter.off = true
			ex.s.metrics.meterOff.Inc()
			ex.s.logger.Error("panic in the meter", "panic", r, "stack", string(debug.Stack()))
		}
	}()
	if ex.s.fault != nil {
		ex.s.fault(piece)
	}
	if n := ex.meter.feed(piece); n > 0 {
		if ex.firstToken.IsZero() {
			ex.firstToken = time.Now()
		}
		ex.ticket.Decoded(n)
	}
}

// farewell tells the reader of an event stream that it was cut off. The missing last chunk tells everybody.
func (ex *exchange) farewell(w io.Writer, o Outcome) {
	if !ex.eventStream || !ex.metered || ex.meter.off {
		return
	}
	e := errUpstream
	if o == OutcomeTimeout {
		e = errUpstreamTimeout
	}
	b := append([]byte(ex.meter.gap()), "data: "...)
	b = append(e.append(b), "\n\n"...)
	_, _ = w.Write(b)
}

// ended is the good end: the body was read to its end, so the connection can serve again.
func (ex *exchange) ended() {
	ex.outcome = OutcomeOK
	if ex.failedStatus() || ex.meter.scan.figures.failed && ex.eventStream {
		ex.outcome = OutcomeUpstreamError
	}
	o := ex.outcome
	if code := ex.meter.scan.figures.failCode; o != OutcomeOK && ex.status < 400 && code >= 400 && code < 500 {
		o = OutcomeOK // the request's fault, told inside the stream
	}
	if ex.status >= 500 {
		ex.outcome = OutcomeUpstreamError
	}
	if ex.busy() {
		o = OutcomeBusy
	}
	ex.report(o) // before the ticket's end, which lets the next probe out
	ex.ticket.Release()
	ex.keepConn()
}

// broke is the bad end.
func (ex *exchange) broke(o Outcome, why string) {
	ex.outcome, ex.failure = o, why
	ex.report(o)
	ex.ticket.Release()
	ex.dropConn()
}

// Close ends the exchange. fasthttp calls it when the answer was written, or could not be.
func (ex *exchange) Close() error {
	defer ex.finish()
	defer ex.s.recovered("closing an answer")
	if ex.conn != nil { // the body was not read to its end
		ex.broke(OutcomeClientGone, "write to the client")
	}
	return nil
}

// unframed answers an HTTP/1.0 client with a body that ends when the connection does. fasthttp would send chunks.
func (ex *exchange) unframed(ctx *fasthttp.RequestCtx) {
	r := &ctx.Response
	r.SetConnectionClose()
	head := r.Header.AppendBytes(nil)
	ex.forget()
	ex.handedOver = true
	ctx.HijackSetNoResponse(true)
	ctx.Hijack(func(conn net.Conn) {
		defer ex.Close()
		if _, err := conn.Write(head); err != nil {
			return
		}
		_, _ = ex.WriteTo(conn)
	})
}
