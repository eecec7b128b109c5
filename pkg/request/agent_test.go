// SPDX-License-Identifier: Apache-2.0

package request

import (
	"encoding/json"
	"fmt"
	"go/build"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/tokens"
)

// corpus is the code and the comments of Go's standard library, as they are found on this machine. Texts are taken from it
// one behind the other, so that none comes twice.
type corpus struct {
	r              *rand.Rand
	code, comments string
	atCode, atText int
}

func newCorpus(tb testing.TB) *corpus {
	tb.Helper()
	var code, comments strings.Builder
	root := filepath.Join(build.Default.GOROOT, "src")
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.Contains(path, "testdata") || code.Len() > 24<<20 {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil || len(b) > 256<<10 { // larger ones are tables
			return err
		}
		for line := range strings.Lines(string(b)) {
			if text, ok := strings.CutPrefix(strings.TrimSpace(line), "// "); ok {
				comments.WriteString(text + "\n")
			} else {
				code.WriteString(line)
			}
		}
		return nil
	})
	if err != nil || code.Len() < 8<<20 || comments.Len() < 4<<20 {
		tb.Skipf("the sources of Go's standard library are not in %s (%v)", root, err)
	}
	return &corpus{r: rand.New(rand.NewPCG(1, 2)), code: code.String(), comments: comments.String()}
}

// take returns n bytes of a corpus as they stand in a JSON string. Where one ends it begins again, one byte off.
func take(s string, at *int, n int) string {
	if *at+n > len(s) {
		*at = 1
	}
	text := s[*at : *at+n]
	*at += n
	b, err := json.Marshal(text)
	if err != nil {
		panic(err)
	}
	return string(b[1 : len(b)-1])
}

func (c *corpus) prose(n int) string { return take(c.comments, &c.atText, n) }

func (c *corpus) text(n int) string {
	if c.r.IntN(10) < 3 {
		return take(c.code, &c.atCode, n)
	}
	return c.prose(n)
}

func (c *corpus) tools(n int) string {
	var b strings.Builder
	for i := 0; b.Len() < n; i++ {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `{"type":"function","function":{"name":"tool_%d","description":"%s","parameters":{"type":"object","properties":{"path":{"type":"string","description":"%s"},"limit":{"type":"integer","description":"%s"}},"required":["limit"]}}}`,
			i, c.prose(160), c.prose(60), c.prose(40))
	}
	return b.String()
}

// conversations returns the bodies of 60 agents' conversations of 20 turns, interleaved, 33 KB in the mean: three in four
// share a system prompt and tools, users write 120 to 720 bytes and the model answers 400 to 2,800.
func (c *corpus) conversations() [][]byte {
	const agents, turns = 60, 20
	system, tools := c.prose(3<<10), c.tools(12<<10)
	var heads, tails [agents]string
	var bodies [][]byte
	for i := range agents {
		s, t := system, tools
		if i%4 == 3 {
			s, t = c.prose(500+c.r.IntN(1500)), c.tools(2000)
		}
		heads[i] = `{"model":"gpt-4o","stream":true,"messages":[{"role":"system","content":"` + s + `"}`
		tails[i] = `],"tools":[` + t + `]}`
	}
	for range turns {
		for i := range agents {
			heads[i] += `,{"role":"user","content":"` + c.text(120+c.r.IntN(600)) + `"}`
			bodies = append(bodies, []byte(heads[i]+tails[i]))
			heads[i] += `,{"role":"assistant","content":"` + c.text(400+c.r.IntN(2400)) + `"}`
		}
	}
	return bodies
}

func cpuTime() time.Duration {
	var r syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &r) != nil {
		return 0
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// BenchmarkAgentConversation measures what a request of an agent costs to read and to count: cpu-us/req is CPU time of the
// process, which a busy machine stretches less than time, and best-us/req that of the best round of 1,200 requests. Each round has conversations that were never seen before.
func BenchmarkAgentConversation(b *testing.B) {
	texts := newCorpus(b)
	for _, bc := range []struct {
		name    string
		entries int
	}{{"remembering", 0}, {"not_remembering", -1}} {
		b.Run(bc.name, func(b *testing.B) {
			c, err := tokens.New(tokens.Options{CacheEntries: bc.entries})
			if err != nil {
				b.Fatal(err)
			}
			enc := c.For("gpt-4o")
			for _, body := range texts.conversations() { // warms what the encoder keeps beside the counts of texts
				count(b, enc, body)
			}
			warm := enc.Stats()
			var spent time.Duration
			best := math.Inf(1)
			size, n := 0, 0
			for n < b.N {
				b.StopTimer()
				bodies := texts.conversations()
				runtime.GC()
				b.StartTimer()
				before := cpuTime()
				for _, body := range bodies {
					count(b, enc, body)
					size += len(body)
				}
				round := cpuTime() - before
				spent += round
				best = min(best, float64(round.Microseconds())/float64(len(bodies)))
				n += len(bodies)
			}
			s := enc.Stats()
			hits, misses := s.HitBytes-warm.HitBytes, s.MissBytes-warm.MissBytes
			b.ReportMetric(float64(spent.Microseconds())/float64(n), "cpu-us/req")
			b.ReportMetric(best, "best-us/req")
			b.ReportMetric(float64(size)/float64(n), "bytes/req")
			b.ReportMetric(float64(hits)/float64(hits+misses), "hit-ratio")
			b.ReportMetric(float64(misses)/float64(n), "new-bytes/req")
		})
	}
}

func count(t testing.TB, enc *tokens.Encoder, body []byte) tokens.Count {
	p := Acquire()
	defer p.Release()
	f, err := p.Parse(Chat, body)
	if err != nil {
		t.Fatal(err)
	}
	return f.PromptTokensIn(enc)
}

// BenchmarkAgentRequest measures one request of 34 KB whose every text was counted before.
func BenchmarkAgentRequest(b *testing.B) {
	bodies := newCorpus(b).conversations()
	body := bodies[len(bodies)/2]
	enc := counter().For("gpt-4o")
	count(b, enc, body)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	before := cpuTime()
	for b.Loop() {
		count(b, enc, body)
	}
	b.ReportMetric(float64((cpuTime()-before).Microseconds())/float64(b.N), "cpu-us/req")
}

// What is remembered must not change what is counted.
func TestRememberedCountsAreTheCounts(t *testing.T) {
	fresh, err := tokens.New(tokens.Options{CacheEntries: -1})
	if err != nil {
		t.Fatal(err)
	}
	bodies := newCorpus(t).conversations()
	for i := 0; i < len(bodies); i += 97 {
		want := count(t, fresh.For("gpt-4o"), bodies[i])
		for range 2 {
			if got := count(t, counter().For("gpt-4o"), bodies[i]); got != want {
				t.Errorf("request %d: got %+v, want %+v", i, got, want)
			}
		}
	}
}
