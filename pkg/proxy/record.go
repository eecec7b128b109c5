// SPDX-License-Identifier: Apache-2.0

package proxy

import "time"

// Outcome is how a request or an attempt ended.
type Outcome uint8

// The outcomes. They are metric labels.
const (
	OutcomeOK            Outcome = iota // answered to the end, whatever the status below 500
	OutcomeClientGone                   // the client left or did not read
	OutcomeUpstreamError                // the backend failed: connection, framing, status 5xx, error event in a stream
	OutcomeTimeout                      // the backend was too slow: connect, first byte, between bytes
	OutcomeLocalReject                  // answered by the proxy itself
	OutcomeConnectFailed                // of an attempt: no connection to the backend
	OutcomeLocalFault                   // of an attempt: this host has no descriptor, port or memory for a connection
	OutcomeBusy                         // of an attempt: the backend answered 429 or 503
)

var outcomeNames = [...]string{"ok", "client_gone", "upstream_error", "timeout", "local_reject", "connect_failed", "local_fault", "busy"}

func (o Outcome) String() string { return outcomeNames[min(int(o), len(outcomeNames)-1)] }

// Record is one line of the access log. It never holds text of a prompt or an answer, a key, or a session's value.
type Record struct {
	Time          time.Time     // when the request's head had arrived
	RequestID     string        // the client's, or a random one
	Method        string        //
	Path          string        // decoded, without the query, at most 256 bytes
	Model         string        // as configured, or "other"; "" if the route has none
	Pool          string        // "" if none was reached
	Backend       string        // of the last attempt
	Reason        string        // why the policy chose it
	Status        int           // 0 if no answer was begun
	Outcome       Outcome       //
	Stream        bool          // an event stream
	PromptTokens  int64         // as the engine reported them, else as counted
	OutputTokens  int64         // as reported, else the events that carried text
	CachedTokens  int64         // of the prompt, as reported
	FinishReason  string        // as reported
	QueueTime     time.Duration // from the head to the dispatch of the last attempt
	FirstByteTime time.Duration // from the head to the answer's first byte; 0 = none came
	TotalTime     time.Duration //
	Attempts      int           // connections tried for it, replays on a fresh connection not counted
	BytesIn       int64         // of the request's body
	BytesOut      int64         // of the answer's body
	Session       string        // what the session was known by: header, cache_key, fingerprint, none; "" = not looked for
	Key           string        // name of the client's key; "" = none is asked for
	Error         string        // what went wrong, in the proxy's words
}
