// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/sim"
)

func TestLoadSendsATrace(t *testing.T) {
	s, err := sim.NewServer(sim.ServerOptions{Name: "one", Speed: 50})
	if err != nil {
		t.Fatal(err)
	}
	var lc net.ListenConfig
	ln, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, ln) }()
	for _, name := range []string{"shared", "agents"} { // open and closed loop
		tr := Generate(name, 1).Slice(0, 0.01)
		run, err := Load(t.Context(), tr, LoadOptions{URL: "http://" + ln.Addr().String(), Speedup: 100, Shrink: 16})
		if err != nil {
			t.Fatal(err)
		}
		rep := Summarise(tr, Options{Policy: "live"}, run, DefaultSLO)
		if rep.Failed != 0 || rep.Requests != len(tr.Requests) || rep.TTFTMean <= 0 || rep.Backends != 1 {
			t.Errorf("%s: %+v", name, rep)
		}
		for i := range run.Outcomes {
			o := &run.Outcomes[i]
			if o.Backend != 0 || o.Latency < o.TTFT || o.Cached > o.Request.Prompt {
				t.Errorf("%s: outcome %+v", name, o)
			}
		}
		if name == "agents" && rep.Cached == 0 {
			t.Error("nothing of equal beginnings was found in the cache")
		}
	}
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := Load(short, Generate("chat", 1), LoadOptions{URL: "http://" + ln.Addr().String(), Shrink: 16}); err == nil {
		t.Error("a replay that was stopped reports no error")
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
