// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// l7Config is a configuration without steering.
func (w *world) l7Config(policy string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "listen: 0.0.0.0:8080\nadmin: {listen: 127.0.0.1:9090}\npools:\n  - name: main\n    policy: %s\n    health: {interval: 200ms}\n    backends:\n", policy)
	for i, e := range w.Engines {
		fmt.Fprintf(&b, "      - {name: %s, url: 'http://%s'}\n", engineName(i), netip.AddrPortFrom(e.V4, 8000))
	}
	return b.String()
}

const nodeClient = `
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "sk-marker-key" });
const messages = [{ role: "user", content: "Say hello in three words." }];
const plain = await client.chat.completions.create({ model: "gpt-4", messages, max_tokens: 6 });
if (!plain.choices[0].message.content || plain.usage.completion_tokens !== 6) throw new Error("plain: " + JSON.stringify(plain));
const stream = await client.chat.completions.create({ model: "gpt-4", messages, max_tokens: 6, stream: true, stream_options: { include_usage: true } });
let text = "", usage = null, events = 0;
for await (const event of stream) {
  events++;
  text += event.choices[0]?.delta?.content ?? "";
  if (event.usage) usage = event.usage;
}
if (!text || events < 6 || !usage || usage.completion_tokens !== 6) throw new Error("stream: " + JSON.stringify({ text, events, usage }));
try {
  await client.chat.completions.create({ model: "gpt-4", messages: "x".repeat(3_000), max_tokens: -1 }, { maxRetries: 0 });
} catch (e) {
  if (!(e instanceof OpenAI.APIError)) throw e;
}
let refused = null;
try { await client.get("/not/a/route", { maxRetries: 0 }); } catch (e) { refused = e; }
if (!(refused instanceof OpenAI.NotFoundError) || !refused.requestID || refused.code !== "unknown_url") throw new Error("unknown route: " + refused);
console.log("ok", events);
`

// The official client, plain and streamed.
func TestOpenAINodeClient(t *testing.T) {
	node := needTool(t, "node")
	modules := os.Getenv("SHUNT_NODE_MODULES")
	if modules == "" {
		need(t, errors.New("SHUNT_NODE_MODULES does not name a folder with the npm package openai"))
	}
	w := newWorld(t, 1, 2)
	w.engine(0)
	w.engine(1)
	d := w.serve(w.Balancer, w.l7Config("session"))
	dir := t.TempDir()
	if err := errors.Join(os.Symlink(modules, filepath.Join(dir, "node_modules")),
		os.WriteFile(filepath.Join(dir, "client.mjs"), []byte(nodeClient), 0o644)); err != nil {
		t.Fatal(err)
	}
	p := w.start(w.Clients[0].Namespace, nil, node, filepath.Join(dir, "client.mjs"), vipURL(w, false))
	if err := p.Wait(); err != nil || !strings.Contains(p.out.String(), "ok") {
		t.Fatalf("node: %v\n%s", err, p.out)
	}
	if strings.Contains(d.out.String(), "sk-marker-key") {
		t.Error("a client's key is in the log")
	}
	d.weightsReturn()
}

// Two engines get one 4,000-token request and, before its first byte, twenty 10-token ones: by tokens none of the small
// ones is behind the big one, by turns about half are.
func TestSmallRequestsAreNotBehindTheBigOne(t *testing.T) {
	for policy, behind := range map[string][2]int{"least_tokens": {0, 0}, "round_robin": {8, 12}} {
		t.Run(policy, func(t *testing.T) {
			w := newWorld(t, 1, 2)
			w.engine(0, "--ttft", "4s")
			w.engine(1, "--ttft", "4s")
			d := w.serve(w.Balancer, w.l7Config(policy))
			url := vipURL(w, false)
			var wg sync.WaitGroup
			var big string
			wg.Go(func() {
				r, err := tryChat(w.Clients[0], url, []message{{"user", strings.Repeat("big prompt of many tokens here. ", 580)}}, 16)
				if err != nil {
					t.Error(err)
				}
				big = r.backend
			})
			wait(t, 10*time.Second, "the big request is in flight", func() bool {
				n := int64(0)
				for _, b := range d.backends() {
					n += b.L7Tokens
				}
				return n > 3500
			})
			backends := make([]string, 20)
			for i := range backends {
				wg.Go(func() {
					r, err := tryChat(w.Clients[0], url, []message{{"user", fmt.Sprintf("hi %d", i)}}, 16)
					if err != nil {
						t.Error(err)
					}
					backends[i] = r.backend
				})
			}
			wg.Wait()
			n := 0
			for _, b := range backends {
				if b == big {
					n++
				}
			}
			if n < behind[0] || n > behind[1] {
				t.Errorf("%d of 20 small requests went behind the big one, want %d to %d", n, behind[0], behind[1])
			}
			d.weightsReturn()
		})
	}
}

// A thousand clients leave at random points, and with SHUNT_SOAK=1 as many more as ten minutes allow; nothing stays
// charged, and the daemon's goroutines and memory go back.
func TestSoakAborts(t *testing.T) {
	w := newWorld(t, 1, 2)
	w.engine(0, "--ttft", "20ms", "--itl", "5ms")
	w.engine(1, "--ttft", "20ms", "--itl", "5ms")
	d := w.serve(w.Balancer, w.l7Config("session"))
	url := vipURL(w, false)
	w.chat(w.Clients[0], url, []message{{"user", "warm up"}}, 4)
	d.weightsReturn()
	before := d.metric("go_goroutines")

	slots := make(chan struct{}, 24)
	var wg sync.WaitGroup
	client := &http.Client{Transport: &http.Transport{DialContext: w.Clients[0].Dial, DisableKeepAlives: true}}
	start, long := time.Now(), os.Getenv("SHUNT_SOAK") == "1"
	memory := 0.0
	for i := 0; i < 1000 || long && time.Since(start) < 10*time.Minute; i++ {
		if i == 900 {
			memory = d.metric("process_resident_memory_bytes")
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			r := rand.New(rand.NewPCG(uint64(i), 1))
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(r.IntN(80_000))*time.Microsecond)
			defer cancel()
			body, _ := json.Marshal(map[string]any{"model": "m", "stream": r.IntN(3) > 0, "max_tokens": 12,
				"messages": []message{{"user", fmt.Sprintf("abort %d", i)}}})
			req, _ := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", bytes.NewReader(body))
			resp, err := client.Do(req)
			if err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
			}
		})
	}
	wg.Wait()
	d.weightsReturn()
	wait(t, 30*time.Second, "goroutines go back", func() bool { return d.metric("go_goroutines") <= before+5 })
	if m := d.metric("process_resident_memory_bytes"); memory == 0 || m > memory+64<<20 {
		t.Errorf("the daemon's memory grew from %.0f to %.0f bytes", memory, m)
	}
	if n := d.metric("shunt_requests_total", "client_gone"); n == 0 {
		t.Error("no request counts as left by its client: the test aborted nothing")
	}
	if r := w.chat(w.Clients[0], url, []message{{"user", "still there?"}}, 4); r.status != http.StatusOK {
		t.Errorf("after the aborts: %d", r.status)
	}
	for name, b := range d.backends() {
		if b.Health != "up" {
			t.Errorf("aborts took %s out: %s", name, b.Detail)
		}
	}
}

// Without any route off the host the vocabularies are there: they are in the binary.
func TestCountWithoutNetwork(t *testing.T) {
	w := newWorld(t, 1, 0)
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("hello world"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"--model", "gpt-4o"}, {"--encoding", "cl100k_base"}, {"--model", "some-open-model"}} {
		cmd := exec.Command(binary(t, "shunt"), append(append([]string{"count"}, args...), text)...)
		out := &output{}
		cmd.Stdout, cmd.Stderr = out, out
		p, err := w.Clients[0].Start(cmd)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Wait(); err != nil || strings.TrimSpace(out.String()) != "2" {
			t.Errorf("shunt count %v: %v, %q", args, err, out)
		}
	}
}
