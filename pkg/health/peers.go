// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/session"
)

// PeerInfo is the answer at session.PeerPath.
type PeerInfo struct {
	Product string `json:"product"` // "shunt"
	ABI     int    `json:"abi"`     // layout of the kernel maps
	Ready   bool   `json:"ready"`   // it can serve on a backend of its own host
}

// PeersOptions of NewPeers.
type PeersOptions struct {
	// Backends returns those to watch; one without a Steer address is left out.
	Backends func() []*fleet.Backend
	// Source returns the local address to probe from: the one that steered packets carry, so that the peer learns
	// it. The zero value leaves the choice to the kernel.
	Source func(target netip.Addr) netip.Addr
	// ABI is this daemon's; a peer with another one is not steered to.
	ABI int
	// TLS makes the probes speak it, as clients do that are steered; nil: plain HTTP.
	TLS      *tls.Config
	Interval time.Duration // 1 s by default
	Timeout  time.Duration // 1 s by default
	Fall     int           // failures in a row until a peer counts as gone, 2 by default
	// OnChange is called after a peer became ready or ceased to be, with the reason.
	OnChange func(b *fleet.Backend, ready bool, detail string)
}

// Peers watches the shunts on the backends' hosts. It is apart from the engines' checks: an engine may be well while
// the shunt beside it is not, and then its sessions stay on this daemon's own L7. The probes also keep the neighbour
// entries of the steered addresses fresh.
type Peers struct {
	o PeersOptions

	mu    sync.Mutex
	state map[*fleet.Backend]*peer
}

type peer struct {
	ready    bool
	failures int
	detail   string
}

// NewPeers returns a watcher that knows no peer until Run or CheckAll has asked them.
func NewPeers(o PeersOptions) *Peers {
	if o.Interval <= 0 {
		o.Interval = time.Second
	}
	if o.Timeout <= 0 {
		o.Timeout = time.Second
	}
	if o.Fall <= 0 {
		o.Fall = 2
	}
	return &Peers{o: o, state: map[*fleet.Backend]*peer{}}
}

// Ready reports whether a shunt of our ABI serves at the backend's Steer address.
func (p *Peers) Ready(b *fleet.Backend) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.state[b]
	return s != nil && s.ready
}

// Detail says what the last probe of the backend's peer found.
func (p *Peers) Detail(b *fleet.Backend) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s := p.state[b]; s != nil {
		return s.detail
	}
	return "not probed"
}

// Run probes until the context ends.
func (p *Peers) Run(ctx context.Context) {
	tick := time.NewTicker(p.o.Interval)
	defer tick.Stop()
	for {
		p.CheckAll(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// CheckAll probes every peer once, all at the same time, and returns when each has answered or timed out.
func (p *Peers) CheckAll(ctx context.Context) {
	backends := p.o.Backends()
	var wg sync.WaitGroup
	for _, b := range backends {
		if b.Steer().IsValid() {
			wg.Go(func() { p.check(ctx, b) })
		}
	}
	wg.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	for b := range p.state {
		if b.Gone() {
			delete(p.state, b)
		}
	}
}

func (p *Peers) check(ctx context.Context, b *fleet.Backend) {
	err := p.probe(ctx, b.Steer())
	if ctx.Err() != nil {
		return
	}
	detail := "ready"
	if err != nil {
		detail = err.Error()
	}
	p.mu.Lock()
	s := p.state[b]
	if s == nil {
		s = &peer{}
		p.state[b] = s
	}
	before := s.ready
	s.detail = detail
	if err == nil {
		s.ready, s.failures = true, 0
	} else if s.failures++; s.failures >= p.o.Fall {
		s.ready = false
	}
	after := s.ready
	p.mu.Unlock()
	if before != after && p.o.OnChange != nil {
		p.o.OnChange(b, after, detail)
	}
}

func (p *Peers) probe(ctx context.Context, target netip.AddrPort) error {
	ctx, cancel := context.WithTimeout(ctx, p.o.Timeout)
	defer cancel()
	dialer := net.Dialer{}
	if p.o.Source != nil {
		if a := p.o.Source(target.Addr()); a.IsValid() {
			dialer.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(a, 0))
		}
	}
	tr := &http.Transport{DialContext: dialer.DialContext, DisableKeepAlives: true, TLSClientConfig: p.o.TLS.Clone()}
	scheme := "http://"
	if p.o.TLS != nil {
		scheme = "https://"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, scheme+target.String()+session.PeerPath, nil)
	if err != nil {
		return fmt.Errorf("probe peer: %w", err)
	}
	req.Header.Set(session.IngressHeader, "1")
	resp, err := tr.RoundTrip(req)
	if err != nil {
		return fmt.Errorf("probe peer: %w", err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 4096))
	if err != nil {
		return fmt.Errorf("probe peer: %w", err)
	}
	var info PeerInfo
	switch {
	case resp.StatusCode != http.StatusOK || json.Unmarshal(body, &info) != nil || info.Product != "shunt":
		return fmt.Errorf("probe peer: no shunt answers at %s (status %d)", target, resp.StatusCode)
	case info.ABI != p.o.ABI:
		return fmt.Errorf("probe peer: the shunt at %s has map layout %d, this one %d", target, info.ABI, p.o.ABI)
	case !info.Ready:
		return fmt.Errorf("probe peer: the shunt at %s has no backend ready", target)
	}
	return nil
}
