// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestChatUnary(t *testing.T) {
	h := start(t, ServerOptions{Engine: instant, Name: "e1"}, "127.0.0.1:0")
	code, b, hd := h.do("POST", "/v1/chat/completions",
		`{"model":"m","messages":[{"role":"user","content":"hello there"}],"max_tokens":5}`, "x-request-id", "r-1")
	v := decode(t, b)
	if code != 200 || hd.Get("x-request-id") != "r-1" || hd.Get("x-sim-engine") != "e1" {
		t.Fatalf("%d %v %s", code, hd, b)
	}
	if at(v, "object") != "chat.completion" || at(v, "model") != "m" || at(v, "choices", 0, "finish_reason") != "length" ||
		at(v, "choices", 0, "message", "role") != "assistant" {
		t.Errorf("%s", b)
	}
	if text := at(v, "choices", 0, "message", "content").(string); len(Tokenize(nil, text)) != 5 {
		t.Errorf("%q is not 5 tokens", text)
	}
	// begin, user mark, two words, end, assistant mark
	if at(v, "usage", "prompt_tokens") != 6.0 || at(v, "usage", "completion_tokens") != 5.0 || at(v, "usage", "total_tokens") != 11.0 ||
		at(v, "usage", "prompt_tokens_details", "cached_tokens") != 0.0 {
		t.Errorf("usage: %v", at(v, "usage"))
	}
}

func TestAnswerLength(t *testing.T) {
	for _, tc := range []struct {
		name   string
		fields string
		answer int
		want   float64
		reason string
	}{
		{"max_tokens ends it", `,"max_tokens":7`, 0, 7, "length"},
		{"max_completion_tokens ends it", `,"max_completion_tokens":8`, 0, 8, "length"},
		{"it ends by itself", `,"max_tokens":1000`, 40, 40, "stop"},
		{"no limit", ``, 33, 33, "stop"},
		{"min_tokens", `,"min_tokens":50`, 40, 50, "stop"},
		{"ignore_eos", `,"max_tokens":300,"ignore_eos":true`, 40, 300, "length"},
		{"two choices", `,"max_tokens":7,"n":2`, 0, 14, "length"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := start(t, ServerOptions{Engine: instant, AnswerTokens: tc.answer}, "127.0.0.1:0")
			v := h.post("/v1/chat/completions", `{"messages":[{"role":"user","content":"x"}]`+tc.fields+`}`)
			if at(v, "usage", "completion_tokens") != tc.want || at(v, "choices", 0, "finish_reason") != tc.reason {
				t.Errorf("%v, %v", at(v, "usage"), at(v, "choices", 0, "finish_reason"))
			}
		})
	}
	h := start(t, ServerOptions{Engine: instant}, "127.0.0.1:0")
	body := `{"messages":[{"role":"user","content":"x"}],"n":2}`
	a, b := h.post("/v1/chat/completions", body), h.post("/v1/chat/completions", body)
	text := at(a, "choices", 0, "message", "content")
	if text != at(b, "choices", 0, "message", "content") || text == at(a, "choices", 1, "message", "content") {
		t.Error("answers must depend on prompt and choice, and on nothing else")
	}
}

func TestChatStream(t *testing.T) {
	h := start(t, ServerOptions{Engine: instant}, "127.0.0.1:0")
	body := `{"model":"m","messages":[{"role":"user","content":"hello"}],"max_tokens":6,"n":2%s}`
	unary := h.post("/v1/chat/completions", fmt.Sprintf(body, ""))
	for _, withUsage := range []bool{false, true} {
		extra := `,"stream":true`
		if withUsage {
			extra += `,"stream_options":{"include_usage":true}`
		}
		code, b, hd := h.do("POST", "/v1/chat/completions", fmt.Sprintf(body, extra))
		if code != 200 || !strings.HasPrefix(hd.Get("content-type"), "text/event-stream") {
			t.Fatalf("%d %v", code, hd)
		}
		evs := events(t, b)
		if !evs[len(evs)-1].done {
			t.Fatalf("no [DONE] at the end of %s", b)
		}
		evs = evs[:len(evs)-1]
		if withUsage {
			last := evs[len(evs)-1].data
			if at(last, "usage", "completion_tokens") != 12.0 || len(at(last, "choices").([]any)) != 0 {
				t.Errorf("usage event: %v", last)
			}
			evs = evs[:len(evs)-1]
		}
		var text [2]string
		var tokens, finished int
		for _, e := range evs {
			i := int(at(e.data, "choices", 0, "index").(float64))
			if s, ok := at(e.data, "choices", 0, "delta", "content").(string); ok && s != "" {
				text[i] += s
				tokens++
			}
			if at(e.data, "choices", 0, "finish_reason") == "length" {
				finished++
			}
			if at(e.data, "object") != "chat.completion.chunk" || at(e.data, "usage") != nil {
				t.Errorf("event %v", e.data)
			}
		}
		if tokens != 12 || finished != 2 {
			t.Errorf("%d token events, %d ends", tokens, finished)
		}
		for i := range text {
			if text[i] != at(unary, "choices", i, "message", "content") {
				t.Errorf("choice %d streamed %q, unary %v", i, text[i], at(unary, "choices", i, "message", "content"))
			}
		}
	}
}

func TestConversationHitsPrefixCache(t *testing.T) {
	h := start(t, ServerOptions{Engine: instant}, "127.0.0.1:0")
	msgs := []map[string]string{{"role": "system", "content": strings.Repeat("be kind and brief ", 50)}, {"role": "user", "content": "one two three"}}
	var known float64
	for turn := 1; turn <= 3; turn++ {
		body, err := json.Marshal(map[string]any{"messages": msgs, "max_tokens": 40, "ignore_eos": true, "model": "m"})
		if err != nil {
			t.Fatal(err)
		}
		v := h.post("/v1/chat/completions", string(body))
		cached := at(v, "usage", "prompt_tokens_details", "cached_tokens").(float64)
		prompt := at(v, "usage", "prompt_tokens").(float64)
		if want := float64(int(known) / BlockTokens * BlockTokens); cached != want {
			t.Errorf("turn %d: %v of %v prompt tokens cached, want %v", turn, cached, prompt, want)
		}
		known = prompt + 40 - 1
		msgs = append(msgs, map[string]string{"role": "assistant", "content": at(v, "choices", 0, "message", "content").(string)},
			map[string]string{"role": "user", "content": "and four"})
	}
}

func TestOtherAPIs(t *testing.T) {
	h := start(t, ServerOptions{Engine: instant, Models: []string{"m", "m2"}}, "127.0.0.1:0")
	v := h.post("/v1/completions", `{"model":"m","prompt":["one two","three"],"n":2,"max_tokens":3}`)
	if len(at(v, "choices").([]any)) != 4 || at(v, "usage", "prompt_tokens") != 5.0 || at(v, "usage", "completion_tokens") != 12.0 ||
		at(v, "object") != "text_completion" {
		t.Errorf("completions: %v", v)
	}
	if v := h.post("/v1/completions", `{"model":"m","prompt":[1,2,3]}`); at(v, "usage", "prompt_tokens") != 3.0 || at(v, "usage", "completion_tokens") != 16.0 {
		t.Errorf("token prompt: %v", v)
	}
	_, b, _ := h.do("POST", "/v1/completions", `{"model":"m","prompt":"x","max_tokens":3,"stream":true}`)
	if evs := events(t, b); len(evs) != 5 || at(evs[0].data, "choices", 0, "text") == "" {
		t.Errorf("completions stream: %s", b)
	}

	v = h.post("/v1/embeddings", `{"model":"m","input":["a b","c"],"dimensions":8}`)
	if len(at(v, "data").([]any)) != 2 || len(at(v, "data", 1, "embedding").([]any)) != 8 || at(v, "usage", "prompt_tokens") != 5.0 {
		t.Errorf("embeddings: %v", v)
	}
	v = h.post("/v1/embeddings", `{"model":"m","input":"a","dimensions":8,"encoding_format":"base64"}`)
	if raw, err := base64.StdEncoding.DecodeString(at(v, "data", 0, "embedding").(string)); err != nil || len(raw) != 32 {
		t.Errorf("base64 embedding: %d bytes, %v", len(raw), err)
	}

	v = h.post("/v1/responses", `{"model":"m","instructions":"be brief","input":"hello","max_output_tokens":4}`)
	text := at(v, "output", 0, "content", 0, "text").(string)
	if len(Tokenize(nil, text)) != 4 || at(v, "usage", "output_tokens") != 4.0 || at(v, "status") != "incomplete" {
		t.Errorf("responses: %v", v)
	}
	_, b, _ = h.do("POST", "/v1/responses", `{"model":"m","instructions":"be brief","input":[{"role":"user","content":[{"type":"input_text","text":"hello"}]}],"max_output_tokens":4,"stream":true}`)
	streamed := ""
	evs := events(t, b)
	for _, e := range evs {
		if e.name == "response.output_text.delta" {
			streamed += at(e.data, "delta").(string)
		}
	}
	if streamed != text || evs[0].name != "response.created" || evs[len(evs)-1].name != "response.incomplete" {
		t.Errorf("responses stream: %q, want %q", streamed, text)
	}

	v = h.post("/v1/messages", `{"model":"m2","system":"be brief","messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}],"max_tokens":4}`)
	if at(v, "stop_reason") != "max_tokens" || at(v, "usage", "output_tokens") != 4.0 {
		t.Errorf("messages: %v", v)
	}
	text = at(v, "content", 0, "text").(string)
	_, b, _ = h.do("POST", "/v1/messages", `{"model":"m2","system":"be brief","messages":[{"role":"user","content":"hi"}],"max_tokens":4,"stream":true}`)
	streamed = ""
	evs = events(t, b)
	for _, e := range evs {
		if e.name == "content_block_delta" {
			streamed += at(e.data, "delta", "text").(string)
		}
	}
	if streamed != text || evs[0].name != "message_start" || evs[len(evs)-1].name != "message_stop" {
		t.Errorf("messages stream: %s", b)
	}

	code, b, _ := h.do("GET", "/v1/models", "")
	if v := decode(t, b); code != 200 || at(v, "data", 1, "id") != "m2" {
		t.Errorf("models: %s", b)
	}
}

func TestErrors(t *testing.T) {
	h := start(t, ServerOptions{Engine: Options{Fixed: &FixedTiming{}, KVTokens: 1600}, Models: []string{"m"}}, "127.0.0.1:0")
	for _, tc := range []struct {
		path, body string
		code       int
	}{
		{"/v1/chat/completions", `{`, 400},
		{"/v1/chat/completions", `{"model":"m","messages":[]}`, 400},
		{"/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":0}`, 400},
		{"/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"x"}],"n":0}`, 400},
		{"/v1/chat/completions", `{"model":"other","messages":[{"role":"user","content":"x"}]}`, 404},
		{"/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("word ", 2000) + `"}]}`, 400},
		{"/v1/completions", `{"model":"m"}`, 400},
		{"/v1/completions", `{"model":"m","prompt":{"a":1}}`, 400},
		{"/v1/completions", `{"model":"m","prompt":[]}`, 400},
		{"/v1/embeddings", `{"model":"m","input":"x","dimensions":-1}`, 400},
		{"/v1/messages", `{"model":"m","messages":[{"role":"user","content":"x"}]}`, 400},
		{"/v1/responses", `{"model":"m"}`, 400},
	} {
		code, b, _ := h.do("POST", tc.path, tc.body)
		if code != tc.code || at(decode(t, b), "error", "message") == nil {
			t.Errorf("%s %.60s: %d %s", tc.path, tc.body, code, b)
		}
	}
	if code, _, _ := h.do("POST", "/v1/nothing", "{}"); code != 404 {
		t.Errorf("unknown path: %d", code)
	}
	if st := h.stats(); st.Running+st.Waiting != 0 {
		t.Errorf("%+v", st)
	}
}

func (h *harness) stats() Stats {
	h.s.mu.Lock()
	defer h.s.mu.Unlock()
	return h.s.engine.Stats()
}

// eventually polls a condition that other goroutines bring about.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

func TestClientGoneFreesSlot(t *testing.T) {
	for _, tc := range []struct {
		name   string
		fixed  FixedTiming
		stream bool
		head   bool // the head arrives before the client leaves
	}{
		{"stream, before the first token", FixedTiming{TTFT: time.Hour}, true, true},
		{"stream, between tokens", FixedTiming{ITL: time.Hour}, true, true},
		{"unary", FixedTiming{TTFT: time.Hour}, false, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := start(t, ServerOptions{Engine: Options{Fixed: &tc.fixed, MaxSeqs: 1}}, "127.0.0.1:0")
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			body := fmt.Sprintf(`{"messages":[{"role":"user","content":"x"}],"max_tokens":10,"stream":%v}`, tc.stream)
			req, err := http.NewRequestWithContext(ctx, "POST", h.url+"/v1/chat/completions", strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			result := make(chan error, 1)
			headSeen := make(chan struct{})
			go func() {
				resp, err := h.client.Do(req)
				if err == nil {
					close(headSeen)
					_, err = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
				}
				result <- err
			}()
			eventually(t, "the request runs", func() bool { return h.stats().Running == 1 })
			if tc.head {
				<-headSeen
			}
			cancel()
			if err := <-result; !errors.Is(err, context.Canceled) {
				t.Fatalf("client: %v", err)
			}
			eventually(t, "slot and blocks are free", func() bool { s := h.stats(); return s.Running == 0 && s.KVUsage == 0 })
			eventually(t, "the request is recorded as aborted", func() bool {
				l := h.s.log.list("")
				return len(l.Requests) == 1 && l.Requests[0].Aborted && l.Requests[0].Status == statusClientGone
			})
		})
	}
}

func TestRequestLog(t *testing.T) {
	h := start(t, ServerOptions{Engine: instant, Name: "e7", MaxRecords: 8}, "127.0.0.1:0")
	body := `{"model":"m","messages":[{"role":"user","content":"hello"}],"max_tokens":2}`
	h.post("/v1/chat/completions", body)
	h.do("POST", "/v1/chat/completions", body, "Connection", "close", "User-Agent", "test/1", "x-request-id", "abc")
	h.post("/v1/chat/completions", body)

	eventually(t, "the first connection is recorded as closed", func() bool { return !h.s.log.list("").Connections[0].Open })
	var l RequestLog
	_, b, _ := h.do("GET", "/debug/requests", "")
	if err := json.Unmarshal(b, &l); err != nil {
		t.Fatal(err)
	}
	if l.Engine != "e7" || l.Total != 3 || len(l.Requests) != 3 || len(l.Connections) != 2 {
		t.Fatalf("%s", b)
	}
	r := l.Requests
	if r[0].Conn != r[1].Conn || r[2].Conn == r[1].Conn || r[0].N != 1 || r[2].N != 3 {
		t.Errorf("connections %d %d %d", r[0].Conn, r[1].Conn, r[2].Conn)
	}
	if r[1].UserAgent != "test/1" || r[1].RequestID != "abc" || r[1].Path != "/v1/chat/completions" || r[1].Model != "m" ||
		r[1].OutputTokens != 2 || r[1].PromptTokens != 5 || r[1].Status != 200 || r[1].Aborted || "http://"+r[1].Local != h.url || r[1].Remote != r[0].Remote {
		t.Errorf("%+v", r[1])
	}
	if c := l.Connections; c[0].Requests != 2 || c[0].Open || c[1].Requests != 1 || !c[1].Open || c[0].Remote != r[0].Remote {
		t.Errorf("%+v", c)
	}
	for range 30 {
		h.post("/v1/chat/completions", body)
	}
	if l := h.s.log.list(""); l.Total != 33 || len(l.Requests) != 8 || l.Requests[7].N != 33 || len(h.s.log.records) >= 16 {
		t.Errorf("bounded list: total %d, %d listed, %d kept", l.Total, len(l.Requests), len(h.s.log.records))
	}
	h.do("DELETE", "/debug/requests", "")
	if l := h.s.log.list(""); l.Total != 0 || len(l.Requests) != 0 {
		t.Errorf("after DELETE: %+v", l)
	}
}

func TestMetrics(t *testing.T) {
	h := start(t, ServerOptions{Engine: instant, Models: []string{"m"}}, "127.0.0.1:0")
	body := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("word ", 30) + `"}],"max_tokens":2}`
	h.post("/v1/chat/completions", body)
	h.post("/v1/chat/completions", body)
	_, b, _ := h.do("GET", "/metrics", "")
	for _, line := range []string{
		`vllm:num_requests_running{engine="0",model_name="m"} 0`,
		`vllm:num_requests_waiting{engine="0",model_name="m"} 0`,
		`vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0`,
		`vllm:prefix_cache_queries_total{engine="0",model_name="m"} 70`,
		`vllm:prefix_cache_hits_total{engine="0",model_name="m"} 32`,
		`vllm:prompt_tokens_total{engine="0",model_name="m"} 70`,
		`vllm:generation_tokens_total{engine="0",model_name="m"} 4`,
		`vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 2`,
		`vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 2`,
		`vllm:e2e_request_latency_seconds_count{engine="0",model_name="m"} 2`,
		`vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 2`,
		`vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="26313"} 1`,
	} {
		if !strings.Contains(string(b), line+"\n") {
			t.Errorf("no line %q", line)
		}
	}
	if t.Failed() {
		t.Logf("%s", b)
	}
}

func TestFailures(t *testing.T) {
	h := start(t, ServerOptions{Engine: instant, FailHealth: true}, "127.0.0.1:0")
	health := func(want int) {
		t.Helper()
		if code, _, _ := h.do("GET", "/health", ""); code != want {
			t.Errorf("health %d, want %d", code, want)
		}
	}
	health(503)
	h.do("POST", "/debug/fail?health=0", "")
	health(200)
	h.do("POST", "/debug/fail?health=500&status=503&count=2", "")
	health(500)
	for _, want := range []int{503, 503, 200} {
		if code, _, _ := h.do("POST", "/v1/completions", `{"prompt":"x"}`); code != want {
			t.Errorf("request %d, want %d", code, want)
		}
	}
	if code, _, _ := h.do("POST", "/debug/fail?health=7", ""); code != 400 {
		t.Errorf("bad status accepted: %d", code)
	}
}

func TestBlob(t *testing.T) {
	h := start(t, ServerOptions{Engine: instant}, "127.0.0.1:0")
	want := sha256.New()
	if _, err := io.Copy(want, BlobReader(3, 300_001)); err != nil {
		t.Fatal(err)
	}
	for _, rate := range []string{"", "&rate=100000000"} {
		code, b, hd := h.do("GET", "/debug/blob?bytes=300001&seed=3"+rate, "")
		if got := sha256.Sum256(b); code != 200 || hd.Get("content-length") != "300001" || !bytes.Equal(got[:], want.Sum(nil)) {
			t.Errorf("%d, %d bytes", code, len(b))
		}
	}
}

func TestIPv6(t *testing.T) {
	h := start(t, ServerOptions{Engine: instant}, "[::1]:0")
	h.post("/v1/completions", `{"prompt":"x"}`)
	if l := h.s.log.list(""); !strings.HasPrefix(l.Requests[0].Remote, "[::1]:") {
		t.Errorf("remote address %s", l.Requests[0].Remote)
	}
}

func TestShutdownLetsRequestsFinish(t *testing.T) {
	h := start(t, ServerOptions{Engine: Options{Fixed: &FixedTiming{TTFT: 50 * time.Millisecond, ITL: time.Millisecond}}}, "127.0.0.1:0")
	got := make(chan int, 1)
	go func() {
		resp, err := h.client.Post(h.url+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"x","stream":true,"max_tokens":20}`))
		if err != nil {
			got <- -1
			return
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			got <- -2
			return
		}
		got <- bytes.Count(b, []byte("data: "))
	}()
	eventually(t, "the request runs", func() bool { return h.stats().Running == 1 })
	h.stop()
	if n := <-got; n != 22 {
		t.Errorf("%d events, want 22", n)
	}
}

func TestGraceEnds(t *testing.T) {
	h := start(t, ServerOptions{Engine: Options{Fixed: &FixedTiming{TTFT: time.Hour}}, Grace: 10 * time.Millisecond}, "127.0.0.1:0")
	got := make(chan error, 1)
	go func() {
		resp, err := h.client.Post(h.url+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"x"}`))
		if err == nil {
			_ = resp.Body.Close()
		}
		got <- err
	}()
	eventually(t, "the request runs", func() bool { return h.stats().Running == 1 })
	h.stop()
	if err := <-got; err == nil {
		t.Error("the request was answered")
	}
}

// TestManyClients runs a mixed load on a scaled model clock, with clients that leave, and expects everything back at rest.
func TestManyClients(t *testing.T) {
	h := start(t, ServerOptions{Engine: Options{KVTokens: 4096, MaxSeqs: 8, Overhead: time.Millisecond}, Speed: 200}, "127.0.0.1:0")
	var wg sync.WaitGroup
	for i := range 24 {
		wg.Go(func() {
			for k := range 6 {
				ctx, cancel := context.WithCancel(context.Background())
				body := fmt.Sprintf(`{"messages":[{"role":"user","content":"%s %d %d"}],"max_tokens":30,"stream":%v}`,
					strings.Repeat("word ", 20*(i%5)), i, k, k%2 == 0)
				req, err := http.NewRequestWithContext(ctx, "POST", h.url+"/v1/chat/completions", strings.NewReader(body))
				if err != nil {
					t.Error(err)
				}
				if (i+k)%3 == 0 {
					time.AfterFunc(time.Duration(i)*100*time.Microsecond, cancel)
				}
				resp, err := h.client.Do(req)
				if err == nil {
					_, err = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
				}
				if err != nil && !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
				cancel()
			}
		})
	}
	wg.Wait()
	eventually(t, "the engine is at rest", func() bool {
		s := h.stats()
		return s.Running == 0 && s.Waiting == 0 && s.KVUsage == 0
	})
}
