// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"net/netip"
	"net/url"
	"path"
	"slices"
	"strings"
)

const (
	maxName     = 31   // bytes of a name in the kernel's maps, the final zero left out
	MaxBackends = 1023 // backends of a configuration: slots of the weight table but the first
	maxVIPs     = 64
)

// Host is what Validate has to know of the machine. Zero fields are unknown and not checked.
type Host struct {
	LocalPortRange [2]int       // net.ipv4.ip_local_port_range, both ends included
	ReservedPorts  [][2]int     // net.ipv4.ip_local_reserved_ports, ranges with both ends included
	Addrs          []netip.Addr // addresses of this host
	Interfaces     []string     // names of this host's network interfaces
	Policies       []string     // registered policies
}

func poolPath(i int) string       { return fmt.Sprintf("pools[%d]", i) }
func backendPath(i, j int) string { return fmt.Sprintf("pools[%d].backends[%d]", i, j) }

// derive fills in what follows from other keys.
func (c *Config) derive(p *problems) {
	if c.Admin.Socket != "" && !c.src.wrote("admin.listen") {
		c.Admin.Listen = netip.AddrPort{}
	}
	for i := range c.Pools {
		for j := range c.Pools[i].Backends {
			b := &c.Pools[i].Backends[j]
			if b.Name == "" && b.URL != nil && !c.src.wrote(backendPath(i, j)+".name") {
				b.Name = nameOf(b.URL)
			}
		}
	}
	if len(c.Steering.VIP) == 0 && !c.src.wrote("steering.vip") && p.ok("listen") && !c.Listen.Addr().IsUnspecified() {
		c.Steering.VIP = []netip.Addr{c.Listen.Addr()}
	}
}

// nameOf is a backend's name where the file gives none: host:port, cut with a hash where that is too long.
func nameOf(u *url.URL) string {
	name := strings.NewReplacer("[", "", "]", "").Replace(hostPort(u))
	if len(name) <= maxName {
		return name
	}
	h := fnv.New32a()
	h.Write([]byte(name))
	return fmt.Sprintf("%s-%08x", strings.TrimRight(name[:maxName-9], ".:-"), h.Sum32())
}

// hostPort is the URL's host with its port, the scheme's own where none is written.
func hostPort(u *url.URL) string {
	if u.Port() != "" {
		return u.Host
	}
	if u.Scheme == "https" {
		return u.Host + ":443"
	}
	return u.Host + ":80"
}

// Addr is the backend's address and port; ok is false when the URL names a host that has to be looked up.
func (b Backend) Addr() (ap netip.AddrPort, ok bool) {
	if b.URL == nil {
		return ap, false
	}
	ap, err := netip.ParseAddrPort(hostPort(b.URL))
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()), err == nil
}

// goodName checks a name that becomes a metric label, a map value and a part of a URL path.
func goodName(s string) error {
	switch {
	case s == "":
		return fmt.Errorf("is empty")
	case len(s) > maxName:
		return fmt.Errorf("%q has %d bytes: at most %d", s, len(s), maxName)
	}
	for i, r := range s {
		ok := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || i > 0 && strings.ContainsRune("._:-", r)
		if !ok {
			return fmt.Errorf("%q: use letters, digits and . _ : -, a letter or digit first", s)
		}
	}
	return nil
}

// check runs every rule that is more than the spelling of one value.
func (c *Config) check(p *problems, host Host) {
	c.checkListeners(p)
	if c.TLS.Certificate == "" && c.TLS.Key != "" {
		p.add("tls.key", "is for a certificate: write tls.certificate too")
	}
	if c.TLS.Certificate != "" && c.TLS.Key == "" {
		p.add("tls.certificate", "needs its key: write tls.key too")
	}
	if c.Keys != "" && c.Credentials == CredentialsPass {
		p.warn("credentials", "pass: backends get the keys by which this front end knows its clients")
	}
	c.checkPools(p, host)
	c.checkPaths(p)
	for i, h := range c.Session.Headers {
		at := fmt.Sprintf("session.headers[%d]", i)
		switch lower := strings.ToLower(h); {
		case !isToken(h):
			p.add(at, "%q is not the name of a header", h)
		case lower == "authorization" || lower == "cookie" || lower == "x-api-key" || lower == "api-key":
			p.add(at, "%q is a credential, not a session: all requests of one key would be one session", h)
		}
	}
	for model := range c.Tokens.Models {
		at := "tokens.models." + model
		if i := strings.IndexByte(model, '*'); i >= 0 && i != len(model)-1 || model == "" {
			p.add(at, "%q: a * may stand at the end only", model)
		}
	}
	if s := c.AccessLog; s == "" || s == "-" {
		p.add("access_log", "%q is not stderr, stdout, off or a path", s)
	} else if !slices.Contains([]string{"stderr", "stdout", "off"}, s) && !strings.Contains(s, "/") {
		p.add("access_log", "%q is not stderr, stdout, off or a path: write ./%s for a file here", s, s)
	}
	c.checkSteering(p, host)
}

func isToken(s string) bool {
	for _, r := range s {
		if r <= ' ' || r >= 0x7f || strings.ContainsRune("()<>@,;:\\\"/[]?={}", r) {
			return false
		}
	}
	return s != ""
}

func (c *Config) checkListeners(p *problems) {
	if p.ok("listen", "admin.listen") && c.Admin.Listen.IsValid() && c.Listen.Port() == c.Admin.Listen.Port() && c.Listen.Port() != 0 {
		a, b := c.Listen.Addr(), c.Admin.Listen.Addr()
		if a == b || a.IsUnspecified() || b.IsUnspecified() {
			p.add("admin.listen", "%s is taken by listen (%s)", c.Admin.Listen, c.Listen)
		}
	}
	if c.Admin.Listen.IsValid() && !c.Admin.Listen.Addr().IsLoopback() && c.Admin.TokenFile == "" {
		p.warn("admin.listen", "%s is not loopback: without token_file only health and metrics are served there", c.Admin.Listen)
	}
}

func (c *Config) checkPools(p *problems, host Host) {
	if len(c.Pools) == 0 {
		p.add("pools", "no pool: write at least one pool with one backend")
	}
	n := 0
	for _, pool := range c.Pools {
		n += len(pool.Backends)
	}
	if n > MaxBackends {
		p.add("pools", "%d backends: at most %d", n, MaxBackends)
	}
	names, backends, models := map[string]string{}, map[string]string{}, map[string]string{}
	urls := map[string]string{}
	catchAll := ""
	for i, pool := range c.Pools {
		at := poolPath(i)
		if err := goodName(pool.Name); err != nil {
			p.add(at+".name", "%s", err)
		} else if other, dup := names[pool.Name]; dup {
			p.add(at+".name", "pool %q is named twice (also %s)", pool.Name, other)
		} else {
			names[pool.Name] = at
		}
		if host.Policies != nil && !slices.Contains(host.Policies, pool.Policy) {
			msg := fmt.Sprintf("policy %q is not known: there are %s", pool.Policy, strings.Join(host.Policies, ", "))
			if near := nearest(pool.Policy, host.Policies); near != "" {
				msg = fmt.Sprintf("policy %q is not known: did you mean %q?", pool.Policy, near)
			}
			p.add(at+".policy", "%s", msg)
		}
		if len(pool.Models) == 0 && p.ok(at+".models") {
			if catchAll != "" {
				p.add(at+".models", "two pools have no model list (also %s): only one may take every model", catchAll)
			} else {
				catchAll = at
			}
		}
		for k, m := range pool.Models {
			mat := fmt.Sprintf("%s.models[%d]", at, k)
			if m == "" || strings.TrimSpace(m) != m || len(m) > 256 {
				p.add(mat, "%q is not the name of a model", m)
			} else if other, dup := models[m]; dup {
				p.add(mat, "model %q is listed twice (also %s)", m, other)
			} else {
				models[m] = mat
			}
		}
		if h := pool.Health.Path; h != "auto" && (!strings.HasPrefix(h, "/") || strings.ContainsAny(h, " #\t\r\n")) {
			p.add(at+".health.path", "%q is not auto or a path that begins with /", h)
		}
		if name, env := strings.CutPrefix(pool.KeyFrom, KeyFromEnv); env && (!isToken(name) || name == "") {
			p.add(at+".key_from", "%q is not the name of an environment variable", name)
		} else if !env && pool.KeyFrom != "" && !strings.Contains(pool.KeyFrom, "/") {
			p.add(at+".key_from", "is not a path, nor env:NAME: a key itself does not belong here")
		}
		if o := pool.Outlier; o.MaxHold < o.Hold && p.ok(at+".outlier.hold", at+".outlier.max_hold") {
			p.add(at+".outlier.max_hold", "%s is shorter than hold %s", formatDuration(o.MaxHold), formatDuration(o.Hold))
		}
		if t := pool.Tokenizer; t.File != "" && t.Encoding != "auto" {
			p.add(at+".tokenizer.file", "encoding says %s already: one of the two can count", t.Encoding)
		}
		if len(pool.Backends) == 0 {
			p.add(at+".backends", "pool %q has no backend", pool.Name)
		}
		for j, b := range pool.Backends {
			c.checkBackend(p, i, j, b, backends, urls)
		}
	}
}

func (c *Config) checkBackend(p *problems, i, j int, b Backend, names, urls map[string]string) {
	at := backendPath(i, j)
	if b.URL == nil {
		p.add(at+".url", "backend has no url")
	}
	if b.Name != "" || b.URL != nil {
		if err := goodName(b.Name); err != nil {
			p.add(at+".name", "%s", err)
		} else if other, dup := names[b.Name]; dup {
			p.add(at+".name", "backend %q is named twice (also %s): names are unique in the whole file", b.Name, other)
		} else {
			names[b.Name] = at
		}
	}
	if b.URL == nil {
		return
	}
	key := b.URL.Scheme + "://" + hostPort(b.URL) + b.URL.Path
	if other, dup := urls[key]; !dup {
		urls[key] = at
	} else if strings.HasPrefix(other, poolPath(i)+".") {
		p.add(at+".url", "%s is a backend of this pool already (%s)", key, other)
	} else {
		p.warn(at+".url", "%s is also %s: each of the two counts only its own tokens", key, other)
	}
	if ap, ok := b.Addr(); ok && ap == c.Listen {
		p.add(at+".url", "%s is this shunt's own listener: requests would go in a circle", ap)
	}
}

func (c *Config) checkPaths(p *problems) {
	if len(c.Paths) == 0 && p.ok("paths") {
		p.add("paths", "the list is empty: nothing would be served")
	}
	for i, s := range c.Paths {
		at := fmt.Sprintf("paths[%d]", i)
		switch {
		case s == defaultPaths:
		case !strings.HasPrefix(s, "/"):
			p.add(at, "%q does not begin with / (the only other word is default)", s)
		case strings.ContainsAny(s, "?#%\\") || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r == 0x7f }):
			p.add(at, "%q: write the plain path, without query, escapes and blanks", s)
		case path.Clean(s) != s:
			p.add(at, "%q: write %q", s, path.Clean(s))
		default:
			segments := strings.Split(s, "/")
			for k, seg := range segments {
				if strings.Contains(seg, "*") && seg != "*" && (seg != "**" || k < len(segments)-1) {
					p.add(at, "%q: * stands for one whole segment, a last ** for one or more", s)
				}
			}
		}
	}
}

const defaultPaths = "default" // the word in paths

// AllowedPaths is the allow-list with the word default replaced by the front end's own list.
func (c *Config) AllowedPaths(inference []string) []string {
	var list []string
	for _, s := range c.Paths {
		add := []string{s}
		if s == defaultPaths {
			add = inference
		}
		for _, a := range add {
			if !slices.Contains(list, a) {
				list = append(list, a)
			}
		}
	}
	return list
}

// Encodings gives the token counter's default encoding and model table: the file's own models, then those of the pools
// with an explicit encoding or a tokenizer file, whose path then stands for it. A pool without a model list sets the default.
func (c *Config) Encodings() (def string, models map[string]string) {
	def, models = c.Tokens.Default, map[string]string{}
	for _, pool := range c.Pools {
		enc := cmp.Or(pool.Tokenizer.File, pool.Tokenizer.Encoding)
		if enc == "auto" {
			continue
		}
		if len(pool.Models) == 0 {
			def = enc
			models["*"] = def // before the counter's built-in names: the file speaks of this pool
		}
		for _, m := range pool.Models {
			models[m] = enc
		}
	}
	for m, enc := range c.Tokens.Models {
		models[m] = enc
	}
	return def, models
}

// TokenizerFiles are the tokenizer files of all pools.
func (c *Config) TokenizerFiles() []string {
	var files []string
	for _, pool := range c.Pools {
		if f := pool.Tokenizer.File; f != "" && !slices.Contains(files, f) {
			files = append(files, f)
		}
	}
	return files
}
