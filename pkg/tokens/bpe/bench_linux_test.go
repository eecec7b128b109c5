// SPDX-License-Identifier: Apache-2.0

package bpe

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/pkg/tokens/tokenstest"
)

// cpuTime is the CPU time of the whole process, the collector's too: on a machine that others use as well, the clock on the
// wall tells nothing.
func cpuTime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &ts); err != nil {
		panic(err)
	}
	return time.Duration(ts.Nano())
}

// source gives texts of a kind, no two of which are the same or parts of one.
type source struct {
	kind string
	real string // cut from the front; where it is used up, texts are made up
	seed uint64
}

func (s *source) next(size int) string {
	if len(s.real) >= size {
		// At a space: a message does not end within a word.
		n := max(strings.LastIndexByte(s.real[:size], ' '), size/2)
		t := s.real[:n]
		s.real = strings.TrimPrefix(s.real[n:], " ")
		return strings.ToValidUTF8(t, "")
	}
	s.seed++
	return tokenstest.Text(s.kind, s.seed, size)
}

func (s *source) batch(n, size int) []string {
	texts := make([]string, n)
	for i := range texts {
		texts[i] = s.next(size)
	}
	return texts
}

// goText is Go's own source, and the prose of its comments.
func goText() (code, prose string) {
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return "", ""
	}
	var c, p strings.Builder
	_ = filepath.WalkDir(filepath.Join(strings.TrimSpace(string(root)), "src"), func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.Contains(path, "testdata") || c.Len() > 32<<20 {
			return nil
		}
		data, err := os.ReadFile(path)
		if err != nil || len(data) > 200<<10 { // long files are tables
			return nil
		}
		c.Write(data)
		for l := range strings.Lines(string(data)) {
			if text, ok := strings.CutPrefix(strings.TrimSpace(l), "// "); ok && len(text) > 50 && !strings.Contains(text, "Copyright") &&
				!strings.Contains(text, "license") {
				p.WriteString(text + " ")
			}
		}
		return nil
	})
	return c.String(), p.String()
}

// sample counts the texts and returns the CPU time for a byte in nanoseconds.
func sample(texts []string, count func(string) int) float64 {
	bytes := 0
	start := cpuTime()
	for _, t := range texts {
		count(t)
		bytes += len(t)
	}
	return float64(cpuTime()-start) / float64(bytes)
}

func median(x []float64) float64 {
	x = slices.Sorted(slices.Values(x))
	return x[len(x)/2]
}

// BenchmarkTable prints the table of `make bench-tokens`.
func BenchmarkTable(b *testing.B) {
	if testing.Short() {
		b.Skip("a table of its own; see make bench-tokens")
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	code, prose := goText()
	load, _ := os.ReadFile("/proc/loadavg")
	fmt.Printf("\n%s, %s/%s, load %s", runtime.Version(), runtime.GOOS, runtime.GOARCH, load)
	fmt.Printf("CPU time of the process on one core, collector included; rounds of both in turn: best MB/s, and the median of the rounds' ratios.\n")
	fmt.Printf("English and code: Go's own comments and source (%d and %d KB); the rest is made up. No text comes twice, but where it says so.\n\n", len(prose)>>10, len(code)>>10)
	fmt.Printf("%-28s %-12s %12s %12s %8s %8s\n", "text", "encoding", "tiktoken-go", "shunt", "ratio", "aim")
	english := map[string]float64{}
	for _, row := range []struct {
		name, kind string
		size, n    int // of a text; texts in a round
		aim        float64
		real       string
	}{
		{"English, 16 KB", "english", 16 << 10, 32, 18, prose},
		{"code, 16 KB", "code", 16 << 10, 32, 16, code},
		{"JSON tools, 16 KB", "json", 16 << 10, 32, 40, ""},
		{"Chinese, 16 KB", "chinese", 16 << 10, 32, 10, ""},
		{"Japanese, 16 KB", "japanese", 16 << 10, 16, 0, ""},
		{"Korean, 16 KB", "korean", 16 << 10, 16, 0, ""},
		{"base64, 16 KB", "base64", 16 << 10, 16, 6, ""},
		{"logs, 16 KB", "logs", 16 << 10, 16, 0, ""},
		{"English, 40 B", "english", 40, 12000, 30, prose},
		{"Chinese, 40 B", "chinese", 40, 12000, 0, ""},
	} {
		for _, p := range pairs(b) {
			src := &source{kind: row.kind, real: row.real, seed: uint64(len(p.name)) << 32}
			sample(src.batch(20, 16<<10), p.enc.Count) // the caches as a daemon has them after a while
			var ours, theirs, ratios []float64
			for range 5 {
				mine, other := src.batch(row.n, row.size), src.batch(max(1, row.n/12), row.size)
				x := sample(mine, p.enc.Count)
				runtime.GC()
				y := sample(other, p.want)
				runtime.GC()
				ours, theirs, ratios = append(ours, x), append(theirs, y), append(ratios, y/x)
			}
			if row.kind == "english" && row.size > 1<<10 {
				english[p.name] = median(ours)
			}
			aim := ""
			if row.aim > 0 {
				aim = fmt.Sprintf(">= %.0f", row.aim)
			}
			fmt.Printf("%-28s %-12s %7.1f MB/s %7.1f MB/s %7.1fx %8s\n", row.name, p.name, 1e3/slices.Min(theirs), 1e3/slices.Min(ours), median(ratios), aim)
		}
	}
	for _, p := range pairs(b) {
		src := &source{kind: "english", real: prose, seed: 7}
		text := src.batch(1, 16<<10)
		var ours []float64
		for range 40 {
			ours = append(ours, sample(text, p.enc.Count))
		}
		fmt.Printf("%-28s %-12s %12s %7.1f MB/s\n", "English, repeated, 16 KB", p.name, "", 1e3/slices.Min(ours))
	}
	benchHostile(b, english)
	benchCores(b, prose)
	benchBuild()
}

// benchHostile prints the slowest of the hostile texts against English of the same run.
func benchHostile(b *testing.B, english map[string]float64) {
	for _, size := range []int{64 << 10, 1 << 20} {
		type result struct {
			name string
			cost float64
		}
		for _, p := range pairs(b) {
			var all []result
			for name, text := range tokenstest.Hostile(size) {
				cost := 1e9
				for range 3 {
					cost = min(cost, sample([]string{text[:size]}, func(s string) int { n, _ := p.enc.CountCut(s, testCut); return n }))
				}
				all = append(all, result{name, cost})
			}
			slices.SortFunc(all, func(x, y result) int { return cmp.Compare(y.cost, x.cost) })
			fmt.Printf("hostile, %4d KB, %s, cost to English (aim < 25x):", size>>10, p.name)
			for _, r := range all[:4] {
				fmt.Printf("  %s %.1fx", r.name, r.cost/english[p.name])
			}
			fmt.Println()
		}
	}
}

// benchCores prints what a byte costs where two goroutines count on two cores, against one.
func benchCores(b *testing.B, prose string) {
	runtime.GOMAXPROCS(2)
	defer runtime.GOMAXPROCS(1)
	for _, p := range pairs(b) {
		src := &source{kind: "english", real: prose, seed: 9}
		var ratios, walls []float64
		for range 9 {
			one, two := src.batch(16, 16<<10), [2][]string{src.batch(16, 16<<10), src.batch(16, 16<<10)}
			start := time.Now()
			x := sample(one, p.enc.Count)
			alone := time.Since(start)
			var wg sync.WaitGroup
			start, cpu := time.Now(), cpuTime()
			for _, texts := range two {
				wg.Go(func() {
					for _, t := range texts {
						p.enc.Count(t)
					}
				})
			}
			wg.Wait()
			y := float64(cpuTime()-cpu) / float64(32*16<<10)
			ratios, walls = append(ratios, 2*x/y), append(walls, 2*float64(alone)/float64(time.Since(start)))
		}
		fmt.Printf("two cores, %s: %.2f times one core by CPU time, %.2f by the clock (best %.2f)\n", p.name, median(ratios), median(walls), slices.Max(walls))
	}
}

// benchBuild prints what an encoding costs to have.
func benchBuild() {
	for _, p := range []struct {
		name    string
		pattern Pattern
	}{{"cl100k_base", CL100k}, {"o200k_base", O200k}} {
		start := cpuTime()
		ranks, err := loadRanks(p.name)
		if err != nil {
			panic(err)
		}
		read := cpuTime()
		e, err := New(ranks, p.pattern)
		if err != nil {
			panic(err)
		}
		fmt.Printf("tables of %s: %d ms of CPU to read the ranks and %d ms to build, %.1f MB\n", p.name, (read - start).Milliseconds(), (cpuTime() - read).Milliseconds(), float64(e.Size())/1e6)
	}
}
