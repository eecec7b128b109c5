// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strings"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/pkg/admin"
	"github.com/shunt-lb/shunt/pkg/app"
	"github.com/shunt-lb/shunt/pkg/config"
)

const (
	exitDone        = 0
	exitNotDone     = 1
	exitUsage       = 2
	exitUnreachable = 3
)

const defaultAdmin = "127.0.0.1:9090"

// env is what a command sees of the world.
type env struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	getenv         func(string) string

	serve   func(context.Context, *config.Config, app.Options) error // app.Run
	started bool                                                     // the arguments were right and a command runs
}

// main runs one command and returns its exit code.
func (e *env) main(ctx context.Context, args []string) int {
	root := e.root()
	root.SetArgs(args)
	root.SetIn(e.stdin)
	root.SetOut(e.stdout)
	root.SetErr(e.stderr)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return exitDone
	}
	if !e.started {
		fmt.Fprintf(e.stderr, "shunt: %s (see %s --help)\n", firstLine(err.Error()), cmd.CommandPath())
		return exitUsage
	}
	var bad *config.Error
	if errors.As(err, &bad) {
		fmt.Fprintln(e.stderr, bad) // each with its place
		return exitNotDone
	}
	fmt.Fprintf(e.stderr, "shunt: %s\n", clean(err.Error()))
	var dial *net.OpError
	if errors.As(err, &dial) && dial.Op == "dial" {
		return exitUnreachable
	}
	return exitNotDone
}

func firstLine(s string) string {
	s, _, _ = strings.Cut(s, "\n")
	return s
}

// run wraps what a command does, so that errors before it are known to be wrong usage.
func (e *env) run(f func(cmd *cobra.Command, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		e.started = true
		return f(cmd, args)
	}
}

func (e *env) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "shunt",
		Short: "L4 and L7 load balancer for LLM inference",
		Long: `shunt counts the tokens of each request, sends it to the right GPU host, and lets the
kernel (XDP) steer the session's follow-up connections straight to that host.

Exit codes: 0 done, 1 not done, 2 wrong usage, 3 the daemon cannot be reached.`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddGroup(&cobra.Group{ID: "run", Title: "Run:"}, &cobra.Group{ID: "ask", Title: "Look at a running shunt:"},
		&cobra.Group{ID: "do", Title: "Change a running shunt:"})
	add := func(group string, cmds ...*cobra.Command) {
		for _, c := range cmds {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add("run", e.serveCommand(), e.checkCommand(), e.countCommand(), e.doctorCommand(), e.cleanupCommand(), e.versionCommand())
	add("ask", e.statusCommand(), e.backendsCommand(), e.sessionsCommand(), e.flowsCommand(), e.traceCommand())
	add("do", e.adminStateCommands()...)
	add("do", e.unpinCommand(), e.reloadCommand())
	return root
}

func (e *env) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		RunE: e.run(func(*cobra.Command, []string) error {
			fmt.Fprintf(e.stdout, "shunt %s (%s, %s/%s)\n", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
			return nil
		}),
	}
}

// adminFlags adds the flags of every command that talks to a daemon, and returns what makes the client from them.
func (e *env) adminFlags(cmd *cobra.Command) func() (admin.Client, error) {
	addr := cmd.Flags().String("admin", "", "admin `ADDR` or path of the socket of the daemon (default $SHUNT_ADMIN or "+defaultAdmin+")")
	tokenFile := cmd.Flags().String("token-file", "", "`FILE` with the admin token (default $SHUNT_TOKEN_FILE)")
	return func() (admin.Client, error) {
		c := admin.Client{Addr: first(*addr, e.getenv("SHUNT_ADMIN"), defaultAdmin)}
		if file := first(*tokenFile, e.getenv("SHUNT_TOKEN_FILE")); file != "" {
			data, err := os.ReadFile(file)
			if err != nil {
				return c, fmt.Errorf("read admin token: %w", err)
			}
			c.Token = strings.TrimSpace(string(data))
		}
		return c, nil
	}
}

func first(words ...string) string {
	for _, w := range words {
		if w != "" {
			return w
		}
	}
	return ""
}
