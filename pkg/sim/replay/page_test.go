// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"bytes"
	"encoding/xml"
	"io"
	"strings"
	"testing"
)

func TestPageStandsAlone(t *testing.T) {
	tr := Generate("chat", 1).Slice(0, 0.05)
	c := Chart{Title: `<script>alert("x")</script>`}
	for _, name := range []string{"round_robin", "least_cost"} {
		r, rep := run(t, tr, Options{Policy: name})
		c.Runs, c.Reports = append(c.Runs, r), append(c.Reports, rep)
	}
	var b bytes.Buffer
	if err := WritePage(&b, "title", []Chart{c}); err != nil {
		t.Fatal(err)
	}
	page := b.String()
	for _, bad := range []string{"<script", "http:", "https:", "src=", "@import", "NaN", "ZgotmplZ"} {
		if strings.Contains(page, bad) {
			t.Errorf("the page holds %q", bad)
		}
	}
	// One curve a policy, and one line a server for each.
	if n := strings.Count(page, "<polyline"); n != 2+2*4 {
		t.Errorf("%d lines, want 10", n)
	}
	for svg := range strings.SplitSeq(page, "<svg") {
		if body, _, ok := strings.Cut(svg, "</svg>"); ok {
			d := xml.NewDecoder(strings.NewReader("<svg" + body + "</svg>"))
			for {
				if _, err := d.Token(); err == io.EOF {
					break
				} else if err != nil {
					t.Fatalf("a picture is not well formed: %v", err)
				}
			}
		}
	}
}
