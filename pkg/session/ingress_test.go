// SPDX-License-Identifier: Apache-2.0

package session

import (
	"net/netip"
	"testing"
	"time"
)

func TestIngresses(t *testing.T) {
	now := time.Unix(1000, 0)
	i := NewIngresses([]netip.Prefix{netip.MustParsePrefix("10.0.0.0/24")}, func() time.Time { return now })
	a := netip.MustParseAddr("192.0.2.7")
	if !i.Contains(netip.MustParseAddr("::ffff:10.0.0.9")) || i.Contains(netip.MustParseAddr("10.0.1.9")) || i.Contains(a) {
		t.Error("configured prefixes")
	}
	i.Probed(netip.MustParseAddr("::ffff:192.0.2.7"))
	now = now.Add(ingressTTL)
	if !i.Contains(a) {
		t.Error("a prober is forgotten too early")
	}
	now = now.Add(time.Nanosecond)
	if i.Contains(a) {
		t.Error("a prober is never forgotten")
	}
	for n := range ingressMax + 100 { // a flood of fake probes
		now = now.Add(time.Millisecond)
		i.Probed(netip.AddrFrom4([4]byte{198, 18, byte(n >> 8), byte(n)}))
	}
	if len(i.probed) > ingressMax {
		t.Errorf("%d addresses kept, at most %d", len(i.probed), ingressMax)
	}
	if !i.Probed(a) || !i.Contains(a) {
		t.Error("a full set keeps a new address out")
	}
	if i.Probed(a) || i.Probed(netip.MustParseAddr("10.0.0.3")) {
		t.Error("a known address counts as fresh")
	}
}
