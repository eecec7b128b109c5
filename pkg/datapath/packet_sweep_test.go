// SPDX-License-Identifier: Apache-2.0

//go:build linux

package datapath

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/shunt-lb/shunt/pkg/datapath/dptest"
	"golang.org/x/sys/unix"
)

// arm starts the sweep, as the daemon does after each load.
func (r *rig) arm() {
	r.Helper()
	if v, err := r.o.ShuntArm.Run(&ebpf.RunOptions{Data: make([]byte, 64)}); err != nil || v != dptest.Pass {
		r.Fatalf("arm the sweep: verdict %d, %v", v, err)
	}
}

func (r *rig) state() (s steerState) {
	r.Helper()
	if err := r.o.ShuntState.Lookup(uint32(0), &s); err != nil {
		r.Fatalf("read state: %v", err)
	}
	return s
}

// afterSweeps waits until two sweeps that began after now have ended.
func (r *rig) afterSweeps() {
	r.Helper()
	from := r.state().Sweeps
	r.eventually("three sweeps", func() bool { return r.state().Sweeps >= from+3 })
}

// age moves both entries of a connection into the past.
func (r *rig) age(c *conn, by time.Duration, forward, reverse bool) {
	r.Helper()
	for _, e := range []struct {
		key steerFlowKey
		do  bool
	}{{flowKey(c.client, r.fam.vip), forward}, {flowKey(r.fam.backend, c.nat), reverse}} {
		if !e.do {
			continue
		}
		f, err := r.o.flow(e.key)
		if err != nil {
			r.Fatalf("age flow: %v", err)
		}
		f.Last -= uint32(by >> tickShift)
		f.CreatedNs -= uint64(by)
		r.putFlow(e.key, f)
	}
}

// TestPacketSweep: what the kernel alone does with flows that fall silent. Times are the defaults; entries are aged.
func TestPacketSweep(t *testing.T) {
	const both = 2
	for _, tc := range []struct {
		name    string
		make    func(r *rig) *conn
		age     time.Duration
		entries int  // left after the sweep
		settled bool // tokens are back
	}{
		{"half open, young", func(r *rig) *conn { return r.open(r.fam.client) }, 2 * time.Second, both, false},
		{"half open, old", func(r *rig) *conn { return r.open(r.fam.client) }, 3 * time.Second, 0, true},
		{"no last ACK", func(r *rig) *conn { c := r.open(r.fam.client); c.backend(dptest.SYN|dptest.ACK, ""); return c }, 3 * time.Second, 0, true},
		{"quiet for two hours and four minutes", func(r *rig) *conn { return r.open(r.fam.client).establish() }, 124 * time.Minute, both, false},
		{"quiet for longer", func(r *rig) *conn { return r.open(r.fam.client).establish() }, 126 * time.Minute, 0, true},
		{"client closed, backend thinks", func(r *rig) *conn { c := r.open(r.fam.client).establish(); c.fromClient(fin, ""); return c }, time.Hour, both, false},
		{"backend closed, client does not", func(r *rig) *conn { c := r.open(r.fam.client).establish(); c.backend(fin, ""); return c }, 11 * time.Minute, 0, true},
		{"closed, client first, young", func(r *rig) *conn {
			c := r.open(r.fam.client).establish()
			c.fromClient(fin, "")
			c.backend(fin, "")
			return c
		}, 4 * time.Second, both, true},
		{"closed, client first, old", func(r *rig) *conn {
			c := r.open(r.fam.client).establish()
			c.fromClient(fin, "")
			c.backend(fin, "")
			return c
		}, 6 * time.Second, 0, true},
		{"closed, backend first, young", func(r *rig) *conn {
			c := r.open(r.fam.client).establish()
			c.backend(fin, "")
			c.fromClient(fin, "")
			return c
		}, 60 * time.Second, both, true},
		{"closed, backend first, old", func(r *rig) *conn {
			c := r.open(r.fam.client).establish()
			c.backend(fin, "")
			c.fromClient(fin, "")
			return c
		}, 62 * time.Second, 0, true},
		{"reset", func(r *rig) *conn { c := r.open(r.fam.client).establish(); c.backend(rst, ""); return c }, 6 * time.Second, 0, true},
		{"suspect and silent", func(r *rig) *conn {
			c := r.open(r.fam.client).establish()
			c.bseq += 3
			c.backend(rst, "")
			return c
		}, 6 * time.Second, both, true},
		{"suspect, not yet silent", func(r *rig) *conn {
			c := r.open(r.fam.client).establish()
			c.bseq += 3
			c.backend(rst, "")
			return c
		}, time.Second, both, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, families[0], rigOptions{flows: 64, vars: map[string]any{"sweep_ns": uint64(5 * time.Millisecond)}})
			r.age(tc.make(r), tc.age, true, true)
			r.arm()
			r.afterSweeps()
			if n := r.countFlows(); n != tc.entries {
				t.Fatalf("%d entries, want %d", n, tc.entries)
			}
			if tc.settled {
				r.wantKernel(0, 0, 0)
				if ev := r.events(); len(ev[2]) != 1 {
					t.Fatalf("close events: %+v", ev)
				}
			} else if w := r.weight(); w.KernelTokens != worldTokens || w.KernelFlows != 1 {
				t.Fatalf("tokens came back early: %+v", w)
			}
			if s := r.state(); s.Expired > 2 || s.SweptNs == 0 {
				t.Fatalf("state: %+v", s)
			}
		})
	}
}

// TestPacketSweepOneDirection: traffic in either direction keeps the pair.
func TestPacketSweepOneDirection(t *testing.T) {
	r := newRig(t, families[0], rigOptions{flows: 64, vars: map[string]any{"sweep_ns": uint64(5 * time.Millisecond)}})
	up, down := r.open(r.port(1)).establish(), r.open(r.port(2)).establish()
	r.age(up, 24*time.Hour, false, true)
	r.age(down, 24*time.Hour, true, false)
	r.arm()
	r.afterSweeps()
	if n := r.countFlows(); n != 4 {
		t.Fatalf("%d entries, want 4", n)
	}
	r.wantKernel(2*worldTokens, 0, 2)
	r.age(up, 24*time.Hour, true, false)
	r.age(down, 24*time.Hour, false, true)
	r.afterSweeps()
	if n := r.countFlows(); n != 0 {
		t.Fatalf("%d entries left", n)
	}
	r.wantKernel(0, 0, 0)
}

// TestPacketSweepHeldPort: the half that only holds a NAT port goes when the backend has forgotten it.
func TestPacketSweepHeldPort(t *testing.T) {
	r := newRig(t, families[0], rigOptions{flows: 64, vars: map[string]any{"sweep_ns": uint64(5 * time.Millisecond)}})
	old := r.open(r.fam.client).establish()
	old.backend(fin, "")
	old.fromClient(fin, "")
	r.open(r.fam.client).establish()
	r.age(old, 60*time.Second, false, true)
	r.arm()
	r.afterSweeps()
	if n := r.countFlows(); n != 3 {
		t.Fatalf("%d entries, want 3", n)
	}
	r.age(old, 2*time.Second, false, true)
	r.afterSweeps()
	if n := r.countFlows(); n != 2 {
		t.Fatalf("%d entries, want 2", n)
	}
	r.wantKernel(worldTokens, 0, 1)
}

// TestPacketSweepOutlivesLoader: the timer lives as long as the pinned maps do, and a new program takes it over.
func TestPacketSweepOutlivesLoader(t *testing.T) {
	need(t, probeBPF())
	dir := t.TempDir()
	need(t, unix.Mount("bpf", dir, "bpf", 0, "mode=0700"))
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	load := func(sweep time.Duration) {
		spec, err := loadSteer()
		if err != nil {
			t.Fatal(err)
		}
		spec.Maps["shunt_flows"].MaxEntries = 64
		spec.Maps["shunt_flows6"].MaxEntries = 64
		if err := spec.Variables["sweep_ns"].Set(uint64(sweep)); err != nil {
			t.Fatal(err)
		}
		r := &rig{TB: t}
		if err := spec.LoadAndAssign(&r.o, &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: dir}}); err != nil {
			t.Fatal(err)
		}
		r.arm()
		if err := r.o.Close(); err != nil {
			t.Fatal(err)
		}
	}
	load(5 * time.Millisecond)
	r := &rig{TB: t}
	var err error
	if r.o.ShuntState, err = ebpf.LoadPinnedMap(filepath.Join(dir, "shunt_state"), nil); err != nil {
		t.Fatal(err)
	}
	defer r.o.ShuntState.Close()
	r.afterSweeps()
	if r.state().NextPort == 0 {
		t.Fatal("the first NAT port is not random")
	}
	// The second program's interval shows whose callback runs.
	load(time.Hour)
	r.eventually("the old program's sweeps end", func() bool {
		from := r.state().Sweeps
		time.Sleep(30 * time.Millisecond)
		return r.state().Sweeps == from
	})
	load(5 * time.Millisecond)
	r.afterSweeps()
}
