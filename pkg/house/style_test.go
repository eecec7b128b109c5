// SPDX-License-Identifier: Apache-2.0

package house

import (
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

const (
	maxLines = 600
	maxNames = 40
)

var goFolders = []string{"cmd", "pkg", "scripts"}

func TestEveryPackageHasADoc(t *testing.T) {
	for _, p := range packages(t) {
		if len(p.GoFiles) == 0 {
			continue // tests only
		}
		want := "Package " + p.Name + " "
		if p.Name == "main" {
			want = "Command " + path.Base(p.ImportPath) + " "
		}
		if !strings.HasPrefix(p.Doc, want) {
			t.Errorf("%s: package comment begins %q, want %q", p.rel(), p.Doc, want+"...")
		}
	}
}

func TestFilesAreShort(t *testing.T) {
	for _, s := range append(sources(t, goFolders, ".go"), sources(t, []string{"bpf"}, ".c", ".h")...) {
		if n := strings.Count(s.text, "\n"); n >= maxLines {
			t.Errorf("%s has %d lines, want under %d", s.path, n, maxLines)
		}
	}
}

func TestFilesAreFormatted(t *testing.T) {
	for _, s := range sources(t, goFolders, ".go") {
		if got, err := format.Source([]byte(s.text)); err != nil {
			t.Errorf("format %s: %v", s.path, err)
		} else if string(got) != s.text {
			t.Errorf("%s is not as gofmt writes it", s.path)
		}
	}
}

func TestLicenceLines(t *testing.T) {
	for _, tt := range []struct {
		folders, endings []string
		licence          string
	}{
		{goFolders, []string{".go", ".sh", ".yaml", ".yml"}, "Apache-2.0"},
		{[]string{"bpf"}, []string{".c", ".h"}, "GPL-2.0-only OR BSD-2-Clause"},
	} {
		for _, s := range sources(t, tt.folders, tt.endings...) {
			lines := strings.SplitN(s.text, "\n", 3)
			first := lines[0]
			if strings.HasPrefix(first, "#!") && len(lines) > 1 {
				first = lines[1]
			}
			first = strings.TrimSuffix(strings.TrimSpace(first), " */")
			if !strings.HasSuffix(first, "SPDX-License-Identifier: "+tt.licence) {
				t.Errorf("%s begins %q, want an SPDX line with %s", s.path, first, tt.licence)
			}
		}
	}
}

func TestPackageNames(t *testing.T) {
	banned := []string{"util", "utils", "common", "types", "helpers", "helper", "misc", "base", "lib"}
	for _, p := range packages(t) {
		if slices.Contains(banned, p.Name) || slices.Contains(banned, path.Base(p.ImportPath)) {
			t.Errorf("%s: the name says nothing about what is in it", p.rel())
		}
	}
}

func TestTopLevel(t *testing.T) {
	allowed := []string{
		"bpf", "cmd", "pkg", "scripts", "go.mod", "go.sum", "Makefile", "README.md",
		"LICENSE", "CHANGELOG.md", "CONTRIBUTING.md",
		"bin", // what make build makes; git ignores it
	}
	entries, err := os.ReadDir(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") && !slices.Contains(allowed, e.Name()) {
			t.Errorf("%s does not belong at the top", e.Name())
		}
	}
}

func TestMainFilesAreShort(t *testing.T) {
	for _, s := range sources(t, []string{"cmd"}, "/main.go") {
		if n := strings.Count(s.text, "\n"); n > 60 {
			t.Errorf("%s has %d lines: main says what runs, the rest lies beside it", s.path, n)
		}
	}
}

// A comment says what is and why; what is still to be done is an issue.
var unfinished = regexp.MustCompile(`\b(TODO|FIXME|XXX|HACK)\b|(?i:\b(for now|temporary hack|placeholder)\b)`)

func TestCommentsHoldNoPromises(t *testing.T) {
	for _, s := range append(sources(t, goFolders, ".go"), sources(t, []string{"bpf"}, ".c", ".h")...) {
		if strings.HasPrefix(s.path, "pkg/house/") {
			continue
		}
		for line := range strings.Lines(s.text) {
			if _, comment, ok := strings.Cut(line, "//"); ok && unfinished.MatchString(comment) {
				t.Errorf("%s: %s", s.path, strings.TrimSpace(line))
			} else if trimmed := strings.TrimSpace(line); (strings.HasPrefix(trimmed, "/*") || strings.HasPrefix(trimmed, "*")) &&
				unfinished.MatchString(trimmed) {
				t.Errorf("%s: %s", s.path, trimmed)
			}
		}
	}
}

// parsed is one Go file with its syntax.
type parsed struct {
	source
	fset *token.FileSet
	file *ast.File
}

func (p parsed) at(pos token.Pos) string {
	return p.path + ":" + strconv.Itoa(p.fset.Position(pos).Line)
}

func parseAll(t *testing.T) []parsed {
	t.Helper()
	var out []parsed
	for _, s := range sources(t, goFolders, ".go") {
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, s.path, s.text, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Errorf("parse %s: %v", s.path, err)
			continue
		}
		out = append(out, parsed{s, fset, f})
	}
	return out
}

// TestErrorWords reads the texts of fmt.Errorf and errors.New: lower-case verb phrases that say what was tried.
func TestErrorWords(t *testing.T) {
	for _, p := range parseAll(t) {
		if strings.HasSuffix(p.path, "_test.go") {
			continue
		}
		ast.Inspect(p.file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || len(call.Args) == 0 {
				return true
			}
			name := calledName(call)
			if name != "fmt.Errorf" && name != "errors.New" {
				return true
			}
			lit, ok := call.Args[0].(*ast.BasicLit)
			if !ok || lit.Kind != token.STRING {
				return true
			}
			text, err := strconv.Unquote(lit.Value)
			if err != nil {
				return true
			}
			if problem := errorProblem(text, call.Args[1:]); problem != "" {
				t.Errorf("%s: error %q %s", p.at(call.Pos()), text, problem)
			}
			return true
		})
	}
}

func calledName(call *ast.CallExpr) string {
	sel, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return ""
	}
	x, ok := sel.X.(*ast.Ident)
	if !ok {
		return ""
	}
	return x.Name + "." + sel.Sel.Name
}

// errorProblem says what is wrong with an error's text; args are what is printed into it.
func errorProblem(text string, args []ast.Expr) string {
	lower := strings.ToLower(text)
	for _, w := range []string{"failed to", "unable to", "could not ", "error while", "an error occurred"} {
		if strings.Contains(lower, w) {
			return "says " + strconv.Quote(w) + "; say what was tried"
		}
	}
	if strings.HasSuffix(text, ".") || strings.HasSuffix(text, "\n") {
		return "ends like a sentence"
	}
	first, size := utf8.DecodeRuneInString(text)
	second, _ := utf8.DecodeRuneInString(text[size:])
	// "BPF is off" and "JSON ..." begin with a name; "Load map" does not.
	if unicode.IsUpper(first) && unicode.IsLower(second) {
		return "begins with a capital"
	}
	if len(args) > 0 && !strings.Contains(text, "%w") {
		if id, ok := args[len(args)-1].(*ast.Ident); ok && id.Name == "err" {
			return "does not wrap err with %w"
		}
	}
	return ""
}

func TestErrorRule(t *testing.T) {
	err := []ast.Expr{ast.NewIdent("err")}
	for _, tt := range []struct {
		text string
		args []ast.Expr
		good bool
	}{
		{"load map %s: %w", err, true},
		{"BPF is off", nil, true},
		{"", nil, true},
		{"Load map", nil, false},
		{"failed to load map: %w", err, false},
		{"load map: %v", err, false},
		{"load map.", nil, false},
	} {
		if problem := errorProblem(tt.text, tt.args); (problem == "") != tt.good {
			t.Errorf("errorProblem(%q) = %q, want good %v", tt.text, problem, tt.good)
		}
	}
}

// TestExportedNames counts a package's exported names at the top: types, functions, variables and constants. The
// constants of one group are one name, and methods belong to their type.
func TestExportedNames(t *testing.T) {
	count := map[string][]string{}
	for _, p := range parseAll(t) {
		if strings.HasSuffix(p.path, "_test.go") || p.file.Name.Name == "main" || otherSystem(p.path) {
			continue
		}
		dir := path.Dir(p.path)
		for _, d := range p.file.Decls {
			count[dir] = append(count[dir], exportedNames(d)...)
		}
	}
	for dir, names := range count {
		slices.Sort(names)
		if n := len(slices.Compact(names)); n > maxNames {
			t.Errorf("%s exports %d names, want %d at most: %s", dir, n, maxNames, strings.Join(names, " "))
		}
	}
}

// otherSystem reports whether a file repeats names for systems without BPF.
func otherSystem(p string) bool {
	return strings.HasSuffix(p, "_other.go") || path.Base(p) == "other.go"
}

func exportedNames(d ast.Decl) []string {
	var out []string
	add := func(id *ast.Ident) {
		if id.IsExported() {
			out = append(out, id.Name)
		}
	}
	switch d := d.(type) {
	case *ast.FuncDecl:
		if d.Recv == nil {
			add(d.Name)
		}
	case *ast.GenDecl:
		for _, spec := range d.Specs {
			switch s := spec.(type) {
			case *ast.TypeSpec:
				add(s.Name)
			case *ast.ValueSpec:
				for _, id := range s.Names {
					add(id)
				}
				if d.Tok == token.CONST && len(out) > 0 {
					return out[:1]
				}
			}
		}
	}
	return out
}

// TestNothingIsReadFromOutside looks at each relative path in the Go sources: the repository must build and pass by
// itself.
func TestNothingIsReadFromOutside(t *testing.T) {
	for _, p := range parseAll(t) {
		ast.Inspect(p.file, func(n ast.Node) bool {
			lit, ok := n.(*ast.BasicLit)
			if !ok || lit.Kind != token.STRING {
				return true
			}
			text, err := strconv.Unquote(lit.Value)
			if err == nil && strings.HasPrefix(text, "../") &&
				strings.HasPrefix(filepath.ToSlash(filepath.Join(path.Dir(p.path), text)), "..") {
				t.Errorf("%s: %q leads out of the repository", p.at(lit.Pos()), text)
			}
			return true
		})
	}
}
