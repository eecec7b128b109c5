// SPDX-License-Identifier: Apache-2.0

package tokens

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Names of the encodings. O200kHarmony is another name for O200kBase: the two differ in special tokens only.
const (
	CL100kBase   = "cl100k_base"
	O200kBase    = "o200k_base"
	O200kHarmony = "o200k_harmony"
)

// Errors of New and Counter.Encoding.
var (
	// ErrUnknownEncoding: no vocabulary of that name is built in.
	ErrUnknownEncoding = errors.New("unknown encoding")
	// ErrBadPattern: a key of Options.Models is neither a model's name nor a prefix followed by one `*`.
	ErrBadPattern = errors.New("bad model pattern")
)

// Defaults of Options.
const (
	DefaultMaxBytes     = 256 << 10
	DefaultMaxRun       = 64 << 10
	DefaultCacheEntries = 1 << 16
	DefaultLargeWait    = 3 * time.Millisecond
)

// minRun is the least MaxRun: below it, cuts would make an estimate of common text.
const minRun = 64

// Options of New. The zero value is usable.
type Options struct {
	// Default is the encoding of models that no pattern matches; empty means o200k_base.
	Default string
	// Models maps a model's name, or a prefix followed by `*`, to the name of an encoding. It goes before the built-in
	// map of OpenAI's models. An exact name goes before a prefix and a longer prefix before a shorter one.
	Models map[string]string
	// Files are paths of Hugging Face tokenizer.json files, each of which is then an encoding whose name is the path.
	Files []string
	// MaxBytes bounds the bytes that one call of CountAll encodes; 0 means DefaultMaxBytes, and the least is 4096.
	MaxBytes int
	// MaxRun is the length in bytes at which unbroken runs are cut; 0 means DefaultMaxRun, and the least is 64.
	MaxRun int
	// CacheEntries is the number of texts per encoding whose counts are remembered, 16 bytes each; rounded up to a
	// power of two, 4 at least. 0 means DefaultCacheEntries, a negative number none.
	CacheEntries int
	// LargeBytes is the size in bytes above which a call's texts, those that are not remembered, are large. 0 means that
	// none are. LargeCounts is how many large calls are counted at a time, over all encodings; 0 means half of GOMAXPROCS,
	// 1 at least. LargeWait is how long a further one waits before it is estimated; 0 means DefaultLargeWait.
	LargeBytes  int
	LargeCounts int
	LargeWait   time.Duration
}

// Count is a number of tokens. Estimated is true where the number may differ from the encoding's own: part of the text was
// not encoded, or an unbroken run was cut.
type Count struct {
	Tokens    int
	Estimated bool
}

// Add returns the sum of two counts, estimated if either is.
func (c Count) Add(d Count) Count {
	return Count{Tokens: c.Tokens + d.Tokens, Estimated: c.Estimated || d.Estimated}
}

// Counter maps models to encoders. It is immutable and safe for concurrent use.
type Counter struct {
	encoders map[string]*Encoder // by every known name
	fallback *Encoder
	user     modelMap
	builtin  modelMap
}

// openaiModels is what OpenAI documents of its own models; prefixes end with `*`.
var openaiModels = map[string]string{
	"gpt-4o*":          O200kBase,
	"gpt-4.1*":         O200kBase,
	"gpt-4.5*":         O200kBase,
	"gpt-5*":           O200kBase,
	"gpt-oss*":         O200kHarmony,
	"chatgpt-4o*":      O200kBase,
	"o1":               O200kBase,
	"o1-*":             O200kBase,
	"o3":               O200kBase,
	"o3-*":             O200kBase,
	"o4-*":             O200kBase,
	"codex-mini*":      O200kBase,
	"gpt-4*":           CL100kBase,
	"gpt-3.5*":         CL100kBase,
	"gpt-35*":          CL100kBase, // Azure's spelling
	"text-embedding-*": CL100kBase,
	"davinci-002":      CL100kBase,
	"babbage-002":      CL100kBase,
}

// New returns a counter, with the tables of both encodings built: the first call in a process takes some hundred
// milliseconds of CPU time.
func New(o Options) (*Counter, error) {
	if o.MaxBytes <= 0 {
		o.MaxBytes = DefaultMaxBytes
	}
	o.MaxBytes = max(o.MaxBytes, sampleBlock)
	if o.MaxRun <= 0 {
		o.MaxRun = DefaultMaxRun
	}
	o.MaxRun = max(o.MaxRun, minRun)
	if o.CacheEntries == 0 {
		o.CacheEntries = DefaultCacheEntries
	}
	large := largeGate(o)
	c := &Counter{encoders: make(map[string]*Encoder)}
	for _, name := range []string{CL100kBase, O200kBase} {
		eng, err := loadEngine(name)
		if err != nil {
			return nil, fmt.Errorf("load encoding %s: %w", name, err)
		}
		c.encoders[name] = newEncoder(name, eng, o)
	}
	if err := c.addFiles(o); err != nil {
		return nil, err
	}
	for _, e := range c.encoders {
		e.texts.gate = large
	}
	c.encoders[O200kHarmony] = c.encoders[O200kBase]

	var err error
	if c.fallback, err = c.Encoding(cmp.Or(o.Default, O200kBase)); err != nil {
		return nil, fmt.Errorf("set default encoding: %w", err)
	}
	if c.user, err = c.newModelMap(o.Models); err != nil {
		return nil, err
	}
	if c.builtin, err = c.newModelMap(openaiModels); err != nil {
		return nil, err
	}
	return c, nil
}

// Encodings returns the names that Encoding takes, sorted.
func Encodings() []string { return []string{CL100kBase, O200kBase, O200kHarmony} }

// Encoding returns the encoder of that name, or an ErrUnknownEncoding that names the encodings there are.
func (c *Counter) Encoding(name string) (*Encoder, error) {
	if e := c.encoders[name]; e != nil {
		return e, nil
	}
	return nil, fmt.Errorf("%w %q (known: %s)", ErrUnknownEncoding, name, strings.Join(Encodings(), ", "))
}

// For returns the encoder for a model's name. It never returns nil: unknown names, and the empty one, get the default.
//
// The name is looked up as it is in Options.Models; then without a fine-tune's frame (ft:NAME:org::id) and without a path
// in front (openai/gpt-4o), there and in the built-in map.
func (c *Counter) For(model string) *Encoder {
	if e := c.user.find(model); e != nil {
		return e
	}
	bare := bareName(model)
	if bare != model {
		if e := c.user.find(bare); e != nil {
			return e
		}
	}
	if e := c.builtin.find(bare); e != nil {
		return e
	}
	return c.fallback
}

func bareName(model string) string {
	if rest, ok := strings.CutPrefix(model, "ft:"); ok {
		model, _, _ = strings.Cut(rest, ":")
	}
	return model[strings.LastIndexByte(model, '/')+1:]
}

// modelMap is a look-up by exact name, then by longest prefix.
type modelMap struct {
	exact    map[string]*Encoder
	prefixes []prefix // longest first
}

type prefix struct {
	text string
	enc  *Encoder
}

func (c *Counter) newModelMap(models map[string]string) (modelMap, error) {
	m := modelMap{exact: make(map[string]*Encoder)}
	for pattern, name := range models {
		enc, err := c.Encoding(name)
		if err != nil {
			return m, fmt.Errorf("map model %q: %w", pattern, err)
		}
		text, isPrefix := strings.CutSuffix(pattern, "*")
		switch {
		case pattern == "" || strings.Contains(text, "*"):
			return m, fmt.Errorf("map model %q: %w: want a name, or a prefix and one `*` at its end", pattern, ErrBadPattern)
		case isPrefix:
			m.prefixes = append(m.prefixes, prefix{text, enc})
		default:
			m.exact[pattern] = enc
		}
	}
	slices.SortFunc(m.prefixes, func(a, b prefix) int {
		return cmp.Or(cmp.Compare(len(b.text), len(a.text)), strings.Compare(a.text, b.text))
	})
	return m, nil
}

func (m *modelMap) find(model string) *Encoder {
	if e := m.exact[model]; e != nil {
		return e
	}
	for i := range m.prefixes {
		if strings.HasPrefix(model, m.prefixes[i].text) {
			return m.prefixes[i].enc
		}
	}
	return nil
}
