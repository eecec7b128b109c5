// SPDX-License-Identifier: Apache-2.0

package request

import (
	"strings"

	"github.com/shunt-lb/shunt/pkg/tokens"
)

// What a declared function's parts cost OpenAI's models beside their text, from OpenAI's cookbook ("How to count tokens with
// tiktoken").
const (
	propertiesTokens = 3
	propertyTokens   = 3
	enumTokens       = -3
	enumItemTokens   = 3
)

// tools counts the tools and functions that the model may call. They repeat with each turn of a conversation, so the count
// is remembered by their bytes.
func (f *Facts) tools(e *tokens.Encoder, family Family) (n tokens.Count) {
	for _, field := range [...]field{fieldTools, fieldFunctions} {
		raw := f.p.raw(field)
		if !f.chat || len(raw) == 0 || raw[0] != '[' {
			continue
		}
		known, key, ok := e.Lookup(raw, uint8(family))
		if !ok {
			w := toolWalk{p: f.p, framing: &framings[family]}
			var whole bool
			if known, whole = w.count(field, e); whole {
				e.Remember(key, known)
			}
		}
		n = n.Add(known)
	}
	return n
}

// toolWalk goes over the declared tools of one member.
type toolWalk struct {
	p         *Parser
	framing   *framing
	flat      int
	functions int
	hosted    bool // there is one of which only the server knows the prompt
}

// count counts a member's tools. whole reports whether all of their text was counted.
func (w *toolWalk) count(f field, e *tokens.Encoder) (n tokens.Count, whole bool) {
	p := w.p
	scratch := len(p.scratch)
	if m := &p.members[f]; m.unrecorded {
		w.json(value{int32(m.start), int32(m.end), 0})
	} else {
		v := value{int32(m.start), int32(m.end), int32(m.tape)}
		for c := p.array(v); p.next(&c); {
			w.tool(c.v)
		}
		if w.framing.asJSON && w.functions > 0 {
			clear(p.lines)
			p.lines, w.flat = p.lines[:0], 0
			w.json(v)
		}
	}
	n = e.CountTexts(p.lines)
	whole = !n.Estimated
	n.Estimated = n.Estimated || w.hosted
	n.Tokens += w.flat
	if w.functions > 0 {
		each := w.framing.perTool
		if w.framing == &framings[OpenAI] && e.Name() == tokens.CL100kBase {
			each = functionTokensCL100k
		}
		n.Tokens += w.framing.tools + each*w.functions
	}
	clear(p.lines)
	p.lines, p.scratch = p.lines[:0], p.scratch[:scratch]
	return n, whole
}

func (w *toolWalk) tool(v value) {
	p := w.p
	if p.kind(v) != '{' {
		return
	}
	for _, wrapper := range [...]string{"function", "custom"} {
		if inner := p.find(v, wrapper); p.kind(inner) == '{' {
			v = inner
			break
		}
	}
	name := p.stringOf(p.find(v, "name"))
	if name == "" {
		w.hosted = true
		return
	}
	w.functions++
	w.line(name, strings.TrimSuffix(p.stringOf(p.find(v, "description")), "."))
	for _, key := range [...]string{"parameters", "input_schema"} {
		w.schema(p.find(v, key))
	}
}

// schema takes up a JSON schema's properties, those of schemas within it too.
func (w *toolWalk) schema(v value) {
	p := w.p
	for c := p.object(v); p.nextMember(&c); {
		switch key := c.key; {
		case p.is(key, "properties"):
			in := p.object(c.v)
			first := true
			for p.nextMember(&in) {
				if first {
					w.flat += propertiesTokens
					first = false
				}
				w.property(p.decode(in.key), in.v)
			}
		case p.is(key, "items"):
			w.schema(c.v)
		case p.is(key, "anyOf"), p.is(key, "oneOf"), p.is(key, "allOf"):
			for in := p.array(c.v); p.next(&in); {
				w.schema(in.v)
			}
		case p.is(key, "$defs"), p.is(key, "definitions"):
			for in := p.object(c.v); p.nextMember(&in); {
				w.schema(in.v)
			}
		}
	}
}

func (w *toolWalk) property(name string, v value) {
	p := w.p
	w.flat += propertyTokens
	if p.kind(v) != '{' {
		w.text(tokens.Text{S: name})
		return
	}
	if enum := p.find(v, "enum"); p.kind(enum) == '[' {
		w.flat += enumTokens
		for c := p.array(enum); p.next(&c); {
			w.flat += enumItemTokens
			if p.kind(c.v) == '"' {
				w.text(p.textOf(c.v))
			} else {
				w.json(c.v)
			}
		}
	}
	w.line(name, p.stringOf(p.find(v, "type")), strings.TrimSuffix(p.stringOf(p.find(v, "description")), "."))
	w.schema(v)
}

func (w *toolWalk) text(t tokens.Text) { w.p.lines = append(w.p.lines, t) }

func (w *toolWalk) json(v value) {
	w.text(tokens.Text{S: view(w.p.body[v.start:v.end]), Form: tokens.JSONValue})
}

// line takes up words joined by colons as one text.
func (w *toolWalk) line(words ...string) {
	p := w.p
	start := len(p.scratch)
	for i, word := range words {
		if i > 0 {
			p.scratch = append(p.scratch, ':')
		}
		p.scratch = append(p.scratch, word...)
	}
	w.text(tokens.Text{S: view(p.scratch[start:])})
}
