// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"encoding/json"
	"fmt"
)

// parseResponse reads OpenAI's Responses API: text in, text out; a previous_response_id is not looked up.
func parseResponse(body []byte) (*job, error) {
	var req struct {
		Model        string          `json:"model"`
		Input        json.RawMessage `json:"input"`
		Instructions string          `json:"instructions"`
		Tools        json.RawMessage `json:"tools"`
		Max          *int            `json:"max_output_tokens"`
		Stream       bool            `json:"stream"`
	}
	if err := json.Unmarshal(body, &req); err != nil {
		return nil, err
	}
	var msgs []chatMessage
	if req.Instructions != "" {
		msgs = append(msgs, chatMessage{Role: "system", Content: quote(req.Instructions)})
	}
	var items []json.RawMessage
	switch {
	case len(req.Input) == 0:
		return nil, errEmpty
	case json.Unmarshal(req.Input, &items) == nil:
		for _, it := range items {
			var m chatMessage
			if json.Unmarshal(it, &m) != nil || m.Role == "" {
				m = chatMessage{Role: "item", Content: it}
			}
			msgs = append(msgs, m)
		}
	default:
		msgs = append(msgs, chatMessage{Role: "user", Content: req.Input})
	}
	lim, err := lengthFields{MaxTokens: req.Max}.limits()
	if err != nil {
		return nil, err
	}
	return &job{idPrefix: "resp_", model: req.Model, prompts: [][]uint32{chatTokens(req.Tools, msgs)}, n: 1, lim: lim,
		stream: req.Stream, dialect: &responses{}}, nil
}

// responses writes the Responses API's object and its named events.
type responses struct{ seq int }

func (d *responses) object(c *call, status string, output []any, u any) map[string]any {
	return map[string]any{"id": c.id, "object": "response", "created_at": c.arrived.Unix(), "model": c.model,
		"status": status, "output": output, "usage": u, "error": nil, "incomplete_details": nil, "tools": []any{},
		"tool_choice": "auto", "parallel_tool_calls": true}
}

func (d *responses) item(ch *choice, status, text string) map[string]any {
	return map[string]any{"id": "msg_" + ch.call.id, "type": "message", "role": "assistant", "status": status,
		"content": []any{map[string]any{"type": "output_text", "text": text, "annotations": []any{}}}}
}

func (d *responses) answer(c *call) any {
	ch := c.choices[0]
	u := c.usage()
	status := "completed"
	if ch.reason == "length" {
		status = "incomplete"
	}
	o := d.object(c, status, []any{d.item(ch, status, fillerText(ch.seed, ch.output))}, map[string]any{
		"input_tokens": u.prompt, "input_tokens_details": cachedDetails{u.cached},
		"output_tokens": u.output, "output_tokens_details": map[string]int{"reasoning_tokens": 0}, "total_tokens": u.prompt + u.output})
	if ch.reason == "length" {
		o["incomplete_details"] = map[string]string{"reason": "max_output_tokens"}
	}
	return o
}

func (d *responses) event(buf []byte, name string, fields map[string]any) []byte {
	fields["type"], fields["sequence_number"] = name, d.seq
	d.seq++
	return namedEvent(buf, name, fields)
}

func (d *responses) token(buf []byte, ch *choice, k int) []byte {
	id := "msg_" + ch.call.id
	if k == 0 {
		for _, name := range []string{"response.created", "response.in_progress"} {
			buf = d.event(buf, name, map[string]any{"response": d.object(ch.call, "in_progress", []any{}, nil)})
		}
		buf = d.event(buf, "response.output_item.added", map[string]any{"output_index": 0, "item": map[string]any{
			"id": id, "type": "message", "role": "assistant", "status": "in_progress", "content": []any{}}})
		buf = d.event(buf, "response.content_part.added", map[string]any{"item_id": id, "output_index": 0, "content_index": 0,
			"part": map[string]any{"type": "output_text", "text": "", "annotations": []any{}}})
	}
	return d.event(buf, "response.output_text.delta", map[string]any{"item_id": id, "output_index": 0, "content_index": 0,
		"delta": filler(ch.seed, k)})
}

func (d *responses) end(buf []byte, ch *choice) []byte {
	id, text := "msg_"+ch.call.id, fillerText(ch.seed, ch.output)
	buf = d.event(buf, "response.output_text.done", map[string]any{"item_id": id, "output_index": 0, "content_index": 0, "text": text})
	buf = d.event(buf, "response.content_part.done", map[string]any{"item_id": id, "output_index": 0, "content_index": 0,
		"part": map[string]any{"type": "output_text", "text": text, "annotations": []any{}}})
	return d.event(buf, "response.output_item.done", map[string]any{"output_index": 0, "item": d.item(ch, "completed", text)})
}

func (d *responses) tail(buf []byte, c *call) []byte {
	name := "response.completed"
	if c.choices[0].reason == "length" {
		name = "response.incomplete"
	}
	return d.event(buf, name, map[string]any{"response": d.answer(c)})
}

// parseMessage reads Anthropic's Messages API.
func parseMessage(body []byte) (*job, error) {
	var req struct {
		Model    string          `json:"model"`
		System   json.RawMessage `json:"system"`
		Messages []chatMessage   `json:"messages"`
		Tools    json.RawMessage `json:"tools"`
		Max      *int            `json:"max_tokens"`
		Stream   bool            `json:"stream"`
	}
	if err := json.Unmarshal(body, &req); err != nil {
		return nil, err
	}
	if len(req.Messages) == 0 {
		return nil, errEmpty
	}
	if req.Max == nil {
		return nil, fmt.Errorf("max_tokens: field required")
	}
	lim, err := lengthFields{MaxTokens: req.Max}.limits()
	if err != nil {
		return nil, err
	}
	msgs := req.Messages
	if len(req.System) > 0 {
		msgs = append([]chatMessage{{Role: "system", Content: req.System}}, msgs...)
	}
	return &job{idPrefix: "msg_", model: req.Model, prompts: [][]uint32{chatTokens(req.Tools, msgs)}, n: 1, lim: lim,
		stream: req.Stream, dialect: messages{}}, nil
}

// messages writes the Messages API. As in Anthropic's own usage, input_tokens leaves out what the cache held.
type messages struct{}

func (messages) usage(u usage) map[string]int {
	return map[string]int{"input_tokens": u.prompt - u.cached, "cache_creation_input_tokens": 0,
		"cache_read_input_tokens": u.cached, "output_tokens": u.output}
}

func (messages) stop(ch *choice) string {
	if ch.reason == "length" {
		return "max_tokens"
	}
	return "end_turn"
}

func (d messages) answer(c *call) any {
	ch := c.choices[0]
	return map[string]any{"id": c.id, "type": "message", "role": "assistant", "model": c.model,
		"content":     []any{map[string]string{"type": "text", "text": fillerText(ch.seed, ch.output)}},
		"stop_reason": d.stop(ch), "stop_sequence": nil, "usage": d.usage(c.usage())}
}

func (d messages) token(buf []byte, ch *choice, k int) []byte {
	if k == 0 {
		c := ch.call
		u := c.usage()
		u.output = 1
		buf = namedEvent(buf, "message_start", map[string]any{"type": "message_start", "message": map[string]any{
			"id": c.id, "type": "message", "role": "assistant", "model": c.model, "content": []any{},
			"stop_reason": nil, "stop_sequence": nil, "usage": d.usage(u)}})
		buf = namedEvent(buf, "content_block_start", map[string]any{"type": "content_block_start", "index": 0,
			"content_block": map[string]string{"type": "text", "text": ""}})
	}
	return namedEvent(buf, "content_block_delta", map[string]any{"type": "content_block_delta", "index": 0,
		"delta": map[string]string{"type": "text_delta", "text": filler(ch.seed, k)}})
}

func (d messages) end(buf []byte, ch *choice) []byte {
	buf = namedEvent(buf, "content_block_stop", map[string]any{"type": "content_block_stop", "index": 0})
	return namedEvent(buf, "message_delta", map[string]any{"type": "message_delta",
		"delta": map[string]any{"stop_reason": d.stop(ch), "stop_sequence": nil}, "usage": d.usage(ch.call.usage())})
}

func (messages) tail(buf []byte, _ *call) []byte {
	return namedEvent(buf, "message_stop", map[string]string{"type": "message_stop"})
}

func namedEvent(buf []byte, name string, v any) []byte {
	buf = fmt.Appendf(buf, "event: %s\ndata: ", name)
	return append(appendJSON(buf, v), "\n\n"...)
}
