// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"net"
	"runtime/debug"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/prefix"
	"github.com/shunt-lb/shunt/pkg/request"
	"github.com/shunt-lb/shunt/pkg/session"
	"github.com/valyala/fasthttp"
)

// exchange is one request and its answer. The goroutine that serves the client's connection owns it, from the head of
// the request until finish; only interrupt comes from others. After the handler has returned, while the answer
// streams, it holds nothing of fasthttp's.
type exchange struct {
	s      *Server
	set    *settings
	client *clientConn
	header session.Header // looks into fields; made once

	// The request. fields, method, target and path point into fasthttp's buffers.
	fields    []field
	named     [][]byte // headers that Connection names
	method    []byte
	target    []byte
	path      []byte
	pathBuf   []byte
	http10    bool
	isHead    bool
	framing   framing
	bodyRead  bool
	id        []byte
	body      []byte
	charged   int64 // of the budget for buffered bodies
	api       request.API
	model     []byte
	label     string // the model as configured, or "other"
	maxTokens int64
	counted   int64 // tokens of the prompt
	exact     bool  // counted is no estimate
	prompt    int64 // counted, in the served model's own tokens
	key       session.Key
	source    string

	// The attempts.
	pool     *fleet.Pool
	stats    *poolMetrics
	query    fleet.Query
	hasher   prefix.Hasher
	tried    [8]fleet.ID
	ticket   *fleet.Ticket
	up       *upstream
	conn     *upConn
	head     responseHead
	out      []byte // the head that is sent to the backend
	vec      [2][]byte
	bufs     net.Buffers
	writing  chan error // a large body is on its way
	attempts int
	drew     bool // on the budget, for the attempt that comes next
	saved    savedAnswer

	// The answer.
	reader      bodyReader
	meter       meter
	eventStream bool
	metered     bool
	handedOver  bool // fasthttp writes the answer and will call Close
	probe       bool // another shunt asked whether this is one: no client's request
	lastPiece   []byte
	sent        int64
	status      int
	outcome     Outcome
	failure     string
	began       time.Time
	dispatched  time.Time
	firstByte   time.Time
	firstToken  time.Time
	released    bool
	record      Record

	mu       sync.Mutex
	departed bool // the client has gone
	raw      net.Conn
	cancel   context.CancelFunc
}

// savedAnswer is a 429 or 503 that is passed on if no other backend does better.
type savedAnswer struct {
	ticket *fleet.Ticket // given back; nil: there is no such answer
	head   []byte
	body   []byte
}

func newExchange(s *Server) *exchange {
	ex := &exchange{s: s}
	ex.header = func(name string) []byte {
		for i := range ex.fields {
			if len(ex.fields[i].name) == len(name) && sameFold(ex.fields[i].name, []byte(name)) {
				return ex.fields[i].value
			}
		}
		return nil
	}
	return ex
}

// keepBody is how large a body buffer a pooled exchange keeps.
const keepBody = 64 << 10

func (s *Server) begin(c *clientConn) *exchange {
	ex := s.exchanges.Get().(*exchange)
	ex.client = c
	ex.set = s.settings.Load()
	ex.began = time.Now()
	s.metrics.inflight.Inc()
	c.begin(ex)
	return ex
}

// finish ends the exchange, once, on whatever path it comes here: the ticket first, and independent of the rest.
func (ex *exchange) finish() {
	if ex.released {
		return
	}
	ex.released = true
	s := ex.s
	defer s.recovered("ending a request")
	if ex.ticket != nil {
		ex.ticket.Release()
	}
	s.metrics.inflight.Dec()
	ex.client.end() // from here on nobody else knows the exchange
	ex.dropConn()
	s.bodyMemory.Add(-ex.charged)
	ex.account()
	ex.recycle()
}

// recovered is deferred where a panic would end the process: fasthttp's goroutines have no recover of their own.
func (s *Server) recovered(doing string) {
	if r := recover(); r != nil {
		s.logger.Error("panic while "+doing, "panic", r, "stack", string(debug.Stack()))
	}
}

// recycle clears the exchange for its next use. It keeps buffers and nothing else.
func (ex *exchange) recycle() {
	body := ex.body
	if cap(body) > keepBody {
		body = nil
	}
	if cap(ex.out) > keepBody {
		ex.out = nil
	}
	if b, _ := ex.hasher.Blocks(); cap(b) > keepBody/8 {
		ex.hasher = prefix.Hasher{}
	}
	clear(ex.fields)
	clear(ex.named)
	clear(ex.head.fields)
	s, header := ex.s, ex.header
	fields, names, head, pathBuf, id, out, model := ex.fields[:0], ex.named[:0], ex.head.fields[:0], ex.pathBuf[:0], ex.id[:0], ex.out[:0], ex.model[:0]
	ex.reset()
	ex.s, ex.header = s, header
	ex.fields, ex.named, ex.head.fields = fields, names, head
	ex.pathBuf, ex.id, ex.out, ex.model, ex.body = pathBuf, id, out, model, body[:0]
	s.exchanges.Put(ex)
}

func (ex *exchange) reset() {
	ex.set, ex.client = nil, nil
	ex.method, ex.target, ex.path = nil, nil, nil
	ex.http10, ex.isHead, ex.bodyRead = false, false, false
	ex.framing, ex.charged = framing{}, 0
	ex.api, ex.label, ex.maxTokens, ex.prompt, ex.key, ex.source = 0, "", 0, 0, 0, ""
	ex.counted, ex.exact = 0, false
	ex.pool, ex.stats, ex.query, ex.ticket, ex.up, ex.conn = nil, nil, fleet.Query{}, nil, nil, nil
	ex.head, ex.vec, ex.bufs, ex.writing, ex.attempts = responseHead{}, [2][]byte{}, nil, nil, 0
	ex.drew, ex.saved = false, savedAnswer{}
	ex.reader = bodyReader{}
	ex.meter.reset(false)
	ex.eventStream, ex.metered, ex.handedOver, ex.probe, ex.lastPiece = false, false, false, false, nil
	ex.sent, ex.status, ex.outcome, ex.failure = 0, 0, OutcomeOK, ""
	ex.began, ex.dispatched, ex.firstByte, ex.firstToken = time.Time{}, time.Time{}, time.Time{}, time.Time{}
	ex.released = false
	ex.record = Record{}
	ex.mu.Lock()
	ex.departed, ex.raw, ex.cancel = false, nil, nil
	ex.mu.Unlock()
}

// interrupt ends what the exchange is waiting for: the client has gone.
func (ex *exchange) interrupt() {
	ex.mu.Lock()
	defer ex.mu.Unlock()
	ex.departed = true
	if ex.raw != nil {
		ex.raw.Close()
	}
	if ex.cancel != nil {
		ex.cancel()
	}
}

// gone reports whether the client has left.
func (ex *exchange) gone() bool {
	ex.mu.Lock()
	defer ex.mu.Unlock()
	return ex.departed
}

// hold makes the connection the one that interrupt closes. It reports false if the client has left.
func (ex *exchange) hold(c *upConn) bool {
	ex.mu.Lock()
	defer ex.mu.Unlock()
	if ex.departed {
		return false
	}
	ex.raw = c.raw
	ex.conn = c
	return true
}

// letGo takes the connection out of interrupt's reach and returns it. It returns nil if interrupt was faster, or if
// there is none.
func (ex *exchange) letGo() *upConn {
	c := ex.conn
	ex.conn = nil
	ex.mu.Lock()
	defer ex.mu.Unlock()
	ex.raw = nil
	if ex.departed {
		if c != nil {
			c.close()
		}
		return nil
	}
	return c
}

// dropConn closes the backend connection, if there is one, and waits for who still writes to it.
func (ex *exchange) dropConn() {
	if ex.conn == nil {
		return
	}
	ex.conn.close()
	if ex.writing != nil {
		<-ex.writing
		ex.writing = nil
	}
	ex.letGo()
}

// keepConn gives the connection back to the pool after an answer that was read to its end.
func (ex *exchange) keepConn() {
	if ex.conn == nil {
		return
	}
	if ex.writing != nil {
		select {
		case err := <-ex.writing:
			ex.writing = nil
			if err != nil {
				ex.dropConn()
				return
			}
		default: // answered before the request was read: the rest of it may not follow
			ex.dropConn()
			return
		}
	}
	if ex.reader.kind == bodyUntilClose {
		ex.dropConn()
		return
	}
	if c := ex.letGo(); c != nil {
		ex.up.put(c)
	}
}

// handle serves one request. It is fasthttp's handler.
func (s *Server) handle(ctx *fasthttp.RequestCtx) {
	c, ok := ctx.Conn().(*clientConn)
	if !ok {
		errInternal.write(&ctx.Response, nil)
		return
	}
	// Without a deadline of the handler's own, fasthttp keeps an answer back while a pipelined request waits.
	_ = ctx.SetWriteDeadline(time.Time{})
	ex := s.begin(c)
	defer func() {
		if r := recover(); r != nil {
			s.logger.Error("panic while serving a request", "panic", r, "stack", string(debug.Stack()))
			ctx.Response.Reset()
			ctx.Response.Header.DisableNormalizing()
			ex.handedOver = false
			ex.reject(ctx, errInternal)
			ctx.SetConnectionClose()
		}
		if !ex.handedOver {
			ex.finish()
		}
	}()
	if e := ex.readHead(ctx); e != nil {
		ex.refuse(ctx, e)
		return
	}
	if s.peerProbe(ctx, ex) {
		return
	}
	if e := ex.authorize(); e != nil {
		ex.refuse(ctx, e)
		return
	}
	if s.local(ctx, ex) {
		return
	}
	if e := ex.admit(); e != nil {
		ex.refuse(ctx, e)
		return
	}
	if !ex.readBody(ctx) {
		return
	}
	if ex.gone() { // its tokens need not be counted any more
		ex.abandon(ctx)
		return
	}
	if e := ex.inspect(); e != nil {
		ex.reject(ctx, e)
		return
	}
	ex.run(ctx)
}

// readHead checks the request's head. An error of it closes the connection.
func (ex *exchange) readHead(ctx *fasthttp.RequestCtx) *apiError {
	h := &ctx.Request.Header
	ex.method, ex.target = h.Method(), h.RequestURI()
	ex.http10 = !h.IsHTTP11()
	var err error
	if raw := h.RawHeaders(); len(raw) > 0 {
		ex.fields, err = parseFields(raw, ex.fields[:0])
	}
	if err == nil {
		ex.framing, err = framingOf(ex.fields, ex.http10)
	}
	ex.setID()
	if err == nil && !validHost(ex.fields, ex.http10) {
		err = errHost
	}
	if err != nil {
		ctx.SetConnectionClose()
		ex.client.lingers = true
		return badRequest("invalid_http", "The request is not valid HTTP: "+err.Error()+".")
	}
	if ex.http10 && string(h.Protocol()) != "HTTP/1.0" {
		ctx.SetConnectionClose()
		return errVersion
	}
	ex.isHead = string(ex.method) == "HEAD"
	ex.named = connectionTokens(ex.fields, ex.named[:0])
	ex.path, ex.pathBuf, err = cleanPath(ex.target, ex.pathBuf)
	if err != nil {
		ex.path = nil
		return badRequest("invalid_url", "The request target is not one that this server accepts.")
	}
	return nil
}

// setID takes the client's request id, or makes one.
func (ex *exchange) setID() {
	if id := requestID(ex.fields); id != nil {
		ex.id = append(ex.id[:0], id...)
		return
	}
	var b [12]byte
	_, _ = rand.Read(b[:])
	ex.id = hex.AppendEncode(append(ex.id[:0], "req-"...), b[:])
}

// admit decides by the head alone whether the request may go on.
func (ex *exchange) admit() *apiError {
	switch string(ex.method) {
	case "GET", "HEAD", "POST", "DELETE", "OPTIONS":
	default:
		return errMethod
	}
	if !ex.set.paths.allows(ex.path) {
		return notFound(ex.method, ex.path)
	}
	if ex.framing.length > ex.set.Limits.MaxBody {
		return errBodyTooLarge
	}
	return nil
}

// expect answers a client that asks before it sends its body. It is fasthttp's ExpectHandler: the answer made here is
// sent as it is, and the connection closed, unless the status is 100.
func (s *Server) expect(ctx *fasthttp.RequestCtx) int {
	c, ok := ctx.Conn().(*clientConn)
	if !ok {
		return fasthttp.StatusInternalServerError
	}
	ex := s.begin(c)
	e := ex.judge(ctx)
	if e == nil {
		// The exchange is begun again when the body is there.
		ex.released = true
		s.metrics.inflight.Dec()
		c.end()
		ex.recycle()
		return fasthttp.StatusContinue
	}
	c.lingers = true // the client may send its body all the same
	ex.refuse(ctx, e)
	ex.finish()
	return e.status
}

// judge decides by the head alone, where no handler recovers.
func (ex *exchange) judge(ctx *fasthttp.RequestCtx) (e *apiError) {
	e = errInternal
	defer ex.s.recovered("reading a request's head")
	if bad := ex.readHead(ctx); bad != nil {
		return bad
	}
	if bad := ex.authorize(); bad != nil {
		return bad
	}
	return ex.admit()
}

// refuse answers before the body was read.
func (ex *exchange) refuse(ctx *fasthttp.RequestCtx, e *apiError) {
	if ex.framing.chunked || ex.framing.length > prefetched {
		ctx.SetConnectionClose()
		ex.client.lingers = true
	}
	ex.reject(ctx, e)
}

// prefetched is how much of a body fasthttp has read before it calls the handler, if the body is that long.
const prefetched = 8 << 10

// reject answers with an error of the proxy's own.
func (ex *exchange) reject(ctx *fasthttp.RequestCtx, e *apiError) {
	ex.status, ex.outcome, ex.failure = e.status, OutcomeLocalReject, e.code
	e.write(&ctx.Response, ex.id)
	if ex.s.draining.Load() {
		ctx.SetConnectionClose()
	}
}

// fail answers for a backend that could not.
func (ex *exchange) fail(ctx *fasthttp.RequestCtx, e *apiError, o Outcome, why error) {
	ex.reject(ctx, e)
	ex.outcome = o
	if why != nil {
		ex.failure = e.code + ": " + why.Error()
	}
}

// abandon ends without an answer: there is nobody to read it.
func (ex *exchange) abandon(ctx *fasthttp.RequestCtx) {
	ex.status, ex.outcome = 0, OutcomeClientGone
	ctx.SetConnectionClose()
	ctx.Response.SetStatusCode(499)
}

// handleError answers what fasthttp could not read. It is fasthttp's ErrorHandler; the connection is closed after it.
func (s *Server) handleError(ctx *fasthttp.RequestCtx, err error) {
	c, ok := ctx.Conn().(*clientConn)
	if !ok {
		errInternal.write(&ctx.Response, nil)
		return
	}
	c.lingers = true
	ex := s.begin(c)
	defer ex.finish()
	defer s.recovered("refusing a request")
	ex.setID()
	ex.reject(ctx, requestError(err))
}

// headerReceived sets the time in which the first part of the body must come. The rest is readBody's.
func (s *Server) headerReceived(*fasthttp.RequestHeader) fasthttp.RequestConfig {
	return fasthttp.RequestConfig{ReadTimeout: s.settings.Load().Timeouts.Body}
}
