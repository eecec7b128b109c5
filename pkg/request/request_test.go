// SPDX-License-Identifier: Apache-2.0

package request

import (
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/shunt-lb/shunt/pkg/tokens"
)

var counter = sync.OnceValue(func() *tokens.Counter {
	c, err := tokens.New(tokens.Options{})
	if err != nil {
		panic(err)
	}
	return c
})

// What the default family's framing is made of.
const (
	messageTokens, roleTokens, nameTokens, replyTokens = 3, 1, 1, 3
	functionTokens, functionsEndTokens                 = 7, 12
	imageTokens, lowImageTokens                        = 765, 85
)

// parse returns the facts of a body; they live as long as the test.
func parse(t testing.TB, api API, body string) *Facts {
	t.Helper()
	p := Acquire()
	t.Cleanup(p.Release)
	in := []byte(body)
	f, err := p.Parse(api, in)
	if err != nil {
		t.Fatalf("parse %.200s: %v", body, err)
	}
	if string(in) != body {
		t.Fatalf("body was changed: %.200s", in)
	}
	return f
}

func TestAPIOf(t *testing.T) {
	for path, want := range map[string]API{
		"/v1/chat/completions":        Chat,
		"/v1/completions":             Completions,
		"/v1/embeddings":              Embeddings,
		"/v1/responses":               Responses,
		"/v1/messages":                Messages,
		"/openai/v1/chat/completions": Chat,
		"/v1/messages/count_tokens":   Other,
		"/v1/responses/resp_1":        Other,
		"/v1/models":                  Other,
		"/v2/models/x/infer":          Other,
		"/chat/completions":           Other,
		"":                            Other,
	} {
		if got := APIOf(path); got != want {
			t.Errorf("APIOf(%q) = %v, want %v", path, got, want)
		}
	}
	for a := Other; a <= Messages; a++ {
		if got, ok := ParseAPI(a.String()); !ok || got != a {
			t.Errorf("ParseAPI(%q) = %v, %v", a.String(), got, ok)
		}
	}
	if _, ok := ParseAPI("grpc"); ok || API(200).String() != "other" {
		t.Error("unknown API is known")
	}
}

func TestDetect(t *testing.T) {
	for body, want := range map[string]API{
		`{"messages":[]}`: Chat,
		`{"messages":[],"tools":[{"type":"function"}]}`:            Chat,
		`{"messages":[],"system":"x"}`:                             Messages,
		`{"messages":[],"tools":[{"name":"f","input_schema":{}}]}`: Messages,
		`{"prompt":"x"}`:                   Completions,
		`{"input":"x"}`:                    Embeddings,
		`{"input":["x","y"]}`:              Embeddings,
		`{"input":[1,2]}`:                  Embeddings,
		`{"input":"x","instructions":"y"}`: Responses,
		`{"input":"x","stream":true}`:      Responses,
		`{"input":[{"role":"user","content":"x"}],"model":"gpt-4o"}`: Responses,
		`{}`: Other,
	} {
		if got, err := Detect([]byte(body)); err != nil || got != want {
			t.Errorf("Detect(%s) = %v, %v, want %v", body, got, err, want)
		}
	}
	if _, err := Detect([]byte(`[]`)); !errors.Is(err, ErrSyntax) {
		t.Errorf("got %v", err)
	}
}

func TestScalarFacts(t *testing.T) {
	for _, tc := range []struct {
		api  API
		body string
		want Facts
	}{
		{Chat, `{}`, Facts{Choices: 1}},
		{Chat, `{"model":"m","stream":true,"max_tokens":7}`, Facts{Model: "m", Stream: true, MaxTokens: 7, Choices: 1}},
		{Chat, "\t{ \"m\\u006fdel\" :\r\n\"a\\/b\\u00e9\\ud83d\\udc4d\" } \n", Facts{Model: "a/bé👍", Choices: 1}},
		{Chat, `{"max_tokens":7,"max_completion_tokens":5,"n":3}`, Facts{MaxTokens: 15, Choices: 3}},
		{Chat, `{"max_tokens":7,"max_completion_tokens":null}`, Facts{MaxTokens: 7, Choices: 1}},
		{Chat, `{"max_tokens":"16"}`, Facts{MaxTokens: 16, Choices: 1}},
		{Chat, `{"max_tokens":16.0}`, Facts{MaxTokens: 16, Choices: 1}},
		{Chat, `{"max_tokens":1.6e1}`, Facts{MaxTokens: 16, Choices: 1}},
		{Chat, `{"max_tokens":-1,"n":-5}`, Facts{Choices: 1}},
		{Chat, `{"max_tokens":0,"n":0}`, Facts{Choices: 1}},
		{Chat, `{"max_tokens":[1],"n":{"a":1},"model":5,"stream":"no","prompt_cache_key":3}`, Facts{Choices: 1}},
		{Chat, `{"max_tokens":1e400,"n":1e400}`, Facts{MaxTokens: maxLimit * maxChoices, Choices: maxChoices}},
		{Chat, `{"max_tokens":4,"best_of":9}`, Facts{MaxTokens: 4, Choices: 1}},
		{Chat, `{"stream":false}`, Facts{Choices: 1}},
		{Chat, `{"stream":null}`, Facts{Choices: 1}},
		{Chat, `{"stream":1}`, Facts{Stream: true, Choices: 1}},
		{Chat, `{"stream":"True"}`, Facts{Stream: true, Choices: 1}},
		{Chat, `{"stream":true,"stream_options":{"include_usage":true}}`, Facts{Stream: true, IncludeUsage: true, Choices: 1}},
		{Chat, `{"stream_options":{"include_usage":true,"include_usage":false}}`, Facts{Choices: 1}},
		{Chat, `{"stream_options":null}`, Facts{Choices: 1}},
		{Chat, `{"stream_options":[true]}`, Facts{Choices: 1}},
		{Chat, `{"messages":[],"prompt_cache_key":"k\n1"}`, Facts{CacheKey: "k\n1", Choices: 1}},
		{Chat, `{"MODEL":"m"}`, Facts{Choices: 1}},
		{Completions, `{"max_tokens":4,"n":2,"best_of":9}`, Facts{MaxTokens: 36, Choices: 9}},
		{Completions, `{"max_tokens":4,"n":2,"prompt":["a","b","c"]}`, Facts{MaxTokens: 24, Choices: 2}},
		{Completions, `{"max_tokens":4,"prompt":[1,2,3]}`, Facts{MaxTokens: 4, Choices: 1}},
		{Completions, `{"max_tokens":4,"prompt":[[1,2,3],[4]]}`, Facts{MaxTokens: 8, Choices: 1}},
		{Responses, `{"max_output_tokens":9,"max_tokens":4,"n":5}`, Facts{MaxTokens: 9, Choices: 1}},
		{Messages, `{"max_tokens":4,"n":5,"stream":true}`, Facts{MaxTokens: 4, Choices: 1, Stream: true}},
		{Embeddings, `{"max_tokens":4}`, Facts{Choices: 1}},
		{Other, `{"model":"m","max_tokens":4}`, Facts{Model: "m", MaxTokens: 4, Choices: 1}},
	} {
		tc.want.API = tc.api
		f := *parse(t, tc.api, tc.body)
		got := fmt.Sprint(f.API, f.Model, f.Stream, f.MaxTokens, f.Choices, f.IncludeUsage, f.CacheKey, f.Fingerprint)
		w := tc.want
		want := fmt.Sprint(w.API, w.Model, w.Stream, w.MaxTokens, w.Choices, w.IncludeUsage, w.CacheKey, w.Fingerprint)
		if got != want {
			t.Errorf("%v %s:\n got %s\nwant %s", tc.api, tc.body, got, want)
		}
	}
}

// The two requests and their counts are the examples of OpenAI's cookbook, whose counts the API itself confirmed.
func TestCookbookCounts(t *testing.T) {
	const chat = `"messages":[
 {"role":"system","content":"You are a helpful, pattern-following assistant that translates corporate jargon into plain English."},
 {"role":"system","name":"example_user","content":"New synergies will help drive top-line growth."},
 {"role":"system","name":"example_assistant","content":"Things working well together will increase revenue."},
 {"role":"system","name":"example_user","content":"Let's circle back when we have more bandwidth to touch base on opportunities for increased leverage."},
 {"role":"system","name":"example_assistant","content":"Let's talk later when we're less busy about how to do better."},
 {"role":"user","content":"This late pivot means we don't have time to boil the ocean for the client deliverable."}]`
	const tools = `"messages":[
 {"role":"system","content":"You are a helpful assistant that can answer to questions about the weather."},
 {"role":"user","content":"What's the weather like in San Francisco?"}],
 "tools":[{"type":"function","function":{"name":"get_current_weather","description":"Get the current weather in a given location",
 "parameters":{"type":"object","properties":{"location":{"type":"string","description":"The city and state, e.g. San Francisco, CA"},
 "unit":{"type":"string","description":"The unit of temperature to return","enum":["celsius","fahrenheit"]}},"required":["location"]}}}]`
	for _, tc := range []struct {
		model, members string
		want           int
	}{
		{"gpt-4", chat, 129}, {"gpt-3.5-turbo", chat, 129}, {"gpt-4o", chat, 124}, {"gpt-4o-mini", chat, 124},
		{"gpt-4", tools, 105}, {"gpt-3.5-turbo", tools, 105}, {"gpt-4o", tools, 101}, {"gpt-4o-mini", tools, 101},
	} {
		f := parse(t, Chat, `{"model":"`+tc.model+`",`+tc.members+`}`)
		if got := f.PromptTokens(counter()); got != (tokens.Count{Tokens: tc.want}) {
			t.Errorf("%s: got %+v, want %d for %s", tc.model, got, tc.want, tc.members)
		}
	}
}

// Shapes: what they count in o200k_base, where "hello" and "world" are one token each.
func TestPromptTokens(t *testing.T) {
	big := base64.StdEncoding.EncodeToString([]byte(strings.Repeat("\x00\x10\x83picture", 100_000)))
	const frame = replyTokens + messageTokens + roleTokens
	text := func(s string) int { return counter().For("").Count(s).Tokens }
	msg := func(content string) string { return `{"messages":[{"role":"user","content":` + content + `}]}` }
	for _, tc := range []struct {
		name      string
		api       API
		body      string
		want      int
		estimated bool
	}{
		{"no messages", Chat, `{}`, replyTokens, false},
		{"messages null", Chat, `{"messages":null}`, replyTokens, false},
		{"messages empty", Chat, `{"messages":[]}`, replyTokens, false},
		{"messages a number", Chat, `{"messages":5}`, replyTokens, false},
		{"string", Chat, msg(`"hello"`), frame + 1, false},
		{"escaped string", Chat, msg(`"\u0068ello"`), frame + 1, false},
		{"content null", Chat, msg(`null`), frame, false},
		{"content absent", Chat, `{"messages":[{"role":"user"}]}`, frame, false},
		{"content empty", Chat, msg(`""`), frame, false},
		{"content a number", Chat, msg(`5`), frame, false},
		{"content true", Chat, msg(`true`), frame, false},
		{"content an object", Chat, msg(`{"type":"text","text":"hello"}`), frame + 1, false},
		{"parts", Chat, msg(`[{"type":"text","text":"hello"},{"type":"text","text":"world"}]`), frame + 2, false},
		{"parts of strings", Chat, msg(`["hello",["world",[]],null,3]`), frame + 2, false},
		{"part without type", Chat, msg(`[{"text":"hello"}]`), frame + 1, false},
		{"unknown part", Chat, msg(`[{"type":"hologram","data":"` + big + `","text":"hello"}]`), frame + 1, false},
		{"unknown part of unknown members", Chat, msg(`[{"type":"hologram","blob":"` + big + `"}]`), frame, false},
		{"repeated member", Chat, `{"messages":[{"role":"user","content":"hello hello hello","content":"hello"}]}`, frame + 1, false},
		{"name", Chat, `{"messages":[{"role":"user","name":"hello","content":"world"}]}`, frame + 1 + nameTokens + 1, false},
		{"odd role", Chat, `{"messages":[{"role":"hello","content":"world"}]}`, frame - roleTokens + 2, false},
		{"message a string", Chat, `{"messages":["hello"]}`, replyTokens + 1, false},
		{"image", Chat, msg(`[{"type":"image_url","image_url":{"url":"data:image/png;base64,` + big + `"}}]`), frame + imageTokens, true},
		{"low image", Chat, msg(`[{"type":"image_url","image_url":{"url":"http://x/y.png","detail":"low"}}]`), frame + lowImageTokens, true},
		{"image as string", Chat, msg(`[{"type":"image_url","image_url":"` + big + `"}]`), frame + imageTokens, true},
		{"audio", Chat, msg(`[{"type":"input_audio","input_audio":{"data":"` + big + `","format":"wav"}}]`), frame + audioTokens, true},
		{"video", Chat, msg(`[{"type":"video_url","video_url":{"url":"` + big + `"}}]`), frame + videoTokens, true},
		{"file", Chat, msg(`[{"type":"file","file":{"file_data":"` + big + `","filename":"x.pdf"}}]`), frame + fileTokens, true},
		{"refusal", Chat, `{"messages":[{"role":"assistant","content":null,"refusal":"hello"}]}`, frame + 1, false},
		{"tool call", Chat, `{"messages":[{"role":"assistant","content":null,"tool_calls":[
			{"id":"call_1234567890","type":"function","function":{"name":"hello","arguments":"world"}}]}]}`, frame + messageTokens + 2, false},
		{"tool call, arguments an object", Chat, `{"messages":[{"role":"assistant","tool_calls":[
			{"type":"function","function":{"name":"hello","arguments":{}}}]}]}`, frame + messageTokens + 1 + 1, false},
		{"tool calls odd", Chat, `{"messages":[{"role":"assistant","content":"hello","tool_calls":"x"}]}`, frame + 1, false},
		{"custom tool call", Chat, `{"messages":[{"role":"assistant","tool_calls":[
			{"type":"custom","custom":{"name":"hello","input":"world"}}]}]}`, frame + messageTokens + 2, false},
		{"function call", Chat, `{"messages":[{"role":"assistant","function_call":{"name":"hello","arguments":"world"}}]}`, frame + 2, false},
		{"tool result", Chat, `{"messages":[{"role":"tool","tool_call_id":"call_123","content":[{"type":"text","text":"hello"}]}]}`, frame + 1, false},
		{"tool without description", Chat, `{"tools":[{"type":"function","function":{"name":"hello"}}]}`,
			replyTokens + functionTokens + functionsEndTokens + 2, false},
		{"nested schema", Chat, `{"tools":[{"type":"function","function":{"name":"hello","parameters":{"properties":
			{"world":{"type":"array","items":{"properties":{"hello":{"type":"string","enum":["world",1]}}}}}}}}]}`,
			replyTokens + functionTokens + functionsEndTokens + 2 + 2*(propertiesTokens+propertyTokens) + enumTokens + 2*enumItemTokens +
				text("world:array:") + text("hello:string:") + text("world") + text("1"), false},
		{"functions", Chat, `{"functions":[{"name":"hello"}]}`, replyTokens + functionTokens + functionsEndTokens + 2, false},
		{"hosted tool", Responses, `{"tools":[{"type":"web_search"}]}`, replyTokens, true},
		{"tools odd", Chat, `{"tools":[null,"x",5,[]],"functions":{}}`, replyTokens, false},

		{"completion", Completions, `{"prompt":"hello world"}`, 2, false},
		{"completion, escapes", Completions, `{"prompt":"\u0068ello world"}`, 2, false},
		{"completion list", Completions, `{"prompt":["hello","world"]}`, 2, false},
		{"completion ids", Completions, `{"prompt":[1,2,3]}`, 3, false},
		{"completion lists of ids", Completions, `{"prompt":[[1,2,3],[4,5]]}`, 5, false},
		{"completion null", Completions, `{"prompt":null}`, 0, false},
		{"completion number", Completions, `{"prompt":7}`, 0, false},
		{"completion suffix", Completions, `{"prompt":"hello","suffix":"world"}`, 2, false},
		{"completion mixed", Completions, `{"prompt":["hello",1,[2,3],"world"]}`, 5, false},

		{"embedding", Embeddings, `{"input":"hello"}`, 1, false},
		{"embedding list", Embeddings, `{"input":["hello","world","hello"]}`, 3, false},
		{"embedding ids", Embeddings, `{"input":[5,6,7,8]}`, 4, false},
		{"embedding lists of ids", Embeddings, `{"input":[[5,6],[7],[]]}`, 3, false},
		{"embedding many ids", Embeddings, `{"input":[` + strings.Repeat("1,", 300_000) + `1]}`, 300_001, false},
		{"embedding objects", Embeddings, `{"input":[{"text":"hello"},{"image":"` + big + `"}]}`, 1, false},
		{"embedding of a chat", Embeddings, `{"messages":[{"role":"user","content":"hello"}]}`, frame - replyTokens + 1, false},

		{"responses string", Responses, `{"input":"hello"}`, frame + 1, false},
		{"responses instructions", Responses, `{"instructions":"hello","input":"world"}`, frame + messageTokens + roleTokens + 2, false},
		{"responses items", Responses, `{"input":[{"role":"user","content":[{"type":"input_text","text":"hello"}]},
			{"type":"message","role":"assistant","content":[{"type":"output_text","text":"world"}]}]}`, frame + messageTokens + roleTokens + 2, false},
		{"responses image", Responses, `{"input":[{"role":"user","content":[{"type":"input_image","image_url":"` + big + `","detail":"low"}]}]}`,
			frame + lowImageTokens, true},
		{"responses call", Responses, `{"input":[{"type":"function_call","call_id":"c","name":"hello","arguments":"world"},
			{"type":"function_call_output","call_id":"c","output":"hello"},{"type":"item_reference","id":"i"},
			{"type":"reasoning","summary":[{"type":"summary_text","text":"world"}],"encrypted_content":"` + big + `"}]}`,
			replyTokens + 4*(messageTokens+roleTokens) + 4, true},
		{"responses tools", Responses, `{"tools":[{"type":"function","name":"hello","description":"world.","parameters":{}}]}`,
			replyTokens + functionTokens + functionsEndTokens + 3, false},

		{"anthropic system", Messages, `{"system":"hello","messages":[{"role":"user","content":"world"}]}`, frame + messageTokens + roleTokens + 2, false},
		{"anthropic system blocks", Messages, `{"system":[{"type":"text","text":"hello","cache_control":{"type":"ephemeral"}}],
			"messages":[{"role":"user","content":[{"type":"text","text":"world"}]}]}`, frame + messageTokens + roleTokens + 2, false},
		{"anthropic system null", Messages, `{"system":null,"messages":[]}`, replyTokens, false},
		{"anthropic tools", Messages, `{"tools":[{"name":"hello","input_schema":{"type":"object","properties":{}}}]}`,
			replyTokens + functionTokens + functionsEndTokens + 2, false},
		{"anthropic tool use", Messages, `{"messages":[{"role":"assistant","content":[{"type":"thinking","thinking":"hello","signature":"` + big + `"},
			{"type":"redacted_thinking","data":"` + big + `"},{"type":"tool_use","id":"t","name":"world","input":{}}]}]}`, frame + 3, true},
		{"anthropic nested tool result", Messages, msg(`[{"type":"tool_result","tool_use_id":"t","content":[{"type":"text","text":"hello"},
			{"type":"image","source":{"type":"base64","media_type":"image/png","data":"` + big + `"}},
			{"type":"search_result","title":"x","content":[{"type":"text","text":"world"}]}]}]`), frame + imageTokens + 2, true},
		{"anthropic tool result string", Messages, msg(`[{"type":"tool_result","content":"hello"}]`), frame + 1, false},
		{"anthropic document", Messages, msg(`[{"type":"document","title":"hello","source":{"type":"text","data":"world"}}]`), frame + 2, false},
		{"anthropic document of parts", Messages, msg(`[{"type":"document","source":{"type":"content","content":[{"type":"text","text":"world"}]}}]`), frame + 1, false},
		{"anthropic PDF", Messages, msg(`[{"type":"document","source":{"type":"base64","data":"` + big + `"}}]`), frame + fileTokens, true},

		{"other", Other, `{"messages":[{"role":"user","content":"hello"}],"prompt":"hello","input":"hello"}`, 0, false},
	} {
		f := parse(t, tc.api, tc.body)
		if got := f.PromptTokens(counter()); got != (tokens.Count{Tokens: tc.want, Estimated: tc.estimated}) {
			t.Errorf("%s: got %+v, want %d, %v (%d texts)", tc.name, got, tc.want, tc.estimated, len(f.texts))
		}
	}
}

func TestSpecialTokensInEveryField(t *testing.T) {
	const s = "<|endoftext|>"
	body := `{"model":"` + s + `","messages":[{"role":"` + s + `","name":"` + s + `","content":"` + s + `"},
		{"role":"assistant","tool_calls":[{"function":{"name":"` + s + `","arguments":"` + s + `"}}]}],
		"tools":[{"function":{"name":"` + s + `","description":"` + s + `","parameters":{"properties":{"` + s + `":{"enum":["` + s + `"]}}}}}],
		"prompt_cache_key":"` + s + `"}`
	if got := parse(t, Chat, body).PromptTokens(counter()); got.Tokens < 50 || got.Estimated {
		t.Errorf("got %+v", got)
	}
}

// Members that would make a huge tree are estimated by their bytes, and never refused.
func TestMembersTooLargeToWalk(t *testing.T) {
	for name, body := range map[string]string{
		"objects": `{"messages":[` + strings.Repeat("{},", maxContainers) + `0]}`,
		"arrays":  `{"messages":[{"role":"user","content":[` + strings.Repeat("[],", maxContainers) + `"hello"]}]}`,
	} {
		f := parse(t, Chat, body)
		if f.unwalked == 0 || f.unwalked > len(body) || len(f.texts) != 0 || f.Fingerprint != 0 {
			t.Errorf("%s: %d bytes estimated, %d texts", name, f.unwalked, len(f.texts))
		}
		if got := f.PromptTokens(counter()); got.Tokens != replyTokens+(f.unwalked+3)/4 || !got.Estimated {
			t.Errorf("%s: got %+v", name, got)
		}
	}
	f := parse(t, Chat, `{"messages":[`+strings.Repeat(`"hello",`, maxTexts)+`"worlds"]}`)
	if len(f.texts) != maxTexts || f.unwalked != len("worlds") {
		t.Errorf("%d texts, %d bytes estimated", len(f.texts), f.unwalked)
	}
	f = parse(t, Chat, `{"messages":`+strings.Repeat("[", maxDepth-1)+`"hello"`+strings.Repeat("]", maxDepth-1)+`}`)
	if got := f.PromptTokens(counter()); got != (tokens.Count{Tokens: replyTokens + 1}) {
		t.Errorf("deep, but walked: %+v", got)
	}
	f = parse(t, Chat, `{"tools":[`+strings.Repeat("[],", maxContainers)+`0]}`)
	if got := f.PromptTokens(counter()); got.Tokens < maxContainers/4 {
		t.Errorf("tools: %+v", got)
	}
	// A member that is no part of the prompt does not weigh.
	f = parse(t, Chat, `{"stream_options":{"x":[`+strings.Repeat("[],", maxContainers)+`0]},"metadata":[`+strings.Repeat("[],", maxContainers)+`0]}`)
	if got := f.PromptTokens(counter()); got != (tokens.Count{Tokens: replyTokens}) {
		t.Errorf("other members: %+v", got)
	}
}

func TestErrors(t *testing.T) {
	nest := func(n int) string { return `{"a":` + strings.Repeat("[", n-1) + strings.Repeat("]", n-1) + `}` }
	objects := func(n int) string { return strings.Repeat(`{"a":`, n) + "0" + strings.Repeat("}", n) }
	cases := map[string]error{
		nest(maxDepth):                           nil,
		nest(maxDepth + 1):                       ErrDepth,
		objects(maxDepth):                        nil,
		objects(maxDepth + 1):                    ErrDepth,
		nest(1000):                               ErrDepth,
		nest(10_000):                             ErrDepth,
		objects(1_000_000):                       ErrDepth,
		strings.Repeat("[", 1000):                ErrSyntax, // not an object in the first place
		`{"a":` + strings.Repeat("[", 1_000_000): ErrDepth,
	}
	for _, s := range []string{
		"", " ", "[]", `"x"`, "5", "null", "true", "{", "}", `{"a"}`, `{"a":}`, `{"a":1,}`, `{,}`, `{"a":1 "b":2}`, `{"a":1}x`, `{"a":1}{}`,
		`{a:1}`, `{'a':1}`, `{"a":01}`, `{"a":+1}`, `{"a":1.}`, `{"a":.5}`, `{"a":1e}`, `{"a":-}`, `{"a":0x10}`, `{"a":NaN}`, `{"a":Infinity}`,
		`{"a":tru}`, `{"a":nul`, `{"a":True}`, `{"a":"\x"}`, `{"a":"\u12g4"}`, `{"a":"\u123`, `{"a":"`, `{"a":"\`, "{\"a\":\"\n\"}", "{\"a\n\":1}",
		`{"a":[1,]}`, `{"a":[,1]}`, `{"a":[1 2]}`, `{"a":[}`, `{"a":[1}}`, `{"a":{"b":1]}`, `{"a":{"b"}}`, `{"a":{1:2}}`, `{"a":[1`, `{"a":1`, `{"a":1,`,
		`{"a" 1}`, "\ufeff{}", "{}\x00", "{\"a\":1}\f", "{/* */}", `{"a":1}//`, "{\x00}", `{"model":"m","messages":[`,
	} {
		cases[s] = ErrSyntax
	}
	for _, s := range []string{
		"{}", " {} ", `{"a":1}`, `{"a":-0.5e+10,"b":[],"c":{},"d":null,"e":[[],{}],"f":"\u0000\"\\\/\b\f\n\r\t"}`, "{\"a\":\"\xff\xfe\"}", `{"":""}`,
		`{"a":1,"a":2}`, `{"a":"` + strings.Repeat(`\\`, 1000) + `"}`, "{\"a\":\"\x7f\"}",
	} {
		cases[s] = nil
	}
	for body, want := range cases {
		p := Acquire()
		_, err := p.Parse(Chat, []byte(body))
		p.Release()
		if !errors.Is(err, want) {
			t.Errorf("%.60q: got %v, want %v", body, err, want)
		}
		if err != nil && len(err.Error()) > 100 {
			t.Errorf("%.60q: message quotes the body: %.200s", body, err)
		}
	}
}

func TestDuplicateKeys(t *testing.T) {
	for _, name := range fieldNames {
		escaped := fmt.Sprintf(`\u%04x`, name[0]) + name[1:]
		upper := fmt.Sprintf(`\u%04X`, name[0]) + name[1:]
		all := ""
		for _, c := range name {
			all += fmt.Sprintf(`\u%04x`, c)
		}
		spellings := []string{name, escaped, upper, all, strings.ToUpper(name), strings.ToUpper(name[:1]) + name[1:]}
		if strings.Contains(name, "s") {
			spellings = append(spellings, strings.Replace(name, "s", "ſ", 1), strings.Replace(name, "s", `\u017f`, 1))
		}
		if strings.Contains(name, "k") {
			spellings = append(spellings, strings.Replace(name, "k", "\u212a", 1))
		}
		for _, a := range spellings {
			for _, b := range []string{name, spellings[len(spellings)-1]} {
				for _, body := range []string{
					`{"` + a + `":1,"` + b + `":2}`, `{"` + b + `":null,"x":[{}],"` + a + `":null}`, `{"` + a + `":"x","` + b + `":"x"}`,
				} {
					p := Acquire()
					_, err := p.Parse(Chat, []byte(body))
					p.Release()
					if !errors.Is(err, ErrDuplicateKey) || !strings.Contains(err.Error(), `"`+name+`"`) {
						t.Errorf("%s: got %v", body, err)
					}
				}
			}
		}
	}
	// Other members may repeat, and so may all below the top level; names that only look alike are not the same.
	for _, body := range []string{
		`{"temperature":1,"temperature":2}`, `{"x":{"model":1,"model":2}}`, `{"model":"a","messages":[{"model":1,"model":1}]}`,
		`{"model":"a","models":"b","mode1":"c","model ":"d"}`, `{"model":"a","model\u0000":"b"}`, `{"n":1,"\u006e\u0303":1}`,
	} {
		parse(t, Chat, body)
	}
	if got := parse(t, Chat, `{"model":"a","models":"b","model\u0000":"c"}`).Model; got != "a" {
		t.Errorf("model %q", got)
	}
}

// Parsers come from a pool: what one request leaves behind must never show in another.
func TestConcurrentParsers(t *testing.T) {
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 300 {
				model, word := fmt.Sprintf("m%d", w), strings.Repeat("hello ", i%7+1)
				spelled := `\u0068` + word[1:]
				body := fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":[{"type":"text","text":"\u0068%s"}]}],"prompt_cache_key":"k%d"}`, model, word[1:], i)
				if i%3 == 0 {
					spelled = word
					body = fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":%q}],"n":2,"max_tokens":%d}`, model, word, i+1)
				}
				p := Acquire()
				f, err := p.Parse(Chat, []byte(body))
				if err != nil || f.Model != model || len(f.texts) != 1 || f.texts[0].S != spelled || (f.CacheKey == "") != (i%3 == 0) ||
					(f.MaxTokens != 0) != (i%3 == 0) {
					t.Errorf("worker %d, request %d: %+v, %v", w, i, f, err)
				}
				p.Release()
			}
		})
	}
	wg.Wait()
}
