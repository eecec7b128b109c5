// SPDX-License-Identifier: Apache-2.0

package bpe

import (
	"encoding/binary"
	"math"
	"math/bits"
	"strings"
	"unicode/utf8"
	"unsafe"

	"golang.org/x/text/unicode/norm"
)

const (
	shortBits  = 14
	longBits   = 11
	followBits = 12

	// padding is what the ASCII loop may read beyond the place where it stands.
	padding = 24
	// tailSize is the size up to which a text is copied as a whole, to where the loop may read beyond its end.
	tailSize = 64
)

// shortEntry remembers a piece of up to 15 bytes: its text, in the top byte its length and above that its tokens.
type shortEntry struct{ lo, hi uint64 }

// longEntry remembers a piece of 16 to 32 bytes: its first and last 16 bytes, its length and tokens.
type longEntry struct {
	words [4]uint64
	value uint64
}

// state is the work space of one call.
type state struct {
	short    [1 << shortBits]shortEntry
	long     [1 << longBits]longEntry
	pairs    [1 << followBits]uint64 // what valid found: the pair, and in the lowest bit the answer
	tail     [tailSize + padding]byte
	toks     []uint32
	dead     []uint64
	clean    []byte // the text without what is not UTF-8
	norm     []byte // the text in NFC
	maxPiece int
	cut      bool
	work     int // steps of merging, and pieces
}

func newState() *state {
	return &state{toks: make([]uint32, 512), dead: make([]uint64, 512/64+1)}
}

// room returns work space for a piece of n bytes, its marks cleared.
func (st *state) room(n int) ([]uint32, []uint64) {
	if n > len(st.toks) {
		st.toks = make([]uint32, n+n/4)
		st.dead = make([]uint64, len(st.toks)/64+1)
	}
	dead := st.dead[:n/64+1]
	clear(dead)
	return st.toks, dead
}

// keepRoom is the size up to which work space outlives a call.
const keepRoom = 1 << 20

func (e *Encoding) release(st *state) {
	if len(st.toks) > keepRoom {
		st.toks, st.dead = make([]uint32, 512), make([]uint64, 512/64+1)
	}
	if cap(st.clean)+cap(st.norm) > keepRoom {
		st.clean, st.norm = nil, nil
	}
	e.states.put(st)
}

// Count returns the number of tokens of text. Special tokens in it are counted as the plain text that they are, and each
// byte that is not UTF-8 as U+FFFD.
func (e *Encoding) Count(text string) int {
	n, _ := e.CountCut(text, 0)
	return n
}

// CountBytes is Count for bytes, which must not change during the call.
func (e *Encoding) CountBytes(text []byte) int {
	return e.Count(viewString(text))
}

// CountCut is Count with pieces cut every maxPiece bytes, where that is not 0, and counted part by part. cut says that there
// was such a piece; a cut can add up to four tokens, or hide one.
func (e *Encoding) CountCut(text string, maxPiece int) (n int, cut bool) {
	st := e.states.get()
	st.maxPiece, st.cut = maxPiece, false
	if maxPiece <= 0 {
		st.maxPiece = math.MaxInt
	}
	if e.nfc && !norm.NFC.IsNormalString(text) {
		text = st.normalize(text)
	}
	n = e.count(st, text)
	cut = st.cut
	e.release(st)
	return n, cut
}

func (e *Encoding) count(st *state, text string) (total int) {
	inTail := false
	for i := 0; i < len(text); {
		if e.rules.fast {
			if !inTail && (len(text)-i < padding || i == 0 && len(text) <= tailSize) {
				// The rest is copied to where the loop may read beyond it. Nothing before a piece decides about it.
				n := copy(st.tail[:], text[i:])
				clear(st.tail[n:])
				text, i, inTail = unsafe.String(&st.tail[0], n), 0, true
			}
			size := len(text)
			if inTail {
				size = len(st.tail)
			}
			j, n := 0, 0
			if e.rules.cases {
				j, n = e.fastCases(st, text, i, size)
			} else {
				j, n = e.fastLetters(st, text, i, size)
			}
			total += n
			if j > i && !inTail && len(text)-j < padding {
				i = j
				continue
			}
			i = j
			if i >= len(text) {
				break
			}
		}
		end, wide := e.next(text, i)
		if end < 0 {
			st.sanitize(text[i:])
			return total + e.count(st, viewString(st.clean))
		}
		total += e.piece(st, text[i:end], wide)
		i = end
	}
	return total
}

// sanitize writes text with U+FFFD for each byte that is not UTF-8.
func (st *state) sanitize(text string) {
	st.clean = st.clean[:0]
	for len(text) > 0 {
		r, n := utf8.DecodeRuneInString(text)
		st.clean = utf8.AppendRune(st.clean, r)
		text = text[n:]
	}
}

// joiner is what the library puts into runs of more than 30 combining marks, and NFC does not.
const joiner = "\u034f"

// normalize writes text in NFC. Bytes that are not UTF-8 stay as they are.
func (st *state) normalize(text string) string {
	st.norm = norm.NFC.AppendString(st.norm[:0], text)
	if out := viewString(st.norm); strings.Count(out, joiner) > strings.Count(text, joiner) {
		// Marks are in order within each 30 only: no text of any language, and an estimate.
		st.cut = true
		if !strings.Contains(text, joiner) {
			st.norm = removeAll(st.norm, joiner)
		}
	}
	return viewString(st.norm)
}

func viewString(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// removeAll takes every part out of b, in place.
func removeAll(b []byte, part string) []byte {
	kept := b[:0]
	for len(b) > 0 {
		i := strings.Index(viewString(b), part)
		if i < 0 {
			return append(kept, b...)
		}
		kept = append(kept, b[:i]...)
		b = b[i+len(part):]
	}
	return kept
}

// piece counts the tokens of one piece.
func (e *Encoding) piece(st *state, p string, wide bool) int {
	if len(p) > st.maxPiece {
		return e.cutPiece(st, p, wide)
	}
	if e.isWhole(p) {
		return 1
	}
	if wide {
		return e.segments(st, p)
	}
	return e.segment(st, p)
}

// isWhole reports whether the piece is a token that no merge leads to.
func (e *Encoding) isWhole(p string) bool {
	if e.whole == nil {
		return false
	}
	_, ok := e.whole[p]
	return ok
}

func (e *Encoding) cutPiece(st *state, p string, wide bool) (total int) {
	st.cut = true
	for len(p) > st.maxPiece {
		n := st.maxPiece
		for n > 1 && n > st.maxPiece-utf8.UTFMax && !utf8.RuneStart(p[n]) {
			n--
		}
		total += e.piece(st, p[:n], wide)
		p = p[n:]
	}
	return total + e.piece(st, p, wide)
}

// segments takes a piece apart where no merge can cross.
func (e *Encoding) segments(st *state, p string) (total int) {
	start := 0
	prev, i := decode(p, 0)
	for i < len(p) {
		r, n := decode(p, i)
		if e.seams.apart(prev, r) {
			if i-start == 3 && prev >= 0x800 {
				total += int(e.seams.runes[prev] & seamCount)
			} else {
				total += e.segment(st, p[start:i])
			}
			start = i
		}
		prev = r
		i += n
	}
	return total + e.segment(st, p[start:])
}

// segment counts what is merged as a whole.
func (e *Encoding) segment(st *state, p string) int {
	n := len(p)
	switch {
	case n < 2:
		return n
	case n <= 15:
		lo, hi := pack(p)
		hi |= uint64(n) << 56
		slot := &st.short[shortHash(lo, hi)]
		if slot.lo == lo && slot.hi&^countMask == hi {
			return int(slot.hi >> countShift)
		}
		return e.missShort(slot, st, p, lo, hi)
	case n <= 32:
		return e.segmentLong(st, p)
	}
	st.work++
	return e.merged(st, p)
}

// missShort counts a piece of up to 15 bytes that slot does not hold, and puts it there.
func (e *Encoding) missShort(slot *shortEntry, st *state, p string, lo, hi uint64) int {
	st.work++
	n := 1
	switch {
	case len(p) == 1:
	case len(p) <= 3 && lo&0x808080 == 0:
		n = e.small.get(byte(lo), byte(lo>>8), byte(lo>>16), len(p))
	case byte(lo) == ' ' && e.exact.holds(lo, hi):
	case e.isWhole(p):
	default:
		n = e.merged(st, p)
	}
	slot.lo, slot.hi = lo, hi|uint64(n)<<countShift
	return n
}

func (e *Encoding) segmentLong(st *state, p string) int {
	n := len(p)
	w := [4]uint64{load64(p, 0), load64(p, 8), load64(p, n-16), load64(p, n-8)}
	h := (w[0]*pairFactor ^ bits.RotateLeft64(w[1], 31)*hashFactor ^ bits.RotateLeft64(w[2], 17)*pairFactor ^ w[3]*hashFactor2) * hashFactor2 >> (64 - longBits)
	slot := &st.long[h]
	if slot.words == w && slot.value>>32 == uint64(n) {
		return int(uint32(slot.value))
	}
	st.work++
	c := e.merged(st, p)
	slot.words, slot.value = w, uint64(n)<<32|uint64(c)
	return c
}

const (
	countShift = 60
	countMask  = 0xf << countShift

	hashFactor  = 0xd6e8feb86659fd93
	hashFactor2 = 0xa0761d6478bd642f
)

func shortHash(lo, hi uint64) uint64 {
	return (lo ^ hi*hashFactor) * pairFactor >> (64 - shortBits)
}

// pack puts 2 to 15 bytes into two words, little end first.
func pack(p string) (lo, hi uint64) {
	n := len(p)
	switch {
	case n >= 8:
		return load64(p, 0), load64(p, n-8) >> (8 * (16 - n))
	case n >= 4:
		return uint64(load32(p, 0)) | uint64(load32(p, n-4))<<(8*(n-4)), 0
	}
	return uint64(p[0]) | uint64(p[n/2])<<(8*(n/2)) | uint64(p[n-1])<<(8*(n-1)), 0
}

func load64(p string, i int) uint64 {
	return binary.LittleEndian.Uint64((*[8]byte)(unsafe.Add(unsafe.Pointer(unsafe.StringData(p)), i))[:])
}

func load32(p string, i int) uint32 {
	return binary.LittleEndian.Uint32((*[4]byte)(unsafe.Add(unsafe.Pointer(unsafe.StringData(p)), i))[:])
}
