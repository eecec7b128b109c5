// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/app"
	"github.com/shunt-lb/shunt/pkg/config"
	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/tokens"
)

// served runs serve with a stand-in for the daemon.
func served(t *testing.T, vars map[string]string, f func(context.Context, *config.Config, app.Options) error, args ...string) outcome {
	t.Helper()
	var out, errs bytes.Buffer
	e := &env{stdin: strings.NewReader(""), stdout: &out, stderr: &errs, getenv: func(k string) string { return vars[k] }, serve: f}
	code := e.main(t.Context(), append([]string{"serve"}, args...))
	return outcome{code, out.String(), errs.String()}
}

func TestServeByFlags(t *testing.T) {
	var cfg *config.Config
	got := served(t, nil, func(_ context.Context, c *config.Config, o app.Options) error {
		cfg = c
		if o.Reload != nil || o.ConfigPath != "" || o.Version != "dev" {
			t.Errorf("options: %+v", o)
		}
		return nil
	}, "--backend", "http://127.0.0.1:8000", "--backend", "b=http://127.0.0.1:8001", "--listen", ":8081", "--policy", "round_robin", "--admin", "off")
	if got != (outcome{}) {
		t.Fatalf("%+v", got)
	}
	if cfg.Listen.Port() != 8081 || cfg.Pools[0].Policy != "round_robin" || len(cfg.Pools[0].Backends) != 2 || cfg.Admin.Listen.IsValid() {
		t.Errorf("%+v", cfg)
	}
	got = served(t, nil, func(context.Context, *config.Config, app.Options) error { return errors.New("listen on x: in use") }, "--backend", "http://a")
	if got != (outcome{1, "", "shunt: listen on x: in use\n"}) {
		t.Errorf("error of the daemon: %+v", got)
	}
	never := func(context.Context, *config.Config, app.Options) error { t.Error("started"); return nil }
	got = served(t, nil, never, "--backend", "127.0.0.1:8000")
	if got.code != exitNotDone || !strings.Contains(got.err, "write http://127.0.0.1:8000") {
		t.Errorf("bad backend: %+v", got)
	}
	if got = served(t, nil, never, "--config", filepath.Join(t.TempDir(), "none")); got.code != exitNotDone {
		t.Errorf("no file: %+v", got)
	}
}

// SIGHUP asks the daemon for a reload, which reads the file again; SIGTERM ends its context.
func TestServeSignals(t *testing.T) {
	file := filepath.Join(t.TempDir(), "shunt.yaml")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("pools: [{backends: [{url: 'http://127.0.0.1:8000'}]}]\n")
	limit := time.After(20 * time.Second)
	got := served(t, nil, func(ctx context.Context, c *config.Config, o app.Options) error {
		if o.ConfigPath != file || len(c.Pools[0].Backends) != 1 {
			t.Errorf("%+v", o)
		}
		write("pools: [{backends: [{url: 'http://127.0.0.1:8000'}, {url: 'http://127.0.0.1:8001'}]}]\n")
		if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
			t.Error(err)
		}
		select {
		case <-o.ReloadRequests:
		case <-limit:
			t.Error("SIGHUP asked for nothing")
		}
		if c, err := o.Reload(); err != nil || len(c.Pools[0].Backends) != 2 {
			t.Errorf("reload: %v, %v", c, err)
		}
		write("pools: []\n")
		var bad *config.Error
		if _, err := o.Reload(); !errors.As(err, &bad) {
			t.Errorf("reload of a bad file: %v", err)
		}
		if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		select {
		case <-ctx.Done():
		case <-limit:
			t.Error("SIGTERM did not end the context")
		}
		return nil
	}, "--config", file)
	if got != (outcome{}) {
		t.Errorf("%+v", got)
	}
}

func TestNotify(t *testing.T) {
	for _, name := range []string{filepath.Join(t.TempDir(), "notify"), "@shunt-test-notify"} {
		ln, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: name, Net: "unixgram"})
		if err != nil {
			t.Fatal(err)
		}
		got := served(t, map[string]string{"NOTIFY_SOCKET": name}, func(_ context.Context, _ *config.Config, o app.Options) error {
			o.Notify("READY=1")
			o.Notify("RELOADING=1")
			o.Notify("STOPPING=1")
			return nil
		}, "--backend", "http://a")
		if got != (outcome{}) {
			t.Errorf("%+v", got)
		}
		for _, want := range []string{"READY=1", "RELOADING=1\nMONOTONIC_USEC=", "STOPPING=1"} {
			buf := make([]byte, 256)
			if err := ln.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
				t.Fatal(err)
			}
			n, err := ln.Read(buf)
			if err != nil || !strings.HasPrefix(string(buf[:n]), want) {
				t.Errorf("%s: %q, %v, want %s", name, buf[:n], err, want)
			}
		}
		_ = ln.Close()
	}
	// A service manager that is gone stops nothing.
	got := served(t, map[string]string{"NOTIFY_SOCKET": "/nonexistent/notify"}, func(_ context.Context, _ *config.Config, o app.Options) error {
		o.Notify("READY=1")
		return nil
	}, "--backend", "http://a")
	if got.code != exitDone || !strings.HasPrefix(got.err, "shunt: notify systemd: ") {
		t.Errorf("%+v", got)
	}
}

// The schema's own numbers and words agree with the packages that they stand for.
func TestSchemaAgrees(t *testing.T) {
	if config.MaxBackends != fleet.MaxBackends-1 {
		t.Errorf("the schema allows %d backends, the fleet %d", config.MaxBackends, fleet.MaxBackends-1)
	}
	for _, k := range config.Keys() {
		if k.Path == "tokens.default" && k.Kind != strings.Join(tokens.Encodings(), ", ") {
			t.Errorf("the schema knows the encodings %s, the counter %v", k.Kind, tokens.Encodings())
		}
		if k.Path == "tokens.max_bytes" && k.Default != config.Size(tokens.DefaultMaxBytes).String() {
			t.Errorf("default of %s: %s, the counter's %d", k.Path, k.Default, tokens.DefaultMaxBytes)
		}
	}
}
