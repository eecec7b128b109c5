// SPDX-License-Identifier: Apache-2.0

package request

import (
	"bytes"
	"unsafe"

	"github.com/shunt-lb/shunt/pkg/tokens"
)

// value is a value of the body that the scan has accepted. The zero value is an absent one; it is null too.
type value struct {
	start, end int32 // its bytes
	tape       int32 // its entry, if it is an array or an object
}

// kind is the first byte of a value: '"', '{', '[', 't', 'f', 'n', or that of a number. An absent value is null.
func (p *Parser) kind(v value) byte {
	if v.end == 0 {
		return 'n'
	}
	return p.body[v.start]
}

// member returns a top-level member to walk, and false if it is absent, or one that is only counted by its bytes.
func (p *Parser) member(f field) (value, bool) {
	m := &p.members[f]
	if !m.exact {
		return value{}, false
	}
	if m.unrecorded {
		p.facts.unwalked += m.end - m.start
		return value{}, false
	}
	return value{int32(m.start), int32(m.end), int32(m.tape)}, true
}

// cursor goes over the elements or members of a value.
type cursor struct {
	i    int
	tape int32
	key  []byte // of the member, without quotes, as it stands
	v    value
}

// enter returns a cursor over an array or an object. Over everything else it finds nothing.
func (p *Parser) enter(v value) cursor {
	if k := p.kind(v); k != '{' && k != '[' {
		return cursor{i: -1}
	}
	return cursor{i: int(v.start) + 1, tape: v.tape + 1}
}

// next goes to the next element of an array.
func (p *Parser) next(c *cursor) bool {
	if c.i < 0 {
		return false
	}
	b := p.body
	i := skipSpace(b, c.i)
	if b[i] == ',' {
		i = skipSpace(b, i+1)
	}
	if b[i] == ']' {
		return false
	}
	p.take(c, i)
	return true
}

// nextMember goes to the next member of an object.
func (p *Parser) nextMember(c *cursor) bool {
	if c.i < 0 {
		return false
	}
	b := p.body
	i := skipSpace(b, c.i)
	if b[i] == ',' {
		i = skipSpace(b, i+1)
	}
	if b[i] != '"' {
		return false
	}
	end := stringEnd(b, i)
	c.key = b[i+1 : end-1]
	i = skipSpace(b, end)
	p.take(c, skipSpace(b, i+1))
	return true
}

// take makes the value at i the cursor's, and goes behind it.
func (p *Parser) take(c *cursor, i int) {
	b := p.body
	c.v = value{start: int32(i), tape: c.tape}
	switch b[i] {
	case '{', '[':
		e := p.tape[c.tape]
		i, c.tape = int(e.end), e.next
	case '"':
		i = stringEnd(b, i)
	default:
		for i++; i < len(b); i++ {
			if d := b[i]; d == ',' || d == '}' || d == ']' || d <= ' ' {
				break
			}
		}
	}
	c.i = i
	c.v.end = int32(i)
}

// stringEnd returns the index behind an accepted string's closing quote.
func stringEnd(b []byte, i int) int {
	start := i + 1
	for i = start; ; i++ {
		i += bytes.IndexByte(b[i:], '"')
		j := i
		for j > start && b[j-1] == '\\' {
			j--
		}
		if (i-j)%2 == 0 {
			return i + 1
		}
	}
}

// inner is what stands between the quotes of a string, nil for everything else.
func (p *Parser) inner(v value) []byte {
	if p.kind(v) != '"' {
		return nil
	}
	return p.body[v.start+1 : v.end-1]
}

// textOf is a string's text for the counter; the text of everything else is empty.
func (p *Parser) textOf(v value) tokens.Text {
	in := p.inner(v)
	t := tokens.Text{S: view(in)}
	if bytes.IndexByte(in, '\\') >= 0 {
		t.Form = tokens.JSONString
	}
	return t
}

// stringOf returns what a string says, "" for everything else.
func (p *Parser) stringOf(v value) string { return p.decode(p.inner(v)) }

// decode returns what the inside of a string says, from the body itself where that is possible.
func (p *Parser) decode(in []byte) string {
	if bytes.IndexByte(in, '\\') < 0 {
		return view(in)
	}
	start := len(p.scratch)
	p.scratch = tokens.AppendUnescaped(p.scratch, view(in))
	return view(p.scratch[start:])
}

// find returns an object's member, the last one of that name.
func (p *Parser) find(o value, name string) (found value) {
	for c := p.object(o); p.nextMember(&c); {
		if p.is(c.key, name) {
			found = c.v
		}
	}
	return found
}

// object returns a cursor over an object's members; over everything else it finds nothing.
func (p *Parser) object(v value) cursor {
	if p.kind(v) != '{' {
		return cursor{i: -1}
	}
	return p.enter(v)
}

// array returns a cursor over an array's elements; over everything else it finds nothing.
func (p *Parser) array(v value) cursor {
	if p.kind(v) != '[' {
		return cursor{i: -1}
	}
	return p.enter(v)
}

// is reports whether a key as it stands spells a name.
func (p *Parser) is(key []byte, name string) bool {
	if bytes.IndexByte(key, '\\') < 0 {
		return string(key) == name
	}
	return p.unescapedKey(key) == name
}

// unescapedKey returns what a key says, if it may be a name that is looked for.
func (p *Parser) unescapedKey(key []byte) string {
	if len(key) > 6*maxKey {
		return ""
	}
	return p.decode(key)
}

func view(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
