// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/ringbuf"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

const (
	traceEvery = 100 * time.Millisecond
	traceLease = 2 * time.Second // the kernel stops by itself so long after the last who wanted to see
)

// Trace calls fn for each packet of a client on which the kernel decides something, until ctx ends: every packet that is
// not a plain one of an open connection. It needs no daemon, and one Trace at a time sees all.
func Trace(ctx context.Context, bpffs, instance string, client netip.Addr, fn func(Traced)) error {
	instance, err := checkInstance(instance)
	if err != nil {
		return err
	}
	if bpffs, err = findBPFFS(bpffs); err != nil {
		return err
	}
	spec, err := loadSteer()
	if err != nil {
		return fmt.Errorf("read program: %w", err)
	}
	var reasons *btf.Enum
	if err := spec.Types.TypeByName("shunt_reason", &reasons); err != nil {
		return fmt.Errorf("read program: find enum shunt_reason: %w", err)
	}
	names := reasonNames(reasons)
	dir := mapDir(filepath.Join(bpffs, pinRoot, instance), abi)
	open := func(name string) (*ebpf.Map, error) {
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, name), nil)
		if err != nil {
			return nil, fmt.Errorf("open map %s: %w", name, err)
		}
		return m, nil
	}
	on, err := open(steerMapShuntTracing)
	if err != nil {
		return err
	}
	defer on.Close()
	ring, err := open(steerMapShuntTrace)
	if err != nil {
		return err
	}
	defer ring.Close()
	rd, err := ringbuf.NewReader(ring)
	if err != nil {
		return fmt.Errorf("open ring of traces: %w", err)
	}
	defer rd.Close()
	clock, err := newClock()
	if err != nil {
		return err
	}
	// What an earlier trace left is not of this one.
	rd.SetDeadline(time.Now())
	var rec ringbuf.Record
	for rd.ReadInto(&rec) == nil {
	}
	defer func() { _ = on.Put(uint32(0), steerTracing{}) }()
	var renewed time.Time
	for ctx.Err() == nil {
		if time.Since(renewed) > traceLease/4 {
			renewed = time.Now()
			if err := on.Put(uint32(0), steerTracing{Client: toBytes(client), UntilNs: clock.now() + uint64(traceLease)}); err != nil {
				return fmt.Errorf("ask for traces: %w", err)
			}
		}
		rd.SetDeadline(time.Now().Add(traceEvery))
		switch err := rd.ReadInto(&rec); {
		case errors.Is(err, os.ErrDeadlineExceeded):
			continue
		case err != nil:
			return fmt.Errorf("read ring of traces: %w", err)
		case len(rec.RawSample) < int(unsafe.Sizeof(steerTrace{})):
			continue
		}
		var t steerTrace
		copy(unsafe.Slice((*byte)(unsafe.Pointer(&t)), unsafe.Sizeof(t)), rec.RawSample)
		out := Traced{
			At:  clock.at.Add(time.Duration(t.Ns - clock.base)),
			Src: netip.AddrPortFrom(fromBytes(t.Src), t.Sport), Dst: netip.AddrPortFrom(fromBytes(t.Dst), t.Dport),
			Flags: tcpFlags(t.TcpFlags), Interface: int(t.Ifindex), Verdict: "forwarded", Backend: fleet.ID(t.Backend),
		}
		if int(t.Reason) < len(names) && t.Reason != 0 {
			out.Verdict = names[t.Reason]
		}
		if t.ToPort != 0 {
			out.To = netip.AddrPortFrom(fromBytes(t.To), t.ToPort)
		}
		fn(out)
	}
	return nil
}

func tcpFlags(bits uint8) string {
	s := ""
	for i, c := range "FSRPAU" {
		if bits&(1<<i) != 0 {
			s += string(c)
		}
	}
	return s
}
