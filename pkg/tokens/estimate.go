// SPDX-License-Identifier: Apache-2.0

package tokens

import "sync"

// bucket is a kind of text, told by a glance at its bytes. Within one, tokens per byte vary far less than between them.
type bucket uint8

const (
	bucketProse   bucket = iota // words of ASCII letters
	bucketCode                  // many marks
	bucketJSON                  // objects and arrays
	bucketDigits                // logs, tables, hex dumps
	bucketDense                 // no spaces: base64, minified text
	bucketSpace                 // mostly white space
	bucketLatin                 // some letters beyond ASCII
	bucketAlpha                 // Greek, Cyrillic, Hebrew, Arabic
	bucketIndic                 // the scripts of South and Southeast Asia, and others of three bytes a character
	bucketHan                   //
	bucketKana                  // Japanese
	bucketHangul                // Korean
	bucketOther                 // symbols, emoji, rare scripts, what is no text
	bucketEscapes               // JSON escapes of characters
	numBuckets
)

// bytesPerTokenOf is what texts have in o200k_base. Each encoder learns its own.
var bytesPerTokenOf = [numBuckets]float64{
	bucketProse: 4.7, bucketCode: 3.2, bucketJSON: 4.2, bucketDigits: 2.2, bucketDense: 1.5, bucketSpace: 6, bucketLatin: 4.2,
	bucketAlpha: 4.5, bucketIndic: 5, bucketHan: 4.1, bucketKana: 4.1, bucketHangul: 4.3, bucketOther: 3, bucketEscapes: 8,
}

const (
	// probeSize is how much of a block is looked at.
	probeSize = 256
	// learnFrom and learnUpTo bound the texts that a density is learned from: a short one says little, and of a long one
	// the probe says little.
	learnFrom, learnUpTo = 256, 16 << 10
	// learnWindow is how many bytes of a bucket are remembered in full weight, learnStart how much the figures that are
	// built in weigh.
	learnWindow, learnStart = 256 << 10, 4 << 10
)

// byteKind is what one byte says. Bytes that continue a character say nothing.
type byteKind uint8

const (
	kindNone byteKind = iota
	kindLetter
	kindDigit
	kindSpace
	kindMark
	kindLatin
	kindAlpha
	kindIndic
	kindKana
	kindHan
	kindHangul
	kindOther
	numKinds
)

var byteKinds = func() (t [256]byteKind) {
	for i := range t {
		switch b := byte(i); {
		case 'a' <= b|0x20 && b|0x20 <= 'z':
			t[i] = kindLetter
		case '0' <= b && b <= '9':
			t[i] = kindDigit
		case b == ' ' || '\t' <= b && b <= '\r':
			t[i] = kindSpace
		case b < 0x80:
			t[i] = kindMark
		case b < 0xc0:
			t[i] = kindNone
		case b < 0xcc:
			t[i] = kindLatin
		case b < 0xe0:
			t[i] = kindAlpha
		case b < 0xe2: // U+0800 to U+1FFF
			t[i] = kindIndic
		case b == 0xe3: // U+3000 to U+3FFF
			t[i] = kindKana
		case 0xe4 <= b && b <= 0xe9:
			t[i] = kindHan
		case 0xea <= b && b <= 0xed:
			t[i] = kindHangul
		default:
			t[i] = kindOther
		}
	}
	return t
}()

// bucketOf looks at the start of a text.
func bucketOf(text string) bucket {
	text = text[:min(len(text), probeSize)]
	var n [numKinds]int
	escapes, quotes := 0, 0
	for i := range len(text) {
		n[byteKinds[text[i]]]++
		switch text[i] {
		case '\\':
			if i+1 < len(text) && text[i+1] == 'u' {
				escapes++
			}
		case '"':
			quotes++
		}
	}
	size := len(text)
	cjk := n[kindKana] + n[kindHan] + n[kindHangul]
	switch {
	case 24*escapes > size: // a quarter of the bytes
		return bucketEscapes
	case 3*cjk > size/4 && cjk > n[kindOther]:
		switch {
		case 2*n[kindHangul] > cjk:
			return bucketHangul
		case 5*n[kindKana] > cjk:
			return bucketKana
		}
		return bucketHan
	case 2*n[kindAlpha] > size/4:
		return bucketAlpha
	case 3*n[kindIndic] > size/4 && n[kindIndic] > n[kindOther]:
		return bucketIndic
	case 3*(n[kindOther]+n[kindIndic]) > size/4 || 2*n[kindNone] > size:
		return bucketOther
	case 5*n[kindSpace] > 2*size:
		return bucketSpace
	case 4*n[kindDigit] > size:
		return bucketDigits
	case 40*n[kindSpace] < size && 8*n[kindMark] < size && size >= 32:
		return bucketDense
	case 20*quotes > size:
		return bucketJSON
	case 8*n[kindMark] > size:
		return bucketCode
	case 50*n[kindLatin] > size:
		return bucketLatin
	}
	return bucketProse
}

// tally is bytes and tokens by bucket.
type tally [numBuckets]struct{ bytes, tokens int }

func (t *tally) add(text string, tokens int) {
	b := &t[bucketOf(text)]
	b.bytes += len(text)
	b.tokens += tokens
}

// skip enters a text without a count, block by block, by a glance at each.
func (t *tally) skip(text string) {
	for len(text) > 0 {
		n := min(len(text), sampleBlock)
		t[bucketOf(text)].bytes += n
		text = text[n:]
	}
}

func (t *tally) total() (bytes int) {
	for i := range t {
		bytes += t[i].bytes
	}
	return bytes
}

// densities are the tokens per byte of each bucket, as learned from the texts that an encoder has counted: a ratio of sums
// that forget.
type densities struct {
	mu      sync.Mutex
	learned [numBuckets]struct{ bytes, tokens float64 }
}

func (d *densities) learn(text string, tokens int) {
	if len(text) < learnFrom || len(text) > learnUpTo {
		return
	}
	b := bucketOf(text)
	if !d.mu.TryLock() { // another goroutine is about the same; nothing is lost with one sample
		return
	}
	l := &d.learned[b]
	l.bytes += float64(len(text))
	l.tokens += float64(tokens)
	if l.bytes > learnWindow {
		l.bytes /= 2
		l.tokens /= 2
	}
	d.mu.Unlock()
}

// perByte returns a bucket's tokens per byte.
func (d *densities) perByte(b bucket) float64 {
	d.mu.Lock()
	l := d.learned[b]
	d.mu.Unlock()
	return (l.tokens + learnStart/bytesPerTokenOf[b]) / (l.bytes + learnStart)
}

// estimate returns the tokens of what was skipped: as dense as what was found in the same bucket beside it, else as the
// bucket is known to be, off by as much as the buckets that were found are off.
func (d *densities) estimate(found, skipped *tally) int {
	var known [numBuckets]float64
	expected, tokens := 0.0, 0
	for b := range found {
		known[b] = d.perByte(bucket(b))
		expected += known[b] * float64(found[b].bytes)
		tokens += found[b].tokens
	}
	off := 1.0
	if expected > 0 {
		off = float64(tokens) / expected
	}
	sum := 0.0
	for b := range skipped {
		density := known[b] * off
		if found[b].bytes >= probeSize {
			density = float64(found[b].tokens) / float64(found[b].bytes)
		}
		sum += density * float64(skipped[b].bytes)
	}
	return int(sum + 0.5)
}
