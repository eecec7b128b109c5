// SPDX-License-Identifier: Apache-2.0

package request

import (
	"bytes"
	"errors"
	"hash/maphash"
	"math"
	"strconv"
	"strings"
	"sync"

	"github.com/shunt-lb/shunt/pkg/tokens"
)

// Errors of Parse and Detect; see the package's documentation.
var (
	ErrSyntax       = errors.New("body is not a JSON object")
	ErrDepth        = errors.New("body exceeds a nesting")
	ErrDuplicateKey = errors.New("body repeats the key")
)

const (
	// maxContainers is the number of arrays and objects in a member beyond which it is not walked. What is found in those that
	// are has bounds of its own; texts beyond them are estimated, names and pictures left out.
	maxContainers = 1 << 17
	maxTexts      = 1 << 16
	maxNames      = 1 << 12
	maxPictures   = 1 << 12
	// keepBytes is how much memory a pooled parser may keep.
	keepBytes = 1 << 20
	// What a client may multiply: a limit on tokens, answers for a prompt, prompts. Beyond these it is taken for these.
	maxLimit   = math.MaxInt32
	maxChoices = 1 << 16
	maxPrompts = 1 << 15
	// sessionPrefix is how much of a completion's prompt names its conversation.
	sessionPrefix = 1024
)

// Facts is what a request's body says. The strings and the text belong to the Parser and to the body: they are valid until
// the Parser's Release, and while the body does not change. Clone what must live longer.
type Facts struct {
	API    API
	Model  string // "" if absent or not a string
	Stream bool
	// MaxTokens is the limit on the output of the whole request: the limit on one answer times the number of answers. 0 if
	// there is none.
	MaxTokens int64
	// Choices is the number of answers generated for each prompt (n, or best_of if that is more); at least 1.
	Choices int
	// IncludeUsage: the client asked for usage at a stream's end (stream_options.include_usage).
	IncludeUsage bool
	// CacheKey is prompt_cache_key, "" if absent.
	CacheKey string
	// Fingerprint names the conversation where the client does not: a hash, seeded for this process, of the model, the system
	// prompt, the tools and the first user message that is not empty. It does not change as messages are appended, and is 0
	// if there is no such message, or if the body continues a conversation that the server keeps (previous_response_id,
	// conversation).
	//
	// For Completions it is a hash of the model and the first 1,024 bytes of the prompt (of the JSON text, if that is a list of
	// token ids). A shorter prompt gives 0, since its hash would change as it grows and there is next to nothing to find in a
	// cache; so do several prompts in one request. For Embeddings and Other it is 0.
	Fingerprint uint64

	p        *Parser
	texts    []tokens.Text // each is encoded on its own
	names    []tokens.Text // of those who speak, which not every family renders
	pictures []picture

	chat       bool // framed as a chat
	messages   int  // messages, and what is framed like one
	oddRoles   int  // of these, those whose role is among the texts
	calls      int  // calls of tools
	ids        int  // prompt tokens that came as ids
	media      int  // tokens of media other than images
	mediaParts int
	unwalked   int  // bytes that are estimated by their number
	partial    bool // the model reads something that is not in the body
}

// Parser reads bodies. Get one with Acquire; it serves one request at a time.
type Parser struct {
	facts   Facts
	body    []byte
	members [numFields]member
	tape    []container
	open    [maxDepth + 1]int32 // entries of the containers that the scan is in
	scratch []byte              // texts that do not stand in the body as they are
	key     []byte              // a member's name that does not
	lines   []tokens.Text       // texts of the tools

	hash     maphash.Hash
	hashing  bool // the texts that are found belong to the fingerprint
	hashed   int  // bytes of text hashed
	userSeen bool
}

var (
	parsers = sync.Pool{New: func() any { return new(Parser) }}
	// fingerprintSeed keeps clients from building conversations that share a fingerprint with others.
	fingerprintSeed = maphash.MakeSeed()
)

// Acquire returns a parser from the pool.
func Acquire() *Parser { return parsers.Get().(*Parser) }

// Release gives the parser back. Its Facts, and all strings got from them, are invalid from here on.
func (p *Parser) Release() {
	const textSize, tapeSize = 32, 8
	kept := cap(p.scratch) + cap(p.key) + tapeSize*cap(p.tape) + textSize*(cap(p.facts.texts)+cap(p.facts.names)+cap(p.lines)) +
		16*cap(p.facts.pictures)
	if kept > keepBytes {
		*p = Parser{}
	}
	p.reset()
	p.body = nil
	parsers.Put(p)
}

func (p *Parser) reset() {
	f := &p.facts
	clear(f.texts)
	clear(f.names)
	clear(p.lines)
	*f = Facts{p: p, Choices: 1, texts: f.texts[:0], names: f.names[:0], pictures: f.pictures[:0]}
	p.lines = p.lines[:0]
	p.scratch = p.scratch[:0]
	p.hashing, p.hashed, p.userSeen = false, 0, false
}

// Parse reads a body of the given API. The Facts are valid until Release or the next Parse.
func (p *Parser) Parse(api API, body []byte) (*Facts, error) {
	p.reset()
	if err := p.scan(body); err != nil {
		return nil, err
	}
	f := &p.facts
	f.API = api
	f.Model = p.shortString(fieldModel)
	f.CacheKey = p.shortString(fieldPromptCacheKey)
	f.Stream = isTrue(p.raw(fieldStream))
	p.streamOptions()

	p.hash.SetSeed(fingerprintSeed)
	p.hash.Reset()
	p.hashString(f.Model)

	prompts := 1
	switch api {
	case Chat, Messages:
		f.chat = true
		p.systemPrompt(fieldSystem)
		p.conversation(fieldMessages)
	case Responses:
		f.chat = true
		f.partial = present(p.raw(fieldPreviousResponseID)) || present(p.raw(fieldConversation))
		p.systemPrompt(fieldInstructions)
		p.conversation(fieldInput)
	case Completions:
		prompts = p.plainInput(fieldPrompt)
		p.plainInput(fieldSuffix)
		p.conversation(fieldMessages)
	case Embeddings:
		p.plainInput(fieldInput)
		p.conversation(fieldMessages)
	case Other:
	}
	p.limits(int64(prompts))
	p.fingerprint(prompts)
	return f, nil
}

// limits reads how much output may come. Each API has its own name for the limit, but backends take the others' too.
func (p *Parser) limits(prompts int64) {
	f := &p.facts
	if f.API == Embeddings {
		return
	}
	order := [...]field{fieldMaxTokens, fieldMaxCompletionTokens, fieldMaxOutputTokens}
	switch f.API {
	case Chat:
		order = [...]field{fieldMaxCompletionTokens, fieldMaxTokens, fieldMaxOutputTokens}
	case Responses:
		order = [...]field{fieldMaxOutputTokens, fieldMaxCompletionTokens, fieldMaxTokens}
	}
	var limit int64
	for _, name := range order {
		if limit = number(p.raw(name)); limit > 0 {
			break
		}
	}
	if f.API == Chat || f.API == Completions {
		choices := max(1, number(p.raw(fieldN)))
		if f.API == Completions {
			choices = max(choices, number(p.raw(fieldBestOf)))
		}
		f.Choices = int(min(choices, maxChoices))
	}
	f.MaxTokens = limit * int64(f.Choices) * min(prompts, maxPrompts)
}

func (p *Parser) fingerprint(prompts int) {
	f := &p.facts
	switch f.API {
	case Chat, Messages:
	case Responses:
		if f.partial && (present(p.raw(fieldPreviousResponseID)) || present(p.raw(fieldConversation))) {
			return
		}
	case Completions:
		text := p.raw(fieldPrompt)
		if m := &p.members[fieldPrompt]; m.exact && m.texts > 0 && len(f.texts) > 0 {
			text = p.prefix(f.texts[0])
		}
		if prompts != 1 || len(text) < sessionPrefix {
			return
		}
		p.hashBytes(text[:sessionPrefix])
		p.userSeen = true
	case Embeddings, Other:
		return
	}
	if !p.userSeen {
		return
	}
	p.hashBytes(p.raw(fieldTools))
	p.hashBytes(p.raw(fieldFunctions))
	f.Fingerprint = max(1, p.hash.Sum64())
}

// prefix returns the start of a text, sessionPrefix bytes of it if it is that long.
func (p *Parser) prefix(t tokens.Text) []byte {
	if t.Form != tokens.JSONString {
		return []byte(t.S[:min(len(t.S), sessionPrefix)])
	}
	const longest = len(`\u0000`) // an escape that says one byte
	start := len(p.scratch)
	p.scratch = tokens.AppendUnescaped(p.scratch, t.S[:min(len(t.S), longest*sessionPrefix+2*longest)])
	return p.scratch[start:]
}

func (p *Parser) hashBytes(b []byte) { p.hashString(view(b)) }

func (p *Parser) hashString(s string) {
	n := len(s)
	for range 4 {
		p.hash.WriteByte(byte(n))
		n >>= 8
	}
	p.hash.WriteString(s)
}

// hashText hashes what a text says, however it is spelled.
func (p *Parser) hashText(t tokens.Text) {
	if t.Form != tokens.JSONString {
		p.hashString(t.S)
		return
	}
	start := len(p.scratch)
	p.scratch = tokens.AppendUnescaped(p.scratch, t.S)
	p.hashBytes(p.scratch[start:])
	p.scratch = p.scratch[:start]
}

func (p *Parser) streamOptions() {
	if raw := p.raw(fieldStreamOptions); len(raw) == 0 || raw[0] != '{' {
		return
	}
	unwalked := p.facts.unwalked
	if o, ok := p.member(fieldStreamOptions); ok {
		p.facts.IncludeUsage = p.kind(p.find(o, "include_usage")) == 't'
	}
	p.facts.unwalked = unwalked // it is not part of the prompt
}

// shortString returns a copy of a field's text, "" if it is not a string.
func (p *Parser) shortString(f field) string {
	raw := p.raw(f)
	if len(raw) < 2 || raw[0] != '"' {
		return ""
	}
	start := len(p.scratch)
	p.scratch = tokens.AppendUnescaped(p.scratch, view(raw[1:len(raw)-1]))
	return view(p.scratch[start:])
}

func present(raw []byte) bool { return len(raw) > 0 && raw[0] != 'n' }

// isTrue reads a boolean as the validation of Python backends does, which takes 1 and some words for true.
func isTrue(raw []byte) bool {
	s := view(bytes.Trim(raw, `"`))
	switch len(s) {
	case 1:
		return s == "1" || s == "t" || s == "T" || s == "y" || s == "Y"
	case 2:
		return strings.EqualFold(s, "on")
	case 3:
		return strings.EqualFold(s, "yes") || s == "1.0"
	case 4:
		return strings.EqualFold(s, "true")
	}
	return false
}

// number reads a count, 0 if it is absent, negative or no number. Backends take "16" and 16.0 for 16.
func number(raw []byte) int64 {
	if len(raw) == 0 || len(raw) > 64 || raw[0] != '"' && (raw[0] < '0' || raw[0] > '9') {
		return 0
	}
	x, err := strconv.ParseFloat(view(bytes.Trim(raw, `"`)), 64)
	if err != nil && !errors.Is(err, strconv.ErrRange) || !(x > 0) {
		return 0
	}
	return int64(min(x, maxLimit))
}
