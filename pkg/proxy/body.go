// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"errors"
	"io"
	"net"
	"time"

	"github.com/valyala/fasthttp"
)

// readBody reads the request's body into memory, which grows with what arrives, not with what is announced. It
// answers itself and reports false if that fails.
func (ex *exchange) readBody(ctx *fasthttp.RequestCtx) bool {
	stream := ctx.RequestBodyStream()
	if stream == nil {
		ex.bodyRead = true
		return true
	}
	e, err := ex.fill(stream)
	switch {
	case err == nil && e == nil:
		ex.bodyRead = true
		return true
	case ex.gone():
		ex.abandon(ctx)
	default:
		if e == nil {
			e = requestError(err)
		}
		ctx.SetConnectionClose()
		ex.client.lingers = true
		ex.reject(ctx, e)
	}
	return false
}

func (ex *exchange) fill(stream io.Reader) (*apiError, error) {
	limits := &ex.set.Limits
	buf := ex.body[:0]
	// A client may be slow, but each window must bring its share, so none holds a connection for ever.
	window := ex.set.Timeouts.Body
	share := int(float64(limits.MinBodyRate) * window.Seconds())
	mark := 0
	for {
		if len(buf) == cap(buf) {
			n := min(max(2*cap(buf), 4<<10), int(limits.MaxBody)+1)
			if ex.framing.length >= 0 {
				n = min(n, int(ex.framing.length)+1) // one more, so that the end is seen without growing
			}
			if n <= 16<<10 {
				n = 16 << 10
			}
			if !ex.charge(int64(n)) {
				return errBodyMemory, nil
			}
			buf = append(make([]byte, 0, n), buf...)
		}
		n, err := stream.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		ex.body = buf
		if int64(len(buf)) > limits.MaxBody {
			return errBodyTooLarge, nil
		}
		if err == io.EOF {
			if ex.framing.length >= 0 && int64(len(buf)) != ex.framing.length {
				return nil, io.ErrUnexpectedEOF
			}
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		if len(buf)-mark >= share {
			mark = len(buf)
			if err := ex.client.SetReadDeadline(time.Now().Add(window)); err != nil {
				return nil, err
			}
		}
	}
}

// charge takes the size of the body's buffer from the memory that all bodies share.
func (ex *exchange) charge(n int64) bool {
	more := n - ex.charged
	if ex.s.bodyMemory.Add(more) > ex.set.Limits.BodyMemory {
		ex.s.bodyMemory.Add(-more)
		return false
	}
	ex.charged = n
	return true
}

// dropBody frees a large body once it is not needed any more, though the answer may stream for long.
func (ex *exchange) dropBody() {
	if cap(ex.body) <= keepBody || ex.writing != nil {
		return
	}
	ex.record.BytesIn = int64(len(ex.body))
	ex.body = nil
	ex.s.bodyMemory.Add(-ex.charged)
	ex.charged = 0
}

// requestError says what was wrong with a request that could not be read.
func requestError(err error) *apiError {
	var tooSmall *fasthttp.ErrSmallBuffer
	var timeout net.Error
	switch {
	case errors.As(err, &tooSmall):
		return errHeaderTooLarge
	case errors.Is(err, fasthttp.ErrBodyTooLarge):
		return errBodyTooLarge
	case errors.As(err, &timeout) && timeout.Timeout():
		return errSlowRequest
	}
	return badRequest("invalid_http", "The request is not valid HTTP.")
}
