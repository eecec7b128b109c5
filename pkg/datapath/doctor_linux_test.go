// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/cilium/ebpf/link"
)

// Diagnose finds nothing wrong with a world that works, and in one that does not what was done to it.
func TestDiagnose(t *testing.T) {
	w := newWorldAt(t, AttachTCX, 0, 1)
	foreignXDP := func() func() {
		var theirs link.Link
		must(t, w.Balancer.Do(func() error {
			l, err := net.InterfaceByName("eth0")
			if err != nil {
				return err
			}
			theirs, err = link.AttachXDP(link.XDPOptions{Program: passProgram(t), Interface: l.Index, Flags: link.XDPGenericMode})
			return err
		}))
		return func() { must(t, theirs.Close()) }
	}
	for _, tc := range []struct {
		name          string
		change        func(*Options, *[]BackendRecord)
		harm          func() (heal func())
		verdict, what string // "" = nothing
		detail        string
	}{
		{"works", nil, nil, "", "", ""},
		{"no such interface", func(o *Options, _ *[]BackendRecord) { o.Interfaces = []string{"nosuch0"} }, nil, FindingFail, "nosuch0", "no such"},
		{"backend behind another interface", func(o *Options, _ *[]BackendRecord) { o.Interfaces = []string{"lo"} }, nil, FindingFail, "backend e1", "through eth0"},
		{"silent backend", func(_ *Options, b *[]BackendRecord) {
			(*b)[0].Steer = netip.MustParseAddrPort("10.77.2.99:8000")
		}, nil, FindingFail, "backend e1", "does not answer"},
		{"unreachable backend", func(_ *Options, b *[]BackendRecord) {
			(*b)[0].Steer = netip.MustParseAddrPort("203.0.113.9:8000")
		}, nil, FindingFail, "backend e1", "no route"},
		{"ports of the stack", func(o *Options, _ *[]BackendRecord) { o.NATPorts.Last = 40000 }, nil, FindingFail, "vips and ports", "ip_local_port_range"},
		{"VIP of somebody else", func(o *Options, _ *[]BackendRecord) {
			o.VIPs[0].Addr = netip.MustParseAddrPort("10.77.0.50:8080")
		}, nil, FindingWarn, "address 10.77.0.50", "not this host's"},
		{"dsr with another port", func(o *Options, _ *[]BackendRecord) { o.VIPs[0].DSR = true }, nil, FindingFail, "backend e1", "dsr"},
		{"foreign program beside tcx", nil, foreignXDP, FindingWarn, "eth0", "somebody_elses"},
		{"foreign program in the way", func(o *Options, _ *[]BackendRecord) { o.Attach = AttachNative }, foreignXDP, FindingFail, "eth0", "somebody_elses"},
		{"interface is down", nil, func() func() {
			must(t, w.Balancer.SetDown("eth0"))
			return func() { must(t, w.Balancer.SetUp("eth0")) }
		}, FindingFail, "eth0", "down"},
		{"no bpffs", func(o *Options, _ *[]BackendRecord) { o.BPFFS = "/" }, nil, FindingFail, "bpffs", "no bpf file system"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o, backends := w.options(), w.records(false)
			if tc.change != nil {
				tc.change(&o, &backends)
			}
			if tc.harm != nil {
				defer tc.harm()()
			}
			var list []Finding
			must(t, w.Balancer.Do(func() error {
				list = Diagnose(context.Background(), o, backends)
				return nil
			}))
			found := tc.what == ""
			for _, f := range list {
				if f.Verdict == FindingFail && tc.what == "" {
					t.Errorf("%+v", f)
				}
				if f.Verdict == tc.verdict && f.What == tc.what && strings.Contains(f.Detail, tc.detail) {
					found = true
				}
			}
			if !found {
				t.Errorf("no %s of %s in %+v", tc.verdict, tc.what, list)
			}
		})
	}
}
