// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/shunt-lb/shunt/pkg/admin"
	"github.com/shunt-lb/shunt/pkg/fleet"
)

func (a *app) status() admin.Status {
	cfg := a.cfg.Load()
	s := admin.Status{
		Version: a.o.Version, UptimeSeconds: time.Since(a.started).Seconds(), Listen: cfg.Listen.String(), ConfigFile: a.o.ConfigPath,
		Backends: len(a.fleet.Backends()), Requests: a.proxy.Served(), Sessions: int64(a.tracker.Len()),
		Kernel: admin.Kernel{Mode: cfg.Steering.Mode, Reason: a.noKernel}, Tokens: a.tokensStatus(),
	}
	if err := a.ready(); err != nil {
		s.NotReady = err.Error()
	} else {
		s.Ready = true
	}
	if e := a.reloadError.Load(); e != nil {
		s.ReloadError = *e
	}
	for _, b := range a.fleet.Backends() {
		s.InflightRequests += b.Requests()
		if b.Eligible() {
			s.BackendsUp++
		}
	}
	k := a.kernel
	if k == nil {
		return s
	}
	st := k.dp.Status()
	k.mu.Lock()
	s.Kernel.Reason = k.problem
	k.mu.Unlock()
	s.Kernel.Live = k.attached.Load()
	s.Kernel.Target, s.Kernel.Instance, s.Kernel.PinDir = cfg.Steering.Target, st.Instance, st.Pins
	for _, i := range st.Interfaces {
		if i.Mode != "" && i.Mode != "none" {
			s.Kernel.Attach = i.Mode
		}
		text := i.Name + " (" + i.Mode + ")"
		if i.Problem != "" {
			text += ": " + i.Problem
			s.Kernel.Live = false
			if s.Kernel.Reason == "" {
				s.Kernel.Reason = i.Name + ": " + i.Problem
			}
		}
		s.Kernel.Interfaces = append(s.Kernel.Interfaces, text)
	}
	for _, v := range st.VIPs {
		s.Kernel.VIPs = append(s.Kernel.VIPs, v.Addr.String())
		s.Kernel.NATPorts = v.NATPorts
	}
	s.SteeredConnections, s.SteeredFlows, s.Pins = int64(st.Opened), st.Flows, int64(st.Sessions)
	return s
}

func (a *app) backends() []admin.BackendStatus {
	total := map[string]float64{}
	for _, b := range a.fleet.Backends() {
		total[b.Pool()] += float64(max(b.Spec().Weight, 1))
	}
	problems := map[fleet.ID]string{}
	if a.kernel != nil {
		for _, s := range a.kernel.dp.Status().Backends {
			problems[s.ID] = s.Problem
		}
	}
	var list []admin.BackendStatus
	for _, b := range a.fleet.Backends() {
		spec := b.Spec()
		l7, kernel := b.Load()
		s := admin.BackendStatus{
			Name: spec.Name, Pool: b.Pool(), ID: uint32(b.ID()), URL: spec.URL.String(), Weight: max(spec.Weight, 1), Local: spec.Local,
			Health: b.Health().String(), Admin: b.Admin().String(), L7Tokens: l7, KernelTokens: kernel, Limit: b.Limit(),
			Requests: b.Requests(), SteeredFlows: b.Flows(), Generation: b.Generation(),
			Share: float64(max(spec.Weight, 1)) / total[b.Pool()],
		}
		if r := a.checker.Last(b); r.Err != nil {
			s.Detail = r.Err.Error()
		} else if !r.At.IsZero() {
			s.Detail = fmt.Sprintf("answered in %s", r.Latency.Round(time.Microsecond))
		}
		if in, out := b.Ejected(); out {
			s.Ejected, s.ProbeInSeconds = a.checker.Ejections(b).Reason, in.Seconds()
		}
		if b.Steer().IsValid() {
			s.Steer = b.Steer().String()
		}
		s.Signal = a.routing.signal(b)
		s.NotSteerable = a.notSteerable(b, problems[b.ID()])
		s.Steerable = s.NotSteerable == ""
		list = append(list, s)
	}
	return list
}

// notSteerable says why nothing is steered to the backend, "" if it is. inKernel is what the kernel's view lacks.
func (a *app) notSteerable(b *fleet.Backend, inKernel string) string {
	k := a.kernel
	switch {
	case k == nil:
		return a.noKernel
	case !k.attached.Load():
		return "the program is not attached"
	case !b.Steer().IsValid():
		return "the backend has no steer address"
	case !b.Eligible():
		return "the backend takes no new work"
	case k.peers != nil && !k.peers.Ready(b):
		return k.peers.Detail(b)
	case !k.steerable(b):
		return "the steer address is on this host: the local front end serves it"
	}
	return inKernel
}

func (a *app) sessions(limit int) ([]admin.Session, error) {
	if a.kernel == nil {
		return nil, nil
	}
	pins, err := a.kernel.dp.Sessions(limit)
	if err != nil {
		return nil, err
	}
	var list []admin.Session
	for _, p := range pins {
		s := admin.Session{Client: p.Client.String(), VIP: p.VIP.String(), Backend: p.Name, State: "pinned", Sessions: int(p.Sessions),
			Tokens: int64(p.Tokens), ExpiresSeconds: p.Expires.Seconds(), Connections: int64(p.Used), OpenFlows: int64(p.Open)}
		switch {
		case p.Static:
			s.State = "static"
		case !p.Live:
			s.State = "ended"
		}
		list = append(list, s)
	}
	for _, i := range a.kernel.pins.List() {
		if i.Mixed && len(list) < limit {
			list = append(list, admin.Session{Client: i.Client.String(), VIP: i.VIP.String(), State: "mixed", Sessions: i.Sessions})
		}
	}
	return list, nil
}

func (a *app) flows(limit int) ([]admin.Flow, error) {
	if a.kernel == nil {
		return nil, nil
	}
	flows, err := a.kernel.dp.Flows(limit)
	if err != nil {
		return nil, err
	}
	var list []admin.Flow
	for _, f := range flows {
		list = append(list, admin.Flow{Client: f.Client.String(), VIP: f.VIP.String(), Backend: f.Name, NATPort: f.NAT.Port(), State: f.State,
			AgeSeconds: f.Age.Seconds(), IdleSeconds: f.Idle.Seconds(), Packets: f.PacketsIn + f.PacketsOut, Bytes: f.BytesIn + f.BytesOut,
			Charge: f.Tokens})
	}
	return list, nil
}

func (a *app) setAdmin(name string, state fleet.AdminState) error {
	b := a.fleet.Backend(name)
	if b == nil {
		return fmt.Errorf("backend %.64q: %w", name, admin.ErrNotFound)
	}
	b.SetAdmin(state)
	a.log.Info("operator set backend", "backend", name, "state", state.String())
	return nil
}

func (a *app) unpin(client netip.Addr) error {
	if a.kernel == nil {
		return fmt.Errorf("unpin: nothing is steered (%s): %w", a.noKernel, admin.ErrUnavailable)
	}
	return a.kernel.pins.Unpin(client, a.kernel.vips...)
}

// collector shows the fleet's ledger.
type collector struct{ a *app }

var (
	tokensDesc    = prometheus.NewDesc("shunt_backend_tokens", "Tokens in flight on a backend, by the plane that counts them.", []string{"backend", "plane"}, nil)
	limitDesc     = prometheus.NewDesc("shunt_backend_token_limit", "Tokens above which the kernel opens no new flow to a backend.", []string{"backend"}, nil)
	upDesc        = prometheus.NewDesc("shunt_backend_up", "1 when a backend may take new work.", []string{"backend"}, nil)
	ejectedDesc   = prometheus.NewDesc("shunt_backend_ejected", "1 when a backend is ejected because its requests failed.", []string{"backend"}, nil)
	ejectionsDesc = prometheus.NewDesc("shunt_backend_ejections_total", "Ejections of a backend, by what failed: requests in a row, or a share of them.", []string{"backend", "reason"}, nil)
	panicDesc     = prometheus.NewDesc("shunt_pool_panic", "1 when so many of a pool's backends are ejected that these are used too.", []string{"pool"}, nil)
	certDesc      = prometheus.NewDesc("shunt_certificate_expiry_timestamp_seconds", "End of the listener's certificate in use.", nil, nil)
	requests      = prometheus.NewDesc("shunt_backend_requests", "Requests in flight on a backend through the front end.", []string{"backend"}, nil)
	kernelDesc    = prometheus.NewDesc("shunt_kernel_path_up", "1 when sessions can be steered in the kernel.", nil, nil)
	reloadDesc    = prometheus.NewDesc("shunt_config_last_reload_successful", "0 when the last reload was refused.", nil, nil)
)

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{tokensDesc, limitDesc, upDesc, ejectedDesc, ejectionsDesc, panicDesc, certDesc, requests, kernelDesc, reloadDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for _, b := range c.a.fleet.Backends() {
		l7, kernel := b.Load()
		gauge(tokensDesc, float64(l7), b.Name(), "l7")
		gauge(tokensDesc, float64(kernel), b.Name(), "kernel")
		gauge(limitDesc, float64(b.Limit()), b.Name())
		gauge(upDesc, number(b.Eligible()), b.Name())
		gauge(requests, float64(b.Requests()), b.Name())
		_, out := b.Ejected()
		gauge(ejectedDesc, number(out), b.Name())
		e := c.a.checker.Ejections(b)
		ch <- prometheus.MustNewConstMetric(ejectionsDesc, prometheus.CounterValue, float64(e.Row), b.Name(), "row")
		ch <- prometheus.MustNewConstMetric(ejectionsDesc, prometheus.CounterValue, float64(e.Share), b.Name(), "share")
	}
	for _, p := range c.a.fleet.Pools() {
		gauge(panicDesc, number(p.Panicking()), p.Name())
	}
	gauge(kernelDesc, number(c.a.kernel != nil && c.a.kernel.attached.Load()))
	if c.a.certificate != nil {
		gauge(certDesc, float64(c.a.certificate.Expires().Unix()))
	}
	e := c.a.reloadError.Load()
	gauge(reloadDesc, number(e == nil || *e == ""))
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
