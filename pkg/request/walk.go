// SPDX-License-Identifier: Apache-2.0

package request

import (
	"bytes"

	"github.com/shunt-lb/shunt/pkg/tokens"
)

// Tokens of media other than images, as flat figures.
const (
	audioTokens = 500  // about a minute
	videoTokens = 2000 // a few frames a second for some seconds
	fileTokens  = 1500 // about three pages
)

// node is what matters of an object in a prompt: a message, an item, a part of a content, a call.
type node struct {
	kind, role, name                                   value
	content, text, output, refusal, thinking           value
	reasoning, summary, title, context                 value
	toolCalls, functionCall, function, custom          value
	arguments, input                                   value
	imageURL, detail, source, data, file, audio, video value
}

// read collects an object's members. Of a repeated one the last counts, as with most backends.
func (p *Parser) read(v value, n *node) {
	*n = node{}
	for c := p.object(v); p.nextMember(&c); {
		key := c.key
		if bytes.IndexByte(key, '\\') >= 0 {
			s := p.unescapedKey(key)
			key = append(p.key[:0], s...)
			p.key = key
		}
		switch string(key) {
		case "type":
			n.kind = c.v
		case "role":
			n.role = c.v
		case "name":
			n.name = c.v
		case "content":
			n.content = c.v
		case "text":
			n.text = c.v
		case "output":
			n.output = c.v
		case "refusal":
			n.refusal = c.v
		case "thinking":
			n.thinking = c.v
		case "reasoning_content", "reasoning":
			n.reasoning = c.v
		case "summary":
			n.summary = c.v
		case "title":
			n.title = c.v
		case "context":
			n.context = c.v
		case "tool_calls":
			n.toolCalls = c.v
		case "function_call":
			n.functionCall = c.v
		case "function":
			n.function = c.v
		case "custom":
			n.custom = c.v
		case "arguments":
			n.arguments = c.v
		case "input":
			n.input = c.v
		case "image_url":
			n.imageURL = c.v
		case "detail":
			n.detail = c.v
		case "source":
			n.source = c.v
		case "data":
			n.data = c.v
		case "file", "file_data", "file_url", "file_id":
			n.file = c.v
		case "input_audio", "audio_url":
			n.audio = c.v
		case "video_url":
			n.video = c.v
		}
	}
}

// found takes up one text of the prompt.
func (p *Parser) found(t tokens.Text) {
	if t.S == "" {
		return
	}
	if len(p.facts.texts) == maxTexts {
		p.facts.unwalked += len(t.S)
		return
	}
	p.facts.texts = append(p.facts.texts, t)
	if p.hashing {
		p.hashText(t)
		p.hashed += len(t.S)
	}
}

// media takes up a part that is neither text nor an image. Its data is not looked at, but that different ones make different
// conversations.
func (p *Parser) media(tokens int, identity value) {
	p.facts.media += tokens
	p.facts.mediaParts++
	p.identify(identity)
}

// identify takes up what tells a picture or a file from others: the ends of its data.
func (p *Parser) identify(v value) {
	if !p.hashing {
		return
	}
	s := p.inner(v)
	for c := p.object(v); p.nextMember(&c); {
		if t := p.inner(c.v); len(t) > len(s) {
			s = t
		}
	}
	const edge = 512
	p.hashBytes(s[:min(len(s), edge)])
	p.hashBytes(s[len(s)-min(len(s), edge):])
	p.hashed += 1 + len(s)
}

// systemPrompt takes up a system prompt that stands beside the messages: a string or a list of parts.
func (p *Parser) systemPrompt(f field) {
	if !present(p.raw(f)) {
		return
	}
	p.facts.messages++
	p.hashing = true
	if v, ok := p.member(f); ok {
		p.content(v)
	}
	p.hashing = false
}

// conversation takes up a list of messages, or a string that stands for one user message.
func (p *Parser) conversation(f field) {
	if !present(p.raw(f)) {
		return
	}
	v, ok := p.member(f)
	switch {
	case !ok:
	case p.kind(v) == '"':
		p.facts.messages++
		p.startRole("user")
		p.content(v)
		p.endRole("user")
	case p.kind(v) == '[':
		for c := p.enter(v); p.next(&c); {
			p.message(c.v)
		}
	default:
		p.message(v)
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
		p.hashString(role[:1])
	}
}

func (p *Parser) endRole(role string) {
	p.hashing = false
	if role == "user" && p.hashed > 0 {
		p.userSeen = true
	}
}

func (p *Parser) message(v value) {
	if p.kind(v) != '{' {
		p.content(v)
		return
	}
	var n node
	p.read(v, &n)
	f := &p.facts
	f.messages++
	role := p.stringOf(n.role)
	switch role {
	case "system", "developer", "user", "assistant", "tool", "function":
	case "":
		p.part(&n)
		return
	default:
		f.oddRoles++
		p.found(p.textOf(n.role))
	}
	p.startRole(role)
	if name := p.textOf(n.name); name.S != "" {
		if len(f.names) < maxNames {
			f.names = append(f.names, name)
		}
		if p.hashing {
			p.hashText(name)
		}
	}
	p.content(n.content)
	p.found(p.textOf(n.refusal))
	p.found(p.textOf(n.reasoning))
	for c := p.array(n.toolCalls); p.next(&c); {
		f.calls++
		p.call(c.v)
	}
	p.call(n.functionCall)
	p.endRole(role)
}

// call takes up the call of a tool or function by the model.
func (p *Parser) call(v value) {
	if p.kind(v) != '{' {
		return
	}
	var n node
	p.read(v, &n)
	for _, inner := range [...]value{n.function, n.custom} {
		if p.kind(inner) == '{' {
			p.read(inner, &n)
			break
		}
	}
	p.found(p.textOf(n.name))
	p.json(n.arguments)
	p.json(n.input)
}

// content takes up a content: null, a string, a part, or a list of these, at any depth: the scan has bounded it.
func (p *Parser) content(v value) {
	switch p.kind(v) {
	case '"':
		p.found(p.textOf(v))
	case '{':
		var n node
		p.read(v, &n)
		p.part(&n)
	case '[':
		for c := p.enter(v); p.next(&c); {
			p.content(c.v)
		}
	}
}

// part takes up one typed part. Of an unknown type, only members that hold text by their name are read, so that
// nobody's base64 is taken for text.
func (p *Parser) part(n *node) {
	switch p.stringOf(n.kind) {
	case "image_url", "input_image", "image":
		p.image(n)
	case "input_audio", "audio_url", "audio":
		p.media(audioTokens, n.audio)
	case "video_url", "input_video", "video":
		p.media(videoTokens, n.video)
	case "file", "input_file", "container_upload":
		p.media(fileTokens, n.file)
	case "document":
		p.found(p.textOf(n.title))
		p.found(p.textOf(n.context))
		p.document(n.source)
	case "tool_use", "server_tool_use", "mcp_tool_use", "function_call", "custom_tool_call", "mcp_call":
		p.found(p.textOf(n.name))
		p.json(n.arguments)
		p.json(n.input)
		p.content(n.output)
	case "redacted_thinking", "compaction", "item_reference":
		// Opaque to everyone but the server.
		p.facts.partial = true
	case "reasoning":
		p.facts.partial = true // most of it stays with the server, or is encrypted
		fallthrough
	default:
		p.content(n.text)
		p.content(n.content)
		p.content(n.output)
		p.content(n.summary)
		p.found(p.textOf(n.thinking))
		p.found(p.textOf(n.refusal))
	}
}

// document takes up the source of an Anthropic document: plain text, parts, or data that is not looked at.
func (p *Parser) document(source value) {
	if p.kind(source) == '{' {
		var n node
		p.read(source, &n)
		switch p.stringOf(n.kind) {
		case "text":
			p.found(p.textOf(n.data))
			return
		case "content":
			p.content(n.content)
			return
		}
	}
	p.media(fileTokens, source)
}

// json takes up a value as its JSON text, or a string as what it says.
func (p *Parser) json(v value) {
	switch p.kind(v) {
	case 'n':
	case '"':
		p.found(p.textOf(v))
	default:
		p.found(tokens.Text{S: view(p.body[v.start:v.end]), Form: tokens.JSONValue})
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
	if raw[0] != '"' && m.texts == 0 {
		if raw[0] == '[' {
			p.facts.ids += m.numbers
		}
		return prompts
	}
	if v, ok := p.member(f); ok {
		p.plain(v)
	}
	return prompts
}

func (p *Parser) plain(v value) {
	switch k := p.kind(v); {
	case k == '-' || '0' <= k && k <= '9':
		p.facts.ids++
	case k == '[':
		for c := p.enter(v); p.next(&c); {
			p.plain(c.v)
		}
	default:
		p.content(v)
	}
}
