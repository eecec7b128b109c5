// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	systemBPFFS = "/sys/fs/bpf"
	ownBPFFS    = "/run/shunt/bpf"
	pinRoot     = "shunt" // below a bpffs; then the instance, its links, and a directory of maps for each ABI
	linkPrefix  = "link_"
)

func isBPFFS(dir string) bool {
	var st unix.Statfs_t
	return unix.Statfs(dir, &st) == nil && uint32(st.Type) == unix.BPF_FS_MAGIC
}

// findBPFFS returns a mounted bpffs, and mounts one when there is none.
func findBPFFS(dir string) (string, error) {
	if dir != "" {
		if !isBPFFS(dir) {
			return "", fmt.Errorf("%w: %s is no bpf file system: run `mount -t bpf bpf %s` on the host", ErrUnavailable, dir, dir)
		}
		return dir, nil
	}
	for _, d := range []string{systemBPFFS, ownBPFFS} {
		if isBPFFS(d) {
			return d, nil
		}
	}
	if private, err := privateMounts(); err == nil && private {
		return "", fmt.Errorf("%w: no bpf file system at %s or %s, and one that is mounted here would end with this process's mount namespace: mount it on the host",
			ErrUnavailable, systemBPFFS, ownBPFFS)
	}
	var errs []error
	// An empty directory of sysfs is what the kernel offers for it; anything else there belongs to somebody.
	if list, err := os.ReadDir(systemBPFFS); err == nil && len(list) == 0 {
		if err := mountBPFFS(systemBPFFS); err == nil {
			return systemBPFFS, nil
		} else {
			errs = append(errs, err)
		}
	}
	if err := os.MkdirAll(ownBPFFS, 0o700); err != nil {
		errs = append(errs, fmt.Errorf("make %s: %w", ownBPFFS, err))
	} else if err := mountBPFFS(ownBPFFS); err != nil {
		errs = append(errs, err)
	} else {
		return ownBPFFS, nil
	}
	return "", fmt.Errorf("%w: no bpf file system: %w (needs CAP_SYS_ADMIN, or a bpf file system that the host mounted)",
		ErrUnavailable, errors.Join(errs...))
}

func mountBPFFS(dir string) error {
	if err := unix.Mount("bpf", dir, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return fmt.Errorf("mount bpf file system at %s: %w", dir, err)
	}
	return nil
}

// privateMounts says whether this process has another mount namespace than the init process.
func privateMounts() (bool, error) {
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return false, err
	}
	host, err := os.Readlink("/proc/1/ns/mnt")
	if err != nil {
		return false, err
	}
	return own != host, nil
}

func checkInstance(name string) (string, error) {
	if name == "" {
		return "default", nil
	}
	for _, c := range name {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '_' {
			return "", fmt.Errorf("name instance: %q may hold letters, digits, - and _ only", name)
		}
	}
	if len(name) > 64 {
		return "", fmt.Errorf("name instance: %q is longer than 64 bytes", name)
	}
	return name, nil
}

func mapDir(instanceDir string, abi uint32) string {
	return filepath.Join(instanceDir, "v"+strconv.FormatUint(uint64(abi), 10))
}

// linkPath is where an interface's link is pinned. A bpffs allows no dot in a name.
func linkPath(instanceDir, iface string) string {
	return filepath.Join(instanceDir, linkPrefix+strings.NewReplacer("%", "%25", ".", "%2e").Replace(iface))
}

func linkIface(name string) (string, bool) {
	name, ok := strings.CutPrefix(name, linkPrefix)
	return strings.NewReplacer("%2e", ".", "%25", "%").Replace(name), ok
}

// lockDir holds an instance's directory for this process: the kernel lets go when the process ends, however it ends.
func lockDir(dir string) (*os.File, error) {
	for {
		f, err := os.Open(dir)
		if err != nil {
			return nil, fmt.Errorf("lock instance: %w", err)
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, fmt.Errorf("lock %s: %w", dir, ErrLocked)
			}
			return nil, fmt.Errorf("lock %s: %w", dir, err)
		}
		// A cleanup may have removed the directory between the open and the lock.
		now, err := os.Stat(dir)
		if err == nil {
			if held, err := f.Stat(); err == nil && os.SameFile(now, held) {
				return f, nil
			}
		}
		f.Close()
		if err != nil {
			return nil, fmt.Errorf("lock instance: %w", err)
		}
	}
}

// makeInstance makes the instance's directory and locks it.
func makeInstance(bpffs, instance string) (dir string, lock *os.File, err error) {
	dir = filepath.Join(bpffs, pinRoot, instance)
	for range 3 {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return "", nil, fmt.Errorf("%w: make %s: %w", ErrUnavailable, dir, err)
		}
		lock, err = lockDir(dir)
		if !errors.Is(err, os.ErrNotExist) {
			break
		}
	}
	return dir, lock, err
}
