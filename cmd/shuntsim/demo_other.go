// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package main

import "errors"

func probeSteering() error { return errors.New("the kernel path needs Linux") }

func mountBPF(string) error { return errors.ErrUnsupported }

func unmountBPF(string) error { return nil }
