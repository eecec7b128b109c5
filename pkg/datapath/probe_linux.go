// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"
)

// Probe says whether the programs can be loaded here at all: nil, or an error that wraps ErrUnavailable and names what
// is missing. It leaves nothing behind.
func Probe() error {
	if err := checkCapabilities(); err != nil {
		return err
	}
	spec, err := loadSteer()
	if err != nil {
		return fmt.Errorf("%w: read program: %w", ErrUnavailable, err)
	}
	for _, m := range spec.Maps {
		m.Pinning = ebpf.PinNone
		if m.Type == ebpf.Hash {
			m.MaxEntries = 8 // the tables of a real load take tens of megabytes
		}
	}
	_ = rlimit.RemoveMemlock() // where it matters the load says so
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		return loadError(err)
	}
	coll.Close()
	if isBPFFS(systemBPFFS) || isBPFFS(ownBPFFS) || hasCapability(unix.CAP_SYS_ADMIN) {
		return nil
	}
	return fmt.Errorf("%w: no bpf file system at %s or %s, and mounting one needs CAP_SYS_ADMIN", ErrUnavailable, systemBPFFS, ownBPFFS)
}

// loadError makes the kernel's answer to a load readable.
func loadError(err error) error {
	var ve *ebpf.VerifierError
	switch {
	case errors.Is(err, ebpf.ErrMapIncompatible):
		return fmt.Errorf("load maps: %w: %w", ErrIncompatible, err)
	case errors.As(err, &ve):
		return fmt.Errorf("%w: the kernel's verifier refuses the program (needs Linux 5.18 or later): %w", ErrUnavailable, err)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w: load program: %w (the capabilities are there: a user namespace, a container's seccomp profile, a security module or a low RLIMIT_MEMLOCK forbids it)",
			ErrUnavailable, err)
	}
	return fmt.Errorf("%w: load program: %w", ErrUnavailable, err)
}

func checkCapabilities() error {
	var missing []string
	for _, c := range []struct {
		bit  int
		name string
	}{{unix.CAP_BPF, "CAP_BPF"}, {unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"}, {unix.CAP_PERFMON, "CAP_PERFMON"}} {
		if !hasCapability(c.bit) && (c.bit == unix.CAP_NET_ADMIN || !hasCapability(unix.CAP_SYS_ADMIN)) {
			missing = append(missing, c.name)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("%w: needs %s", ErrUnavailable, strings.Join(missing, " and "))
	}
	return nil
}

func hasCapability(bit int) bool {
	b, err := os.ReadFile("/proc/thread-self/status")
	if err != nil {
		return true // without /proc the load itself has to tell
	}
	for line := range strings.Lines(string(b)) {
		if hex, ok := strings.CutPrefix(line, "CapEff:"); ok {
			set, err := strconv.ParseUint(strings.TrimSpace(hex), 16, 64)
			return err != nil || set&(1<<bit) != 0
		}
	}
	return true
}
