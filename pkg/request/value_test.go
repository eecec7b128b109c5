// SPDX-License-Identifier: Apache-2.0

package request

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"testing/quick"
	"unicode/utf8"
)

// rewrite writes a value anew from what the cursors find.
func rewrite(p *Parser, b *bytes.Buffer, v value) {
	switch p.kind(v) {
	case '{':
		b.WriteByte('{')
		n := 0
		for c := p.object(v); p.nextMember(&c); n++ {
			if n > 0 {
				b.WriteByte(',')
			}
			b.WriteByte('"')
			b.Write(c.key)
			b.WriteString(`":`)
			rewrite(p, b, c.v)
		}
		b.WriteByte('}')
	case '[':
		b.WriteByte('[')
		n := 0
		for c := p.array(v); p.next(&c); n++ {
			if n > 0 {
				b.WriteByte(',')
			}
			rewrite(p, b, c.v)
		}
		b.WriteByte(']')
	default:
		b.Write(p.body[v.start:v.end])
	}
}

// The cursors must find every value of a member, in order, with its exact bytes.
func FuzzCursor(f *testing.F) {
	for _, s := range []string{
		`[]`, `{}`, `[[],{},[{}],""]`, " [ 1 , -2.5e+3 ,true, null ,\n\"a\\\"b\\\\\" ] ", `{"a":{"b":[{"c":"\\\\"}]},"":0,"a":[]}`, `"x"`, `null`,
		`[{"type":"text","text":"a"},[[[[]]]],{"x":{}}]`, `{ "a" : [ ] , "b" : { } }`, "7", `["\\\"","\"",["\\"]]`,
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p := Acquire()
		defer p.Release()
		body := []byte(`{"prompt":"before","messages":` + s + `,"tools":[1]}`)
		if _, err := p.Parse(Other, body); err != nil || !json.Valid([]byte(s)) {
			return
		}
		v, ok := p.member(fieldMessages)
		if !ok {
			t.Fatal("not recorded")
		}
		var got, want bytes.Buffer
		rewrite(p, &got, v)
		if err := json.Compact(&want, []byte(s)); err != nil {
			t.Fatal(err)
		}
		if got.String() != want.String() {
			t.Fatalf("got %s, want %s", got.String(), want.String())
		}
	})
}

// Every byte of a string must be looked at, wherever words begin and end.
func TestSkipStringAtEveryOffset(t *testing.T) {
	for n := range 70 {
		for _, stop := range []string{`"`, `\"`, `\\`, `\n`, "\n", "\x00", "\x1f", `\x`, `\u00e9`, `\u00g9`} {
			for _, fill := range []string{"a", "\xff", "\x80", "\x7f", " "} {
				s := `"` + strings.Repeat(fill, n) + stop + strings.Repeat("b", 9) + `"`
				end, err := skipString([]byte(s), 0)
				valid := json.Valid([]byte(s[:max(end, 0)]))
				switch {
				case stop == `"` && (err != nil || end != n+2):
					t.Fatalf("%q: ends at %d, %v", s, end, err)
				case stop != `"` && (err == nil) != json.Valid([]byte(s)):
					t.Fatalf("%q: %v", s, err)
				case err == nil && !valid:
					t.Fatalf("%q: ends at %d", s, end)
				}
			}
		}
	}
}

func TestEndsPlain(t *testing.T) {
	check := func(x uint64) bool {
		m := endsPlain(x)
		for i := range 8 {
			c := byte(x >> (8 * i))
			special := c == '"' || c == '\\' || c < 0x20
			if marked := m>>(8*i+7)&1 == 1; marked != special {
				return false
			} else if special {
				return true // those behind the first do not matter
			}
		}
		return m == 0
	}
	if err := quick.Check(check, &quick.Config{MaxCount: 200_000}); err != nil {
		t.Error(err)
	}
	for i := range 256 {
		for at := range 8 {
			if x := uint64(i)<<(8*at) | (ones*'a')&^(0xff<<(8*at)); !check(x) {
				t.Errorf("byte %#x at %d", i, at)
			}
		}
	}
}

// A name may be spelled with escapes, below the top level too.
func TestEscapedNames(t *testing.T) {
	plain := parse(t, Chat, `{"messages":[{"role":"user","content":[{"type":"text","text":"hello"}]}]}`).PromptTokens(counter())
	escaped := parse(t, Chat, `{"messages":[{"\u0072ole":"us\u0065r","c\u006fntent":[{"typ\u0065":"t\u0065xt","t\u0065xt":"hello"}]}]}`)
	if got := escaped.PromptTokens(counter()); got != plain {
		t.Errorf("got %+v, want %+v", got, plain)
	}
	if escaped.Fingerprint == 0 {
		t.Error("no fingerprint")
	}
}

func TestDeepObjectsAreWalked(t *testing.T) {
	const depth = 120
	leaf := strings.Repeat(`{"type":"text","text":"hello"},`, 2000)
	body := `{"messages":[` + strings.Repeat(`{"content":[`, depth) + leaf + `0` + strings.Repeat(`]}`, depth) + `]}`
	f := parse(t, Chat, body)
	if len(f.texts) != 2000 || f.unwalked != 0 {
		t.Errorf("%d texts, %d bytes estimated", len(f.texts), f.unwalked)
	}
}

func TestTextsAreHandedOverAsTheyStand(t *testing.T) {
	for in, want := range map[string]string{"plain": "plain", `two\nlines`: `two\nlines`, "ü": "ü"} {
		f := parse(t, Chat, `{"messages":["`+in+`"]}`)
		if len(f.texts) != 1 || f.texts[0].S != want || !utf8.ValidString(f.texts[0].S) {
			t.Errorf("%s: %+v", in, f.texts)
		}
	}
}
