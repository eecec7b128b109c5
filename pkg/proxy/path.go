// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"
	"fmt"
	"strings"
)

// DefaultPaths is the allow-list that an empty Options.Paths stands for: the inference routes of the OpenAI and
// Anthropic APIs and of the KServe v2 protocol. The engines' administrative routes are not among them.
var DefaultPaths = []string{
	"/v1/chat/completions",
	"/v1/completions",
	"/v1/embeddings",
	"/v1/responses",
	"/v1/responses/**",
	"/v1/messages",
	"/v1/messages/count_tokens",
	"/v1/models",
	"/v1/models/**",
	"/v1/audio/**",
	"/v1/images/**",
	"/v1/moderations",
	"/v1/rerank",
	"/v2/rerank",
	"/v1/score",
	"/v2/models/*/infer",
	"/v2/models/*/versions/*/infer",
}

const errTarget = messageError("request target is not in the form that this server accepts")

// cleanPath returns the path of a request target, decoded once, for decisions only: what is forwarded is the target
// as it came. A target that two servers could read as two paths is refused. buf is used when decoding is needed.
func cleanPath(target, buf []byte) (path, scratch []byte, err error) {
	if len(target) == 0 || target[0] != '/' {
		return nil, buf, errTarget
	}
	path = target
	if i := bytes.IndexByte(path, '?'); i >= 0 {
		path = path[:i]
	}
	for _, c := range target {
		if c <= ' ' || c == 0x7f || c == '\\' || c == '#' {
			return nil, buf, errTarget
		}
	}
	if bytes.IndexByte(path, '%') >= 0 {
		buf = buf[:0]
		for i := 0; i < len(path); i++ {
			c := path[i]
			if c == '%' {
				if i+2 >= len(path) {
					return nil, buf, errTarget
				}
				hi, ok1 := unhex(path[i+1])
				lo, ok2 := unhex(path[i+2])
				if !ok1 || !ok2 {
					return nil, buf, errTarget
				}
				c = hi<<4 | lo
				switch {
				case c < ' ', c == 0x7f, c == '/', c == '\\', c == '.', c == '%', c == '?', c == '#', c == ';':
					return nil, buf, errTarget
				}
				i += 2
			}
			buf = append(buf, c)
		}
		path = buf
	}
	for rest := path[1:]; ; {
		i := bytes.IndexByte(rest, '/')
		segment := rest
		if i >= 0 {
			segment = rest[:i]
		}
		if len(segment) == 0 && i >= 0 || len(segment) == 1 && segment[0] == '.' || string(segment) == ".." {
			return nil, buf, errTarget
		}
		if i < 0 {
			return path, buf, nil
		}
		rest = rest[i+1:]
	}
}

func unhex(c byte) (byte, bool) {
	switch {
	case c >= '0' && c <= '9':
		return c - '0', true
	case c >= 'a' && c <= 'f':
		return c - 'a' + 10, true
	case c >= 'A' && c <= 'F':
		return c - 'A' + 10, true
	}
	return 0, false
}

// allowList decides which paths are served at all.
type allowList struct {
	exact    map[string]string
	patterns [][]string // segments; "*" = any one, a last "**" = one or more
}

// CheckPaths says what is wrong with an allow-list.
func CheckPaths(paths []string) error {
	_, err := newAllowList(paths)
	return err
}

func newAllowList(paths []string) (*allowList, error) {
	if len(paths) == 0 {
		paths = DefaultPaths
	}
	l := &allowList{exact: make(map[string]string, len(paths))}
	for _, p := range paths {
		clean, _, err := cleanPath([]byte(p), nil)
		if err != nil || string(clean) != p || len(p) > 1 && strings.HasSuffix(p, "/") {
			return nil, fmt.Errorf("compile path pattern %q: not a clean absolute path", p)
		}
		segments := strings.Split(p[1:], "/")
		wild := false
		for i, s := range segments {
			switch {
			case s == "*":
				wild = true
			case s == "**" && i == len(segments)-1:
				wild = true
			case strings.Contains(s, "*"):
				return nil, fmt.Errorf("compile path pattern %q: * must be a whole segment, ** the last one", p)
			}
		}
		if wild {
			l.patterns = append(l.patterns, segments)
		} else {
			l.exact[p] = p
		}
	}
	return l, nil
}

func (l *allowList) allows(path []byte) bool {
	if _, ok := l.exact[string(path)]; ok {
		return true
	}
	for _, p := range l.patterns {
		if matchSegments(p, path[1:]) {
			return true
		}
	}
	return false
}

// name returns the path as a string that may be kept. The paths that are listed as such cost no allocation.
func (l *allowList) name(path []byte) string {
	if s, ok := l.exact[string(path)]; ok {
		return s
	}
	return string(path)
}

func matchSegments(pattern []string, rest []byte) bool {
	for i, p := range pattern {
		if len(rest) == 0 {
			return false
		}
		if p == "**" {
			return true
		}
		segment := rest
		j := bytes.IndexByte(rest, '/')
		if j >= 0 {
			segment, rest = rest[:j], rest[j+1:]
		} else {
			rest = nil
		}
		if len(segment) == 0 || p != "*" && p != string(segment) {
			return false
		}
		last := i == len(pattern)-1
		if last {
			return j < 0
		}
		if j < 0 {
			return false
		}
	}
	return false
}

// v2Model returns NAME of /v2/models/NAME/..., where the KServe v2 protocol has the model, or nil.
func v2Model(path []byte) []byte {
	rest, ok := bytes.CutPrefix(path, []byte("/v2/models/"))
	if !ok {
		return nil
	}
	if i := bytes.IndexByte(rest, '/'); i >= 0 {
		rest = rest[:i]
	}
	return rest
}
