// SPDX-License-Identifier: Apache-2.0

package fleet

import "time"

// ReasonProbe: the one request that finds out whether an ejected backend serves again.
const ReasonProbe Reason = "probe"

// Eject keeps the backend from new work because of what requests met there: for so long entirely, and then until Restore but
// for one request at a time, a probe. A later end that was set before stays. The pool overrides it while too few of its
// backends would be left (PoolSpec.Panic); what the active checks say it never overrides.
func (b *Backend) Eject(hold time.Duration) {
	until := max(int64(b.now()+hold), 1)
	for {
		old := b.out.Load()
		if until <= old || b.out.CompareAndSwap(old, until) {
			break
		}
	}
	b.reviewed()
}

// Restore ends an ejection.
func (b *Backend) Restore() {
	if b.out.Swap(0) == 0 {
		return
	}
	b.cameUp()
	b.reviewed()
}

// Ejected reports whether the backend is ejected, and how long until it is probed; 0 = the next request is a probe.
func (b *Backend) Ejected() (probeIn time.Duration, out bool) {
	until := b.out.Load()
	if until == 0 {
		return 0, false
	}
	return max(time.Duration(until)-b.now(), 0), true
}

// Panicking reports whether the pool tries ejected backends too, since too few others are left.
func (p *Pool) Panicking() bool {
	if !p.someOut.Load() {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.review()
	return p.panics.Load()
}

func (b *Backend) reviewed() {
	if p := b.in.Load(); p != nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.review()
	}
}

// review counts the ejected backends anew.
func (p *Pool) review() {
	sound, out := 0, 0
	for _, b := range p.backends {
		if b.sound() {
			sound++
			if b.out.Load() != 0 {
				out++
			}
		}
	}
	p.someOut.Store(out > 0)
	p.panics.Store(out > 0 && float64(sound-out) < p.panicShare*float64(sound))
}

// probed returns an ejected backend whose time has come, for a request that may find out.
func (p *Pool) probed(q *Query, need int64, now time.Duration, only set) *Backend {
	if !q.MayProbe || len(q.Exclude) > 0 {
		return nil
	}
	for i, b := range p.backends {
		if only != nil && !only.has(i) {
			continue
		}
		until := b.out.Load()
		if until == 0 || until > int64(now) || b.probing.Load() || !b.sound() || q.LocalOnly && !b.Local() {
			continue
		}
		if m := b.spec.Load().MaxInflightTokens; m > 0 && b.tokens() > 0 && b.tokens()+need > m {
			continue
		}
		return b
	}
	return nil
}
