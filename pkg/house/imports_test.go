// SPDX-License-Identifier: Apache-2.0

package house

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

// floors says on which floor of the house each package lives. A package may import packages of lower floors only, never
// of its own. A package below one that is named here lives on its parent's floor and may be imported by it.
var floors = map[string]int{
	"cmd": 9,

	"pkg/e2e":   8, // runs the real binaries; nothing imports it
	"pkg/house": 8,
	"scripts":   8,

	"pkg/app": 7,
	"pkg/sim": 7, // the other program's half: nothing of it is in the daemon

	"pkg/config": 6, // schema only; see importers

	"pkg/proxy":     5,
	"pkg/admin":     5,
	"pkg/datapath":  5,
	"pkg/discovery": 5,
	"pkg/health":    5,
	"pkg/engine":    5,

	"pkg/policy":  4,
	"pkg/admit":   4,
	"pkg/session": 4,

	"pkg/request": 3,

	"pkg/prefix": 2,
	"pkg/tokens": 2,
	"pkg/maglev": 2,
	"pkg/netdev": 2,

	"pkg/fleet":   1,
	"pkg/metrics": 1,
}

// floor finds a package's home: the longest entry of floors that it lies in.
func floor(rel string) (home string, level int, ok bool) {
	for home, level := range floors {
		if rel == home || strings.HasPrefix(rel, home+"/") {
			return home, level, true
		}
	}
	return "", 0, false
}

// importers names, for a package, the only ones that may import it, though more could by their floor.
var importers = map[string][]string{
	"pkg/config": {"pkg/app", "cmd"},
	"pkg/app":    {"cmd"},
	"pkg/sim":    {"cmd"},
	"pkg/e2e":    {},
	"pkg/house":  {},
}

// libraries names, for a path outside the module, the only packages that may import it. Tests of other packages are
// bound too where the entry says so.
var libraries = []struct {
	path     string
	users    []string
	testsToo bool
}{
	{path: "github.com/cilium/ebpf", users: []string{"pkg/datapath"}},
	{path: "github.com/vishvananda/netlink", users: []string{"pkg/netdev"}, testsToo: true},
	{path: "github.com/valyala/fasthttp", users: []string{"pkg/proxy", "pkg/sim"}},
	{path: "github.com/pkoukk/tiktoken-go", users: []string{"pkg/tokens"}, testsToo: true},
	{path: "github.com/pkoukk/tiktoken-go-loader", users: []string{"pkg/tokens"}, testsToo: true},
	{path: "github.com/gopacket/gopacket", users: []string{"pkg/datapath/dptest"}},
	{path: "github.com/spf13/cobra", users: []string{"cmd"}, testsToo: true},
	{path: "github.com/goccy/go-yaml", users: []string{"pkg/config"}},
	// Below these a package returns its error and says nothing.
	{path: "log/slog", users: []string{"cmd", "pkg/app", "pkg/proxy", "pkg/admin"}},
	{path: "log", users: []string{"cmd", "pkg/app", "pkg/proxy", "pkg/admin"}},
}

func within(path string, homes []string) bool {
	return slices.ContainsFunc(homes, func(h string) bool { return path == h || strings.HasPrefix(path, h+"/") })
}

// arrowProblem says what is wrong with one package of the module importing another; both paths are relative to it.
func arrowProblem(from, to string) string {
	home, level, ok := floor(from)
	if !ok {
		return "has no floor: add it to floors in pkg/house/imports_test.go and to pkg/README.md"
	}
	toHome, toLevel, ok := floor(to)
	switch {
	case !ok:
		return "imports " + to + ", which has no floor"
	case toHome == home:
		return "" // a package and those below it
	case toLevel >= level:
		return "imports " + to + ", which is not below it"
	}
	if only, limited := importers[toHome]; limited && !within(from, only) {
		return fmt.Sprintf("imports %s, which is for %v only", to, only)
	}
	return ""
}

func TestImportsPointOneWay(t *testing.T) {
	for _, p := range packages(t) {
		if _, _, ok := floor(p.rel()); !ok {
			t.Errorf("%s %s", p.rel(), arrowProblem(p.rel(), p.rel()))
			continue
		}
		for _, imp := range p.Imports {
			if to, ours := strings.CutPrefix(imp, module+"/"); ours {
				if problem := arrowProblem(p.rel(), to); problem != "" {
					t.Errorf("%s %s", p.rel(), problem)
				}
			}
		}
	}
}

func TestArrowRule(t *testing.T) {
	for _, tt := range []struct {
		from, to string
		good     bool
	}{
		{"cmd/shunt", "pkg/app", true},
		{"pkg/app", "pkg/config", true},
		{"pkg/proxy", "pkg/fleet", true},
		{"pkg/datapath", "pkg/session", true},
		{"pkg/session", "pkg/request", true},
		{"pkg/policy/policytest", "pkg/policy", true},
		{"pkg/fleet", "pkg/policy", false},
		{"pkg/policy", "pkg/session", false},
		{"pkg/proxy", "pkg/datapath", false},
		{"pkg/proxy", "pkg/config", false},
		{"pkg/app", "pkg/sim", false},
		{"pkg/unheard", "pkg/fleet", false},
		{"pkg/proxy", "pkg/unheard", false},
	} {
		if problem := arrowProblem(tt.from, tt.to); (problem == "") != tt.good {
			t.Errorf("arrowProblem(%s, %s) = %q, want good %v", tt.from, tt.to, problem, tt.good)
		}
	}
}

func TestLibrariesHaveOneHome(t *testing.T) {
	for _, p := range packages(t) {
		for _, l := range libraries {
			if within(p.rel(), l.users) {
				continue
			}
			imports := p.Imports
			if l.testsToo {
				imports = slices.Concat(p.Imports, p.TestImports, p.XTestImports)
			}
			for _, imp := range imports {
				if imp == l.path || strings.HasPrefix(imp, l.path+"/") && !standard(l.path) {
					t.Errorf("%s imports %s, which is for %v only", p.rel(), imp, l.users)
				}
			}
		}
	}
}

// standard reports whether a path belongs to the standard library, whose folders are packages of their own.
func standard(path string) bool {
	first, _, _ := strings.Cut(path, "/")
	return !strings.Contains(first, ".")
}

// TestDaemonHoldsNothingOfTheLab walks the whole import graph below the daemon: the simulator, the packet builders and
// the namespaces of the lab are for tests and the demo.
func TestDaemonHoldsNothingOfTheLab(t *testing.T) {
	banned := []string{
		module + "/pkg/sim", module + "/pkg/e2e", module + "/pkg/datapath/dptest", module + "/pkg/netdev/lab",
		module + "/pkg/policy/policytest", module + "/pkg/metrics/metricstest",
		module + "/pkg/session/pintest", module + "/pkg/tokens/tokenstest",
		"github.com/gopacket/gopacket", "testing",
	}
	found := false
	for _, p := range packages(t) {
		if p.rel() != "cmd/shunt" {
			continue
		}
		found = true
		for _, dep := range p.Deps {
			if within(dep, banned) {
				t.Errorf("cmd/shunt links %s", dep)
			}
		}
	}
	if !found {
		t.Skip("cmd/shunt is not there")
	}
}

// TestMapNamesEveryPackage keeps pkg/README.md true.
func TestMapNamesEveryPackage(t *testing.T) {
	b, err := os.ReadFile(root + "/pkg/README.md")
	if err != nil {
		t.Fatal(err)
	}
	named := map[string]bool{}
	for line := range strings.Lines(string(b)) {
		if name, ok := strings.CutPrefix(line, "| `"); ok {
			name, _, _ = strings.Cut(name, "`")
			named["pkg/"+name] = true
		}
	}
	for _, p := range packages(t) {
		if strings.HasPrefix(p.rel(), "pkg/") && !named[p.rel()] {
			t.Errorf("pkg/README.md has no line on %s", p.rel())
		}
	}
}
