// SPDX-License-Identifier: Apache-2.0

package bpe

import (
	"sync"
	"testing"

	"github.com/pkoukk/tiktoken-go"
	tiktokenloader "github.com/pkoukk/tiktoken-go-loader"
)

// pair is an encoding and tiktoken-go's of the same name.
type pair struct {
	name   string
	enc    *Encoding
	oracle *tiktoken.Tiktoken
}

func (p pair) want(text string) int { return len(p.oracle.EncodeOrdinary(text)) }

var pairsOnce = sync.OnceValues(func() ([]pair, error) {
	loader := tiktokenloader.NewOfflineLoader()
	tiktoken.SetBpeLoader(loader)
	var out []pair
	for _, p := range []struct {
		name    string
		pattern Pattern
	}{{"cl100k_base", CL100k}, {"o200k_base", O200k}} {
		ranks, err := loader.LoadTiktokenBpe(p.name + ".tiktoken")
		if err != nil {
			return nil, err
		}
		enc, err := New(ranks, p.pattern)
		if err != nil {
			return nil, err
		}
		oracle, err := tiktoken.GetEncoding(p.name)
		if err != nil {
			return nil, err
		}
		out = append(out, pair{p.name, enc, oracle})
	}
	return out, nil
})

func pairs(t testing.TB) []pair {
	t.Helper()
	p, err := pairsOnce()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func check(t testing.TB, text string) {
	t.Helper()
	for _, p := range pairs(t) {
		if got, want := p.enc.Count(text), p.want(text); got != want {
			t.Errorf("%s: %d, want %d for %.300q", p.name, got, want, text)
		}
	}
}

func TestEdges(t *testing.T) {
	for _, s := range []string{
		"", "a", "hello world", "Hello, World! Don't you'll I'VE 'tis '", "  \n\n  x", "a \n \n b", "3² ³", "亚洲AV亚洲av", "e\u0301\u0301x",
		"\u0301abc", "'ſabc x'ſ", "ABC'S abc'Ll'x", "foo//\r\n/x", "--------------------------------------------------------------------x",
		"\xff", "a\xffb", "\xe4\xbd", "ab \xff cd", "  \xff", "\u00a0\u3000x", "12345678 ١٢٣٤", "中文测试，你好世界！今天天气不错", "こんにちは世界", "안녕하세요 세계",
		"👍👍🏽👨‍👩‍👧", "\ufeffabc", "HTTPServerURL getElementsByClassNameAndSomethingVeryLongIndeedYes", "tab\tindent\n\t\treturn x\n", "it's 'S 'T '",
		"a b c d e f g h i j k l m n o p q r s t u v w x y z 'quoted' \"double\" ABCDEFGHIJKLMNOP ABCDEFGHijk", "x                    y\n      \n  ",
		"word’s word—word … “quotes”", "\x00\x01ab\x00\x00", "a\x00", "a", "\u0085 \u0085", "ǅabc ʰabc Ⅷ³x",
	} {
		check(t, s)
		check(t, s+" and some more text behind it, so that the loop sees it.")
	}
}
