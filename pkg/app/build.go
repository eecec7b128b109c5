// SPDX-License-Identifier: Apache-2.0

package app

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/shunt-lb/shunt/pkg/config"
	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/health"
	"github.com/shunt-lb/shunt/pkg/netdev"
	"github.com/shunt-lb/shunt/pkg/policy"
)

// Host returns what a configuration's check has to know of this machine.
func Host() config.Host {
	h := config.Host{Policies: policy.Names()}
	if r, err := netdev.IPLocalPortRange(); err == nil {
		h.LocalPortRange = [2]int{int(r.First), int(r.Last)}
	}
	if list, err := netdev.IPLocalReservedPorts(); err == nil {
		for _, r := range list {
			h.ReservedPorts = append(h.ReservedPorts, [2]int{int(r.First), int(r.Last)})
		}
	}
	if a, err := netdev.LocalAddrs(); err == nil {
		h.Addrs = a
	}
	if links, err := net.Interfaces(); err == nil {
		for _, l := range links {
			h.Interfaces = append(h.Interfaces, l.Name)
		}
	}
	return h
}

// poolState is what a pool keeps over reloads: its policy's memory, while policy and bound stay the same.
type poolState struct {
	policy  string
	bound   float64
	chooser policy.Policy
}

// pools translates the configuration's pools. Policies that did not change keep their instances.
func pools(cfg *config.Config, old map[string]poolState) ([]fleet.PoolSpec, map[string]poolState, error) {
	host, _ := netdev.LocalSet() // without them only loopback counts as this host
	specs := make([]fleet.PoolSpec, 0, len(cfg.Pools))
	states := map[string]poolState{}
	for _, p := range cfg.Pools {
		st := old[p.Name]
		if st.chooser == nil || st.policy != p.Policy || st.bound != cfg.Steering.Bound {
			chooser, err := policy.New(p.Policy, policy.Params{Bound: cfg.Steering.Bound})
			if err != nil {
				return nil, nil, fmt.Errorf("pool %s: %w", p.Name, err)
			}
			st = poolState{policy: p.Policy, bound: cfg.Steering.Bound, chooser: chooser}
		}
		states[p.Name] = st
		known, _ := policy.Lookup(p.Policy)
		spec := fleet.PoolSpec{Name: p.Name, Models: p.Models, Chooser: st.chooser, Panic: p.Outlier.Panic, SlowStart: p.SlowStart,
			Weighted: known.Weighted}
		for _, b := range p.Backends {
			steer, err := steerAddr(cfg.Steering, b)
			if err != nil {
				return nil, nil, fmt.Errorf("backend %s: %w", b.Name, err)
			}
			spec.Backends = append(spec.Backends, fleet.BackendSpec{Name: b.Name, URL: b.URL, Weight: b.Weight, Steer: steer,
				MaxInflightTokens: p.Limits.MaxInflightTokens, Local: runsOn(host, b)})
		}
		specs = append(specs, spec)
	}
	return specs, states, nil
}

// steerAddr is where the kernel sends the backend's sessions: the peer that the file names, or the engine itself.
func steerAddr(s config.Steering, b config.Backend) (netip.AddrPort, error) {
	switch {
	case s.Mode == config.ModeOff:
		return netip.AddrPort{}, nil
	case s.Target == config.TargetPeer:
		return b.Steer, nil
	}
	a, ok := b.Addr()
	if !ok {
		return netip.AddrPort{}, fmt.Errorf("%s has no address to steer to: the URL must hold an IP address", b.URL)
	}
	return a, nil
}

// runsOn reports whether the engine runs on the host: by its own address, or, where that is a container's, by the address
// of the shunt beside it.
func runsOn(h netdev.AddrSet, b config.Backend) bool {
	name := b.URL.Hostname()
	if strings.EqualFold(name, "localhost") || h.Has(b.Steer.Addr()) {
		return true
	}
	a, err := netip.ParseAddr(name)
	return err == nil && h.Has(a)
}

// healthSettings returns the checks of each backend's pool.
func healthSettings(cfg *config.Config) func(*fleet.Backend) health.Settings {
	byPool := map[string]health.Settings{}
	for _, p := range cfg.Pools {
		s := health.Settings{Path: p.Health.Path, Interval: p.Health.Interval, Timeout: p.Health.Timeout, Fall: p.Health.Fall, Rise: p.Health.Rise,
			Outlier: health.Outlier{Failures: cmp.Or(p.Outlier.Failures, -1), Share: cmp.Or(p.Outlier.Share, -1), Volume: p.Outlier.Volume,
				Window: p.Outlier.Window, Hold: p.Outlier.Hold, MaxHold: p.Outlier.MaxHold}}
		if s.Path == "auto" {
			s.Path = ""
		}
		byPool[p.Name] = s
	}
	return func(b *fleet.Backend) health.Settings { return byPool[b.Pool()] }
}
