// SPDX-License-Identifier: Apache-2.0

package request

import "strings"

// Family is a family of models that render a chat in the same way.
type Family uint8

// The families. OpenAI is the default: its own models, those of gpt-oss, and every name that is not known.
const (
	OpenAI Family = iota
	Claude
	Llama3
	Qwen
	DeepSeek
	Gemma
	Mistral
)

// framing is what a family's chat template adds to the texts of a request, in tokens of its own vocabulary: OpenAI's from
// its cookbook, Llama3's, Qwen's, DeepSeek's and Gemma's measured by rendering the models' own templates.
type framing struct {
	name     string
	base     int // start of the text and of the answer
	message  int // around each message, its role included
	role     int // of message, the role's own name: not there if the role is counted as a text
	perName  int // negative: names are left out, text and all
	call     int // around a call of a tool
	tools    int // around all tools
	perTool  int
	asJSON   bool // tools are rendered as JSON, not as OpenAI does
	patterns []string
}

var framings = [...]framing{
	OpenAI:   {name: "openai", base: 3, message: 4, role: 1, perName: 1, call: 3, tools: 12, perTool: 7},
	Claude:   {name: "claude", base: 3, message: 4, role: 1, perName: -1, call: 3, tools: 12, perTool: 7, patterns: []string{"claude"}},
	Llama3:   {name: "llama3", base: 5, message: 5, role: 1, perName: -1, call: 8, tools: 60, perTool: 1, asJSON: true, patterns: []string{"llama-3", "llama3", "llama-4", "llama4"}},
	Qwen:     {name: "qwen", base: 3, message: 5, role: 1, perName: -1, call: 12, tools: 78, perTool: 1, asJSON: true, patterns: []string{"qwen", "qwq", "qvq"}},
	DeepSeek: {name: "deepseek", base: 1, message: 2, perName: -1, call: 8, tools: 60, perTool: 1, asJSON: true, patterns: []string{"deepseek"}},
	Gemma:    {name: "gemma", base: 4, message: 5, role: 1, perName: -1, call: 8, tools: 60, perTool: 1, asJSON: true, patterns: []string{"gemma"}},
	Mistral:  {name: "mistral", base: 1, message: 2, perName: -1, call: 8, tools: 4, perTool: 1, asJSON: true, patterns: []string{"mistral", "mixtral", "ministral", "codestral", "devstral", "magistral", "pixtral"}},
}

// functionTokensCL100k is what a function costs in models of cl100k_base, where others of OpenAI take perTool.
const functionTokensCL100k = 10

// String is the family's name.
func (f Family) String() string {
	if int(f) < len(framings) {
		return framings[f].name
	}
	return framings[OpenAI].name
}

// ParseFamily returns the family of that name, as String writes it.
func ParseFamily(name string) (Family, bool) {
	for i := range framings {
		if framings[i].name == name {
			return Family(i), true
		}
	}
	return OpenAI, false
}

// Families returns the names that ParseFamily takes.
func Families() []string {
	names := make([]string, len(framings))
	for i := range framings {
		names[i] = framings[i].name
	}
	return names
}

// FamilyOf goes by a model's name: the family whose name stands first in it, whatever the case, after the last slash. So
// DeepSeek-R1-Distill-Qwen-32B is a DeepSeek, whose template it has.
func FamilyOf(model string) Family {
	model = model[strings.LastIndexByte(model, '/')+1:]
	found, at := OpenAI, len(model)
	for f := range framings {
		for _, pattern := range framings[f].patterns {
			if i := indexFold(model[:min(len(model), at+len(pattern))], pattern); i >= 0 && i < at {
				found, at = Family(f), i
			}
		}
	}
	return found
}

// indexFold is strings.Index for a pattern in lower case, whatever the case of s.
func indexFold(s, pattern string) int {
	for i := 0; i+len(pattern) <= len(s); i++ {
		if c := s[i] | 0x20; c == pattern[0] && strings.EqualFold(s[i:i+len(pattern)], pattern) {
			return i
		}
	}
	return -1
}
