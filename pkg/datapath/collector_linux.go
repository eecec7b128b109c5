// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

var (
	descFlows = prometheus.NewDesc("shunt_steered_flows",
		"Connections that the kernel steers now.", nil, nil)
	descOpened = prometheus.NewDesc("shunt_steered_connections_total",
		"Connections that the kernel has steered.", nil, nil)
	descBackendFlows = prometheus.NewDesc("shunt_backend_steered_flows",
		"Connections that the kernel steers now, by backend.", []string{"backend"}, nil)
	descPackets = prometheus.NewDesc("shunt_backend_packets_total",
		"Packets of steered connections; in is towards the backend.", []string{"backend", "direction"}, nil)
	descBytes = prometheus.NewDesc("shunt_backend_bytes_total",
		"Bytes of steered connections, link headers not counted; in is towards the backend.", []string{"backend", "direction"}, nil)
	descDrops = prometheus.NewDesc("shunt_drops_total",
		"Packets that the kernel did not steer: pass_* went to the front end's host, drop_* were dropped.", []string{"reason"}, nil)
	descEvents = prometheus.NewDesc("shunt_datapath_events_total",
		"Events that the kernel reported since the daemon started.", []string{"kind"}, nil)
	descAttach = prometheus.NewDesc("shunt_attach_info",
		"1 for each interface, with the mode that the program runs in.", []string{"interface", "mode"}, nil)
	descEntries = prometheus.NewDesc("shunt_map_entries",
		"Entries of a table that can fill up, as of its last sweep.", []string{"map"}, nil)
	descMax = prometheus.NewDesc("shunt_map_max_entries",
		"Entries that a table can hold.", []string{"map"}, nil)
	descProblem = prometheus.NewDesc("shunt_backend_steerable",
		"1 when the kernel can steer to the backend: it has a steer address and its next hop is known.", []string{"backend"}, nil)
)

// Collector returns the kernel's numbers as Prometheus metrics, read at each scrape.
func (d *Datapath) Collector() prometheus.Collector { return collector{d} }

type collector struct{ d *Datapath }

// Describe implements prometheus.Collector.
func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{descFlows, descOpened, descBackendFlows, descPackets, descBytes, descDrops, descEvents,
		descAttach, descEntries, descMax, descProblem} {
		ch <- desc
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	d := c.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return
	}
	gauge := func(desc *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, v, labels...)
	}
	counter := func(desc *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(v), labels...)
	}
	flows := int64(0)
	for id := range d.table.Slots {
		flows += max(d.table.Slots[id].KernelFlows.Load(), 0)
	}
	gauge(descFlows, float64(flows))
	opened, _ := d.totals()
	counter(descOpened, opened)
	seen := map[string]bool{}
	for id, t := range d.targets {
		name := t.rec.Name
		// A backend that left and came back while its former flows run has two slots.
		if t.left && d.hasName(name, id) {
			continue
		}
		if name == "" || seen[name] {
			continue
		}
		seen[name] = true
		gauge(descBackendFlows, float64(max(d.table.Slots[id].KernelFlows.Load(), 0)), name)
		steerable := 0.0
		if t.problem == "" && !t.left {
			steerable = 1
		}
		gauge(descProblem, steerable, name)
		if s, err := d.stats(id); err == nil {
			counter(descPackets, s.PacketsIn, name, "in")
			counter(descPackets, s.PacketsOut, name, "out")
			counter(descBytes, s.BytesIn, name, "in")
			counter(descBytes, s.BytesOut, name, "out")
		}
	}
	for reason, n := range d.drops() {
		counter(descDrops, n, reason)
	}
	for k := EventOpen; k <= EventFailover; k++ {
		counter(descEvents, d.events[k].Load(), k.String())
	}
	for name, a := range d.links {
		gauge(descAttach, 1, name, string(a.mode))
	}
	var st steerState
	if d.m.ShuntState.Lookup(uint32(0), &st) == nil {
		gauge(descEntries, float64(st.Entries), steerMapShuntFlows)
	}
	gauge(descEntries, float64(d.npins.Load()), steerMapShuntSessions)
	gauge(descMax, float64(d.m.ShuntFlows.MaxEntries()), steerMapShuntFlows)
	gauge(descMax, float64(d.m.ShuntFlows6.MaxEntries()), steerMapShuntFlows6)
	gauge(descMax, float64(d.m.ShuntSessions.MaxEntries()), steerMapShuntSessions)
}

func (d *Datapath) hasName(name string, but fleet.ID) bool {
	for id, t := range d.targets {
		if id != but && !t.left && t.rec.Name == name {
			return true
		}
	}
	return false
}

// drops returns the counts of packets that were not steered, by the reason's name in lower case.
func (d *Datapath) drops() map[string]uint64 {
	out := make(map[string]uint64, len(d.reasons))
	for i, name := range d.reasons {
		if name == "" {
			name = "reason_" + strconv.Itoa(i)
		}
		if strings.HasSuffix(name, "reason_none") {
			continue // forwarded
		}
		var each []steerDrop
		if d.m.ShuntDrops.Lookup(uint32(i), &each) != nil {
			continue
		}
		for j := range each {
			out[name] += each[j].Count
		}
	}
	return out
}
