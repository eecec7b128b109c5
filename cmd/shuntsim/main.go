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
	// A closed terminal ends it as well: the demo has things to take away. A reader that has gone does not kill it for the same
	// reason. The signal must be ignored, not caught: it comes for every client that leaves in mid-answer, too.
	signal.Ignore(syscall.SIGPIPE)
	ends := []os.Signal{os.Interrupt, syscall.SIGTERM}
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
