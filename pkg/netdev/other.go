// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package netdev

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
)

var errOS = fmt.Errorf("read the host's network: needs Linux: %w", errors.ErrUnsupported)

// WatchBuffer is the receive buffer of Watch in bytes.
const WatchBuffer = 0

// Net needs Linux.
type Net struct{}

// Open returns an error.
func Open() (*Net, error) { return nil, errOS }

// Close has nothing to do.
func (*Net) Close() error { return nil }

// Do returns an error.
func (*Net) Do(func() error) error { return errOS }

// Link returns an error.
func (*Net) Link(string) (Link, error) { return Link{}, errOS }

// LinkByIndex returns an error.
func (*Net) LinkByIndex(int) (Link, error) { return Link{}, errOS }

// Route returns an error.
func (*Net) Route(netip.Addr) (Route, error) { return Route{}, errOS }

// Neighbours returns an error.
func (*Net) Neighbours(int) ([]Neighbour, error) { return nil, errOS }

// Poke returns an error.
func (*Net) Poke(netip.Addr) error { return errOS }

// Resolve returns an error.
func (*Net) Resolve(context.Context, netip.Addr) (Route, MAC, error) { return Route{}, MAC{}, errOS }

// IsLocal returns an error.
func (*Net) IsLocal(netip.Addr) (bool, error) { return false, errOS }

// Watch returns an error.
func (*Net) Watch(context.Context, int, func(Change)) error { return errOS }

// IPLocalPortRange returns an error.
func (*Net) IPLocalPortRange() (PortRange, error) { return PortRange{}, errOS }

// IPLocalReservedPorts returns an error.
func (*Net) IPLocalReservedPorts() ([]PortRange, error) { return nil, errOS }

// IPLocalPortRange returns an error.
func IPLocalPortRange() (PortRange, error) { return PortRange{}, errOS }

// IPLocalReservedPorts returns an error.
func IPLocalReservedPorts() ([]PortRange, error) { return nil, errOS }
