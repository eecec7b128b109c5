// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/pkg/app"
	"github.com/shunt-lb/shunt/pkg/config"
	"github.com/shunt-lb/shunt/pkg/datapath"
)

func (e *env) doctorCommand() *cobra.Command {
	var file string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Look whether this machine can steer, and say what to do where it cannot",
		Long: `Doctor looks at the kernel, the capabilities, the BPF file system, and with a configuration at its
interfaces, addresses, ports and backends. It changes nothing, needs no daemon and may run beside one.
Exit code 1 means that the kernel path cannot be had like this.`,
		Args: cobra.NoArgs,
		RunE: e.run(func(cmd *cobra.Command, _ []string) error {
			var c *config.Config
			if file != "" {
				var err error
				if c, err = e.load(file); err != nil {
					return err
				}
			}
			list := app.Diagnose(cmd.Context(), c)
			failed := 0
			for _, f := range list {
				if f.Verdict == datapath.FindingFail {
					failed++
				}
			}
			if asJSON {
				enc := json.NewEncoder(e.stdout)
				enc.SetIndent("", "  ")
				if err := enc.Encode(list); err != nil {
					return fmt.Errorf("write findings: %w", err)
				}
			} else {
				w := tabwriter.NewWriter(e.stdout, 0, 0, 2, ' ', 0)
				for _, f := range list {
					fmt.Fprintf(w, "%s\t%s\t%s\n", f.Verdict, clean(f.What), clean(f.Detail))
					if f.Remedy != "" {
						fmt.Fprintf(w, "\t\t-> %s\n", clean(f.Remedy))
					}
				}
				if err := w.Flush(); err != nil {
					return fmt.Errorf("write findings: %w", err)
				}
			}
			if failed > 0 {
				return errors.New("the kernel path cannot be had like this")
			}
			return nil
		}),
	}
	cmd.Flags().StringVar(&file, "config", "", "look at what this `FILE` needs, too")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
