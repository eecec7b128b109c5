// SPDX-License-Identifier: Apache-2.0

package bpe

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// hfDoc is a tokenizer file: all bytes, some merges, and parts that a test replaces.
func hfDoc(edit func(doc, model map[string]any)) string {
	vocab := map[string]int{}
	for r, b := range byteOf {
		vocab[string(r)] = int(b)
	}
	merges := []string{"a b", "ab c", "Ġ ab", "1 2", "12 3", "Ã ©"}
	for i, m := range merges {
		vocab[strings.ReplaceAll(m, " ", "")] = 256 + i
	}
	vocab["cab"] = 300
	model := map[string]any{"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": nil, "byte_fallback": false}
	doc := map[string]any{
		"version": "1.0", "normalizer": nil, "model": model,
		"pre_tokenizer": map[string]any{"type": "Sequence", "pretokenizers": []any{
			map[string]any{"type": "Split", "pattern": map[string]any{"Regex": regexCL100k}, "behavior": "Isolated", "invert": false},
			map[string]any{"type": "ByteLevel", "add_prefix_space": false, "use_regex": false},
		}},
	}
	if edit != nil {
		edit(doc, model)
	}
	data, err := json.Marshal(doc)
	if err != nil {
		panic(err)
	}
	return string(data)
}

func splits(regexes ...string) any {
	var parts []any
	for _, r := range regexes {
		parts = append(parts, map[string]any{"type": "Split", "pattern": map[string]any{"Regex": r}, "behavior": "Isolated", "invert": false})
	}
	parts = append(parts, map[string]any{"type": "ByteLevel", "add_prefix_space": false, "use_regex": false})
	return map[string]any{"type": "Sequence", "pretokenizers": parts}
}

func TestLoad(t *testing.T) {
	counts := func(want map[string]int, edit func(doc, model map[string]any)) {
		t.Helper()
		e, err := Load(strings.NewReader(hfDoc(edit)))
		if err != nil {
			t.Fatal(err)
		}
		for text, n := range want {
			if got := e.Count(text); got != n {
				t.Errorf("%q: %d, want %d", text, got, n)
			}
		}
	}
	counts(map[string]int{"abc": 1, "abcab": 2, " ab": 1, " abc": 2, "123": 1, "1234": 2, "é": 1, "e\u0301": 3, "cab": 2, "xyz": 3, "": 0, "中": 3}, nil)
	counts(map[string]int{"cab": 1, "abcab": 2}, func(_, m map[string]any) { m["ignore_merges"] = true })
	counts(map[string]int{"e\u0301": 1, "é": 1, "ab\u0301": 3}, func(d, _ map[string]any) { d["normalizer"] = map[string]any{"type": "NFC"} })
	counts(map[string]int{"123": 3, "abc": 1}, func(d, _ map[string]any) { d["pre_tokenizer"] = splits(regexQwen2) })
	counts(map[string]int{"abcABC": 4}, func(d, _ map[string]any) { d["pre_tokenizer"] = splits(regexO200k) })
	counts(map[string]int{"1234": 2, "a  1": 4}, func(d, _ map[string]any) {
		d["pre_tokenizer"] = splits(regexDeepSeek1, regexDeepSeek2, regexDeepSeek3)
	})
	counts(map[string]int{"1234": 2, " ab": 1}, func(d, _ map[string]any) {
		d["pre_tokenizer"] = map[string]any{"type": "ByteLevel", "add_prefix_space": false, "use_regex": true}
	})
	counts(map[string]int{"abc": 1}, func(_, m map[string]any) {
		m["merges"] = [][2]string{{"a", "b"}, {"ab", "c"}}
	})
	// A rule before those of its halves takes its turn as soon as they are there.
	counts(map[string]int{"abc": 1, "xabcx": 3}, func(_, m map[string]any) { m["merges"] = []string{"ab c", "a b"} })
}

func TestLoadRefuses(t *testing.T) {
	for part, edit := range map[string]func(doc, model map[string]any){
		"no model":                        func(d, _ map[string]any) { delete(d, "model") },
		"normalizer":                      func(d, _ map[string]any) { d["normalizer"] = map[string]any{"type": "Lowercase"} },
		"model.type":                      func(_, m map[string]any) { m["type"] = "Unigram" },
		"model.byte_fallback":             func(_, m map[string]any) { m["byte_fallback"] = true },
		"model.dropout":                   func(_, m map[string]any) { m["dropout"] = 0.1 },
		"model.end_of_word_suffix":        func(_, m map[string]any) { m["end_of_word_suffix"] = "</w>" },
		"model.continuing_subword_prefix": func(_, m map[string]any) { m["continuing_subword_prefix"] = "##" },
		"pre_tokenizer: none":             func(d, _ map[string]any) { d["pre_tokenizer"] = nil },
		"split pattern":                   func(d, _ map[string]any) { d["pre_tokenizer"] = splits(`\w+|\s+`) },
		"Metaspace":                       func(d, _ map[string]any) { d["pre_tokenizer"] = map[string]any{"type": "Metaspace"} },
		"add_prefix_space":                func(d, _ map[string]any) { d["pre_tokenizer"] = map[string]any{"type": "ByteLevel"} },
		"is not in the vocabulary":        func(_, m map[string]any) { m["merges"] = []string{"a x"} },
		"no token for byte 0x61":          func(_, m map[string]any) { delete(m["vocab"].(map[string]int), "a") },
		"is not two tokens":               func(_, m map[string]any) { m["merges"] = []string{"a b c"} },
		"come before their halves and over": func(_, m map[string]any) {
			v := m["vocab"].(map[string]int)
			v["aba"] = 400
			m["merges"] = []string{"ab a", "a b"}
		},
	} {
		_, err := Load(strings.NewReader(hfDoc(edit)))
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%s: got %v", part, err)
		}
	}
	if _, err := Load(strings.NewReader("{")); err == nil {
		t.Error("half a file is read")
	}
	if _, err := LoadFile(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

func TestNewRefuses(t *testing.T) {
	all := func() map[string]int {
		m := map[string]int{}
		for b := range 256 {
			m[string([]byte{byte(b)})] = b
		}
		return m
	}
	for want, edit := range map[string]func(m map[string]int){
		"255 of the 256":          func(m map[string]int) { delete(m, "x") },
		"two tokens of rank":      func(m map[string]int) { m["ab"], m["cd"] = 300, 300 },
		"an empty token":          func(m map[string]int) { m[""] = 300 },
		"comes before its halves": func(m map[string]int) { m["abc"], m["ab"] = 300, 301 },
		"a token of 1024 bytes": func(m map[string]int) {
			for n, s := 0, "a"; n < 4; n++ {
				s += s
				m[s] = 300 + n
			}
			for n := 32; n <= 2000; n += 16 {
				m[strings.Repeat("a", n)] = 300 + n
			}
		},
	} {
		m := all()
		edit(m)
		if _, err := New(m, CL100k); !errors.Is(err, ErrVocabulary) || !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%s: got %v", want, err)
		}
	}
	if _, err := New(all(), 0); err == nil {
		t.Error("no pattern, and no error")
	}
}
