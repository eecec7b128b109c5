// SPDX-License-Identifier: Apache-2.0

package request

import (
	"strings"

	"github.com/valyala/fastjson"
)

// Tokens that are not text: the chat format's own, as OpenAI's cookbook documents them, and flat figures for media.
const (
	messageTokens = 3 // around each message
	roleTokens    = 1 // each of the usual roles is one token
	nameTokens    = 1
	replyTokens   = 3 // the start of the answer

	imageTokens    = 765 // 1,024 x 1,024 pixels at high detail
	lowImageTokens = 85
	audioTokens    = 500  // about a minute
	videoTokens    = 2000 // a few frames a second for some seconds
	fileTokens     = 1500 // about three pages
)

// node is what matters of an object in a prompt: a message, an item, a part of a content, a call.
type node struct {
	kind, role, name                                   *fastjson.Value
	content, text, output, refusal, thinking           *fastjson.Value
	reasoning, summary, title, context                 *fastjson.Value
	toolCalls, functionCall, function, custom          *fastjson.Value
	arguments, input                                   *fastjson.Value
	imageURL, detail, source, data, file, audio, video *fastjson.Value
}

// read collects an object's members. Of a repeated one the last counts, as with most backends.
func read(o *fastjson.Object) node {
	var n node
	o.Visit(func(key []byte, v *fastjson.Value) {
		switch string(key) {
		case "type":
			n.kind = v
		case "role":
			n.role = v
		case "name":
			n.name = v
		case "content":
			n.content = v
		case "text":
			n.text = v
		case "output":
			n.output = v
		case "refusal":
			n.refusal = v
		case "thinking":
			n.thinking = v
		case "reasoning_content", "reasoning":
			n.reasoning = v
		case "summary":
			n.summary = v
		case "title":
			n.title = v
		case "context":
			n.context = v
		case "tool_calls":
			n.toolCalls = v
		case "function_call":
			n.functionCall = v
		case "function":
			n.function = v
		case "custom":
			n.custom = v
		case "arguments":
			n.arguments = v
		case "input":
			n.input = v
		case "image_url":
			n.imageURL = v
		case "detail":
			n.detail = v
		case "source":
			n.source = v
		case "data":
			n.data = v
		case "file", "file_data", "file_url", "file_id":
			n.file = v
		case "input_audio", "audio_url":
			n.audio = v
		case "video_url":
			n.video = v
		}
	})
	return n
}

// stringOf returns a string's text, "" for everything else. It may be called on nil.
func stringOf(v *fastjson.Value) string { return view(v.GetStringBytes()) }

// found takes up one text of the prompt.
func (p *Parser) found(text string) {
	if text == "" {
		return
	}
	p.facts.texts = append(p.facts.texts, text)
	if p.hashing {
		p.hashText(text)
		p.hashed += len(text)
	}
}

// media takes up a part that is not text. Its data is not looked at, but that different pictures make different
// conversations.
func (p *Parser) media(tokens int, identity *fastjson.Value) {
	p.facts.flat += tokens
	p.facts.mediaParts++
	if !p.hashing {
		return
	}
	s := stringOf(identity)
	if s == "" && identity != nil && identity.Type() == fastjson.TypeObject {
		identity.GetObject().Visit(func(_ []byte, v *fastjson.Value) {
			if t := stringOf(v); len(t) > len(s) {
				s = t
			}
		})
	}
	const edge = 512
	p.hashText(s[:min(len(s), edge)])
	p.hashText(s[len(s)-min(len(s), edge):])
	p.hashed += 1 + len(s)
}

// systemPrompt takes up a system prompt that stands beside the messages: a string or a list of parts.
func (p *Parser) systemPrompt(f field) {
	raw := p.raw(f)
	if !present(raw) {
		return
	}
	p.facts.flat += messageTokens + roleTokens
	p.hashing = true
	if raw[0] == '"' {
		p.found(p.longString(raw))
	} else {
		p.content(p.tree(f))
	}
	p.hashing = false
}

// conversation takes up a list of messages, or a string that stands for one user message.
func (p *Parser) conversation(f field) {
	raw := p.raw(f)
	if !present(raw) {
		return
	}
	if raw[0] == '"' {
		p.facts.flat += messageTokens + roleTokens
		p.startRole("user")
		p.found(p.longString(raw))
		p.endRole("user")
		return
	}
	v := p.tree(f)
	if v.GetArray() == nil {
		p.message(v)
		return
	}
	for _, m := range v.GetArray() {
		p.message(m)
	}
}

// startRole and endRole bracket a message, so that the fingerprint takes in what comes up to the first user message.
func (p *Parser) startRole(role string) {
	p.hashed = 0
	switch role {
	case "system", "developer", "user":
		p.hashing = !p.userSeen
	}
	if p.hashing {
		p.hashText(role[:1])
	}
}

func (p *Parser) endRole(role string) {
	p.hashing = false
	if role == "user" && p.hashed > 0 {
		p.userSeen = true
	}
}

func (p *Parser) message(v *fastjson.Value) {
	o := v.GetObject()
	if o == nil {
		p.content(v)
		return
	}
	n := read(o)
	p.facts.flat += messageTokens
	role := stringOf(n.role)
	switch role {
	case "system", "developer", "user", "assistant", "tool", "function", "":
		p.facts.flat += roleTokens
	default:
		p.found(role)
	}
	if role == "" {
		p.part(&n)
		return
	}
	p.startRole(role)
	if name := stringOf(n.name); name != "" {
		p.facts.flat += nameTokens
		p.found(name)
	}
	p.content(n.content)
	p.found(stringOf(n.refusal))
	p.found(stringOf(n.reasoning))
	for _, c := range n.toolCalls.GetArray() {
		p.facts.flat += messageTokens
		p.call(c)
	}
	p.call(n.functionCall)
	p.endRole(role)
}

// call takes up the call of a tool or function by the model.
func (p *Parser) call(v *fastjson.Value) {
	o := v.GetObject()
	if o == nil {
		return
	}
	n := read(o)
	for _, inner := range [...]*fastjson.Value{n.function, n.custom} {
		if o := inner.GetObject(); o != nil {
			n = read(o)
			break
		}
	}
	p.found(stringOf(n.name))
	p.json(n.arguments)
	p.json(n.input)
}

// content takes up a content: null, a string, a part, or a list of these, at any depth.
func (p *Parser) content(v *fastjson.Value) {
	if v == nil {
		return
	}
	switch v.Type() {
	case fastjson.TypeString:
		p.found(stringOf(v))
	case fastjson.TypeArray:
		for _, e := range v.GetArray() {
			p.content(e)
		}
	case fastjson.TypeObject:
		n := read(v.GetObject())
		p.part(&n)
	}
}

// part takes up one typed part. Of an unknown type, only members that hold text by their name are read, so that
// nobody's base64 is taken for text.
func (p *Parser) part(n *node) {
	switch stringOf(n.kind) {
	case "image_url", "input_image", "image":
		p.image(n)
	case "input_audio", "audio_url", "audio":
		p.media(audioTokens, n.audio)
	case "video_url", "input_video", "video":
		p.media(videoTokens, n.video)
	case "file", "input_file", "container_upload":
		p.media(fileTokens, n.file)
	case "document":
		p.found(stringOf(n.title))
		p.found(stringOf(n.context))
		p.document(n.source)
	case "tool_use", "server_tool_use", "mcp_tool_use", "function_call", "custom_tool_call", "mcp_call":
		p.found(stringOf(n.name))
		p.json(n.arguments)
		p.json(n.input)
		p.content(n.output)
	case "redacted_thinking", "compaction", "item_reference":
		// Opaque to everyone but the server.
	default:
		p.content(n.text)
		p.content(n.content)
		p.content(n.output)
		p.content(n.summary)
		p.found(stringOf(n.thinking))
		p.found(stringOf(n.refusal))
	}
}

func (p *Parser) image(n *node) {
	detail, identity := stringOf(n.detail), n.imageURL
	if o := n.imageURL.GetObject(); o != nil {
		if d := stringOf(get(o, "detail")); d != "" {
			detail = d
		}
		identity = get(o, "url")
	}
	if identity == nil {
		identity = n.source
	}
	tokens := imageTokens
	if strings.EqualFold(detail, "low") {
		tokens = lowImageTokens
	}
	p.media(tokens, identity)
}

// document takes up the source of an Anthropic document: plain text, parts, or data that is not looked at.
func (p *Parser) document(source *fastjson.Value) {
	if o := source.GetObject(); o != nil {
		n := read(o)
		switch stringOf(n.kind) {
		case "text":
			p.found(stringOf(n.data))
			return
		case "content":
			p.content(n.content)
			return
		}
	}
	p.media(fileTokens, source)
}

// json takes up a value as its JSON text, or a string as what it says.
func (p *Parser) json(v *fastjson.Value) {
	if v == nil {
		return
	}
	switch v.Type() {
	case fastjson.TypeNull:
	case fastjson.TypeString:
		p.found(stringOf(v))
	default:
		start := len(p.scratch)
		p.scratch = v.MarshalTo(p.scratch)
		p.found(view(p.scratch[start:]))
	}
}

// plainInput takes up a prompt or an embedding's input: a string, token ids, or a list of either. It returns the number of
// prompts.
func (p *Parser) plainInput(f field) int {
	raw := p.raw(f)
	if !present(raw) {
		return 1
	}
	m := &p.members[f]
	prompts := 1
	if raw[0] == '[' && m.first != '-' && (m.first < '0' || m.first > '9') {
		prompts = max(1, m.items)
	}
	switch {
	case raw[0] == '"':
		p.found(p.longString(raw))
	case m.texts == 0:
		if raw[0] == '[' {
			p.facts.ids += m.numbers
		}
	default:
		p.plainTree(p.tree(f))
	}
	return prompts
}

func (p *Parser) plainTree(v *fastjson.Value) {
	if v == nil {
		return
	}
	switch v.Type() {
	case fastjson.TypeNumber:
		p.facts.ids++
	case fastjson.TypeArray:
		for _, e := range v.GetArray() {
			p.plainTree(e)
		}
	default:
		p.content(v)
	}
}
