// SPDX-License-Identifier: Apache-2.0

package app

import (
	"encoding/json"
	"io"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/pkg/proxy"
)

// accessLine is one line of the access log. No field ever holds text of a prompt, a key or a session's value.
type accessLine struct {
	Time         string  `json:"time"`
	RequestID    string  `json:"request_id"`
	Method       string  `json:"method"`
	Path         string  `json:"path"`
	Model        string  `json:"model,omitempty"`
	Pool         string  `json:"pool,omitempty"`
	Backend      string  `json:"backend,omitempty"`
	Reason       string  `json:"reason,omitempty"`
	Key          string  `json:"key,omitempty"`     // name of the client's key, never the key
	Session      string  `json:"session,omitempty"` // where its identity came from
	Status       int     `json:"status"`
	Outcome      string  `json:"outcome"`
	Stream       bool    `json:"stream,omitempty"`
	PromptTokens int64   `json:"prompt_tokens"`
	OutputTokens int64   `json:"output_tokens"`
	CachedTokens int64   `json:"cached_tokens,omitempty"`
	Finish       string  `json:"finish_reason,omitempty"`
	QueueMS      float64 `json:"queue_ms"`
	FirstByteMS  float64 `json:"first_byte_ms,omitempty"`
	TotalMS      float64 `json:"total_ms"`
	Attempts     int     `json:"attempts"`
	BytesIn      int64   `json:"bytes_in"`
	BytesOut     int64   `json:"bytes_out"`
	Error        string  `json:"error,omitempty"`
}

// accessLog returns what writes a record to w as one line of JSON, in one write; nil for a nil writer.
func accessLog(w io.Writer) func(*proxy.Record) {
	if w == nil {
		return nil
	}
	var mu sync.Mutex
	ms := func(d time.Duration) float64 {
		return float64(d.Round(10*time.Microsecond)) / float64(time.Millisecond)
	}
	return func(r *proxy.Record) {
		line, err := json.Marshal(accessLine{
			Time: r.Time.UTC().Format("2006-01-02T15:04:05.000Z"), RequestID: r.RequestID, Method: r.Method, Path: r.Path, Model: r.Model,
			Pool: r.Pool, Backend: r.Backend, Reason: r.Reason, Key: r.Key, Session: r.Session, Status: r.Status, Outcome: r.Outcome.String(),
			Stream: r.Stream, PromptTokens: r.PromptTokens, OutputTokens: r.OutputTokens, CachedTokens: r.CachedTokens, Finish: r.FinishReason,
			QueueMS: ms(r.QueueTime), FirstByteMS: ms(r.FirstByteTime), TotalMS: ms(r.TotalTime), Attempts: r.Attempts,
			BytesIn: r.BytesIn, BytesOut: r.BytesOut, Error: r.Error,
		})
		if err != nil {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		_, _ = w.Write(append(line, '\n'))
	}
}
