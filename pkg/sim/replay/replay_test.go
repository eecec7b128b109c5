// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"bytes"
	"compress/gzip"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/policy"
	"github.com/shunt-lb/shunt/pkg/sim"
)

func TestParseReadsThePublishedFormats(t *testing.T) {
	for _, tt := range []struct {
		name, text string
		block      int
		closed     bool
		want       []Request
	}{
		{"mooncake", `{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}
{"timestamp": 4000, "input_length": 600, "output_length": 0, "hash_ids": [7, 3]}`, 512, false, []Request{
			{Prompt: 1100, Output: 5, Blocks: []uint64{7, 8}},
			{Arrival: 3 * time.Second, Turn: 1, Prompt: 600, Output: 1, Blocks: []uint64{7}}}},
		{"runs", `{"id":0,"arrival_ms":0,"spread_ms":20,"session":3,"input_tokens":1600,"output_tokens":2,"blocks":[[5,2],[40,2]]}
{"id":1,"arrival_ms":0,"spread_ms":10,"session":4,"input_tokens":500,"output_tokens":2,"blocks":[[5,1]]}`, 512, false, []Request{
			{Session: 5, Prompt: 500, Output: 2, Blocks: []uint64{}},
			{Arrival: 10 * time.Millisecond, Session: 4, Prompt: 1600, Output: 2, Blocks: []uint64{5, 6, 40}}}},
		{"closed, with groups", `{"arrival_ms":0,"session":0,"turn":1,"think_ms":0,"input_tokens":200,"output_tokens":2,"pgroup":1,"pblocks":2,"blocks":[[100,3]]}
{"arrival_ms":9,"session":0,"turn":2,"think_ms":50,"input_tokens":260,"output_tokens":2,"pgroup":1,"pblocks":2,"blocks":[[100,4]]}`, 64, true, []Request{
			{Session: 1, Prompt: 200, Output: 2, Blocks: []uint64{group | 1<<32, group | 1<<32 | 1, 102}},
			{Arrival: 9 * time.Millisecond, Session: 1, Turn: 1, Think: 50 * time.Millisecond, Prompt: 260, Output: 2,
				Blocks: []uint64{group | 1<<32, group | 1<<32 | 1, 102, 103}}}},
		{"azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,0\n", 0, false, []Request{
			{Prompt: 374, Output: 44}, {Arrival: 4314579 * time.Microsecond, Turn: 1, Prompt: 396, Output: 1}}},
		{"csv", "arrival_ms,client,input_tokens,output_tokens\n5,1,10,20\n", 0, false, []Request{{Prompt: 10, Output: 20}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var z bytes.Buffer
			w := gzip.NewWriter(&z)
			w.Write([]byte(tt.text))
			w.Close()
			for _, text := range []string{tt.text, z.String()} {
				got, err := Parse("x", strings.NewReader(text))
				if err != nil {
					t.Fatal(err)
				}
				if got.BlockTokens != tt.block || got.Closed != tt.closed || !reflect.DeepEqual(got.Requests, tt.want) {
					t.Errorf("block %d, closed %v, got\n%+v, want\n%+v", got.BlockTokens, got.Closed, got.Requests, tt.want)
				}
			}
		})
	}
}

func TestParseRefuses(t *testing.T) {
	for _, text := range []string{"", "{}", `{"arrival_ms":-1,"input_tokens":5}`, `{"arrival_ms":1,"input_tokens":5,"blocks":[[1,999999999]]}`,
		`{"arrival_ms":1,"input_tokens":0}`, "a,b\n1,2\n", "arrival_ms,input_tokens,output_tokens\n1,x,2\n", "arrival_ms,input_tokens,output_tokens\n"} {
		if got, err := Parse("x", strings.NewReader(text)); !errors.Is(err, ErrTrace) {
			t.Errorf("%q: got %v, %v", text, got, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(`{"arrival_ms":0,"session":0,"think_ms":0,"input_tokens":200,"pgroup":1,"pblocks":2,"blocks":[[100,3]]}`)
	f.Add("arrival_ms,input_tokens,output_tokens\n1,3,2\n")
	f.Add("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
	f.Fuzz(func(t *testing.T, text string) {
		tr, err := Parse("x", strings.NewReader(text))
		if err != nil {
			return
		}
		for _, r := range tr.Requests {
			if r.Prompt < 1 || r.Output < 1 || r.Arrival < 0 || len(r.Blocks) > r.Prompt {
				t.Fatalf("request %+v", r)
			}
		}
	})
}

func run(t *testing.T, tr *Trace, o Options) (*Run, *Report) {
	t.Helper()
	r, err := Simulate(tr, o)
	if err != nil {
		t.Fatal(err)
	}
	return r, Summarise(tr, o, r, DefaultSLO)
}

func TestEveryPolicyServesEverything(t *testing.T) {
	tr := Generate("chat", 3).Slice(0, 0.1)
	for _, name := range append(policy.Names(), Rules()...) {
		r, rep := run(t, tr, Options{Policy: name})
		for i := range r.Outcomes {
			o := &r.Outcomes[i]
			if o.Request != &tr.Requests[i] || o.Failed || o.TTFT <= 0 || o.Latency < o.TTFT || o.Backend < 0 {
				t.Fatalf("%s: request %d ended as %+v", name, i, o)
			}
		}
		if rep.Prefilled <= 0 || rep.Prefilled > 1.2 || rep.Imbalance < 1 || rep.Failed != 0 {
			t.Errorf("%s: %+v", name, rep)
		}
	}
}

func TestOneSeedGivesOneResult(t *testing.T) {
	tr := Generate("shared", 2).Slice(0, 0.1)
	for _, name := range []string{"least_cost", "power_of_two", "llm-d"} {
		a, _ := run(t, tr, Options{Policy: name, Seed: 5})
		b, _ := run(t, tr, Options{Policy: name, Seed: 5})
		if !reflect.DeepEqual(a, b) {
			t.Errorf("%s: two runs differ", name)
		}
	}
}

func TestLeastCostWinsWherePrefixesAreLong(t *testing.T) {
	for _, name := range []string{"shared", "agents"} {
		tr := Generate(name, 1).Slice(0, 0.5)
		_, rr := run(t, tr, Options{Policy: "round_robin"})
		_, lc := run(t, tr, Options{Policy: "least_cost"})
		if lc.TTFTMean > 0.7*rr.TTFTMean || lc.Goodput < rr.Goodput {
			t.Errorf("%s: TTFT %.3f s against %.3f, goodput %.3f against %.3f", name, lc.TTFTMean, rr.TTFTMean, lc.Goodput, rr.Goodput)
		}
	}
}

func TestClosedLoopWaitsForAnswers(t *testing.T) {
	tr := Generate("agents", 4).Slice(0, 0.05)
	r, _ := run(t, tr, Options{Policy: "session", Speedup: 1})
	ended := map[uint64]time.Duration{}
	for i := range r.Outcomes {
		o := &r.Outcomes[i]
		if end, ok := ended[o.Request.Session]; ok && o.Arrival != end+o.Request.Think {
			t.Fatalf("turn %d came at %s, the one before ended at %s", o.Request.Turn, o.Arrival, end)
		}
		ended[o.Request.Session] = o.Arrival + o.Latency
	}
}

func TestFaults(t *testing.T) {
	tr := Generate("chat", 5).Slice(0, 0.2)
	_, whole := run(t, tr, Options{Policy: "least_cost"})
	r, _ := run(t, tr, Options{Policy: "least_cost", Faults: []Fault{{At: 20 * time.Second, Backend: 1, Down: true}, {At: 60 * time.Second, Backend: 1, Up: true}}})
	failed, after := 0, 0
	for i := range r.Outcomes {
		o := &r.Outcomes[i]
		switch {
		case o.Failed:
			failed++
		case o.Backend == 1 && o.Arrival > 22*time.Second && o.Arrival < 60*time.Second:
			t.Fatalf("a request at %s went to the server that was down", o.Arrival)
		case o.Backend == 1 && o.Arrival > 60*time.Second:
			after++
		}
	}
	if failed > 64 || after == 0 {
		t.Errorf("%d requests failed, %d went to the server that came back", failed, after)
	}
	slow, rep := run(t, tr, Options{Policy: "least_cost", Load: 0.6, Faults: []Fault{{At: 0, Backend: 2, Slow: 3}}})
	share := float64(slow.Computed[2]) / float64(slow.Computed[0]+slow.Computed[1]+slow.Computed[3]) * 3
	if share > 0.75 || rep.Failed != 0 || whole.Failed != 0 {
		t.Errorf("a server at a third of the speed computed %.2f of the others' mean", share)
	}
}

func TestUnknownPolicy(t *testing.T) {
	if _, err := Simulate(Generate("chat", 1).Slice(0, 0.01), Options{Policy: "nonsense"}); err == nil || !strings.Contains(err.Error(), "least_cost") {
		t.Errorf("error %v names no policies", err)
	}
	if _, err := Simulate(Generate("chat", 1).Slice(0, 0.01), Options{Policy: "random", Profiles: []sim.Profile{{Name: "x"}}}); err == nil {
		t.Error("a profile without a cache was taken")
	}
}

func TestMedian(t *testing.T) {
	m := Median([]*Report{{TTFTMean: 3, Goodput: 1}, {TTFTMean: 1, Goodput: 3}, {TTFTMean: 2, Goodput: 2}})
	if m.TTFTMean != 2 || m.Goodput != 2 {
		t.Errorf("median %+v", m)
	}
}
