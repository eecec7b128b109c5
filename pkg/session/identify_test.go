// SPDX-License-Identifier: Apache-2.0

package session

import (
	"fmt"
	"hash/maphash"
	"strings"
	"testing"

	req "github.com/shunt-lb/shunt/pkg/request"
)

// headersOf makes a look-up of pairs, with names in any case.
func headersOf(pairs ...string) Header {
	m := make(map[string][]byte)
	for i := 0; i < len(pairs); i += 2 {
		m[strings.ToLower(pairs[i])] = []byte(pairs[i+1])
	}
	return func(name string) []byte { return m[strings.ToLower(name)] }
}

func TestIdentify(t *testing.T) {
	id := NewIdentifier(nil)
	chat := &req.Facts{Fingerprint: 7}
	cached := &req.Facts{CacheKey: "abc", Fingerprint: 7}
	long := strings.Repeat("x", 10_000)
	for _, tc := range []struct {
		name   string
		header Header
		facts  *req.Facts
		want   Source
	}{
		{"nothing", headersOf(), nil, SourceNone},
		{"nothing in the body", headersOf(), &req.Facts{Model: "m"}, SourceNone},
		{"fingerprint", headersOf(), chat, SourceFingerprint},
		{"cache key goes first", headersOf(), cached, SourceCacheKey},
		{"header goes first", headersOf("X-Session-Id", "abc"), cached, SourceHeader},
		{"header without a body", headersOf("x-session-id", "abc"), nil, SourceHeader},
		{"claude code", headersOf("X-Claude-Code-Session-Id", "abc"), chat, SourceHeader},
		{"opencode", headersOf("x-session-affinity", "abc"), chat, SourceHeader},
		{"codex", headersOf("session-id", "abc"), chat, SourceHeader},
		{"older codex", headersOf("session_id", "abc"), chat, SourceHeader},
		{"litellm", headersOf("x-litellm-session-id", "abc"), chat, SourceHeader},
		{"smg", headersOf("x-smg-routing-key", "abc"), chat, SourceHeader},
		{"empty header", headersOf("x-session-id", ""), chat, SourceFingerprint},
		{"blank header", headersOf("x-session-id", " \t "), chat, SourceFingerprint},
		{"blank header, next one", headersOf("x-session-id", " ", "session-id", "abc"), chat, SourceHeader},
		{"blank cache key", headersOf(), &req.Facts{CacheKey: " \n", Fingerprint: 7}, SourceFingerprint},
		{"long header", headersOf("x-session-id", long), chat, SourceHeader},
		// Many conversations share each of these.
		{"authorization", headersOf("authorization", "Bearer k", "x-api-key", "k", "x-forwarded-for", "10.0.0.1", "cookie", "a=b", "user-agent", "u"), nil, SourceNone},
		{"request id", headersOf("x-request-id", "abc"), nil, SourceNone},
	} {
		key, source := id.Key(tc.header, tc.facts)
		if source != tc.want || (key == 0) != (tc.want == SourceNone) {
			t.Errorf("%s: key %x from %v, want %v", tc.name, key, source, tc.want)
		}
		if again, _ := id.Key(tc.header, tc.facts); again != key {
			t.Errorf("%s: another key the second time", tc.name)
		}
	}
}

func TestKeysAreKeptApart(t *testing.T) {
	id := NewIdentifier(nil)
	key := func(h Header, f *req.Facts) Key {
		k, _ := id.Key(h, f)
		return k
	}
	abc := key(headersOf("x-session-id", "abc"), nil)
	for name, k := range map[string]Key{
		"another header": key(headersOf("session_id", "abc"), nil),
		"white space":    key(headersOf("x-session-id", "  abc\t"), nil),
		"another model":  key(headersOf("x-session-id", "abc"), &req.Facts{Model: "m", Fingerprint: 1}),
	} {
		if k != abc {
			t.Errorf("%s: another key", name)
		}
	}
	seen := map[Key]string{abc: "abc"}
	for name, k := range map[string]Key{
		"another value":     key(headersOf("x-session-id", "abd"), nil),
		"case":              key(headersOf("x-session-id", "ABC"), nil),
		"cache key":         key(headersOf(), &req.Facts{CacheKey: "abc"}),
		"fingerprint":       key(headersOf(), &req.Facts{Fingerprint: 0x636261}),
		"long":              key(headersOf("x-session-id", strings.Repeat("abc", 1000)), nil),
		"long, other end":   key(headersOf("x-session-id", strings.Repeat("abc", 1000)+"x"), nil),
		"8 bytes":           key(headersOf("x-session-id", "\x07\x00\x00\x00\x00\x00\x00\x00"), nil),
		"fingerprint 7":     key(headersOf(), &req.Facts{Fingerprint: 7}),
		"source as a value": key(headersOf("x-session-id", "\x01abc"), nil),
	} {
		if other, ok := seen[k]; ok || k == 0 {
			t.Errorf("%s: the key of %s", name, other)
		}
		seen[k] = name
	}
	for n := range 10_000 {
		k := key(headersOf("x-session-id", fmt.Sprint(n)), nil)
		if other, ok := seen[k]; ok {
			t.Fatalf("%d: the key of %s", n, other)
		}
		seen[k] = fmt.Sprint(n)
	}
}

func TestSeedAndHeaders(t *testing.T) {
	h := headersOf("x-session-id", "abc", "x-mine", "xyz")
	seed := maphash.MakeSeed()
	a, _ := NewSeededIdentifier(nil, seed).Key(h, nil)
	b, _ := NewSeededIdentifier([]string{"x-session-id"}, seed).Key(h, nil)
	if a != b {
		t.Error("one seed, two keys")
	}
	if c, _ := NewIdentifier(nil).Key(h, nil); c == a {
		t.Error("two seeds, one key")
	}
	mine := NewSeededIdentifier([]string{"x-mine", "x-session-id"}, seed)
	if k, s := mine.Key(h, nil); k == a || s != SourceHeader {
		t.Error("the order of the headers is not kept")
	}
	if k, _ := mine.WithHeaders(nil).Key(h, nil); k != a {
		t.Error("other headers, another seed")
	}
	if k, s := mine.WithHeaders([]string{}).Key(h, nil); k != 0 || s != SourceNone {
		t.Error("an empty list is not empty")
	}
	names := []string{"x-mine"}
	id := NewIdentifier(names)
	names[0] = "authorization"
	if _, s := id.Key(h, nil); s != SourceHeader {
		t.Error("the identifier shares its caller's list")
	}
}

func TestSourceNames(t *testing.T) {
	seen := map[string]bool{}
	for s := SourceNone; s <= SourceFingerprint; s++ {
		seen[s.String()] = true
	}
	if len(seen) != 4 || Source(200).String() == "" {
		t.Errorf("names %v", seen)
	}
}

func TestKeyAllocatesNothing(t *testing.T) {
	id := NewIdentifier(nil)
	value := []byte(strings.Repeat("0123456789", 50))
	h := func(name string) []byte {
		if name == "session-id" {
			return value
		}
		return nil
	}
	none := func(string) []byte { return nil }
	f, g := &req.Facts{CacheKey: "conversation 1"}, &req.Facts{Fingerprint: 9}
	if n := testing.AllocsPerRun(100, func() { id.Key(h, f); id.Key(none, f); id.Key(none, g) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
