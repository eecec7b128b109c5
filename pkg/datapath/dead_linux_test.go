// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/session"
)

// hold opens a connection of client 0 to the VIP on which one request was answered; it must be engine 1's.
func (w *world) hold(v6 bool) net.Conn {
	w.t.Helper()
	c, err := w.Clients[0].Dial(context.Background(), "tcp", w.vip(v6).String())
	must(w.t, err)
	w.t.Cleanup(func() { c.Close() })
	w.again(c, v6)
	return c
}

// again sends a request on a held connection.
func (w *world) again(c net.Conn, v6 bool) {
	w.t.Helper()
	must(w.t, c.SetDeadline(time.Now().Add(20*time.Second)))
	_, err := fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\n\r\n", w.vip(v6))
	must(w.t, err)
	got := make([]byte, 4096)
	n, err := c.Read(got)
	must(w.t, err)
	if text := string(got[:n]); !strings.Contains(text, "200 OK") || !strings.Contains(text, "e1 ") {
		w.t.Fatalf("answer: %s", text)
	}
}

func (w *world) pinTo1(d *Datapath, v6 bool) {
	w.t.Helper()
	must(w.t, d.PinTable().Put(w.pinKey(0, v6), session.Pin{Backend: 1, Generation: 7, Tokens: 100, Sessions: 1}))
}

func (w *world) down(d *Datapath, v6 bool) {
	w.t.Helper()
	list := w.records(v6)
	list[0].State = fleet.HealthDown
	must(w.t, d.SetBackends(list))
}

// TestDeadHost: the host of a backend vanishes, and clients that only wait for an answer are told.
func TestDeadHost(t *testing.T) {
	for _, tc := range []struct {
		attach string
		v6     bool
	}{{AttachNative, false}, {AttachTCX, false}, {AttachTCX, true}} {
		t.Run(fmt.Sprint(tc.attach, " v6 ", tc.v6), func(t *testing.T) {
			w := newWorldAt(t, tc.attach, 1, 2)
			d, _ := w.start(w.options(), tc.v6)
			w.pinTo1(d, tc.v6)
			c := w.hold(tc.v6)
			must(t, w.Switch.SetDown(w.Engines[0].Port))
			w.down(d, tc.v6)
			if _, err := io.ReadAll(c); !errors.Is(err, unix.ECONNRESET) {
				t.Fatalf("the client reads %v", err)
			}
			eventually(t, "tokens and flow given back", func() bool {
				s := &d.Table().Slots[1]
				return s.KernelFlows.Load() == 0 && s.KernelTokens.Load() == 0
			})
			w.expect(w.client(0, false), tc.v6, "l7")
		})
	}
}

// TestDownButAlive: a backend that only fails its check finishes what it has begun.
func TestDownButAlive(t *testing.T) {
	w := newWorldAt(t, AttachTCX, 1, 2)
	d, _ := w.start(w.options(), false)
	w.pinTo1(d, false)
	c := w.hold(false)
	w.down(d, false)
	asked := func() time.Time { d.mu.Lock(); defer d.mu.Unlock(); return d.targets[1].watch.asked }
	for range 3 {
		last := asked()
		eventually(t, "the backend is asked again", func() bool { return asked().After(last) })
	}
	w.again(c, false)
	w.expect(w.client(0, false), false, "l7")

	// By hand it ends all the same, and only when it takes nothing new.
	if err := d.Kill(2); err == nil {
		t.Error("flows of a backend that takes connections were ended")
	}
	must(t, d.Kill(1))
	if _, err := io.ReadAll(c); !errors.Is(err, unix.ECONNRESET) {
		t.Fatalf("the client reads %v", err)
	}
}

// TestDrainLimit: a drained backend's connections end when its time is over, and new ones work when it is back.
func TestDrainLimit(t *testing.T) {
	w := newWorldAt(t, AttachTCX, 1, 1)
	o := w.options()
	o.DrainLimit = 300 * time.Millisecond
	d, _ := w.start(o, false)
	w.pinTo1(d, false)
	c := w.hold(false)
	d.Table().Admin[1].State.Store(1)
	if _, err := io.ReadAll(c); !errors.Is(err, unix.ECONNRESET) {
		t.Fatalf("the client reads %v", err)
	}
	w.expect(w.client(0, false), false, "l7")
	d.Table().Admin[1].State.Store(0)
	eventually(t, "the backend takes connections again", func() bool {
		name, _ := ask(t, w.client(0, false), w.vip(false))
		return name == "e1"
	})
	w.again(w.hold(false), false)
}
