// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// checkSteering refuses what this release does not carry and what could serve wrongly.
func (c *Config) checkSteering(p *problems, host Host) {
	s := &c.Steering
	if s.Pin != "client" {
		p.add("steering.pin", "%s is not in this release: use client", s.Pin)
	}
	if !s.SessionPorts.IsZero() {
		if s.NATPorts.Overlaps(s.SessionPorts) {
			p.add("steering.session_ports", "%s overlaps nat_ports %s: the two must be disjoint", s.SessionPorts, s.NATPorts)
		}
		p.warn("steering.session_ports", "has no effect: pin endpoint, which uses it, is not in this release")
	}
	if err := goodName(s.Instance); err != nil || strings.Contains(s.Instance, ":") {
		p.add("steering.instance", "%q: use letters, digits and . _ -, a letter or digit first, at most %d bytes", s.Instance, maxName)
	}
	if s.BPFFS != "" && !strings.HasPrefix(s.BPFFS, "/") {
		p.add("steering.bpffs", "%q is not an absolute path", s.BPFFS)
	}
	if p.ok("steering.lease.idle", "steering.lease.max") && s.Lease.Idle > s.Lease.Max {
		p.add("steering.lease.idle", "%s is longer than lease.max %s: it could never pass", formatDuration(s.Lease.Idle), formatDuration(s.Lease.Max))
	}
	for i, in := range s.Interfaces {
		at := fmt.Sprintf("steering.interfaces[%d]", i)
		switch {
		case in == "" || len(in) > 15 || strings.ContainsAny(in, "/ \t\n:") || in == "." || in == "..":
			p.add(at, "%q is not the name of a network interface", in)
		case slices.Contains(s.Interfaces[:i], in):
			p.add(at, "%q is listed twice", in)
		case s.Mode != ModeOff && host.Interfaces != nil && !slices.Contains(host.Interfaces, in):
			p.warn(at, "this host has no interface %q", in)
		}
	}
	c.checkAddresses(p)
	if s.Mode == ModeOff || !p.ok("steering.mode") {
		if s.Require && p.ok("steering.require", "steering.mode") {
			p.add("steering.require", "true with mode off: there is no kernel path to require")
		}
		return
	}
	if len(s.Interfaces) == 0 {
		p.add("steering.interfaces", "mode %s needs the interfaces on which clients and backends are reached", s.Mode)
	}
	c.checkVIPs(p, host)
	if s.Mode == ModeDSR {
		c.checkDSR(p)
	} else {
		c.checkPorts(p, host)
	}
	if s.Target == TargetEngine {
		c.checkEngine(p)
	} else {
		c.checkPeers(p, host)
	}
}

// checkAddresses checks what holds in every mode.
func (c *Config) checkAddresses(p *problems) {
	s := &c.Steering
	if len(s.VIP) > maxVIPs {
		p.add("steering.vip", "%d addresses: at most %d", len(s.VIP), maxVIPs)
	}
	for i, a := range s.VIP {
		at := fmt.Sprintf("steering.vip[%d]", i)
		if slices.Contains(s.VIP[:i], a) {
			p.add(at, "%s is listed twice", a)
		}
	}
	seen := map[bool]netip.Addr{}
	for i, a := range s.SNAT {
		at := fmt.Sprintf("steering.snat[%d]", i)
		if !a.IsGlobalUnicast() {
			p.add(at, "%s cannot be a source address", a)
		} else if other, dup := seen[a.Is4()]; dup {
			p.add(at, "%s: %s is the source address of this family already", a, other)
		} else {
			seen[a.Is4()] = a
		}
	}
}

func (c *Config) checkVIPs(p *problems, host Host) {
	s, listen := &c.Steering, c.Listen
	if !p.ok("listen", "steering.vip") {
		return
	}
	if listen.Port() == 0 {
		p.add("listen", "port 0 cannot be steered: write the port that clients use")
	}
	if len(s.VIP) == 0 {
		p.add("steering.vip", "mode %s with listen %s needs the address that clients use", s.Mode, listen)
	}
	for i, a := range s.VIP {
		at := fmt.Sprintf("steering.vip[%d]", i)
		switch {
		case !p.ok(at):
		case a.IsLoopback():
			p.add(at, "%s is loopback: connections from this host itself are not steered in this release", a)
		case !a.IsGlobalUnicast():
			p.add(at, "%s is not an address that clients can connect to", a)
		case !listen.Addr().IsUnspecified() && listen.Addr() != a:
			p.add(at, "%s is not the address of listen (%s): nothing would serve what is not steered", a, listen)
		case listen.Addr() == netip.IPv4Unspecified() && a.Is6():
			p.add(at, "%s is IPv6, but listen %s takes IPv4 only: listen on :%d", a, listen, listen.Port())
		case host.Addrs != nil && !slices.Contains(host.Addrs, a):
			p.warn(at, "%s is not an address of this host now", a)
		}
	}
	for i, a := range s.SNAT {
		at := fmt.Sprintf("steering.snat[%d]", i)
		if host.Addrs != nil && !slices.Contains(host.Addrs, a) {
			p.warn(at, "%s is not an address of this host now: answers to it would not come here", a)
		}
	}
}

// checkDSR: packets go to backends as they came, so these must take them on the very address and port.
func (c *Config) checkDSR(p *problems) {
	s := &c.Steering
	if len(s.SNAT) > 0 {
		p.warn("steering.snat", "has no effect with mode dsr: backends see the clients' addresses")
	}
	if s.Target == TargetPeer {
		p.warn("steering.target", "peer with mode dsr: the peer sees the client itself and may send its request on to another host")
	}
	if !p.ok("listen") {
		return
	}
	for i, pool := range c.Pools {
		for j, b := range pool.Backends {
			at, addr := backendPath(i, j)+".steer", b.Steer
			if s.Target == TargetEngine {
				at = backendPath(i, j) + ".url"
				if b.URL == nil {
					continue
				}
				addr, _ = b.Addr()
			}
			if p.ok(at) && addr.IsValid() && addr.Port() != c.Listen.Port() {
				p.add(at, "port %d with mode dsr: clients' packets arrive there with the port of listen (%d), which nothing translates", addr.Port(), c.Listen.Port())
			}
		}
	}
}

func (c *Config) checkPorts(p *problems, host Host) {
	const at = "steering.nat_ports"
	r := c.Steering.NATPorts
	if !p.ok(at) {
		return
	}
	if lo, hi := max(host.LocalPortRange[0], int(r.First)), min(host.LocalPortRange[1], int(r.Last)); lo <= hi && c.snatsHere(host) {
		// The stack gives reserved ports to nobody by itself.
		if !slices.ContainsFunc(host.ReservedPorts, func(r [2]int) bool { return r[0] <= lo && hi <= r[1] }) {
			p.add(at, "%s overlaps this host's net.ipv4.ip_local_port_range %d-%d: answers to the host's own connections would be captured; choose other ports, or list %d-%d in net.ipv4.ip_local_reserved_ports",
				r, host.LocalPortRange[0], host.LocalPortRange[1], lo, hi)
		}
	}
	if p.ok("listen") && r.Contains(c.Listen.Port()) {
		p.add(at, "%s contains the port of listen (%s)", r, c.Listen)
	}
	if p.ok("admin.listen") && c.Admin.Listen.IsValid() && r.Contains(c.Admin.Listen.Port()) {
		p.add(at, "%s contains the port of admin.listen (%s)", r, c.Admin.Listen)
	}
}

// snatsHere says whether a source address towards the backends is one of this host's own, for which its stack chooses
// ports too. Where the host's addresses are not known it may be.
func (c *Config) snatsHere(host Host) bool {
	return host.Addrs == nil || slices.ContainsFunc(c.Steering.VIP, func(vip netip.Addr) bool {
		a := c.Steering.SNATFor(vip)
		return a.IsLoopback() || slices.Contains(host.Addrs, a)
	})
}

// checkFamily refuses an address that none of the VIPs can be rewritten to: the kernel does not turn IPv4 into IPv6.
func (c *Config) checkFamily(p *problems, path string, a netip.Addr) {
	var without []string
	for _, vip := range c.Steering.VIP {
		if vip.Is4() != a.Is4() {
			without = append(without, vip.String())
		}
	}
	switch {
	case len(without) == 0:
	case len(without) == len(c.Steering.VIP):
		p.add(path, "%s is %s, and vip %s is not: the kernel does not translate between IPv4 and IPv6", a, family(a), strings.Join(without, ", "))
	default:
		p.warn(path, "%s is %s: clients of vip %s are not steered to it", a, family(a), strings.Join(without, ", "))
	}
}

func family(a netip.Addr) string {
	if a.Is4() {
		return "IPv4"
	}
	return "IPv6"
}

// checkEngine: on a connection that is steered to an engine nothing of the front end applies, so nothing that only the
// front end does may be relied on.
func (c *Config) checkEngine(p *problems) {
	const at = "steering.target"
	if len(c.Pools) > 1 {
		p.add(at, "engine with %d pools: a client's pin is for one engine, and its next request may name another pool's model; use one pool or target peer", len(c.Pools))
	}
	def := defaults().Limits
	for key, changed := range map[string]bool{
		"limits.max_body":        c.Limits.MaxBody != def.MaxBody,
		"limits.max_header":      c.Limits.MaxHeader != def.MaxHeader,
		"limits.max_connections": c.Limits.MaxConnections != def.MaxConnections,
	} {
		if changed {
			p.add(key, "only the front end enforces it, and connections with target engine do not pass there: remove it or use target peer")
		} else if c.src.wrote(key) {
			p.warn(key, "does not hold on connections with target engine")
		}
	}
	if c.src.wrote("paths") && !slices.Contains(c.Paths, defaultPaths) {
		p.add("paths", "only the front end enforces it, and with target engine every path of the engine is open: remove it or use target peer")
	}
	if c.Keys != "" {
		p.add("keys", "only the front end checks keys, and connections with target engine do not pass there: use target peer")
	}
	if c.TLS.Certificate != "" {
		p.add("tls.certificate", "with target engine: the client speaks TLS on the steered connection, and the engine does not; use target peer")
	}
	if c.Credentials == CredentialsStrip {
		p.add("credentials", "only the front end strips them, and connections with target engine do not pass there: write pass or auto, or use target peer")
	}
	for i, pool := range c.Pools {
		if len(pool.Models) > 0 {
			p.warn(poolPath(i)+".models", "only the front end looks at the model: on connections with target engine a client may name any")
		}
		if pool.KeyFrom != "" {
			p.add(poolPath(i)+".key_from", "only the front end shows it, and connections with target engine do not pass there: use target peer")
		}
		for j, b := range pool.Backends {
			at := backendPath(i, j)
			if b.URL == nil {
				continue
			}
			addr, isIP := b.Addr()
			switch {
			case b.URL.Scheme == "https":
				p.add(at+".url", "https with target engine: the client speaks plain HTTP on the steered connection; use target peer")
			case b.URL.Path != "":
				p.add(at+".url", "path %s with target engine: nothing adds it on a steered connection; use target peer", b.URL.Path)
			case !isIP:
				p.add(at+".url", "%s is a name: the kernel steers to addresses, write the IP address", b.URL.Hostname())
			case !addr.Addr().IsGlobalUnicast():
				p.add(at+".url", "%s cannot be steered to: write the address that other hosts reach", addr.Addr())
			case slices.Contains(c.Steering.VIP, addr.Addr()):
				p.warn(at+".url", "%s is on this host: connections to it are not steered", addr)
			default:
				c.checkFamily(p, at+".url", addr.Addr())
			}
			if b.Steer.IsValid() {
				p.warn(at+".steer", "has no effect with target engine")
			}
		}
	}
}

func (c *Config) checkPeers(p *problems, host Host) {
	steered := false
	for i, pool := range c.Pools {
		for j, b := range pool.Backends {
			at := backendPath(i, j) + ".steer"
			if !p.ok(at) {
				steered = true
				continue
			}
			if !b.Steer.IsValid() {
				continue
			}
			steered = true
			a := b.Steer.Addr()
			switch {
			case b.Steer.Port() == 0:
				p.add(at, "%s has no port", b.Steer)
			case !a.IsGlobalUnicast():
				p.add(at, "%s cannot be steered to: write the address that other hosts reach", a)
			case c.isOwn(b.Steer, host):
				if !isLocal(b, host) {
					p.add(at, "%s is this shunt's own listener, and the backend is on another host: connections would go in a circle", b.Steer)
				}
			default:
				c.checkFamily(p, at, a)
			}
		}
	}
	if !steered {
		p.warn("steering.target", "peer, but no backend has a steer address: no connection is steered")
	}
}

// StripCredentials reports whether the front end keeps the client's credentials from backends.
func (c *Config) StripCredentials() bool {
	if c.Credentials == CredentialsAuto {
		return c.Steering.Mode == ModeOff || c.Steering.Target != TargetEngine
	}
	return c.Credentials == CredentialsStrip
}

// isOwn says whether the address is one of this shunt's listener.
func (c *Config) isOwn(ap netip.AddrPort, host Host) bool {
	if ap.Port() != c.Listen.Port() {
		return false
	}
	return ap == c.Listen || slices.Contains(c.Steering.VIP, ap.Addr()) ||
		c.Listen.Addr().IsUnspecified() && slices.Contains(host.Addrs, ap.Addr())
}

// isLocal says whether the backend is on this host: the operator's own steer address then points here rightly.
func isLocal(b Backend, host Host) bool {
	ap, ok := b.Addr()
	if !ok {
		return b.URL != nil && b.URL.Hostname() == "localhost"
	}
	return ap.Addr().IsLoopback() || ap.Addr() == b.Steer.Addr() || slices.Contains(host.Addrs, ap.Addr())
}

// SNATFor is the source address towards backends for connections to a VIP: the configured one of its family, else
// the VIP itself.
func (s Steering) SNATFor(vip netip.Addr) netip.Addr {
	for _, a := range s.SNAT {
		if a.Is4() == vip.Is4() {
			return a
		}
	}
	return vip
}
