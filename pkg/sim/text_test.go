// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"bytes"
	"crypto/sha256"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
)

func TestTokenize(t *testing.T) {
	for _, tc := range []struct {
		text string
		want int
	}{
		{"", 0},
		{"hello", 1},
		{"hello world", 2},
		{"Hello, world!", 4},
		{"a  b", 3},
		{"line\nline", 3},
		{"12345", 2},
		{"   ", 1},
		{strings.Repeat("x", 400), 100},
		{"abc123", 2},
		{"abc 123", 3},
		{"日本語", 2},
		{"\xff\xfe", 1},
	} {
		if got := len(Tokenize(nil, tc.text)); got != tc.want {
			t.Errorf("%q: %d tokens, want %d", tc.text, got, tc.want)
		}
	}
}

func TestFillerTokens(t *testing.T) {
	for seed := range uint64(50) {
		text := fillerText(seed, 200)
		want := appendFiller(nil, seed, 200)
		if got := Tokenize(nil, text); !slices.Equal(got, want) {
			t.Fatalf("seed %d: the text of an answer has other tokens than the answer", seed)
		}
		if text != strings.TrimSpace(text) {
			t.Fatalf("seed %d: %q has spaces around it", seed, text)
		}
	}
	if fillerText(1, 20) == fillerText(2, 20) {
		t.Error("two seeds give one text")
	}
}

func FuzzTokenize(f *testing.F) {
	f.Add("Hello,  world 123\n\n日本")
	f.Fuzz(func(t *testing.T, s string) {
		got := Tokenize(nil, s)
		if (len(got) == 0) != (s == "") || len(got) > len(s) {
			t.Errorf("%d tokens for %d bytes", len(got), len(s))
		}
	})
}

func TestBlobReader(t *testing.T) {
	whole, err := io.ReadAll(BlobReader(7, 100_003))
	if err != nil || len(whole) != 100_003 {
		t.Fatalf("%d bytes, %v", len(whole), err)
	}
	parts, err := io.ReadAll(iotest.HalfReader(BlobReader(7, 100_003)))
	if err != nil || !bytes.Equal(whole, parts) {
		t.Error("the bytes depend on how they are read")
	}
	if bytes.Equal(whole[:1000], whole[1000:2000]) {
		t.Error("the bytes repeat")
	}
	other, _ := io.ReadAll(BlobReader(8, 100_003))
	if sha256.Sum256(whole) == sha256.Sum256(other) {
		t.Error("two seeds give the same bytes")
	}
}
