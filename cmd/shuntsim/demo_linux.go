// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/pkg/datapath"
	"github.com/shunt-lb/shunt/pkg/netdev/lab"
)

// probeSteering says what is missing for the demo in the kernel, by trying it.
func probeSteering() error {
	if err := lab.Probe(); err != nil {
		return err
	}
	return datapath.Probe()
}

// mountBPF mounts a BPF file system of the demo's own, so that nothing of it can meet a real shunt's.
func mountBPF(dir string) error {
	if err := unix.Mount("bpf", dir, "bpf", 0, "mode=0700"); err != nil {
		return fmt.Errorf("mount bpf file system: %w", err)
	}
	return nil
}

func unmountBPF(dir string) error {
	if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("unmount %s: %w", dir, err)
	}
	return nil
}
