// SPDX-License-Identifier: Apache-2.0

package request

import (
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/pkg/tokens"
)

func TestFamilyOf(t *testing.T) {
	for model, want := range map[string]Family{
		"": OpenAI, "gpt-4o": OpenAI, "openai/gpt-oss-120b": OpenAI, "my-model": OpenAI, "llama-2-7b": OpenAI,
		"meta-llama/Llama-3.1-8B-Instruct": Llama3, "llama3:70b": Llama3, "nvidia/Llama-3_3-Nemotron": Llama3, "meta-llama/Llama-4-Scout": Llama3,
		"Meta-Llama-3-8B": Llama3, "Qwen/Qwen3-32B": Qwen, "qwen2.5-coder": Qwen, "QwQ-32B": Qwen,
		"deepseek-ai/DeepSeek-V3": DeepSeek, "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": DeepSeek, "deepseek-ai/qwen3": Qwen,
		"google/gemma-3-27b-it": Gemma, "mistralai/Mistral-7B-Instruct-v0.3": Mistral, "mistralai/Mixtral-8x7B": Mistral, "claude-sonnet-4-5": Claude,
		"anthropic/claude-3-haiku": Claude, "qwe": OpenAI, strings.Repeat("q", 1000): OpenAI,
	} {
		if got := FamilyOf(model); got != want {
			t.Errorf("%.50q: got %s, want %s", model, got, want)
		}
	}
	for _, name := range Families() {
		if f, ok := ParseFamily(name); !ok || f.String() != name {
			t.Errorf("%s: got %s, %v", name, f, ok)
		}
	}
	if _, ok := ParseFamily("auto"); ok || Family(200).String() != "openai" {
		t.Error("an unknown family is known")
	}
}

// What a template adds: measured for the open models by rendering their own templates with their own tokenizers.
func TestFramingByFamily(t *testing.T) {
	const two = `{"messages":[{"role":"user","content":"hello"},{"role":"assistant","name":"world","content":"hello"}]}`
	for family, want := range map[Family]Parts{
		OpenAI:   {Text: 3, Framing: 3 + 2*4 + 1},
		Llama3:   {Text: 2, Framing: 5 + 2*5},
		Qwen:     {Text: 2, Framing: 3 + 2*5},
		DeepSeek: {Text: 2, Framing: 1 + 2*2},
		Gemma:    {Text: 2, Framing: 4 + 2*5},
	} {
		f := parse(t, Chat, two)
		for range 2 { // counting leaves no trace in the facts
			if got := f.Parts(counter().For(""), family, ""); got != want {
				t.Errorf("%s: got %+v, want %+v", family, got, want)
			}
		}
	}
	body := `{"model":"Qwen/Qwen3-8B",` + two[1:]
	if got, want := parse(t, Chat, body).PromptTokens(counter()), (tokens.Count{Tokens: 2 + 13}); got != want {
		t.Errorf("by the request's model: got %+v, want %+v", got, want)
	}
}

// Open models read the tools as JSON, written the way their templates write it however the client did.
func TestToolsAsJSON(t *testing.T) {
	const compact = `[{"type":"function","function":{"name":"hello","parameters":{"type":"object"}}}]`
	const indented = "[\n  {\n    \"type\": \"function\",\n    \"function\": {\"name\": \"hello\", \"parameters\": {\"type\": \"object\"}}\n  }\n]"
	e := counter().For("")
	text := e.Count(`[{"type": "function", "function": {"name": "hello", "parameters": {"type": "object"}}}]`).Tokens
	for _, tools := range []string{compact, indented} {
		got := parse(t, Chat, `{"tools":`+tools+`}`).Parts(e, Qwen, "")
		if want := text + 78 + 1; got.Tools != want || got.Estimated {
			t.Errorf("got %+v, want %d", got, want)
		}
	}
	if got := parse(t, Chat, `{"tools":[]}`).Parts(e, Qwen, ""); got.Tools != 0 {
		t.Errorf("no tools: %+v", got)
	}
	if got := parse(t, Chat, `{"tools":[{"type":"web_search"}]}`).Parts(e, Qwen, ""); got.Tools != 0 || !got.Estimated {
		t.Errorf("a hosted tool: %+v", got)
	}
}

// The tools of a conversation are gone over once, and remembered for each family and encoding.
func TestToolsAreRemembered(t *testing.T) {
	c, err := tokens.New(tokens.Options{})
	if err != nil {
		t.Fatal(err)
	}
	const body = `{"tools":[{"type":"function","function":{"name":"hello","description":"Says hello to the world.",
		"parameters":{"properties":{"world":{"type":"string","enum":["a","b"]}}}}},{"type":"web_search"}]}`
	f := parse(t, Chat, body)
	for _, encoding := range []string{tokens.O200kBase, tokens.CL100kBase} {
		e, err := c.Encoding(encoding)
		if err != nil {
			t.Fatal(err)
		}
		for _, family := range []Family{OpenAI, Qwen, Llama3} {
			first := f.Parts(e, family, "")
			before := e.Stats()
			if again := f.Parts(e, family, ""); again != first || !first.Estimated || first.Tools < 15 {
				t.Errorf("%s, %s: %+v, then %+v", encoding, family, first, again)
			}
			after := e.Stats()
			if after.Hits != before.Hits+1 || after.Misses != before.Misses {
				t.Errorf("%s, %s: counted anew: %+v, then %+v", encoding, family, before, after)
			}
			if n := testing.AllocsPerRun(50, func() { f.Parts(e, family, "") }); n != 0 {
				t.Errorf("%s, %s: %v allocations", encoding, family, n)
			}
		}
	}
	// What is estimated for want of a place or of budget is not remembered as if it had been counted.
	small, err := tokens.New(tokens.Options{MaxBytes: 4096})
	if err != nil {
		t.Fatal(err)
	}
	e := small.For("")
	f = parse(t, Chat, `{"tools":[{"function":{"name":"f","description":"`+strings.Repeat("many words ", 2000)+`"}}]}`)
	f.Parts(e, OpenAI, "")
	if _, _, ok := e.Lookup(f.p.raw(fieldTools), uint8(OpenAI)); ok {
		t.Error("an estimate is remembered")
	}
}

func TestPartsSumUp(t *testing.T) {
	const body = `{"model":"gpt-4o","messages":[{"role":"user","content":[{"type":"text","text":"hello"},
		{"type":"image_url","image_url":{"url":"http://x","detail":"low"}},{"type":"input_audio","input_audio":{}}]}],
		"tools":[{"type":"function","function":{"name":"hello"}}]}`
	f := parse(t, Chat, body)
	p := f.Parts(counter().For(f.Model), FamilyOf(f.Model), f.Model)
	want := Parts{Text: 1, Tools: 12 + 7 + 2, Images: 85, Media: audioTokens, Framing: 7, Estimated: true}
	if p != want || p.Count() != f.PromptTokens(counter()) {
		t.Errorf("got %+v, want %+v", p, want)
	}
}
