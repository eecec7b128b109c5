// SPDX-License-Identifier: Apache-2.0

package request

import (
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func fp(t testing.TB, api API, body string) uint64 {
	t.Helper()
	return parse(t, api, body).Fingerprint
}

func TestFingerprintOfAChat(t *testing.T) {
	const system = `{"role":"system","content":"you are terse"}`
	chat := func(model, tools string, messages ...string) string {
		return `{"model":"` + model + `","tools":[` + tools + `],"messages":[` + strings.Join(messages, ",") + `]}`
	}
	user := func(s string) string { return `{"role":"user","content":"` + s + `"}` }
	first := fp(t, Chat, chat("m", "", system, user("hi")))
	if first == 0 {
		t.Fatal("no fingerprint")
	}
	for name, body := range map[string]string{
		"again":            chat("m", "", system, user("hi")),
		"second turn":      chat("m", "", system, user("hi"), `{"role":"assistant","content":"hello"}`, user("more")),
		"two users":        chat("m", "", system, user("hi"), user("and")),
		"later system":     chat("m", "", system, user("hi"), `{"role":"system","content":"be nice"}`, user("x")),
		"tool turn":        chat("m", "", system, user("hi"), `{"role":"assistant","tool_calls":[{"function":{"name":"f"}}]}`, `{"role":"tool","content":"x"}`),
		"parts":            chat("m", "", system, `{"role":"user","content":[{"type":"text","text":"hi","cache_control":{"type":"ephemeral"}}]}`),
		"other spelling":   `{"messages":[` + system + `,{"content":"\u0068i","role":"user"}],"stream":true,"tools":[],"max_tokens":5,"model":"m"}`,
		"greeting first":   chat("m", "", system, `{"role":"assistant","content":"welcome"}`, user("hi")),
		"empty user first": chat("m", "", system, user("hi"), user("")),
	} {
		if got := fp(t, Chat, body); got != first {
			t.Errorf("%s: another fingerprint", name)
		}
	}
	for name, body := range map[string]string{
		"other user":           chat("m", "", system, user("ho")),
		"other model":          chat("n", "", system, user("hi")),
		"other system":         chat("m", "", `{"role":"system","content":"you are verbose"}`, user("hi")),
		"no system":            chat("m", "", user("hi")),
		"tools":                chat("m", `{"type":"function","function":{"name":"f"}}`, system, user("hi")),
		"system said by user":  chat("m", "", `{"role":"user","content":"you are terse"}`, user("hi")),
		"text moved":           chat("m", "", `{"role":"system","content":"you are tersehi"}`, user("")),
		"first turn elsewhere": chat("m", "", system, user("ho"), user("hi")),
		"image":                chat("m", "", system, `{"role":"user","content":[{"type":"text","text":"hi"},{"type":"image_url","image_url":{"url":"http://a"}}]}`),
		"other image":          chat("m", "", system, `{"role":"user","content":[{"type":"text","text":"hi"},{"type":"image_url","image_url":{"url":"http://b"}}]}`),
	} {
		if got := fp(t, Chat, body); got == first {
			t.Errorf("%s: the same fingerprint", name)
		}
	}
	image := func(url string) uint64 {
		return fp(t, Chat, chat("m", "", `{"role":"user","content":[{"type":"image_url","image_url":{"url":"`+url+`"}}]}`))
	}
	if image("http://a") == image("http://b") || image("http://a") == 0 {
		t.Error("two pictures make one conversation")
	}
	for name, body := range map[string]string{
		"only system":      chat("m", "", system),
		"only empty users": chat("m", "", system, user(""), `{"role":"user","content":null}`, `{"role":"user","content":[]}`),
		"only assistant":   chat("m", "", `{"role":"assistant","content":"hello"}`),
		"no messages":      `{"model":"m"}`,
	} {
		if got := fp(t, Chat, body); got != 0 {
			t.Errorf("%s: a fingerprint", name)
		}
	}
}

// Whatever is appended, a conversation keeps its fingerprint; and two that start otherwise never share one.
func TestFingerprintIsStable(t *testing.T) {
	text := rapid.StringMatching(`[a-z "\\é]{1,20}`)
	message := rapid.Custom(func(t *rapid.T) string {
		role := rapid.SampledFrom([]string{"system", "user", "assistant", "tool", "developer"}).Draw(t, "role")
		return fmt.Sprintf(`{"role":%q,"content":%q}`, role, text.Draw(t, "text"))
	})
	rapid.Check(t, func(t *rapid.T) {
		join := func(api API, start string, messages []string) string {
			switch api {
			case Messages:
				return `{"model":"m","system":"s","messages":[` + strings.Join(append([]string{start}, messages...), ",") + `]}`
			case Responses:
				return `{"model":"m","instructions":"s","input":[` + strings.Join(append([]string{start}, messages...), ",") + `]}`
			}
			return `{"model":"m","messages":[{"role":"system","content":"s"},` + strings.Join(append([]string{start}, messages...), ",") + `]}`
		}
		api := rapid.SampledFrom([]API{Chat, Messages, Responses}).Draw(t, "api")
		a, b := text.Draw(t, "a"), text.Draw(t, "b")
		p := Acquire()
		defer p.Release()
		get := func(body string) uint64 {
			f, err := p.Parse(api, []byte(body))
			if err != nil {
				t.Fatalf("%s: %v", body, err)
			}
			return f.Fingerprint
		}
		startA, startB := fmt.Sprintf(`{"role":"user","content":%q}`, a), fmt.Sprintf(`{"role":"user","content":%q}`, b)
		later := rapid.SliceOf(message).Draw(t, "later")
		first := get(join(api, startA, nil))
		if first == 0 || get(join(api, startA, later)) != first {
			t.Fatalf("not stable: %s", join(api, startA, later))
		}
		if (get(join(api, startB, later)) == first) != (a == b) {
			t.Fatalf("%q and %q", a, b)
		}
	})
}

func TestFingerprintOfOtherAPIs(t *testing.T) {
	long := strings.Repeat("once upon a time ", 100)
	ids := strings.TrimSuffix(strings.Repeat("12345,", 300), ",")
	for _, tc := range []struct {
		name string
		api  API
		a, b string
		same bool // both are the same and not 0; otherwise they differ
	}{
		{"anthropic", Messages, `{"model":"m","system":"s","messages":[{"role":"user","content":"hi"}]}`,
			`{"messages":[{"role":"user","content":[{"type":"text","text":"hi"}]},{"role":"assistant","content":"x"}],"model":"m","system":[{"type":"text","text":"s"}]}`, true},
		{"anthropic system", Messages, `{"system":"s","messages":[{"role":"user","content":"hi"}]}`,
			`{"system":"t","messages":[{"role":"user","content":"hi"}]}`, false},
		{"anthropic tool result", Messages, `{"messages":[{"role":"user","content":[{"type":"tool_result","content":"a"}]}]}`,
			`{"messages":[{"role":"user","content":[{"type":"tool_result","content":"b"}]}]}`, false},
		{"responses", Responses, `{"input":"hi","instructions":"s"}`,
			`{"input":[{"role":"user","content":"hi"},{"type":"reasoning","summary":[]},{"role":"user","content":"more"}],"instructions":"s"}`, true},
		{"responses input", Responses, `{"input":"hi"}`, `{"input":"ho"}`, false},
		{"completions", Completions, `{"model":"m","prompt":"` + long + `"}`, `{"model":"m","prompt":["` + long + ` and more"]}`, true},
		{"completions model", Completions, `{"model":"m","prompt":"` + long + `"}`, `{"model":"n","prompt":"` + long + `"}`, false},
		{"completions prompt", Completions, `{"prompt":"` + long + `"}`, `{"prompt":"x` + long + `"}`, false},
		{"completions ids", Completions, `{"prompt":[` + ids + `]}`, `{"prompt":[` + ids + `,7]}`, true},
		{"completions other ids", Completions, `{"prompt":[` + ids + `]}`, `{"prompt":[1,` + ids + `]}`, false},
	} {
		a, b := fp(t, tc.api, tc.a), fp(t, tc.api, tc.b)
		if a == 0 || b == 0 || (a == b) != tc.same {
			t.Errorf("%s: %x and %x, same should be %v", tc.name, a, b, tc.same)
		}
	}
	for name, body := range map[string]string{
		"short prompt":  `{"prompt":"hi"}`,
		"several":       `{"prompt":["` + long + `","` + long + `"]}`,
		"no prompt":     `{"model":"m"}`,
		"null":          `{"prompt":null}`,
		"lists of ids":  `{"prompt":[[` + ids + `],[` + ids + `]]}`,
		"one short one": `{"prompt":["hi"]}`,
	} {
		if got := fp(t, Completions, body); got != 0 {
			t.Errorf("completions, %s: a fingerprint", name)
		}
	}
	for name, body := range map[string]string{
		"previous response": `{"input":"hi","previous_response_id":"resp_1"}`,
		"conversation":      `{"input":"hi","conversation":{"id":"c"}}`,
		"nothing":           `{"input":[]}`,
		"instructions only": `{"instructions":"s"}`,
	} {
		if got := fp(t, Responses, body); got != 0 {
			t.Errorf("responses, %s: a fingerprint", name)
		}
	}
	if fp(t, Responses, `{"input":"hi","previous_response_id":null}`) == 0 {
		t.Error("responses, no previous response: no fingerprint")
	}
	if fp(t, Embeddings, `{"input":"`+long+`"}`) != 0 || fp(t, Other, `{"messages":[{"role":"user","content":"hi"}]}`) != 0 {
		t.Error("a fingerprint where there is no conversation")
	}
}
