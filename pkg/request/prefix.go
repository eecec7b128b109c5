// SPDX-License-Identifier: Apache-2.0

package request

import "github.com/shunt-lb/shunt/pkg/prefix"

// Prefix gives the prompt to the hasher, in the order in which a chat template puts it: what separates caches first (the model and
// vLLM's cache_salt), then the tools, then system prompt and messages. It is called after Parse and before Release.
func (p *Parser) Prefix(h *prefix.Hasher) {
	h.Reset()
	h.Add(p.facts.Model)
	h.Add(view(p.raw(fieldCacheSalt)))
	h.Add(view(p.raw(fieldTools)))
	h.Add(view(p.raw(fieldFunctions)))
	for _, t := range p.facts.texts {
		h.Add(t.S)
	}
}
