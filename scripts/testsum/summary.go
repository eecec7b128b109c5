// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"sort"
	"strings"
)

// event is one line of `go test -json` (see `go doc test2json`).
type event struct {
	Action     string
	Package    string
	ImportPath string // of build-output and build-fail
	Test       string
	Elapsed    float64
	Output     string
}

type result int

const (
	running result = iota
	passed
	failed
	skipped
)

// test is one test or subtest while its package runs.
type test struct {
	result   result
	output   []string
	children int
	seen     bool // false: only a part of a name that has a slash in it, such as T/http of T/http/1.1
}

// left is one test that was not run, with the reason it gave.
type left struct{ pkg, test, reason string }

// pkg is one package while it runs.
type pkg struct {
	tests  map[string]*test
	order  []string
	output []string
}

// summary reads the events of any number of runs.
type summary struct {
	w                       io.Writer
	pkgs                    map[string]*pkg
	build                   map[string][]string // compiler output by import path
	nPassed, nFailed, nSkip int
	failedTests             []string
	left                    []left
}

func newSummary(w io.Writer) *summary {
	return &summary{w: w, pkgs: map[string]*pkg{}, build: map[string][]string{}}
}

func (s *summary) failures() int { return s.nFailed }

// note counts a failure that belongs to no test.
func (s *summary) note(what string, err error) {
	s.nFailed++
	s.failedTests = append(s.failedTests, fmt.Sprintf("%s: %v", what, err))
}

// read takes one run's events until its end. Lines that are no JSON are printed as they are.
func (s *summary) read(r io.Reader) error {
	br := bufio.NewReaderSize(r, 1<<16)
	for {
		line, err := br.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) == nil && e.Action != "" {
				s.take(e)
			} else {
				fmt.Fprint(s.w, string(line))
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("read test events: %w", err)
		}
	}
	// A package without an end was cut off: its test binary or go itself was killed.
	for _, name := range sortedKeys(s.pkgs) {
		s.finish(name, event{Action: "fail"})
	}
	return nil
}

func (s *summary) take(e event) {
	switch e.Action {
	case "build-output":
		s.build[e.ImportPath] = append(s.build[e.ImportPath], e.Output)
		return
	case "build-fail":
		return
	}
	p := s.pkgs[e.Package]
	if p == nil {
		p = &pkg{tests: map[string]*test{}}
		s.pkgs[e.Package] = p
	}
	if e.Test == "" {
		switch e.Action {
		case "output":
			p.output = append(p.output, e.Output)
		case "pass", "fail", "skip":
			s.finish(e.Package, e)
		}
		return
	}
	t := p.test(e.Test)
	t.seen = true
	switch e.Action {
	case "output":
		t.output = append(t.output, e.Output)
	case "pass":
		t.result = passed
	case "fail":
		t.result = failed
	case "skip":
		t.result = skipped
	}
}

// test finds or adds a test, and its parents, so that only leaves are counted.
func (p *pkg) test(name string) *test {
	if t := p.tests[name]; t != nil {
		return t
	}
	t := &test{}
	p.tests[name] = t
	p.order = append(p.order, name)
	if i := strings.LastIndexByte(name, '/'); i >= 0 {
		p.test(name[:i]).children++
	}
	return t
}

// finish counts a package's tests and prints its line, and what its failures printed.
func (s *summary) finish(name string, end event) {
	p := s.pkgs[name]
	delete(s.pkgs, name)
	var nPass, nFail, nSkip int
	for _, n := range p.order {
		t := p.tests[n]
		switch {
		case !t.seen:
		case t.result == passed && t.children == 0:
			nPass++
		case t.result == skipped:
			// A parent that is skipped after its subtests ran left something out too.
			nSkip++
			s.left = append(s.left, left{name, n, reason(t.output)})
		case t.result == failed || t.result == running:
			if t.children > 0 && p.childFailed(n) {
				s.printOutput(t.output)
				continue
			}
			nFail++
			s.failedTests = append(s.failedTests, fmt.Sprintf("%s %s", name, n))
			s.printOutput(t.output)
		}
	}
	if end.Action == "fail" {
		if nFail == 0 {
			// The build, TestMain or a leak check failed, or a test called os.Exit.
			nFail++
			s.failedTests = append(s.failedTests, name)
			for _, path := range sortedKeys(s.build) {
				s.printOutput(s.build[path])
			}
			clear(s.build)
		}
		s.printOutput(p.output)
	}
	s.nPassed += nPass
	s.nFailed += nFail
	s.nSkip += nSkip
	switch {
	case end.Action == "fail":
		fmt.Fprintf(s.w, "FAIL  %-58s %6.1fs  %d passed, %d failed, %d skipped\n", name, end.Elapsed, nPass, nFail, nSkip)
	case nPass+nSkip > 0:
		fmt.Fprintf(s.w, "ok    %-58s %6.1fs  %d passed, %d skipped\n", name, end.Elapsed, nPass, nSkip)
	}
}

// childFailed reports whether a subtest of the named test failed or did not end.
func (p *pkg) childFailed(name string) bool {
	return slices.ContainsFunc(p.order, func(n string) bool {
		t := p.tests[n]
		return strings.HasPrefix(n, name+"/") && t.seen && (t.result == failed || t.result == running)
	})
}

func (s *summary) printOutput(lines []string) {
	for _, l := range lines {
		if strings.HasPrefix(l, "=== ") {
			continue
		}
		fmt.Fprint(s.w, l)
	}
}

var logLine = regexp.MustCompile(`^\s*\S+\.go:\d+: (.*)`)

// reason is what a test said last before it was skipped. The log line of t.Skip may go on over several lines.
func reason(output []string) string {
	var out []string
	for _, l := range output {
		l = strings.TrimRight(l, "\n")
		if m := logLine.FindStringSubmatch(l); m != nil {
			out = []string{m[1]}
		} else if len(out) > 0 && strings.HasPrefix(l, "        ") {
			out = append(out, strings.TrimSpace(l))
		}
	}
	if len(out) == 0 {
		return "no reason given"
	}
	return strings.Join(out, " ")
}

// report prints the end of the summary and reports whether the whole run may count as good.
func (s *summary) report(requireAll bool) bool {
	if len(s.left) > 0 {
		byReason := map[string][]string{}
		for _, l := range s.left {
			byReason[l.reason] = append(byReason[l.reason], short(l.pkg)+" "+l.test)
		}
		fmt.Fprintln(s.w, "\nLeft out:")
		for _, r := range sortedKeys(byReason) {
			fmt.Fprintf(s.w, "  %s\n", r)
			for _, t := range byReason[r] {
				fmt.Fprintf(s.w, "      %s\n", t)
			}
		}
	}
	ok := s.nFailed == 0
	if !ok {
		fmt.Fprintln(s.w, "\nFailed:")
		for _, t := range s.failedTests {
			fmt.Fprintf(s.w, "  %s\n", t)
		}
	}
	if s.nPassed == 0 && ok {
		fmt.Fprintln(s.w, "\nNo test passed: nothing was tested.")
		ok = false
	}
	if requireAll && s.nSkip > 0 {
		fmt.Fprintln(s.w, "\nSHUNT_REQUIRE_ALL=1: a test that is left out is a failure.")
		ok = false
	}
	fmt.Fprintf(s.w, "\n%d passed, %d failed, %d skipped\n", s.nPassed, s.nFailed, s.nSkip)
	return ok
}

// short cuts the module's path from a package's.
func short(pkg string) string {
	if i := strings.Index(pkg, "/shunt/"); i >= 0 {
		return pkg[i+len("/shunt/"):]
	}
	return pkg
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}
