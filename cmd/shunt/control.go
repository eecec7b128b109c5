// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/pkg/datapath"
	"github.com/shunt-lb/shunt/pkg/fleet"
)

func (e *env) adminStateCommands() []*cobra.Command {
	var list []*cobra.Command
	for _, c := range []struct {
		state fleet.AdminState
		short string
	}{
		{fleet.AdminDrain, "Give a backend no new work; open requests and connections go on"},
		{fleet.AdminMaint, "Like drain, and stop its health checks"},
		{fleet.AdminNone, "Let a drained backend work again"},
	} {
		cmd := &cobra.Command{Use: c.state.String() + " BACKEND...", Short: c.short, Args: cobra.MinimumNArgs(1)}
		client := e.adminFlags(cmd)
		cmd.RunE = e.run(func(cmd *cobra.Command, args []string) error {
			api, err := client()
			if err != nil {
				return err
			}
			var errs []error
			for _, name := range args {
				if err := api.SetAdmin(cmd.Context(), name, c.state); err != nil {
					errs = append(errs, err)
					continue
				}
				fmt.Fprintf(e.stdout, "%s: %s\n", name, c.state)
			}
			return errors.Join(errs...)
		})
		list = append(list, cmd)
	}
	return list
}

func (e *env) unpinCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "unpin ADDR...",
		Short: "Remove the pins of client addresses: their next connections pass to the front end",
		Args: func(cmd *cobra.Command, args []string) error {
			for _, a := range args {
				if _, err := netip.ParseAddr(a); err != nil {
					return fmt.Errorf("%q is not an IP address", a)
				}
			}
			return cobra.MinimumNArgs(1)(cmd, args)
		},
	}
	client := e.adminFlags(cmd)
	cmd.RunE = e.run(func(cmd *cobra.Command, args []string) error {
		api, err := client()
		if err != nil {
			return err
		}
		var errs []error
		for _, addr := range args {
			if err := api.Unpin(cmd.Context(), addr); err != nil {
				errs = append(errs, err)
				continue
			}
			fmt.Fprintf(e.stdout, "%s: unpinned\n", addr)
		}
		return errors.Join(errs...)
	})
	return cmd
}

func (e *env) reloadCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "reload",
		Short: "Read the configuration again (as SIGHUP does) and say what comes of it",
		Args:  cobra.NoArgs,
	}
	client := e.adminFlags(cmd)
	cmd.RunE = e.run(func(cmd *cobra.Command, _ []string) error {
		api, err := client()
		if err != nil {
			return err
		}
		if err := api.Reload(cmd.Context()); err != nil {
			return err
		}
		fmt.Fprintln(e.stdout, "reloaded")
		return nil
	})
	return cmd
}

func (e *env) cleanupCommand() *cobra.Command {
	var bpffs, instance, file string
	var force bool
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Detach the kernel programs and remove all pinned maps; needs no running daemon",
		Long: `Cleanup takes away everything that a stopped shunt leaves in the kernel so that steered
connections live on: programs, links, maps. Connections that are steered end with it.
It refuses while a daemon of the instance runs, unless forced.`,
		Args: cobra.NoArgs,
		RunE: e.run(func(*cobra.Command, []string) error {
			if file != "" {
				c, err := e.load(file)
				if err != nil {
					return err
				}
				bpffs, instance = c.Steering.BPFFS, c.Steering.Instance
			}
			clean := datapath.Cleanup
			if force {
				clean = datapath.CleanupForced
			}
			if err := clean(bpffs, instance); err != nil {
				return err
			}
			fmt.Fprintf(e.stdout, "instance %s: nothing is left in the kernel\n", instance)
			return nil
		}),
	}
	cmd.Flags().StringVar(&bpffs, "bpffs", "", "`DIR` of the BPF file system, as in steering.bpffs (default: where the daemon would look)")
	cmd.Flags().StringVar(&instance, "instance", "default", "`NAME`, as in steering.instance")
	cmd.Flags().StringVar(&file, "config", "", "take both from this `FILE`")
	cmd.Flags().BoolVar(&force, "force", false, "even while a daemon runs: it loses its kernel path")
	cmd.MarkFlagsMutuallyExclusive("config", "bpffs")
	cmd.MarkFlagsMutuallyExclusive("config", "instance")
	return cmd
}
