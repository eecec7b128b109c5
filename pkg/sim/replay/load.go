// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// LoadOptions describe a replay over HTTP. Zero values mean the defaults named.
type LoadOptions struct {
	URL     string  // of the balancer or engine, without a path
	Model   string  // default "sim"
	Speedup float64 // the trace's time passes that many times as fast; default 1
	Shrink  int     // prompts and answers are that many times shorter; default 1
	Timeout time.Duration
	// Progress is told how many requests have ended, now and then. nil = nobody.
	Progress func(done int)
}

// loadWords make the prompts: each is one token to the simulated engines, and to the usual encodings.
var loadWords = strings.Fields("time year people way day man thing woman life child world school state family student group country problem hand part place case week company system program question work government number night point home water room mother area money story fact month lot right study book eye job word business issue side kind head house service friend father power hour game line end member law car city")

// appendBlock writes the words of one block.
func appendBlock(b []byte, id uint64, tokens int) []byte {
	for i := range tokens {
		b = append(b, loadWords[mix(id*4096+uint64(i)+1)%uint64(len(loadWords))]...)
		b = append(b, ' ')
	}
	return b
}

// body makes the request: prompts of equal blocks begin with equal text.
func (l *loader) body(i int, r *Request) []byte {
	prompt, output := max(r.Prompt/l.o.Shrink, 1), max(r.Output/l.o.Shrink, 1)
	b := append([]byte(`{"model":`), strconv.Quote(l.o.Model)...)
	b = append(b, `,"stream":true,"stream_options":{"include_usage":true},"ignore_eos":true,"max_tokens":`...)
	b = strconv.AppendInt(b, int64(output), 10)
	b = append(b, `,"messages":[{"role":"user","content":"`...)
	per := l.t.BlockTokens / l.o.Shrink
	left := prompt
	for _, id := range r.Blocks {
		n := min(per, left)
		b = appendBlock(b, id, n)
		left -= n
	}
	b = appendBlock(b, uint64(i)|1<<61, left)
	return append(b, `"}]}`...)
}

type loader struct {
	o      LoadOptions
	t      *Trace
	client *http.Client
	start  time.Time
	run    *Run

	mu       sync.Mutex
	backends map[string]int
	done     int
}

// Load sends the trace as HTTP requests, each when its time has come whatever became of those before (in a closed loop, of
// other sessions), and returns when all have ended. Servers are told apart by the header x-shunt-backend.
func Load(ctx context.Context, t *Trace, o LoadOptions) (*Run, error) {
	if o.Model == "" {
		o.Model = "sim"
	}
	if o.Speedup <= 0 {
		o.Speedup = 1
	}
	o.Shrink = max(o.Shrink, 1)
	if o.Timeout <= 0 {
		o.Timeout = 10 * time.Minute
	}
	var d net.Dialer
	d.SetMultipathTCP(false)
	l := &loader{o: o, t: t, backends: map[string]int{}, start: time.Now(), run: &Run{Outcomes: make([]Outcome, len(t.Requests)), Speedup: o.Speedup},
		client: &http.Client{Timeout: o.Timeout, Transport: &http.Transport{DialContext: d.DialContext, MaxIdleConnsPerHost: 256, IdleConnTimeout: 4 * time.Second}}}
	defer l.client.CloseIdleConnections()
	var wg sync.WaitGroup
	later := map[uint64][]int{}
	if t.Closed {
		for i := range t.Requests {
			if r := &t.Requests[i]; r.Session != 0 && r.Turn > 0 {
				later[r.Session] = append(later[r.Session], i)
			}
		}
	}
	for i := range t.Requests {
		r := &t.Requests[i]
		if t.Closed && r.Session != 0 && r.Turn > 0 {
			continue
		}
		if !l.wait(ctx, time.Until(l.start.Add(l.scaled(r.Arrival)))) {
			break
		}
		wg.Go(func() {
			l.one(ctx, i)
			for _, j := range later[r.Session] {
				if !l.wait(ctx, l.scaled(t.Requests[j].Think)) {
					return
				}
				l.one(ctx, j)
			}
		})
	}
	wg.Wait()
	l.run.Span = time.Since(l.start)
	l.run.Busy = make([]time.Duration, len(l.run.Computed))
	if err := context.Cause(ctx); err != nil {
		return l.run, fmt.Errorf("send trace: %w", err)
	}
	return l.run, nil
}

func (l *loader) scaled(d time.Duration) time.Duration {
	return time.Duration(float64(d) / l.o.Speedup)
}

func (l *loader) wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// one sends one request and enters what became of it.
func (l *loader) one(ctx context.Context, i int) {
	r, out := &l.t.Requests[i], &l.run.Outcomes[i]
	begun := time.Now()
	*out = Outcome{Request: r, Arrival: begun.Sub(l.start), Backend: -1, Failed: true}
	backend, tokens, usage, err := l.exchange(ctx, l.body(i, r), begun, out)
	out.Latency = time.Since(begun)
	out.Failed = err != nil || out.TTFT == 0
	if tokens > 1 {
		out.PerTok = (out.Latency - out.TTFT) / time.Duration(tokens-1)
	}
	out.Cached = usage.Details.Cached * l.o.Shrink
	l.mu.Lock()
	defer l.mu.Unlock()
	if backend != "" {
		n, ok := l.backends[backend]
		if !ok {
			n = len(l.backends)
			l.backends[backend] = n
			l.run.Computed = append(l.run.Computed, 0)
		}
		out.Backend = n
		l.run.Computed[n] += usage.Prompt*l.o.Shrink - out.Cached
	}
	l.done++
	if l.o.Progress != nil {
		l.o.Progress(l.done)
	}
}

type loadUsage struct {
	Prompt  int `json:"prompt_tokens"`
	Details struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

var errStream = errors.New("stream ended without [DONE]")

func (l *loader) exchange(ctx context.Context, body []byte, begun time.Time, out *Outcome) (backend string, tokens int, u loadUsage, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, l.o.URL+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return "", 0, u, fmt.Errorf("make request: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	if out.Request.Session != 0 {
		req.Header.Set("X-Session-Id", strconv.FormatUint(out.Request.Session, 10))
	}
	res, err := l.client.Do(req)
	if err != nil {
		return "", 0, u, fmt.Errorf("send request: %w", err)
	}
	defer res.Body.Close()
	backend = res.Header.Get("X-Shunt-Backend")
	if backend == "" {
		backend = res.Header.Get("X-Sim-Engine")
	}
	if res.StatusCode != http.StatusOK {
		_, _ = io.CopyN(io.Discard, res.Body, 64<<10)
		return backend, 0, u, fmt.Errorf("send request: status %d", res.StatusCode)
	}
	lines := bufio.NewReader(res.Body)
	done := false
	for {
		line, err := lines.ReadBytes('\n')
		if done && errors.Is(err, io.EOF) {
			return backend, tokens, u, nil // read to its end, so that the connection can be used again
		}
		data, ok := bytes.CutPrefix(line, []byte("data: "))
		switch {
		case ok && bytes.HasPrefix(data, []byte("[DONE]")):
			done = true
		case ok && bytes.Contains(data, []byte(`"content":"`)) && !bytes.Contains(data, []byte(`"content":""`)):
			if tokens++; tokens == 1 {
				out.TTFT = time.Since(begun)
			}
		case ok && bytes.Contains(data, []byte(`"usage":{`)):
			var v struct {
				Usage loadUsage `json:"usage"`
			}
			if json.Unmarshal(data, &v) == nil {
				u = v.Usage
			}
		}
		if err != nil {
			return backend, tokens, u, errStream
		}
	}
}
