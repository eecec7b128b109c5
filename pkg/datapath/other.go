// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package datapath

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/session"
)

var errOS = fmt.Errorf("%w: needs Linux", ErrUnavailable)

// Datapath needs Linux.
type Datapath struct{}

// Open returns ErrUnavailable.
func Open(Options) (*Datapath, error) { return nil, errOS }

// Probe returns ErrUnavailable.
func Probe() error { return errOS }

// Silence has nothing to tell.
func (d *Datapath) Silence() {}

// Cleanup has nothing to do.
func Cleanup(bpffs, instance string) error { return nil }

// CleanupForced has nothing to do.
func CleanupForced(bpffs, instance string) error { return nil }

// Table returns an empty table.
func (*Datapath) Table() fleet.Table { return fleet.Table{} }

// Known returns nothing.
func (*Datapath) Known() map[string]fleet.Known { return nil }

// Attach returns ErrUnavailable.
func (*Datapath) Attach() error { return errOS }

// SetBackends returns ErrUnavailable.
func (*Datapath) SetBackends([]BackendRecord) error { return errOS }

// PinTable returns nil.
func (*Datapath) PinTable() session.PinTable { return nil }

// Run returns ErrUnavailable.
func (*Datapath) Run(context.Context) error { return errOS }

// Status returns nothing.
func (*Datapath) Status() Status { return Status{} }

// Flows returns ErrUnavailable.
func (*Datapath) Flows(int) ([]Flow, error) { return nil, errOS }

// Sessions returns ErrUnavailable.
func (*Datapath) Sessions(int) ([]Session, error) { return nil, errOS }

// Collector returns nil.
func (*Datapath) Collector() prometheus.Collector { return nil }

// Close has nothing to do.
func (*Datapath) Close() error { return nil }

// Diagnose finds that this is not Linux.
func Diagnose(context.Context, Options, []BackendRecord) []Finding {
	return []Finding{{Verdict: FindingFail, What: "kernel", Detail: errOS.Error()}}
}

// Trace returns ErrUnavailable.
func Trace(context.Context, string, string, netip.Addr, func(Traced)) error { return errOS }
