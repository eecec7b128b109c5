// SPDX-License-Identifier: Apache-2.0

package tokens

import (
	"unsafe"
)

const (
	// sampleBlock is the size of the blocks that are encoded where a call's texts exceed MaxBytes.
	sampleBlock = 4096
	// textCost is what a text is charged beside its bytes, so that a million texts of one byte are bounded too.
	textCost = 16
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
	one := [1]Text{{S: text}}
	return e.CountTexts(one[:])
}

// CountBytes is Count for bytes, which must not change during the call.
func (e *Encoder) CountBytes(text []byte) Count {
	return e.Count(unsafe.String(unsafe.SliceData(text), len(text)))
}

// CountAll is CountTexts for plain texts.
func (e *Encoder) CountAll(texts []string) Count {
	buf := textBuffers.Get().(*[]Text)
	list := (*buf)[:0]
	for _, t := range texts {
		list = append(list, Text{S: t})
	}
	n := e.CountTexts(list)
	clear(list)
	if cap(list) > keepTexts {
		list = nil
	}
	*buf = list
	textBuffers.Put(buf)
	return n
}

// encode counts one text without any bound but that on runs.
func (e *Encoder) encode(text string) Count {
	n, cut := e.eng.CountCut(text, e.maxRun)
	return Count{Tokens: n, Estimated: cut}
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }
