// SPDX-License-Identifier: Apache-2.0

package request

import (
	"bytes"
	"strings"
)

// API is the dialect of a request.
type API uint8

// The APIs whose bodies are understood. Other is everything else: of such a body only the scalar facts are read.
const (
	Other       API = iota
	Chat            // OpenAI /v1/chat/completions
	Completions     // OpenAI /v1/completions
	Embeddings      // OpenAI /v1/embeddings
	Responses       // OpenAI /v1/responses
	Messages        // Anthropic /v1/messages
)

var apiNames = [...]string{"other", "chat", "completions", "embeddings", "responses", "messages"}

// String is the API's name, fit as a metric label.
func (a API) String() string {
	if int(a) < len(apiNames) {
		return apiNames[a]
	}
	return apiNames[Other]
}

// ParseAPI returns the API of that name, as String writes it.
func ParseAPI(name string) (API, bool) {
	for i, n := range apiNames {
		if n == name {
			return API(i), true
		}
	}
	return Other, false
}

// APIOf returns the API that a normalised path belongs to. The path may have anything in front of its /v1.
func APIOf(path string) API {
	i := strings.LastIndex(path, "/v1/")
	if i < 0 {
		return Other
	}
	switch path[i+len("/v1/"):] {
	case "chat/completions":
		return Chat
	case "completions":
		return Completions
	case "embeddings":
		return Embeddings
	case "responses":
		return Responses
	case "messages":
		return Messages
	}
	return Other
}

// Detect guesses the API of a body that came without a path, by its members: messages with system or with Anthropic's tool
// form are Messages, other messages Chat, a prompt Completions; an input is Responses if it holds objects or comes with
// members that only the Responses API has, else Embeddings. The errors are those of Parse.
func Detect(body []byte) (API, error) {
	p := Acquire()
	defer p.Release()
	if err := p.scan(body); err != nil {
		return Other, err
	}
	has := func(fs ...field) bool {
		for _, f := range fs {
			if p.members[f].exact {
				return true
			}
		}
		return false
	}
	switch {
	case has(fieldMessages):
		if has(fieldSystem) || bytes.Contains(p.raw(fieldTools), []byte(`"input_schema"`)) {
			return Messages, nil
		}
		return Chat, nil
	case has(fieldInput):
		if p.members[fieldInput].first == '{' ||
			has(fieldInstructions, fieldMaxOutputTokens, fieldPreviousResponseID, fieldConversation, fieldTools, fieldStream) {
			return Responses, nil
		}
		return Embeddings, nil
	case has(fieldPrompt):
		return Completions, nil
	}
	return Other, nil
}
