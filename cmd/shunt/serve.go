// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/pkg/app"
	"github.com/shunt-lb/shunt/pkg/config"
)

func (e *env) serveCommand() *cobra.Command {
	var file, listen, policy, adminAddr string
	var backends []string
	cmd := &cobra.Command{
		Use:   "serve (--config FILE | --backend URL...)",
		Short: "Run the load balancer",
		Long: `Serve runs until SIGTERM or SIGINT, then lets open requests end; a second signal ends it
at once. Steered connections go on in the kernel and the next daemon takes them over.
SIGHUP reads the file again; a file that is refused changes nothing.`,
		Example: `  shunt serve --backend http://10.0.0.11:8000 --backend http://10.0.0.12:8000
  shunt serve --config /etc/shunt/shunt.yaml`,
		Args: cobra.NoArgs,
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			if file == "" {
				if len(backends) == 0 {
					return errors.New("give --config FILE, or --backend URL for each inference server")
				}
				return nil
			}
			// A setting lives in one place: silently preferring one of two would hide the other.
			for _, name := range []string{"backend", "listen", "policy", "admin"} {
				if cmd.Flags().Changed(name) {
					return fmt.Errorf("--%s does not go with --config: write it in the file", name)
				}
			}
			return nil
		},
		RunE: e.run(func(cmd *cobra.Command, _ []string) error {
			o := app.Options{Version: version, ConfigPath: file, Stderr: e.stderr}
			load := func() (*config.Config, error) {
				c, _, err := config.CheckFile(file, app.Host()) // the daemon logs the warnings
				return c, err
			}
			if file == "" {
				load = func() (*config.Config, error) { return config.FromFlags(backends, listen, policy, adminAddr) }
			} else {
				o.Reload = load
			}
			return e.daemon(cmd.Context(), load, o)
		}),
	}
	cmd.Flags().StringVar(&file, "config", "", "configuration `FILE`")
	cmd.Flags().StringArrayVar(&backends, "backend", nil, "`URL` or NAME=URL of an inference server; may be repeated")
	cmd.Flags().StringVar(&listen, "listen", "", "`ADDR` for clients, IP:PORT or :PORT (default 0.0.0.0:8080)")
	cmd.Flags().StringVar(&policy, "policy", "", "`NAME` of the policy (default least_cost)")
	cmd.Flags().StringVar(&adminAddr, "admin", "", "`ADDR` or path of a socket for the admin listener, or off (default "+defaultAdmin+")")
	return cmd
}

// daemon runs the load balancer under the process's signals and service manager.
func (e *env) daemon(ctx context.Context, load func() (*config.Config, error), o app.Options) error {
	// Before the first reading of the file, so that a signal which asks for another one is not lost, or deadly.
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	defer signal.Stop(hangup)

	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal has its usual effect

	requests := make(chan struct{}, 1)
	done := make(chan struct{})
	relayed := make(chan struct{})
	go func() {
		defer close(relayed)
		for {
			select {
			case <-hangup:
				select {
				case requests <- struct{}{}:
				default: // one is waiting already, and will see the newest file
				}
			case <-done:
				return
			}
		}
	}()
	defer func() { close(done); <-relayed }()

	cfg, err := load()
	if err != nil {
		return err
	}
	manager := notifier{socket: e.getenv("NOTIFY_SOCKET")}
	o.ReloadRequests = requests
	o.Notify = func(state string) {
		if err := manager.notify(state); err != nil {
			fmt.Fprintf(e.stderr, "shunt: %s\n", err)
		}
	}
	return e.serve(ctx, cfg, o)
}
