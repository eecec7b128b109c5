// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"sync"
	"testing"
)

// TestTrace sees a connection that passes and one that is steered, of its client only.
func TestTrace(t *testing.T) {
	w := newWorldAt(t, AttachTCX, 2, 1)
	d, _ := w.start(w.options(), false)
	ctx, cancel := context.WithCancel(context.Background())
	var mu sync.Mutex
	var seen []Traced
	done := make(chan error, 1)
	go func() {
		done <- Trace(ctx, w.bpffs, "", w.Clients[0].V4, func(x Traced) { mu.Lock(); seen = append(seen, x); mu.Unlock() })
	}()
	count := func(verdict, flags string) (n int) {
		mu.Lock()
		defer mu.Unlock()
		for _, x := range seen {
			if x.Verdict == verdict && x.Flags == flags {
				n++
			}
		}
		return n
	}
	eventually(t, "the SYN of an unpinned client is shown", func() bool {
		w.expect(w.client(0, false), false, "l7")
		return count("pass_no_session", "S") > 0
	})
	w.pinTo1(d, false)
	w.expect(w.client(1, false), false, "l7") // somebody else
	w.expect(w.client(0, false), false, "e1")
	eventually(t, "the steered connection is shown", func() bool { return count("forwarded", "S") == 1 && count("forwarded", "SA") == 1 })
	cancel()
	must(t, <-done)
	mu.Lock()
	defer mu.Unlock()
	for _, x := range seen {
		if x.Src.Addr() == w.Clients[1].V4 || x.Dst.Addr() == w.Clients[1].V4 {
			t.Errorf("shows a packet of another client: %+v", x)
		}
		if x.Verdict == "forwarded" && x.Flags == "S" && (x.Backend != 1 || x.To != w.records(false)[0].Steer || x.Interface == 0) {
			t.Errorf("%+v", x)
		}
	}
	var on steerTracing
	must(t, d.m.ShuntTracing.Lookup(uint32(0), &on))
	if on.UntilNs != 0 {
		t.Error("the kernel still traces")
	}
}
