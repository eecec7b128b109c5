// SPDX-License-Identifier: Apache-2.0

package tokens

import (
	"errors"
	"strings"
	"sync"
	"testing"
)

func newCounter(t testing.TB, o Options) *Counter {
	t.Helper()
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func encoder(t testing.TB, name string, o Options) *Encoder {
	t.Helper()
	e, err := newCounter(t, o).Encoding(name)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func TestFor(t *testing.T) {
	c := newCounter(t, Options{Models: map[string]string{
		"house":          CL100kBase,
		"house-*":        O200kHarmony,
		"house-old*":     CL100kBase,
		"gpt-4o-legacy":  CL100kBase,
		"mistralai/*":    CL100kBase,
		"qwen3-exact":    CL100kBase,
		"deepseek-coder": CL100kBase,
	}})
	for model, want := range map[string]string{
		"":                                      O200kBase,
		"gpt-5":                                 O200kBase,
		"gpt-5-mini-2025-08-07":                 O200kBase,
		"o1":                                    O200kBase,
		"o3-mini":                               O200kBase,
		"o4-mini":                               O200kBase,
		"gpt-4o":                                O200kBase,
		"gpt-4o-mini-2024-07-18":                O200kBase,
		"chatgpt-4o-latest":                     O200kBase,
		"gpt-4.1-nano":                          O200kBase,
		"gpt-4.5-preview":                       O200kBase,
		"gpt-oss-120b":                          O200kBase,
		"openai/gpt-oss-20b":                    O200kBase,
		"ft:gpt-4o-mini-2024-07-18:acme::abc":   O200kBase,
		"gpt-4":                                 CL100kBase,
		"gpt-4-32k":                             CL100kBase,
		"gpt-4-turbo-2024-04-09":                CL100kBase,
		"gpt-3.5-turbo":                         CL100kBase,
		"gpt-35-turbo-16k":                      CL100kBase,
		"ft:gpt-3.5-turbo-0125:acme:suffix:abc": CL100kBase,
		"openai/gpt-4":                          CL100kBase,
		"text-embedding-3-large":                CL100kBase,
		"text-embedding-ada-002":                CL100kBase,
		"llama-3.1-8b-instruct":                 O200kBase,
		"meta-llama/Llama-3.1-8B-Instruct":      O200kBase,
		"Qwen/Qwen3-32B":                        O200kBase,
		"o1xyz":                                 O200kBase,
		"house":                                 CL100kBase,
		"house-new":                             O200kBase,
		"house-old-1":                           CL100kBase,
		"ft:house:acme::1":                      CL100kBase,
		"gpt-4o-legacy":                         CL100kBase,
		"mistralai/Mistral-7B":                  CL100kBase,
		"someone/qwen3-exact":                   CL100kBase,
		"qwen3-exact-not":                       O200kBase,
		"ft:":                                   O200kBase,
		"/":                                     O200kBase,
		strings.Repeat("gpt-4", 1000):           CL100kBase,
		"text-davinci-003-unknown-to-this-binary": O200kBase,
	} {
		if got := c.For(model).Name(); got != want {
			t.Errorf("For(%.60q) = %s, want %s", model, got, want)
		}
	}

	c = newCounter(t, Options{Default: CL100kBase})
	for model, want := range map[string]string{
		"llama": CL100kBase, "": CL100kBase, "o1xyz": CL100kBase,
		"gpt-4o": O200kBase, "o1-preview": O200kBase, "o3": O200kBase, "gpt-oss:20b": O200kBase,
	} {
		if got := c.For(model).Name(); got != want {
			t.Errorf("default cl100k_base: For(%q) = %s, want %s", model, got, want)
		}
	}
}

func TestErrors(t *testing.T) {
	for name, o := range map[string]Options{
		"default": {Default: "p50k_base"},
		"model":   {Models: map[string]string{"m": "nope"}},
	} {
		_, err := New(o)
		if !errors.Is(err, ErrUnknownEncoding) || !strings.Contains(err.Error(), "cl100k_base, o200k_base, o200k_harmony") {
			t.Errorf("%s: got %v, want ErrUnknownEncoding with the known names", name, err)
		}
	}
	for _, pattern := range []string{"", "a*b", "**", "a**"} {
		if _, err := New(Options{Models: map[string]string{pattern: CL100kBase}}); !errors.Is(err, ErrBadPattern) {
			t.Errorf("pattern %q: got %v, want ErrBadPattern", pattern, err)
		}
	}
	if _, err := newCounter(t, Options{}).Encoding("gpt-4"); !errors.Is(err, ErrUnknownEncoding) {
		t.Errorf("got %v", err)
	}
	for _, name := range Encodings() {
		if _, err := newCounter(t, Options{}).Encoding(name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The counts are those of OpenAI's tiktoken in Python, as published with tiktoken-go's test results and in OpenAI's cookbook.
func TestKnownCounts(t *testing.T) {
	c := newCounter(t, Options{})
	for _, tc := range []struct {
		text          string
		cl100k, o200k int
	}{
		{"", 0, 0},
		{"tiktoken is great!", 6, 6},
		{"antidisestablishmentarianism", 6, 6},
		{"2 + 2 = 4", 7, 7},
		{"お誕生日おめでとう", 9, 8},
		{"hallo world!", 4, 4},
		{"你好世界！", 6, 3},
		{"こんにちは世界！", 5, 3},
		{"안녕하세요 세계!", 10, 4},
		{"Привет мир!", 6, 4},
		{"Hej världen!", 7, 3},
	} {
		for name, want := range map[string]int{CL100kBase: tc.cl100k, O200kBase: tc.o200k} {
			e, err := c.Encoding(name)
			if err != nil {
				t.Fatal(err)
			}
			if got := e.Count(tc.text); got != (Count{Tokens: want}) {
				t.Errorf("%s %q: got %+v, want %d", name, tc.text, got, want)
			}
			if got := e.CountBytes([]byte(tc.text)); got.Tokens != want {
				t.Errorf("%s %q as bytes: got %+v, want %d", name, tc.text, got, want)
			}
		}
	}
}

// A special token's spelling in a text is plain text: it neither panics nor counts as one token.
func TestSpecialTokensAreText(t *testing.T) {
	c := newCounter(t, Options{})
	for _, name := range []string{CL100kBase, O200kBase} {
		e, _ := c.Encoding(name)
		for _, text := range []string{
			"<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|endofprompt|>", "<|im_start|>",
			"<|start|>", "<|message|>", "<|channel|>",
		} {
			if got := e.Count(text); got.Tokens < 3 || got.Estimated {
				t.Errorf("%s %s: got %+v, want the tokens of plain text", name, text, got)
			}
		}
		if one, many := e.Count("<|endoftext|>").Tokens, e.Count(strings.Repeat("<|endoftext|>", 200)).Tokens; many < 150*(one-2) {
			t.Errorf("%s: %d tokens for 200 times a text of %d", name, many, one)
		}
	}
}

func TestInvalidUTF8(t *testing.T) {
	for _, name := range []string{CL100kBase, O200kBase} {
		e := encoder(t, name, Options{CacheEntries: -1})
		for _, text := range []string{
			"\xff", "a\xffb", "\xe4\xbd", strings.Repeat("\xff", 3000), strings.Repeat("\x80", 3000) + "x",
			strings.Repeat("\xf0\x9f", 20000), "\xed\xa0\x80", string([]byte{0, 1, 2, 0xfe}),
		} {
			want := e.encode(string([]rune(text)))
			if got := e.Count(text); got != want || want.Tokens == 0 {
				t.Errorf("%s %.20q: got %+v, want %+v", name, text, got, want)
			}
		}
		if got, want := e.Count("a\xff\xfeb"), e.Count("a\uFFFD\uFFFDb"); got != want {
			t.Errorf("%s: got %+v, want %+v as for U+FFFD", name, got, want)
		}
	}
}

func TestConcurrentUse(t *testing.T) {
	e := encoder(t, O200kBase, Options{CacheEntries: 4})
	texts := []string{"the quick brown fox", "jumps over the lazy dog", "shunt is a load balancer", "a b c d e f g h",
		"tokens in flight", "round and round it goes", "one more text here", "and the last of them"}
	want := make([]Count, len(texts))
	for i, s := range texts {
		want[i] = e.encode(s)
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i := range 400 {
				if got := e.Count(texts[i%len(texts)]); got != want[i%len(texts)] {
					t.Errorf("%q: got %+v, want %+v", texts[i%len(texts)], got, want[i%len(texts)])
					return
				}
			}
		})
	}
	wg.Wait()
}
