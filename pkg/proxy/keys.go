// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

const (
	maxKeys    = 1 << 20
	maxKeyName = 64
)

var errKeys = errors.New("a line is the SHA-256 of a key in hex, and a name for it if you like")

// Keys are the client keys that are accepted. They are known by their hashes only.
type Keys struct {
	salt  [sha256.Size]byte
	known map[[sha256.Size]byte]knownKey
}

type knownKey struct {
	hash [sha256.Size]byte
	name string
}

// ParseKeys reads a file of keys: one a line, the SHA-256 of the key in hex, and after a blank a name that the access log has for
// it. Empty lines, and those that begin with #, are skipped. There must be at least one key.
func ParseKeys(text []byte) (*Keys, error) {
	k := &Keys{known: map[[sha256.Size]byte]knownKey{}}
	_, _ = rand.Read(k.salt[:])
	n := 0
	for line := range bytes.Lines(text) {
		n++
		digest, name, _ := strings.Cut(strings.TrimSpace(string(line)), " ")
		if digest == "" || digest[0] == '#' {
			continue
		}
		var key knownKey
		sum, err := hex.DecodeString(digest)
		if err != nil || len(sum) != len(key.hash) {
			return nil, fmt.Errorf("read keys: line %d: %w", n, errKeys) // without the line: it may be a key in the clear
		}
		key.hash = [sha256.Size]byte(sum)
		if key.name = clip(strings.TrimSpace(name), maxKeyName); key.name == "" {
			key.name = digest[:8]
		}
		if k.known[k.place(key.hash)] = key; len(k.known) > maxKeys {
			return nil, fmt.Errorf("read keys: more than %d", maxKeys)
		}
	}
	if len(k.known) == 0 {
		return nil, errors.New("read keys: the file has none: nobody could use the server")
	}
	return k, nil
}

// Len returns how many keys are accepted.
func (k *Keys) Len() int { return len(k.known) }

// place is where a key is looked up. Nobody outside knows it, so the time of a look-up says nothing of the keys.
func (k *Keys) place(hash [sha256.Size]byte) [sha256.Size]byte {
	var b [2 * sha256.Size]byte
	copy(b[:], k.salt[:])
	copy(b[sha256.Size:], hash[:])
	return sha256.Sum256(b[:])
}

// find returns the key's name.
func (k *Keys) find(key []byte) (name string, ok bool) {
	hash := sha256.Sum256(key)
	known, found := k.known[k.place(hash)]
	if subtle.ConstantTimeCompare(known.hash[:], hash[:]) != 1 || !found {
		return "", false
	}
	return known.name, true
}

var errKey = &apiError{status: 401, kind: kindRequest, code: "invalid_api_key",
	message: "The API key is missing or not valid."}

// authorize asks for a client key, if there are any. What is missing and what is wrong get the same answer.
func (ex *exchange) authorize() *apiError {
	keys := ex.set.Keys
	if keys == nil {
		return nil
	}
	name, ok := keys.find(credential(ex.fields))
	if !ok {
		ex.s.metrics.unauthorized.Inc()
		return errKey
	}
	ex.record.Key = name
	return nil
}

// credential returns the key that a client shows, in the one header that its API uses for it.
func credential(fields []field) []byte {
	if v := lookup(fields, "authorization"); v != nil {
		if scheme, key, ok := bytes.Cut(v, []byte(" ")); ok && is(scheme, "bearer") {
			return trimSpace(key)
		}
		return nil
	}
	if v := lookup(fields, "x-api-key"); v != nil {
		return v
	}
	return lookup(fields, "api-key")
}

// isCredential reports whether the header carries a client's key.
func isCredential(name []byte) bool {
	return is(name, "authorization") || is(name, "x-api-key") || is(name, "api-key")
}
