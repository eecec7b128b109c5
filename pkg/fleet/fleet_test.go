// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"net/url"
	"sync"
	"testing"

	"pgregory.net/rapid"
)

// fewest is the smallest honest policy: least tokens, ties to the first.
type fewest struct{}

func (fewest) Pick(_ *Query, c []Candidate) (int, Reason) {
	best := 0
	for i := range c {
		if c[i].Tokens < c[best].Tokens {
			best = i
		}
	}
	return best, "fewest"
}

type pickFunc func(*Query, []Candidate) (int, Reason)

func (f pickFunc) Pick(q *Query, c []Candidate) (int, Reason) { return f(q, c) }

func mustURL(s string) *url.URL {
	u, err := url.Parse(s)
	if err != nil {
		panic(err)
	}
	return u
}

func specs(n int) []PoolSpec {
	p := PoolSpec{Name: "p", Chooser: fewest{}}
	for i := range n {
		p.Backends = append(p.Backends, BackendSpec{Name: fmt.Sprintf("b%d", i), URL: mustURL(fmt.Sprintf("http://10.0.0.%d:8000", i+1))})
	}
	return []PoolSpec{p}
}

func newFleet(t testing.TB, n int) *Fleet {
	t.Helper()
	f := New(Options{})
	if err := f.Apply(specs(n)); err != nil {
		t.Fatal(err)
	}
	for _, b := range f.Backends() {
		b.SetHealth(HealthUp)
	}
	return f
}

func checkZero(t *testing.T, f *Fleet) {
	t.Helper()
	for i := range f.table.Slots {
		if n := f.table.Slots[i].L7Tokens.Load(); n != 0 {
			t.Errorf("slot %d: %d tokens left", i, n)
		}
	}
	for _, b := range f.Backends() {
		if n := b.Requests(); n != 0 {
			t.Errorf("%s: %d requests left", b.Name(), n)
		}
	}
}

func TestTicketGivesBackEachPartOnce(t *testing.T) {
	f := newFleet(t, 1)
	b := f.Backends()[0]
	steps := []struct {
		name string
		do   func(*Ticket)
		left int64
	}{
		{"first byte", (*Ticket).FirstByte, 20},
		{"first byte again", (*Ticket).FirstByte, 20},
		{"three tokens", func(t *Ticket) { t.Decoded(3) }, 17},
		{"nothing", func(t *Ticket) { t.Decoded(0); t.Decoded(-5) }, 17},
		{"more than expected", func(t *Ticket) { t.Decoded(100) }, 0},
		{"release", (*Ticket).Release, 0},
		{"release again", (*Ticket).Release, 0},
		{"late token", func(t *Ticket) { t.Decoded(4); t.FirstByte() }, 0},
	}
	tk, err := f.Pool("p").Take(&Query{PromptTokens: 100, OutputTokens: 20})
	if err != nil {
		t.Fatal(err)
	}
	if l7, _ := b.Load(); l7 != 120 || b.Requests() != 1 {
		t.Fatalf("taken: %d tokens, %d requests", l7, b.Requests())
	}
	for _, s := range steps {
		s.do(tk)
		if l7, _ := b.Load(); l7 != s.left {
			t.Errorf("%s: %d tokens left, want %d", s.name, l7, s.left)
		}
	}
	checkZero(t, f)
}

func TestTakeSeesEarlierTakes(t *testing.T) {
	f := newFleet(t, 4)
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			if _, err := f.Pool("p").Take(&Query{PromptTokens: 10}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, b := range f.Backends() {
		if b.Requests() != 16 {
			t.Errorf("%s has %d of 64 requests, want 16", b.Name(), b.Requests())
		}
	}
}

// Every ending, at random and at once, with a reload in between: all weights are 0 after it.
func TestStormReturnsEveryToken(t *testing.T) {
	f := newFleet(t, 3)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 7))
			for range 500 {
				func() {
					defer func() { recover() }()
					tk, err := f.Pool("p").Take(&Query{PromptTokens: r.Int64N(5000), OutputTokens: r.Int64N(500)})
					if err != nil {
						return
					}
					defer tk.Release()
					switch r.IntN(4) {
					case 0: // aborted before the first byte
					case 1:
						tk.FirstByte()
						tk.Decoded(r.Int64N(1000))
					case 2: // a watcher and the relay end it at the same time
						var w sync.WaitGroup
						w.Go(tk.Release)
						w.Go(func() { tk.Decoded(5) })
						w.Wait()
					case 3:
						panic("relay")
					}
				}()
			}
		})
	}
	for i := range 40 {
		s := specs(2 + i%2)
		if err := f.Apply(s); err != nil {
			t.Fatal(err)
		}
		for _, b := range f.Backends() {
			b.SetHealth(HealthUp)
		}
	}
	wg.Wait()
	checkZero(t, f)
}

func TestReturningBackendIsAnotherInstance(t *testing.T) {
	f := newFleet(t, 2)
	old := f.Backend("b1")
	tk, err := f.Pool("p").Take(&Query{PromptTokens: 50, Exclude: []ID{f.Backend("b0").ID()}})
	if err != nil || tk.Backend() != old {
		t.Fatal(tk, err)
	}
	for _, n := range []int{1, 2} {
		if err := f.Apply(specs(n)); err != nil {
			t.Fatal(err)
		}
	}
	now := f.Backend("b1")
	if now == old || now.ID() == old.ID() {
		t.Fatalf("new instance shares slot %d with one that has an open request", old.ID())
	}
	if !old.Gone() || now.Gone() {
		t.Fatal("gone: wrong instance")
	}
	tk.Release()
	if l7, _ := now.Load(); l7 != 0 || now.Requests() != 0 {
		t.Errorf("late release reached the new instance: %d tokens", l7)
	}
	checkZero(t, f)
}

func TestReloadKeepsInstances(t *testing.T) {
	f := newFleet(t, 3)
	before := f.Backends()
	before[1].SetAdmin(AdminDrain)
	tk, _ := f.Pool("p").Take(&Query{PromptTokens: 9})
	for range 100 {
		s := specs(3)
		s[0].Backends[2].Weight = 7
		if err := f.Apply(s); err != nil {
			t.Fatal(err)
		}
	}
	for i, b := range f.Backends() {
		if b != before[i] {
			t.Errorf("%s: instance changed", b.Name())
		}
	}
	if f.Backends()[1].Admin() != AdminDrain || f.Backends()[2].Spec().Weight != 7 {
		t.Error("state or setting lost")
	}
	if l7, _ := tk.Backend().Load(); l7 != 9 {
		t.Errorf("count lost: %d", l7)
	}
	tk.Release()
	checkZero(t, f)
}

func TestApplyRefusesAndChangesNothing(t *testing.T) {
	bad := map[string]func([]PoolSpec) []PoolSpec{
		"pool twice":    func(s []PoolSpec) []PoolSpec { return append(s, PoolSpec{Name: "p", Chooser: fewest{}}) },
		"backend twice": func(s []PoolSpec) []PoolSpec { s[0].Backends[1].Name = "b0"; return s },
		"no URL":        func(s []PoolSpec) []PoolSpec { s[0].Backends[0].URL = nil; return s },
		"long name":     func(s []PoolSpec) []PoolSpec { s[0].Backends[0].Name = string(make([]byte, 32)); return s },
		"no policy":     func(s []PoolSpec) []PoolSpec { s[0].Chooser = nil; return s },
		"model twice": func(s []PoolSpec) []PoolSpec {
			s[0].Models = []string{"m"}
			return append(s, PoolSpec{Name: "q", Models: []string{"m"}, Chooser: fewest{}})
		},
		"too many": func(s []PoolSpec) []PoolSpec { return specs(MaxBackends) },
	}
	for name, change := range bad {
		f := newFleet(t, 2)
		before := f.Backends()
		if err := f.Apply(change(specs(2))); err == nil {
			t.Errorf("%s: applied", name)
		}
		if after := f.Backends(); len(after) != 2 || after[0] != before[0] || after[1] != before[1] {
			t.Errorf("%s: fleet changed", name)
		}
	}
}

func TestOnlyEligibleBackendsAreCandidates(t *testing.T) {
	change := map[string]func(*Backend){
		"down":    func(b *Backend) { b.SetHealth(HealthDown) },
		"unknown": func(b *Backend) { b.SetHealth(HealthUnknown) },
		"drain":   func(b *Backend) { b.SetAdmin(AdminDrain) },
		"maint":   func(b *Backend) { b.SetAdmin(AdminMaint) },
		"invalid": func(b *Backend) { b.SetAdmin(77) },
	}
	for name, do := range change {
		f := newFleet(t, 2)
		do(f.Backends()[0])
		for range 10 {
			tk, err := f.Pool("p").Take(&Query{PromptTokens: 1})
			if err != nil || tk.Backend() != f.Backends()[1] {
				t.Fatalf("%s: chose %v, %v", name, tk, err)
			}
		}
		f.UpdateLimits(1.25, 4096)
		if f.Backends()[0].Limit() != 0 || f.Backends()[1].Limit() == 0 {
			t.Errorf("%s: limits %d, %d", name, f.Backends()[0].Limit(), f.Backends()[1].Limit())
		}
		do(f.Backends()[1])
		if _, err := f.Pool("p").Take(&Query{}); !errors.Is(err, ErrNoBackend) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestInflightLimit(t *testing.T) {
	f := New(Options{})
	s := specs(2)
	for i := range s[0].Backends {
		s[0].Backends[i].MaxInflightTokens = 100
	}
	if err := f.Apply(s); err != nil {
		t.Fatal(err)
	}
	for _, b := range f.Backends() {
		b.SetHealth(HealthUp)
	}
	p := f.Pool("p")
	big, err := p.Take(&Query{PromptTokens: 500}) // above the limit: an idle backend takes it
	if err != nil {
		t.Fatal(err)
	}
	small, err := p.Take(&Query{PromptTokens: 60})
	if err != nil || small.Backend() == big.Backend() {
		t.Fatal(small, err)
	}
	if _, err := p.Take(&Query{PromptTokens: 60}); !errors.Is(err, ErrOverloaded) {
		t.Fatalf("over every limit: %v", err)
	}
	if _, err := p.Take(&Query{PromptTokens: 40}); err != nil {
		t.Fatalf("fits exactly: %v", err)
	}
	f.UpdateLimits(1.25, 4096)
	if l := f.Backends()[0].Limit(); l != 100 {
		t.Errorf("kernel limit %d, want 100", l)
	}
}

func TestLocalOnlyPrefersThisHost(t *testing.T) {
	f := New(Options{})
	s := specs(3)
	s[0].Backends[2].Local = true
	if err := f.Apply(s); err != nil {
		t.Fatal(err)
	}
	for _, b := range f.Backends() {
		b.SetHealth(HealthUp)
	}
	for range 5 {
		tk, err := f.Pool("p").Take(&Query{PromptTokens: 10, LocalOnly: true})
		if err != nil || tk.Backend().Name() != "b2" {
			t.Fatal(tk.Backend().Name(), err)
		}
	}
	f.Backend("b2").SetHealth(HealthDown)
	if tk, err := f.Pool("p").Take(&Query{LocalOnly: true}); err != nil || tk.Backend().Name() == "b2" {
		t.Error("no local backend left: another must serve", err)
	}
}

func TestPoolFor(t *testing.T) {
	pool := func(name string, models ...string) PoolSpec {
		return PoolSpec{Name: name, Models: models, Chooser: fewest{}}
	}
	for _, c := range []struct {
		name  string
		specs []PoolSpec
		model string
		want  string
	}{
		{"listed", []PoolSpec{pool("a", "m1"), pool("b", "m2")}, "m2", "b"},
		{"unknown", []PoolSpec{pool("a", "m1"), pool("b", "m2")}, "m3", ""},
		{"only pool without a list", []PoolSpec{pool("a", "m1"), pool("b")}, "m3", "b"},
		{"two without a list", []PoolSpec{pool("a"), pool("b")}, "m3", ""},
		{"no model", []PoolSpec{pool("a")}, "", "a"},
	} {
		f := New(Options{})
		if err := f.Apply(c.specs); err != nil {
			t.Fatal(err)
		}
		got := ""
		if p := f.PoolFor(c.model); p != nil {
			got = p.Name()
		}
		if got != c.want {
			t.Errorf("%s: pool %q, want %q", c.name, got, c.want)
		}
	}
}

func TestRecoverSlots(t *testing.T) {
	here, there := netip.MustParseAddrPort("10.0.0.1:8000"), netip.MustParseAddrPort("10.0.0.99:8000")
	apply := func(flows int64, known Known) *Backend {
		table := NewHeapTable()
		table.Slots[known.ID].KernelFlows.Store(flows)
		table.Admin[known.ID].State.Store(uint32(AdminDrain))
		f := New(Options{Table: table, Known: map[string]Known{"b0": known}})
		s := specs(2)
		s[0].Backends[0].Steer = here
		if err := f.Apply(s); err != nil {
			t.Fatal(err)
		}
		if f.Backend("b1").ID() == f.Backend("b0").ID() {
			t.Fatal("slot given twice")
		}
		return f.Backend("b0")
	}
	if b := apply(3, Known{ID: 7, Generation: 4, Steer: here}); b.ID() != 7 || b.Generation() != 4 || b.Admin() != AdminDrain {
		t.Errorf("same address: id %d, generation %d, %v", b.ID(), b.Generation(), b.Admin())
	}
	if b := apply(0, Known{ID: 7, Generation: 4, Steer: there}); b.ID() != 7 || b.Generation() == 4 {
		t.Errorf("other address, no flows: id %d, generation %d", b.ID(), b.Generation())
	}
	if b := apply(3, Known{ID: 7, Generation: 4, Steer: there}); b.ID() == 7 {
		t.Error("other address: the slot has open flows and must not be given away")
	}
}

func TestLimits(t *testing.T) {
	f := newFleet(t, 2)
	f.UpdateLimits(1.25, 4096)
	if l := f.Backends()[0].Limit(); l != 4096 {
		t.Errorf("idle: limit %d, want the slack", l)
	}
	f.Backends()[0].NotePin(30_000)
	f.Backends()[0].NotePin(500)
	f.UpdateLimits(1.25, 4096)
	if l := f.Backends()[0].Limit(); l != 30_000 {
		t.Errorf("an idle backend's limit is %d: its session of 30,000 tokens could not be steered", l)
	}
	for range 10 * pinFade {
		f.UpdateLimits(1.25, 4096)
	}
	if l := f.Backends()[0].Limit(); l != 4096 {
		t.Errorf("limit %d long after the large session", l)
	}
	for range 20 { // 20 x 2,000 tokens, all on one backend
		if _, err := f.Pool("p").Take(&Query{PromptTokens: 2000, Exclude: []ID{f.Backends()[1].ID()}}); err != nil {
			t.Fatal(err)
		}
	}
	f.UpdateLimits(1.25, 4096)
	hot := f.Backends()[0]
	if l7, _ := hot.Load(); l7 <= hot.Limit() {
		t.Errorf("backend with all the load is within its limit: %d of %d", l7, hot.Limit())
	}
	if l := f.Backends()[1].Limit(); l < 25_000 {
		t.Errorf("idle backend's limit %d, want 1.25 times the mean and more", l)
	}
}

// Half-open flows count against the kernel's bound, not in the front end's choices.
func TestHalfOpenFlowsDoNotMoveRequests(t *testing.T) {
	f := newFleet(t, 2)
	f.table.Slots[f.Backends()[0].ID()].KernelTokens.Store(1000)
	f.table.Slots[f.Backends()[0].ID()].HalfOpen.Store(1000)
	f.table.Slots[f.Backends()[1].ID()].KernelTokens.Store(10)
	if tk, err := f.Pool("p").Take(&Query{}); err != nil || tk.Backend() != f.Backends()[0] {
		t.Error("a flow without a handshake drives requests away", err)
	}
}

func TestExpectedOutput(t *testing.T) {
	p := newFleet(t, 1).Pool("p")
	if n := p.ExpectedOutput(16); n != 16 {
		t.Errorf("max_tokens 16: expected %d", n)
	}
	for range 500 {
		p.ObserveOutput(1000)
	}
	if n := p.ExpectedOutput(0); n < 990 || n > 1000 {
		t.Errorf("after answers of 1000 tokens: expected %d", n)
	}
	// A few that run to their limit change little, a lasting change much.
	for i := range 3000 {
		n := int64(100 + i%50)
		if i%20 == 0 {
			n = 100_000
		}
		p.ObserveOutput(n)
	}
	if n := p.ExpectedOutput(0); n < 100 || n > 150 {
		t.Errorf("after answers of 100 to 150 tokens and some of 100,000: expected %d", n)
	}
	if n := p.ExpectedOutput(60); n != 60 {
		t.Errorf("with a limit of 60: expected %d", n)
	}
}

func TestLengthBucketsGrow(t *testing.T) {
	last := -1
	for v := int64(0); v < 1<<20; v += 1 + v/64 {
		b := lengthBucket(v)
		if b < last || b > last+1 {
			t.Fatalf("%d is in bucket %d after %d", v, b, last)
		}
		last = b
	}
	if b := lengthBucket(1 << 62); b != 32*lengthParts-1 {
		t.Errorf("a length beyond all is in bucket %d", b)
	}
}

func TestPolicyOutOfRangeIsAnError(t *testing.T) {
	f := New(Options{})
	s := specs(2)
	s[0].Chooser = pickFunc(func(*Query, []Candidate) (int, Reason) { return 5, "wrong" })
	if err := f.Apply(s); err != nil {
		t.Fatal(err)
	}
	for _, b := range f.Backends() {
		b.SetHealth(HealthUp)
	}
	if tk, err := f.Pool("p").Take(&Query{PromptTokens: 1}); err == nil {
		t.Errorf("took %v", tk)
	}
	checkZero(t, f)
}

// The ledger against a naive model: the sum of what open tickets still hold is the slot's word, after every step.
func TestLedgerModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		f := newFleet(t, 3)
		type open struct {
			t             *Ticket
			prompt, total int64
		}
		var tickets []open
		for range rapid.IntRange(1, 60).Draw(rt, "steps") {
			switch k := rapid.IntRange(0, 3).Draw(rt, "step"); {
			case k == 0 || len(tickets) == 0:
				p, o := rapid.Int64Range(0, 9999).Draw(rt, "prompt"), rapid.Int64Range(0, 999).Draw(rt, "output")
				tk, err := f.Pool("p").Take(&Query{PromptTokens: p, OutputTokens: o})
				if err != nil {
					rt.Fatal(err)
				}
				tickets = append(tickets, open{tk, p, p + o})
			default:
				o := &tickets[rapid.IntRange(0, len(tickets)-1).Draw(rt, "ticket")]
				switch k {
				case 1:
					o.t.FirstByte()
					o.total -= o.prompt
					o.prompt = 0
				case 2:
					n := rapid.Int64Range(0, 600).Draw(rt, "tokens")
					o.t.Decoded(n)
					if n > 0 && o.total > 0 {
						o.total -= o.prompt
						o.prompt = 0
						o.total -= min(n, o.total)
					}
				case 3:
					o.t.Release()
					o.total, o.prompt = 0, 0
				}
			}
			sum := map[ID]int64{}
			for _, o := range tickets {
				sum[o.t.Backend().ID()] += o.total
			}
			for _, b := range f.Backends() {
				if l7, _ := b.Load(); l7 != sum[b.ID()] {
					rt.Fatalf("%s: %d tokens, model %d", b.Name(), l7, sum[b.ID()])
				}
			}
		}
	})
}

func TestTakeAllocatesOnlyTheTicket(t *testing.T) {
	f := newFleet(t, 16)
	q := &Query{PromptTokens: 10}
	if n := testing.AllocsPerRun(200, func() {
		tk, err := f.Pool("p").Take(q)
		if err != nil {
			t.Fatal(err)
		}
		tk.Release()
	}); n > 1 {
		t.Errorf("%v allocations a request, want 1", n)
	}
}
