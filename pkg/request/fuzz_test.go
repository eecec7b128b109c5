// SPDX-License-Identifier: Apache-2.0

package request

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/pkg/tokens"
)

// oracle reads a body with encoding/json: whether it is one object, how deep it goes, and its top-level keys.
func oracle(body []byte) (valid bool, depth int, keys []string) {
	if !json.Valid(body) {
		return false, 0, nil
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	var kinds []json.Delim
	expectKey := false
	for {
		tok, err := d.Token()
		if err != nil {
			return len(keys) > 0 || bytes.HasPrefix(bytes.TrimSpace(body), []byte("{")), depth, keys
		}
		delim, isDelim := tok.(json.Delim)
		switch {
		case isDelim && (delim == '{' || delim == '['):
			kinds = append(kinds, delim)
			depth = max(depth, len(kinds))
			expectKey = delim == '{'
		case isDelim:
			kinds = kinds[:len(kinds)-1]
			expectKey = len(kinds) > 0 && kinds[len(kinds)-1] == '{'
		case expectKey:
			if len(kinds) == 1 {
				keys = append(keys, tok.(string))
			}
			expectKey = false
		default:
			expectKey = len(kinds) > 0 && kinds[len(kinds)-1] == '{'
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		`{}`, `[]`, `{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}`, `{"mo\u0064el":1,"model":2}`,
		`{"MODEL":1,"model":2}`, `{"prompt":[[1,2],["a"]]}`, `{"input":[1,2.5e3,-0]}`, `{"tools":[{"function":{"name":"f","parameters":{"properties":{"a":{"enum":[1]}}}}}]}`,
		`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x","detail":"low"}},{"type":"tool_result","content":[{"type":"text","text":"\ud83d\udc4d\ud83d"}]}]}]}`,
		`{"system":[{"type":"text","text":"x"}],"messages":null,"max_tokens":"7","n":3,"stream_options":{"include_usage":true}}`,
		`{"input":[{"type":"function_call","name":"f","arguments":{"a":[{"b":null}]}},{"type":"document","source":{"type":"text","data":"x"}}]}`,
		strings.Repeat(`{"a":`, 600), strings.Repeat(`{"a":[`, 200) + strings.Repeat(`]}`, 200), "{\"a\":\"\xff\"}", `{"a":"\u00`, `{"ſtream":1,"stream":2}`,
	} {
		f.Add(s)
	}
	enc := counter().For("")
	f.Fuzz(func(t *testing.T, s string) {
		body := []byte(s)
		valid, depth, keys := oracle(body)
		repeated := false
		for _, name := range fieldNames {
			n := 0
			for _, k := range keys {
				if strings.EqualFold(k, name) {
					n++
				}
			}
			repeated = repeated || n > 1
		}
		for api := Other; api <= Messages; api++ {
			p := Acquire()
			facts, err := p.Parse(api, body)
			if string(body) != s {
				t.Fatal("body was changed")
			}
			switch {
			case err == nil:
				if !valid || depth > maxDepth || repeated {
					t.Fatalf("accepted: valid %v, depth %d, repeated %v", valid, depth, repeated)
				}
				var top map[string]json.RawMessage
				if err := json.Unmarshal(body, &top); err != nil {
					t.Fatal(err)
				}
				var model string
				if json.Unmarshal(top["model"], &model) != nil {
					model = ""
				}
				if strings.ToValidUTF8(facts.Model, "\uFFFD") != strings.ToValidUTF8(model, "\uFFFD") && !strings.Contains(model, "\uFFFD") {
					t.Fatalf("model %q, want %q", facts.Model, model)
				}
				if n := facts.PromptTokensIn(enc); n.Tokens < 0 || facts.MaxTokens < 0 || facts.Choices < 1 {
					t.Fatalf("%+v, %d, %d", n, facts.MaxTokens, facts.Choices)
				}
			case valid && depth <= maxDepth && !repeated:
				t.Fatalf("refused: %v", err)
			case valid && depth <= maxDepth && !errors.Is(err, ErrDuplicateKey):
				t.Fatalf("got %v, want ErrDuplicateKey", err)
			case valid && depth > maxDepth && !errors.Is(err, ErrDepth):
				t.Fatalf("got %v, want ErrDepth", err)
			case !valid && !errors.Is(err, ErrSyntax) && !errors.Is(err, ErrDepth):
				t.Fatalf("got %v, want ErrSyntax", err)
			}
			p.Release()
			if _, derr := Detect(body); (derr == nil) != (err == nil) {
				t.Fatalf("Detect: %v, Parse: %v", derr, err)
			}
		}
	})
}

// A body like an agent's: a system prompt, tools, turns with tool calls, escapes.
func agentBody(turns int) []byte {
	var b strings.Builder
	b.WriteString(`{"model":"llama-3.1-8b-instruct","messages":[{"role":"system","content":"You are an agent.\nBe terse."}`)
	for i := range turns {
		fmt.Fprintf(&b, `,{"role":"user","content":"question %d \"quoted\" \u00e9"},{"role":"assistant","content":null,"tool_calls":[{"id":"c%d","type":"function","function":{"name":"read_file","arguments":"{\"path\":\"main.go\"}"}}]},{"role":"tool","tool_call_id":"c%d","content":[{"type":"text","text":"package main\n\nfunc main() {}\n"}]}`, i, i, i)
	}
	b.WriteString(`],"tools":[{"type":"function","function":{"name":"read_file","description":"Reads a file.","parameters":{"type":"object","properties":{"path":{"type":"string","description":"Where it is"}}}}}],`)
	b.WriteString(`"stream":true,"stream_options":{"include_usage":true},"max_tokens":null,"max_completion_tokens":512,"prompt_cache_key":"k1","temperature":0.7}`)
	return []byte(b.String())
}

func TestSteadyStateAllocations(t *testing.T) {
	bodies := map[string]struct {
		api  API
		body []byte
	}{
		"small":       {Chat, []byte(`{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":16,"stream":true}`)},
		"agent":       {Chat, agentBody(20)},
		"anthropic":   {Messages, []byte(`{"model":"m","max_tokens":5,"system":"s\n","messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}]}`)},
		"responses":   {Responses, []byte(`{"model":"m","input":[{"role":"user","content":"hi"},{"type":"function_call","name":"f","arguments":{"a":1}}]}`)},
		"completions": {Completions, []byte(`{"model":"m","prompt":"` + strings.Repeat("word \\n", 1000) + `"}`)},
		"ids":         {Embeddings, []byte(`{"model":"m","input":[[1,2,3],[4,5]]}`)},
	}
	for name, b := range bodies {
		p := Acquire()
		run := func() {
			if _, err := p.Parse(b.api, b.body); err != nil {
				t.Fatal(err)
			}
		}
		run()
		if n := testing.AllocsPerRun(100, run); n != 0 {
			t.Errorf("%s: %v allocations a parse", name, n)
		}
		facts, err := p.Parse(b.api, b.body)
		if err != nil {
			t.Fatal(err)
		}
		enc := counter().For(facts.Model)
		if !slices.ContainsFunc(facts.texts, func(t tokens.Text) bool { return len(t.S) < 8 }) { // shorter ones are not remembered
			if n := testing.AllocsPerRun(100, func() { facts.PromptTokensIn(enc) }); n != 0 {
				t.Errorf("%s: %v allocations a count of remembered texts", name, n)
			}
		}
		p.Release()
	}
}

// A pooled parser must not keep a large request's memory.
func TestReleaseDropsLargeBuffers(t *testing.T) {
	for name, body := range map[string]string{
		"escapes":    `{"model":"` + strings.Repeat(`\n`, keepBytes) + `"}`,
		"containers": `{"messages":[` + strings.Repeat(`{"role":"user"},`, 130_000) + `null]}`,
		"texts":      `{"messages":[` + strings.Repeat(`"x",`, 130_000) + `null]}`,
	} {
		p := new(Parser)
		for _, api := range []API{Completions, Chat} {
			if _, err := p.Parse(api, []byte(body)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := p.Parse(Completions, []byte(body)); err != nil {
			t.Fatal(err)
		}
		p.Release()
		if kept := cap(p.scratch) + 8*cap(p.tape) + 32*cap(p.facts.texts); kept > keepBytes || p.body != nil {
			t.Errorf("%s: %d bytes kept", name, kept)
		}
	}
}

func BenchmarkParse(b *testing.B) {
	for _, turns := range []int{1, 20, 400} {
		body := agentBody(turns)
		b.Run(fmt.Sprintf("%dKiB", len(body)>>10), func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				p := Acquire()
				if _, err := p.Parse(Chat, body); err != nil {
					b.Fatal(err)
				}
				p.Release()
			}
		})
	}
	body := []byte(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("It was a bright cold day in April. ", 1000) + `"}]}`)
	b.Run("one text of 34KiB", func(b *testing.B) {
		b.SetBytes(int64(len(body)))
		for b.Loop() {
			p := Acquire()
			if _, err := p.Parse(Chat, body); err != nil {
				b.Fatal(err)
			}
			p.Release()
		}
	})
}
