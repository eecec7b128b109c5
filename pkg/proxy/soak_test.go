// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bufio"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// soak says whether a long test goes on: for n rounds, and with SHUNT_SOAK=1 for the time as well.
func soak(n int, long time.Duration) func(round int) bool {
	start, all := time.Now(), os.Getenv("SHUNT_SOAK") == "1"
	return func(round int) bool { return round < n || all && time.Since(start) < long }
}

// marker is what the request's content says: a name that no other request has, and what the engine is to do.
func marker(g *got) (name, order string) {
	_, rest, _ := strings.Cut(string(g.body), `"content":"`)
	rest, _, _ = strings.Cut(rest, `"`)
	name, order, _ = strings.Cut(rest, " ")
	return name, order
}

// markedEngine writes the request's marker into each piece of its answer, and now and then breaks off.
func markedEngine(p *peer) {
	for {
		g := p.request()
		if g == nil {
			return
		}
		name, order := marker(g)
		if order == "plain" {
			if p.json(200, fmt.Sprintf(`{"choices":[{"message":{"content":%q}}]}`, strings.Repeat(name+" ", 40))) != nil {
				return
			}
			continue
		}
		if p.send(streamHead) != nil {
			return
		}
		for i := range 12 {
			if order == "break" && i == 6 {
				return
			}
			if p.send(chunk(event(name))) != nil {
				return
			}
		}
		if p.send(chunk("data: [DONE]\n\n")+"0\r\n\r\n") != nil {
			return
		}
	}
}

// soakClient sends requests of all kinds over connections that it keeps for a while.
type soakClient struct {
	f    *front
	rnd  *rand.Rand
	conn net.Conn
	br   *bufio.Reader
}

func (c *soakClient) close() {
	if c.conn != nil {
		_ = c.conn.Close()
		c.conn = nil
	}
}

// one sends a request and checks that the answer is its own, wholly.
func (c *soakClient) one(name string) error {
	order := []string{"stream", "stream", "plain", "break", "leave"}[c.rnd.IntN(5)]
	if c.conn == nil {
		conn, err := net.Dial("tcp", c.f.addr)
		if err != nil {
			return err
		}
		c.conn, c.br = conn, bufio.NewReader(conn)
	}
	if err := c.conn.SetDeadline(time.Now().Add(3 * wait)); err != nil {
		return err
	}
	extra := `,"stream":true`
	if order == "plain" {
		extra = ""
	}
	body := `{"model":"m","messages":[{"role":"user","content":"` + name + " " + order + `"}]` + extra + `}`
	if _, err := io.WriteString(c.conn, post(chatPath, body, "X-Session-Id: "+name)); err != nil {
		return err
	}
	if order == "leave" && c.rnd.IntN(2) == 0 {
		c.close()
		return nil
	}
	r, err := http.ReadResponse(c.br, &http.Request{Method: "POST"})
	if err != nil {
		return fmt.Errorf("%s: head: %w", order, err)
	}
	if r.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: status %d", order, r.StatusCode)
	}
	if order == "leave" {
		_, _ = io.CopyN(io.Discard, r.Body, int64(c.rnd.IntN(400)))
		c.close()
		return nil
	}
	b, err := io.ReadAll(r.Body)
	for part := range strings.SplitSeq(string(b), "soak-") {
		if n, _, _ := strings.Cut(part, "-end"); strings.Contains(part, "-end") && "soak-"+n+"-end" != name {
			return fmt.Errorf("%s: the answer to %s holds a piece of soak-%s-end", order, name, n)
		}
	}
	want := map[string]int{"stream": 12, "plain": 40, "break": 6}[order]
	if n := strings.Count(string(b), name); n != want {
		return fmt.Errorf("%s: the answer holds %d pieces of %d", order, n, want)
	}
	if broken := order == "break"; broken != (err != nil) || (order == "stream") != strings.HasSuffix(string(b), "data: [DONE]\n\n") {
		return fmt.Errorf("%s: answer ends in %q, %v", order, tailOf(b), err)
	}
	if r.Close || err != nil || c.rnd.IntN(20) == 0 {
		c.close()
	}
	return nil
}

func tailOf(b []byte) []byte { return b[max(len(b)-80, 0):] }

// Streams and plain answers of many clients at once, whole, broken off and abandoned: each client gets its own answer
// and nothing of another's, each ticket comes back, and memory does not grow.
func TestSoakStreams(t *testing.T) {
	var urls []string
	for range 3 {
		urls = append(urls, newEngine(t, markedEngine).url())
	}
	f := startFront(t, newFleet(t, "least_tokens", urls...), withCounter(t), func(o *Options) { o.AccessLog = nil })
	const workers = 24
	more, requests := soak(40, 10*time.Minute), atomic.Int64{}
	var early, wg = atomic.Uint64{}, sync.WaitGroup{}
	for i := range workers {
		c := &soakClient{f: f, rnd: rand.New(rand.NewPCG(uint64(i), 3))}
		wg.Go(func() {
			defer c.close()
			for round := 0; more(round) && !t.Failed(); round++ {
				n := requests.Add(1)
				if n == 20*workers { // all pools and caches have what they need
					early.Store(heap())
				}
				if err := c.one("soak-" + strconv.FormatInt(n, 10) + "-end"); err != nil {
					t.Errorf("worker %d, round %d: %v", i, round, err)
				}
			}
		})
	}
	wg.Wait()
	f.settle()
	f.balanced()
	late := heap()
	t.Logf("%d requests; heap %d KiB, then %d KiB", requests.Load(), early.Load()>>10, late>>10)
	if late > early.Load()+16<<20 {
		t.Errorf("the heap grew from %d to %d bytes over %d requests", early.Load(), late, requests.Load())
	}
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
