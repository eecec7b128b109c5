// SPDX-License-Identifier: Apache-2.0

package proxy

import "bytes"

// jsonScan reads the few figures that the proxy wants from an answer's JSON, in one pass over bytes that may be split
// anywhere, in constant memory whatever the length of a line or a string. It never fails: what it does not
// understand it skips. It is no validator.
type jsonScan struct {
	state   uint8
	escaped bool
	isKey   bool // the string being read is a member's name
	minus   bool // the number being read is negative
	frac    bool // ... and its integer part is over
	token   bool // the document carries generated text
	key     jsonKey
	nshort  uint8
	depth   int
	delta   int // depth at which an object named delta was opened; 0 = outside
	usage   int // the same for usage
	number  int64
	stack   [jsonDepth]jsonFrame
	short   [32]byte // the name being read, or the head of a short string value

	figures figures
}

// figures are what an answer says of itself, over all its documents.
type figures struct {
	prompt, output, cached int64 // tokens as reported; 0 = not reported
	read, written          int64 // Anthropic's cached tokens, which are not part of prompt
	reported               bool  // usage was there
	tokens                 int64 // documents that carried generated text
	failed                 bool  // a document was an error
	failCode               int64
	finish                 [24]byte
	nfinish                uint8
}

// wholePrompt is the prompt's tokens as reported, those of the cache included.
func (f *figures) wholePrompt() int64 { return f.prompt + f.read + f.written }

const jsonDepth = 32 // containers below are counted, not told apart

type jsonFrame struct {
	object    bool
	expectKey bool
	key       jsonKey // name under which the container stands
}

const (
	jsonIdle uint8 = iota
	jsonString
	jsonNumber
)

type jsonKey uint8

const (
	keyOther jsonKey = iota
	keyChoices
	keyDelta
	keyText // the names of generated text
	keyMessage
	keyFinish
	keyStatus
	keyUsage
	keyPrompt
	keyOutput
	keyCached
	keyCacheRead
	keyCacheWrite
	keyResponse
	keyError
	keyCode
	keyDone
)

func keyOf(name []byte) jsonKey {
	switch string(name) {
	case "choices":
		return keyChoices
	case "delta":
		return keyDelta
	case "content", "text", "reasoning_content", "reasoning", "thinking", "partial_json", "arguments", "refusal":
		return keyText
	case "message":
		return keyMessage
	case "finish_reason", "stop_reason":
		return keyFinish
	case "status":
		return keyStatus
	case "usage":
		return keyUsage
	case "prompt_tokens", "input_tokens":
		return keyPrompt
	case "completion_tokens", "output_tokens":
		return keyOutput
	case "cached_tokens":
		return keyCached
	case "cache_read_input_tokens":
		return keyCacheRead
	case "cache_creation_input_tokens":
		return keyCacheWrite
	case "response":
		return keyResponse
	case "error":
		return keyError
	case "code":
		return keyCode
	}
	return keyOther
}

// reset forgets a document that was not finished; the figures stay.
func (s *jsonScan) reset() {
	s.state, s.escaped, s.depth, s.delta, s.usage = jsonIdle, false, 0, 0, 0
	s.token, s.isKey, s.key = false, false, keyOther
}

// feed reads the next bytes.
func (s *jsonScan) feed(p []byte) {
	for i := 0; i < len(p); {
		switch s.state {
		case jsonString:
			i += s.inString(p[i:])
		case jsonNumber:
			c := p[i]
			switch {
			case c >= '0' && c <= '9':
				if !s.frac && s.number < 1<<50 {
					s.number = s.number*10 + int64(c-'0')
				}
				i++
			case c == '.' || c == 'e' || c == 'E' || c == '+' || c == '-':
				s.frac = true
				i++
			default:
				s.state = jsonIdle
				s.numberDone()
			}
		default:
			c := p[i]
			i++
			if c != '"' {
				if jsonMark[c] {
					s.structural(c)
				}
				continue
			}
			f := s.frame()
			s.isKey = f != nil && f.object && f.expectKey
			// Most strings are short, whole and plain: no state is needed for those.
			j := i
			for j < len(p) && j < i+len(s.short) && p[j] != '"' && p[j] != '\\' {
				j++
			}
			if j < len(p) && p[j] == '"' {
				s.stringEnd(p[i:j])
				i = j + 1
				continue
			}
			s.state, s.escaped, s.nshort = jsonString, false, 0
		}
	}
}

// jsonMark holds the bytes outside strings that mean something here.
var jsonMark = func() (t [256]bool) {
	for _, c := range "{}[]:,-0123456789" {
		t[c] = true
	}
	return t
}()

func (s *jsonScan) structural(c byte) {
	switch c {
	case '{', '[':
		s.open(c == '{')
	case '}', ']':
		s.close()
	case ':':
		if f := s.frame(); f != nil && f.object {
			f.expectKey = false
		}
	case ',':
		if f := s.frame(); f != nil && f.object {
			f.expectKey = true
		}
	case '-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9':
		s.state, s.minus, s.frac, s.number = jsonNumber, c == '-', false, 0
		if c != '-' {
			s.number = int64(c - '0')
		}
	}
}

// frame is the innermost container, nil at the top and where containers are too deep to be told apart.
func (s *jsonScan) frame() *jsonFrame {
	if s.depth < 1 || s.depth > jsonDepth {
		return nil
	}
	return &s.stack[s.depth-1]
}

// name is the name under which the value that begins or ends here stands in an object, or keyOther.
func (s *jsonScan) name() jsonKey {
	if f := s.frame(); f != nil && f.object {
		return s.key
	}
	return keyOther
}

func (s *jsonScan) open(object bool) {
	name := s.name()
	if object && s.depth == 1 && name == keyError {
		s.figures.failed = true
	}
	s.depth++
	if s.depth > jsonDepth {
		return
	}
	s.stack[s.depth-1] = jsonFrame{object: object, expectKey: object, key: name}
	if object && name == keyDelta && s.delta == 0 {
		s.delta = s.depth
	}
	if object && name == keyUsage && s.usage == 0 && s.depth <= 3 {
		s.usage = s.depth
		s.figures.reported = true
	}
	s.key = keyOther
}

func (s *jsonScan) close() {
	if s.depth == 0 {
		return
	}
	if s.delta == s.depth {
		s.delta = 0
	}
	if s.usage == s.depth {
		s.usage = 0
	}
	s.depth--
	s.key = keyOther
	if s.depth == 0 {
		if s.token {
			s.figures.tokens++
		}
		s.reset()
	}
}

// inString reads on in a string and returns how many bytes it took.
func (s *jsonScan) inString(p []byte) int {
	if s.escaped {
		s.escaped = false
		s.keep('\\') // a name with an escape is none that we look for
		return 1
	}
	end := bytes.IndexByte(p, '"')
	seg := p
	if end >= 0 {
		seg = p[:end]
	}
	if esc := bytes.IndexByte(seg, '\\'); esc >= 0 {
		for _, c := range seg[:min(esc, len(s.short))] {
			s.keep(c)
		}
		s.escaped = true
		return esc + 1
	}
	for _, c := range seg[:min(len(seg), len(s.short)+1)] {
		s.keep(c)
	}
	if end < 0 {
		return len(p)
	}
	s.state = jsonIdle
	if int(s.nshort) > len(s.short) {
		s.stringEnd(longText)
	} else {
		s.stringEnd(s.short[:s.nshort])
	}
	return end + 1
}

// longText stands for a string that is longer than what is kept of one.
var longText = []byte("a string that is longer than what is kept of one")

func (s *jsonScan) stringEnd(text []byte) {
	if s.isKey {
		s.key = keyOf(text)
		s.isKey = false
		return
	}
	s.stringDone(text)
}

func (s *jsonScan) keep(c byte) {
	if int(s.nshort) < len(s.short) {
		s.short[s.nshort] = c
	}
	if int(s.nshort) <= len(s.short) {
		s.nshort++
	}
}

func (s *jsonScan) stringDone(text []byte) {
	if s.key == keyOther || len(text) == 0 {
		return
	}
	switch s.name() {
	case keyText:
		if s.delta > 0 || s.inChoice() {
			s.token = true
		}
	case keyDelta: // the Responses API: {"type":"response.output_text.delta","delta":"..."}
		if s.depth == 1 {
			s.token = true
		}
	case keyFinish:
		s.finish(text)
	case keyStatus:
		if f := s.frame(); s.depth == 1 || s.depth == 2 && f.key == keyResponse {
			s.finish(text)
		}
	case keyError:
		if s.depth == 1 {
			s.figures.failed = true
		}
	}
}

func (s *jsonScan) finish(text []byte) {
	s.figures.nfinish = uint8(copy(s.figures.finish[:], text))
}

// inChoice reports whether the innermost object is an element of choices.
func (s *jsonScan) inChoice() bool {
	return s.depth >= 2 && s.depth <= jsonDepth && !s.stack[s.depth-2].object && s.stack[s.depth-2].key == keyChoices
}

func (s *jsonScan) numberDone() {
	if s.minus {
		return
	}
	switch s.name() {
	case keyPrompt:
		if s.usage == s.depth && s.number > 0 {
			s.figures.prompt = s.number
		}
	case keyOutput:
		if s.usage == s.depth {
			s.figures.output = s.number
		}
	case keyCached:
		if s.usage > 0 {
			s.figures.cached = s.number
		}
	case keyCacheRead:
		if s.usage == s.depth {
			s.figures.cached, s.figures.read = s.number, s.number
		}
	case keyCacheWrite:
		if s.usage == s.depth {
			s.figures.written = s.number
		}
	case keyCode:
		if s.depth == 2 && s.stack[1].key == keyError {
			s.figures.failCode = s.number
		}
	}
}
