// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/pkg/netdev"
)

// enum shunt_mode
const (
	modeNAT = 1
	modeDSR = 2
)

// checkSettings refuses what could take away packets of the stack or could never work.
func (d *Datapath) checkSettings(s Settings) error {
	if len(s.VIPs) == 0 || len(s.VIPs) > int(steerShuntSizesSHUNT_MAX_VIPS) {
		return fmt.Errorf("check vips: %d given, not 1 to %d", len(s.VIPs), int(steerShuntSizesSHUNT_MAX_VIPS))
	}
	if s.nats() && (s.NATPorts.First == 0 || s.NATPorts.First > s.NATPorts.Last) {
		return fmt.Errorf("check nat ports: %s is no range of ports", s.NATPorts)
	}
	seen := map[steerVipKey]bool{}
	for _, v := range s.VIPs {
		addr, snat := v.Addr.Addr().Unmap(), v.snat()
		if !addr.IsValid() || addr.IsUnspecified() || v.Addr.Port() == 0 {
			return fmt.Errorf("check vip %s: needs an address and a port", v.Addr)
		}
		if snat.Is4() != addr.Is4() {
			return fmt.Errorf("check vip %s: snat address %s is of another family", v.Addr, snat)
		}
		if seen[vipKey(v.Addr)] {
			return fmt.Errorf("check vip %s: it is there twice", v.Addr)
		}
		seen[vipKey(v.Addr)] = true
		if v.DSR {
			continue
		}
		if snat == addr && s.NATPorts.First <= v.Addr.Port() && v.Addr.Port() <= s.NATPorts.Last {
			return fmt.Errorf("check nat ports: %s hold the port of vip %s, which is their source address as well", s.NATPorts, v.Addr)
		}
		local, err := d.net.IsLocal(snat)
		if err != nil {
			return fmt.Errorf("check snat address %s: %w", snat, err)
		}
		if !local {
			continue
		}
		if err := d.checkPorts(s.NATPorts, snat); err != nil {
			return err
		}
	}
	return nil
}

// checkPorts refuses NAT ports that the stack may give to a socket of its own: the program would take the replies.
func (d *Datapath) checkPorts(nat netdev.PortRange, snat netip.Addr) error {
	local, err := d.net.IPLocalPortRange()
	if err != nil {
		return fmt.Errorf("check nat ports: %w", err)
	}
	if !nat.Overlaps(local) {
		return nil
	}
	reserved, err := d.net.IPLocalReservedPorts()
	if err != nil {
		return fmt.Errorf("check nat ports: %w", err)
	}
	shared := netdev.PortRange{First: max(nat.First, local.First), Last: min(nat.Last, local.Last)}
	for _, r := range reserved {
		if r.Contains(shared) {
			return nil
		}
	}
	return fmt.Errorf("check nat ports: %s overlap with net.ipv4.ip_local_port_range %s, and %s is an address of this host: the kernel would steer the replies to its own connections; choose other nat_ports, change the range, or list %s in net.ipv4.ip_local_reserved_ports",
		nat, local, snat, shared)
}

// nats says whether a VIP needs NAT ports.
func (s Settings) nats() bool { return slices.ContainsFunc(s.VIPs, func(v VIP) bool { return !v.DSR }) }

// dsr returns the ports of VIPs whose packets go to backends as they are.
func (s Settings) dsr() map[uint16]bool {
	ports := map[uint16]bool{}
	for _, v := range s.VIPs {
		if v.DSR {
			ports[v.Addr.Port()] = true
		}
	}
	return ports
}

func (v VIP) snat() netip.Addr {
	if v.SNAT.IsValid() {
		return v.SNAT.Unmap()
	}
	return v.Addr.Addr().Unmap()
}

func vipKey(a netip.AddrPort) steerVipKey {
	return steerVipKey{Addr: toBytes(a.Addr()), Port: a.Port()}
}

// syncVIPs makes shunt_vips hold the configured VIPs. Those that stay keep their ids, which pins refer to.
func (d *Datapath) syncVIPs() error {
	want := map[steerVipKey]steerVip{}
	for _, v := range d.set.VIPs {
		if v.DSR {
			want[vipKey(v.Addr)] = steerVip{Mode: modeDSR, Snat: toBytes(v.Addr.Addr())}
			continue
		}
		want[vipKey(v.Addr)] = steerVip{
			Mode: modeNAT, Snat: toBytes(v.snat()),
			PortBase: d.set.NATPorts.First, PortCount: uint16(min(int(d.set.NATPorts.Last)-int(d.set.NATPorts.First)+1, 65535)),
		}
	}
	// Before anything can be steered by them. A port is never taken back while the program runs: a flow may still need it.
	if d.set.nats() {
		d.ports.add(d.set.NATPorts)
	}
	for _, v := range d.set.VIPs {
		d.ports.add(netdev.PortRange{First: v.Addr.Port(), Last: v.Addr.Port()})
	}
	used := map[uint32]bool{}
	for k, v := range d.vips {
		if _, stays := want[k]; stays {
			used[v.Id] = true
			continue
		}
		if err := d.m.ShuntVips.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("remove vip %s: %w", netip.AddrPortFrom(fromBytes(k.Addr), k.Port), err)
		}
		// Before the id can pass to another VIP.
		if err := d.pins.forgetVIP(v.Id); err != nil {
			return err
		}
		delete(d.vips, k)
	}
	next := uint32(1)
	for k, v := range want {
		old, stays := d.vips[k]
		if v.Id = old.Id; !stays {
			for used[next] {
				next++
			}
			v.Id, used[next] = next, true
		}
		if stays && old == v {
			continue
		}
		if err := d.m.ShuntVips.Put(k, &v); err != nil {
			return fmt.Errorf("write vip %s: %w", netip.AddrPortFrom(fromBytes(k.Addr), k.Port), err)
		}
		d.vips[k] = v
	}
	d.pins.setVIPs(d.vips)
	return nil
}
