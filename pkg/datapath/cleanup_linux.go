// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Cleanup detaches the instance's programs and removes its pins, and with them all that is steered. It works without a
// daemon and refuses with ErrLocked while one runs. bpffs "" means wherever Open would have found or made one. That
// there is nothing to remove is no error.
func Cleanup(bpffs, instance string) error { return cleanup(bpffs, instance, false) }

// CleanupForced is Cleanup even while a daemon runs: it loses its kernel path.
func CleanupForced(bpffs, instance string) error { return cleanup(bpffs, instance, true) }

func cleanup(bpffs, instance string, force bool) error {
	instance, err := checkInstance(instance)
	if err != nil {
		return err
	}
	places := []string{systemBPFFS, ownBPFFS}
	if bpffs != "" {
		if !isBPFFS(bpffs) {
			return fmt.Errorf("clean up: %s is no bpf file system", bpffs)
		}
		places = []string{bpffs}
	}
	var errs []error
	for _, p := range places {
		if !isBPFFS(p) {
			continue
		}
		if err := cleanPlace(p, instance, force); err != nil {
			errs = append(errs, fmt.Errorf("clean up %s: %w", p, err))
			continue
		}
		if p == ownBPFFS && bpffs == "" {
			errs = append(errs, removeOwnBPFFS())
		}
	}
	return errors.Join(errs...)
}

func cleanPlace(bpffs, instance string, force bool) error {
	root := filepath.Join(bpffs, pinRoot)
	dir := filepath.Join(root, instance)
	lock, err := lockDir(dir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case errors.Is(err, ErrLocked) && force:
	case err != nil:
		return err
	default:
		defer lock.Close()
	}
	list, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("read %s: %w", dir, err)
	}
	// Programs first: one that runs without its maps would pass or drop what it should steer.
	var errs []error
	for _, e := range list {
		if strings.HasPrefix(e.Name(), linkPrefix) {
			errs = append(errs, detach(filepath.Join(dir, e.Name())))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, e := range list {
		if e.IsDir() {
			if err := removeMaps(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := os.Remove(dir); err != nil {
		return fmt.Errorf("remove %s: %w", dir, err)
	}
	_ = os.Remove(root) // refused while there are other instances
	return nil
}

func removeMaps(dir string) error {
	list, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("read %s: %w", dir, err)
	}
	for _, e := range list {
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
			return fmt.Errorf("unpin map %s: %w", e.Name(), err)
		}
	}
	if err := os.Remove(dir); err != nil {
		return fmt.Errorf("remove %s: %w", dir, err)
	}
	return nil
}

// removeOwnBPFFS unmounts the file system that Open mounted, when nothing is pinned in it any more.
func removeOwnBPFFS() error {
	list, err := os.ReadDir(ownBPFFS)
	if err != nil {
		return nil
	}
	for _, e := range list {
		if !strings.HasSuffix(e.Name(), ".debug") { // the kernel's own, in every bpffs
			return nil
		}
	}
	if err := unix.Unmount(ownBPFFS, 0); err != nil {
		if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EINVAL) {
			return nil // the host's, or in use
		}
		return fmt.Errorf("unmount %s: %w", ownBPFFS, err)
	}
	_ = os.Remove(ownBPFFS)
	_ = os.Remove(filepath.Dir(ownBPFFS))
	return nil
}
