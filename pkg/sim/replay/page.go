// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"fmt"
	"html/template"
	"io"
	"math"
	"slices"
	"strings"
	"time"
)

// Chart is one trace at one load: a table, the distribution of the times to the first token, and the servers' load over time.
type Chart struct {
	Title   string
	Reports []*Report
	Runs    []*Run // of the first seed, in the order of Reports
}

const (
	plotWidth, plotHeight = 640.0, 260.0
	timeSteps             = 160
)

var palette = [...]string{"#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0"}

func color(i int) string { return palette[i%len(palette)] }

// WritePage writes one self-contained page: no script, nothing that is loaded.
func WritePage(w io.Writer, title string, charts []Chart) error {
	if err := page.Execute(w, map[string]any{"Title": title, "Charts": charts}); err != nil {
		return fmt.Errorf("write page: %w", err)
	}
	return nil
}

var page = template.Must(template.New("page").Funcs(template.FuncMap{
	"color": color,
	"ms":    func(s float64) string { return fmt.Sprintf("%.0f ms", 1000*s) },
	"s":     func(s float64) string { return fmt.Sprintf("%.2f s", s) },
	"pct":   func(x float64) string { return fmt.Sprintf("%.1f %%", 100*x) },
	"ratio": func(x float64) string { return fmt.Sprintf("%.2f", x) },
	"cdf":   func(r *Run) template.HTMLAttr { return template.HTMLAttr(`points="` + cdf(r) + `"`) },
	"loads": func(r *Run) []template.HTMLAttr {
		var out []template.HTMLAttr
		for _, line := range loads(r) {
			out = append(out, template.HTMLAttr(`points="`+line+`"`))
		}
		return out
	},
	"ticks": func() []float64 { return []float64{0.01, 0.1, 1, 10, 100} },
	"logx":  func(v float64) string { return fmt.Sprintf("%.1f", logX(v)) },
}).Parse(`<!doctype html>
<meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{{.Title}}</title>
<style>
body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em;color:#222;background:#fff}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.15em .8em;text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}
svg{background:#fafafa;border:1px solid #ddd;max-width:100%;height:auto}figure{display:inline-block;margin:0 1em 1em 0;vertical-align:top}figcaption{font-size:.9em}
.key{display:inline-block;width:.8em;height:.8em;margin-right:.4em}
@media (prefers-color-scheme:dark){body{color:#ddd;background:#181818}svg{background:#202020;border-color:#444}td,th{border-color:#444}}
</style>
<h1>{{.Title}}</h1>
<p>Goodput is the share of all requests with a first token within 2 s (beyond 32k tokens of prompt: plus an idle server's prefill)
and 50 ms per further token in the mean; what failed is not good.</p>
{{range .Charts}}{{$c := .}}
<h2>{{.Title}}</h2>
<table><tr><th>policy<th>goodput<th>TTFT mean<th>p50<th>p90<th>p95<th>p99<th>per token p90<th>latency mean<th>prefilled / asked<th>busiest / mean<th>failed</tr>
{{range $i, $r := .Reports}}<tr><td><span class="key" style="background:{{color $i}}"></span>{{.Policy}}<td>{{pct .Goodput}}<td>{{s .TTFTMean}}<td>{{s .TTFTP50}}<td>{{s .TTFTP90}}<td>{{s .TTFTP95}}<td>{{s .TTFTP99}}<td>{{ms .PerTokenP90}}<td>{{s .LatencyMean}}<td>{{ratio .Prefilled}}<td>{{ratio .Imbalance}}<td>{{.Failed}}</tr>
{{end}}</table>
<figure><svg viewBox="-10 -10 660 300" width="660" role="img"><title>Distribution of the time to the first token</title>
{{range ticks}}<line x1="{{logx .}}" x2="{{logx .}}" y1="0" y2="260" stroke="#8884"/><text x="{{logx .}}" y="278" font-size="12" text-anchor="middle" fill="currentColor">{{.}} s</text>
{{end}}{{range $i, $r := .Runs}}<polyline fill="none" stroke="{{color $i}}" stroke-width="2" {{cdf $r}}/>
{{end}}</svg><figcaption>Share of requests whose first token came within that time (0 to 100 %)</figcaption></figure>
{{range $i, $r := .Runs}}<figure><svg viewBox="-10 -10 660 280" width="400" role="img"><title>Load over time</title>
{{range loads $r}}<polyline fill="none" stroke="{{color $i}}" stroke-opacity=".6" stroke-width="1.5" {{.}}/>
{{end}}</svg><figcaption>{{(index $c.Reports $i).Policy}}: requests on each server over time</figcaption></figure>
{{end}}{{end}}
`))

// logX is the place of a time on the axis, 5 ms to 200 s.
func logX(seconds float64) float64 {
	lo, hi := math.Log(0.005), math.Log(200)
	return plotWidth * (math.Log(min(max(seconds, 0.005), 200)) - lo) / (hi - lo)
}

func cdf(r *Run) string {
	var x []float64
	for i := range r.Outcomes {
		if o := &r.Outcomes[i]; !o.Failed {
			x = append(x, o.TTFT.Seconds())
		}
	}
	slices.Sort(x)
	var b strings.Builder
	for i := range timeSteps + 1 {
		q := float64(i) / timeSteps
		fmt.Fprintf(&b, "%.1f,%.1f ", logX(quantile(x, max(q, 1e-9))), plotHeight*(1-q*float64(len(x))/float64(max(len(r.Outcomes), 1))))
	}
	return b.String()
}

// loads are the lines of the servers' requests in flight over time.
func loads(r *Run) (lines []string) {
	span := max(r.Span, time.Nanosecond)
	at := func(d time.Duration) int { return min(int(float64(d)/float64(span)*timeSteps), timeSteps-1) }
	counts := make([][timeSteps + 1]float64, len(r.Busy))
	top := 1.0
	for i := range r.Outcomes {
		o := &r.Outcomes[i]
		if o.Backend < 0 || o.Backend >= len(counts) {
			continue
		}
		counts[o.Backend][at(o.Arrival)]++
		counts[o.Backend][at(o.Arrival+o.Latency)+1]--
	}
	for n := range counts {
		sum := 0.0
		for i := range counts[n] {
			sum += counts[n][i]
			counts[n][i] = sum
			top = max(top, sum)
		}
	}
	for n := range counts {
		var b strings.Builder
		for i := range timeSteps {
			fmt.Fprintf(&b, "%.1f,%.1f ", plotWidth*float64(i)/timeSteps, plotHeight*(1-counts[n][i]/top))
		}
		lines = append(lines, b.String())
	}
	return lines
}
