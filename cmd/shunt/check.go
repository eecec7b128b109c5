// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/pkg/app"
	"github.com/shunt-lb/shunt/pkg/config"
)

func (e *env) checkCommand() *cobra.Command {
	var reference, effective bool
	cmd := &cobra.Command{
		Use:   "check FILE",
		Short: "Check a configuration: every error with its line and column",
		Long: `Check reads a configuration as serve does, on this machine, and starts nothing.
It prints every error with line and column and exits 1, or "FILE: ok" and exits 0.
Warnings do not change the exit code. - is standard input.`,
		Args: func(cmd *cobra.Command, args []string) error {
			if reference && len(args) == 0 {
				return nil
			}
			return cobra.ExactArgs(1)(cmd, args)
		},
		RunE: e.run(func(_ *cobra.Command, args []string) error {
			if reference {
				fmt.Fprint(e.stdout, config.Reference())
				return nil
			}
			c, err := e.load(args[0])
			if err != nil {
				return err
			}
			if !effective {
				fmt.Fprintf(e.stdout, "%s: ok\n", args[0])
				return nil
			}
			text, err := c.Marshal()
			if err != nil {
				return err
			}
			_, err = e.stdout.Write(text)
			return err
		}),
	}
	cmd.Flags().BoolVar(&reference, "reference", false, "print the reference of all keys as a Markdown table")
	cmd.Flags().BoolVar(&effective, "effective", false, "print the configuration in force: defaults filled in")
	return cmd
}

// load reads and checks a file (- is standard input) for this machine; warnings go to stderr, whatever comes of it.
func (e *env) load(file string) (*config.Config, error) {
	check := func() (*config.Config, []config.Problem, error) { return config.CheckFile(file, app.Host()) }
	if file == "-" {
		data, err := e.input(nil)
		if err != nil {
			return nil, err
		}
		check = func() (*config.Config, []config.Problem, error) { return config.Check("stdin", data, app.Host()) }
	}
	c, warnings, err := check()
	for _, w := range warnings {
		fmt.Fprintf(e.stderr, "warning: %s\n", w)
	}
	if err != nil {
		return nil, err
	}
	return c, nil
}
