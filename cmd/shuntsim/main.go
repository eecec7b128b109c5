// SPDX-License-Identifier: Apache-2.0

// Command shuntsim simulates inference servers for shunt's tests, demonstrations and benchmarks.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	// A closed terminal and a reader that has gone end it as well: the demo has things to take away.
	ends := []os.Signal{os.Interrupt, syscall.SIGTERM, syscall.SIGPIPE}
	if !signal.Ignored(syscall.SIGHUP) { // nohup
		ends = append(ends, syscall.SIGHUP)
	}
	ctx, stop := signal.NotifyContext(context.Background(), ends...)
	err := newRoot().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "shuntsim:", err)
		os.Exit(1)
	}
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:           "shuntsim",
		Short:         "Simulated LLM inference servers for shunt",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(newEngine(), newDemo(), newReplay(), newLoad())
	return root
}
