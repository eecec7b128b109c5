// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

// Status reads the present state.
func (d *Datapath) Status() Status {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := Status{
		Instance: d.opt.Instance, Pins: mapDir(d.dir, abi), ABI: abi,
		Sessions: int(d.npins.Load()), Events: map[string]uint64{}, Notices: slices.Clone(d.notices),
	}
	for k := EventOpen; k <= EventFailover; k++ {
		s.Events[k.String()] = d.events[k].Load()
	}
	for _, name := range d.opt.Interfaces {
		i := InterfaceStatus{Name: name, Mode: "none"}
		if a := d.links[name]; a != nil {
			i.Index, i.Mode, i.Adopted, i.Problem = a.index, string(a.mode), a.adopted, a.problem
		}
		s.Interfaces = append(s.Interfaces, i)
	}
	for _, v := range d.set.VIPs {
		if v.DSR {
			s.VIPs = append(s.VIPs, VIPStatus{Addr: v.Addr, Mode: "dsr"})
			continue
		}
		s.VIPs = append(s.VIPs, VIPStatus{Addr: v.Addr, Mode: "nat", SNAT: v.snat(), NATPorts: d.set.NATPorts.String()})
	}
	for _, id := range slices.Sorted(maps.Keys(d.targets)) {
		t := d.targets[id]
		slot := &d.table.Slots[id]
		b := BackendStatus{
			ID: id, Name: t.rec.Name, Steer: t.rec.Steer, State: t.rec.State.String(), Interface: t.iface,
			Problem: t.problem, Flows: slot.KernelFlows.Load(), Tokens: slot.KernelTokens.Load(),
		}
		if t.left {
			b.Problem = "is no longer configured; its flows end"
		}
		if t.written != nil && t.written.Mac != [6]uint8{} {
			b.NextHop = mac(t.written.Mac)
		}
		if st, err := d.stats(id); err == nil {
			b.Opened = st.Opened
		}
		s.Backends = append(s.Backends, b)
	}
	for id := range d.table.Slots {
		s.Flows += max(d.table.Slots[id].KernelFlows.Load(), 0)
	}
	s.Opened, s.Closed = d.totals()
	return s
}

// totals are the connections steered since the maps were made. The caller holds d.mu.
func (d *Datapath) totals() (opened, closed uint64) {
	opened, closed = d.retired.opened, d.retired.closed
	for id := range d.table.Slots {
		// A slot that no backend has may still hold the counts of one that left.
		if st, err := d.stats(fleet.ID(id)); err == nil {
			opened += st.Opened
			closed += st.Closed
		}
	}
	return opened, closed
}

func mac(m [6]uint8) string {
	return fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", m[0], m[1], m[2], m[3], m[4], m[5])
}

func (d *Datapath) names() map[fleet.ID]string {
	d.mu.Lock()
	defer d.mu.Unlock()
	names := make(map[fleet.ID]string, len(d.targets))
	for id, t := range d.targets {
		names[id] = t.rec.Name
	}
	return names
}

func (d *Datapath) steers() map[fleet.ID]netip.AddrPort {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := make(map[fleet.ID]netip.AddrPort, len(d.targets))
	for id, t := range d.targets {
		out[id] = t.rec.Steer
	}
	return out
}

// flowEntry is one direction of a flow, of either family.
type flowEntry struct {
	key   steerFlowKey
	value steerFlow
}

// wide is the key of both families' entries.
func wide(k steerFlowKey4) steerFlowKey {
	return steerFlowKey{Src: toBytes(netip.AddrFrom4(k.Src)), Dst: toBytes(netip.AddrFrom4(k.Dst)), Sport: k.Sport, Dport: k.Dport}
}

// scanFlows calls fn for the entries of both families.
func (m *steerMaps) scanFlows(fn func(steerFlowKey, *steerFlow)) error {
	if err := scan(m.ShuntFlows, func(k steerFlowKey4, f *steerFlow) { fn(wide(k), f) }); err != nil {
		return err
	}
	return scan(m.ShuntFlows6, fn)
}

// flow reads one entry.
func (m *steerMaps) flow(k steerFlowKey) (f steerFlow, err error) {
	src, dst := fromBytes(k.Src), fromBytes(k.Dst)
	if src.Is4() && dst.Is4() {
		err = m.ShuntFlows.Lookup(steerFlowKey4{Src: src.As4(), Dst: dst.As4(), Sport: k.Sport, Dport: k.Dport}, &f)
	} else {
		err = m.ShuntFlows6.Lookup(k, &f)
	}
	return f, err
}

// answerKey is the key of the entry for packets that answer f's.
func answerKey(f *steerFlow) steerFlowKey {
	return steerFlowKey{Src: f.Dst, Dst: f.Src, Sport: f.Dport, Dport: f.Sport}
}

func (f *steerFlow) bytes() uint64 { return uint64(f.BytesHigh)<<32 | uint64(f.Bytes) }

// idle is the time since a flow's last packet, to the second.
func (f *steerFlow) idle(now uint64) time.Duration {
	return time.Duration(max(int32(uint32(now>>tickShift)-f.Last), 0)) << tickShift
}

const tickShift = int(steerShuntSizesSHUNT_TICK_SHIFT)

func (f *steerFlow) has(bits steerShuntFlowFlags) bool { return f.Flags&uint32(bits) != 0 }

// Flows returns steered connections, at most most of them (0 = all), in no order.
func (d *Datapath) Flows(most int) ([]Flow, error) {
	names, steers, now := d.names(), d.steers(), d.clock.now()
	var found []flowEntry
	if err := d.m.scanFlows(func(k steerFlowKey, f *steerFlow) {
		if f.has(steerShuntFlowFlagsSHUNT_FLOW_FORWARD) && (most <= 0 || len(found) < most) {
			found = append(found, flowEntry{k, *f})
		}
	}); err != nil {
		return nil, err
	}
	flows := make([]Flow, 0, len(found))
	for i := range found {
		k, f := &found[i].key, &found[i].value
		out := Flow{
			Client: netip.AddrPortFrom(fromBytes(k.Src), k.Sport), VIP: netip.AddrPortFrom(fromBytes(k.Dst), k.Dport),
			NAT: netip.AddrPortFrom(fromBytes(f.Src), f.Sport), Steer: netip.AddrPortFrom(fromBytes(f.Dst), f.Dport),
			Backend: fleet.ID(f.Backend), Name: names[fleet.ID(f.Backend)], State: flowState(f.Flags),
			Age: since(now, f.CreatedNs), Idle: f.idle(now), Tokens: int64(f.Charge), PacketsIn: uint64(f.Packets), BytesIn: f.bytes(),
		}
		if f.has(steerShuntFlowFlagsSHUNT_FLOW_DSR) {
			out.BytesOut = uint64(f.Answered)
			if hop, ok := steers[fleet.ID(f.Backend)]; ok {
				out.Steer = hop
			}
		} else if back, err := d.m.flow(answerKey(f)); err == nil {
			out.PacketsOut, out.BytesOut = uint64(back.Packets), back.bytes()
			out.Idle = min(out.Idle, back.idle(now))
		}
		flows = append(flows, out)
	}
	return flows, nil
}

func flowState(flags uint32) string {
	f := steerShuntFlowFlags(flags)
	switch {
	case f&(steerShuntFlowFlagsSHUNT_FLOW_CLOSED|steerShuntFlowFlagsSHUNT_FLOW_DEAD) != 0:
		return "closed"
	case f&(steerShuntFlowFlagsSHUNT_FLOW_CFIN|steerShuntFlowFlagsSHUNT_FLOW_BFIN|steerShuntFlowFlagsSHUNT_FLOW_RST) != 0:
		return "closing"
	case f&steerShuntFlowFlagsSHUNT_FLOW_ESTAB != 0:
		return "open"
	case f&steerShuntFlowFlagsSHUNT_FLOW_SYNACK != 0:
		return "handshake"
	}
	return "syn"
}

func since(now, then uint64) time.Duration { return time.Duration(now - min(now, then)) }

// Sessions returns pins with their use, at most most of them (0 = all), in no order.
func (d *Datapath) Sessions(most int) ([]Session, error) {
	names, now, idle := d.names(), d.clock.now(), atomic.LoadUint64(&d.config.SessionIdleNs)
	type entry struct {
		key   steerSessionKey
		value steerSession
	}
	var found []entry
	if err := scan(d.m.ShuntSessions, func(k steerSessionKey, s *steerSession) {
		if most <= 0 || len(found) < most {
			found = append(found, entry{k, *s})
		}
	}); err != nil {
		return nil, err
	}
	out := make([]Session, 0, len(found))
	for i := range found {
		k, s := found[i].key, &found[i].value
		u, _ := d.pins.use(k)
		x := Session{
			Client: fromBytes(k.Client), VIP: d.pins.vipOf(k.VipId), Backend: fleet.ID(s.Backend), Name: names[fleet.ID(s.Backend)],
			Live: leaseHolds(s, &u, now, idle), Static: isStatic(s),
			Age: since(now, s.SinceNs), Idle: since(now, max(s.SinceNs, u.LastNs)),
			Tokens: s.Tokens, Sessions: max(s.Sessions, 1), Connections: s.Connections, Open: max(u.Open, 0), Sampled: u.Sampled,
		}
		if s.ExpiresNs != 0 {
			x.Expires = time.Duration(s.ExpiresNs - now)
		}
		if u.Serial == s.Serial {
			x.Used = u.Connections
		}
		out = append(out, x)
	}
	return out, nil
}
