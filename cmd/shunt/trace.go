// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"time"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/pkg/datapath"
)

func (e *env) traceCommand() *cobra.Command {
	var bpffs, instance, file string
	var limit time.Duration
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "trace CLIENT",
		Short: "Show what the kernel decides on the packets of one client address",
		Long: `Trace shows each packet of the client on which the kernel decides something, with the reason: connections
that open and close, and what passes to the L7. Plain packets of an open connection are not shown.
It reads the pinned maps, so it needs root and no running daemon, and costs other clients nothing.`,
		Args: cobra.ExactArgs(1),
		RunE: e.run(func(cmd *cobra.Command, args []string) error {
			client, err := netip.ParseAddr(args[0])
			if err != nil {
				return fmt.Errorf("read client address: %w", err)
			}
			if file != "" {
				c, err := e.load(file)
				if err != nil {
					return err
				}
				bpffs, instance = c.Steering.BPFFS, c.Steering.Instance
			}
			ctx := cmd.Context()
			if limit > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, limit)
				defer cancel()
			}
			enc := json.NewEncoder(e.stdout)
			return datapath.Trace(ctx, bpffs, instance, client.Unmap(), func(t datapath.Traced) {
				if asJSON {
					_ = enc.Encode(t)
					return
				}
				to := ""
				if t.To.IsValid() {
					to = " -> " + t.To.String()
				}
				fmt.Fprintf(e.stdout, "%s %s > %s [%s] %s%s\n", t.At.Format("15:04:05.000000"), t.Src, t.Dst, t.Flags, t.Verdict, to)
			})
		}),
	}
	cmd.Flags().StringVar(&bpffs, "bpffs", "", "`DIR` of the BPF file system, as in steering.bpffs (default: where the daemon would look)")
	cmd.Flags().StringVar(&instance, "instance", "default", "`NAME`, as in steering.instance")
	cmd.Flags().StringVar(&file, "config", "", "take both from this `FILE`")
	cmd.Flags().DurationVar(&limit, "for", 0, "stop after this `DURATION` (default: when interrupted)")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON object a line")
	cmd.MarkFlagsMutuallyExclusive("config", "bpffs")
	cmd.MarkFlagsMutuallyExclusive("config", "instance")
	return cmd
}
