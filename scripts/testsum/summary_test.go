// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"strings"
	"testing"
)

const p = "github.com/shunt-lb/shunt/pkg/a"

func ev(action, test, output string) string {
	return `{"Action":"` + action + `","Package":"` + p + `","Test":"` + test + `","Output":"` + output + `"}`
}

func TestSummary(t *testing.T) {
	tests := []struct {
		name       string
		events     []string
		requireAll bool
		wantOK     bool
		want       []string
	}{
		{
			name:   "leaves only are counted",
			events: []string{ev("pass", "T/a", ""), ev("pass", "T/b", ""), ev("pass", "T", ""), ev("pass", "", "")},
			wantOK: true,
			want:   []string{"2 passed, 0 failed, 0 skipped"},
		},
		{
			name: "a skip is told with its reason",
			events: []string{ev("pass", "T", ""), ev("output", "S", `    a_test.go:9: no BPF here:\n`), ev("output", "S", `        operation not permitted\n`),
				ev("skip", "S", ""), ev("pass", "", "")},
			wantOK: true,
			want:   []string{"Left out:\n  no BPF here: operation not permitted\n      pkg/a S\n", "1 passed, 0 failed, 1 skipped"},
		},
		{
			name:       "a skip fails when all is required",
			events:     []string{ev("pass", "T", ""), ev("skip", "S", ""), ev("pass", "", "")},
			requireAll: true,
			want:       []string{"no reason given", "SHUNT_REQUIRE_ALL=1", "1 passed, 0 failed, 1 skipped"},
		},
		{
			name:   "a failed subtest counts once, with its output",
			events: []string{ev("output", "T/a", `    a_test.go:1: got 2\n`), ev("fail", "T/a", ""), ev("fail", "T", ""), ev("fail", "", "")},
			want:   []string{"a_test.go:1: got 2", "pkg/a T/a\n", "0 passed, 1 failed, 0 skipped"},
		},
		{
			name:   "a parent that fails by itself counts",
			events: []string{ev("pass", "T/a", ""), ev("fail", "T", ""), ev("fail", "", "")},
			want:   []string{"pkg/a T\n", "1 passed, 1 failed, 0 skipped"},
		},
		{
			name: "a package that does not build is one failure",
			events: []string{`{"ImportPath":"` + p + `","Action":"build-output","Output":"a.go:1: syntax error\n"}`,
				`{"ImportPath":"` + p + `","Action":"build-fail"}`, ev("fail", "", "")},
			want: []string{"a.go:1: syntax error", "0 passed, 1 failed, 0 skipped"},
		},
		{
			name:   "a package that passes its tests and fails after them",
			events: []string{ev("pass", "T", ""), ev("output", "", `goleak: 1 goroutine\n`), ev("fail", "", "")},
			want:   []string{"goleak: 1 goroutine", "1 passed, 1 failed, 0 skipped"},
		},
		{
			name:   "a run that is cut off",
			events: []string{ev("pass", "T", ""), ev("run", "U", "")},
			want:   []string{"pkg/a U\n", "1 passed, 1 failed, 0 skipped"},
		},
		{
			name:   "a slash in a subtest's name",
			events: []string{ev("pass", "T/http/1.1", ""), ev("pass", "T", ""), ev("pass", "", "")},
			wantOK: true,
			want:   []string{"1 passed, 0 failed, 0 skipped"},
		},
		{
			name: "nothing ran",
			want: []string{"nothing was tested", "0 passed, 0 failed, 0 skipped"},
		},
		{
			name:   "a line that is no event is shown",
			events: []string{"go: downloading x", ev("pass", "T", ""), ev("pass", "", "")},
			wantOK: true,
			want:   []string{"go: downloading x\n"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var b strings.Builder
			s := newSummary(&b)
			if err := s.read(strings.NewReader(strings.Join(tt.events, "\n"))); err != nil {
				t.Fatal(err)
			}
			if ok := s.report(tt.requireAll); ok != tt.wantOK {
				t.Errorf("report() = %v, want %v", ok, tt.wantOK)
			}
			for _, w := range tt.want {
				if !strings.Contains(b.String(), w) {
					t.Errorf("output lacks %q:\n%s", w, b.String())
				}
			}
			if lines := strings.Split(strings.TrimSpace(b.String()), "\n"); !strings.HasSuffix(lines[len(lines)-1], "skipped") {
				t.Errorf("last line is %q", lines[len(lines)-1])
			}
		})
	}
}

func TestGroups(t *testing.T) {
	got := groups([]string{"-p", "2", "./a", "--", "./b"})
	if len(got) != 2 || !slices.Equal(got[0], []string{"-p", "2", "./a"}) || !slices.Equal(got[1], []string{"./b"}) {
		t.Errorf("groups() = %q", got)
	}
}
