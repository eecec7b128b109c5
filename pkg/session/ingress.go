// SPDX-License-Identifier: Apache-2.0

package session

import (
	"net/netip"
	"sync"
	"time"
)

const (
	ingressTTL = 30 * time.Second // several probe intervals
	ingressMax = 1024
)

// Ingresses is the set of addresses from which other shunts steer connections to this one: those configured, and
// those that probed it lately. A connection from there carries many clients' sessions, so it is never pinned and no
// per-address rule is applied to it. That is all that being in the set does, so a probe needs no proof of identity:
// who fakes one loses steering for himself.
type Ingresses struct {
	now    func() time.Time
	mu     sync.RWMutex
	fixed  []netip.Prefix
	probed map[netip.Addr]time.Time
}

// NewIngresses returns a set with the configured prefixes. now is the clock, time.Now if nil.
func NewIngresses(fixed []netip.Prefix, now func() time.Time) *Ingresses {
	if now == nil {
		now = time.Now
	}
	return &Ingresses{now: now, fixed: fixed, probed: map[netip.Addr]time.Time{}}
}

// SetFixed replaces the configured prefixes.
func (i *Ingresses) SetFixed(fixed []netip.Prefix) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.fixed = fixed
}

// Probed notes that another shunt asked from this address.
func (i *Ingresses) Probed(a netip.Addr) {
	a = a.Unmap()
	now := i.now()
	i.mu.Lock()
	defer i.mu.Unlock()
	if _, known := i.probed[a]; !known && len(i.probed) >= ingressMax {
		for k, t := range i.probed {
			if now.Sub(t) > ingressTTL {
				delete(i.probed, k)
			}
		}
		if len(i.probed) >= ingressMax {
			return
		}
	}
	i.probed[a] = now
}

// Contains reports whether connections from the address were steered here by another shunt.
func (i *Ingresses) Contains(a netip.Addr) bool {
	a = a.Unmap()
	i.mu.RLock()
	defer i.mu.RUnlock()
	for _, p := range i.fixed {
		if p.Contains(a) {
			return true
		}
	}
	t, ok := i.probed[a]
	return ok && i.now().Sub(t) <= ingressTTL
}
