// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"net/netip"
)

// SteeringOptions describe a testbed.
type SteeringOptions struct {
	Name    string         // prefix of the namespaces' names; "" = anonymous
	Clients int            // at most 250
	Engines int            // at most 250
	Extra   []netip.Prefix // further addresses of the balancer
	Plain   bool           // leave the port that faces the balancer as the kernel makes it: for tcx, not for XDP
}

// Host is a namespace with one interface on the bridge.
type Host struct {
	*Namespace
	Iface  string // in the host's namespace
	Port   string // its peer: the bridge's port, in Testbed.Switch
	V4, V6 netip.Addr
}

// Testbed is clients, one balancer and engines on one bridge.
type Testbed struct {
	Clients  []*Host
	Balancer *Host
	Engines  []*Host
	plain    bool
	Switch   *Namespace // holds the bridge br0 and the ports lb, c1.., e1..
}

// Steering builds a testbed (see the package comment). On an error, Close of the lab removes what was made.
func (l *Lab) Steering(o SteeringOptions) (*Testbed, error) {
	if o.Clients < 0 || o.Clients > 250 || o.Engines < 0 || o.Engines > 250 {
		return nil, fmt.Errorf("build testbed: %d clients and %d engines: at most 250 each", o.Clients, o.Engines)
	}
	name := func(s string) string {
		if o.Name == "" {
			return ""
		}
		return o.Name + "-" + s
	}
	sw, err := l.Namespace(name("sw"))
	if err != nil {
		return nil, err
	}
	if err := sw.Bridge("br0"); err != nil {
		return nil, err
	}
	t := &Testbed{Switch: sw, plain: o.Plain}
	host := func(port string, net4, net6, number int) (*Host, error) {
		ns, err := l.Namespace(name(port))
		if err != nil {
			return nil, err
		}
		h := &Host{
			Namespace: ns, Iface: "eth0", Port: port,
			V4: netip.AddrFrom4([4]byte{10, 77, byte(net4), byte(number)}),
			V6: netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x77, 13: byte(net6), 15: byte(number)}),
		}
		return h, t.Plug(h)
	}
	if t.Balancer, err = host("lb", 0, 0, 1); err != nil {
		return nil, err
	}
	for _, p := range o.Extra {
		if err := t.Balancer.AddAddr(t.Balancer.Iface, p); err != nil {
			return nil, err
		}
	}
	for i := 1; i <= o.Clients; i++ {
		h, err := host(fmt.Sprintf("c%d", i), 1, 1, i)
		if err != nil {
			return nil, err
		}
		t.Clients = append(t.Clients, h)
	}
	for i := 1; i <= o.Engines; i++ {
		h, err := host(fmt.Sprintf("e%d", i), 2, 2, i)
		if err != nil {
			return nil, err
		}
		t.Engines = append(t.Engines, h)
	}
	return t, nil
}

// Plug connects a host whose interface is not there, as Steering did.
func (t *Testbed) Plug(h *Host) error {
	if err := Veth(h.Namespace, h.Iface, t.Switch, h.Port); err != nil {
		return err
	}
	if err := t.Switch.Enslave(h.Port, "br0"); err != nil {
		return err
	}
	if h.Port == "lb" && !t.plain {
		// What the balancer's program sees comes from here: whole checksums, a queue, and NAPI to receive redirects.
		if err := t.Switch.Offload(h.Port, false, true); err != nil {
			return err
		}
		if err := t.Switch.Pfifo(h.Port, 4000); err != nil {
			return err
		}
	}
	if err := h.AddAddr(h.Iface, netip.PrefixFrom(h.V4, 16)); err != nil {
		return err
	}
	return h.AddAddr(h.Iface, netip.PrefixFrom(h.V6, 64))
}

// Answer lets a host answer for an address that it does not announce, as a backend of direct server return does: the
// address is on lo, and neither ARP nor neighbour discovery speaks of it.
func (h *Host) Answer(vip netip.Addr) error {
	for key, value := range map[string]string{"arp_ignore": "1", "arp_announce": "2"} {
		if err := h.Sysctl("net/ipv4/conf/all/"+key, value); err != nil {
			return err
		}
	}
	return h.AddAddr("lo", netip.PrefixFrom(vip, vip.BitLen()))
}

// Replug deletes the host's interface and makes it anew, with another hardware address and index: what a NIC does
// that is hot-plugged.
func (t *Testbed) Replug(h *Host) error {
	if err := h.Delete(h.Iface); err != nil {
		return err
	}
	return t.Plug(h)
}
