// SPDX-License-Identifier: Apache-2.0

package tokens

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"
	"unsafe"
)

// Form says how a Text is written.
type Form uint8

const (
	// Plain text is counted as it stands.
	Plain Form = iota
	// JSONString is what stands between the quotes of a JSON string: its escapes are decoded before it is counted.
	JSONString
	// JSONValue is JSON text, counted as Python's json.dumps and the chat templates of open models write it: one space
	// behind each comma and colon, no other white space outside strings.
	JSONValue
)

// Text is one text of a prompt. It takes no memory but for what S points into, which must not change while it is counted.
type Text struct {
	S    string
	Form Form
	key  uint64 // of the cache; 0: counted, or empty
}

// keepScratch is how much memory a pooled buffer for decoded text may keep.
const keepScratch = 1 << 20

// keepTexts is the same for lists of texts.
const keepTexts = 1 << 12

var textBuffers = sync.Pool{New: func() any { return new([]Text) }}

var scratches = sync.Pool{New: func() any { return new([]byte) }}

// unkeyed is the key of a text that is too short for the cache.
const unkeyed = 1

// textState is what an Encoder keeps for CountTexts. The zero value works: no gate, and densities as they are built in.
type textState struct {
	gate      *gate
	densities densities
	stats     struct{ hits, misses, hitBytes, missBytes, estimated, refused atomic.Uint64 }
}

// Stats is what an encoder has done since it was made.
type Stats struct {
	Hits, HitBytes     uint64 // texts whose counts were remembered
	Misses, MissBytes  uint64 // texts that were not
	EstimatedBytes     uint64 // of those, what was not encoded but estimated
	RefusedLargeCounts uint64 // calls that found every place for large counts taken
}

// Stats returns the encoder's figures.
func (e *Encoder) Stats() Stats {
	s := &e.texts.stats
	return Stats{Hits: s.hits.Load(), HitBytes: s.hitBytes.Load(), Misses: s.misses.Load(), MissBytes: s.missBytes.Load(),
		EstimatedBytes: s.estimated.Load(), RefusedLargeCounts: s.refused.Load()}
}

// Stats returns the figures of every encoding.
func (c *Counter) Stats() map[string]Stats {
	m := make(map[string]Stats)
	for _, e := range c.encoders {
		m[e.name] = e.Stats()
	}
	return m
}

// CountTexts counts texts, each on its own, and returns the sum. Texts that were counted before cost a look-up. Of the
// others MaxBytes are encoded; what is beyond them is estimated, as is all of a call with more than LargeBytes to encode if
// LargeCounts such calls are under way and none ends within LargeWait.
//
// It writes to the elements of texts and allocates nothing in steady state.
func (e *Encoder) CountTexts(texts []Text) Count {
	var sum Count
	var hits, misses, hitBytes, missBytes int
	for i := range texts {
		t := &texts[i]
		t.key = 0
		if t.S == "" {
			continue
		}
		if e.cache == nil || len(t.S) < minCached {
			t.key = unkeyed
		} else {
			key := e.cache.key(t.S, t.Form)
			if c, ok := e.cache.find(key); ok {
				sum = sum.Add(c)
				hits++
				hitBytes += len(t.S)
				continue
			}
			t.key = key
		}
		misses++
		missBytes += len(t.S)
	}
	st := &e.texts.stats
	if hits > 0 {
		st.hits.Add(uint64(hits))
		st.hitBytes.Add(uint64(hitBytes))
	}
	if misses == 0 {
		return sum
	}
	st.misses.Add(uint64(misses))
	st.missBytes.Add(uint64(missBytes))

	cost := missBytes + misses*textCost
	if g := e.texts.gate; g != nil && cost > g.over {
		if !g.enter() {
			st.refused.Add(1)
			st.estimated.Add(uint64(missBytes))
			return sum.Add(e.estimateAll(texts))
		}
		defer g.leave()
		runtime.Gosched() // small requests that came together with this one go first
	}
	scratch := scratches.Get().(*[]byte)
	if cost <= e.maxBytes {
		for i := range texts {
			if t := &texts[i]; t.key != 0 {
				sum = sum.Add(e.encodeText(t, scratch))
			}
		}
	} else {
		c, estimated := e.sample(texts, cost, scratch)
		st.estimated.Add(uint64(estimated))
		sum = sum.Add(c)
	}
	if cap(*scratch) > keepScratch {
		*scratch = nil
	}
	scratches.Put(scratch)
	return sum
}

// Lookup returns the remembered count of a text that the caller counts in a way of its own, told apart from others by
// kind, and the key to Remember it by. It does not find what CountTexts has counted.
func (e *Encoder) Lookup(text []byte, kind uint8) (n Count, key uint64, ok bool) {
	if e.cache == nil || len(text) < minCached {
		return Count{}, 0, false
	}
	key = e.cache.key(unsafe.String(unsafe.SliceData(text), len(text)), Form(kind)+ownKinds)
	n, ok = e.cache.find(key)
	st := &e.texts.stats
	if ok {
		st.hits.Add(1)
		st.hitBytes.Add(uint64(len(text)))
	}
	return n, key, ok
}

// ownKinds keeps the keys of Lookup apart from those of texts.
const ownKinds = 64

// Remember keeps a count under a key of Lookup. A key of 0 is none.
func (e *Encoder) Remember(key uint64, n Count) {
	if key != 0 {
		e.cache.store(key, n)
	}
}

// encodeText counts a whole text and remembers it.
func (e *Encoder) encodeText(t *Text, scratch *[]byte) Count {
	c := e.encode(t.plain(t.S, scratch))
	if t.key != unkeyed {
		e.cache.store(t.key, c)
	}
	e.texts.densities.learn(t.S, c.Tokens)
	return c
}

// plain returns a part of the text as it is counted, in scratch where that differs from how it stands.
func (t *Text) plain(part string, scratch *[]byte) string {
	switch t.Form {
	case JSONString:
		*scratch = AppendUnescaped((*scratch)[:0], part)
	case JSONValue:
		*scratch = appendSpaced((*scratch)[:0], part)
	default:
		return part
	}
	return unsafe.String(unsafe.SliceData(*scratch), len(*scratch))
}

// gate admits a few large counts at a time, so that they cannot take every core from the small ones.
type gate struct {
	over  int // bytes to encode from which a call is large
	wait  time.Duration
	slots chan struct{}
}

// largeGate returns the gate that the options ask for, nil for none.
func largeGate(o Options) *gate {
	if o.LargeBytes <= 0 {
		return nil
	}
	g := &gate{over: o.LargeBytes, wait: o.LargeWait}
	if g.wait <= 0 {
		g.wait = DefaultLargeWait
	}
	slots := o.LargeCounts
	if slots <= 0 {
		slots = max(1, runtime.GOMAXPROCS(0)/2)
	}
	g.slots = make(chan struct{}, slots)
	return g
}

// enter takes a slot and reports false if none gets free in time.
func (g *gate) enter() bool {
	select {
	case g.slots <- struct{}{}:
		return true
	default:
	}
	t := time.NewTimer(g.wait)
	defer t.Stop()
	select {
	case g.slots <- struct{}{}:
		return true
	case <-t.C:
		return false
	}
}

func (g *gate) leave() { <-g.slots }

// sample encodes blocks at even distances over all texts that are not remembered, as if they stood one behind the other,
// so many that their bytes stay within maxBytes, and estimates the rest from the blocks of the same bucket.
func (e *Encoder) sample(texts []Text, cost int, scratch *[]byte) (sum Count, estimated int) {
	var found, skipped tally
	budget := e.maxBytes
	// The stride is at least as long as keeps the blocks, all full, within the budget.
	stride := ceilDiv(cost, max(1, e.maxBytes/sampleBlock))
	pos := 0
	for i := range texts {
		t := &texts[i]
		if t.key == 0 {
			continue
		}
		start, text := pos, t.S
		pos += len(text) + textCost
		done := 0 // bytes of text that are dealt with
		for k := start / stride; ; k++ {
			from, to := max(k*stride-start, done), min(k*stride+sampleBlock-start, len(text))
			if from >= len(text) {
				break
			}
			if to <= from {
				continue
			}
			if from == 0 && to == len(text) && len(text) <= budget {
				budget -= len(text)
				c := e.encodeText(t, scratch)
				sum = sum.Add(c)
				found.add(text, c.Tokens)
				done = to
				break
			}
			from, to = t.boundary(from), t.boundary(to)
			if to <= from {
				continue
			}
			if to-from > budget {
				break
			}
			budget -= to - from
			skipped.skip(text[done:from])
			c := e.encode(t.plain(text[from:to], scratch))
			sum = sum.Add(c)
			found.add(text[from:to], c.Tokens)
			e.texts.densities.learn(text[from:to], c.Tokens)
			done = to
			runtime.Gosched()
		}
		skipped.skip(text[done:])
	}
	estimated = skipped.total()
	if estimated > 0 {
		sum = sum.Add(Count{Tokens: e.texts.densities.estimate(&found, &skipped), Estimated: true})
	}
	return sum, estimated
}

// estimateAll estimates the texts that are not remembered by what was learned of others.
func (e *Encoder) estimateAll(texts []Text) Count {
	var found, skipped tally
	for i := range texts {
		if texts[i].key != 0 {
			skipped.skip(texts[i].S)
		}
	}
	return Count{Tokens: e.texts.densities.estimate(&found, &skipped), Estimated: true}
}

// boundary moves i forward to where the text may be cut: not within a character, nor within an escape unless it stands in
// nothing but escapes.
func (t *Text) boundary(i int) int {
	text := t.S
	for end := min(i+utf8.UTFMax-1, len(text)); i < end && !utf8.RuneStart(text[i]); i++ {
	}
	if t.Form != JSONString {
		return i
	}
	for end := min(i+64, len(text)); i < end; i++ {
		escape := false
		for j := max(i-len(`\u0000`)+1, 0); j < i; j++ {
			escape = escape || text[j] == '\\'
		}
		if !escape && utf8.RuneStart(text[i]) {
			break
		}
	}
	return i
}
