// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"slices"
	"strings"
)

// Problem is one thing that is wrong, or doubtful, about a configuration.
type Problem struct {
	File    string // as given to Load; "flags" when made by FromFlags
	Line    int    // from 1; 0 when no place in a file is to blame
	Column  int    // from 1
	Path    string // the key, like pools[0].backends[1].url; may be empty
	Message string // what is wrong and what to do
	Source  string // the source line
}

// String writes FILE:LINE:COLUMN: key: message, and under it the source line with a mark.
func (p Problem) String() string {
	var b strings.Builder
	b.WriteString(p.File)
	if p.Line > 0 {
		fmt.Fprintf(&b, ":%d:%d", p.Line, p.Column)
	}
	b.WriteString(": ")
	if p.Path != "" {
		b.WriteString(p.Path + ": ")
	}
	b.WriteString(p.Message)
	if p.Line > 0 {
		fmt.Fprintf(&b, "\n%6d | %s\n       | %s^", p.Line, p.Source, indent(p.Source, p.Column-1))
	}
	return b.String()
}

// indent is n columns of blanks, with the line's own tabs kept so that the mark stands under its column.
func indent(line string, n int) string {
	var b strings.Builder
	for _, r := range line {
		if n--; n < 0 {
			break
		}
		if r == '\t' {
			b.WriteByte('\t')
		} else {
			b.WriteByte(' ')
		}
	}
	return b.String()
}

// Error is every problem of a configuration that cannot be used, in the order of the file.
type Error struct {
	Problems []Problem
}

// Error lists all problems.
func (e *Error) Error() string {
	lines := make([]string, len(e.Problems))
	for i, p := range e.Problems {
		lines[i] = p.String()
	}
	return strings.Join(lines, "\n")
}

const maxProblems = 1000 // more are counted, not shown

// problems collects what the reader and the checks find. One key has one error: what follows from it, and
// errors of keys inside it, are not repeated.
type problems struct {
	src      *source
	list     []Problem
	warnings []Problem
	failed   map[string]bool
}

func newProblems(src *source) *problems {
	return &problems{src: src, failed: map[string]bool{}}
}

func (p *problems) make(pos position, path, format string, args ...any) Problem {
	return Problem{
		File: p.src.file, Line: pos.line, Column: pos.column, Path: path,
		Message: fmt.Sprintf(format, args...), Source: p.src.line(pos.line),
	}
}

func (p *problems) at(pos position, path, format string, args ...any) {
	for up := path; ; {
		if p.failed[up] {
			return
		}
		i := strings.LastIndexAny(up, ".[")
		if i < 0 {
			break
		}
		up = up[:i]
	}
	p.failed[path] = true
	p.report(pos, path, format, args...)
}

// report adds an error that does not make the key's value useless.
func (p *problems) report(pos position, path, format string, args ...any) {
	p.list = append(p.list, p.make(pos, path, format, args...))
}

// add blames the value at path, or the nearest thing above it that the file holds.
func (p *problems) add(path, format string, args ...any) {
	p.at(p.src.find(path), path, format, args...)
}

func (p *problems) warn(path, format string, args ...any) {
	p.warnings = append(p.warnings, p.make(p.src.find(path), path, format, args...))
}

// ok says whether the values at the paths were read without an error, so that a check may rely on them.
func (p *problems) ok(paths ...string) bool {
	for _, path := range paths {
		if p.failed[path] {
			return false
		}
	}
	return true
}

func (p *problems) err() error {
	if len(p.list) == 0 {
		return nil
	}
	sortProblems(p.list)
	if more := len(p.list) - maxProblems; more > 0 {
		p.list = append(p.list[:maxProblems], Problem{File: p.src.file, Message: fmt.Sprintf("%d more errors are not shown", more)})
	}
	return &Error{Problems: p.list}
}

func sortProblems(list []Problem) {
	slices.SortStableFunc(list, func(a, b Problem) int {
		if a.Line != b.Line {
			return a.Line - b.Line
		}
		return a.Column - b.Column
	})
}

type position struct{ line, column int }

// source remembers where each written key stands.
type source struct {
	file  string
	lines []string
	pos   map[string]position
}

func (s *source) line(n int) string {
	if n < 1 || n > len(s.lines) {
		return ""
	}
	return strings.TrimRight(s.lines[n-1], "\r")
}

// wrote says whether the file holds the key itself.
func (s *source) wrote(path string) bool {
	_, ok := s.pos[path]
	return ok
}

func (s *source) find(path string) position {
	for {
		if p, ok := s.pos[path]; ok {
			return p
		}
		i := strings.LastIndexAny(path, ".[")
		if i < 0 {
			return s.pos[""]
		}
		path = path[:i]
	}
}

// nearest is the known word that a misspelt one most likely meant; empty when none is close.
func nearest(word string, known []string) string {
	best, bestD := "", 3
	for _, k := range known {
		if d := distance(word, k); d < bestD && d < len(k) {
			best, bestD = k, d
		}
	}
	return best
}

// distance is the number of single-letter edits between two words.
func distance(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return 64
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		diag := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := diag
			if a[i-1] != b[j-1] {
				cost++
			}
			diag = row[j]
			row[j] = min(cost, row[j]+1, row[j-1]+1)
		}
	}
	return row[len(b)]
}
