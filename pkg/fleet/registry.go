// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Known is what the kernel's maps still hold of a backend from before a restart.
type Known struct {
	ID         ID
	Generation uint32
	Steer      netip.AddrPort // where its flows go
}

// Options of New.
type Options struct {
	Table Table            // zero: memory of the heap
	Known map[string]Known // by backend name
	Index Index            // which backend holds which prompts; nil: nobody keeps it
	// Now is the time since any fixed moment and never goes back; nil: the machine's monotonic clock.
	Now func() time.Duration
}

// Fleet is all pools and backends, and who has which slot of the table.
type Fleet struct {
	table Table
	index Index
	now   func() time.Duration

	mu          sync.Mutex // Apply
	known       map[string]Known
	generations [MaxBackends]uint32
	owner       [MaxBackends]*Backend // also of those that left, until they are idle

	view     atomic.Pointer[view]
	adapters atomic.Pointer[map[string]*Pool] // by name, of those that backends list
}

type view struct {
	pools    []*Pool
	byName   map[string]*Pool
	byModel  map[string]*Pool
	any      *Pool // the only pool without a list of models
	backends []*Backend
	named    map[string]*Backend
}

// New returns an empty fleet.
func New(o Options) *Fleet {
	f := &Fleet{table: o.Table, known: maps.Clone(o.Known), index: o.Index, now: o.Now}
	if f.now == nil {
		start := time.Now()
		f.now = func() time.Duration { return time.Since(start) }
	}
	if f.table.Slots == nil {
		f.table = NewHeapTable()
	}
	for _, k := range o.Known {
		if k.ID > 0 && k.ID < MaxBackends {
			f.generations[k.ID] = k.Generation
		}
	}
	f.view.Store(&view{})
	f.adapters.Store(&map[string]*Pool{})
	return f
}

// Clock returns the fleet's time, since a fixed moment.
func (f *Fleet) Clock() time.Duration { return f.now() }

// Pools returns all pools in configured order.
func (f *Fleet) Pools() []*Pool { return f.view.Load().pools }

// Pool returns the pool with this name, or nil.
func (f *Fleet) Pool(name string) *Pool { return f.view.Load().byName[name] }

// Backends returns all backends in configured order.
func (f *Fleet) Backends() []*Backend { return f.view.Load().backends }

// Backend returns the backend with this name, or nil.
func (f *Fleet) Backend(name string) *Backend { return f.view.Load().named[name] }

// PoolFor returns the pool that serves the model: the one that lists it, else the one whose backends list it as an adapter of
// a model of the pool, else the only pool without a list, else nil.
func (f *Fleet) PoolFor(model string) *Pool {
	v := f.view.Load()
	if p := v.byModel[model]; p != nil {
		return p
	}
	if p := (*f.adapters.Load())[model]; p != nil {
		return p
	}
	return v.any
}

// UpdateLimits sets every backend's bound for the kernel from the loads of this moment: factor is the bounded-load
// factor (1.25), slack in tokens. It is meant to be called about ten times a second.
func (f *Fleet) UpdateLimits(factor float64, slack int64) {
	for _, p := range f.Pools() {
		p.updateLimits(factor, slack)
	}
}

// Apply makes the fleet look as the specs say. A backend whose pool, name and URL stay keeps its instance, and with it
// its tickets, health and operator's state; one that is missing leaves, and its open requests go on. One that moved is
// a new instance, under the same operator's state. On an error nothing has changed.
func (f *Fleet) Apply(specs []PoolSpec) error { return f.ApplyAfter(specs, nil) }

// ApplyAfter is Apply with a step before the change takes effect, while the former fleet still serves: prepare gets the
// new instances, to check them.
func (f *Fleet) ApplyAfter(specs []PoolSpec, prepare func(fresh []*Backend)) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := validate(specs); err != nil {
		return err
	}
	old := f.view.Load()
	v := &view{byName: map[string]*Pool{}, byModel: map[string]*Pool{}, named: map[string]*Backend{}}
	members := make([][]*Backend, len(specs))
	var fresh []*Backend
	for i, ps := range specs {
		for _, bs := range ps.Backends {
			b := old.named[bs.Name]
			if b == nil || b.pool != ps.Name || b.URL().String() != bs.URL.String() || b.Steer() != bs.Steer {
				var err error
				if b, err = f.admit(ps.Name, bs); err != nil {
					for _, b := range fresh {
						f.owner[b.id] = nil
					}
					return err
				}
				fresh = append(fresh, b)
				if was := old.named[bs.Name]; was != nil {
					b.SetAdmin(was.Admin())
				}
			}
			members[i] = append(members[i], b)
			v.backends = append(v.backends, b)
			v.named[bs.Name] = b
		}
	}

	if prepare != nil && len(fresh) > 0 {
		prepare(fresh)
	}

	// From here nothing can fail.
	for _, b := range fresh {
		delete(f.known, b.Name())
	}
	unlisted := 0
	for i, ps := range specs {
		p := old.byName[ps.Name]
		if p == nil {
			p = newPool(ps.Name, f.now, f.index)
		}
		p.mu.Lock()
		for _, b := range members[i] {
			b.learned.teach(&p.lines)
			b.in.Store(p)
			p.lastUp.Store(max(p.lastUp.Load(), b.since.Load()))
		}
		p.models, p.chooser, p.backends = slices.Clone(ps.Models), ps.Chooser, members[i]
		p.panicShare, p.slowStart, p.weighted = ps.Panic, ps.SlowStart, ps.Weighted
		for j := range ps.Backends {
			spec := ps.Backends[j]
			members[i][j].spec.Store(&spec)
		}
		p.review()
		p.relist()
		p.mu.Unlock()
		v.pools = append(v.pools, p)
		v.byName[ps.Name] = p
		for _, m := range ps.Models {
			v.byModel[m] = p
		}
		if len(ps.Models) == 0 {
			unlisted++
			v.any = p
		}
	}
	if unlisted > 1 {
		v.any = nil
	}
	f.view.Store(v)
	f.adopt(v)
	for _, b := range old.backends {
		if v.named[b.Name()] != b {
			close(b.gone)
			b.slot.Limit.Store(0)
			if f.index != nil {
				f.index.Forget(b.id)
			}
		}
	}
	for _, p := range old.pools {
		if v.byName[p.name] == nil {
			p.mu.Lock()
			p.backends = nil
			p.mu.Unlock()
		}
	}
	return nil
}

func validate(specs []PoolSpec) error {
	pools, names, models := map[string]bool{}, map[string]bool{}, map[string]string{}
	for _, ps := range specs {
		if pools[ps.Name] {
			return fmt.Errorf("apply pools: pool %q is there twice", ps.Name)
		}
		pools[ps.Name] = true
		if ps.Chooser == nil {
			return fmt.Errorf("apply pools: pool %q has no policy", ps.Name)
		}
		for _, m := range ps.Models {
			if p, ok := models[m]; ok {
				return fmt.Errorf("apply pools: model %q is in the pools %q and %q", m, p, ps.Name)
			}
			models[m] = ps.Name
		}
		for _, b := range ps.Backends {
			switch {
			case b.URL == nil:
				return fmt.Errorf("apply pools: backend %q has no URL", b.Name)
			case b.Name == "" || len(b.Name) > 31:
				return fmt.Errorf("apply pools: backend name %q must have 1 to 31 bytes", b.Name)
			case names[b.Name]:
				return fmt.Errorf("apply pools: backend %q is there twice", b.Name)
			}
			names[b.Name] = true
		}
	}
	if len(names) >= MaxBackends {
		return fmt.Errorf("apply pools: %d backends, at most %d", len(names), MaxBackends-1)
	}
	return nil
}

var errNoSlot = errors.New("every slot of the weight table is in use; wait until open flows of removed backends end")

// admit gives a new instance its slot: the one that the kernel knows under this name, if its flows go where the
// backend is; else one that nothing is charged to.
func (f *Fleet) admit(pool string, spec BackendSpec) (*Backend, error) {
	k, known := f.known[spec.Name]
	known = known && k.ID > 0 && k.ID < MaxBackends && f.owner[k.ID] == nil
	if known && (k.Steer == spec.Steer || f.table.Slots[k.ID].KernelFlows.Load() <= 0) {
		b := f.newBackend(k.ID, pool, spec)
		if k.Steer == spec.Steer && k.Generation != 0 {
			b.generation, f.generations[k.ID] = k.Generation, k.Generation
		}
		return b, nil
	}
	reserved := map[ID]bool{}
	for _, k := range f.known { // with its own slot if flows there go to another address
		reserved[k.ID] = true
	}
	for pass := range 2 {
		for id := ID(1); id < MaxBackends; id++ {
			if f.table.Slots[id].KernelFlows.Load() > 0 || f.owner[id] != nil && (!f.owner[id].Gone() || !f.owner[id].idle()) {
				continue
			}
			// Names that the kernel still knows may come back with the next reload: their slots go last.
			if pass == 0 && (reserved[id] || f.owner[id] != nil) {
				continue
			}
			f.table.Slots[id].L7Tokens.Store(0)
			f.table.Slots[id].Limit.Store(0)
			f.table.Slots[id].KernelTokens.Store(0)
			f.table.Slots[id].HalfOpen.Store(0)
			f.table.Admin[id].State.Store(uint32(AdminNone))
			return f.newBackend(id, pool, spec), nil
		}
	}
	return nil, fmt.Errorf("add backend %q: %w", spec.Name, errNoSlot)
}

func (f *Fleet) newBackend(id ID, pool string, spec BackendSpec) *Backend {
	f.generations[id]++
	if f.generations[id] == 0 {
		f.generations[id] = 1
	}
	b := &Backend{id: id, pool: pool, generation: f.generations[id], slot: &f.table.Slots[id], admin: &f.table.Admin[id],
		now: f.now, gone: make(chan struct{})}
	b.spec.Store(&spec)
	f.owner[id] = b
	return b
}
