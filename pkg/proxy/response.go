// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"
	"errors"
	"io"
)

// responseHead is the head of a backend's answer. The fields point into the connection's buffer and are valid until
// the body is read.
type responseHead struct {
	status int
	http10 bool
	fields []field
	framing
}

var errHeadTooBig = errors.New("the backend's response header is larger than the limit")

const (
	errStatusLine = messageError("invalid status line")
	errUpgrade    = messageError("protocol switch that nobody asked for")
	errChunk      = messageError("invalid chunk")
	errTrailer    = messageError("trailer section too long")
	errSurplus    = messageError("data after the end of the body")
)

// maxTrailer bounds what may follow the last chunk. Trailers are read and dropped.
const maxTrailer = 16 << 10

// readHead reads the head of the answer, interim answers skipped.
func (c *upConn) readHead(h *responseHead, limit int) error {
	for {
		end, err := c.headEnd(limit)
		if err != nil {
			return err
		}
		block := c.buf[c.r:end]
		c.headAt, c.r = c.r, end
		if err := parseHead(block, h); err != nil {
			return err
		}
		if h.status == 101 {
			return errUpgrade
		}
		if h.status >= 200 {
			return nil
		}
	}
}

// headEnd reads until the buffer holds a whole head and returns the index after it.
func (c *upConn) headEnd(limit int) (int, error) {
	scanned := 0
	for {
		b := c.buf[c.r:c.w]
		if i := bytes.Index(b[max(scanned-3, 0):], crlf2); i >= 0 {
			n := max(scanned-3, 0) + i + len(crlf2)
			if n > limit {
				return 0, errHeadTooBig
			}
			return c.r + n, nil
		}
		scanned = len(b)
		if scanned >= limit {
			return 0, errHeadTooBig
		}
		if c.w == len(c.buf) {
			if c.r > 0 {
				c.w = copy(c.buf, c.buf[c.r:c.w])
				c.r = 0
			} else {
				c.buf = append(c.buf, make([]byte, len(c.buf))...)
			}
		}
		if err := c.more(); err != nil {
			return 0, err
		}
	}
}

var (
	crlf2  = []byte("\r\n\r\n")
	http11 = []byte("HTTP/1.1 ")
	http10 = []byte("HTTP/1.0 ")
	crlf   = []byte("\r\n")
)

func parseHead(block []byte, h *responseHead) error {
	i := bytes.Index(block, crlf)
	if i < len("HTTP/1.1 200") {
		return errStatusLine
	}
	line := block[:i]
	switch {
	case bytes.HasPrefix(line, http11):
		h.http10 = false
	case bytes.HasPrefix(line, http10):
		h.http10 = true
	default:
		return errStatusLine
	}
	h.status = 0
	for _, c := range line[9:12] {
		if c < '0' || c > '9' {
			return errStatusLine
		}
		h.status = h.status*10 + int(c-'0')
	}
	if h.status < 100 || len(line) > 12 && line[12] != ' ' {
		return errStatusLine
	}
	for _, c := range line[12:] {
		if c < ' ' && c != '\t' || c == 0x7f {
			return errStatusLine
		}
	}
	var err error
	if h.fields, err = parseFields(block[i+2:], h.fields[:0]); err != nil {
		return err
	}
	h.framing, err = framingOf(h.fields, h.http10)
	return err
}

// bodyReader reads one answer's body, strictly framed. next returns slices of the connection's buffer.
type bodyReader struct {
	c        *upConn
	kind     bodyKind
	state    uint8
	left     int64 // of the body, or of the chunk
	digits   int
	trailer  int
	lineLen  int
	read     int64 // bytes of body so far
	finished bool  // the body was read to its end
}

type bodyKind uint8

const (
	bodyNone bodyKind = iota
	bodyFixed
	bodyChunked
	bodyUntilClose
)

// start prepares for the body of the answer to a request with that method.
func (b *bodyReader) start(c *upConn, h *responseHead, head bool) {
	*b = bodyReader{c: c}
	switch {
	case head || h.status < 200 || h.status == 204 || h.status == 304:
		b.finished = true
	case h.chunked:
		b.kind = bodyChunked
	case h.length == 0:
		b.finished = true
	case h.length > 0:
		b.kind, b.left = bodyFixed, h.length
	default:
		b.kind = bodyUntilClose
	}
}

// next returns the next bytes of the body, as many as are there without waiting for more. io.EOF comes with the last
// ones or after them; io.ErrUnexpectedEOF when the connection ended before the body.
func (b *bodyReader) next() ([]byte, error) {
	if b.finished {
		return nil, io.EOF
	}
	c := b.c
	for {
		if c.r == c.w {
			c.r, c.w = 0, 0
			if err := c.more(); err != nil {
				if err == io.EOF {
					if b.kind == bodyUntilClose {
						b.finished = true
						return nil, io.EOF
					}
					err = io.ErrUnexpectedEOF
				}
				return nil, err
			}
		}
		var p []byte
		var err error
		switch b.kind {
		case bodyFixed:
			p = c.buf[c.r:min(c.w, c.r+int(min(b.left, int64(len(c.buf)))))]
			c.r += len(p)
			if b.left -= int64(len(p)); b.left == 0 {
				b.finished = true
				err = io.EOF
			}
		case bodyUntilClose:
			p = c.buf[c.r:c.w]
			c.r = c.w
		default:
			p, err = b.chunks()
		}
		b.read += int64(len(p))
		if len(p) > 0 || err != nil {
			return p, err
		}
	}
}

const (
	chunkSize uint8 = iota
	chunkExt
	chunkSizeLF
	chunkData
	chunkCR
	chunkLF
	chunkTrailer
	chunkTrailerLF
)

// chunks decodes what the buffer holds, the payloads of several chunks moved together.
func (b *bodyReader) chunks() ([]byte, error) {
	c := b.c
	buf := c.buf
	start, end := -1, -1 // of the payload so far
	var err error
	i := c.r
loop:
	for i < c.w {
		ch := buf[i]
		switch b.state {
		case chunkSize:
			v, ok := unhex(ch)
			switch {
			case ok && b.digits < 15:
				b.left = b.left<<4 | int64(v)
				b.digits++
			case b.digits > 0 && ch == ';':
				b.state = chunkExt
			case b.digits > 0 && ch == '\r':
				b.state = chunkSizeLF
			default:
				err = errChunk
				break loop
			}
			i++
		case chunkExt:
			switch {
			case ch == '\r':
				b.state = chunkSizeLF
			case ch < ' ' && ch != '\t' || ch == 0x7f || b.lineLen > 1024:
				err = errChunk
				break loop
			}
			b.lineLen++
			i++
		case chunkSizeLF:
			if ch != '\n' {
				err = errChunk
				break loop
			}
			b.lineLen, b.digits = 0, 0
			b.state = chunkData
			if b.left == 0 {
				b.state = chunkTrailer
			}
			i++
		case chunkData:
			n := int(min(b.left, int64(c.w-i)))
			if start < 0 {
				start, end = i, i+n
			} else {
				end += copy(buf[end:], buf[i:i+n])
			}
			i += n
			if b.left -= int64(n); b.left == 0 {
				b.state = chunkCR
			}
		case chunkCR, chunkLF:
			if ch != crlf[b.state-chunkCR] {
				err = errChunk
				break loop
			}
			if b.state++; b.state > chunkLF {
				b.state = chunkSize
			}
			i++
		case chunkTrailer:
			switch {
			case ch == '\r':
				b.state = chunkTrailerLF
			case ch == '\n' || b.trailer > maxTrailer:
				err = errTrailer
				break loop
			default:
				b.lineLen++
			}
			b.trailer++
			i++
		case chunkTrailerLF:
			if ch != '\n' {
				err = errChunk
				break loop
			}
			i++
			if b.lineLen == 0 {
				b.finished = true
				err = io.EOF
				break loop
			}
			b.lineLen = 0
			b.state = chunkTrailer
		}
	}
	c.r = i
	if start < 0 {
		return nil, err
	}
	return buf[start:end], err
}
