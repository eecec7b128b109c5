// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
)

func TestCleanPath(t *testing.T) {
	for target, want := range map[string]string{
		"/v1/models":           "/v1/models",
		"/v1/models?x=/../%2f": "/v1/models",
		"/v1/models/":          "/v1/models/",
		"/v1/models/a%2Bb%20c": "/v1/models/a+b c",
		"/v1/%6dodels":         "/v1/models",
		"/v1/models/a.b":       "/v1/models/a.b",
		"/v1/models/é":         "/v1/models/é",
		"/":                    "/",
		// Refused.
		"":                        "!",
		"v1":                      "!",
		"*":                       "!",
		"http://h/v1/models":      "!",
		"//admin":                 "!",
		"/v1//models":             "!",
		"/v1/../admin":            "!",
		"/v1/./models":            "!",
		"/v1/..":                  "!",
		"/v1/.":                   "!",
		"/v1/%2e%2e/admin":        "!",
		"/v1/%2E./admin":          "!",
		"/v1%2fadmin":             "!",
		"/v1%5cadmin":             "!",
		"/v1/%252e%252e/admin":    "!",
		"/v1/%25":                 "!",
		"/v1\\admin":              "!",
		"/v1/a%00b":               "!",
		"/v1/a%0d%0ab":            "!",
		"/v1/a\x00":               "!",
		"/v1/a b":                 "!",
		"/v1/%":                   "!",
		"/v1/%2":                  "!",
		"/v1/%zz":                 "!",
		"/v1/models#x":            "!",
		"/v1/a%3bb":               "!",
		"/v1/models%3f":           "!",
		"/v1/models?x\\y":         "!",
		"/v1/chat/completions/..": "!",
	} {
		path, _, err := cleanPath([]byte(target), nil)
		got := string(path)
		if err != nil {
			got = "!"
		}
		if got != want {
			t.Errorf("%q: %q, want %q", target, got, want)
		}
	}
}

func TestAllowList(t *testing.T) {
	def, err := newAllowList(nil)
	if err != nil {
		t.Fatal(err)
	}
	own, err := newAllowList([]string{"/a/*/c", "/b/**", "/d"})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		l     *allowList
		path  string
		allow bool
	}{
		{def, "/v1/chat/completions", true}, {def, "/v1/chat/completions/", false}, {def, "/v1/chat", false},
		{def, "/v1/responses/resp_1/cancel", true}, {def, "/v1/responses/", false}, {def, "/v1/messages/count_tokens", true},
		{def, "/v1/models/org/name", true}, {def, "/v2/models/m/infer", true}, {def, "/v2/models/m/versions/1/infer", true},
		{def, "/v2/models/m/load", false}, {def, "/v2/repository/models/m/load", false}, {def, "/v1/load_lora_adapter", false},
		{def, "/flush_cache", false}, {def, "/", false}, {def, "/health", false}, {def, "/V1/models", false},
		{own, "/a/x/c", true}, {own, "/a//c", false}, {own, "/a/c", false}, {own, "/a/x/c/d", false}, {own, "/b/x", true},
		{own, "/b/x/y", true}, {own, "/b", false}, {own, "/b/", false}, {own, "/d", true}, {own, "/v1/models", false},
	} {
		if got := tt.l.allows([]byte(tt.path)); got != tt.allow {
			t.Errorf("%s: %v, want %v", tt.path, got, tt.allow)
		}
	}
	for _, bad := range []string{"", "a", "/a/**/b", "/a*", "//", "/a/../b", "/a?b"} {
		if _, err := newAllowList([]string{bad}); err == nil {
			t.Errorf("pattern %q was accepted", bad)
		}
	}
}

func FuzzCleanPath(f *testing.F) {
	f.Add([]byte("/v1/%6dodels/../x%2f"))
	f.Fuzz(func(t *testing.T, b []byte) {
		path, _, err := cleanPath(b, nil)
		if err != nil {
			return
		}
		if path[0] != '/' || bytes.Contains(path, []byte("//")) || bytes.Contains(path, []byte("/../")) ||
			bytes.HasSuffix(path, []byte("/..")) || bytes.ContainsAny(path, "\\\x00\r\n%") {
			t.Errorf("%q became %q", b, path)
		}
	})
}

func TestParseFields(t *testing.T) {
	for block, want := range map[string]error{
		"A: b\r\n\r\n":          nil,
		"A:b\r\nc:  d \r\n\r\n": nil,
		"A:\r\n\r\n":            nil,
		"\r\n":                  nil,
		"A: b\n\r\n":            errLineEnd,
		"A: b\r\n\n":            errLineEnd,
		"A: b\r\n":              errUnterminated,
		"A : b\r\n\r\n":         errFieldName,
		"A\t: b\r\n\r\n":        errFieldName,
		": b\r\n\r\n":           errFieldName,
		"A b\r\n\r\n":           errFieldName,
		"A\x00: b\r\n\r\n":      errFieldName,
		"A: b\rc\r\n\r\n":       errFieldValue,
		"A: b\x00\r\n\r\n":      errFieldValue,
		"A: b\r\n c\r\n\r\n":    errFolded,
		"A: b\r\n\tc\r\n\r\n":   errFolded,
		"A: b\r\n\r\nx":         errContinueAfter,
	} {
		if _, err := parseFields([]byte(block), nil); !errors.Is(err, want) || want == nil && err != nil {
			t.Errorf("%q: %v, want %v", block, err, want)
		}
	}
}

func TestFraming(t *testing.T) {
	for _, tt := range []struct {
		block  string
		http10 bool
		want   framing
		err    error
	}{
		{"A: b\r\n", false, framing{length: -1}, nil},
		{"Content-Length: 0\r\n", false, framing{length: 0}, nil},
		{"content-LENGTH: 12\r\n", true, framing{length: 12}, nil},
		{"Transfer-Encoding: Chunked\r\n", false, framing{length: -1, chunked: true}, nil},
		{"Content-Length: 1\r\nContent-Length: 1\r\n", false, framing{}, errLengthTwice},
		{"Content-Length: 1, 1\r\n", false, framing{}, errLength},
		{"Content-Length: +1\r\n", false, framing{}, errLength},
		{"Content-Length: -1\r\n", false, framing{}, errLength},
		{"Content-Length: 0x1\r\n", false, framing{}, errLength},
		{"Content-Length: 1 2\r\n", false, framing{}, errLength},
		{"Content-Length:\r\n", false, framing{}, errLength},
		{"Content-Length: 9999999999999999999\r\n", false, framing{}, errLength},
		{"Content_Length: 1\r\n", false, framing{}, errLookalike},
		{"Transfer_Encoding: chunked\r\n", false, framing{}, errLookalike},
		{"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n", false, framing{}, errTwoFramings},
		{"Transfer-Encoding: chunked\r\nContent-Length: 1\r\n", false, framing{}, errTwoFramings},
		{"Transfer-Encoding: gzip, chunked\r\n", false, framing{}, errTransferCode},
		{"Transfer-Encoding: identity\r\n", false, framing{}, errTransferCode},
		{"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", false, framing{}, errTransferCode},
		{"Transfer-Encoding: xchunked\r\n", false, framing{}, errTransferCode},
		{"Transfer-Encoding: chunked\r\n", true, framing{}, errOldChunked},
	} {
		fields, err := parseFields([]byte(tt.block+"\r\n"), nil)
		if err != nil {
			t.Fatalf("%q: %v", tt.block, err)
		}
		got, err := framingOf(fields, tt.http10)
		if err != tt.err || err == nil && got != tt.want {
			t.Errorf("%q: %+v %v, want %+v %v", tt.block, got, err, tt.want, tt.err)
		}
	}
}

// pieces is a connection that delivers its text in pieces and then ends.
type pieces struct {
	net.Conn
	rest  []byte
	piece int
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(b, p.rest[:min(p.piece, len(p.rest))])
	p.rest = p.rest[n:]
	return n, nil
}

func readAnswer(raw string, piece int, method string) (status int, body string, rest string, err error) {
	src := &pieces{rest: []byte(raw), piece: piece}
	c := &upConn{nc: src, buf: make([]byte, 64)}
	var h responseHead
	if err := c.readHead(&h, 4<<10); err != nil {
		return 0, "", "", err
	}
	var b bodyReader
	b.start(c, &h, method == "HEAD")
	var out []byte
	for {
		p, err := b.next()
		out = append(out, p...)
		if err == io.EOF {
			return h.status, string(out), string(c.buf[c.r:c.w]) + string(src.rest), nil
		}
		if err != nil {
			return h.status, string(out), "", err
		}
	}
}

func TestReadAnswer(t *testing.T) {
	long := strings.Repeat("0123456789", 50)
	for _, tt := range []struct {
		name, raw, method string
		status            int
		body, rest        string
		err               error
	}{
		{"length", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhelloNEXT", "POST", 200, "hello", "NEXT", nil},
		{"length zero", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nNEXT", "POST", 200, "", "NEXT", nil},
		{"no reason", "HTTP/1.1 200\r\nContent-Length: 1\r\n\r\nx", "POST", 200, "x", "", nil},
		{"chunks", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;a=b\r\n world\r\n0\r\nT: 1\r\n\r\nNEXT", "POST", 200, "hello world", "NEXT", nil},
		{"long chunk", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1F4\r\n" + long + "\r\n0\r\n\r\n", "POST", 200, long, "", nil},
		{"long header", "HTTP/1.1 200 OK\r\nX: " + long + "\r\nContent-Length: 1\r\n\r\nx", "POST", 200, "x", "", nil},
		{"until close", "HTTP/1.1 200 OK\r\n\r\n" + long, "POST", 200, long, "", nil},
		{"http/1.0", "HTTP/1.0 200 OK\r\n\r\nabc", "POST", 200, "abc", "", nil},
		{"head", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nNEXT", "HEAD", 200, "", "NEXT", nil},
		{"204", "HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\nNEXT", "POST", 204, "", "NEXT", nil},
		{"304", "HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\nNEXT", "GET", 304, "", "NEXT", nil},
		{"interim", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 P\r\nA: b\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", "POST", 200, "x", "", nil},
		{"short length", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel", "POST", 200, "hel", "", io.ErrUnexpectedEOF},
		{"short chunk", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", "POST", 200, "hel", "", io.ErrUnexpectedEOF},
		{"no last chunk", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n", "POST", 200, "hel", "", io.ErrUnexpectedEOF},
		{"no end of trailer", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n0\r\n", "POST", 200, "hel", "", io.ErrUnexpectedEOF},
		{"empty", "", "POST", 0, "", "", io.EOF},
		{"cut head", "HTTP/1.1 200 OK\r\nA: b", "POST", 0, "", "", io.EOF},
		{"garbage", "SSH-2.0-x\r\n\r\n", "POST", 0, "", "", errStatusLine},
		{"bad status", "HTTP/1.1 2x0 OK\r\n\r\n", "POST", 0, "", "", errStatusLine},
		{"long status", "HTTP/1.1 2000 OK\r\n\r\n", "POST", 0, "", "", errStatusLine},
		{"http/2", "HTTP/2.0 200 OK\r\n\r\n", "POST", 0, "", "", errStatusLine},
		{"upgrade", "HTTP/1.1 101 Switching\r\n\r\n", "POST", 0, "", "", errUpgrade},
		{"two framings", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", "POST", 0, "", "", errTwoFramings},
		{"two lengths", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", "POST", 0, "", "", errLengthTwice},
		{"bare lf", "HTTP/1.1 200 OK\r\nA: b\nB: c\r\n\r\n", "POST", 0, "", "", errLineEnd},
		{"folded", "HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n", "POST", 0, "", "", errFolded},
		{"space before colon", "HTTP/1.1 200 OK\r\nContent-Length : 5\r\n\r\n", "POST", 0, "", "", errFieldName},
		{"bad chunk size", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "POST", 200, "", "", errChunk},
		{"chunk size with a prefix", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n", "POST", 200, "", "", errChunk},
		{"huge chunk size", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n", "POST", 200, "", "", errChunk},
		{"chunk longer than its size", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhello\r\n", "POST", 200, "hel", "", errChunk},
		{"bare lf after size", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\nhel\r\n", "POST", 200, "", "", errChunk},
		{"head too big", "HTTP/1.1 200 OK\r\nX: " + strings.Repeat("y", 5000) + "\r\n\r\n", "POST", 0, "", "", errHeadTooBig},
		{"head without end", "HTTP/1.1 200 OK\r\nX: " + strings.Repeat("y", 50_000), "POST", 0, "", "", errHeadTooBig},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, piece := range []int{1, 2, 3, 7, 61, 100_000} {
				status, body, rest, err := readAnswer(tt.raw, piece, tt.method)
				if !errors.Is(err, tt.err) || tt.err == nil && err != nil || status != tt.status || body != tt.body || tt.err == nil && rest != tt.rest {
					t.Errorf("in pieces of %d: %d %q %q %v, want %d %q %q %v", piece, status, body, rest, err, tt.status, tt.body, tt.rest, tt.err)
				}
			}
		})
	}
}

func FuzzReadAnswer(f *testing.F) {
	f.Add("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;a=b\r\n world\r\n0\r\nT: 1\r\n\r\nNEXT", 3)
	f.Add("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhelloNEXT", 9)
	f.Fuzz(func(t *testing.T, raw string, piece int) {
		s1, b1, r1, err1 := readAnswer(raw, 1<<20, "POST")
		s2, b2, r2, err2 := readAnswer(raw, max(1, piece), "POST")
		if s1 != s2 || b1 != b2 || r1 != r2 || !errors.Is(err1, err2) && err1 != nil {
			t.Errorf("%q: %d %q %q %v, in pieces of %d: %d %q %q %v", raw, s1, b1, r1, err1, piece, s2, b2, r2, err2)
		}
	})
}

func TestRequestID(t *testing.T) {
	for id, ok := range map[string]bool{"a": true, "A-b_c.9": true, strings.Repeat("x", 128): true, "": false,
		strings.Repeat("x", 129): false, "a b": false, "a\tb": false, "é": false, "a\"b": false} {
		if got := requestID([]field{{[]byte("X-Request-ID"), []byte(id)}}) != nil; got != ok {
			t.Errorf("%q: %v", id, got)
		}
	}
}

func TestQuoted(t *testing.T) {
	if got := string(appendQuoted(nil, "a\"\\\n\x00\u2028é\xff")); got != `"a\"\\\u000a\u0000\u2028é`+"\ufffd"+`"` {
		t.Errorf("%s", got)
	}
}

func TestRetryBudget(t *testing.T) {
	for _, n := range []int{1, 5, 25, 26, 100, 10_000} {
		var b retryBudget
		b.init()
		retries := 0
		for range n {
			b.request()
			for b.take() { // an outage: everything wants to be tried again
				retries++
			}
		}
		if limit := max(5, n/5); retries > limit {
			t.Errorf("%d requests were retried %d times, want at most %d", n, retries, limit)
		}
	}
}
