// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"

	"github.com/shunt-lb/shunt/pkg/session"
)

// field is one header field as it came. Both slices point into the block that it was parsed from.
type field struct{ name, value []byte }

// messageError says why a message is not HTTP as this proxy accepts it. Everything ambiguous is refused: what two
// parsers may read in two ways is how a second request is smuggled in.
type messageError string

func (e messageError) Error() string { return string(e) }

const (
	errLineEnd       = messageError("header line does not end in CRLF")
	errUnterminated  = messageError("header block has no end")
	errFieldName     = messageError("invalid character in a header name")
	errFieldValue    = messageError("invalid character in a header value")
	errFolded        = messageError("folded header line")
	errLength        = messageError("invalid content-length")
	errLengthTwice   = messageError("more than one content-length")
	errTransferCode  = messageError("transfer-encoding other than chunked")
	errTwoFramings   = messageError("content-length and transfer-encoding together")
	errOldChunked    = messageError("transfer-encoding in an HTTP/1.0 message")
	errLookalike     = messageError("header name that imitates a framing header")
	errHost          = messageError("exactly one valid host header is required")
	errContinueAfter = messageError("data after the end of the header block")
)

// tokenByte holds the bytes that a method or a header name may have (RFC 9110, section 5.6.2).
var tokenByte = func() (t [256]bool) {
	for c := '0'; c <= '9'; c++ {
		t[c] = true
	}
	for c := 'a'; c <= 'z'; c++ {
		t[c], t[c-32] = true, true
	}
	for _, c := range "!#$%&'*+-.^_`|~" {
		t[c] = true
	}
	return t
}()

// parseFields splits a header block, its closing empty line included, into fields. It is strict: CRLF only, no
// folding, no space before the colon, no control characters.
func parseFields(b []byte, dst []field) ([]field, error) {
	for len(b) > 0 {
		i := bytes.IndexByte(b, '\n')
		if i < 1 || b[i-1] != '\r' {
			return dst, errLineEnd
		}
		line := b[:i-1]
		b = b[i+1:]
		if len(line) == 0 {
			if len(b) > 0 {
				return dst, errContinueAfter
			}
			return dst, nil
		}
		if line[0] == ' ' || line[0] == '\t' {
			return dst, errFolded
		}
		c := bytes.IndexByte(line, ':')
		if c <= 0 {
			return dst, errFieldName
		}
		name, value := line[:c], trimSpace(line[c+1:])
		for _, ch := range name {
			if !tokenByte[ch] {
				return dst, errFieldName
			}
		}
		for _, ch := range value {
			if ch < ' ' && ch != '\t' || ch == 0x7f {
				return dst, errFieldValue
			}
		}
		dst = append(dst, field{name, value})
	}
	return dst, errUnterminated
}

func trimSpace(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t') {
		b = b[1:]
	}
	for len(b) > 0 && (b[len(b)-1] == ' ' || b[len(b)-1] == '\t') {
		b = b[:len(b)-1]
	}
	return b
}

// is compares a header name or a keyword with one in lower case, whatever the case of the first.
func is(b []byte, lower string) bool {
	if len(b) != len(lower) {
		return false
	}
	for i, c := range b {
		if c >= 'A' && c <= 'Z' {
			c |= 0x20
		}
		if c != lower[i] {
			return false
		}
	}
	return true
}

// sameFold compares two names whatever the case of both.
func sameFold(a, b []byte) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		x, y := a[i], b[i]
		if x >= 'A' && x <= 'Z' {
			x |= 0x20
		}
		if y >= 'A' && y <= 'Z' {
			y |= 0x20
		}
		if x != y {
			return false
		}
	}
	return true
}

func lookup(fields []field, lower string) []byte {
	for i := range fields {
		if is(fields[i].name, lower) {
			return fields[i].value
		}
	}
	return nil
}

// framing is how the body of a message is delimited.
type framing struct {
	length  int64 // -1: no content-length
	chunked bool
}

// framingOf reads the framing headers. http10 is the version of the message that carries them.
func framingOf(fields []field, http10 bool) (framing, error) {
	f := framing{length: -1}
	for i := range fields {
		name, value := fields[i].name, fields[i].value
		switch len(name) {
		case len("content-length"):
			if is(name, "content_length") {
				return f, errLookalike
			}
			if !is(name, "content-length") {
				continue
			}
			if f.length >= 0 {
				return f, errLengthTwice
			}
			n, ok := parseDecimal(value)
			if !ok {
				return f, errLength
			}
			f.length = n
		case len("transfer-encoding"):
			if is(name, "transfer_encoding") {
				return f, errLookalike
			}
			if !is(name, "transfer-encoding") {
				continue
			}
			if http10 {
				return f, errOldChunked
			}
			if f.chunked || !is(value, "chunked") {
				return f, errTransferCode
			}
			f.chunked = true
		}
	}
	if f.chunked && f.length >= 0 {
		return f, errTwoFramings
	}
	return f, nil
}

func parseDecimal(b []byte) (int64, bool) {
	if len(b) == 0 || len(b) > 18 {
		return 0, false
	}
	var n int64
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int64(c-'0')
	}
	return n, true
}

// validHost reports whether the fields carry one usable Host. HTTP/1.0 may go without.
func validHost(fields []field, http10 bool) bool {
	var host []byte
	n := 0
	for i := range fields {
		if is(fields[i].name, "host") {
			host = fields[i].value
			n++
		}
	}
	if n == 0 {
		return http10
	}
	if n > 1 || len(host) == 0 || len(host) > 255 {
		return false
	}
	for _, c := range host {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9':
		case c == '.', c == '-', c == '_', c == ':', c == '[', c == ']', c == '%', c == '~':
		default:
			return false
		}
	}
	return true
}

// hopByHop reports whether a header belongs to one connection only, so that a proxy never passes it on. Headers that
// a Connection header names are another matter: see named.
func hopByHop(name []byte) bool {
	switch len(name) {
	case 2:
		return is(name, "te")
	case 6:
		return is(name, "expect")
	case 7:
		return is(name, "trailer") || is(name, "upgrade")
	case 10:
		return is(name, "connection") || is(name, "keep-alive")
	case 14:
		return is(name, "content-length")
	case 16:
		return is(name, "proxy-connection")
	case 17:
		return is(name, "transfer-encoding")
	case 18:
		return is(name, "proxy-authenticate")
	case 19:
		return is(name, "proxy-authorization")
	}
	return false
}

// ours reports whether a request header is one that the proxy sets itself, or one by which a client could steer where
// an engine or a router behind us sends the request (field reports of SSRF name each of them).
func ours(name []byte) bool {
	switch len(name) {
	case 4:
		return is(name, "host")
	case 9:
		return is(name, "forwarded") || is(name, "x-real-ip")
	case 12:
		return is(name, "x-request-id")
	case len(session.IngressHeader):
		return is(name, session.IngressHeader)
	case 15:
		return is(name, "x-forwarded-for") || is(name, "x-shunt-backend")
	case 16:
		return is(name, "x-forwarded-host")
	case 17:
		return is(name, "x-forwarded-proto")
	case 19:
		return is(name, "x-smg-target-worker")
	case 21:
		return is(name, "x-prefiller-host-port")
	case 23:
		return is(name, "x-prefiller-hosts-ports")
	case 25:
		return is(name, "x-data-parallel-host-port") || is(name, "x-envoy-original-dst-host")
	case 30:
		return is(name, "x-gateway-destination-endpoint")
	}
	return false
}

// connectionTokens collects the header names that the Connection headers list. Most messages list none but
// keep-alive and close, which are left out.
func connectionTokens(fields []field, dst [][]byte) [][]byte {
	for i := range fields {
		if !is(fields[i].name, "connection") {
			continue
		}
		for v := fields[i].value; len(v) > 0; {
			var t []byte
			if c := bytes.IndexByte(v, ','); c >= 0 {
				t, v = v[:c], v[c+1:]
			} else {
				t, v = v, nil
			}
			t = trimSpace(t)
			if len(t) > 0 && !is(t, "keep-alive") && !is(t, "close") {
				dst = append(dst, t)
			}
		}
	}
	return dst
}

func named(tokens [][]byte, name []byte) bool {
	for _, t := range tokens {
		if sameFold(t, name) {
			return true
		}
	}
	return false
}

// hasToken reports whether a comma-separated header of that name contains the word.
func hasToken(fields []field, lowerName, lowerToken string) bool {
	for i := range fields {
		if !is(fields[i].name, lowerName) {
			continue
		}
		for v := fields[i].value; ; {
			c := bytes.IndexByte(v, ',')
			t := v
			if c >= 0 {
				t = v[:c]
			}
			if is(trimSpace(t), lowerToken) {
				return true
			}
			if c < 0 {
				break
			}
			v = v[c+1:]
		}
	}
	return false
}

// requestID returns the client's id if it is one that may stand in logs and headers, else nil.
func requestID(fields []field) []byte {
	id := lookup(fields, "x-request-id")
	if len(id) == 0 || len(id) > 128 {
		return nil
	}
	for _, c := range id {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '.', c == '_', c == '-':
		default:
			return nil
		}
	}
	return id
}
