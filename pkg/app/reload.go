// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/pkg/config"
	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/policy"
	"github.com/shunt-lb/shunt/pkg/proxy"
)

func (a *app) dynamic(cfg *config.Config) proxy.Dynamic {
	known := a.secrets.Load()
	return proxy.Dynamic{
		Keys: known.keys, BackendKeys: known.backends,
		Paths:      cfg.AllowedPaths(proxy.DefaultPaths),
		Identifier: a.identifier.WithHeaders(cfg.Session.Headers),
		Limits: proxy.Limits{MaxBody: int64(cfg.Limits.MaxBody), MaxHeader: int(cfg.Limits.MaxHeader),
			MaxConnections: cfg.Limits.MaxConnections},
		Timeouts: proxy.Timeouts{Connect: cfg.Timeouts.Connect, FirstByte: cfg.Timeouts.FirstByte, Idle: cfg.Timeouts.Idle,
			Header: cfg.Timeouts.HeaderRead, KeepAlive: cfg.Timeouts.ClientIdle},
		Retries: cfg.Retries.Max, RetryBudget: cfg.Retries.Budget,
		StripAuthorization: cfg.StripCredentials(),
		ProxyProtocol:      cfg.ProxyProtocol, TrustedProxies: cfg.TrustedProxies,
	}
}

// ingresses are the addresses from which other shunts may steer here: those configured, and the hosts of the other
// backends, where with one configuration for all nodes other ingresses run.
func ingresses(cfg *config.Config) []netip.Prefix {
	list := slices.Clone(cfg.Steering.Ingress)
	for _, p := range cfg.Pools {
		for _, b := range p.Backends {
			if a := b.Steer.Addr(); a.IsValid() {
				list = append(list, netip.PrefixFrom(a, a.BitLen()))
			}
		}
	}
	return list
}

// apply gives the fleet the configuration's pools; new backends are checked first. On an error nothing has changed.
func (a *app) apply(cfg *config.Config, check func([]*fleet.Backend)) error {
	specs, policies, err := pools(cfg, a.policies)
	if err != nil {
		return err
	}
	before := a.fleet.Backends()
	checks, old := healthSettings(cfg), a.checks.Load()
	a.checks.Store(&checks)
	if err := a.fleet.ApplyAfter(specs, check); err != nil {
		a.checks.Store(old)
		return err
	}
	a.policies = policies
	needs := map[string]policy.Needs{}
	for _, p := range cfg.Pools {
		spec, _ := policy.Lookup(p.Policy)
		needs[p.Name] = spec.Needs
	}
	a.needs.Store(&needs)
	a.ingresses.SetFixed(ingresses(cfg))
	a.calibration.apply(cfg)
	named := families(cfg)
	a.families.Store(&named)
	a.cfg.Store(cfg)
	for _, b := range before {
		if b.Gone() {
			a.tracker.Forget(b.ID())
			if a.kernel != nil {
				a.kernel.forget(b)
			}
		}
	}
	return nil
}

// reload reads the configuration and puts it in force as a whole, or not at all.
func (a *app) reload() (err error) {
	a.reloading.Lock()
	defer a.reloading.Unlock()
	a.o.Notify("RELOADING=1")
	defer a.o.Notify("READY=1")
	defer func() {
		text := ""
		if err != nil {
			text = err.Error()
			a.log.Error("reload refused; the former configuration stays in force", "error", err)
		}
		a.reloadError.Store(&text)
	}()
	if a.o.Reload == nil {
		return errors.New("reload: started by flags, there is no file to read")
	}
	if _, err := contentHash(a.o.ConfigPath); a.o.ConfigPath != "" && err != nil {
		return fmt.Errorf("reload: %w", err)
	}
	cfg, err := a.o.Reload()
	if err != nil {
		return fmt.Errorf("reload: %w", err)
	}
	if err := cfg.Validate(Host()); err != nil {
		return fmt.Errorf("reload: %w", err)
	}
	old := a.cfg.Load()
	if names := fixed(old, cfg); len(names) > 0 {
		return fmt.Errorf("reload: a change of %s takes a restart", strings.Join(names, ", "))
	}
	if err := proxy.CheckPaths(cfg.AllowedPaths(proxy.DefaultPaths)); err != nil {
		return fmt.Errorf("reload: %w", err)
	}
	known, err := readSecrets(cfg)
	if err != nil {
		return fmt.Errorf("reload: %w", err)
	}
	if err := a.apply(cfg, func(fresh []*fleet.Backend) { a.checker.CheckEach(context.Background(), fresh) }); err != nil {
		return fmt.Errorf("reload: %w", err)
	}
	a.secrets.Store(known)
	if err := a.proxy.Update(a.dynamic(cfg)); err != nil { // the paths, all that it refuses, are checked
		return fmt.Errorf("reload: %w", err)
	}
	if a.kernel != nil {
		a.kernel.poke()
	}
	a.log.Info("configuration reloaded", "pools", len(cfg.Pools), "backends", len(a.fleet.Backends()))
	return nil
}

// watchConfig reloads when asked to and when the file's content has changed.
func (a *app) watchConfig(ctx context.Context) error {
	var tick <-chan time.Time
	if a.o.ConfigPath != "" {
		t := time.NewTicker(watchEvery)
		defer t.Stop()
		tick = t.C
	}
	last := a.loaded
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-a.o.ReloadRequests:
			last, _ = contentHash(a.o.ConfigPath)
		case <-tick:
			now, err := contentHash(a.o.ConfigPath)
			if err != nil || now == last {
				continue // a file that is being replaced is there again at the next look
			}
			last = now
		}
		_ = a.reload() // it has logged the error, and status shows it
	}
}

// watchCertificate takes a replaced certificate into use.
func (a *app) watchCertificate(ctx context.Context) error {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	told := ""
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		changed, err := a.certificate.Refresh()
		switch {
		case err != nil && err.Error() != told:
			told = err.Error()
			a.log.Error("the certificate on disk cannot be used; the former one stays in use", "error", err)
		case changed:
			a.log.Info("certificate replaced", "expires", a.certificate.Expires())
		}
		if err == nil {
			told = ""
		}
	}
}

// contentHash reads a regular file only: opening anything else, a pipe for example, may wait for ever.
func contentHash(path string) (sum [sha256.Size]byte, err error) {
	st, err := os.Stat(path)
	if err != nil {
		return sum, fmt.Errorf("read configuration: %w", err)
	}
	if !st.Mode().IsRegular() {
		return sum, fmt.Errorf("read configuration: %s is not a regular file", path)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return sum, fmt.Errorf("read configuration: %w", err)
	}
	return sha256.Sum256(b), nil
}

// fixed lists the settings that differ and that only a restart can change.
func fixed(old, now *config.Config) []string {
	var names []string
	for _, s := range []struct {
		name     string
		old, now any
	}{
		{"listen", old.Listen, now.Listen},
		{"admin", old.Admin, now.Admin},
		{"tls", old.TLS, now.TLS},
		{"steering", old.Steering, now.Steering},
		{"session.idle", old.Session.Idle, now.Session.Idle},
		{"tokens", old.Tokens, now.Tokens},
		{"access_log", old.AccessLog, now.AccessLog},
		{"log", old.Log, now.Log},
		{"limits.max_header", old.Limits.MaxHeader, now.Limits.MaxHeader},
		{"timeouts.header_read", old.Timeouts.HeaderRead, now.Timeouts.HeaderRead},
		{"timeouts.client_idle", old.Timeouts.ClientIdle, now.Timeouts.ClientIdle},
	} {
		if !reflect.DeepEqual(s.old, s.now) {
			names = append(names, s.name)
		}
	}
	oldDefault, oldModels := old.Encodings()
	nowDefault, nowModels := now.Encodings()
	if !slices.Contains(names, "tokens") && (oldDefault != nowDefault || !maps.Equal(oldModels, nowModels)) {
		names = append(names, "pools[].tokenizer")
	}
	return names
}
