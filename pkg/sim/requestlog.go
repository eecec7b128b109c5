// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"context"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"
)

// RequestRecord is one inference request as the engine saw it (GET /debug/requests).
type RequestRecord struct {
	N            uint64  `json:"n"`    // counts from 1 in order of arrival
	Conn         uint64  `json:"conn"` // id of the connection, counts from 1
	Remote       string  `json:"remote_addr"`
	Local        string  `json:"local_addr"`
	Method       string  `json:"method"`
	Path         string  `json:"path"`
	Model        string  `json:"model,omitempty"`
	PromptTokens int     `json:"prompt_tokens"`
	CachedTokens int     `json:"cached_tokens"`
	OutputTokens int     `json:"output_tokens"`
	TTFTMS       float64 `json:"ttft_ms"` // arrival to first token, real time; 0 before
	TotalMS      float64 `json:"total_ms"`
	UserAgent    string  `json:"user_agent,omitempty"`
	RequestID    string  `json:"x_request_id,omitempty"`
	Status       int     `json:"status"` // 0 while running
	Aborted      bool    `json:"aborted,omitempty"`
}

// ConnRecord is one connection that carried inference requests.
type ConnRecord struct {
	ID       uint64 `json:"id"`
	Remote   string `json:"remote_addr"`
	Local    string `json:"local_addr"`
	Requests int    `json:"requests"`
	Open     bool   `json:"open"`
}

// RequestLog is the answer of GET /debug/requests: the newest requests and connections, oldest first.
type RequestLog struct {
	Engine      string          `json:"engine"`
	Total       uint64          `json:"total"`
	Requests    []RequestRecord `json:"requests"`
	Connections []ConnRecord    `json:"connections"`
}

type record struct {
	RequestRecord
	n       int // choices per prompt
	started time.Time
}

// requestLog keeps a bounded record of requests and connections.
type requestLog struct {
	max int

	mu       sync.Mutex
	total    uint64
	lastConn uint64
	open     map[net.Conn]uint64
	records  []*record
	conns    []*ConnRecord
}

func newRequestLog(max int) *requestLog {
	return &requestLog{max: max, open: make(map[net.Conn]uint64)}
}

type connKey struct{}

func (l *requestLog) connContext(ctx context.Context, c net.Conn) context.Context {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lastConn++
	l.open[c] = l.lastConn
	return context.WithValue(ctx, connKey{}, ConnRecord{
		ID: l.lastConn, Remote: c.RemoteAddr().String(), Local: c.LocalAddr().String(), Open: true})
}

func (l *requestLog) connState(c net.Conn, st http.ConnState) {
	if st != http.StateClosed && st != http.StateHijacked {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if id := l.open[c]; id != 0 {
		delete(l.open, c)
		if i := l.findConn(id); i >= 0 {
			l.conns[i].Open = false
		}
	}
}

func (l *requestLog) findConn(id uint64) int {
	return slices.IndexFunc(l.conns, func(c *ConnRecord) bool { return c.ID == id })
}

// begin records a request's arrival.
func (l *requestLog) begin(r *http.Request) *record {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.total++
	rec := &record{started: time.Now(), RequestRecord: RequestRecord{
		N: l.total, Remote: r.RemoteAddr, Method: r.Method, Path: r.URL.Path,
		UserAgent: clip(r.UserAgent()), RequestID: clip(r.Header.Get("X-Request-Id")),
	}}
	if c, ok := r.Context().Value(connKey{}).(ConnRecord); ok {
		rec.Conn, rec.Local = c.ID, c.Local
		i := l.findConn(c.ID)
		if i < 0 {
			l.conns = trim(append(l.conns, &c), l.max)
			i = len(l.conns) - 1
		}
		l.conns[i].Requests++
	}
	l.records = trim(append(l.records, rec), l.max)
	return rec
}

// trim keeps the newest entries. It lets the slice grow to twice the bound, so that a request costs no shift.
func trim[T any](s []T, max int) []T {
	if len(s) >= 2*max {
		return slices.Clone(s[len(s)-max:])
	}
	return s
}

func clip(s string) string { return s[:min(len(s), 128)] }

func (l *requestLog) firstToken(rec *record, d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if rec.TTFTMS == 0 {
		rec.TTFTMS = millis(d)
	}
}

func (l *requestLog) end(rec *record, u usage, aborted bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	rec.PromptTokens, rec.CachedTokens, rec.OutputTokens, rec.Aborted = u.prompt, u.cached, u.output, aborted
	rec.TotalMS = millis(time.Since(rec.started))
}

func (l *requestLog) status(rec *record, code int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	rec.Status = code
	if rec.TotalMS == 0 {
		rec.TotalMS = millis(time.Since(rec.started))
	}
}

func (l *requestLog) model(rec *record, model string, prompt int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	rec.Model, rec.PromptTokens = clip(model), prompt
}

func (l *requestLog) list(engine string) RequestLog {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := RequestLog{Engine: engine, Total: l.total, Requests: []RequestRecord{}, Connections: []ConnRecord{}}
	for _, r := range l.records[max(0, len(l.records)-l.max):] {
		out.Requests = append(out.Requests, r.RequestRecord)
	}
	for _, c := range l.conns[max(0, len(l.conns)-l.max):] {
		out.Connections = append(out.Connections, *c)
	}
	return out
}

func (l *requestLog) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.records, l.conns, l.total = nil, nil, 0
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
