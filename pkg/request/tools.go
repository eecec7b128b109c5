// SPDX-License-Identifier: Apache-2.0

package request

import (
	"strings"

	"github.com/valyala/fastjson"

	"github.com/shunt-lb/shunt/pkg/tokens"
)

// What a declared function costs beside its text, from OpenAI's cookbook ("How to count tokens with tiktoken").
const (
	functionTokens       = 7
	functionTokensCL100k = 10 // models of cl100k_base
	functionsEndTokens   = 12 // once, after all functions
	propertiesTokens     = 3
	propertyTokens       = 3
	enumTokens           = -3
	enumItemTokens       = 3
)

// declaredTools takes up the tools and functions that the model may call. A backend may render them in another way, most
// often as JSON.
func (p *Parser) declaredTools() {
	for _, f := range [...]field{fieldTools, fieldFunctions} {
		if raw := p.raw(f); !present(raw) {
			continue
		}
		for _, v := range p.tree(f).GetArray() {
			p.tool(v)
		}
	}
	if p.facts.functions > 0 {
		p.facts.flat += functionsEndTokens
	}
}

func (p *Parser) tool(v *fastjson.Value) {
	o := v.GetObject()
	if o == nil {
		return
	}
	for _, wrapper := range [...]string{"function", "custom"} {
		if inner := get(o, wrapper).GetObject(); inner != nil {
			o = inner
			break
		}
	}
	name := stringOf(get(o, "name"))
	if name == "" {
		return // a hosted tool, of which only the server knows the prompt
	}
	p.facts.functions++
	p.line(name, strings.TrimSuffix(stringOf(get(o, "description")), "."))
	for _, key := range [...]string{"parameters", "input_schema"} {
		p.schema(get(o, key))
	}
}

// get returns an object's member, the last one of that name.
func get(o *fastjson.Object, name string) (value *fastjson.Value) {
	o.Visit(func(key []byte, v *fastjson.Value) {
		if string(key) == name {
			value = v
		}
	})
	return value
}

// schema takes up a JSON schema's properties, those of schemas within it too.
func (p *Parser) schema(v *fastjson.Value) {
	o := v.GetObject()
	if o == nil {
		return
	}
	if properties := get(o, "properties").GetObject(); properties != nil && properties.Len() > 0 {
		p.facts.flat += propertiesTokens
		properties.Visit(func(key []byte, v *fastjson.Value) {
			p.property(view(key), v)
		})
	}
	p.schema(get(o, "items"))
	for _, key := range [...]string{"anyOf", "oneOf", "allOf"} {
		for _, v := range get(o, key).GetArray() {
			p.schema(v)
		}
	}
	for _, key := range [...]string{"$defs", "definitions"} {
		if defs := get(o, key).GetObject(); defs != nil {
			defs.Visit(func(_ []byte, v *fastjson.Value) { p.schema(v) })
		}
	}
}

func (p *Parser) property(name string, v *fastjson.Value) {
	p.facts.flat += propertyTokens
	o := v.GetObject()
	if o == nil {
		p.found(name)
		return
	}
	if enum := get(o, "enum").GetArray(); enum != nil {
		p.facts.flat += enumTokens
		for _, item := range enum {
			p.facts.flat += enumItemTokens
			p.json(item)
		}
	}
	p.line(name, stringOf(get(o, "type")), strings.TrimSuffix(stringOf(get(o, "description")), "."))
	p.schema(v)
}

// line takes up words joined by colons as one text.
func (p *Parser) line(words ...string) {
	start := len(p.scratch)
	for i, w := range words {
		if i > 0 {
			p.scratch = append(p.scratch, ':')
		}
		p.scratch = append(p.scratch, w...)
	}
	p.found(view(p.scratch[start:]))
}

// PromptTokens counts what the model will have to read, in the encoding of the request's model.
//
// Text is counted as it is; a chat's framing and the declared functions as OpenAI's cookbook documents them (3 tokens a
// message, 1 a name, 3 for the answer's start); token ids as their number. An image counts 765 tokens, or 85 at low
// detail; audio 500, video 2,000, a file or document 1,500. Estimated is true where any of the count is not the encoding's
// own: media, members too large to walk, and the cases of package tokens.
func (f *Facts) PromptTokens(c *tokens.Counter) tokens.Count {
	return f.PromptTokensIn(c.For(f.Model))
}

// PromptTokensIn is PromptTokens in a given encoding.
func (f *Facts) PromptTokensIn(e *tokens.Encoder) tokens.Count {
	n := e.CountAll(f.texts)
	n.Tokens += f.ids + f.flat + (f.unwalked+3)/4
	if e.Name() == tokens.CL100kBase {
		n.Tokens += functionTokensCL100k * f.functions
	} else {
		n.Tokens += functionTokens * f.functions
	}
	n.Estimated = n.Estimated || f.unwalked > 0 || f.mediaParts > 0
	return n
}
