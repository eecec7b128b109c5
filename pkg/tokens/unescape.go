// SPDX-License-Identifier: Apache-2.0

package tokens

import (
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// AppendUnescaped appends what the inside of a JSON string says, without its quotes. Half a surrogate pair becomes U+FFFD.
// An escape that is not one of JSON's, or that is cut off at the end, is kept as it stands.
func AppendUnescaped(dst []byte, raw string) []byte {
	for {
		i := strings.IndexByte(raw, '\\')
		if i < 0 || i+1 >= len(raw) {
			return append(dst, raw...)
		}
		dst = append(dst, raw[:i]...)
		c, n := raw[i+1], 2
		switch c {
		case '"', '\\', '/':
		case 'b':
			c = '\b'
		case 'f':
			c = '\f'
		case 'n':
			c = '\n'
		case 'r':
			c = '\r'
		case 't':
			c = '\t'
		case 'u':
			r, ok := hex4(raw[i+2:])
			if !ok {
				dst = append(dst, '\\')
				break
			}
			n = 6
			if utf16.IsSurrogate(r) {
				low := rune(-1)
				if rest := raw[i+n:]; len(rest) >= 6 && rest[0] == '\\' && rest[1] == 'u' {
					low, _ = hex4(rest[2:])
				}
				if r = utf16.DecodeRune(r, low); r != utf8.RuneError {
					n += 6
				}
			}
			dst = utf8.AppendRune(dst, r)
			raw = raw[i+n:]
			continue
		default:
			dst = append(dst, '\\')
		}
		dst = append(dst, c)
		raw = raw[i+n:]
	}
}

func hex4(s string) (r rune, ok bool) {
	if len(s) < 4 {
		return 0, false
	}
	for i := range 4 {
		c := s[i]
		switch {
		case '0' <= c && c <= '9':
			c -= '0'
		case 'a' <= c && c <= 'f':
			c -= 'a' - 10
		case 'A' <= c && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, false
		}
		r = r<<4 | rune(c)
	}
	return r, true
}

// appendSpaced appends JSON text with one space behind each comma and colon and no other white space outside strings.
func appendSpaced(dst []byte, raw string) []byte {
	for i := 0; i < len(raw); i++ {
		switch c := raw[i]; c {
		case ' ', '\t', '\r', '\n':
		case ',', ':':
			dst = append(dst, c, ' ')
		case '"':
			end := i + 1
			for end < len(raw) && raw[end] != '"' {
				if raw[end] == '\\' {
					end++
				}
				end++
			}
			end = min(end+1, len(raw))
			dst = append(dst, raw[i:end]...)
			i = end - 1
		default:
			dst = append(dst, c)
		}
	}
	return dst
}
