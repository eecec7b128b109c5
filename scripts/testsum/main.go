// SPDX-License-Identifier: Apache-2.0

// Command testsum runs `go test` and says at the end, in plain words, what passed, what failed and what was left out
// for which reason.
//
//	go run ./scripts/testsum [go test arguments] [-- more go test arguments]...
//
// Each group of arguments is one run of `go test -json`; the groups run one after the other and share one summary.
// With SHUNT_REQUIRE_ALL=1 a test that was left out is a failure. The last line is always "N passed, N failed, N skipped".
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	s := newSummary(os.Stdout)
	for _, args := range groups(os.Args[1:]) {
		if err := runGroup(ctx, s, args); err != nil {
			s.note("go test", err)
		}
	}
	if !s.report(os.Getenv("SHUNT_REQUIRE_ALL") == "1") {
		os.Exit(1)
	}
}

// groups splits the command line at each "--".
func groups(args []string) [][]string {
	var out [][]string
	cur := []string{}
	for _, a := range args {
		if a == "--" {
			out = append(out, cur)
			cur = []string{}
			continue
		}
		cur = append(cur, a)
	}
	return append(out, cur)
}

// runGroup runs go test once. A test that failed is in the summary already, so only an exit that the summary does not
// explain is an error.
func runGroup(ctx context.Context, s *summary, args []string) error {
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-json"}, args...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("open pipe: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start go test: %w", err)
	}
	before := s.failures()
	readErr := s.read(out)
	// What is left unread would block the child for ever.
	if _, err := io.Copy(io.Discard, out); err != nil && readErr == nil {
		readErr = err
	}
	waitErr := cmd.Wait()
	switch {
	case readErr != nil:
		return readErr
	case waitErr != nil && s.failures() == before:
		return fmt.Errorf("run go test: %w", waitErr)
	}
	return nil
}
