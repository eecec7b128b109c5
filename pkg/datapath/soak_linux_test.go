// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/session"
)

// soak says whether a long test goes on: for n rounds, and with SHUNT_SOAK=1 for the time as well.
func soak(n int, long time.Duration) func(round int) bool {
	start, all := time.Now(), os.Getenv("SHUNT_SOAK") == "1"
	return func(round int) bool { return round < n || all && time.Since(start) < long }
}

// flowClient is one client of the churn: it opens, uses, closes and resets connections as it likes.
type flowClient struct {
	w     *world
	n     int
	rnd   *rand.Rand
	kills *atomic.Int64 // raised before and after each time that the flows of engine 2 are ended
	held  []heldConn
	count [3]int // answers of the L7 and of the engines
}

type heldConn struct {
	net.Conn
	br    *bufio.Reader
	name  string // who answers on it
	kills int64
}

// ask sends a request and returns who answered.
func (h *heldConn) ask() (string, error) {
	if err := h.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		return "", err
	}
	if _, err := io.WriteString(h, "GET / HTTP/1.1\r\nHost: soak\r\n\r\n"); err != nil {
		return "", err
	}
	resp, err := http.ReadResponse(h.br, nil)
	if err != nil {
		return "", err
	}
	body, err := io.ReadAll(resp.Body)
	name, _, _ := strings.Cut(string(body), " ")
	return name, err
}

// use asks on a connection, which must be answered by whom it was before, unless it was ended on purpose.
func (c *flowClient) use(h *heldConn) error {
	name, err := h.ask()
	switch {
	case err != nil && (h.name == "e2" || h.name == "") && (h.kills%2 == 1 || c.kills.Load() != h.kills):
		return nil
	case err != nil:
		return fmt.Errorf("connection to %q: %w", h.name, err)
	case h.name != "" && h.name != name:
		return fmt.Errorf("a connection to %s was answered by %s", h.name, name)
	}
	h.name = name
	c.count[max(strings.Index("l7e1e2", name), 0)/2]++
	return nil
}

func (c *flowClient) drop(h *heldConn) {
	if tcp, ok := h.Conn.(*net.TCPConn); ok && c.rnd.IntN(3) == 0 {
		_ = tcp.SetLinger(0) // a RST
	}
	_ = h.Close()
}

// step does one thing.
func (c *flowClient) step(vip netip.AddrPort) error {
	if len(c.held) > 0 && (c.rnd.IntN(3) == 0 || len(c.held) >= 12) {
		i := c.rnd.IntN(len(c.held))
		h := &c.held[i]
		if c.rnd.IntN(2) == 0 {
			return c.use(h)
		}
		c.drop(h)
		c.held = append(c.held[:i], c.held[i+1:]...)
		return nil
	}
	kills := c.kills.Load()
	conn, err := c.w.Clients[c.n].Dial(context.Background(), "tcp", vip.String())
	if err != nil {
		if kills%2 == 1 || c.kills.Load() != kills {
			return nil
		}
		return err
	}
	h := heldConn{Conn: conn, br: bufio.NewReader(conn), kills: kills}
	if err := c.use(&h); err != nil {
		_ = conn.Close()
		return err
	}
	if c.rnd.IntN(3) == 0 {
		c.held = append(c.held, h)
		return nil
	}
	c.drop(&h)
	return nil
}

// Clients open, keep, close and reset connections without end, while pins move, NAT ports run short and flows are ended by
// the operator. Each connection is answered by one server from its first byte to its last, and when all is quiet
// nothing is charged and no flow is left.
func TestSoakFlows(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		t.Run(map[bool]string{false: "v4", true: "v6"}[v6], func(t *testing.T) {
			w := newWorld(t, 2, 2)
			o := w.options()
			o.NATPorts.Last = o.NATPorts.First + 127
			d, _ := w.start(o, v6)
			var kills atomic.Int64
			more, clients := soak(700, 5*time.Minute), make([]flowClient, 4)
			var wg sync.WaitGroup
			for i := range clients {
				c := &clients[i]
				*c = flowClient{w: w, n: i % 2, rnd: rand.New(rand.NewPCG(uint64(i), 7)), kills: &kills}
				wg.Go(func() {
					for round := 0; more(round) && !t.Failed(); round++ {
						if c.rnd.IntN(12) == 0 {
							pin := session.Pin{Backend: fleet.ID(1 + c.rnd.IntN(2)), Generation: 7, Tokens: 10, Sessions: 1}
							if err := d.PinTable().Put(w.pinKey(c.n, v6), pin); err != nil {
								t.Error(err)
							}
						}
						if err := c.step(w.vip(v6)); err != nil {
							t.Errorf("client %d, round %d: %v", i, round, err)
						}
					}
				})
			}
			done := make(chan struct{})
			go func() { wg.Wait(); close(done) }()
			admin := &d.Table().Admin[2].State
			for running := true; running; {
				select {
				case <-done:
					running = false
				case <-time.After(100 * time.Millisecond):
					kills.Add(1)
					admin.Store(uint32(fleet.AdminDrain))
					if err := d.Kill(2); err != nil {
						t.Error(err)
					}
					eventually(t, "the flows of a drained engine are ended", func() bool { return d.Table().Slots[2].KernelFlows.Load() == 0 })
					time.Sleep(3 * probeEvery) // until clients that only wait were told
					admin.Store(uint32(fleet.AdminNone))
					eventually(t, "the engine's new flows live", func() bool { return d.epochs[2].kill.Load() == 0 })
					kills.Add(1)
				}
			}
			var count [3]int
			for i := range clients {
				for j := range clients[i].held {
					_ = clients[i].held[j].Close()
				}
				for k, n := range clients[i].count {
					count[k] += n
				}
			}
			t.Logf("answers: l7 %d, e1 %d, e2 %d; flows ended on purpose %d times", count[0], count[1], count[2], kills.Load()/2)
			if kills.Load() == 0 || count[0] == 0 || count[1] == 0 || count[2] == 0 {
				t.Errorf("answers of the L7 and the engines: %v, flows ended %d times: something never happened", count, kills.Load()/2)
			}
			eventually(t, "nothing is charged and no flow is open", func() bool {
				for i := range d.Table().Slots {
					if s := &d.Table().Slots[i]; s.KernelTokens.Load() != 0 || s.KernelFlows.Load() != 0 {
						return false
					}
				}
				return true
			})
		})
	}
}
