// SPDX-License-Identifier: Apache-2.0

package proxy

import "bytes"

// meter watches an answer go by: how many events carried tokens, what usage the engine reported, how it ended. It
// sees the bytes after they were relayed, never changes or holds them, and keeps a constant amount of state, so a
// line of any length and a read that ends anywhere are all the same to it.
//
// It knows the four shapes: chat completions, completions, responses (usage inside response.completed) and messages,
// streamed or in one piece, and embeddings' usage.
type meter struct {
	sse     bool
	off     bool // it broke: the relay goes on without
	line    uint8
	matched uint8 // bytes of "data" seen at the line's start
	afterCR bool
	pending bool // a field of an unfinished event was seen
	scan    jsonScan
}

const (
	lineStart uint8 = iota
	lineField       // in the field's name
	lineValue       // after "data:", before the optional space
	lineData
	lineSkip
)

const dataField = "data"

func (m *meter) reset(sse bool) {
	m.sse, m.off, m.line, m.matched, m.afterCR, m.pending = sse, false, lineStart, 0, false, false
	m.scan.reset()
	m.scan.figures = figures{}
}

// feed reads the next bytes of the answer and returns how many events with generated text ended in them.
func (m *meter) feed(p []byte) (tokens int64) {
	before := m.scan.figures.tokens
	if !m.sse {
		m.scan.feed(p)
		return 0
	}
	for i := 0; i < len(p); {
		c := p[i]
		if m.afterCR {
			m.afterCR = false
			if c == '\n' {
				i++
				continue
			}
		}
		switch m.line {
		case lineData, lineSkip:
			j := lineEnd(p[i:])
			if m.line == lineData {
				m.scan.feed(p[i : i+j])
			}
			i += j
			if i < len(p) {
				m.endLine(p[i])
				i++
			}
		case lineValue:
			m.line = lineData
			if c == ' ' {
				i++
			}
		case lineStart:
			if c == '\n' || c == '\r' { // an empty line ends the event
				m.scan.reset()
				m.pending = false
				m.afterCR = c == '\r'
				i++
				continue
			}
			m.line, m.matched = lineField, 0
			if c != ':' {
				m.pending = true
			}
		case lineField:
			switch {
			case c == '\n' || c == '\r':
				m.endLine(c)
				i++
			case int(m.matched) < len(dataField) && c == dataField[m.matched]:
				m.matched++
				i++
			case int(m.matched) == len(dataField) && c == ':':
				m.line = lineValue
				i++
			default:
				m.line = lineSkip
			}
		}
	}
	return m.scan.figures.tokens - before
}

func (m *meter) endLine(c byte) {
	if m.line == lineData {
		m.scan.feed([]byte{'\n'}) // lines of one event are one text
	}
	m.line = lineStart
	m.afterCR = c == '\r'
}

// gap returns what must go out before an event of our own, so that it does not run into one that was cut off.
func (m *meter) gap() string {
	switch {
	case m.line != lineStart:
		return "\n\n"
	case m.pending:
		return "\n"
	}
	return ""
}

func lineEnd(p []byte) int {
	if i := bytes.IndexByte(p, '\n'); i >= 0 {
		p = p[:i]
	}
	if i := bytes.IndexByte(p, '\r'); i >= 0 {
		return i
	}
	return len(p)
}
