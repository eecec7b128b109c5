// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// The kernel path with exactly the capabilities that the unit and the DaemonSet give, as an ordinary user.
func TestLeastPrivileges(t *testing.T) {
	w := newWorld(t, 1, 1)
	w.engine(0)
	// What the units do before the start: a bpffs that the daemon's user may write.
	if err := os.Chown(w.bpffs, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	for p := w.bpffs; p != "/tmp" && p != "/"; p = filepath.Dir(p) {
		if p != w.bpffs {
			if err := os.Chmod(p, 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	d := w.launch(w.Balancer, &syscall.SysProcAttr{
		Credential:  &syscall.Credential{Uid: 65534, Gid: 65534},
		AmbientCaps: []uintptr{unix.CAP_BPF, unix.CAP_NET_ADMIN, unix.CAP_PERFMON},
	}, w.vipConfig(false, rareSample))
	d.waitReady()
	client, url := w.Clients[0], vipURL(w, false)
	if r := w.chat(client, url, []message{{"user", longPrompt}}, 4); r.backend == "" || !r.closed {
		t.Fatalf("turn 1: backend %q, asked to reconnect %v", r.backend, r.closed)
	}
	if r := w.chat(client, url, []message{{"user", longPrompt}}, 4); r.backend != "" {
		t.Error("turn 2 was not steered")
	}
	d.weightsReturn()
}
