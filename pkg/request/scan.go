// SPDX-License-Identifier: Apache-2.0

package request

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"unicode/utf8"

	"github.com/shunt-lb/shunt/pkg/tokens"
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
	tape  int // index of the value's own entry on the tape, if it is an array or an object
	valueStats
}

// walked tells the members that are gone over a second time, value by value.
var walked = func() (t [numFields]bool) {
	for _, f := range []field{fieldStreamOptions, fieldMessages, fieldPrompt, fieldInput, fieldInstructions, fieldSystem, fieldTools, fieldFunctions} {
		t[f] = true
	}
	return t
}()

// container is one entry of the tape: an array or an object of a member that is walked, in the order in which they open.
// With it a value is skipped in one step, and a walk costs no more than the values it looks at.
type container struct {
	end  int32 // index behind it
	next int32 // entry behind it and all that is in it
}

// valueStats is what the scan learns of a value.
type valueStats struct {
	values  int  // values in it, itself included
	numbers int  // numbers in it
	texts   int  // strings and objects in it
	items   int  // direct elements, if it is an array
	first   byte // first byte of its first element or member, 0 if it has none
	// unrecorded: its containers are not on the tape, there are too many.
	unrecorded bool
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
	p.tape = p.tape[:0]
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
			tape := len(p.tape)
			record := known && walked[f]
			if record && len(body) > math.MaxInt32 {
				record, stats.unrecorded = false, true
			}
			if i, err = p.skipValue(start, &stats, record); err != nil {
				return err
			}
			if known {
				m := &p.members[f]
				if m.seen && duplicate == numFields {
					duplicate = f
				}
				m.seen = true
				if exact {
					m.exact, m.start, m.end, m.tape, m.valueStats = true, start, i, tape, stats
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
	key := tokens.AppendUnescaped(plain[:0], view(raw))
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
// instead of on the stack, so that depth costs nothing. With record it puts the containers on the tape.
func (p *Parser) skipValue(i int, st *valueStats, record bool) (int, error) {
	b := p.body
	var isObject [maxDepth/64 + 1]uint64
	depth := 0
	start := len(p.tape)
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
			if depth+1 > maxDepth {
				return i, fmt.Errorf("%w of %d levels at byte %d", ErrDepth, maxDepth, i)
			}
			if record {
				if len(p.tape)-start == maxContainers {
					record, st.unrecorded, p.tape = false, true, p.tape[:start]
				} else {
					p.open[depth] = int32(len(p.tape))
					p.tape = append(p.tape, container{})
				}
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
			if record {
				p.tape[p.open[depth]] = container{int32(i), int32(len(p.tape))}
			}
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
			if record {
				p.tape[p.open[depth]] = container{int32(i), int32(len(p.tape))}
			}
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

// ones is 1 in each byte of a word, tops the top bit of each.
const (
	ones = 0x0101010101010101
	tops = 0x8080808080808080
)

// endsPlain marks, by its top bit, the first byte of a word that does not stand for itself in a string: a quote, a backslash
// or a control character. It may mark others behind it.
func endsPlain(x uint64) uint64 {
	// Taking 1 from a byte that became 0, or 0x20 from one below it, sets its top bit; bytes whose top bit was set are none
	// of these.
	return ((x ^ ones*'"' - ones) | (x ^ ones*'\\' - ones) | (x - ones*0x20)) &^ x & tops
}

func skipString(b []byte, i int) (int, error) {
	if i >= len(b) || b[i] != '"' {
		return i, syntaxError(i)
	}
	i++
	for {
		for i+16 <= len(b) {
			w := b[i : i+16 : i+16]
			m, n := endsPlain(binary.LittleEndian.Uint64(w)), endsPlain(binary.LittleEndian.Uint64(w[8:]))
			if m|n != 0 {
				if m == 0 {
					i, m = i+8, n
				}
				i += bits.TrailingZeros64(m) / 8
				break
			}
			i += 16
		}
		if i >= len(b) {
			return i, syntaxError(i)
		}
		c := b[i]
		switch {
		case c == '"':
			return i + 1, nil
		case c < 0x20:
			return i, syntaxError(i)
		case c != '\\':
			i++ // one of the last bytes of the body
			continue
		case i+1 >= len(b):
			return i, syntaxError(i)
		}
		i++
		switch escapes[b[i]] {
		case 1:
			i++
		case 5:
			if !isHex4(b[i+1:]) {
				return i, syntaxError(i)
			}
			i += 5
		default:
			return i, syntaxError(i)
		}
	}
}

// escapes tells how many bytes an escape has behind the backslash, by the first of them.
var escapes = func() (t [256]uint8) {
	for _, c := range `"\/bfnrt` {
		t[c] = 1
	}
	t['u'] = 5
	return t
}()

func isHex4(b []byte) bool {
	if len(b) < 4 {
		return false
	}
	for _, c := range b[:4] {
		if (c < '0' || c > '9') && (c|0x20 < 'a' || c|0x20 > 'f') {
			return false
		}
	}
	return true
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
