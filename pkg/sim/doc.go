// SPDX-License-Identifier: Apache-2.0

// Package sim models LLM inference servers: what a GPU host costs in time and holds in its KV cache, without a GPU.
//
// Engine is the model alone: continuous batching with chunked prefill, a paged KV cache with prefix caching, and step
// times from measured profiles. It has no clock of its own, so the same code runs on a virtual one (trace replay,
// tests) and on a real one. Server puts an OpenAI-compatible HTTP interface with vLLM's metrics in front of it, and keeps a
// record of which connection each request came on.
package sim

import "errors"

// Errors of this package.
var (
	// ErrUnknownProfile: no built-in profile has this name.
	ErrUnknownProfile = errors.New("unknown profile")
	// ErrTooLong: prompt and output do not fit the model's context or the KV cache.
	ErrTooLong = errors.New("request exceeds the context length")
	// ErrOptions: an option is outside its range.
	ErrOptions = errors.New("invalid option")
)
