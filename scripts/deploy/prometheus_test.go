// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

type ruleFile struct {
	Groups []struct {
		Name  string `yaml:"name"`
		Rules []struct {
			Alert       string            `yaml:"alert"`
			Expr        string            `yaml:"expr"`
			For         string            `yaml:"for"`
			Labels      map[string]string `yaml:"labels"`
			Annotations map[string]string `yaml:"annotations"`
		} `yaml:"rules"`
	} `yaml:"groups"`
}

// metricNames finds every metric that the daemon's packages define.
func metricNames(t *testing.T) map[string]bool {
	t.Helper()
	quoted := regexp.MustCompile(`"(shunt_[a-z0-9_]+)"`)
	names := map[string]bool{}
	err := filepath.WalkDir("../../pkg", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, m := range quoted.FindAllStringSubmatch(string(b), -1) {
			names[m[1]] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

var used = regexp.MustCompile(`shunt_[a-z0-9_]+`)

// checkExpr looks up each metric that a query names.
func checkExpr(t *testing.T, names map[string]bool, title, expr string) {
	t.Helper()
	metrics := used.FindAllString(expr, -1)
	if len(metrics) == 0 {
		t.Errorf("%s: %q asks for no metric of shunt", title, expr)
	}
	for _, m := range metrics {
		if !names[strings.TrimSuffix(m, "_bucket")] {
			t.Errorf("%s asks for %s, which the daemon does not have", title, m)
		}
	}
}

func TestAlerts(t *testing.T) {
	var f ruleFile
	documents(t, "prometheus/shunt.rules.yaml", &f)
	names := metricNames(t)
	seen := map[string]bool{}
	for _, g := range f.Groups {
		for _, r := range g.Rules {
			if r.Alert == "" || seen[r.Alert] {
				t.Errorf("alert %q has no name of its own", r.Alert)
			}
			seen[r.Alert] = true
			if _, err := time.ParseDuration(r.For); err != nil {
				t.Errorf("%s: for: %v", r.Alert, err)
			}
			if s := r.Labels["severity"]; s != "warning" && s != "critical" {
				t.Errorf("%s: severity %q", r.Alert, s)
			}
			if r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
				t.Errorf("%s: annotations %v", r.Alert, r.Annotations)
			}
			checkExpr(t, names, r.Alert, r.Expr)
		}
	}
	if len(seen) == 0 {
		t.Error("no alerts")
	}
}

func TestDashboard(t *testing.T) {
	b, err := os.ReadFile("grafana/shunt.json")
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Panels []struct {
			ID      int
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(b, &d); err != nil {
		t.Fatal(err)
	}
	names := metricNames(t)
	ids := map[int]bool{}
	for _, p := range d.Panels {
		if ids[p.ID] || p.Title == "" || len(p.Targets) == 0 {
			t.Errorf("panel %d %q has no id of its own, no title or no query", p.ID, p.Title)
		}
		ids[p.ID] = true
		for _, q := range p.Targets {
			checkExpr(t, names, p.Title, q.Expr)
		}
	}
	if len(ids) == 0 {
		t.Error("no panels")
	}
}
