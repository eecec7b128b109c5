// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/pkg/admin"
)

// show makes a command that asks the daemon for a T and prints it, as text or as JSON.
func show[T any](e *env, use, short string, setup func(*cobra.Command) func(context.Context, admin.Client) (T, error), text func(io.Writer, T)) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: cobra.NoArgs}
	client := e.adminFlags(cmd)
	asJSON := cmd.Flags().Bool("json", false, "print JSON")
	get := setup(cmd)
	cmd.RunE = e.run(func(cmd *cobra.Command, _ []string) error {
		api, err := client()
		if err != nil {
			return err
		}
		v, err := get(cmd.Context(), api)
		if err != nil {
			return err
		}
		if *asJSON {
			enc := json.NewEncoder(e.stdout)
			enc.SetIndent("", "  ")
			enc.SetEscapeHTML(false)
			return enc.Encode(v)
		}
		text(e.stdout, v)
		return nil
	})
	return cmd
}

func (e *env) statusCommand() *cobra.Command {
	return show(e, "status", "Show what the daemon does and whether the kernel path is live",
		func(*cobra.Command) func(context.Context, admin.Client) (admin.Status, error) {
			return func(ctx context.Context, c admin.Client) (admin.Status, error) { return c.Status(ctx) }
		}, writeStatus)
}

func (e *env) backendsCommand() *cobra.Command {
	return show(e, "backends", "List the backends with health, state and tokens in flight",
		func(*cobra.Command) func(context.Context, admin.Client) ([]admin.BackendStatus, error) {
			return func(ctx context.Context, c admin.Client) ([]admin.BackendStatus, error) { return c.Backends(ctx) }
		}, writeBackends)
}

func (e *env) sessionsCommand() *cobra.Command {
	return show(e, "sessions", "List the client addresses that the kernel steers, and where",
		func(cmd *cobra.Command) func(context.Context, admin.Client) ([]admin.Session, error) {
			limit := limitFlag(cmd)
			return func(ctx context.Context, c admin.Client) ([]admin.Session, error) { return c.Sessions(ctx, *limit) }
		}, writeSessions)
}

func (e *env) flowsCommand() *cobra.Command {
	return show(e, "flows", "List the connections that the kernel steers now",
		func(cmd *cobra.Command) func(context.Context, admin.Client) ([]admin.Flow, error) {
			limit := limitFlag(cmd)
			return func(ctx context.Context, c admin.Client) ([]admin.Flow, error) { return c.Flows(ctx, *limit) }
		}, writeFlows)
}

func limitFlag(cmd *cobra.Command) *int {
	return cmd.Flags().Int("limit", 1000, "print at most so many")
}

func writeStatus(w io.Writer, s admin.Status) {
	t := newTable(w)
	t.row("version", s.Version)
	t.row("up for", seconds(s.UptimeSeconds))
	t.row("listen", s.Listen)
	ready := "yes"
	if !s.Ready {
		ready = "no: " + s.NotReady
	}
	t.row("ready", ready)
	if s.ConfigFile != "" {
		t.row("configuration", s.ConfigFile)
	}
	if s.ReloadError != "" {
		t.row("last reload", "refused: "+firstLine(s.ReloadError))
	}
	t.row("backends", fmt.Sprintf("%d of %d up", s.BackendsUp, s.Backends))
	t.row("requests", fmt.Sprintf("%d served by the front end, %d open", s.Requests, s.InflightRequests))
	for _, c := range s.Tokens.Calibration {
		text := fmt.Sprintf("%s/%s: %.3f tokens for each one counted; confidence %.2f, %d requests", c.Pool, c.Model, c.Factor, c.Confidence, c.Samples)
		if c.Rejected > 0 {
			text += fmt.Sprintf(", %d not believed", c.Rejected)
		}
		if !c.Applied {
			text += "; not applied"
		}
		t.row("calibration", text)
	}
	k := s.Kernel
	switch {
	case k.Mode == "off":
		t.row("kernel path", "off")
	case !k.Live:
		t.row("kernel path", "not live: "+k.Reason)
	default:
		t.row("kernel path", fmt.Sprintf("live: %s to the %s, on %s", k.Mode, k.Target, strings.Join(k.Interfaces, ", ")))
	}
	if k.Live {
		t.row("vip", strings.Join(k.VIPs, ", "))
		t.row("nat ports", k.NATPorts)
		t.row("pinned maps", k.PinDir)
		t.row("pins", strconv.FormatInt(s.Pins, 10))
		t.row("steered", fmt.Sprintf("%d connections, %d open", s.SteeredConnections, s.SteeredFlows))
	}
	t.flush()
}

func writeBackends(w io.Writer, list []admin.BackendStatus) {
	t := newTable(w)
	t.row("NAME", "POOL", "HEALTH", "ADMIN", "TOKENS", "KERNEL", "LIMIT", "REQUESTS", "FLOWS", "ID", "URL", "STEER", "SIGNAL", "DETAIL")
	for _, b := range list {
		state, detail := b.Health, first(b.Detail, b.NotSteerable)
		if b.Ejected != "" {
			state += ",ejected"
			detail = b.Ejected
			if b.ProbeInSeconds > 0 {
				detail += "; probed in " + seconds(b.ProbeInSeconds)
			}
		}
		t.row(b.Name, b.Pool, state, b.Admin, num(b.L7Tokens), num(b.KernelTokens), num(b.Limit), num(b.Requests),
			num(b.SteeredFlows), num(b.ID), b.URL, dash(b.Steer), dash(b.Signal), dash(detail))
	}
	t.flush()
}

func writeSessions(w io.Writer, list []admin.Session) {
	t := newTable(w)
	t.row("CLIENT", "VIP", "BACKEND", "STATE", "SESSIONS", "TOKENS", "CONNECTIONS", "FLOWS", "EXPIRES")
	for _, s := range list {
		expires := "never"
		if s.ExpiresSeconds > 0 {
			expires = seconds(s.ExpiresSeconds)
		}
		if s.State == "mixed" || s.State == "ended" {
			expires = "-"
		}
		t.row(s.Client, s.VIP, dash(s.Backend), s.State, num(s.Sessions), num(s.Tokens), num(s.Connections), num(s.OpenFlows), expires)
	}
	t.flush()
}

func writeFlows(w io.Writer, list []admin.Flow) {
	t := newTable(w)
	t.row("CLIENT", "VIP", "BACKEND", "NAT PORT", "STATE", "AGE", "IDLE", "PACKETS", "BYTES", "CHARGE")
	for _, f := range list {
		t.row(f.Client, f.VIP, f.Backend, num(f.NATPort), f.State, seconds(f.AgeSeconds), seconds(f.IdleSeconds),
			num(f.Packets), num(f.Bytes), num(f.Charge))
	}
	t.flush()
}

// table aligns columns; what comes from the daemon cannot write to the terminal's controls.
type table struct{ w *tabwriter.Writer }

func newTable(w io.Writer) table { return table{tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)} }

func (t table) row(cells ...string) {
	for i, c := range cells {
		cells[i] = printable(c)
	}
	fmt.Fprintln(t.w, strings.Join(cells, "\t"))
}

func (t table) flush() { _ = t.w.Flush() }

// printable replaces what moves the cursor or hides text; line breaks become semicolons.
func printable(s string) string {
	return clean(strings.ReplaceAll(strings.TrimSpace(s), "\n", "; "))
}

// clean is printable with line breaks kept.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) && r != '\n' {
			return '?'
		}
		return r
	}, strings.ReplaceAll(s, "\t", " "))
}

func dash(s string) string { return first(s, "-") }

func num[T int | int64 | uint16 | uint32 | uint64](n T) string { return fmt.Sprint(n) }

// seconds writes a span as people say it: 3.2s, 5m10s, 2h3m, 4d1h.
func seconds(s float64) string {
	d := time.Duration(s * float64(time.Second))
	switch {
	case d < 10*time.Second:
		return d.Round(100 * time.Millisecond).String()
	case d < time.Hour:
		return d.Round(time.Second).String()
	case d < 24*time.Hour:
		return fmt.Sprintf("%dh%dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd%dh", int(d.Hours())/24, int(d.Hours())%24)
}
