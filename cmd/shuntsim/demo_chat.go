// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"
)

type chatMessage struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// reply is one answer as its client saw it. The connection stays open until close.
type reply struct {
	local   string // the client's end of the connection
	backend string // x-shunt-backend; empty: shunt's user space did not serve it
	id      string // x-request-id, likewise
	engine  string // x-sim-engine
	handoff bool   // the answer asked to reconnect
	text    string
	first   time.Duration // to the first token
	total   time.Duration
	prompt  int // as the engine counts
	cached  int
	close   func()
}

func chatBody(messages []chatMessage, maxTokens int, seed int) ([]byte, error) {
	return json.Marshal(map[string]any{
		"model": demoModel, "messages": messages, "max_tokens": maxTokens, "ignore_eos": true, "seed": seed,
		"stream": true, "stream_options": map[string]bool{"include_usage": true},
	})
}

// chat sends one streamed request over a connection of its own, kept alive as an SDK would.
func chat(ctx context.Context, dial dialer, host string, body []byte) (*reply, error) {
	r := &reply{}
	tr := &http.Transport{DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := dial(ctx, network, address)
		if err == nil {
			r.local = c.LocalAddr().String()
		}
		return c, err
	}}
	r.close = tr.CloseIdleConnections
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+host+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	start := time.Now()
	resp, err := tr.RoundTrip(req)
	if err != nil {
		return nil, fmt.Errorf("chat: %w", err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		b, err := io.ReadAll(io.LimitReader(resp.Body, 2000))
		r.close()
		return nil, fmt.Errorf("chat: status %d: %s (%w)", resp.StatusCode, b, err)
	}
	r.backend, r.id, r.engine = resp.Header.Get("X-Shunt-Backend"), resp.Header.Get("X-Request-Id"), resp.Header.Get("X-Sim-Engine")
	r.handoff = resp.Close
	if err := r.read(resp.Body, start); err != nil {
		r.close()
		return nil, fmt.Errorf("chat: %w", err)
	}
	return r, nil
}

func (r *reply) read(body io.Reader, start time.Time) error {
	var text strings.Builder
	lines := bufio.NewScanner(body)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok || data == "[DONE]" {
			continue
		}
		var ev struct {
			Choices []struct {
				Delta struct {
					Content string `json:"content"`
				} `json:"delta"`
			} `json:"choices"`
			Usage *struct {
				Prompt  int `json:"prompt_tokens"`
				Details struct {
					Cached int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			} `json:"usage"`
		}
		if err := json.Unmarshal([]byte(data), &ev); err != nil {
			return fmt.Errorf("read event: %w", err)
		}
		for _, c := range ev.Choices {
			if c.Delta.Content != "" && r.first == 0 {
				r.first = time.Since(start)
			}
			text.WriteString(c.Delta.Content)
		}
		if ev.Usage != nil {
			r.prompt, r.cached = ev.Usage.Prompt, ev.Usage.Details.Cached
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read answer: %w", err)
	}
	r.text, r.total = text.String(), time.Since(start)
	if r.first == 0 {
		return io.ErrUnexpectedEOF
	}
	return nil
}

// background is the load beside the conversation: people at one other address, each with a short question after the other.
type background struct {
	stop     context.CancelFunc
	wg       sync.WaitGroup
	mu       sync.Mutex
	answered int
	err      error // the first
}

const backgroundUsers = 3

func startBackground(ctx context.Context, dial dialer, host string) *background {
	b := &background{}
	asking, stop := context.WithCancel(ctx)
	b.stop = stop
	for user := range backgroundUsers {
		b.wg.Go(func() {
			for n := 0; asking.Err() == nil; n++ {
				body, err := chatBody([]chatMessage{
					{"system", strings.Repeat("You help the people in the warehouse. ", 25)},
					{"user", fmt.Sprintf("Question %d of person %d: where is shelf %d?", n+1, user+1, 7*n+user)},
				}, 60, n)
				if err == nil {
					var r *reply
					if r, err = chat(ctx, dial, host, body); err == nil { // ctx: what has begun is answered
						r.close()
					}
				}
				b.mu.Lock()
				if err == nil {
					b.answered++
				} else if b.err == nil {
					b.err = err
				}
				b.mu.Unlock()
				if err != nil {
					return
				}
			}
		})
	}
	return b
}

// end lets the open requests finish and returns how many there were in all.
func (b *background) end() (int, error) {
	b.stop()
	b.wg.Wait()
	return b.answered, b.err
}
