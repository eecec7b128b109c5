// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Tokens of the chat template. An answer's tokens follow the assistant mark, so the next turn, which repeats the answer as a
// message, begins with the same tokens.
var (
	tokBegin = piece("<|begin|>")
	tokEnd   = piece("<|end|>")
)

type chatMessage struct {
	Role       string          `json:"role"`
	Content    json.RawMessage `json:"content"`
	ToolCalls  json.RawMessage `json:"tool_calls"`
	ToolCallID string          `json:"tool_call_id"`
}

// chatTokens renders messages as the model would see them, up to the point where the answer begins.
func chatTokens(tools json.RawMessage, messages []chatMessage) []uint32 {
	t := []uint32{tokBegin}
	if len(tools) > 0 && string(tools) != "null" {
		t = append(t, piece("<|tools|>"))
		t = append(Tokenize(t, string(tools)), tokEnd)
	}
	for _, m := range messages {
		t = append(t, piece("<|"+m.Role+"|>"))
		t = Tokenize(t, contentText(m.Content))
		if len(m.ToolCalls) > 0 {
			t = Tokenize(t, string(m.ToolCalls))
		}
		t = append(Tokenize(t, m.ToolCallID), tokEnd)
	}
	return append(t, piece("<|assistant|>"))
}

// contentText is the text of a message's content: a string, or a list of parts. Parts without text count as they stand.
func contentText(raw json.RawMessage) string {
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return s
	}
	var parts []json.RawMessage
	if json.Unmarshal(raw, &parts) != nil {
		return string(raw)
	}
	var b strings.Builder
	for _, p := range parts {
		var part struct {
			Text *string `json:"text"`
		}
		if json.Unmarshal(p, &part) == nil && part.Text != nil {
			b.WriteString(*part.Text)
		} else {
			b.Write(p)
		}
	}
	return b.String()
}

const maxChoices = 128

func choices(n *int) (int, error) {
	switch {
	case n == nil:
		return 1, nil
	case *n < 1 || *n > maxChoices:
		return 0, fmt.Errorf("n must be between 1 and %d", maxChoices)
	}
	return *n, nil
}

// lengthFields are the request fields that bound an answer, of OpenAI and of vLLM.
type lengthFields struct {
	MaxTokens           *int `json:"max_tokens"`
	MaxCompletionTokens *int `json:"max_completion_tokens"`
	MinTokens           int  `json:"min_tokens"`
	IgnoreEOS           bool `json:"ignore_eos"`
}

func (f lengthFields) limits() (limits, error) {
	l := limits{min: f.MinTokens, ignoreEOS: f.IgnoreEOS}
	for _, v := range []*int{f.MaxTokens, f.MaxCompletionTokens} {
		if v == nil {
			continue
		}
		if *v < 1 {
			return l, fmt.Errorf("max_tokens must be at least 1, got %d", *v)
		}
		l.max = *v
	}
	return l, nil
}

type streamOptions struct {
	IncludeUsage bool `json:"include_usage"`
}

type openAIUsage struct {
	PromptTokens     int            `json:"prompt_tokens"`
	CompletionTokens int            `json:"completion_tokens"`
	TotalTokens      int            `json:"total_tokens"`
	Details          *cachedDetails `json:"prompt_tokens_details,omitempty"`
}

type cachedDetails struct {
	CachedTokens int `json:"cached_tokens"`
}

func (u usage) openAI() openAIUsage {
	return openAIUsage{u.prompt, u.output, u.prompt + u.output, &cachedDetails{u.cached}}
}

func parseChat(body []byte) (*job, error) {
	var req struct {
		Model    string          `json:"model"`
		Messages []chatMessage   `json:"messages"`
		Tools    json.RawMessage `json:"tools"`
		N        *int            `json:"n"`
		Stream   bool            `json:"stream"`
		Options  streamOptions   `json:"stream_options"`
		lengthFields
	}
	if err := json.Unmarshal(body, &req); err != nil {
		return nil, err
	}
	if len(req.Messages) == 0 {
		return nil, errEmpty
	}
	n, err := choices(req.N)
	if err != nil {
		return nil, err
	}
	lim, err := req.limits()
	if err != nil {
		return nil, err
	}
	return &job{idPrefix: "chatcmpl-", model: req.Model, prompts: [][]uint32{chatTokens(req.Tools, req.Messages)}, n: n,
		lim: lim, stream: req.Stream, dialect: &openAI{chat: true, usage: req.Options.IncludeUsage}}, nil
}

func parseCompletion(body []byte) (*job, error) {
	var req struct {
		Model   string          `json:"model"`
		Prompt  json.RawMessage `json:"prompt"`
		N       *int            `json:"n"`
		Stream  bool            `json:"stream"`
		Options streamOptions   `json:"stream_options"`
		lengthFields
	}
	if err := json.Unmarshal(body, &req); err != nil {
		return nil, err
	}
	prompts, err := promptTokens(req.Prompt)
	if err != nil {
		return nil, err
	}
	n, err := choices(req.N)
	if err != nil {
		return nil, err
	}
	lim, err := req.limits()
	if err != nil {
		return nil, err
	}
	if lim.max == 0 {
		lim.max = 16 // the API's default
	}
	return &job{idPrefix: "cmpl-", model: req.Model, prompts: prompts, n: n, lim: lim, stream: req.Stream,
		dialect: &openAI{usage: req.Options.IncludeUsage}}, nil
}

// promptTokens reads a string, a list of strings, a list of tokens, or a list of those.
func promptTokens(raw json.RawMessage) ([][]uint32, error) {
	var text string
	var texts []string
	var ids []uint32
	var lists [][]uint32
	switch {
	case len(raw) == 0 || string(raw) == "null":
		return nil, errEmpty
	case json.Unmarshal(raw, &text) == nil:
		texts = []string{text}
	case json.Unmarshal(raw, &texts) == nil:
	case json.Unmarshal(raw, &ids) == nil:
		texts, lists = nil, [][]uint32{ids} // an attempt that fails may leave elements behind
	case json.Unmarshal(raw, &lists) == nil:
		texts = nil
	default:
		return nil, fmt.Errorf("prompt must be a string, a list of strings or of token ids")
	}
	for _, t := range texts {
		lists = append(lists, Tokenize([]uint32{tokBegin}, t))
	}
	if len(lists) == 0 {
		return nil, errEmpty
	}
	for _, l := range lists {
		if len(l) == 0 {
			return nil, errEmpty
		}
	}
	return lists, nil
}

// openAI writes chat and text completions.
type openAI struct {
	chat, usage bool
	prefix      string // of every event, up to the choice's index
}

func (d *openAI) object() string {
	if d.chat {
		return "chat.completion"
	}
	return "text_completion"
}

func (d *openAI) answer(c *call) any {
	type message struct {
		Role      string   `json:"role"`
		Content   string   `json:"content"`
		Refusal   *string  `json:"refusal"`
		ToolCalls []string `json:"tool_calls"`
	}
	type entry struct {
		Index    int      `json:"index"`
		Message  *message `json:"message,omitempty"`
		Text     *string  `json:"text,omitempty"`
		Logprobs *string  `json:"logprobs"`
		Finish   string   `json:"finish_reason"`
	}
	list := make([]entry, 0, len(c.choices))
	for i, ch := range c.choices {
		text := fillerText(ch.seed, ch.output)
		e := entry{Index: i, Finish: ch.reason}
		if d.chat {
			e.Message = &message{Role: "assistant", Content: text, ToolCalls: []string{}}
		} else {
			e.Text = &text
		}
		list = append(list, e)
	}
	return struct {
		ID      string      `json:"id"`
		Object  string      `json:"object"`
		Created int64       `json:"created"`
		Model   string      `json:"model"`
		Choices []entry     `json:"choices"`
		Usage   openAIUsage `json:"usage"`
	}{c.id, d.object(), c.arrived.Unix(), c.model, list, c.usage().openAI()}
}

func (d *openAI) event(buf []byte, c *call) []byte {
	if d.prefix == "" {
		object := d.object()
		if d.chat {
			object += ".chunk"
		}
		d.prefix = fmt.Sprintf(`data: {"id":%q,"object":%q,"created":%d,"model":%s,"choices":[`, c.id, object, c.arrived.Unix(), quote(c.model))
	}
	return append(buf, d.prefix...)
}

func (d *openAI) token(buf []byte, ch *choice, k int) []byte {
	if d.chat && k == 0 {
		buf = d.event(buf, ch.call)
		buf = fmt.Appendf(buf, `{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}`+"\n\n", ch.index)
	}
	buf = append(d.event(buf, ch.call), `{"index":`...)
	buf = strconv.AppendInt(buf, int64(ch.index), 10)
	if d.chat {
		buf = append(buf, `,"delta":{"content":"`...)
	} else {
		buf = append(buf, `,"text":"`...)
	}
	buf = append(buf, filler(ch.seed, k)...)
	if d.chat {
		return append(buf, `"},"logprobs":null,"finish_reason":null}]}`+"\n\n"...)
	}
	return append(buf, `","logprobs":null,"finish_reason":null}]}`+"\n\n"...)
}

func (d *openAI) end(buf []byte, ch *choice) []byte {
	body := `"delta":{}`
	if !d.chat {
		body = `"text":""`
	}
	return fmt.Appendf(d.event(buf, ch.call), `{"index":%d,%s,"logprobs":null,"finish_reason":%q}]}`+"\n\n", ch.index, body, ch.reason)
}

func (d *openAI) tail(buf []byte, c *call) []byte {
	if d.usage {
		buf = append(d.event(buf, c), `],"usage":`...)
		buf = append(appendJSON(buf, c.usage().openAI()), "}\n\n"...)
	}
	return append(buf, "data: [DONE]\n\n"...)
}

func parseEmbedding(body []byte) (*job, error) {
	var req struct {
		Model      string          `json:"model"`
		Input      json.RawMessage `json:"input"`
		Format     string          `json:"encoding_format"`
		Dimensions int             `json:"dimensions"`
	}
	if err := json.Unmarshal(body, &req); err != nil {
		return nil, err
	}
	prompts, err := promptTokens(req.Input)
	if err != nil {
		return nil, err
	}
	if req.Dimensions < 0 || req.Dimensions > 1<<16 {
		return nil, fmt.Errorf("dimensions out of range: %d", req.Dimensions)
	}
	if req.Dimensions == 0 {
		req.Dimensions = 64
	}
	return &job{idPrefix: "embd-", model: req.Model, prompts: prompts, n: 1, lim: limits{none: true},
		dialect: &embedding{dims: req.Dimensions, base64: req.Format == "base64"}}, nil
}

// embedding writes unit vectors that depend on the prompt only. It is never streamed.
type embedding struct {
	dims   int
	base64 bool
}

func (d *embedding) vector(seed uint64) []float32 {
	v := make([]float32, d.dims)
	sum := 0.0
	for i := range v {
		x := float64(int64(mix(seed+uint64(i)))) / math.MaxInt64
		v[i] = float32(x)
		sum += x * x
	}
	for i := range v {
		v[i] /= float32(math.Sqrt(sum))
	}
	return v
}

func (d *embedding) answer(c *call) any {
	type entry struct {
		Object    string `json:"object"`
		Index     int    `json:"index"`
		Embedding any    `json:"embedding"`
	}
	list := make([]entry, 0, len(c.choices))
	for i, ch := range c.choices {
		v := d.vector(ch.seed)
		e := entry{Object: "embedding", Index: i, Embedding: v}
		if d.base64 {
			raw := make([]byte, 0, 4*len(v))
			for _, x := range v {
				raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(x))
			}
			e.Embedding = base64.StdEncoding.EncodeToString(raw)
		}
		list = append(list, e)
	}
	return struct {
		ID      string      `json:"id"`
		Object  string      `json:"object"`
		Created int64       `json:"created"`
		Model   string      `json:"model"`
		Data    []entry     `json:"data"`
		Usage   openAIUsage `json:"usage"`
	}{c.id, "list", time.Now().Unix(), c.model, list, c.usage().openAI()}
}

func (d *embedding) token(buf []byte, _ *choice, _ int) []byte { return buf }
func (d *embedding) end(buf []byte, _ *choice) []byte          { return buf }
func (d *embedding) tail(buf []byte, _ *call) []byte           { return buf }

func quote(s string) []byte { return appendJSON(nil, s) }

// appendJSON appends v. What is given to it can always be encoded.
func appendJSON(buf []byte, v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		return append(buf, "null"...)
	}
	return append(buf, b...)
}
