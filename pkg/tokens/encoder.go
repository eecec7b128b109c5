// SPDX-License-Identifier: Apache-2.0

package tokens

import (
	"unicode/utf8"
	"unsafe"
)

const (
	// sampleBlock is the size of the blocks that are encoded where a call's texts exceed MaxBytes.
	sampleBlock = 4096
	// textCost is what a text is charged beside its bytes, so that a million texts of one byte are bounded too.
	textCost = 16
	// bytesPerToken is the guess where nothing could be encoded.
	bytesPerToken = 4
)

// Encoder counts tokens in one encoding. It is safe for concurrent use.
type Encoder struct {
	name     string
	eng      engine
	maxBytes int
	maxRun   int
	cache    *cache // nil: none
	texts    textState
}

func newEncoder(name string, eng engine, o Options) *Encoder {
	return &Encoder{name: name, eng: eng, maxBytes: o.MaxBytes, maxRun: o.MaxRun, cache: newCache(o.CacheEntries)}
}

// Name is the encoding's name.
func (e *Encoder) Name() string { return e.name }

// Count counts one text.
func (e *Encoder) Count(text string) Count {
	return e.CountAll([]string{text})
}

// CountBytes is Count for bytes, which must not change during the call.
func (e *Encoder) CountBytes(text []byte) Count {
	return e.Count(unsafe.String(unsafe.SliceData(text), len(text)))
}

// CountAll counts texts, each on its own, and returns the sum. The bound of Options.MaxBytes holds for all of them
// together.
func (e *Encoder) CountAll(texts []string) Count {
	missing := 0
	for _, t := range texts {
		if _, ok := e.cache.get(t); !ok && t != "" {
			missing += len(t) + textCost
		}
	}
	s := sampler{e: e, budget: e.maxBytes, stride: sampleBlock}
	if missing > e.maxBytes {
		// The stride is at least as long as keeps the blocks, all full, within the budget.
		s.stride = ceilDiv(missing, max(1, e.maxBytes/sampleBlock))
	}
	for _, t := range texts {
		if t == "" {
			continue
		}
		if c, ok := e.cache.get(t); ok {
			s.sum = s.sum.Add(c)
			continue
		}
		s.add(t)
	}
	return s.result()
}

// sampler goes over the texts of one call as if they stood one behind the other, and encodes a block of sampleBlock bytes
// at each multiple of stride; with stride = sampleBlock, everything.
type sampler struct {
	e       *Encoder
	stride  int
	budget  int // bytes that may still be encoded: a limit of its own, as the cache can change between the two passes
	pos     int // position of the next text
	sum     Count
	seen    int // bytes encoded in this call
	found   int // tokens found in them
	skipped int // bytes not encoded
}

func (s *sampler) add(text string) {
	start := s.pos
	s.pos += len(text) + textCost
	if s.stride == sampleBlock {
		if cost := len(text) + textCost; cost <= s.budget {
			s.budget -= cost
			s.encodeWhole(text)
		} else {
			s.skipped += len(text)
		}
		return
	}
	done := 0 // bytes of text that are dealt with
	for k := start / s.stride; ; k++ {
		from := max(k*s.stride-start, done)
		to := min(k*s.stride+sampleBlock-start, len(text))
		if from >= len(text) {
			break
		}
		if to <= from {
			continue
		}
		if from == 0 && to == len(text) && len(text) <= s.budget {
			s.budget -= len(text)
			s.encodeWhole(text)
			return
		}
		from, to = nextRune(text, from), prevRune(text, to)
		if to <= from {
			continue
		}
		if to-from > s.budget {
			break
		}
		s.budget -= to - from
		s.skipped += from - done
		c := s.e.encode(text[from:to])
		s.sum = s.sum.Add(c)
		s.seen += to - from
		s.found += c.Tokens
		done = to
	}
	s.skipped += len(text) - done
}

func (s *sampler) encodeWhole(text string) {
	c := s.e.encode(text)
	s.e.cache.put(text, c)
	s.sum = s.sum.Add(c)
	s.seen += len(text)
	s.found += c.Tokens
}

func (s *sampler) result() Count {
	if s.skipped == 0 {
		return s.sum
	}
	rest := ceilDiv(s.skipped, bytesPerToken)
	if s.seen > 0 {
		rest = int(float64(s.skipped) * float64(s.found) / float64(s.seen))
	}
	return s.sum.Add(Count{Tokens: rest, Estimated: true})
}

// encode counts one text without any bound but that on runs.
func (e *Encoder) encode(text string) Count {
	n, cut := e.eng.CountCut(text, e.maxRun)
	return Count{Tokens: n, Estimated: cut}
}

// nextRune moves i forward to the start of a rune, or by the few bytes after which text is plainly not UTF-8.
func nextRune(text string, i int) int {
	for end := min(i+utf8.UTFMax-1, len(text)); i < end && !utf8.RuneStart(text[i]); i++ {
	}
	return i
}

// prevRune is nextRune backwards.
func prevRune(text string, i int) int {
	for end := max(i-utf8.UTFMax+1, 0); i > end && i < len(text) && !utf8.RuneStart(text[i]); i-- {
	}
	return i
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }
