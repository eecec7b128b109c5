// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"strings"
	"sync"
	"testing"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/tokens"
)

// observed is what a Calibration was told.
type observed struct {
	pool, model string
	counted     int64
	usage       tokens.Usage
}

// tripled scales by 3 and keeps what it is told.
type tripled struct {
	mu  sync.Mutex
	all []observed
}

func (c *tripled) Scale(_, _ string, counted int64) int64 { return 3 * counted }

func (c *tripled) Observe(pool, model string, counted int64, u tokens.Usage) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all = append(c.all, observed{pool, model, counted, u})
}

func TestCalibrationIsFed(t *testing.T) {
	counted := func(body string) int64 { // as the front end counts it: 7 of framing and the word
		return 7 + int64(strings.Count(body, "hi"))
	}
	const chatBody = `{"model":"m","messages":[{"role":"user","content":"hi"}]}`
	for _, tc := range []struct {
		name, path, body, answer string
		want                     []tokens.Usage
	}{
		{"unary", chatPath, chatBody, `{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}`,
			[]tokens.Usage{{Prompt: 9, Cached: 4}}},
		{"stream", chatPath, chatBody, "stream:" + chatStream, []tokens.Usage{{Prompt: 1200, Cached: 1024}}},
		{"stream without usage", chatPath, chatBody, "stream:" + event("x") + "data: [DONE]\n\n", nil},
		{"messages", "/v1/messages", chatBody, "stream:" + strings.Replace(messagesStream, `"output_tokens":1}`, `"cache_creation_input_tokens":7,"output_tokens":1}`, 1),
			[]tokens.Usage{{Prompt: 25, Cached: 27, Apart: true}}},
		{"responses", "/v1/responses", `{"model":"m","input":"hi"}`, "stream:" + responsesStream, []tokens.Usage{{Prompt: 11, Cached: 8}}},
		{"unary without usage", chatPath, chatBody, `{"choices":[]}`, nil},
		{"usage of 0", chatPath, chatBody, `{"usage":{"prompt_tokens":0}}`, nil},
		{"an estimate", chatPath, `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x/y"}}]}]}`,
			`{"usage":{"prompt_tokens":900}}`, nil},
		{"a conversation that the server keeps", "/v1/responses", `{"model":"m","input":"hi","previous_response_id":"r"}`,
			`{"usage":{"input_tokens":900}}`, nil},
		{"an error", chatPath, chatBody, `400:{"usage":{"prompt_tokens":9}}`, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var b *fleet.Backend
			var charged int64
			e := newEngine(t, func(p *peer) {
				for g := p.request(); g != nil; g = p.request() {
					charged, _ = b.Load()
					switch kind, rest, _ := strings.Cut(tc.answer, ":"); kind {
					case "stream":
						_ = p.send(streamHead + chunk(rest) + "0\r\n\r\n")
					case "400":
						_ = p.json(400, rest)
					default:
						_ = p.json(200, tc.answer)
					}
				}
			})
			fl := newFleet(t, "least_tokens", e.url())
			b = fl.Backends()[0]
			var c tripled
			f := startFront(t, fl, withCounter(t), func(o *Options) { o.Calibration = &c })
			if a := f.do(post(tc.path, tc.body)); a.err != nil {
				t.Fatal(a.err)
			}
			f.records(1)
			c.mu.Lock()
			defer c.mu.Unlock()
			if len(c.all) != len(tc.want) {
				t.Fatalf("got %+v, want %+v", c.all, tc.want)
			}
			n := counted(tc.body)
			for i, u := range tc.want {
				if want := (observed{"pool", "other", n, u}); c.all[i] != want {
					t.Errorf("got %+v, want %+v", c.all[i], want)
				}
			}
			if len(tc.want) > 0 && charged < 3*n {
				t.Errorf("the ticket holds %d tokens, want three times %d and more", charged, n)
			}
		})
	}
}

// A stream that the client leaves is no sample, even if the engine's usage came before.
func TestAbortedStreamIsNoSample(t *testing.T) {
	var c tripled
	left := make(chan struct{})
	e := newEngine(t, func(p *peer) {
		if p.request() == nil {
			return
		}
		_ = p.send(streamHead + chunk(event("x")+"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9}}\n\n"))
		<-left
		_, _ = p.br.ReadByte() // until the front end has noticed
	})
	f := startFront(t, newFleet(t, "least_tokens", e.url()), withCounter(t), func(o *Options) { o.Calibration = &c })
	cl := f.dial()
	cl.send(post(chatPath, chat(`,"stream":true`)))
	r := cl.head("POST")
	buf := make([]byte, 1)
	if _, err := r.Body.Read(buf); err != nil {
		t.Fatal(err)
	}
	cl.Close()
	close(left)
	if r := f.records(1)[0]; r.Outcome != OutcomeClientGone {
		t.Errorf("outcome %v", r.Outcome)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.all) != 0 {
		t.Errorf("got %+v", c.all)
	}
}
