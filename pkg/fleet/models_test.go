// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"slices"
	"testing"
	"time"
)

func named(names ...string) []Model {
	list := []Model{}
	for _, n := range names {
		list = append(list, Model{Name: n})
	}
	return list
}

// A model that some list goes to those that list it; what all list, or nobody, goes to all.
func TestModelsGoWhereTheyAreListed(t *testing.T) {
	w := newEjectWorld(t)
	lists := func(model string, want ...string) {
		t.Helper()
		w.seen = nil
		tk, err := w.f.Pool("p").Take(&Query{Model: model})
		if err == nil {
			tk.Release()
		} else if !errors.Is(err, ErrNoBackend) {
			t.Fatal(err)
		}
		if !slices.Equal(w.seen, want) {
			t.Errorf("%q: candidates %v, want %v", model, w.seen, want)
		}
	}
	lists("lora", "b0", "b1", "b2")
	w.f.SetModels(w.b[0], named("base"))
	w.f.SetModels(w.b[1], named("base", "lora"))
	lists("", "b0", "b1", "b2")
	lists("base", "b0", "b1") // of b2 nothing is known
	lists("lora", "b1")
	lists("unheard of", "b0", "b1", "b2")
	w.b[1].SetHealth(HealthDown)
	lists("lora", "b2")
	w.f.SetModels(w.b[2], named("base"))
	lists("lora") // nobody who is up can
	lists("base", "b0", "b2")
	w.b[1].SetHealth(HealthUp)
	w.b[1].Eject(time.Minute)
	lists("lora", "b1") // the only one that can, ejected
	lists("base", "b0", "b2")
	w.now += time.Minute
	if tk := w.take(Query{Model: "lora", MayProbe: true}); !tk.Probe() {
		t.Error("no probe by its own model")
	}
	w.b[1].Restore()
	w.f.SetModels(w.b[2], named("base", "lora"))
	lists("lora", "b1", "b2")
	s := specs(2) // b2 leaves
	s[0].Chooser = w.f.Pool("p").chooser
	if err := w.f.Apply(s); err != nil {
		t.Fatal(err)
	}
	lists("lora", "b1")
	w.f.SetModels(w.b[1], nil)
	lists("lora", "b0", "b1")
}

// The adapters of a pool's models are the pool's, and nobody else's names.
func TestAdaptersBelongToTheirModelsPool(t *testing.T) {
	f := New(Options{})
	s := []PoolSpec{
		{Name: "one", Models: []string{"base"}, Chooser: fewest{}, Backends: []BackendSpec{{Name: "a", URL: mustURL("http://10.0.0.1")}}},
		{Name: "two", Models: []string{"other"}, Chooser: fewest{}, Backends: []BackendSpec{{Name: "b", URL: mustURL("http://10.0.0.2")}}},
	}
	if err := f.Apply(s); err != nil {
		t.Fatal(err)
	}
	f.SetModels(f.Backend("a"), []Model{{Name: "base"}, {Name: "lora", Parent: "base"}, {Name: "other", Parent: "base"}, {Name: "hidden"},
		{Name: "foreign", Parent: "other"}})
	check := func(want map[string]string) {
		t.Helper()
		for model, pool := range want {
			got := ""
			if p := f.PoolFor(model); p != nil {
				got = p.Name()
			}
			if got != pool {
				t.Errorf("%s goes to %q, want %q", model, got, pool)
			}
		}
	}
	check(map[string]string{"base": "one", "lora": "one", "other": "two", "hidden": "", "foreign": "", "x": ""})
	s[0].Models = []string{"base", "hidden"}
	if err := f.Apply(s); err != nil {
		t.Fatal(err)
	}
	check(map[string]string{"lora": "one", "hidden": "one"})
	f.SetModels(f.Backend("a"), nil)
	check(map[string]string{"base": "one", "lora": ""})
}
