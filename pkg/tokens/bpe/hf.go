// SPDX-License-Identifier: Apache-2.0

package bpe

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"unicode/utf8"
)

// ErrUnsupported: a part of a tokenizer file is not one that this package can count with exactly. The error names the part.
var ErrUnsupported = errors.New("unsupported tokenizer")

// LoadFile is Load for a file.
func LoadFile(path string) (*Encoding, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	e, err := Load(f)
	if err != nil {
		return nil, fmt.Errorf("load %s: %w", path, err)
	}
	return e, nil
}

// Load reads a Hugging Face tokenizer.json: a byte-level BPE model behind one of the split patterns of this package, with or
// without NFC before it. Added tokens are no tokens here: their spelling in a text counts as the plain text that it is. What
// adds tokens around a text (post_processor) or shortens it (truncation, padding) is left out, as it depends on the call.
// Anything else that would change a count is refused with an error that names it.
func Load(r io.Reader) (*Encoding, error) {
	data, err := io.ReadAll(r)
	if err != nil {
		return nil, err
	}
	var f hfFile
	if err := json.Unmarshal(data, &f); err != nil {
		return nil, fmt.Errorf("read tokenizer: %w", err)
	}
	if f.Model == nil {
		return nil, fmt.Errorf("%w: no model: not a tokenizer.json", ErrUnsupported)
	}
	nfc, err := normalizer(f.Normalizer, "normalizer")
	if err != nil {
		return nil, err
	}
	pattern, err := preTokenizer(f.PreTokenizer)
	if err != nil {
		return nil, err
	}
	if err := f.Model.check(); err != nil {
		return nil, err
	}
	e, err := f.Model.build(pattern)
	if err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	e.nfc = nfc
	return e, nil
}

type hfFile struct {
	Normalizer   json.RawMessage `json:"normalizer"`
	PreTokenizer json.RawMessage `json:"pre_tokenizer"`
	Model        *hfModel        `json:"model"`
}

type hfModel struct {
	Type         string            `json:"type"`
	Dropout      *float64          `json:"dropout"`
	Prefix       *string           `json:"continuing_subword_prefix"`
	Suffix       *string           `json:"end_of_word_suffix"`
	ByteFallback bool              `json:"byte_fallback"`
	IgnoreMerges bool              `json:"ignore_merges"`
	Vocab        map[string]uint32 `json:"vocab"`
	Merges       hfMerges          `json:"merges"`
}

// hfMerges are pairs, written as ["a", "b"] or, formerly, as "a b".
type hfMerges [][2]string

func (m *hfMerges) UnmarshalJSON(data []byte) error {
	if i := bytes.IndexAny(data, `"`); i >= 0 && bytes.Count(data[:i], []byte{'['}) > 1 {
		var pairs [][2]string
		if err := json.Unmarshal(data, &pairs); err != nil {
			return err
		}
		*m = pairs
		return nil
	}
	var lines []string
	if err := json.Unmarshal(data, &lines); err != nil {
		return err
	}
	*m = make(hfMerges, len(lines))
	for i, l := range lines {
		left, right, ok := strings.Cut(l, " ")
		if !ok || strings.Contains(right, " ") {
			return fmt.Errorf("merge %d: %q is not two tokens", i, l)
		}
		(*m)[i] = [2]string{left, right}
	}
	return nil
}

func isNull(raw json.RawMessage) bool { return len(raw) == 0 || string(raw) == "null" }

// normalizer reports whether NFC is asked for, and refuses all else.
func normalizer(raw json.RawMessage, at string) (nfc bool, err error) {
	if isNull(raw) {
		return false, nil
	}
	var n struct {
		Type        string            `json:"type"`
		Normalizers []json.RawMessage `json:"normalizers"`
	}
	if err := json.Unmarshal(raw, &n); err != nil {
		return false, fmt.Errorf("read %s: %w", at, err)
	}
	switch n.Type {
	case "NFC":
		return true, nil
	case "Sequence":
		for i, part := range n.Normalizers {
			one, err := normalizer(part, fmt.Sprintf("%s.normalizers[%d]", at, i))
			if err != nil {
				return false, err
			}
			nfc = nfc || one
		}
		return nfc, nil
	}
	return false, fmt.Errorf("%w: %s: %q is not NFC", ErrUnsupported, at, n.Type)
}

type hfPreTokenizer struct {
	Type          string            `json:"type"`
	PreTokenizers []json.RawMessage `json:"pretokenizers"`
	Pattern       struct {
		Regex  *string `json:"Regex"`
		String *string `json:"String"`
	} `json:"pattern"`
	Behavior       string `json:"behavior"`
	Invert         bool   `json:"invert"`
	AddPrefixSpace *bool  `json:"add_prefix_space"` // the default is true
	UseRegex       *bool  `json:"use_regex"`        // the default is true
}

// The regular expressions as tokenizer files spell them.
const (
	regexCL100k = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	regexQwen2  = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	regexO200k  = `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	regexGPT2   = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`

	regexDeepSeek1 = `\p{N}{1,3}`
	regexDeepSeek2 = `[一-龥぀-ゟ゠-ヿ]+`
	regexDeepSeek3 = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)

var splitSequences = []struct {
	pattern Pattern
	splits  []string
}{
	{CL100k, []string{regexCL100k}},
	{Qwen2, []string{regexQwen2}},
	{O200k, []string{regexO200k}},
	{GPT2, []string{regexGPT2}},
	{DeepSeek, []string{regexDeepSeek1, regexDeepSeek2, regexDeepSeek3}},
}

// preTokenizer finds the pattern that a file's pre-tokenizer stands for.
func preTokenizer(raw json.RawMessage) (Pattern, error) {
	const at = "pre_tokenizer"
	if isNull(raw) {
		return 0, fmt.Errorf("%w: %s: none: not a byte-level tokenizer", ErrUnsupported, at)
	}
	var top hfPreTokenizer
	if err := json.Unmarshal(raw, &top); err != nil {
		return 0, fmt.Errorf("read %s: %w", at, err)
	}
	parts := []hfPreTokenizer{top}
	if top.Type == "Sequence" {
		parts = make([]hfPreTokenizer, len(top.PreTokenizers))
		for i, p := range top.PreTokenizers {
			if err := json.Unmarshal(p, &parts[i]); err != nil {
				return 0, fmt.Errorf("read %s.pretokenizers[%d]: %w", at, i, err)
			}
		}
	}
	var splits []string
	gaps := true // what the pattern does not match is kept
	for i, p := range parts {
		here := fmt.Sprintf("%s.pretokenizers[%d]", at, i)
		last := i == len(parts)-1
		switch {
		case p.Type == "ByteLevel" && last:
			if p.AddPrefixSpace == nil || *p.AddPrefixSpace {
				return 0, fmt.Errorf("%w: %s: add_prefix_space", ErrUnsupported, here)
			}
			if p.UseRegex == nil || *p.UseRegex {
				splits = append(splits, regexGPT2)
			}
		case p.Type == "Split" && !last:
			if p.Pattern.Regex == nil {
				return 0, fmt.Errorf("%w: %s: a pattern that is no regular expression", ErrUnsupported, here)
			}
			switch {
			case p.Behavior == "Isolated" && !p.Invert:
			case p.Behavior == "Removed" && p.Invert:
				gaps = false
			default:
				return 0, fmt.Errorf("%w: %s: behavior %q, invert %v", ErrUnsupported, here, p.Behavior, p.Invert)
			}
			// Files spell line ends both as escapes and as they are.
			splits = append(splits, strings.NewReplacer("\r", `\r`, "\n", `\n`).Replace(*p.Pattern.Regex))
		default:
			return 0, fmt.Errorf("%w: %s: type %q at this place", ErrUnsupported, here, p.Type)
		}
	}
	for _, s := range splitSequences {
		// The patterns but DeepSeek's match every character, so that there are no gaps.
		if slices.Equal(s.splits, splits) && (gaps || s.pattern != DeepSeek) {
			return s.pattern, nil
		}
	}
	return 0, fmt.Errorf("%w: %s: split pattern %q", ErrUnsupported, at, splits)
}

func (m *hfModel) check() error {
	switch {
	case m.Type != "BPE" && m.Type != "":
		return fmt.Errorf("%w: model.type: %q is not BPE", ErrUnsupported, m.Type)
	case m.Dropout != nil && *m.Dropout != 0:
		return fmt.Errorf("%w: model.dropout: %v", ErrUnsupported, *m.Dropout)
	case m.Prefix != nil && *m.Prefix != "":
		return fmt.Errorf("%w: model.continuing_subword_prefix: %q", ErrUnsupported, *m.Prefix)
	case m.Suffix != nil && *m.Suffix != "":
		return fmt.Errorf("%w: model.end_of_word_suffix: %q", ErrUnsupported, *m.Suffix)
	case m.ByteFallback:
		return fmt.Errorf("%w: model.byte_fallback", ErrUnsupported)
	}
	return nil
}

// byteOf maps the characters by which a byte-level vocabulary spells bytes: those that print as themselves, the others
// from U+0100 on in order.
var byteOf = func() map[rune]byte {
	m := make(map[rune]byte, 256)
	next := rune(0x100)
	for b := range 256 {
		r := rune(b)
		if b < '!' || b > '~' && b < 0xa1 || b == 0xad {
			r = next
			next++
		}
		m[r] = byte(b)
	}
	return m
}()

func spelledBytes(s string) (string, bool) {
	b := make([]byte, 0, len(s))
	for _, r := range s {
		c, ok := byteOf[r]
		if !ok {
			return "", false
		}
		b = append(b, c)
	}
	return string(b), true
}

func (m *hfModel) build(p Pattern) (*Encoding, error) {
	b, err := newBuilder(p, max(len(m.Vocab), len(m.Merges)/2))
	if err != nil {
		return nil, err
	}
	b.e.rules.longS = p != GPT2
	ids := make(map[string]uint32, len(m.Vocab)) // of what merges reach, as the file spells it
	for r, c := range byteOf {
		if _, ok := m.Vocab[string(r)]; !ok {
			return nil, fmt.Errorf("%w: vocab: no token for byte 0x%02x", ErrUnsupported, c)
		}
		ids[string(r)] = uint32(c)
	}
	// A rule whose halves are the work of later rules takes its turn as soon as both are there: it waits for them by name.
	waiting := make(map[string][]int)
	var apply func(i int) error
	apply = func(i int) error {
		mg := m.Merges[i]
		t := mg[0] + mg[1]
		if _, done := ids[t]; done {
			return nil
		}
		for _, half := range mg {
			if _, ok := ids[half]; !ok {
				waiting[half] = append(waiting[half], i)
				return nil
			}
		}
		left, right := ids[mg[0]], ids[mg[1]]
		text, ok := spelledBytes(t)
		if !ok {
			return fmt.Errorf("%w: merges[%d]: %q is not byte-level", ErrUnsupported, i, t)
		}
		id := b.merge(text, left, right)
		if id == none {
			return nil
		}
		ids[t] = id
		rules := waiting[t]
		delete(waiting, t)
		slices.Sort(rules)
		for _, j := range rules {
			// Where the rule's right half is the left half of t, another t may stand there, and which of the two rules
			// comes first depends on the place.
			if mg := m.Merges[j]; mg[0] == t && ids[mg[1]] == left {
				if _, ok := ids[mg[1]]; ok && b.e.valid(id, left, &b.work) {
					return fmt.Errorf("%w: merges[%d]: %q and %q come before their halves and overlap", ErrUnsupported, j, mg[0], mg[1])
				}
			}
			if err := apply(j); err != nil {
				return err
			}
		}
		return nil
	}
	for i, mg := range m.Merges {
		if _, ok := m.Vocab[mg[0]+mg[1]]; !ok {
			return nil, fmt.Errorf("%w: merges[%d]: %q is not in the vocabulary", ErrVocabulary, i, mg[0]+mg[1])
		}
		if err := apply(i); err != nil {
			return nil, err
		}
	}
	type token struct {
		text string
		id   uint32
	}
	tokens := make([]token, 0, len(ids))
	for t, id := range ids {
		text, ok := spelledBytes(t)
		if !ok {
			return nil, fmt.Errorf("%w: token %q is not byte-level", ErrUnsupported, t)
		}
		tokens = append(tokens, token{text, id})
	}
	if m.IgnoreMerges {
		for t := range m.Vocab {
			if _, reached := ids[t]; reached {
				continue
			}
			if text, ok := spelledBytes(t); ok && utf8.ValidString(text) {
				b.addWhole(text)
			}
		}
	}
	slices.SortFunc(tokens, func(a, b token) int { return strings.Compare(a.text, b.text) })
	texts, order := make([]string, len(tokens)), make([]uint32, len(tokens))
	for i, t := range tokens {
		texts[i], order[i] = t.text, t.id
	}
	return b.finish(texts, order)
}
