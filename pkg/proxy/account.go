// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"strconv"
	"time"

	"github.com/shunt-lb/shunt/pkg/tokens"
)

const maxLoggedPath = 256

// describe puts the request's part into the record, while its bytes are there.
func (ex *exchange) describe() {
	if ex.s.o.AccessLog == nil || ex.record.Method != "" {
		return
	}
	r := &ex.record
	r.Method = methodName(ex.method)
	r.Path = clip(ex.set.paths.name(ex.path), maxLoggedPath)
	r.RequestID = string(ex.id)
}

func methodName(m []byte) string {
	switch string(m) {
	case "POST":
		return "POST"
	case "GET":
		return "GET"
	case "HEAD":
		return "HEAD"
	}
	return clip(string(m), 16)
}

// account enters the exchange into metrics, means and the access log. Probes by other shunts come every second and
// are none of what either is read for.
func (ex *exchange) account() {
	if ex.probe {
		return
	}
	now := time.Now()
	fig := &ex.meter.scan.figures
	prompt, output := ex.prompt, fig.output
	if n := fig.wholePrompt(); n > 0 {
		prompt = n
	}
	if output == 0 && ex.eventStream {
		output = fig.tokens
	}
	if ex.stats == nil {
		name := ""
		if ex.pool != nil {
			name = ex.pool.Name()
		}
		ex.stats = ex.s.metrics.pool(name)
	}
	ex.stats.request(ex.status, ex.outcome)
	if !ex.firstByte.IsZero() {
		ex.stats.firstByte.Observe(ex.firstByte.Sub(ex.began).Seconds())
	}
	if !ex.firstToken.IsZero() {
		ex.stats.ttft.Observe(ex.firstToken.Sub(ex.began).Seconds())
	}
	if ex.outcome == OutcomeOK && ex.status < 300 && ex.pool != nil {
		ex.stats.prompt.Add(float64(prompt))
		ex.stats.output.Add(float64(output))
		if ex.query.OutputTokens > 0 && (fig.reported || ex.eventStream) {
			ex.pool.ObserveOutput(output)
		}
		if ex.s.o.Calibration != nil && ex.exact && fig.wholePrompt() > 0 {
			ex.s.o.Calibration.Observe(ex.pool.Name(), ex.label, ex.counted, fig.usage())
		}
		// An engine that reports no cached tokens at all says nothing of its cache.
		if ex.s.o.Index != nil && ex.ticket != nil && fig.cached > 0 {
			ex.s.o.Index.Correct(ex.ticket.Backend().ID(), int(ex.ticket.Cached()), int(fig.cached))
		}
		if ex.s.o.Tracker != nil && ex.key != 0 {
			ex.s.o.Tracker.Observe(ex.key, prompt, output)
		}
	}
	if ex.s.o.AccessLog == nil {
		return
	}
	ex.describe()
	r := &ex.record
	r.Time = ex.began
	r.Model, r.Session = ex.label, ex.source
	if ex.pool != nil {
		r.Pool = ex.pool.Name()
	}
	if ex.ticket != nil {
		r.Backend, r.Reason = ex.ticket.Backend().Name(), string(ex.ticket.Reason())
	}
	r.Status, r.Outcome, r.Error = ex.status, ex.outcome, ex.failure
	r.Stream = ex.eventStream
	r.PromptTokens, r.OutputTokens, r.CachedTokens = prompt, output, fig.cached
	r.FinishReason = finishReason(fig.finish[:fig.nfinish])
	if !ex.dispatched.IsZero() {
		r.QueueTime = ex.dispatched.Sub(ex.began)
	}
	if !ex.firstByte.IsZero() {
		r.FirstByteTime = ex.firstByte.Sub(ex.began)
	}
	r.TotalTime = now.Sub(ex.began)
	r.Attempts = ex.attempts
	r.BytesIn = max(r.BytesIn, int64(len(ex.body)))
	r.BytesOut = ex.sent
	ex.s.o.AccessLog(r)
}

// usage is what was reported of the prompt, as the calibration takes it.
func (f *figures) usage() tokens.Usage {
	if f.read+f.written > 0 {
		return tokens.Usage{Prompt: f.prompt, Cached: f.read + f.written, Apart: true}
	}
	return tokens.Usage{Prompt: f.prompt, Cached: f.cached}
}

// finishReason returns a reason that is a plain word; an engine's text does not get into logs this way.
func finishReason(b []byte) string {
	switch string(b) {
	case "stop":
		return "stop"
	case "length":
		return "length"
	case "tool_calls":
		return "tool_calls"
	}
	for _, c := range b {
		if (c < 'a' || c > 'z') && c != '_' {
			return "other"
		}
	}
	return string(b)
}

func appendInt(b []byte, n int64) []byte { return strconv.AppendInt(b, n, 10) }
