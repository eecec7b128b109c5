// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"fmt"
	"strings"
	"testing"
)

type reading struct {
	prompt, output, cached, tokens int64
	finish                         string
	failed                         bool
}

func readingOf(m *meter) reading {
	f := &m.scan.figures
	return reading{f.prompt, f.output, f.cached, f.tokens, string(f.finish[:f.nfinish]), f.failed}
}

const chatStream = `data: {"id":"1","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}

: ping
data: {"choices":[{"index":0,"delta":{"reasoning_content":"hm \"usage\":{\"prompt_tokens\":7} é\u00e9"}}]}

data: {"choices":[{"index":0,"delta":{"content":"Hello \\"}}]}

data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}}]}

event: x
data:{"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}

data: {"choices":[],"usage":{"prompt_tokens":1200,"prompt_tokens_details":{"cached_tokens":1024,"audio_tokens":3},"completion_tokens":34,"completion_tokens_details":{"reasoning_tokens":9},"total_tokens":1234}}

data: [DONE]

`

const textStream = `data: {"choices":[{"index":0,"text":"a"}]}

data: {"choices":[{"index":0,"text":"","finish_reason":"length"}],"usage":{"prompt_tokens":5,"completion_tokens":1}}

data: [DONE]

`

const responsesStream = `event: response.created
data: {"type":"response.created","response":{"id":"r","status":"in_progress","usage":null,"output":[]}}

event: response.output_text.delta
data: {"type":"response.output_text.delta","delta":"He"}

event: response.output_text.delta
data: {"type":"response.output_text.delta","delta":"y"}

event: response.completed
data: {"type":"response.completed","response":{"status":"completed","output":[{"status":"completed","content":[{"text":"Hey"}]}],"usage":{"input_tokens":11,"input_tokens_details":{"cached_tokens":8},"output_tokens":2}}}

`

const messagesStream = `event: message_start
data: {"type":"message_start","message":{"usage":{"input_tokens":25,"cache_read_input_tokens":20,"output_tokens":1}}}

event: content_block_start
data: {"type":"content_block_start","content_block":{"type":"text","text":""}}

event: content_block_delta
data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"Hi"}}

event: content_block_delta
data: {"type":"content_block_delta","delta":{"type":"input_json_delta","partial_json":"{"}}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":{"output_tokens":15}}

`

var meterTests = []struct {
	name   string
	sse    bool
	stream string
	want   reading
}{
	{"chat", true, chatStream, reading{1200, 34, 1024, 3, "tool_calls", false}},
	{"completions", true, textStream, reading{5, 1, 0, 1, "length", false}},
	{"responses", true, responsesStream, reading{11, 2, 8, 2, "completed", false}},
	{"messages", true, messagesStream, reading{25, 15, 20, 2, "end_turn", false}},
	{"data over two lines", true, "data: {\"choices\":[{\"delta\":\ndata: {\"content\":\"x\"}}]}\n\n", reading{tokens: 1}},
	{"no blank line between events", true, "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\ndata: {\"choices\":[{\"delta\":{\"content\":\"y\"}}]}\n", reading{tokens: 2}},
	{"an event that was cut off", true, "data: {\"choices\":[{\"delta\":{\"content\":\"x\n\ndata: {\"usage\":{\"prompt_tokens\":3}}\n\n", reading{prompt: 3}},
	{"other fields", true, "data2: {\"usage\":{\"prompt_tokens\":3}}\n\ndat: {\"usage\":{\"prompt_tokens\":3}}\n\n:data: {\"usage\":{\"prompt_tokens\":3}}\n\ndata\n\n", reading{}},
	{"error event", true, "data: {\"error\":{\"message\":\"no\",\"code\":400}}\n\n", reading{failed: true}},
	{"error null", true, "data: {\"error\":null,\"choices\":[]}\n\n", reading{}},
	{"usage elsewhere", true, "data: {\"choices\":[{\"message\":{\"a\":{\"usage\":{\"prompt_tokens\":9}}}}],\"metadata\":{\"prompt_tokens\":4}}\n\n", reading{}},
	{"negative and odd numbers", true, "data: {\"usage\":{\"prompt_tokens\":-4,\"completion_tokens\":1.5e3}}\n\n", reading{output: 1}},
	{"unary chat", false, `{"choices":[{"message":{"content":"a \"b\" \\","role":"assistant"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":12}}`, reading{9, 12, 0, 0, "stop", false}},
	{"embeddings", false, `{"data":[{"embedding":[0.1,-2e-3]}],"usage":{"prompt_tokens":8,"total_tokens":8}}`, reading{prompt: 8}},
	{"deep", false, strings.Repeat(`[`, 5000) + strings.Repeat(`]`, 5000) + `{"usage":{"prompt_tokens":8}}`, reading{prompt: 8}},
	{"unbalanced", false, strings.Repeat(`]}`, 500) + `{"usage":{"prompt_tokens":8}}`, reading{prompt: 8}},
}

// However a stream is cut into reads, the meter reads the same.
func TestMeterAtEverySplit(t *testing.T) {
	for _, tt := range meterTests {
		for _, ending := range []string{"\n", "\r\n", "\r"} {
			s := tt.stream
			if tt.sse {
				s = strings.ReplaceAll(s, "\n", ending)
			}
			t.Run(fmt.Sprintf("%s %q", tt.name, ending), func(t *testing.T) {
				var m meter
				for cut := 0; cut <= len(s); cut += 1 + len(s)/2000 {
					m.reset(tt.sse)
					n := m.feed([]byte(s[:cut])) + m.feed([]byte(s[cut:]))
					got := readingOf(&m)
					if !tt.sse {
						got.tokens = 0
					}
					if got != tt.want || tt.sse && n != tt.want.tokens {
						t.Fatalf("cut at %d: %+v (%d), want %+v", cut, got, n, tt.want)
					}
				}
				m.reset(tt.sse)
				for i := range s {
					m.feed([]byte(s[i : i+1]))
				}
				got := readingOf(&m)
				if !tt.sse {
					got.tokens = 0
				}
				if got != tt.want {
					t.Fatalf("byte by byte: %+v, want %+v", got, tt.want)
				}
			})
		}
	}
}

// A token is counted when its line has come, not when the empty line after it has.
func TestMeterCountsEarly(t *testing.T) {
	var m meter
	m.reset(true)
	if n := m.feed([]byte(`data: {"choices":[{"delta":{"content":"x"}}]}`)); n != 1 {
		t.Errorf("counted %d, want 1", n)
	}
}

func TestMeterLongLines(t *testing.T) {
	for _, n := range []int{70 << 10, 1 << 20} {
		var m meter
		m.reset(true)
		long := fmt.Sprintf("data: {\"choices\":[{\"delta\":{\"content\":\"%s\"}}]}\n\n", strings.Repeat("x", n))
		m.feed([]byte(long + "data: {\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":1}}\n\n"))
		if got := readingOf(&m); got != (reading{prompt: 3, output: 1, tokens: 1}) {
			t.Errorf("%d: %+v", n, got)
		}
	}
}

func TestMeterGap(t *testing.T) {
	for _, tt := range []struct{ stream, want string }{
		{"", ""},
		{"data: {}\n\n", ""},
		{"data: {}\r\n\r\n", ""},
		{"data: {}\n\n: ping\n", ""},
		{"data: {}\n", "\n"},
		{"data: {\"a", "\n\n"},
		{"event: x\n", "\n"},
		{"da", "\n\n"},
	} {
		var m meter
		m.reset(true)
		m.feed([]byte(tt.stream))
		if got := m.gap(); got != tt.want {
			t.Errorf("%q: %q, want %q", tt.stream, got, tt.want)
		}
	}
}

func TestMeterDoesNotAllocate(t *testing.T) {
	b := []byte(chatStream)
	var m meter
	if n := testing.AllocsPerRun(100, func() {
		m.reset(true)
		m.feed(b)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// Whatever comes, the meter does not panic, and a split changes nothing.
func FuzzMeter(f *testing.F) {
	for _, tt := range meterTests {
		f.Add([]byte(tt.stream), 7, tt.sse)
	}
	f.Fuzz(func(t *testing.T, b []byte, cut int, sse bool) {
		var whole, split meter
		whole.reset(sse)
		split.reset(sse)
		whole.feed(b)
		cut = max(0, min(cut, len(b)))
		split.feed(b[:cut])
		split.feed(b[cut:])
		if readingOf(&whole) != readingOf(&split) || whole.gap() != split.gap() {
			t.Errorf("%q at %d: %+v and %+v", b, cut, readingOf(&whole), readingOf(&split))
		}
	})
}

func BenchmarkMeter(b *testing.B) {
	event := []byte(`data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"llama-3.1-8b-instruct","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}` + "\n\n")
	var m meter
	m.reset(true)
	b.SetBytes(int64(len(event)))
	for b.Loop() {
		m.feed(event)
	}
}
