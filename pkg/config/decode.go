// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
)

const (
	maxFile  = 1 << 20 // bytes of a configuration file
	maxNodes = 1 << 16 // values read, aliases counted each time: an alias cannot blow a small file up
)

// Load reads, decodes and checks a file. The error is an *Error with every problem, or one of reading the file.
func Load(path string) (*Config, error) {
	data, err := readFile(path)
	if err != nil {
		return nil, err
	}
	return Parse(path, data)
}

func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	if len(data) > maxFile {
		return nil, fmt.Errorf("read configuration: %s is larger than %s", path, Size(maxFile))
	}
	return data, nil
}

// Parse decodes and checks a configuration; name stands for the file in messages. What depends on the machine is
// checked by Validate.
func Parse(name string, data []byte) (*Config, error) {
	c, _, err := Check(name, data, Host{})
	return c, err
}

// Check is Parse and Validate in one: it reports the problems of both and the warnings.
func Check(name string, data []byte, host Host) (*Config, []Problem, error) {
	c := defaults()
	c.src = source{file: name, lines: strings.Split(string(data), "\n"), pos: map[string]position{}}
	p := newProblems(&c.src)
	d := decoder{p: p, src: &c.src, anchors: map[string]ast.Node{}}
	d.document(data, reflect.ValueOf(c).Elem())
	if p.ok("") { // the document as a whole could be read
		c.derive(p)
		c.check(p, host)
	}
	sortProblems(p.warnings)
	if err := p.err(); err != nil {
		return nil, p.warnings, err
	}
	return c, p.warnings, nil
}

// CheckFile is Check on a file.
func CheckFile(path string, host Host) (*Config, []Problem, error) {
	data, err := readFile(path)
	if err != nil {
		return nil, nil, err
	}
	return Check(path, data, host)
}

// Validate checks what depends on the machine, and everything else again. The error is an *Error.
func (c *Config) Validate(host Host) error {
	p := newProblems(&c.src)
	c.check(p, host)
	return p.err()
}

// Warnings lists what is allowed but probably not meant.
func (c *Config) Warnings(host Host) []Problem {
	p := newProblems(&c.src)
	c.check(p, host)
	sortProblems(p.warnings)
	return p.warnings
}

// defaults is the configuration of an empty file.
func defaults() *Config {
	c := new(Config)
	setDefaults(reflect.ValueOf(c).Elem())
	return c
}

func setDefaults(v reflect.Value) {
	for _, f := range fieldsOf(v.Type()) {
		fv := v.Field(f.index)
		if fv.Kind() == reflect.Struct && !isScalar(fv.Type()) {
			setDefaults(fv)
			continue
		}
		if f.def == "" {
			continue
		}
		if fv.Kind() == reflect.Slice {
			for _, word := range strings.Split(f.def, ",") {
				fv.Set(reflect.Append(fv, mustScalar(fv.Type().Elem(), word)))
			}
			continue
		}
		fv.Set(mustScalar(fv.Type(), f.def))
	}
}

func mustScalar(t reflect.Type, text string) reflect.Value {
	v, err := parseScalar(t, text)
	if err != nil {
		panic("config: bad default tag: " + err.Error())
	}
	return v
}

// field is one key of the schema.
type field struct {
	index         int
	key, def, doc string
	enum          []string
	span          string // range tag
}

var schema sync.Map // reflect.Type -> []field

func fieldsOf(t reflect.Type) []field {
	if list, ok := schema.Load(t); ok {
		return list.([]field)
	}
	var list []field
	for i := range t.NumField() {
		sf := t.Field(i)
		key := sf.Tag.Get("yaml")
		if key == "" {
			continue
		}
		f := field{index: i, key: key, def: sf.Tag.Get("default"), doc: sf.Tag.Get("doc"), span: sf.Tag.Get("range")}
		if e := sf.Tag.Get("enum"); e != "" {
			f.enum = strings.Split(e, "|")
		}
		list = append(list, f)
	}
	schema.Store(t, list)
	return list
}

// decoder walks the YAML tree along the schema. It is our own so that it can report every error, not the first.
type decoder struct {
	p       *problems
	src     *source
	anchors map[string]ast.Node
	nodes   int
}

func (d *decoder) document(data []byte, v reflect.Value) {
	if !utf8.Valid(data) {
		d.p.at(position{}, "", "the file is not UTF-8 text")
		return
	}
	file, err := parseYAML(data)
	if err != nil {
		var ye yaml.Error
		if errors.As(err, &ye) && ye.GetToken() != nil {
			pos := ye.GetToken().Position
			d.p.at(position{pos.Line, pos.Column}, "", "%s", strings.TrimSpace(ye.GetMessage()))
			return
		}
		d.p.at(position{}, "", "read YAML: %s", err)
		return
	}
	var body ast.Node
	for _, doc := range file.Docs {
		if doc.Body == nil || doc.Body.Type() == ast.NullType || doc.Body.Type() == ast.CommentType {
			continue
		}
		if body != nil {
			d.p.at(posOf(doc.Body), "", "the file holds a second YAML document: shunt reads one")
			return
		}
		body = doc.Body
	}
	if body == nil {
		return // an empty file: the checks say what is missing
	}
	for _, n := range ast.Filter(ast.AnchorType, body) {
		a := n.(*ast.AnchorNode)
		if a.Name != nil {
			d.anchors[a.Name.GetToken().Value] = a.Value
		}
	}
	d.mapping(body, v, "")
}

// parseYAML guards against panics of the parser: a configuration comes from a person, who needs a message.
func parseYAML(data []byte) (f *ast.File, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("the YAML reader gave up: %v", r)
		}
	}()
	return parser.ParseBytes(data, 0, parser.AllowDuplicateMapKey())
}

func posOf(n ast.Node) position {
	if n == nil || reflect.ValueOf(n).IsNil() || n.GetToken() == nil || n.GetToken().Position == nil {
		return position{}
	}
	switch m := n.(type) {
	case *ast.MappingNode: // its own token is the first colon, or the brace
		if !m.IsFlowStyle && len(m.Values) > 0 {
			return posOf(m.Values[0].Key)
		}
	case *ast.MappingValueNode:
		return posOf(m.Key)
	}
	p := n.GetToken().Position
	return position{p.Line, p.Column}
}

// resolve follows anchors and aliases. nil = the error is reported.
func (d *decoder) resolve(n ast.Node, path string) ast.Node {
	start := posOf(n)
	if d.nodes++; d.nodes > maxNodes {
		if d.nodes == maxNodes+1 {
			d.p.at(start, path, "the file holds more than %d values", maxNodes)
		}
		return nil
	}
	for range 16 {
		switch m := n.(type) {
		case *ast.AnchorNode:
			n = m.Value
		case *ast.AliasNode:
			name := ""
			if m.Value != nil {
				name = m.Value.GetToken().Value
			}
			to, ok := d.anchors[name]
			if !ok {
				d.p.at(start, path, "alias *%s has no anchor &%s", name, name)
				return nil
			}
			n = to
		case *ast.TagNode:
			d.p.at(start, path, "YAML tags (%s) have no meaning here: remove it", m.GetToken().Value)
			return nil
		case nil:
			d.p.at(start, path, "has no value")
			return nil
		default:
			return n
		}
	}
	d.p.at(start, path, "alias stands for itself")
	return nil
}

func (d *decoder) pairs(n ast.Node, path string) ([]*ast.MappingValueNode, bool) {
	switch m := n.(type) {
	case *ast.MappingNode:
		return m.Values, true
	case *ast.MappingValueNode:
		return []*ast.MappingValueNode{m}, true
	case *ast.NullNode:
		return nil, true // a heading whose keys are all commented out
	}
	d.p.at(posOf(n), path, "is %s, but must be a mapping of keys", kind(n))
	return nil, false
}

// entries calls f for each key of a mapping, once a key: repeated keys are errors.
func (d *decoder) entries(n ast.Node, path string, f func(key string, pos position, value ast.Node)) {
	pairs, ok := d.pairs(n, path)
	if !ok {
		return
	}
	if _, ok := d.src.pos[path]; !ok {
		d.src.pos[path] = posOf(n)
	}
	seen := map[string]position{}
	for _, kv := range pairs {
		pos := posOf(kv.Key)
		if kv.Key == nil || kv.Key.IsMergeKey() {
			d.p.at(pos, join(path, "<<"), "merge keys are not supported: write the keys out")
			continue
		}
		key, ok := scalarText(kv.Key)
		if !ok {
			d.p.at(pos, join(path, "?"), "a key must be one word")
			continue
		}
		if first, dup := seen[key]; dup {
			d.p.report(pos, join(path, key), "key %q is given twice (first in line %d)", key, first.line)
			continue
		}
		seen[key] = pos
		f(key, pos, kv.Value)
	}
}

func (d *decoder) mapping(n ast.Node, v reflect.Value, path string) {
	if n = d.resolve(n, path); n == nil {
		return
	}
	fields := fieldsOf(v.Type())
	d.entries(n, path, func(key string, pos position, value ast.Node) {
		i := slices.IndexFunc(fields, func(f field) bool { return f.key == key })
		if i < 0 {
			d.unknown(pos, path, key, fields)
			return
		}
		at := join(path, key)
		d.src.pos[at] = pos
		if vp := posOf(value); vp.line > 0 && isScalar(v.Field(fields[i].index).Type()) {
			d.src.pos[at] = vp
		}
		d.value(value, v.Field(fields[i].index), fields[i], at)
	})
}

func (d *decoder) unknown(pos position, path, key string, fields []field) {
	var keys []string
	for _, f := range fields {
		keys = append(keys, f.key)
	}
	if near := nearest(key, keys); near != "" {
		d.p.at(pos, join(path, key), "unknown key %q: did you mean %q?", key, near)
		return
	}
	d.p.at(pos, join(path, key), "unknown key %q: known here are %s", key, strings.Join(keys, ", "))
}

func (d *decoder) value(n ast.Node, v reflect.Value, f field, path string) {
	if isScalar(v.Type()) {
		d.scalar(n, v, f, path)
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		d.mapping(n, v, path)
	case reflect.Slice:
		d.list(n, v, f, path)
	case reflect.Map:
		d.words(n, v, f, path)
	default:
		panic("config: no decoder for " + v.Type().String())
	}
}

func (d *decoder) list(n ast.Node, v reflect.Value, f field, path string) {
	if n = d.resolve(n, path); n == nil {
		return
	}
	v.Set(reflect.Zero(v.Type())) // what is written replaces the default
	elem := v.Type().Elem()
	switch s := n.(type) {
	case *ast.NullNode:
		return
	case *ast.SequenceNode:
		for i, e := range s.Values {
			at := fmt.Sprintf("%s[%d]", path, i)
			d.src.pos[at] = posOf(e)
			x := reflect.New(elem).Elem()
			if !isScalar(elem) {
				setDefaults(x)
			}
			d.value(e, x, f, at)
			v.Set(reflect.Append(v, x))
		}
		return
	}
	if !isScalar(elem) {
		d.p.at(posOf(n), path, "is %s, but must be a list (lines that begin with -)", kind(n))
		return
	}
	at := path + "[0]" // one word for a list of one
	d.src.pos[at] = posOf(n)
	x := reflect.New(elem).Elem()
	d.value(n, x, f, at)
	v.Set(reflect.Append(v, x))
}

func (d *decoder) words(n ast.Node, v reflect.Value, f field, path string) {
	if n = d.resolve(n, path); n == nil {
		return
	}
	m := map[string]string{}
	d.entries(n, path, func(key string, pos position, value ast.Node) {
		at := join(path, key)
		d.src.pos[at] = pos
		x := reflect.New(v.Type().Elem()).Elem()
		d.scalar(value, x, f, at)
		m[key] = x.String()
	})
	v.Set(reflect.ValueOf(m))
}

func (d *decoder) scalar(n ast.Node, v reflect.Value, f field, path string) {
	pos := posOf(n)
	if n = d.resolve(n, path); n == nil {
		return
	}
	text, ok := scalarText(n)
	if !ok {
		if n.Type() == ast.NullType {
			d.p.at(pos, path, "has no value: give one or remove the key")
		} else {
			d.p.at(pos, path, "is %s, but must be one value", kind(n))
		}
		return
	}
	if path == "admin.listen" && text == "off" {
		v.SetZero()
		return
	}
	if f.enum != nil && !slices.Contains(f.enum, text) {
		msg := fmt.Sprintf("%q is not one of %s", text, strings.Join(f.enum, ", "))
		if near := nearest(text, f.enum); near != "" {
			msg += fmt.Sprintf(": did you mean %q?", near)
		}
		d.p.at(pos, path, "%s", msg)
		return
	}
	x, err := parseScalar(v.Type(), text)
	if err == nil && f.span != "" {
		err = inRange(x, f.span)
	}
	if err != nil {
		d.p.at(pos, path, "%s", err)
		return
	}
	v.Set(x)
}

// scalarText is the text of a value that is one word: as written, quotes removed.
func scalarText(n ast.Node) (string, bool) {
	switch m := n.(type) {
	case *ast.StringNode:
		return m.Value, true
	case *ast.LiteralNode:
		if m.Value == nil {
			return "", false
		}
		return strings.TrimRight(m.Value.Value, "\n"), true
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		return n.GetToken().Value, true
	case *ast.MappingKeyNode:
		return scalarText(m.Value)
	}
	return "", false
}

func kind(n ast.Node) string {
	switch n.(type) {
	case *ast.MappingNode, *ast.MappingValueNode:
		return "a mapping"
	case *ast.SequenceNode:
		return "a list"
	}
	if text, ok := scalarText(n); ok {
		return fmt.Sprintf("the single value %.40q", text)
	}
	return "something else"
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}
