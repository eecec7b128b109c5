// SPDX-License-Identifier: Apache-2.0

package app

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/pkg/admin"
	"github.com/shunt-lb/shunt/pkg/config"
	"github.com/shunt-lb/shunt/pkg/request"
	"github.com/shunt-lb/shunt/pkg/tokens"
)

func TestCalibrationByPool(t *testing.T) {
	c := newCalibration()
	cfg := func(encoding string, pools ...string) *config.Config {
		cfg := &config.Config{}
		for _, name := range pools {
			cfg.Pools = append(cfg.Pools, config.Pool{Name: name, Models: []string{"m"}, Tokenizer: config.Tokenizer{Encoding: encoding}})
		}
		return cfg
	}
	c.apply(cfg("auto", "p", "q"))
	for range 50 {
		for _, pool := range []string{"p", "q"} {
			c.Observe(pool, "m", 1000, tokens.Usage{Prompt: 1500})
			c.Observe(pool, "old", 1000, tokens.Usage{Prompt: 1500})
			c.Observe(pool, otherModel, 1000, tokens.Usage{Prompt: 500})
		}
	}
	if a, b, n := c.Scale("p", "m", 1000), c.Scale("p", otherModel, 1000), c.Scale("p", "new", 1000); a != 1500 || b != 500 || n != 1000 {
		t.Errorf("scaled to %d, %d and %d", a, b, n)
	}
	c.apply(cfg("o200k_base", "p"))
	if n := c.Scale("p", "m", 1000); n != 1000 {
		t.Errorf("an encoding that the file names is scaled: %d", n)
	}
	exact := cfg("auto", "p")
	exact.Pools[0].Tokenizer.File = "/models/tokenizer.json"
	if c.apply(exact); c.Scale("p", "m", 1000) != 1000 {
		t.Error("a count by the model's own file is scaled")
	}
	var left []string
	for _, f := range c.Factors() {
		left = append(left, f.Group+"/"+f.Model)
	}
	if got := strings.Join(left, " "); got != "p/m p/other" {
		t.Errorf("after the reload: %s", got)
	}
}

func TestFamilies(t *testing.T) {
	cfg, err := config.Parse("shunt.yaml", []byte(`pools:
  - {name: a, models: [m], backends: [{url: 'http://10.0.0.1'}]}
  - {name: b, models: [n], backends: [{url: 'http://10.0.0.2'}], tokenizer: {family: llama3}}
`))
	if err != nil {
		t.Fatal(err)
	}
	a := &app{}
	named := families(cfg)
	a.families.Store(&named)
	for _, tc := range []struct {
		pool, model string
		want        request.Family
	}{{"a", "m", request.OpenAI}, {"a", "qwen3", request.Qwen}, {"b", "n", request.Llama3}, {"b", "qwen3", request.Llama3}} {
		if got := a.family(tc.pool, tc.model); got != tc.want {
			t.Errorf("%s/%s: %s, want %s", tc.pool, tc.model, got, tc.want)
		}
	}
	// The words of the file are the families there are.
	field, _ := reflect.TypeFor[config.Tokenizer]().FieldByName("Family")
	if got, want := field.Tag.Get("enum"), "auto|"+strings.Join(request.Families(), "|"); got != want {
		t.Errorf("the file takes %s, there are %s", got, want)
	}
}

// What an engine reports of its prompts shows in the metrics and in the status, and a model that no pool lists is "other".
func TestCalibrationIsShown(t *testing.T) {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"usage":{"prompt_tokens":%d,"completion_tokens":2}}`, 2*strings.Count(string(body), "word"))
	}))
	defer engine.Close()
	front, adm, file := freePort(t), freePort(t), filepath.Join(t.TempDir(), "shunt.yaml")
	write(t, file, configText(front, adm, "", engine.URL))
	d := start(t, file, front, adm)
	for i := range 40 {
		if _, status := d.chat(fmt.Sprint(i) + strings.Repeat(" word", 500)); status != http.StatusOK {
			t.Fatalf("status %d", status)
		}
	}
	var s admin.Status
	d.wait("all requests in the status", func() bool {
		body, _ := d.get("/api/v1/status")
		if err := json.Unmarshal([]byte(body), &s); err != nil {
			t.Fatal(err)
		}
		return len(s.Tokens.Calibration) == 1 && s.Tokens.Calibration[0].Samples == 40
	})
	c := s.Tokens.Calibration[0]
	if c.Pool != "p" || c.Model != "other" || !c.Applied || c.Factor < 1.9 || c.Factor > 2 || c.Confidence != 1 {
		t.Errorf("got %+v", c)
	}
	metrics, _ := d.get("/metrics")
	for _, want := range []string{
		`shunt_token_calibration_factor{model="other",pool="p"} 1.9`, `shunt_token_calibration_confidence{model="other",pool="p"} 1`,
		`shunt_token_calibration_samples_total{model="other",pool="p",result="taken"} 40`, `shunt_token_cache_texts_total{encoding="o200k_base",result="miss"} 40`,
		`shunt_token_cache_hit_ratio{encoding="o200k_base"} 0`, `shunt_token_estimated_bytes_total{encoding="o200k_base"} 0`,
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("metrics have no %s", want)
		}
	}
}
