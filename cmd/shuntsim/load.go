// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/pkg/sim/replay"
)

func newLoad() *cobra.Command {
	var (
		o        replay.LoadOptions
		trace    string
		workload string
		from, to float64
		asJSON   bool
	)
	c := &cobra.Command{
		Use:   "load",
		Short: "Send a trace as real HTTP traffic, open loop, and report like replay",
		Long: `Send the requests of a trace to a balancer or an engine as chat completions, each at its own time whatever became of those
before it. The prompts are words that begin alike where the trace's blocks do. --shrink makes prompts and answers shorter, for
simulated engines on a small machine.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if from < 0 || to > 1 || from >= to {
				return fmt.Errorf("use flags: --from and --to must be 0 to 1")
			}
			t := replay.Generate(workload, 1)
			if trace != "" {
				var err error
				if t, err = replay.Read(trace); err != nil {
					return err
				}
			}
			if t = t.Slice(from, to); len(t.Requests) == 0 {
				return fmt.Errorf("find requests: no trace and no workload %q", workload)
			}
			shown := time.Now()
			o.Progress = func(done int) {
				if time.Since(shown) > 2*time.Second {
					shown = time.Now()
					fmt.Fprintf(cmd.ErrOrStderr(), "\r%d of %d requests", done, len(t.Requests))
				}
			}
			run, err := replay.Load(cmd.Context(), t, o)
			if err != nil {
				return err
			}
			r := replay.Summarise(t, replay.Options{Policy: "live"}, run, replay.DefaultSLO)
			if asJSON {
				if err := json.NewEncoder(cmd.OutOrStdout()).Encode(r); err != nil {
					return fmt.Errorf("write report: %w", err)
				}
				return nil
			}
			fmt.Fprint(cmd.ErrOrStderr(), "\r\033[K")
			writeLoad(cmd.OutOrStdout(), r)
			return nil
		},
	}
	f := c.Flags()
	f.StringVar(&o.URL, "url", "http://127.0.0.1:8080", "where to send it")
	f.StringVar(&o.Model, "model", "sim", "model name in the requests")
	f.StringVar(&trace, "trace", "", "trace file; without one --workload")
	f.StringVar(&workload, "workload", "chat", "generated traffic")
	f.Float64Var(&o.Speedup, "speedup", 1, "pace; 1 = as recorded")
	f.IntVar(&o.Shrink, "shrink", 1, "prompts and answers are that many times shorter")
	f.DurationVar(&o.Timeout, "timeout", 10*time.Minute, "of one request")
	f.Float64Var(&from, "from", 0, "first request, as a share of the trace")
	f.Float64Var(&to, "to", 1, "end, as a share of the trace")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	return c
}

func writeLoad(w io.Writer, r *replay.Report) {
	fmt.Fprintf(w, "%s: %d requests in %.0f s, %d failed, goodput %.1f %%\n", r.Trace, r.Requests, r.Seconds, r.Failed, 100*r.Goodput)
	fmt.Fprintf(w, "time to first token: mean %.3f s, p50 %.3f, p90 %.3f, p95 %.3f, p99 %.3f\n", r.TTFTMean, r.TTFTP50, r.TTFTP90, r.TTFTP95, r.TTFTP99)
	fmt.Fprintf(w, "per further token: p50 %.1f ms, p90 %.1f; latency: mean %.2f s, p90 %.2f\n", 1000*r.PerTokenP50, 1000*r.PerTokenP90, r.LatencyMean, r.LatencyP90)
	fmt.Fprintf(w, "prompt tokens from cache: %.1f %%; prefilled by the busiest server over the mean: %.2f (%d servers)\n", 100*r.Cached, r.Imbalance, r.Backends)
}

// traceFiles are the files of a directory that hold traces; others are named on errs.
func traceFiles(dir string, errs io.Writer) ([]*replay.Trace, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list traces: %w", err)
	}
	var traces []*replay.Trace
	for _, e := range entries {
		if !e.Type().IsRegular() {
			continue
		}
		t, err := replay.Read(filepath.Join(dir, e.Name()))
		if err != nil {
			fmt.Fprintf(errs, "left out: %v\n", err)
			continue
		}
		traces = append(traces, t)
	}
	return traces, nil
}
