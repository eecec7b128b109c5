// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"time"
)

var errOS = fmt.Errorf("network lab: needs Linux: %w", errors.ErrUnsupported)

type (
	// Lab needs Linux.
	Lab struct{}
	// Namespace needs Linux.
	Namespace struct{ Name, Path string }
	// Process needs Linux.
	Process struct{ Cmd *exec.Cmd }
	// Host needs Linux.
	Host struct {
		*Namespace
		Iface, Port string
		V4, V6      netip.Addr
	}
	// Testbed needs Linux.
	Testbed struct {
		Clients  []*Host
		Balancer *Host
		Engines  []*Host
		Switch   *Namespace
	}
	// SteeringOptions describe a testbed.
	SteeringOptions struct {
		Name             string
		Clients, Engines int
		Extra            []netip.Prefix
	}
)

// New returns a lab in which nothing can be made.
func New() *Lab { return &Lab{} }

// Probe says that Linux is missing.
func Probe() error { return errOS }

// Sweep has nothing to do.
func Sweep(string) error { return nil }

// Close has nothing to do.
func (*Lab) Close() error { return nil }

// Namespace returns an error.
func (*Lab) Namespace(string) (*Namespace, error) { return nil, errOS }

// Steering returns an error.
func (*Lab) Steering(SteeringOptions) (*Testbed, error) { return nil, errOS }

// Do returns an error.
func (*Namespace) Do(func() error) error { return errOS }

// Dial returns an error.
func (*Namespace) Dial(context.Context, string, string) (net.Conn, error) { return nil, errOS }

// Listen returns an error.
func (*Namespace) Listen(string, string) (net.Listener, error) { return nil, errOS }

// Start returns an error.
func (*Namespace) Start(*exec.Cmd) (*Process, error) { return nil, errOS }

// Wait returns an error.
func (*Process) Wait() error { return errOS }

// Done is closed.
func (*Process) Done() <-chan struct{} { c := make(chan struct{}); close(c); return c }

// Signal returns an error.
func (*Process) Signal(os.Signal) error { return errOS }

// Stop returns an error.
func (*Process) Stop(time.Duration) error { return errOS }
