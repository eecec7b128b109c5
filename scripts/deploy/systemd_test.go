// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"bytes"
	"debug/elf"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/pkg/config"
)

// leaveOut skips a test that this machine cannot run; where everything is required it fails.
func leaveOut(t *testing.T, reason string) {
	t.Helper()
	if os.Getenv("SHUNT_REQUIRE_ALL") == "1" {
		t.Fatal(reason)
	}
	t.Skip(reason)
}

// unit reads a systemd unit: the values of each key, in order, by "Section.Key".
func unit(t *testing.T, path string) map[string][]string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][]string{}
	section := ""
	for line := range strings.Lines(string(b)) {
		line = strings.TrimSpace(line)
		switch {
		case line == "" || line[0] == '#':
		case line[0] == '[':
			section = strings.Trim(line, "[]")
		default:
			k, v, ok := strings.Cut(line, "=")
			if !ok {
				t.Fatalf("%s: %q is no assignment", path, line)
			}
			out[section+"."+k] = append(out[section+"."+k], v)
		}
	}
	return out
}

// unitCapabilities is the sorted list of capabilities that the service has.
func unitCapabilities(t *testing.T) []string {
	t.Helper()
	u := unit(t, "systemd/shunt.service")
	ambient := strings.Fields(strings.Join(u["Service.AmbientCapabilities"], " "))
	bounding := strings.Fields(strings.Join(u["Service.CapabilityBoundingSet"], " "))
	slices.Sort(ambient)
	slices.Sort(bounding)
	if len(ambient) == 0 || !slices.Equal(ambient, bounding) {
		t.Errorf("ambient capabilities %q, bounding set %q", ambient, bounding)
	}
	return ambient
}

func TestUnitFits(t *testing.T) {
	service, mount := unit(t, "systemd/shunt.service"), unit(t, "systemd/run-shunt-bpf.mount")
	b, err := os.ReadFile("systemd/shunt.yaml")
	if err != nil {
		t.Fatal(err)
	}
	cfg := parse(t, "systemd/shunt.yaml", string(b), config.Host{})
	where := mount["Mount.Where"][0]
	if cfg.Steering.BPFFS != where {
		t.Errorf("the configuration pins to %q, the mount unit mounts %q", cfg.Steering.BPFFS, where)
	}
	// systemd demands that a mount unit is named after its mount point.
	if name := strings.ReplaceAll(strings.Trim(where, "/"), "/", "-") + ".mount"; name != "run-shunt-bpf.mount" ||
		!slices.Contains(service["Unit.Requires"], name) {
		t.Errorf("the service requires %q, the mount point wants %q", service["Unit.Requires"], name)
	}
	if service["Service.Type"][0] != "notify" {
		t.Errorf("Type=%s; the daemon says READY=1", service["Service.Type"][0])
	}
	// Removing /run/shunt at each stop would unpin what steers meanwhile.
	if got := service["Service.RuntimeDirectoryPreserve"]; !slices.Equal(got, []string{"yes"}) {
		t.Errorf("RuntimeDirectoryPreserve=%q", got)
	}
	for _, key := range []string{"Service.ExecStart", "Service.ExecReload"} {
		if !strings.Contains(strings.Join(service[key], "\n"), "/etc/shunt/shunt.yaml") {
			t.Errorf("%s does not name the configuration: %q", key, service[key])
		}
	}
}

func TestUnitVerifies(t *testing.T) {
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		leaveOut(t, "systemd-analyze is not installed")
	}
	dir := t.TempDir()
	for _, name := range []string{"shunt.service", "run-shunt-bpf.mount"} {
		b, err := os.ReadFile(filepath.Join("systemd", name))
		if err != nil {
			t.Fatal(err)
		}
		// It looks each command up on this machine, where shunt need not be installed.
		b = bytes.ReplaceAll(b, []byte("/usr/local/bin/shunt"), []byte("/bin/true"))
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("systemd-analyze", "verify", "--man=no", "./shunt.service", "./run-shunt-bpf.mount")
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("systemd-analyze verify: %v\n%s", err, out)
	}
	// An unknown key is a warning only.
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, "shunt.service:") || strings.Contains(line, "run-shunt-bpf.mount:") {
			t.Errorf("systemd-analyze verify: %s", line)
		}
	}
}

// TestContainerfile checks what can be checked without a container engine: each file that it copies exists, and each
// stage that it copies from.
func TestContainerfile(t *testing.T) {
	b, err := os.ReadFile("container/Containerfile")
	if err != nil {
		t.Fatal(err)
	}
	const top = "../.."
	stages := map[string]bool{}
	copies, entry := 0, false
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) == 0 || f[0] == "#" {
			continue
		}
		switch f[0] {
		case "FROM":
			if len(f) == 4 && f[2] == "AS" {
				stages[f[3]] = true
			}
		case "ENTRYPOINT":
			entry = true
		case "COPY":
			copies++
			if stage, ok := strings.CutPrefix(f[1], "--from="); ok {
				if !stages[stage] {
					t.Errorf("%q copies from a stage that is not there", line)
				}
				continue
			}
			for _, src := range f[1 : len(f)-1] {
				if strings.HasPrefix(src, "bin/") {
					continue // what make build makes
				}
				if _, err := os.Stat(filepath.Join(top, src)); err != nil {
					t.Errorf("%q: %v", strings.TrimSpace(line), err)
				}
			}
		}
	}
	if copies == 0 || !entry {
		t.Errorf("%d files are copied, entry point %v", copies, entry)
	}
}

// TestBinariesAreStatic looks at what make build made: an image that starts from nothing has no loader and no libc.
func TestBinariesAreStatic(t *testing.T) {
	for _, path := range []string{"../../bin/shunt", "../../bin/shuntsim"} {
		f, err := elf.Open(path)
		if errors.Is(err, fs.ErrNotExist) {
			leaveOut(t, filepath.Base(path)+" is not built (make build)")
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range f.Progs {
			if p.Type == elf.PT_INTERP {
				t.Errorf("%s asks for a loader: it is not static", path)
			}
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}
