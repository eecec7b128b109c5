// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/shunt-lb/shunt/pkg/config"
)

// newLogger returns the daemon's own log: text on a terminal, JSON otherwise.
func newLogger(c config.Log, w io.Writer) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(c.Level)); err != nil {
		return nil, fmt.Errorf("set log level: %w", err)
	}
	o := &slog.HandlerOptions{Level: level}
	if c.Format == "json" || c.Format == "auto" && !terminal(w) {
		return slog.New(slog.NewJSONHandler(w, o)), nil
	}
	return slog.New(slog.NewTextHandler(w, o)), nil
}

func terminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	st, err := f.Stat()
	return err == nil && st.Mode()&os.ModeCharDevice != 0
}

// openAccessLog returns where the access log goes, nil for off, and what closes it.
func openAccessLog(name string, stderr io.Writer) (io.Writer, func() error, error) {
	none := func() error { return nil }
	switch name {
	case "off":
		return nil, none, nil
	case "stderr":
		return stderr, none, nil
	case "stdout":
		return os.Stdout, none, nil
	}
	f, err := os.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o640)
	if err != nil {
		return nil, none, fmt.Errorf("open access log: %w", err)
	}
	return f, f.Close, nil
}
