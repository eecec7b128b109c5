// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/pkg/policy"
	"github.com/shunt-lb/shunt/pkg/sim"
	"github.com/shunt-lb/shunt/pkg/sim/replay"
)

type replayFlags struct {
	traces   []string
	dir      string
	policies []string
	backends int
	profiles []string
	loads    []float64
	seeds    int
	from, to float64
	faults   []string
	prefill  float64
	json     bool
	html     string
	jobs     int
	o        replay.Options
}

func newReplay() *cobra.Command {
	f := &replayFlags{}
	c := &cobra.Command{
		Use:   "replay",
		Short: "Compare routing policies on traces, on a virtual clock",
		Long: `Send each trace through each policy to simulated servers, and print a table: the policies are the daemon's own code, the
engines batch, cache and preempt as vLLM does, and time is virtual. Without --trace the traffic is generated.

Policies of shunt: ` + strings.Join(policy.Names(), ", ") + `.
Rules of other routers, from their published formulas and settings: ` + strings.Join(replay.Rules(), ", ") + ` (oracle sees the
engines' insides).

Traces are JSONL (Mooncake's own, or with runs of blocks; with think_ms in a closed loop) or CSV (Azure's own, or
arrival_ms,input_tokens,output_tokens), gzip or not. A request is good if its first token comes within 2 s (beyond 32k tokens
of prompt: plus an idle server's prefill) and its further ones every 50 ms in the mean; what failed is not good.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd.OutOrStdout(), cmd.ErrOrStderr()) },
	}
	fl := c.Flags()
	fl.StringArrayVar(&f.traces, "trace", nil, "trace file (repeatable); without one: "+strings.Join(replay.Workloads(), ", "))
	fl.StringVar(&f.dir, "traces", "", "directory whose files are traces; those that are none are left out")
	fl.StringSliceVar(&f.policies, "policies", []string{"round_robin", "least_requests", "session", "least_cost"}, "policies to compare")
	fl.IntVar(&f.backends, "backends", 4, "servers")
	fl.StringSliceVar(&f.profiles, "profile", []string{sim.DefaultProfile}, "servers' profiles, in turn: "+strings.Join(sim.ProfileNames(), ", "))
	fl.Float64Var(&f.prefill, "prefill-rate", 0, "prompt tokens a second of an idle server, instead of the profiles'")
	fl.Float64SliceVar(&f.loads, "load", []float64{0.85}, "share of the fleet's capacity without any cache that the trace's pace is scaled to")
	fl.Float64Var(&f.o.Speedup, "speedup", 0, "pace of the trace instead of --load; 1 = as recorded")
	fl.IntVar(&f.o.KVTokens, "max-kv-tokens", 0, "tokens that fit each server's KV cache (default: the profile's)")
	fl.DurationVar(&f.o.Scrape, "scrape", time.Second, "how often the engines' gauges are read; below 0 = never")
	fl.DurationVar(&f.o.Overhead, "overhead", 20*time.Millisecond, "from a request's arrival until the engine's scheduler sees it")
	fl.Float64Var(&f.o.Bound, "bound", 0, "bound of the policies that have one (default 1.25)")
	fl.IntVar(&f.o.Balancers, "balancers", 1, "routers that share the servers, each blind to the others' requests")
	fl.IntVar(&f.seeds, "seeds", 1, "runs of each; the table has their medians")
	fl.Float64Var(&f.from, "from", 0, "first request, as a share of the trace")
	fl.Float64Var(&f.to, "to", 1, "end, as a share of the trace")
	fl.StringArrayVar(&f.faults, "fault", nil, "down:SERVER@TIME, up:SERVER@TIME or slow:SERVER:FACTOR@TIME in simulated time (repeatable); servers count from 0")
	fl.BoolVar(&f.json, "json", false, "print JSON lines, one a trace, policy, load and seed")
	fl.StringVar(&f.html, "html", "", "also write one self-contained page with the curves to this file")
	fl.IntVar(&f.jobs, "jobs", 2, "runs at once")
	return c
}

func (f *replayFlags) run(out, errs io.Writer) error {
	for _, name := range f.profiles {
		p, err := sim.LookupProfile(name)
		if err != nil {
			return err
		}
		if f.prefill > 0 {
			p = p.WithPrefill(f.prefill)
		}
		f.o.Profiles = append(f.o.Profiles, p)
	}
	for _, s := range f.faults {
		fault, err := parseFault(s, f.backends)
		if err != nil {
			return err
		}
		f.o.Faults = append(f.o.Faults, fault)
	}
	if f.from < 0 || f.to > 1 || f.from >= f.to || f.backends < 1 || f.seeds < 1 || f.jobs < 1 {
		return fmt.Errorf("use flags: --from and --to must be 0 to 1, --backends, --seeds and --jobs at least 1")
	}
	var traces []*replay.Trace
	for _, path := range f.traces {
		t, err := replay.Read(path)
		if err != nil {
			return err
		}
		traces = append(traces, t.Slice(f.from, f.to))
	}
	if f.dir != "" {
		all, err := traceFiles(f.dir, errs)
		if err != nil {
			return err
		}
		for _, t := range all {
			traces = append(traces, t.Slice(f.from, f.to))
		}
	}
	if len(traces) == 0 {
		for _, name := range replay.Workloads() {
			traces = append(traces, replay.Generate(name, 1).Slice(f.from, f.to))
		}
	}
	if f.o.Speedup > 0 {
		f.loads = []float64{0}
	}
	total := len(traces) * len(f.loads) * len(f.policies) * f.seeds
	done, shown := 0, time.Now()
	var mu sync.Mutex
	var charts []replay.Chart
	for _, t := range traces {
		for _, load := range f.loads {
			runs := make([]*replay.Run, len(f.policies))
			reports := make([][]*replay.Report, len(f.policies))
			var wg sync.WaitGroup
			slots := make(chan struct{}, f.jobs)
			failed := make(chan error, len(f.policies)*f.seeds)
			for i, p := range f.policies {
				reports[i] = make([]*replay.Report, f.seeds)
				for seed := range f.seeds {
					o := f.o
					o.Backends, o.Policy, o.Load, o.Seed = f.backends, p, load, uint64(seed)+1
					slots <- struct{}{}
					wg.Go(func() {
						defer func() { <-slots }()
						run, err := replay.Simulate(t, o)
						if err != nil {
							failed <- err
							return
						}
						reports[i][seed] = replay.Summarise(t, o, run, replay.DefaultSLO)
						mu.Lock()
						defer mu.Unlock()
						if seed == 0 && f.html != "" {
							runs[i] = run
						}
						if done++; time.Since(shown) > 3*time.Second {
							shown = time.Now()
							fmt.Fprintf(errs, "\r[%-30s] %d of %d runs", strings.Repeat("=", 30*done/total), done, total)
						}
					})
				}
			}
			wg.Wait()
			select {
			case err := <-failed:
				return err
			default:
			}
			if f.html != "" {
				c := replay.Chart{Title: title(f, t, load, reports[0][0].Speedup), Runs: runs}
				for _, rs := range reports {
					c.Reports = append(c.Reports, replay.Median(rs))
				}
				charts = append(charts, c)
			}
			if f.json {
				enc := json.NewEncoder(out)
				for _, rs := range reports {
					for _, r := range rs {
						if err := enc.Encode(r); err != nil {
							return fmt.Errorf("write report: %w", err)
						}
					}
				}
				continue
			}
			fmt.Fprint(errs, "\r\033[K")
			f.table(out, t, load, reports)
		}
	}
	if f.html == "" {
		return nil
	}
	page, err := os.Create(f.html)
	if err != nil {
		return fmt.Errorf("write page: %w", err)
	}
	return errors.Join(replay.WritePage(page, "shunt: routing policies compared", charts), page.Close())
}

func title(f *replayFlags, t *replay.Trace, load, pace float64) string {
	return fmt.Sprintf("%s: %d requests, %d servers (%s), load %.0f %% (pace x%.2f)", t.Name, len(t.Requests), f.backends,
		strings.Join(f.profiles, ", "), load*100, pace)
}

func (f *replayFlags) table(out io.Writer, t *replay.Trace, load float64, reports [][]*replay.Report) {
	fmt.Fprintln(out, title(f, t, load, reports[0][0].Speedup))
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "policy\tgoodput\tTTFT mean\tp50\tp90\tp95\tp99\tper token p50\tp90\tlatency\tprefilled/asked\tbusiest/mean\tin flight\tfailed\tpred/obs\t")
	for i, rs := range reports {
		r := replay.Median(rs)
		fmt.Fprintf(w, "%s\t%.1f %%\t%.2f s\t%.2f\t%.2f\t%.2f\t%.2f\t%.0f ms\t%.0f\t%.1f s\t%.3f\t%.2f\t%.2f\t%d\t%.2f\t\n", f.policies[i], 100*r.Goodput, r.TTFTMean, r.TTFTP50,
			r.TTFTP90, r.TTFTP95, r.TTFTP99, 1000*r.PerTokenP50, 1000*r.PerTokenP90, r.LatencyMean, r.Prefilled, r.Imbalance, r.InFlight, r.Failed, r.Drift)
	}
	_ = w.Flush()
	fmt.Fprintln(out)
}

// parseFault reads what --fault says.
func parseFault(s string, backends int) (f replay.Fault, err error) {
	what, at, ok := strings.Cut(s, "@")
	kind, rest, _ := strings.Cut(what, ":")
	server, factor, _ := strings.Cut(rest, ":")
	n, err := strconv.Atoi(server)
	if err != nil || !ok || n < 0 || n >= backends {
		return f, fmt.Errorf("read fault %q: want KIND:SERVER@TIME with a server of 0 to %d", s, backends-1)
	}
	f.Backend = n
	if f.At, err = time.ParseDuration(at); err != nil {
		return f, fmt.Errorf("read fault %q: %w", s, err)
	}
	switch kind {
	case "down":
		f.Down = true
	case "up":
		f.Up = true
	case "slow":
		if f.Slow, err = strconv.ParseFloat(factor, 64); err != nil || !(f.Slow > 0) {
			return f, fmt.Errorf("read fault %q: the factor must be above 0", s)
		}
	default:
		return f, fmt.Errorf("read fault %q: kind %q is none of down, up, slow", s, kind)
	}
	return f, nil
}
