// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/netdev"
)

// A neighbour that the kernel forgot or that fails to answer keeps its hardware address here for so long: flows must
// not stop for a flushed table, nor new ones go on for ever to a host that is gone.
const neighbourGrace = 3 * time.Second

// pokeEvery is how often a neighbour is asked for that was not heard of lately.
const (
	pokeUnknown = 500 * time.Millisecond
	pokeStale   = 5 * time.Second
)

// target is a backend with what the kernel was told of it.
type target struct {
	rec     BackendRecord
	written *steerBackend // nil: not in the map
	left    bool          // no longer configured: kept while it has flows
	iface   string
	problem string
	seen    time.Time // when the hardware address was last known
	poked   time.Time
	drained time.Time // since when it is to be emptied; zero = it is not
	watch   watch
}

// SetBackends makes the kernel know these backends, and no others. One that is missing takes no new connections; its
// record goes when its last flow has ended. Any change reaches the open flows with the next packet.
func (d *Datapath) SetBackends(list []BackendRecord) error {
	byID := map[fleet.ID]BackendRecord{}
	for _, r := range list {
		switch {
		case r.ID == 0 || r.ID >= fleet.MaxBackends:
			return fmt.Errorf("set backend %q: id %d is outside of 1 to %d", r.Name, r.ID, fleet.MaxBackends-1)
		case len(r.Name) >= int(steerShuntSizesSHUNT_NAME_LEN):
			return fmt.Errorf("set backend %q: name is longer than %d bytes", r.Name, int(steerShuntSizesSHUNT_NAME_LEN)-1)
		case byID[r.ID].ID != 0:
			return fmt.Errorf("set backend %q: id %d is also that of %q", r.Name, r.ID, byID[r.ID].Name)
		}
		byID[r.ID] = r
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for id, t := range d.targets {
		if _, stays := byID[id]; !stays {
			t.left, t.rec.State = true, fleet.HealthDown
		}
	}
	for id, r := range byID {
		t := d.targets[id]
		if t == nil || t.rec.Name != r.Name {
			if t != nil {
				d.retireStats(id)
			}
			fresh := &target{}
			if t != nil {
				fresh.written = t.written
			}
			t, d.targets[id] = fresh, fresh
		}
		if t.rec.Steer != r.Steer {
			t.seen, t.poked = time.Time{}, time.Time{}
		}
		t.rec, t.left = r, false
	}
	return d.refresh()
}

// refresh computes every backend's record from the network's present state and writes those that differ. It asks for
// neighbours that are not known or were not heard of lately.
func (d *Datapath) refresh() error {
	neighbours := map[nextHop]netdev.Neighbour{}
	list, err := d.net.Neighbours(0)
	if err != nil {
		return err
	}
	for _, n := range list {
		neighbours[nextHop{n.Index, n.Addr}] = n
	}
	nics := map[int]netdev.Link{}
	for _, name := range d.opt.Interfaces {
		// Before Attach a former daemon's program may be there: its backends stay reachable.
		if a := d.links[name]; a != nil && a.link == nil {
			continue
		}
		if l, err := d.net.Link(name); err == nil {
			nics[l.Index] = l
		}
	}
	var errs []error
	hops := map[nextHop]bool{}
	defer func() { d.hops.Store(&hops) }()
	for id, t := range d.targets {
		if t.left && d.table.Slots[id].KernelFlows.Load() <= 0 {
			if err := d.m.ShuntBackends.Delete(uint32(id)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				errs = append(errs, fmt.Errorf("remove backend %q: %w", t.rec.Name, err))
				continue
			}
			d.epochs[id].value.Add(1)
			delete(d.targets, id)
			continue
		}
		b, hop := d.record(t, neighbours, nics)
		hops[hop] = true
		if t.written != nil && *t.written == b {
			continue
		}
		if b.State == uint32(fleet.HealthUp) && d.epochs[id].kill.Load() != 0 {
			d.revive(id, t) // before the first new flow
		}
		if err := d.m.ShuntBackends.Put(uint32(id), &b); err != nil {
			errs = append(errs, fmt.Errorf("write backend %q: %w", t.rec.Name, err))
			continue
		}
		d.epochs[id].value.Add(1) // after the record: a flow reads the epoch first
		t.written = &b
	}
	return errors.Join(errs...)
}

type nextHop struct {
	index int
	addr  netip.Addr
}

// record is what the map should hold of t, and its next hop if that is known.
func (d *Datapath) record(t *target, neighbours map[nextHop]netdev.Neighbour, nics map[int]netdev.Link) (b steerBackend, hop nextHop) {
	b = steerBackend{State: uint32(t.rec.State), Generation: t.rec.Generation}
	copy(asBytes(b.Name[:len(b.Name)-1]), t.rec.Name)
	t.iface, t.problem = "", ""
	if !t.rec.Steer.IsValid() || t.rec.Steer.Port() == 0 {
		t.problem = "has no address to steer to"
		return b, hop
	}
	addr := t.rec.Steer.Addr().Unmap()
	b.Addr, b.Port = toBytes(addr), t.rec.Steer.Port()
	if t.rec.Local {
		b.Flags |= uint32(steerShuntBackendFlagsSHUNT_BACKEND_LOCAL)
		t.problem = "is on this host"
		return b, hop
	}
	r, err := d.net.Route(addr)
	if err != nil {
		t.problem = err.Error()
		return b, hop
	}
	if r.Local {
		b.Flags |= uint32(steerShuntBackendFlagsSHUNT_BACKEND_LOCAL)
		t.problem = "is on this host"
		return b, hop
	}
	nic, ok := nics[r.Index]
	if !ok {
		t.problem = fmt.Sprintf("is reached through interface index %d, which is not attached", r.Index)
		if l, err := d.net.LinkByIndex(r.Index); err == nil {
			t.iface = l.Name
			t.problem = fmt.Sprintf("is reached through %s, which is not attached: its answers would miss the program", l.Name)
		}
		return b, hop
	}
	t.iface = nic.Name
	if ports := d.set.dsr(); len(ports) > 0 {
		switch {
		case r.Next != addr:
			t.problem = fmt.Sprintf("is behind the router %s: with dsr it must be on the same network", r.Next)
			return b, hop
		case !ports[b.Port]:
			t.problem = fmt.Sprintf("has port %d: with dsr it must be the VIP's", b.Port)
		}
	}
	b.Ifindex, b.SrcMac = uint32(nic.Index), nic.MAC
	hop = nextHop{r.Index, r.Next}
	n := neighbours[hop]
	now := time.Now()
	switch {
	case n.Usable:
		b.Mac, t.seen = n.MAC, now
	case t.written != nil && t.written.Mac != [6]uint8{} && t.written.Ifindex == b.Ifindex && t.written.Addr == b.Addr:
		if t.seen.IsZero() {
			t.seen = now
		}
		if now.Sub(t.seen) < neighbourGrace {
			b.Mac = t.written.Mac
		}
	}
	if b.Mac == [6]uint8{} {
		t.problem = fmt.Sprintf("next hop %s on %s does not answer", r.Next, nic.Name)
	}
	every := pokeStale
	if !n.Usable {
		every = pokeUnknown
	}
	if !n.Confirmed && !t.left && now.Sub(t.poked) >= every {
		t.poked = now
		if err := d.net.Poke(addr); err != nil && t.problem != "" {
			t.problem += ": " + err.Error()
		}
	}
	return b, hop
}

// retireStats keeps the totals and zeroes the counts of a slot that passes to another backend.
func (d *Datapath) retireStats(id fleet.ID) {
	s, err := d.stats(id)
	if err != nil {
		return // numbers only
	}
	zero := make([]steerStat, ebpf.MustPossibleCPU())
	if d.m.ShuntStats.Put(uint32(id), zero) == nil {
		d.retired.opened += s.Opened
		d.retired.closed += s.Closed
	}
}

// stats sums a backend's counts over the processors.
func (d *Datapath) stats(id fleet.ID) (sum steerStat, err error) {
	var each []steerStat
	if err := d.m.ShuntStats.Lookup(uint32(id), &each); err != nil {
		return sum, fmt.Errorf("read counts of backend %d: %w", id, err)
	}
	for i := range each {
		sum.PacketsIn += each[i].PacketsIn
		sum.BytesIn += each[i].BytesIn
		sum.PacketsOut += each[i].PacketsOut
		sum.BytesOut += each[i].BytesOut
		sum.Opened += each[i].Opened
		sum.Closed += each[i].Closed
	}
	return sum, nil
}
