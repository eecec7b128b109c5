// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/admin"
	"github.com/shunt-lb/shunt/pkg/config"
)

func TestDemoConfigIsValid(t *testing.T) {
	for _, steer := range []bool{false, true} {
		if missing := probeSteering(); steer && missing != nil {
			if os.Getenv("SHUNT_REQUIRE_ALL") == "1" {
				t.Fatal(missing)
			}
			t.Skip(missing)
		}
		w, err := newWorld("/bin/true", steer, false)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := config.Parse("shunt.yaml", []byte(w.config())); err != nil {
			t.Errorf("steering %v: %v in\n%s", steer, err, w.config())
		}
		if err := w.close(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(w.dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the demo's directory is left: %v", err)
		}
	}
}

func TestTurningPoints(t *testing.T) {
	var samples []sample
	for i, w := range []int64{0, 0, 3000, 3000, 48, 47, 46, 10, 0, 0} {
		samples = append(samples, sample{time.Duration(i), []admin.BackendStatus{{Name: "other", L7Tokens: int64(i % 2)}, {Name: "a", L7Tokens: w - w/3, KernelTokens: w / 3}}})
	}
	// The rise at 2 and the fall at 4 with what was before them; the steps by one token are left out.
	if got := turningPoints(samples, "a", 7); !slices.Equal(got, []int{0, 1, 2, 3, 4, 9}) {
		t.Errorf("picked %v", got)
	}
	if got := turningPoints(samples, "a", 4); !slices.Equal(got, []int{0, 1, 2, 9}) {
		t.Errorf("of four picked %v", got)
	}
	if got := turningPoints(samples[:1], "a", 5); !slices.Equal(got, []int{0}) {
		t.Errorf("of one sample: %v", got)
	}
}

func TestSumMetric(t *testing.T) {
	text := "# HELP x y\nx{a=\"1\",reason=\"pass_icmp\"} 3\nx{reason=\"drop_icmp\"} 5\nx{reason=\"pass_no_vip\"} 1e2\nxy{reason=\"pass_no_vip\"} 7\n"
	if got := sumMetric(text, "x", `reason="pass_`); got != 103 {
		t.Errorf("sum %v", got)
	}
	if got := sumMetric(text, "x", ""); got != 108 {
		t.Errorf("sum %v", got)
	}
}

// TestDemo runs the real binaries, in both variants.
func TestDemo(t *testing.T) {
	shunt, self := os.Getenv("SHUNT_BIN"), os.Getenv("SHUNTSIM_BIN")
	if shunt == "" || self == "" {
		dir := t.TempDir()
		if out, err := exec.Command("go", "build", "-buildvcs=false", "-o", dir+"/", "../shunt", ".").CombinedOutput(); err != nil {
			t.Fatalf("build: %v\n%s", err, out)
		}
		shunt, self = filepath.Join(dir, "shunt"), filepath.Join(dir, "shuntsim")
	}
	run := func(t *testing.T, steer string) string {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, self, "demo", "--shunt", shunt, "--steer", steer)
		cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
		cmd.WaitDelay = 20 * time.Second
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Run(); err != nil {
			t.Fatalf("%v\n%s", err, &out)
		}
		return out.String()
	}
	t.Run("loopback", func(t *testing.T) {
		out := run(t, steerOff)
		if !strings.Contains(out, "Not shown here: steering in the kernel") || !strings.Contains(out, "All weights are back at 0") {
			t.Errorf("%s", out)
		}
	})
	t.Run("kernel", func(t *testing.T) {
		if missing := probeSteering(); missing != nil {
			if os.Getenv("SHUNT_REQUIRE_ALL") == "1" {
				t.Fatal(missing)
			}
			t.Skip(missing)
		}
		out := run(t, steerRequire)
		for _, want := range []string{"connection 2 steered in the kernel", "connection 3 steered in the kernel", `"backend": `, "All weights are back at 0"} {
			if !strings.Contains(out, want) {
				t.Errorf("no %q in the output", want)
			}
		}
		if t.Failed() {
			t.Log(out)
		}
	})
}
