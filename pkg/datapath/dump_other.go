// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package datapath

import "io"

// Dump needs Linux.
func Dump(io.Writer, string, string, string, func(string) bool) error { return ErrUnavailable }
