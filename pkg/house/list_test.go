// SPDX-License-Identifier: Apache-2.0

package house

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

const module = "github.com/shunt-lb/shunt"

// root is the top of the repository, seen from this package's folder, where go test runs.
const root = "../.."

// goPackage is what the tests need of `go list -json`.
type goPackage struct {
	ImportPath   string
	Name         string
	Doc          string
	GoFiles      []string
	Imports      []string
	TestImports  []string
	XTestImports []string
	Deps         []string
}

// rel is the package's path below the module, such as "pkg/fleet".
func (p goPackage) rel() string {
	return strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/")
}

var listOnce = sync.OnceValues(func() ([]goPackage, error) {
	cmd := exec.Command("go", "list", "-e",
		"-json=ImportPath,Name,Doc,GoFiles,Imports,TestImports,XTestImports,Deps", "./...")
	cmd.Dir = root
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, err
	}
	var pkgs []goPackage
	dec := json.NewDecoder(strings.NewReader(string(out)))
	for {
		var p goPackage
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs, nil
		} else if err != nil {
			return nil, err
		}
		pkgs = append(pkgs, p)
	}
})

// packages lists every package of the module.
func packages(t *testing.T) []goPackage {
	t.Helper()
	pkgs, err := listOnce()
	if err != nil {
		t.Fatalf("list packages: %v", err)
	}
	if len(pkgs) < 5 {
		t.Fatalf("go list found only %d packages", len(pkgs))
	}
	return pkgs
}

// source is one file of the tree that people write.
type source struct {
	path string // from the top of the repository, with slashes
	text string
}

// sources reads all files under the named folders that have one of the endings. What a tool wrote, what was taken over
// from others and test data are left out.
func sources(t *testing.T, folders []string, endings ...string) []source {
	t.Helper()
	var out []source
	for _, folder := range folders {
		top := filepath.Join(root, folder)
		if _, err := os.Stat(top); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			if d.IsDir() {
				if n := d.Name(); n == "testdata" || n == "third_party" {
					return filepath.SkipDir
				}
				return nil
			}
			wanted := false
			for _, e := range endings {
				wanted = wanted || strings.HasSuffix(path, e)
			}
			if !wanted {
				return nil
			}
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			rel, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			if text := string(b); !generated(text) {
				out = append(out, source{filepath.ToSlash(rel), text})
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if len(out) == 0 {
		t.Fatalf("no %v file under %v", endings, folders)
	}
	return out
}

// generated reports whether a Go file carries the mark that tools set (https://go.dev/s/generatedcode).
func generated(text string) bool {
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "// Code generated ") && strings.HasSuffix(line, " DO NOT EDIT.") {
			return true
		}
		if strings.HasPrefix(line, "package ") {
			return false
		}
	}
	return false
}
