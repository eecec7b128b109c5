// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"net/netip"
	"net/url"
	"sync/atomic"
	"time"
)

// Backend is one instance of an inference server. An instance survives reloads while its pool, name and URL stay the
// same; one that leaves and returns is a new instance with a slot of its own.
type Backend struct {
	id         ID
	pool       string
	generation uint32
	slot       *Slot
	admin      *AdminWord
	spec       atomic.Pointer[BackendSpec]
	health     atomic.Uint32
	requests   atomic.Int64
	pinned     atomic.Int64
	queued     atomic.Int64 // see Candidate
	waiting    atomic.Int64
	context    atomic.Int64
	gauges     atomic.Pointer[Gauges]
	learned    learned
	now        func() time.Duration
	busyUntil  atomic.Int64 // ns on that clock
	since      atomic.Int64 // when it came up or back, ns on that clock; 0 = it never did
	out        atomic.Int64 // ejected: when it may be probed, ns on that clock; 0 = not ejected
	probing    atomic.Bool  // a probe is out
	in         atomic.Pointer[Pool]
	models     atomic.Pointer[[]Model] // nil: not known
	gone       chan struct{}
}

// ID returns the backend's slot in the weight table.
func (b *Backend) ID() ID { return b.id }

// Pool returns the name of the backend's pool.
func (b *Backend) Pool() string { return b.pool }

// Generation tells this instance from others that had the same ID. It is never 0.
func (b *Backend) Generation() uint32 { return b.generation }

// Spec returns the configured part as the last reload left it.
func (b *Backend) Spec() BackendSpec { return *b.spec.Load() }

// Name returns the backend's name, unique in the fleet.
func (b *Backend) Name() string { return b.spec.Load().Name }

// URL returns the address of the inference server. The caller must not change it.
func (b *Backend) URL() *url.URL { return b.spec.Load().URL }

// Steer returns where the kernel steers the backend's sessions, or the zero value: never.
func (b *Backend) Steer() netip.AddrPort { return b.spec.Load().Steer }

// Local reports whether the backend runs on this host.
func (b *Backend) Local() bool { return b.spec.Load().Local }

// Health returns what the checks say.
func (b *Backend) Health() Health { return Health(b.health.Load()) }

// SetHealth records the checks' word and returns the one before.
func (b *Backend) SetHealth(h Health) Health {
	old := Health(b.health.Swap(uint32(h)))
	if h == HealthUp && old != HealthUp {
		b.cameUp()
	}
	return old
}

// Admin returns the operator's word. A value that is none of the defined ones counts as drain: whoever wrote it
// wanted the backend out, and open requests are not cut by a slip.
func (b *Backend) Admin() AdminState {
	a := AdminState(b.admin.State.Load())
	if a > AdminMaint {
		return AdminDrain
	}
	return a
}

// SetAdmin records the operator's word. Both planes obey it at once.
func (b *Backend) SetAdmin(a AdminState) { b.admin.State.Store(uint32(a)) }

// Gone reports whether a reload took the backend away. Its open requests go on.
func (b *Backend) Gone() bool {
	select {
	case <-b.gone:
		return true
	default:
		return false
	}
}

// Done is closed when a reload takes the backend away.
func (b *Backend) Done() <-chan struct{} { return b.gone }

// Eligible reports whether the backend may take new work. It is the one source of that answer for both planes.
func (b *Backend) Eligible() bool {
	if !b.sound() {
		return false
	}
	if b.out.Load() == 0 {
		return true
	}
	p := b.in.Load()
	return p != nil && p.panics.Load()
}

// sound is Eligible, were nothing ever ejected.
func (b *Backend) sound() bool {
	return b.Health() == HealthUp && b.Admin() == AdminNone && !b.Gone()
}

// Load returns the tokens in flight: the front end's, and those that steered flows charge. A flow counts once its
// handshake is done: a spoofed SYN must not move everyone's requests.
func (b *Backend) Load() (l7, kernel int64) {
	return b.slot.L7Tokens.Load(), b.slot.KernelTokens.Load() - b.slot.HalfOpen.Load()
}

// Limit returns the bound that the kernel holds new flows to.
func (b *Backend) Limit() int64 { return b.slot.Limit.Load() }

// NotePin tells that each steered connection of some client will charge the backend this many tokens. The largest such
// charge, fading over about half an hour, is what the kernel's bound leaves above the backend's share: a backend that holds no
// more than its share must be able to take any one of its sessions.
func (b *Backend) NotePin(tokens int64) {
	for {
		old := b.pinned.Load()
		if tokens <= old || b.pinned.CompareAndSwap(old, tokens) {
			return
		}
	}
}

// Requests returns the front end's requests in flight.
func (b *Backend) Requests() int64 { return b.requests.Load() }

// Flows returns the open steered flows.
func (b *Backend) Flows() int64 { return b.slot.KernelFlows.Load() }

// Waiting returns the front end's requests whose answer has not begun, and their prompt tokens less those believed cached.
func (b *Backend) Waiting() (requests, tokens int64) { return b.waiting.Load(), b.queued.Load() }

// SetGauges records what the engine reported; At and Sent are filled in by the caller of Pool.Clock and Requests.
func (b *Backend) SetGauges(g Gauges) { b.gauges.Store(&g) }

// Gauges returns what the engine reported last, and whether it ever did.
func (b *Backend) Gauges() (Gauges, bool) {
	if g := b.gauges.Load(); g != nil {
		return *g, true
	}
	return Gauges{}, false
}

// Speed returns what is believed of the backend's speed.
func (b *Backend) Speed() Speed {
	s, _, _, _ := b.learned.read(0, b.learned.pool.read())
	return s
}

// Drift returns recent predicted and observed times to the first byte, as weighted sums of seconds: their ratio is 1 where the
// predictions hold. Both are 0 before the first prediction.
func (b *Backend) Drift() (predicted, observed float64) {
	b.learned.mu.Lock()
	defer b.learned.mu.Unlock()
	return b.learned.predicted, b.learned.observed
}

func (b *Backend) weight() float64 {
	if w := b.spec.Load().Weight; w > 0 {
		return float64(w)
	}
	return 1
}

func (b *Backend) tokens() int64 {
	l7, kernel := b.Load()
	return l7 + kernel
}

// idle reports whether nothing is charged to the instance any more, so that its slot can serve another.
func (b *Backend) idle() bool { return b.requests.Load() == 0 && b.slot.KernelFlows.Load() <= 0 }
