// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
)

// Values of --steer.
const (
	steerAuto    = "auto"    // in the kernel if this machine allows it
	steerRequire = "require" // an error if it does not
	steerOff     = "off"
)

type demoOptions struct {
	shunt string
	steer string
	keep  bool
}

var errNotSteered = errors.New("the kernel path was there, but the conversation was not steered")

func newDemo() *cobra.Command {
	var o demoOptions
	c := &cobra.Command{
		Use:   "demo",
		Short: "Show the main job on this machine: count, route, pin, steer",
		Long: `Start shunt and three simulated engines, hold a three-turn conversation over three connections beside some
background load, and say what happened at each step.

Where network namespaces and BPF can be had everything runs in a lab of namespaces, and turns 2 and 3 are steered in the
kernel. Elsewhere the same conversation runs through user space on the loopback interface. Nothing is left behind.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runDemo(cmd.Context(), cmd.OutOrStdout(), o)
		},
	}
	c.Flags().StringVar(&o.shunt, "shunt", "", "the shunt binary (default: beside shuntsim, then in PATH)")
	c.Flags().StringVar(&o.steer, "steer", steerAuto, "auto, require (fail where the kernel path cannot be had) or off")
	c.Flags().BoolVar(&o.keep, "keep", false, "leave everything up until Ctrl-C, and say what to try")
	return c
}

func runDemo(ctx context.Context, out io.Writer, o demoOptions) (err error) {
	// A reader of the output that has gone ends the demo, after everything is taken away.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	out = &reader{w: out, gone: cancel}
	shunt, err := findShunt(o.shunt)
	if err != nil {
		return err
	}
	missing := errors.New("--steer off")
	switch o.steer {
	case steerAuto, steerRequire:
		missing = probeSteering()
		if missing != nil && o.steer == steerRequire {
			return fmt.Errorf("kernel path: %w", missing)
		}
	case steerOff:
	default:
		return fmt.Errorf("--steer is %q, want %s, %s or %s", o.steer, steerAuto, steerRequire, steerOff)
	}
	w, err := newWorld(shunt, missing == nil, o.keep)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil && ctx.Err() == nil {
			w.showLogs(out)
		}
		err = errors.Join(err, w.close())
		if err == nil {
			fmt.Fprintln(out, "\nEverything is stopped and removed.")
		}
	}()
	s := &story{out: out, w: w}
	if err := s.tell(ctx, missing); err != nil {
		if ctx.Err() != nil {
			return errors.New("interrupted")
		}
		return err
	}
	if o.keep {
		s.commands()
		<-ctx.Done()
	}
	return nil
}

// reader is where the output goes; gone is called when it takes no more.
type reader struct {
	w    io.Writer
	gone func()
}

func (r *reader) Write(p []byte) (int, error) {
	n, err := r.w.Write(p)
	if err != nil {
		r.gone()
	}
	return n, err
}

// findShunt finds the daemon's binary: where the user says, beside this one, or in PATH.
func findShunt(path string) (string, error) {
	if path == "" {
		if self, err := os.Executable(); err == nil {
			path = filepath.Join(filepath.Dir(self), "shunt")
		}
		if _, err := os.Stat(path); err != nil {
			path = "shunt"
		}
	}
	found, err := exec.LookPath(path)
	if err != nil {
		return "", fmt.Errorf("find the shunt binary (--shunt): %w", err)
	}
	return filepath.Abs(found)
}

// poll asks until ok or an error, a few times a second at most.
func poll(ctx context.Context, limit time.Duration, what string, ok func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until %s: %w", what, ctx.Err())
		case <-tick.C:
		}
	}
	return nil
}
