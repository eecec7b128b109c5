// SPDX-License-Identifier: Apache-2.0

package request

import "github.com/shunt-lb/shunt/pkg/tokens"

// Parts is what a request's prompt is made of, in tokens.
type Parts struct {
	Text    int `json:"text"`    // messages, instructions, prompts, inputs
	IDs     int `json:"ids"`     // what came as token ids
	Tools   int `json:"tools"`   // declared tools and functions
	Images  int `json:"images"`  //
	Media   int `json:"media"`   // audio, video and files
	Framing int `json:"framing"` // the chat template's own
	Unread  int `json:"unread"`  // estimated by bytes: there were too many values to walk
	// Estimated: some of it is not the encoding's own count, or the model reads something that is not in the body.
	Estimated bool `json:"estimated"`
}

// Count is the sum of the parts.
func (p Parts) Count() tokens.Count {
	return tokens.Count{Tokens: p.Text + p.IDs + p.Tools + p.Images + p.Media + p.Framing + p.Unread, Estimated: p.Estimated}
}

// PromptTokens counts what the model will have to read, in the encoding and the family of the request's model.
//
// Text is counted as it is. Framing and tools go by the family: OpenAI's as its cookbook documents them (3 tokens a message
// and one for its role, 1 a name, 3 for the answer's start; a function's parts line by line), the open models' as their
// templates render them (see Family). Token ids count as their number. An image counts by the size in its header and by the
// detail asked for, as OpenAI and Anthropic publish it and as Qwen's and Gemma's processors cut it; one of unknown size is
// taken for 1,024 by 1,024 pixels. Audio counts 500, video 2,000, a file or document 1,500. Estimated is true where any of
// the count is not the encoding's own: media, members too large to walk, what only the server knows (hosted tools, earlier
// turns that it keeps, encrypted reasoning), and the cases of package tokens.
func (f *Facts) PromptTokens(c *tokens.Counter) tokens.Count {
	return f.PromptTokensIn(c.For(f.Model))
}

// PromptTokensIn is PromptTokens in a given encoding.
func (f *Facts) PromptTokensIn(e *tokens.Encoder) tokens.Count {
	return f.Parts(e, FamilyOf(f.Model), f.Model).Count()
}

// Parts counts a prompt part by part, as for a model of a family. Like PromptTokens it must not be called on one Facts by
// two goroutines at once.
func (f *Facts) Parts(e *tokens.Encoder, family Family, model string) Parts {
	fr := &framings[family]
	p := Parts{IDs: f.ids, Media: f.media, Unread: (f.unwalked + 3) / 4}
	texts := f.texts
	p.Framing = f.messages*fr.message - f.oddRoles*fr.role + f.calls*fr.call
	if f.chat {
		p.Framing += fr.base
	}
	if fr.perName >= 0 && len(f.names) > 0 {
		p.Framing += fr.perName * len(f.names)
		texts = append(texts, f.names...)
		f.texts = texts[:len(f.texts)]
	}
	text, tools := e.CountTexts(texts), f.tools(e, family)
	p.Text, p.Tools = text.Tokens, tools.Tokens
	for i := range f.pictures {
		p.Images += f.pictures[i].tokens(family, model)
	}
	p.Estimated = text.Estimated || tools.Estimated || f.partial || f.unwalked > 0 || f.mediaParts > 0
	return p
}
