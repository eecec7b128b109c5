// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bytes"
	"slices"
)

// Model is one that a backend lists.
type Model struct {
	Name   string
	Parent string // of an adapter: the model that it belongs to
	Entry  []byte // the backend's own words of it, a JSON object
}

// SetModels records what the backend lists; nil: that is not known. A request whose model some backend of its pool lists goes
// to those that list it. It must not be called from within ApplyAfter's prepare.
func (f *Fleet) SetModels(b *Backend, list []Model) {
	same := func(a, b Model) bool {
		return a.Name == b.Name && a.Parent == b.Parent && bytes.Equal(a.Entry, b.Entry)
	}
	if old, known := b.Models(); known == (list != nil) && slices.EqualFunc(old, list, same) {
		return
	}
	if list == nil {
		b.models.Store(nil)
	} else {
		b.models.Store(&list)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if p := b.in.Load(); p != nil {
		p.mu.Lock()
		p.relist()
		p.mu.Unlock()
	}
	f.adopt(f.view.Load())
}

// Models returns what the backend lists, and whether that is known. The caller must not change it.
func (b *Backend) Models() (list []Model, known bool) {
	if m := b.models.Load(); m != nil {
		return *m, true
	}
	return nil, false
}

// adopt finds the adapters of the pools' models: a pool that lists a model serves what its backends have made of it too.
func (f *Fleet) adopt(v *view) {
	adapters := map[string]*Pool{}
	for _, p := range v.pools {
		for _, b := range p.Backends() {
			list, _ := b.Models()
			for _, m := range list {
				if m.Parent != "" && v.byModel[m.Parent] == p && v.byModel[m.Name] == nil && adapters[m.Name] == nil {
					adapters[m.Name] = p
				}
			}
		}
	}
	f.adapters.Store(&adapters)
}

// set is a set of positions in Pool.backends.
type set []uint64

func (s set) add(i int)      { s[i/64] |= 1 << (i % 64) }
func (s set) has(i int) bool { return s[i/64]&(1<<(i%64)) != 0 }

// relist notes who lists what, but for what all list.
func (p *Pool) relist() {
	n := len(p.backends)
	listed, count := map[string]set{}, map[string]int{}
	p.unlisted = make(set, (n+63)/64)
	for i, b := range p.backends {
		list, known := b.Models()
		if !known {
			p.unlisted.add(i)
		}
		for _, m := range list {
			if listed[m.Name] == nil {
				listed[m.Name] = make(set, (n+63)/64)
			}
			if !listed[m.Name].has(i) {
				listed[m.Name].add(i)
				count[m.Name]++
			}
		}
	}
	for name, k := range count {
		if k == n {
			delete(listed, name)
		}
	}
	p.listed = listed
}

// serving returns the backends that may serve the model: those that list it; while all of them are out, those of which is not
// known what they list. nil: all may, since nobody lists it or all do. last: all that list it are ejected, and used nevertheless.
func (p *Pool) serving(model string) (only set, last bool) {
	only = p.listed[model]
	if only == nil || model == "" {
		return nil, false
	}
	sound := false
	for i, b := range p.backends {
		if only.has(i) {
			if b.Eligible() {
				return only, false
			}
			sound = sound || b.sound()
		}
	}
	if sound {
		return only, true
	}
	return p.unlisted, false
}
