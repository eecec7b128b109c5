// SPDX-License-Identifier: Apache-2.0

//go:build linux

package datapath

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/netdev/lab"
	"github.com/shunt-lb/shunt/pkg/session"
)

// wireEnds are the ways in which real stacks end a connection. The client names one in its first line; both sides
// then do their part.
var wireEnds = []string{"client-fin", "server-fin", "client-rst", "server-rst", "server-rst-while-sending", "client-rst-while-receiving", "half-close"}

const wireBody = 300_001

// wireServer plays the server's part.
func wireServer(t *testing.T, h *lab.Host, addr netip.AddrPort) {
	t.Helper()
	ln, err := h.Listen("tcp", addr.String())
	must(t, err)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				c.SetDeadline(time.Now().Add(20 * time.Second))
				rd := bufio.NewReader(c)
				end, err := rd.ReadString('\n')
				if err != nil {
					return
				}
				body := strings.Repeat("s", wireBody)
				tcp := c.(*net.TCPConn)
				switch strings.TrimSpace(end) {
				case "server-rst":
					io.WriteString(c, "x")
					io.ReadFull(rd, make([]byte, 1)) // the client has it
					tcp.SetLinger(0)
				case "server-rst-while-sending":
					io.WriteString(c, body)
					tcp.SetLinger(0)
				case "server-fin":
					io.WriteString(c, body)
				case "half-close":
					n, _ := io.Copy(io.Discard, rd)
					fmt.Fprintf(c, "%d", n)
				default:
					io.WriteString(c, body)
					io.Copy(io.Discard, rd)
				}
			})
		}
	})
	t.Cleanup(func() { ln.Close(); wg.Wait() })
}

// wireClient plays the client's part over one connection.
func wireClient(h *lab.Host, vip netip.AddrPort, end string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	c, err := h.Dial(ctx, "tcp", vip.String())
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(20 * time.Second))
	tcp := c.(*net.TCPConn)
	if _, err := fmt.Fprintln(c, end); err != nil {
		return err
	}
	body := int64(wireBody)
	switch end {
	case "server-rst":
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			return err
		}
		fmt.Fprint(c, "y")
		if _, err := c.Read(make([]byte, 1)); err == nil {
			return fmt.Errorf("no reset")
		}
		return nil
	case "server-rst-while-sending":
		io.Copy(io.Discard, c)
		return nil
	case "client-rst-while-receiving":
		_, err := io.ReadFull(c, make([]byte, 1000))
		tcp.SetLinger(0)
		return err
	case "half-close":
		if _, err := io.WriteString(c, strings.Repeat("c", wireBody)); err != nil {
			return err
		}
		tcp.CloseWrite()
		got, err := io.ReadAll(c)
		if err == nil && string(got) != fmt.Sprint(wireBody) {
			return fmt.Errorf("the server read %s bytes", got)
		}
		return err
	case "server-fin":
		n, err := io.Copy(io.Discard, c)
		if err == nil && n != body {
			return fmt.Errorf("%d bytes", n)
		}
		return err
	}
	if _, err := io.ReadFull(c, make([]byte, body)); err != nil {
		return err
	}
	if end == "client-rst" {
		time.Sleep(time.Millisecond) // the last acknowledgement is on its way before the reset
		tcp.SetLinger(0)
	}
	return nil
}

// TestWireEnds steers real connections and ends them in every way: each gives its tokens back within seconds, and none
// reaches the L7.
func TestWireEnds(t *testing.T) {
	const each = 15
	for _, f := range []struct {
		name string
		v6   bool
	}{{"v4", false}, {"v6", true}} {
		t.Run(f.name, func(t *testing.T) {
			w := newWorld(t, 1, 1)
			d, _ := w.start(w.options(), f.v6)
			rec := w.records(f.v6)
			rec[0].Steer = netip.AddrPortFrom(rec[0].Steer.Addr(), 9000)
			rec[0].Generation++
			wireServer(t, w.Engines[0], rec[0].Steer)
			must(t, d.SetBackends(rec))
			w.steerable(d)
			must(t, d.PinTable().Put(w.pinKey(0, f.v6), session.Pin{Backend: 1, Generation: rec[0].Generation, Tokens: 10, Sessions: 1}))
			slot := &d.Table().Slots[1]
			for _, end := range wireEnds {
				var wg sync.WaitGroup
				errs := make(chan error, each)
				for range each {
					wg.Go(func() { errs <- wireClient(w.Clients[0], w.vip(f.v6), end) })
				}
				wg.Wait()
				close(errs)
				for err := range errs {
					if err != nil {
						t.Errorf("%s: %v", end, err)
					}
				}
				eventually(t, end+": tokens given back", func() bool {
					return slot.KernelFlows.Load() == 0 && slot.KernelTokens.Load() == 0
				})
			}
			st := d.Status()
			if want := uint64(each * len(wireEnds)); st.Opened != want || st.Closed != want {
				t.Errorf("%d opened and %d closed, want %d", st.Opened, st.Closed, want)
			}
		})
	}
}
