// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"net/netip"
	"reflect"
	"testing"
)

func TestPortRange(t *testing.T) {
	r := PortRange{20000, 29999}
	for _, c := range []struct {
		o        PortRange
		overlaps bool
		contains bool
	}{
		{PortRange{}, false, false},
		{PortRange{1, 19999}, false, false},
		{PortRange{1, 20000}, true, false},
		{PortRange{29999, 29999}, true, true},
		{PortRange{30000, 65535}, false, false},
		{PortRange{20000, 29999}, true, true},
		{PortRange{1, 65535}, true, false},
	} {
		if got := r.Overlaps(c.o); got != c.overlaps {
			t.Errorf("%v overlaps %v: %v", r, c.o, got)
		}
		if got := c.o.Overlaps(r); got != c.overlaps {
			t.Errorf("%v overlaps %v: %v", c.o, r, got)
		}
		if got := r.Contains(c.o) && c.o != (PortRange{}); got != c.contains {
			t.Errorf("%v contains %v: %v", r, c.o, got)
		}
	}
}

func TestParsePorts(t *testing.T) {
	for _, c := range []struct {
		in   string
		want []PortRange
		bad  bool
	}{
		{"", nil, false},
		{"8080", []PortRange{{8080, 8080}}, false},
		{"80,9000-9100,65535", []PortRange{{80, 80}, {9000, 9100}, {65535, 65535}}, false},
		{"9100-9000", nil, true},
		{"65536", nil, true},
		{"x", nil, true},
		{"1-", nil, true},
		{",", nil, true},
	} {
		got, err := parsePorts(c.in)
		if (err != nil) != c.bad || !reflect.DeepEqual(got, c.want) {
			t.Errorf("parsePorts(%q) = %v, %v", c.in, got, err)
		}
	}
}

func TestLocalSet(t *testing.T) {
	set, err := LocalSet()
	if err != nil {
		t.Fatal(err)
	}
	for s, want := range map[string]bool{"127.0.0.1": true, "127.9.9.9": true, "::1": true, "::ffff:127.0.0.1": true, "192.0.2.1": false} {
		if got := set.Has(netip.MustParseAddr(s)); got != want {
			t.Errorf("Has(%s) = %v", s, got)
		}
	}
}
