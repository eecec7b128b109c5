// SPDX-License-Identifier: Apache-2.0

// Package replay sends traces of LLM traffic through a routing policy to simulated servers, on a virtual clock.
//
// The policies, the ledger of tokens, the prefix index and the session tracker are the daemon's own; only time and the
// engines are simulated. Rules of other routers, made from their published formulas, run beside them.
package replay

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// ErrTrace: a file is in none of the formats.
var ErrTrace = errors.New("not a trace")

// Request is one request of a trace.
type Request struct {
	Arrival time.Duration // since the trace's start; of the first turn only where Closed
	Session uint64        // 0 = none
	Turn    int           // position in its session, from 0
	Think   time.Duration // Closed: from the end of the turn before
	Prompt  int           // tokens
	Output  int           // tokens, at least 1
	Blocks  []uint64      // of the prompt; an id stands for its block and all before it
}

// Trace is a list of requests in order of arrival.
type Trace struct {
	Name        string
	BlockTokens int  // tokens that an id of Blocks stands for
	Closed      bool // a turn comes when the one before has ended
	Requests    []Request
}

// Span is the time from the first arrival to the last.
func (t *Trace) Span() time.Duration {
	var first, last time.Duration = math.MaxInt64, 0
	for i := range t.Requests {
		first, last = min(first, t.Requests[i].Arrival), max(last, t.Requests[i].Arrival)
	}
	return max(last-first, 0)
}

// Slice returns the requests whose number in the trace is in [from, to) of its length; sessions that began before are cut.
func (t *Trace) Slice(from, to float64) *Trace {
	n := float64(len(t.Requests))
	out := *t
	out.Requests = slices.Clone(t.Requests[int(from*n):int(to*n)])
	out.rebase()
	return &out
}

func (t *Trace) rebase() {
	if len(t.Requests) == 0 {
		return
	}
	start := t.Requests[0].Arrival
	turns := map[uint64]int{}
	for i := range t.Requests {
		r := &t.Requests[i]
		r.Arrival -= start
		r.Turn = turns[r.Session]
		turns[r.Session]++
	}
}

// record is a line of the JSONL formats: Mooncake's own (timestamp, input_length, hash_ids) and the one with runs of blocks.
type record struct {
	ArrivalMS   *float64 `json:"arrival_ms"`
	SpreadMS    *float64 `json:"spread_ms"`
	Timestamp   *float64 `json:"timestamp"`
	Session     *int64   `json:"session"`
	ThinkMS     *float64 `json:"think_ms"`
	Input       int      `json:"input_tokens"`
	InputLength int      `json:"input_length"`
	Output      int      `json:"output_tokens"`
	OutLength   int      `json:"output_length"`
	Blocks      [][2]int `json:"blocks"`
	HashIDs     []uint64 `json:"hash_ids"`
	BlockSize   int      `json:"block_size"`
	Group       *int64   `json:"pgroup"`
	GroupBlocks int      `json:"pblocks"`
}

// limits of what a line may ask for: a file is not trusted to be a trace.
const (
	maxTokens = 1 << 24
	maxLine   = 64 << 20
)

// Read reads a trace file, gzip or not, by its content: JSONL or CSV.
func Read(path string) (*Trace, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open trace: %w", err)
	}
	defer f.Close()
	name := filepath.Base(path)
	for _, ext := range [...]string{".gz", ".jsonl", ".csv", ".json"} {
		name = strings.TrimSuffix(name, ext)
	}
	t, err := Parse(name, f)
	if err != nil {
		return nil, fmt.Errorf("read trace %s: %w", path, err)
	}
	return t, nil
}

// Parse reads a trace.
func Parse(name string, r io.Reader) (*Trace, error) {
	b := bufio.NewReader(r)
	if head, _ := b.Peek(2); bytes.Equal(head, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, fmt.Errorf("unpack: %w", err)
		}
		defer z.Close()
		b = bufio.NewReader(z)
	}
	t := &Trace{Name: name}
	head, _ := b.Peek(1)
	var err error
	if len(head) == 1 && head[0] == '{' {
		err = t.jsonl(b)
	} else {
		err = t.csv(b)
	}
	if err != nil {
		return nil, err
	}
	if len(t.Requests) == 0 {
		return nil, fmt.Errorf("find requests: %w", ErrTrace)
	}
	slices.SortStableFunc(t.Requests, func(a, b Request) int { return int(a.Arrival - b.Arrival) })
	t.rebase()
	return t, nil
}

// group offsets ids of blocks that several sessions share, away from ids of their own.
const group = 1 << 62

func (t *Trace) jsonl(r io.Reader) error {
	s := bufio.NewScanner(r)
	s.Buffer(make([]byte, 64<<10), maxLine)
	sessions := map[int64]bool{}
	shared := map[int64][]uint64{} // by session: the first blocks of its first turn
	for n := 1; s.Scan(); n++ {
		if len(bytes.TrimSpace(s.Bytes())) == 0 {
			continue
		}
		var rec record
		if err := json.Unmarshal(s.Bytes(), &rec); err != nil {
			return fmt.Errorf("line %d: %w: %w", n, ErrTrace, err)
		}
		req := Request{Prompt: rec.Input + rec.InputLength, Output: max(rec.Output+rec.OutLength, 1), Blocks: rec.HashIDs}
		at := rec.SpreadMS
		for _, p := range [...]*float64{rec.ArrivalMS, rec.Timestamp} {
			if at == nil {
				at = p
			}
		}
		if at == nil || !(*at >= 0 && *at < 1e12) || req.Prompt < 1 || req.Prompt > maxTokens || req.Output > maxTokens {
			return fmt.Errorf("line %d: %w: no time or length, or one out of range", n, ErrTrace)
		}
		req.Arrival = time.Duration(*at * float64(time.Millisecond))
		blocks := 0
		for _, run := range rec.Blocks {
			if blocks += run[1]; run[0] < 0 || run[1] < 0 || run[1] > maxTokens || blocks > maxTokens {
				return fmt.Errorf("line %d: %w: run of blocks out of range", n, ErrTrace)
			}
		}
		for _, run := range rec.Blocks {
			for i := range run[1] {
				req.Blocks = append(req.Blocks, uint64(run[0]+i))
			}
		}
		if rec.Session != nil {
			req.Session = uint64(*rec.Session) + 1
			sessions[*rec.Session] = true
		}
		if rec.ThinkMS != nil {
			t.Closed = true
			req.Think = time.Duration(*rec.ThinkMS * float64(time.Millisecond))
		}
		if rec.Group != nil && rec.Session != nil {
			first, ok := shared[*rec.Session]
			if !ok {
				first = slices.Clone(req.Blocks[:min(rec.GroupBlocks, len(req.Blocks))])
				shared[*rec.Session] = first
			}
			for i := range req.Blocks {
				if i >= len(first) || req.Blocks[i] != first[i] {
					break
				}
				req.Blocks[i] = group | uint64(*rec.Group)<<32 | uint64(i)
			}
		}
		if len(req.Blocks) > 0 && t.BlockTokens == 0 {
			t.BlockTokens = rec.BlockSize
			if t.BlockTokens <= 0 { // 512 in Mooncake's files, 64 in files of coding agents
				t.BlockTokens = 1 << int(math.Round(math.Log2(float64(req.Prompt)/float64(len(req.Blocks)))))
				if t.BlockTokens > 128 {
					t.BlockTokens = 512
				}
			}
		}
		t.Requests = append(t.Requests, req)
	}
	if err := s.Err(); err != nil {
		return fmt.Errorf("read lines: %w", err)
	}
	for i := range t.Requests { // engines reuse full blocks only
		r := &t.Requests[i]
		r.Blocks = r.Blocks[:min(len(r.Blocks), r.Prompt/max(t.BlockTokens, 1))]
	}
	return nil
}

// csv reads Azure's files as they are published (TIMESTAMP, ContextTokens, GeneratedTokens) and those with arrival_ms,
// [client,] input_tokens, output_tokens.
func (t *Trace) csv(r io.Reader) error {
	c := csv.NewReader(r)
	c.ReuseRecord = true
	head, err := c.Read()
	if err != nil {
		return fmt.Errorf("read header: %w: %w", ErrTrace, err)
	}
	at, in, out := -1, -1, -1
	stamps := false
	for i, name := range head {
		switch strings.ToLower(strings.TrimPrefix(strings.TrimSpace(name), "\ufeff")) {
		case "arrival_ms":
			at = i
		case "timestamp":
			at, stamps = i, true
		case "input_tokens", "contexttokens":
			in = i
		case "output_tokens", "generatedtokens":
			out = i
		}
	}
	if at < 0 || in < 0 || out < 0 {
		return fmt.Errorf("find columns of time, input and output: %w", ErrTrace)
	}
	var start time.Time
	for n := 2; ; n++ {
		row, err := c.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("line %d: %w: %w", n, ErrTrace, err)
		}
		var req Request
		if stamps {
			when, err := time.Parse("2006-01-02 15:04:05.9999999", strings.TrimSpace(row[at]))
			if err != nil {
				return fmt.Errorf("line %d: %w: %w", n, ErrTrace, err)
			}
			if start.IsZero() {
				start = when
			}
			req.Arrival = when.Sub(start)
		} else {
			ms, err := strconv.ParseFloat(row[at], 64)
			if err != nil || !(ms >= 0 && ms < 1e12) {
				return fmt.Errorf("line %d: %w: arrival %q", n, ErrTrace, row[at])
			}
			req.Arrival = time.Duration(ms * float64(time.Millisecond))
		}
		var e1, e2 error
		req.Prompt, e1 = strconv.Atoi(row[in])
		req.Output, e2 = strconv.Atoi(row[out])
		if e1 != nil || e2 != nil || req.Prompt < 0 || req.Prompt > maxTokens || req.Output < 0 || req.Output > maxTokens {
			return fmt.Errorf("line %d: %w: lengths %q and %q", n, ErrTrace, row[in], row[out])
		}
		req.Prompt, req.Output = max(req.Prompt, 1), max(req.Output, 1)
		t.Requests = append(t.Requests, req)
	}
}
