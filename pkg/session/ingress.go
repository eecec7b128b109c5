// SPDX-License-Identifier: Apache-2.0

package session

import (
	"net/netip"
	"sync"
	"time"
)

// How one shunt asks whether another is one.
const (
	PeerPath      = "/.well-known/shunt" // on the front listener of the one that is asked
	IngressHeader = "shunt-ingress"      // "1": the one that asks means to steer to it
)

const (
	// ingressTTL outlives every lease: the kernel of a host whose daemon has died goes on steering what is pinned.
	ingressTTL = 8 * 24 * time.Hour
	ingressMax = 4096
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

// Probed notes that another shunt asked from this address, and reports whether it was not in the set before. When the set
// is full the address that has not asked for longest leaves it.
func (i *Ingresses) Probed(a netip.Addr) (fresh bool) {
	a = a.Unmap()
	fresh = !i.Contains(a)
	now := i.now()
	i.mu.Lock()
	defer i.mu.Unlock()
	if _, known := i.probed[a]; !known && len(i.probed) >= ingressMax {
		oldest, first := now, true
		var leaves netip.Addr
		for k, t := range i.probed {
			if first || t.Before(oldest) {
				oldest, leaves, first = t, k, false
			}
		}
		delete(i.probed, leaves)
	}
	i.probed[a] = now
	return fresh
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
