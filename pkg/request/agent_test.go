// SPDX-License-Identifier: Apache-2.0

package request

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/tokens"
)

// writer makes text that looks like people's and like programs', of words it makes up and uses as often as words are used.
type writer struct {
	r     *rand.Rand
	words []string
	zipf  *rand.Zipf
}

func newWriter(seed uint64) *writer {
	w := &writer{r: rand.New(rand.NewPCG(seed, 42))}
	syllables := strings.Fields("a an be co con de di en ex for ing in is ment no of on per pre pro re se sh st sta the th ti tion to un ver wa we wh wi")
	common := strings.Fields(`the of and to in a is that for it as was with be by on not he this are or his from at which but have an had they
		you were their one all we can her has there been if more when will would who so no out up into them then its only some could time these
		two may other than do first any my now such like our over me even most made after also did many before must through back years where
		much your way well down should because each just those people how too little state good very make world still own see men work long get
		here between both life being under never day same another know while last might us great old year off come since against go came right
		used take three return error file function value test list string config server request token model cache client path name type`)
	w.words = append(w.words, common...)
	for range 6000 {
		var b strings.Builder
		for range 2 + w.r.IntN(3) {
			b.WriteString(syllables[w.r.IntN(len(syllables))])
		}
		w.words = append(w.words, b.String())
	}
	w.zipf = rand.NewZipf(w.r, 1.1, 3, uint64(len(w.words)-1))
	return w
}

func (w *writer) word() string { return w.words[w.zipf.Uint64()] }

// prose returns JSON text of about n bytes, escapes included.
func (w *writer) prose(n int) string {
	var b strings.Builder
	for b.Len() < n {
		switch w.r.IntN(14) {
		case 0:
			b.WriteString(".\\n")
		case 1:
			b.WriteString(", ")
		case 2:
			fmt.Fprintf(&b, " %d ", w.r.IntN(10000))
		case 3:
			b.WriteString(` \"` + w.word() + `\"`)
		default:
			b.WriteString(" " + w.word())
		}
	}
	return b.String()
}

func (w *writer) code(n int) string {
	var b strings.Builder
	for b.Len() < n {
		switch w.r.IntN(4) {
		case 0:
			fmt.Fprintf(&b, `func (s *%s) %s(ctx context.Context, %s int) error {\n`, w.word(), w.word(), w.word())
		case 1:
			fmt.Fprintf(&b, `\tif err := s.%s(%s[%d]); err != nil {\n\t\treturn fmt.Errorf(\"%s %s: %%w\", err)\n\t}\n`, w.word(), w.word(), w.r.IntN(99), w.word(), w.word())
		case 2:
			fmt.Fprintf(&b, `\t%s.%s = append(%s, %d)\n`, w.word(), w.word(), w.word(), w.r.IntN(1000))
		default:
			fmt.Fprintf(&b, `\treturn nil\n}\n\n// %s %s %s\n`, w.word(), w.word(), w.word())
		}
	}
	return b.String()
}

func (w *writer) text(n int) string {
	if w.r.IntN(10) < 3 {
		return w.code(n)
	}
	return w.prose(n)
}

func (w *writer) tools(n int) string {
	var b strings.Builder
	for i := 0; b.Len() < n; i++ {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `{"type":"function","function":{"name":"%s_%d","description":"%s","parameters":{"type":"object","properties":{"%s":{"type":"string","description":"%s"},"limit":{"type":"integer","description":"%s"}},"required":["limit"]}}}`,
			w.word(), i, w.prose(160), w.word(), w.prose(60), w.prose(40))
	}
	return b.String()
}

// conversations returns the bodies of 60 agents' conversations of 20 turns, interleaved, 33 KB in the mean: three in four
// share a system prompt and tools, users write 120 to 720 bytes and the model answers 400 to 2,800.
func conversations(seed uint64) [][]byte {
	const agents, turns = 60, 20
	w := newWriter(seed)
	system, tools := w.prose(3<<10), w.tools(12<<10)
	var heads, tails [agents]string
	var bodies [][]byte
	for i := range agents {
		s, t := system, tools
		if i%4 == 3 {
			s, t = w.prose(500+w.r.IntN(1500)), w.tools(2000)
		}
		heads[i] = `{"model":"gpt-4o","stream":true,"messages":[{"role":"system","content":"` + s + `"}`
		tails[i] = `],"tools":[` + t + `]}`
	}
	for range turns {
		for i := range agents {
			heads[i] += `,{"role":"user","content":"` + w.text(120+w.r.IntN(600)) + `"}`
			bodies = append(bodies, []byte(heads[i]+tails[i]))
			heads[i] += `,{"role":"assistant","content":"` + w.text(400+w.r.IntN(2400)) + `"}`
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
// process, which a busy machine does not stretch. Each round has conversations that were never seen before.
func BenchmarkAgentConversation(b *testing.B) {
	for _, bc := range []struct {
		name    string
		entries int
	}{{"remembering", 0}, {"not_remembering", -1}} {
		b.Run(bc.name, func(b *testing.B) {
			c, err := tokens.New(tokens.Options{CacheEntries: bc.entries, LargeBytes: -1})
			if err != nil {
				b.Fatal(err)
			}
			enc := c.For("gpt-4o")
			for _, body := range conversations(1000) { // warms what the encoder keeps beside the counts of texts
				count(b, enc, body)
			}
			warm := enc.Stats()
			var spent time.Duration
			size, n := 0, 0
			for round := uint64(0); n < b.N; round++ {
				b.StopTimer()
				bodies := conversations(round)
				runtime.GC()
				b.StartTimer()
				before := cpuTime()
				for _, body := range bodies {
					count(b, enc, body)
					size += len(body)
				}
				spent += cpuTime() - before
				n += len(bodies)
			}
			s := enc.Stats()
			hits, misses := s.HitBytes-warm.HitBytes, s.MissBytes-warm.MissBytes
			b.ReportMetric(float64(spent.Microseconds())/float64(n), "cpu-us/req")
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

// What is remembered must not change what is counted.
func TestRememberedCountsAreTheCounts(t *testing.T) {
	fresh, err := tokens.New(tokens.Options{CacheEntries: -1})
	if err != nil {
		t.Fatal(err)
	}
	bodies := conversations(7)
	for i := 0; i < len(bodies); i += 97 {
		want := count(t, fresh.For("gpt-4o"), bodies[i])
		for range 2 {
			if got := count(t, counter().For("gpt-4o"), bodies[i]); got != want {
				t.Errorf("request %d: got %+v, want %+v", i, got, want)
			}
		}
	}
}
