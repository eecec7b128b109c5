// SPDX-License-Identifier: Apache-2.0

package request

import (
	"fmt"
	"unicode/utf16"
	"unicode/utf8"
)

// maxDepth is the deepest nesting of arrays and objects that is accepted.
const maxDepth = 512

// field is a top-level member that is read, or that must not come twice.
type field uint8

const (
	fieldModel field = iota
	fieldStream
	fieldStreamOptions
	fieldMaxTokens
	fieldMaxCompletionTokens
	fieldMaxOutputTokens
	fieldN
	fieldBestOf
	fieldPromptCacheKey
	fieldMessages
	fieldPrompt
	fieldSuffix
	fieldInput
	fieldInstructions
	fieldSystem
	fieldTools
	fieldFunctions
	fieldPreviousResponseID
	fieldConversation
	// Not read here, but backends and later stages route by them.
	fieldUser
	fieldPriority
	fieldSafetyIdentifier
	fieldSessionID
	fieldMetadata
	fieldCacheSalt
	fieldServiceTier
	numFields
)

var fieldNames = [numFields]string{
	"model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of",
	"prompt_cache_key", "messages", "prompt", "suffix", "input", "instructions", "system", "tools", "functions",
	"previous_response_id", "conversation", "user", "priority", "safety_identifier", "session_id", "metadata", "cache_salt",
	"service_tier",
}

var fieldByName = func() map[string]field {
	m := make(map[string]field, numFields)
	for i, name := range fieldNames {
		m[name] = field(i)
	}
	return m
}()

// maxKey is longer than any field's name in any spelling that folds to it.
const maxKey = 64

// member is where a known field's value stands in the body, and what is in it.
type member struct {
	seen  bool // the key came, in whatever case
	exact bool // it came in its own spelling, so the value below is its value
	start int  // the value's bytes are body[start:end]
	end   int
	valueStats
}

// valueStats is what the scan learns of a value.
type valueStats struct {
	values  int  // values in it, itself included
	numbers int  // numbers in it
	texts   int  // strings and objects in it
	items   int  // direct elements, if it is an array
	first   byte // first byte of its first element or member, 0 if it has none
	depth   int  // arrays and objects that stand within each other
}

// raw returns a field's value as it stands in the body, nil if it is absent.
func (p *Parser) raw(f field) []byte {
	if m := &p.members[f]; m.exact {
		return p.body[m.start:m.end]
	}
	return nil
}

// scan checks the whole body and finds the known fields' values.
func (p *Parser) scan(body []byte) error {
	p.body = body
	p.members = [numFields]member{}
	i := skipSpace(body, 0)
	if i >= len(body) || body[i] != '{' {
		return syntaxError(i)
	}
	i = skipSpace(body, i+1)
	duplicate := numFields
	if i < len(body) && body[i] == '}' {
		i++
	} else {
		for {
			var err error
			key := i
			if i, err = skipString(body, i); err != nil {
				return err
			}
			f, exact, known := fieldOf(body[key:i])
			i = skipSpace(body, i)
			if i >= len(body) || body[i] != ':' {
				return syntaxError(i)
			}
			start := skipSpace(body, i+1)
			var stats valueStats
			if i, err = skipValue(body, start, &stats); err != nil {
				return err
			}
			if known {
				m := &p.members[f]
				if m.seen && duplicate == numFields {
					duplicate = f
				}
				m.seen = true
				if exact {
					m.exact, m.start, m.end, m.valueStats = true, start, i, stats
				}
			}
			i = skipSpace(body, i)
			if i >= len(body) {
				return syntaxError(i)
			}
			c := body[i]
			i++
			if c == '}' {
				break
			}
			if c != ',' {
				return syntaxError(i - 1)
			}
			i = skipSpace(body, i)
		}
	}
	if i = skipSpace(body, i); i != len(body) {
		return syntaxError(i)
	}
	if duplicate != numFields {
		return fmt.Errorf("%w %q", ErrDuplicateKey, fieldNames[duplicate])
	}
	return nil
}

func syntaxError(at int) error { return fmt.Errorf("%w at byte %d", ErrSyntax, at) }

// fieldOf finds the field of a raw key, quotes included.
func fieldOf(raw []byte) (f field, exact, known bool) {
	raw = raw[1 : len(raw)-1]
	if f, ok := fieldByName[string(raw)]; ok {
		return f, true, true
	}
	if len(raw) > 6*maxKey || isLowerASCII(raw) {
		return 0, false, false // longer than any name with every character escaped; or it can only be what it is
	}
	var plain, folded [6 * maxKey]byte
	key := unescape(plain[:0], raw)
	if f, ok := fieldByName[string(key)]; ok {
		return f, true, true
	}
	if len(key) > maxKey {
		return 0, false, false
	}
	f, ok := fieldByName[string(foldKey(folded[:0], key))]
	return f, false, ok
}

func isLowerASCII(raw []byte) bool {
	for _, c := range raw {
		if 'A' <= c && c <= 'Z' || c == '\\' || c >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// foldKey appends key as decoders that ignore case compare it: beside A to Z there are two characters that fold to a letter
// of ASCII.
func foldKey(dst, key []byte) []byte {
	for len(key) > 0 {
		r, n := utf8.DecodeRune(key)
		switch {
		case 'A' <= r && r <= 'Z':
			dst = append(dst, byte(r)|0x20)
		case r == 'ſ':
			dst = append(dst, 's')
		case r == '\u212a': // Kelvin sign
			dst = append(dst, 'k')
		default:
			dst = append(dst, key[:n]...)
		}
		key = key[n:]
	}
	return dst
}

func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\r' || b[i] == '\t') {
		i++
	}
	return i
}

// skipValue returns the index behind the value that starts at i, within the body's object. It keeps its place in a bit set
// instead of on the stack, so that depth costs nothing.
func skipValue(b []byte, i int, st *valueStats) (int, error) {
	var isObject [maxDepth/64 + 1]uint64
	depth := 0
	for {
		// A value is due at i.
		if i >= len(b) {
			return i, syntaxError(i)
		}
		st.values++
		c := b[i]
		if depth == 1 {
			if st.first == 0 {
				st.first = c
			}
			st.items++
		}
		var err error
		switch {
		case c == '{' || c == '[':
			depth++
			st.depth = max(st.depth, depth)
			if depth+1 > maxDepth {
				return i, fmt.Errorf("%w of %d levels at byte %d", ErrDepth, maxDepth, i)
			}
			i = skipSpace(b, i+1)
			if c == '{' {
				isObject[depth/64] |= 1 << (depth % 64)
				st.texts++
				if i >= len(b) || b[i] != '}' {
					if i, err = skipKey(b, i); err != nil {
						return i, err
					}
					continue
				}
			} else {
				isObject[depth/64] &^= 1 << (depth % 64)
				if i >= len(b) || b[i] != ']' {
					continue
				}
			}
			i++
			depth--
		case c == '"':
			st.texts++
			i, err = skipString(b, i)
		case c == '-' || '0' <= c && c <= '9':
			st.numbers++
			i, err = skipNumber(b, i)
		case c == 't':
			i, err = skipWord(b, i, "true")
		case c == 'f':
			i, err = skipWord(b, i, "false")
		case c == 'n':
			i, err = skipWord(b, i, "null")
		default:
			return i, syntaxError(i)
		}
		if err != nil {
			return i, err
		}
		// A value has ended at i: close what ends with it, or go on behind a comma.
		for {
			if depth == 0 {
				return i, nil
			}
			i = skipSpace(b, i)
			if i >= len(b) {
				return i, syntaxError(i)
			}
			object := isObject[depth/64]&(1<<(depth%64)) != 0
			c := b[i]
			if c == ',' {
				i = skipSpace(b, i+1)
				if object {
					if i, err = skipKey(b, i); err != nil {
						return i, err
					}
				}
				break
			}
			if object && c != '}' || !object && c != ']' {
				return i, syntaxError(i)
			}
			i++
			depth--
		}
	}
}

// skipKey returns the index of the value behind the key and colon that start at i.
func skipKey(b []byte, i int) (int, error) {
	i, err := skipString(b, i)
	if err != nil {
		return i, err
	}
	i = skipSpace(b, i)
	if i >= len(b) || b[i] != ':' {
		return i, syntaxError(i)
	}
	return skipSpace(b, i+1), nil
}

// plainByte tells the bytes that stand for themselves in a string.
var plainByte = func() (t [256]bool) {
	for c := range t {
		t[c] = c >= 0x20 && c != '"' && c != '\\'
	}
	return t
}()

func skipString(b []byte, i int) (int, error) {
	if i >= len(b) || b[i] != '"' {
		return i, syntaxError(i)
	}
	for i++; i < len(b); i++ {
		c := b[i]
		if plainByte[c] {
			continue
		}
		if c == '"' {
			return i + 1, nil
		}
		if c != '\\' || i+1 >= len(b) {
			return i, syntaxError(i)
		}
		i++
		switch b[i] {
		case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		case 'u':
			if _, ok := hex4(b[i+1:]); !ok {
				return i, syntaxError(i)
			}
			i += 4
		default:
			return i, syntaxError(i)
		}
	}
	return i, syntaxError(i)
}

func skipNumber(b []byte, i int) (int, error) {
	digits := func() bool {
		start := i
		for i < len(b) && '0' <= b[i] && b[i] <= '9' {
			i++
		}
		return i > start
	}
	if b[i] == '-' {
		i++
	}
	if i < len(b) && b[i] == '0' {
		i++
	} else if !digits() {
		return i, syntaxError(i)
	}
	if i < len(b) && b[i] == '.' {
		i++
		if !digits() {
			return i, syntaxError(i)
		}
	}
	if i < len(b) && (b[i] == 'e' || b[i] == 'E') {
		i++
		if i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		if !digits() {
			return i, syntaxError(i)
		}
	}
	return i, nil
}

func skipWord(b []byte, i int, word string) (int, error) {
	if len(b)-i < len(word) || string(b[i:i+len(word)]) != word {
		return i, syntaxError(i)
	}
	return i + len(word), nil
}

func hex4(b []byte) (rune, bool) {
	if len(b) < 4 {
		return 0, false
	}
	var r rune
	for _, c := range b[:4] {
		switch {
		case '0' <= c && c <= '9':
			c -= '0'
		case 'a' <= c && c <= 'f':
			c -= 'a' - 10
		case 'A' <= c && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, false
		}
		r = r<<4 | rune(c)
	}
	return r, true
}

// unescape appends the text of a scanned string without its quotes. Half a surrogate pair becomes U+FFFD.
func unescape(dst, raw []byte) []byte {
	for i := 0; i < len(raw); i++ {
		c := raw[i]
		if c != '\\' {
			dst = append(dst, c)
			continue
		}
		i++
		switch c = raw[i]; c {
		case 'b':
			c = '\b'
		case 'f':
			c = '\f'
		case 'n':
			c = '\n'
		case 'r':
			c = '\r'
		case 't':
			c = '\t'
		case 'u':
			r, _ := hex4(raw[i+1:])
			i += 4
			if utf16.IsSurrogate(r) {
				low := rune(-1)
				if i+2 < len(raw) && raw[i+1] == '\\' && raw[i+2] == 'u' {
					low, _ = hex4(raw[i+3:])
				}
				if r = utf16.DecodeRune(r, low); r != utf8.RuneError {
					i += 6
				}
			}
			dst = utf8.AppendRune(dst, r)
			continue
		}
		dst = append(dst, c)
	}
	return dst
}
