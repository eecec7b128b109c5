// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/valyala/fasthttp"
)

// apiError is an answer that the proxy makes itself, in the shape that OpenAI's clients read.
type apiError struct {
	status  int
	kind    string // error.type
	code    string // error.code; "" = null
	param   string // error.param; "" = null
	message string
	retry   int // seconds for Retry-After; 0 = none
}

const (
	kindRequest = "invalid_request_error"
	kindServer  = "server_error"
)

func badRequest(code, message string) *apiError {
	return &apiError{status: 400, kind: kindRequest, code: code, message: message}
}

func notFound(method, path []byte) *apiError {
	return &apiError{status: 404, kind: kindRequest, code: "unknown_url",
		message: "Unknown request URL: " + clip(string(method), 16) + " " + clip(string(path), 256) + "."}
}

func modelNotFound(model string) *apiError {
	return &apiError{status: 404, kind: kindRequest, code: "model_not_found", param: "model",
		message: "The model `" + clip(model, 256) + "` does not exist or you do not have access to it."}
}

var (
	errModelMissing = &apiError{status: 400, kind: kindRequest, code: "missing_required_parameter", param: "model",
		message: "you must provide a model parameter"}
	errNoRoute = &apiError{status: 404, kind: kindRequest, code: "no_route", param: "model",
		message: "This request names no model, and here the model decides which server gets a request."}
	errEncoded = &apiError{status: 415, kind: kindRequest, code: "unsupported_content_encoding",
		message: "A request body with a content-encoding cannot be routed by its model here. Send it unencoded."}
	errBodyTooLarge = &apiError{status: 413, kind: kindRequest, code: "request_too_large",
		message: "The request body is larger than this server accepts."}
	errHeaderTooLarge = &apiError{status: 431, kind: kindRequest, code: "header_too_large",
		message: "The request header is larger than this server accepts."}
	errSlowRequest = &apiError{status: 408, kind: kindRequest, code: "request_timeout",
		message: "The request did not arrive in time."}
	errMethod = &apiError{status: 405, kind: kindRequest, code: "method_not_allowed",
		message: "This method is not allowed here."}
	errVersion = &apiError{status: 505, kind: kindRequest, code: "http_version",
		message: "This server speaks HTTP/1.1 and HTTP/1.0."}
	errNoBackend = &apiError{status: 503, kind: kindServer, code: "no_backend", retry: 1,
		message: "No inference server is available for this request. Try again later."}
	errOverloaded = &apiError{status: 503, kind: kindServer, code: "overloaded", retry: 1,
		message: "Every inference server is at its limit. Try again later."}
	errBodyMemory = &apiError{status: 503, kind: kindServer, code: "overloaded", retry: 1,
		message: "Too many large requests are in flight. Try again later."}
	errUpstream = &apiError{status: 502, kind: kindServer, code: "upstream_error",
		message: "The inference server could not be reached or broke off the connection."}
	errUpstreamInvalid = &apiError{status: 502, kind: kindServer, code: "upstream_invalid_response",
		message: "The inference server's answer is not valid HTTP."}
	errUpstreamHeader = &apiError{status: 502, kind: kindServer, code: "upstream_header_too_large",
		message: "The header of the inference server's answer is larger than this server accepts."}
	errUpstreamTimeout = &apiError{status: 504, kind: kindServer, code: "upstream_timeout",
		message: "The inference server did not answer in time."}
	errInternal = &apiError{status: 500, kind: kindServer, code: "internal_error",
		message: "The load balancer failed to handle this request."}
)

// upstreamBusy stands for an answer of 429 or 503 that could not be passed on.
func upstreamBusy(status int, pause time.Duration) *apiError {
	return &apiError{status: status, kind: kindServer, code: "upstream_busy", retry: int((pause + time.Second - 1) / time.Second),
		message: "The inference server is at its limit. Try again later."}
}

// append appends the error's JSON.
func (e *apiError) append(b []byte) []byte {
	b = append(b, `{"error":{"message":`...)
	b = appendQuoted(b, e.message)
	b = append(b, `,"type":`...)
	b = appendQuoted(b, e.kind)
	b = append(b, `,"param":`...)
	b = appendNullable(b, e.param)
	b = append(b, `,"code":`...)
	b = appendNullable(b, e.code)
	return append(b, "}}"...)
}

func appendNullable(b []byte, s string) []byte {
	if s == "" {
		return append(b, "null"...)
	}
	return appendQuoted(b, s)
}

// appendQuoted appends a JSON string. Whatever is not valid UTF-8 becomes U+FFFD.
func appendQuoted(b []byte, s string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b = append(b, '\\', byte(r))
		case r < ' ' || r == 0x7f || r == 0x2028 || r == 0x2029:
			b = append(b, '\\', 'u', hex[r>>12&15], hex[r>>8&15], hex[r>>4&15], hex[r&15])
		default:
			b = utf8.AppendRune(b, r)
		}
	}
	return append(b, '"')
}

func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return s[:n] + "..."
}

// write makes the error the answer.
func (e *apiError) write(r *fasthttp.Response, requestID []byte) {
	r.SetStatusCode(e.status)
	r.Header.SetContentType("application/json")
	r.Header.AddBytesV(headerRequestID, requestID)
	if e.retry > 0 {
		r.Header.Add("Retry-After", strconv.Itoa(e.retry))
	}
	if e.status == 401 {
		r.Header.Add("WWW-Authenticate", "Bearer")
	}
	if e.status == 405 {
		r.Header.Add("Allow", "GET, HEAD, POST, DELETE, OPTIONS")
	}
	r.SetBody(e.append(nil))
}

const (
	headerRequestID = "x-request-id"
	headerBackend   = "x-shunt-backend"
)
