// SPDX-License-Identifier: Apache-2.0

package session

import (
	"bytes"
	"hash/maphash"
	"slices"
	"unsafe"

	req "github.com/shunt-lb/shunt/pkg/request"
)

// Key names a session within this process. 0 means none.
type Key uint64

// Source says what a session's key was made of. Its text is fit as a metric label.
type Source uint8

// The sources, in the order in which they are tried.
const (
	SourceNone Source = iota
	SourceHeader
	SourceCacheKey
	SourceFingerprint
)

func (s Source) String() string {
	return [...]string{"none", "header", "cache_key", "fingerprint"}[min(s, SourceFingerprint)]
}

// Header looks a request header up, in any case of its name; nil if it is absent.
type Header func(name string) []byte

// DefaultHeaders returns the headers that name a conversation, in the order in which they are tried: what coding agents,
// gateways and session-aware routers send. A front end that drops names with an underscore (nginx) drops session_id.
func DefaultHeaders() []string {
	return []string{
		"x-session-id", "x-claude-code-session-id", "x-session-affinity", "session-id", "session_id", "x-litellm-session-id",
		"x-smg-routing-key",
	}
}

// Identifier makes keys of requests. It is immutable and safe for concurrent use.
type Identifier struct {
	headers []string
	seed    maphash.Seed
}

// NewIdentifier returns an identifier with a seed of its own. headers are tried in their order; nil means DefaultHeaders,
// an empty list none.
func NewIdentifier(headers []string) *Identifier {
	return NewSeededIdentifier(headers, maphash.MakeSeed())
}

// NewSeededIdentifier is NewIdentifier with a given seed: identifiers of one seed make the same keys.
func NewSeededIdentifier(headers []string, seed maphash.Seed) *Identifier {
	if headers == nil {
		headers = DefaultHeaders()
	}
	return &Identifier{headers: slices.Clone(headers), seed: seed}
}

// WithHeaders returns an identifier with other headers and the same seed, so that a reload keeps the sessions.
func (i *Identifier) WithHeaders(headers []string) *Identifier {
	return NewSeededIdentifier(headers, i.seed)
}

// Key returns a request's session and what it was made of; 0 and SourceNone if nothing names one. f may be nil: then only
// headers count.
//
// Equal values make equal keys whichever header they come in, but a header, a cache key and a fingerprint never make the
// same key. White space around a value is dropped, and a value of nothing else is ignored. A value may have any length.
func (i *Identifier) Key(h Header, f *req.Facts) (Key, Source) {
	for _, name := range i.headers {
		if v := bytes.TrimSpace(h(name)); len(v) > 0 {
			return i.hash(SourceHeader, v), SourceHeader
		}
	}
	if f == nil {
		return 0, SourceNone
	}
	if v := bytes.TrimSpace(unsafe.Slice(unsafe.StringData(f.CacheKey), len(f.CacheKey))); len(v) > 0 {
		return i.hash(SourceCacheKey, v), SourceCacheKey
	}
	if v := f.Fingerprint; v != 0 {
		var b [8]byte
		for n := range b {
			b[n] = byte(v >> (8 * n))
		}
		return i.hash(SourceFingerprint, b[:]), SourceFingerprint
	}
	return 0, SourceNone
}

func (i *Identifier) hash(s Source, value []byte) Key {
	var h maphash.Hash
	h.SetSeed(i.seed)
	h.WriteByte(byte(s))
	h.Write(value)
	return Key(max(1, h.Sum64()))
}
