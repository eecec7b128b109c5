// SPDX-License-Identifier: Apache-2.0

// Package engine reads the load that inference servers report in their Prometheus metrics.
//
// Each server has its dialect: a file with one register line, which maps the server's names, old and new, to the few figures
// that routing needs. Parse goes over a body once, without building anything of it. Scraper asks a fleet's engines again and again
// and gives their figures to the backends, with the time at which they were true.
package engine

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
)

// Errors of Parse.
var (
	// ErrNoDialect: the body has no metric that any dialect knows.
	ErrNoDialect = errors.New("no known engine's metrics")
	// ErrTooLarge: the body is longer than MaxBody.
	ErrTooLarge = errors.New("metrics are longer than the limit")
)

// MaxBody bounds what is read of one engine's metrics, in bytes. A busy vLLM has about 0.3 MB.
const MaxBody = 8 << 20

// Figures are what an engine reports. Those of several data-parallel ranks are one: requests and sizes added, shares averaged.
// NaN means not reported.
type Figures struct {
	Engine   string // the dialect's name
	Waiting  float64
	Running  float64
	KVUse    float64 // share of the KV cache in use, 0 to 1
	KVTokens float64 // capacity of the KV cache
	Served   float64 // a counter that only grows; if it shrinks, the engine has restarted
}

// field is a figure that a metric feeds.
type field uint8

const (
	waiting field = iota
	running
	kvUse
	kvTokens // a gauge of tokens
	kvSize   // one factor of kvTokens: tokens a block
	kvCount  // the other: blocks
	kvLabels // both, as labels of one series
	served
	numFields
)

// metric is what a dialect knows of one name.
type metric struct {
	name  string
	field field
	label string // needed in the series as label="value"; "" = none
	size  string // kvLabels: the label of the tokens a block
	count string // kvLabels: the label of the number of blocks
	old   bool   // a former name: it counts only where the new one is missing
}

// known finds the metrics of a name. A name belongs to one dialect.
var known = map[string]entry{}

type entry struct {
	dialect string
	metrics []metric
}

// register adds a dialect; it is called from init functions only.
func register(dialect string, metrics ...metric) {
	for _, m := range metrics {
		e := known[m.name]
		if e.dialect != "" && e.dialect != dialect {
			panic(fmt.Sprintf("engine: metric %s is in the dialects %s and %s", m.name, e.dialect, dialect))
		}
		known[m.name] = entry{dialect, append(e.metrics, m)}
	}
}

// sums are the series of one field so far.
type sums struct {
	total float64
	n     int
}

// Parse reads metrics in Prometheus' text format.
func Parse(r io.Reader) (Figures, error) {
	p := parser{lines: bufio.NewReaderSize(io.LimitReader(r, MaxBody+1), 64<<10)}
	return p.parse()
}

type parser struct {
	lines   *bufio.Reader
	dialect string
	fields  [2][numFields]sums // by new and former names
	read    int
}

func (p *parser) parse() (Figures, error) {
	for {
		line, err := p.lines.ReadSlice('\n')
		if p.read += len(line); p.read > MaxBody {
			return Figures{}, ErrTooLarge
		}
		if errors.Is(err, bufio.ErrBufferFull) { // no line that is wanted is that long
			for errors.Is(err, bufio.ErrBufferFull) {
				line, err = p.lines.ReadSlice('\n')
				if p.read += len(line); p.read > MaxBody {
					return Figures{}, ErrTooLarge
				}
			}
			line = nil
		}
		p.line(line)
		if errors.Is(err, io.EOF) {
			return p.figures()
		}
		if err != nil {
			return Figures{}, fmt.Errorf("read metrics: %w", err)
		}
	}
}

func (p *parser) line(b []byte) {
	if len(b) < 8 || b[0] == '#' {
		return
	}
	end := bytes.IndexByte(b, '{')
	if end < 0 {
		end = bytes.IndexByte(b, ' ')
	}
	if end < 0 || bytes.HasSuffix(b[:end], bucket) { // most lines are of histograms
		return
	}
	e, ok := known[string(b[:end])]
	if !ok || p.dialect != "" && e.dialect != p.dialect {
		return
	}
	var labels []byte
	rest := b[end:]
	if rest[0] == '{' {
		close := closing(rest)
		if close < 0 {
			return
		}
		labels, rest = rest[1:close], rest[close+1:]
	}
	rest = bytes.TrimSpace(rest)
	if i := bytes.IndexByte(rest, ' '); i >= 0 { // a time stamp follows
		rest = rest[:i]
	}
	v, err := strconv.ParseFloat(string(rest), 64)
	if err != nil || math.IsNaN(v) || math.IsInf(v, 0) || v < 0 {
		return
	}
	p.dialect = e.dialect
	for i := range e.metrics {
		m := &e.metrics[i]
		if m.label != "" && !bytes.Contains(labels, []byte(m.label)) {
			continue
		}
		value := v
		if m.field == kvLabels {
			if value = labelNumber(labels, m.size) * labelNumber(labels, m.count); value <= 0 {
				continue
			}
		}
		age := 0
		if m.old {
			age = 1
		}
		s := &p.fields[age][m.field]
		s.total += value
		s.n++
	}
}

var bucket = []byte("_bucket")

// closing finds the brace that ends the labels; values may hold braces and escaped quotes.
func closing(b []byte) int {
	quoted := false
	for i := 1; i < len(b); i++ {
		switch c := b[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case !quoted && c == '}':
			return i
		}
	}
	return -1
}

// labelNumber reads a label's value as a number, 0 if there is none.
func labelNumber(labels []byte, name string) float64 {
	for at := 0; ; {
		i := bytes.Index(labels[at:], []byte(name))
		if i < 0 {
			return 0
		}
		i += at
		at = i + len(name)
		if i > 0 && labels[i-1] != ',' && labels[i-1] != ' ' || !bytes.HasPrefix(labels[at:], []byte(`="`)) {
			continue
		}
		value := labels[at+2:]
		if end := bytes.IndexByte(value, '"'); end >= 0 {
			v, err := strconv.ParseFloat(string(value[:end]), 64)
			if err == nil && v > 0 && v < 1e15 {
				return v
			}
		}
		return 0
	}
}

func (p *parser) figures() (Figures, error) {
	if p.dialect == "" {
		return Figures{}, ErrNoDialect
	}
	get := func(f field) sums {
		if s := p.fields[0][f]; s.n > 0 {
			return s
		}
		return p.fields[1][f]
	}
	total := func(f field) float64 {
		if s := get(f); s.n > 0 {
			return s.total
		}
		return math.NaN()
	}
	f := Figures{Engine: p.dialect, Waiting: total(waiting), Running: total(running), KVUse: math.NaN(), KVTokens: total(kvTokens), Served: total(served)}
	if s := get(kvUse); s.n > 0 {
		if f.KVUse = s.total / float64(s.n); f.KVUse > 1 { // per cent
			f.KVUse = min(f.KVUse/100, 1)
		}
	}
	if s := get(kvLabels); s.n > 0 {
		f.KVTokens = s.total
	}
	if size, count := get(kvSize), get(kvCount); size.n > 0 && count.n > 0 && math.IsNaN(f.KVTokens) {
		f.KVTokens = size.total / float64(size.n) * count.total
	}
	return f, nil
}
