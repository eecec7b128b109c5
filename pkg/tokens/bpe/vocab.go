// SPDX-License-Identifier: Apache-2.0

package bpe

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Encoding counts tokens with one vocabulary. It is immutable and safe for concurrent use.
type Encoding struct {
	pattern Pattern
	rules   splitRules
	nfc     bool // normalize first

	trie   trie
	heads  []uint32 // cells by the first two bytes
	runs   [256]byteRun
	exact  exactTable
	pairs  pairTable
	tokens []tokenInfo
	groups []runGroup
	whole  map[string]struct{}
	seams  seams
	small  smallTable
	ascii  *asciiTable

	states *statePool
}

// ErrVocabulary: a vocabulary is not one that this package can count with exactly.
var ErrVocabulary = errors.New("unusable vocabulary")

// New returns the encoding of a vocabulary in tiktoken's form, where a token's rank is both its number and the order of its
// merge, and a piece that is a token as a whole is not merged at all. It does not keep ranks.
func New(ranks map[string]int, p Pattern) (*Encoding, error) {
	b, err := newBuilder(p, len(ranks))
	if err != nil {
		return nil, err
	}
	tokens := make([]string, 0, len(ranks))
	for t := range ranks {
		tokens = append(tokens, t)
	}
	slices.Sort(tokens)
	if len(tokens) > 0 && tokens[0] == "" {
		return nil, fmt.Errorf("%w: an empty token", ErrVocabulary)
	}
	// prefix[i] is the longest token that tokens[i] begins with.
	prefix, order := make([]int32, len(tokens)), make([]int32, len(tokens))
	var stack []int32
	for i, t := range tokens {
		for len(stack) > 0 && !strings.HasPrefix(t, tokens[stack[len(stack)-1]]) {
			stack = stack[:len(stack)-1]
		}
		prefix[i] = -1
		if len(stack) > 0 {
			prefix[i] = stack[len(stack)-1]
		}
		stack = append(stack, int32(i))
		order[i] = int32(i)
	}
	rank := make([]int32, len(tokens))
	for i, t := range tokens {
		rank[i] = int32(ranks[t])
	}
	slices.SortFunc(order, func(i, j int32) int { return cmp.Compare(rank[i], rank[j]) })

	ids := make([]uint32, len(tokens))
	maxRank := 0
	for _, r := range rank {
		maxRank = max(maxRank, int(r))
	}
	if maxRank >= maxTokens {
		return nil, fmt.Errorf("%w: over %d tokens", ErrVocabulary, maxTokens)
	}
	idOf := make([]uint32, maxRank+1) // by rank
	for i := range idOf {
		idOf[i] = none
	}
	for i := range ids {
		ids[i] = none
		if len(tokens[i]) == 1 {
			ids[i] = uint32(tokens[i][0])
			idOf[rank[i]] = ids[i]
		}
	}
	for n, i := range order {
		if n > 0 && rank[order[n-1]] == rank[i] {
			return nil, fmt.Errorf("%w: two tokens of rank %d", ErrVocabulary, rank[i])
		}
		t := tokens[i]
		if len(t) == 1 {
			continue
		}
		for p := prefix[i]; p >= 0; p = prefix[p] {
			if ids[p] == none {
				continue
			}
			rest, ok := ranks[t[len(tokens[p]):]]
			if !ok || idOf[rest] == none {
				continue
			}
			if id := b.merge(t, ids[p], idOf[rest]); id != none {
				ids[i], idOf[rank[i]] = id, id
				break
			}
		}
		if ids[i] == none {
			b.addWhole(t)
		}
	}
	// A token whose halves come later in the order can still be merged where they meet.
	for _, i := range order {
		for p := prefix[i]; ids[i] == none && p >= 0; p = prefix[p] {
			rest, ok := ranks[tokens[i][len(tokens[p]):]]
			if ok && ids[p] != none && idOf[rest] != none && b.e.valid(ids[p], idOf[rest], &b.work) {
				return nil, fmt.Errorf("%w: token %q comes before its halves", ErrVocabulary, tokens[i])
			}
		}
	}
	reached := tokens[:0]
	reachedIDs := ids[:0]
	for i, t := range tokens {
		if ids[i] != none {
			reached = append(reached, t)
			reachedIDs = append(reachedIDs, ids[i])
		}
	}
	return b.finish(reached, reachedIDs)
}

// builder gathers the tokens that merging can reach, numbered in the order of their merges.
type builder struct {
	e    *Encoding
	work int
}

func newBuilder(p Pattern, tokens int) (*builder, error) {
	rules, ok := patternRules[p]
	if !ok {
		return nil, fmt.Errorf("unknown split pattern %d", p)
	}
	initClasses()
	if tokens > maxTokens {
		return nil, fmt.Errorf("%w: over %d tokens", ErrVocabulary, maxTokens)
	}
	e := &Encoding{pattern: p, rules: rules, pairs: newPairTable(max(tokens, 256))}
	e.tokens = make([]tokenInfo, 256, tokens+256)
	for i := range uint32(256) {
		e.tokens[i] = tokenInfo{left: i, right: i, shorter: none, size: 1}
	}
	return &builder{e: e}, nil
}

// merge enters the token that left and right merge into, after all merges that go before it. It returns none if the two
// never stand next to each other when it is this rule's turn.
func (b *builder) merge(text string, left, right uint32) uint32 {
	e := b.e
	if !e.valid(left, right, &b.work) {
		return none
	}
	id := uint32(len(e.tokens))
	e.tokens = append(e.tokens, tokenInfo{left: left, right: right, shorter: none, size: uint16(min(len(text), maxSize))})
	e.pairs.add(left, right, id)
	return id
}

// addWhole enters a token that no merge leads to: it counts only as a piece of its own.
func (b *builder) addWhole(text string) {
	if b.e.whole == nil {
		b.e.whole = make(map[string]struct{})
	}
	b.e.whole[strings.Clone(text)] = struct{}{}
}

// finish builds the tables from the reachable tokens, sorted by their text.
func (b *builder) finish(tokens []string, ids []uint32) (*Encoding, error) {
	e := b.e
	singles := 0
	for _, t := range tokens {
		if len(t) == 1 {
			singles++
		}
		if len(t) > maxSize {
			return nil, fmt.Errorf("%w: a token of %d bytes", ErrVocabulary, len(t))
		}
	}
	if singles != 256 {
		return nil, fmt.Errorf("%w: %d of the 256 single bytes", ErrVocabulary, singles)
	}
	var err error
	if e.trie, err = newTrie(tokens, ids); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrVocabulary, err)
	}
	e.heads = newHeads(e.trie)
	e.runs = newByteRuns(e.trie)
	e.exact = newExactTable(tokens)
	e.newRunGroups()
	var stack []int
	for i, t := range tokens {
		for len(stack) > 0 && !strings.HasPrefix(t, tokens[stack[len(stack)-1]]) {
			stack = stack[:len(stack)-1]
		}
		e.tokens[ids[i]].shorter = none
		if len(stack) > 0 {
			e.tokens[ids[i]].shorter = ids[stack[len(stack)-1]]
		}
		stack = append(stack, i)
	}
	e.tokens = slices.Clip(e.tokens)
	e.seams = newSeams(tokens)
	e.small = newSmallTable(tokens, e.whole)
	e.ascii = newASCIITable(e.rules)
	e.states = newStatePool()
	return e, nil
}

// Pattern returns the way in which the encoding splits text into pieces.
func (e *Encoding) Pattern() Pattern { return e.pattern }

// Size returns the bytes that the encoding's tables take up, without those of the pooled work space.
func (e *Encoding) Size() int {
	n := len(e.trie)*8 + len(e.pairs.words)*8 + len(e.pairs.filter)*8 + len(e.tokens)*16
	n += len(e.heads)*4 + len(e.exact.texts)*16 + len(e.exact.filter)*8
	n += len(e.seams.pairs)*8 + len(e.seams.runes) + len(e.small.two) + len(e.small.three)
	for t := range e.whole {
		n += len(t) + 32
	}
	return n
}
