// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"reflect"
	"strings"

	"github.com/goccy/go-yaml"
)

// FromFlags is the configuration of `shunt serve --backend`: one pool, no steering. A backend is a URL or NAME=URL.
// Empty listen, policy and admin stand for the defaults; admin is an address, the path of a socket (it holds a /) or off.
func FromFlags(backends []string, listen, policy, admin string) (*Config, error) {
	pool := yaml.MapSlice{}
	if policy != "" {
		pool = append(pool, yaml.MapItem{Key: "policy", Value: policy})
	}
	var list []yaml.MapSlice
	for _, b := range backends {
		item := yaml.MapSlice{}
		if name, u, ok := strings.Cut(b, "="); ok && !strings.ContainsAny(name, "/?") {
			item, b = append(item, yaml.MapItem{Key: "name", Value: name}), u
		}
		list = append(list, append(item, yaml.MapItem{Key: "url", Value: b}))
	}
	pool = append(pool, yaml.MapItem{Key: "backends", Value: list})
	doc := yaml.MapSlice{{Key: "pools", Value: []yaml.MapSlice{pool}}}
	if listen != "" {
		doc = append(doc, yaml.MapItem{Key: "listen", Value: listen})
	}
	if admin != "" {
		key := "listen"
		if strings.Contains(admin, "/") {
			key = "socket"
		}
		doc = append(doc, yaml.MapItem{Key: "admin", Value: yaml.MapSlice{{Key: key, Value: admin}}})
	}
	text, err := yaml.Marshal(doc)
	if err != nil {
		return nil, fmt.Errorf("write flags as configuration: %w", err)
	}
	c, err := Parse("flags", text)
	if e, ok := err.(*Error); ok {
		for i := range e.Problems { // there is no file whose lines could be shown
			e.Problems[i].Line, e.Problems[i].Source = 0, ""
		}
	}
	if err != nil {
		return nil, err
	}
	c.src.pos, c.src.lines = map[string]position{"": {}}, nil
	return c, nil
}

// Effective is the configuration in force, defaults filled in, as plain maps and lists in the file's spelling: what the
// admin API shows. No key holds a secret itself (keys and tokens are named by file), so nothing has to be hidden.
func (c *Config) Effective() any { return plain(reflect.ValueOf(c).Elem(), false) }

// Marshal writes the configuration in force as a file that Load reads back to the same.
func (c *Config) Marshal() ([]byte, error) {
	text, err := yaml.MarshalWithOptions(plain(reflect.ValueOf(c).Elem(), true), yaml.IndentSequence(true))
	if err != nil {
		return nil, fmt.Errorf("write configuration: %w", err)
	}
	return text, nil
}

// plain turns a value into maps (in the schema's order when ordered is true), lists and words. Keys without a value are
// left out, so that the result reads back.
func plain(v reflect.Value, ordered bool) any {
	if isScalar(v.Type()) {
		switch v.Kind() {
		case reflect.Bool, reflect.Int, reflect.Float64:
			return v.Interface()
		case reflect.Int64:
			if v.Type() != typeDuration && v.Type() != typeSize {
				return v.Interface()
			}
		}
		return formatScalar(v)
	}
	switch v.Kind() {
	case reflect.Slice:
		list := []any{}
		for i := range v.Len() {
			list = append(list, plain(v.Index(i), ordered))
		}
		return list
	case reflect.Map:
		m := map[string]any{}
		for _, k := range v.MapKeys() {
			m[k.String()] = v.MapIndex(k).Interface()
		}
		return m
	}
	var items yaml.MapSlice
	m := map[string]any{}
	for _, f := range fieldsOf(v.Type()) {
		fv := v.Field(f.index)
		x := plain(fv, ordered)
		if f.key == "listen" && x == "" { // only the admin listener may be absent
			x = "off"
		}
		empty := x == ""
		if fv.Kind() == reflect.Slice || fv.Kind() == reflect.Map {
			empty = fv.Len() == 0
		}
		if empty {
			continue
		}
		items, m[f.key] = append(items, yaml.MapItem{Key: f.key, Value: x}), x
	}
	if ordered {
		return items
	}
	return m
}

// Key is one row of the reference.
type Key struct {
	Path    string // like pools[].health.interval
	Kind    string // how a value is spelled
	Default string // as in the file; empty for none
	Doc     string
}

// Keys lists the schema, in the order of the file.
func Keys() []Key {
	var list []Key
	walk(reflect.TypeFor[Config](), "", func(path string, t reflect.Type, f field) {
		list = append(list, Key{Path: path, Kind: spelling(t, f), Default: f.def, Doc: f.doc})
	})
	return list
}

// walk visits each key of the schema.
func walk(t reflect.Type, path string, visit func(path string, t reflect.Type, f field)) {
	for _, f := range fieldsOf(t) {
		ft, at := t.Field(f.index).Type, join(path, f.key)
		visit(at, ft, f)
		if ft.Kind() == reflect.Slice {
			ft, at = ft.Elem(), at+"[]"
		}
		if ft.Kind() == reflect.Struct && !isScalar(ft) {
			walk(ft, at, visit)
		}
	}
}

func spelling(t reflect.Type, f field) string {
	word := map[reflect.Type]string{
		typeDuration: "duration", typeSize: "size", typePorts: "FIRST-LAST", typeAddrPort: "IP:PORT", typeAddr: "address",
		typePrefix: "CIDR", typeURL: "URL",
	}
	s := word[t]
	switch {
	case f.enum != nil && t.Kind() != reflect.Map:
		return strings.Join(f.enum, ", ")
	case s != "":
	case t.Kind() == reflect.Slice:
		if isScalar(t.Elem()) {
			return "one or a list: " + spelling(t.Elem(), field{})
		}
		return "list"
	case t.Kind() == reflect.Map:
		return "map to " + strings.Join(f.enum, ", ")
	case t.Kind() == reflect.Struct:
		return "section"
	case t.Kind() == reflect.Bool:
		return "true, false"
	case t.Kind() == reflect.String:
		return "text"
	default:
		s = "number"
	}
	if lo, hi, ok := strings.Cut(f.span, ".."); ok {
		s += " " + lo + " to " + hi
	}
	return s
}

// Reference is the schema as a Markdown table, for the README.
func Reference() string {
	var b strings.Builder
	b.WriteString("| key | value | default | meaning |\n| --- | --- | --- | --- |\n")
	for _, k := range Keys() {
		def := k.Default
		if def != "" {
			def = "`" + strings.ReplaceAll(def, ",", ", ") + "`"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", k.Path, k.Kind, def, k.Doc)
	}
	return b.String()
}
