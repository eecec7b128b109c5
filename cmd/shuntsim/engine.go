// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/pkg/sim"
)

func newEngine() *cobra.Command {
	var (
		o       sim.ServerOptions
		listen  []string
		profile string
		fixed   sim.FixedTiming
	)
	c := &cobra.Command{
		Use:   "engine",
		Short: "Run one simulated inference server (OpenAI-compatible, vLLM metrics)",
		Long: `Run one simulated inference server. It answers /v1/chat/completions, /v1/completions, /v1/embeddings,
/v1/responses, /v1/messages and /v1/models with filler text, in the time that the profile's GPU would take,
with continuous batching and a prefix cache of 16-token blocks.

  /health /metrics /version        as vLLM
  /debug/requests                  which request came on which connection (DELETE clears)
  /debug/blob?bytes=N&seed=S&rate=R  N deterministic bytes, R per second
  /debug/fail?health=503&status=500&count=3   (POST) fail health checks or the next requests`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			p, err := sim.LookupProfile(profile)
			if err != nil {
				return err
			}
			o.Engine.Profile = p
			if cmd.Flags().Changed("ttft") || cmd.Flags().Changed("itl") {
				o.Engine.Fixed = &fixed
			}
			s, err := sim.NewServer(o)
			if err != nil {
				return err
			}
			var lc net.ListenConfig
			lc.SetMultipathTCP(false) // inference servers speak plain TCP, and so do steered connections
			var lns []net.Listener
			for _, addr := range listen {
				ln, err := lc.Listen(cmd.Context(), "tcp", addr)
				if err != nil {
					for _, l := range lns {
						_ = l.Close()
					}
					return fmt.Errorf("listen: %w", err)
				}
				lns = append(lns, ln)
				fmt.Fprintf(cmd.OutOrStdout(), "engine %s (%s) listening on %s\n", o.Name, profile, ln.Addr())
			}
			return s.Run(cmd.Context(), lns...)
		},
	}
	f := c.Flags()
	f.StringArrayVar(&listen, "listen", []string{"127.0.0.1:8000"}, "address to listen on; port 0 picks one and prints it (repeatable)")
	f.StringVar(&o.Name, "name", "sim", "name in answers (x-sim-engine) and debug output")
	f.StringArrayVar(&o.Models, "model", nil, "model name to serve (repeatable); none: any name")
	f.StringVar(&profile, "profile", sim.DefaultProfile, "server to model: "+strings.Join(sim.ProfileNames(), ", "))
	f.Float64Var(&o.Speed, "speed", 1, "model seconds per real second")
	f.IntVar(&o.Engine.KVTokens, "max-kv-tokens", 0, "tokens that fit the KV cache (default: the profile's)")
	f.IntVar(&o.Engine.MaxModelLen, "max-model-len", 0, "longest prompt plus answer (default: the KV cache)")
	f.IntVar(&o.Engine.MaxSeqs, "max-num-seqs", 0, "sequences in the batch (default 256)")
	f.IntVar(&o.Engine.MaxBatchTokens, "max-num-batched-tokens", 0, "token budget of a step (default 2048)")
	f.DurationVar(&o.Engine.Overhead, "overhead", 20*time.Millisecond, "model time per request before the scheduler sees it")
	f.DurationVar(&fixed.TTFT, "ttft", 0, "fixed time to first token, instead of the profile")
	f.DurationVar(&fixed.ITL, "itl", 0, "fixed time between tokens, instead of the profile")
	f.IntVar(&o.AnswerTokens, "answer-tokens", 0, "length of answers that max_tokens does not end (default 32 to 287, by the prompt)")
	f.DurationVar(&o.IdleTimeout, "keep-alive", 5*time.Second, "close connections that were idle for this long, as uvicorn does")
	f.DurationVar(&o.Grace, "grace", 30*time.Second, "time for open requests after SIGTERM")
	f.BoolVar(&o.FailHealth, "fail-health", false, "answer /health with 503")
	return c
}
