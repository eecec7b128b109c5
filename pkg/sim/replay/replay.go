// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"net/url"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/policy"
	"github.com/shunt-lb/shunt/pkg/prefix"
	"github.com/shunt-lb/shunt/pkg/session"
	"github.com/shunt-lb/shunt/pkg/sim"
)

// Options of Run. Zero values mean the defaults named.
type Options struct {
	Policy   string        // a policy of shunt, or a rule of Rules
	Backends int           // default 4
	Profiles []sim.Profile // the servers', in turn; default: sim.DefaultProfile
	KVTokens int           // of each server's cache; default: the profile's
	Speedup  float64       // the trace's time passes that many times as fast; default: what makes Load
	Load     float64       // share of the fleet's capacity without any cache that the trace asks for; default 0.85
	Scrape   time.Duration // how often shunt reads the engines' gauges; default 1 s. 0 < 0 = never
	Overhead time.Duration // from a request's arrival until the engine's scheduler sees it; default 20 ms
	Bound    float64       // of policies that have one
	Seed     uint64
	Faults   []Fault
	// Balancers is how many routers share the fleet, each blind to the others' requests; default 1.
	Balancers int
}

// Fault happens to a server in the middle of a run.
type Fault struct {
	At      time.Duration
	Backend int     // from 0
	Down    bool    // it crashes, and is found out a second later
	Up      bool    // it serves (again)
	Slow    float64 // its steps take that many times as long
}

// Outcome is what became of one request.
type Outcome struct {
	Request *Request
	Arrival time.Duration
	Backend int
	TTFT    time.Duration
	PerTok  time.Duration // mean time per further token of the answer
	Latency time.Duration // to the last token
	Cached  int           // prompt tokens found in the cache
	Failed  bool          // refused, or lost in mid-answer
}

// Run is a trace under one policy.
type Run struct {
	Outcomes []Outcome
	Busy     []time.Duration // per server, computing
	Computed []int           // per server, prompt tokens computed
	Preempts int64
	Span     time.Duration
	Speedup  float64
	Peak     float64 // mean over time of the busiest server's in-flight tokens over the mean server's
	// Predicted and Observed are sums of the times to the first token, as the ledger predicted them and as they came.
	Predicted, Observed float64
}

type kind uint8

const (
	arrive kind = iota
	step
	scrape
	fault
	detect
)

type event struct {
	at   time.Duration
	seq  uint64
	kind kind
	n    int
	try  *try
}

type queue []event

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].seq < q[j].seq
}
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(x any)   { *q = append(*q, x.(event)) }
func (q *queue) Pop() any {
	old := *q
	e := old[len(old)-1]
	*q = old[:len(old)-1]
	return e
}

// try is a request on its way.
type try struct {
	index  int
	out    *Outcome
	router *router
	ticket *fleet.Ticket
	query  fleet.Query
	seq    *sim.Seq
	blocks []sim.BlockHash
}

// server is one engine and its place in time.
type server struct {
	engine  *sim.Engine
	version int // of the step that is awaited
	step    sim.Step
	pending bool
	dead    bool
	gauges  sim.Stats // as they were at the last scrape
}

// router is one balancer.
type router struct {
	pool    *fleet.Pool
	members []*fleet.Backend
	index   *prefix.Index
	tracker *session.Tracker
	rule    rule
}

type world struct {
	o       Options
	t       *Trace
	now     time.Duration
	events  queue
	seq     uint64
	servers []server
	routers []*router
	next    map[uint64][]int // closed loop: later turns by session
	eblock  int
	run     *Run
	open    int // requests that have not ended
	rand    *rand.Rand

	peakSum, peakTime float64
	peakAt            time.Duration
}

// Simulate runs the trace under one policy.
func Simulate(t *Trace, o Options) (*Run, error) {
	if o.Backends <= 0 {
		o.Backends = 4
	}
	if len(o.Profiles) == 0 {
		p, err := sim.LookupProfile(sim.DefaultProfile)
		if err != nil {
			return nil, err
		}
		o.Profiles = []sim.Profile{p}
	}
	if o.Scrape == 0 {
		o.Scrape = time.Second
	}
	if o.Overhead == 0 {
		o.Overhead = 20 * time.Millisecond
	}
	if o.Load <= 0 {
		o.Load = 0.85
	}
	if o.Speedup <= 0 {
		o.Speedup = o.Load * float64(o.Backends) / busy(t, o.Profiles, o.Backends)
	}
	o.Balancers = max(o.Balancers, 1)
	w := &world{o: o, t: t, next: map[uint64][]int{}, rand: rand.New(rand.NewPCG(o.Seed, 7))}
	w.run = &Run{Outcomes: make([]Outcome, len(t.Requests)), Speedup: o.Speedup,
		Busy: make([]time.Duration, o.Backends), Computed: make([]int, o.Backends)}
	w.eblock = 64
	if t.BlockTokens > 64 && t.BlockTokens%128 == 0 {
		w.eblock = 128
	}
	if t.BlockTokens > 0 && t.BlockTokens < 64 {
		w.eblock = t.BlockTokens
	}
	for i := range o.Backends {
		e, err := sim.NewEngine(sim.Options{Profile: o.Profiles[i%len(o.Profiles)], KVTokens: o.KVTokens, BlockTokens: w.eblock, Overhead: o.Overhead})
		if err != nil {
			return nil, err
		}
		w.servers = append(w.servers, server{engine: e})
	}
	for range o.Balancers {
		r, err := w.newRouter()
		if err != nil {
			return nil, err
		}
		w.routers = append(w.routers, r)
	}
	w.begin()
	w.loop()
	return w.run, nil
}

// busy is how many servers the trace keeps busy at its own pace when nothing is cached: prefill, and decoding in batches of 64.
func busy(t *Trace, profiles []sim.Profile, n int) float64 {
	const batch = 64
	var per float64
	for i := range n { // of the fleet's mean speed
		p := &profiles[i%len(profiles)]
		sum := 0.0
		for j := 0; j < len(t.Requests); j += max(len(t.Requests)/2000, 1) {
			r := &t.Requests[j]
			sum += p.Prefill(r.Prompt, 2048).Seconds() + p.Decode(batch, r.Prompt+r.Output/2).Seconds()/batch*float64(r.Output)
		}
		per += 1 / sum
	}
	per = float64(n) / per * float64(max(len(t.Requests)/2000, 1))
	return per / max(t.Span().Seconds(), 1)
}

func (w *world) newRouter() (*router, error) {
	r := &router{}
	r.index = prefix.New(prefix.Options{Bytes: 1 << 30})
	clock := func() time.Duration { return w.now }
	f := fleet.New(fleet.Options{Index: r.index, Now: clock})
	var chooser fleet.Chooser
	if make, ok := rules[w.o.Policy]; ok {
		r.rule = make(w, r)
		chooser = r.rule
	} else {
		p, err := policy.New(w.o.Policy, policy.Params{Bound: w.o.Bound})
		if err != nil {
			return nil, fmt.Errorf("%w; rules of others: %v", err, Rules())
		}
		chooser = p
	}
	spec := fleet.PoolSpec{Name: "pool", Chooser: chooser}
	for i := range w.servers {
		u := &url.URL{Scheme: "http", Host: fmt.Sprintf("10.0.%d.%d:8000", i/250, i%250+1)}
		spec.Backends = append(spec.Backends, fleet.BackendSpec{Name: fmt.Sprintf("gpu-%d", i), URL: u})
	}
	if err := f.Apply([]fleet.PoolSpec{spec}); err != nil {
		return nil, err
	}
	r.pool = f.Pools()[0]
	r.pool.Seed(w.o.Seed)
	r.members = f.Backends()
	for _, b := range r.members {
		b.SetHealth(fleet.HealthUp)
	}
	if w.t.BlockTokens > 0 {
		for i, b := range r.members {
			r.index.Resize(b.ID(), w.servers[i].engine.KVBlocks()*w.eblock/w.t.BlockTokens)
		}
	}
	epoch := time.Unix(0, 0)
	r.tracker = session.NewTracker(session.TrackerOptions{Now: func() time.Time { return epoch.Add(w.now) }})
	return r, nil
}

func (w *world) at(at time.Duration, k kind, n int, t *try) {
	w.seq++
	heap.Push(&w.events, event{at, w.seq, k, n, t})
}

func (w *world) scaled(d time.Duration) time.Duration { return time.Duration(float64(d) / w.o.Speedup) }

func (w *world) begin() {
	for i := range w.t.Requests {
		r := &w.t.Requests[i]
		if w.t.Closed && r.Session != 0 && r.Turn > 0 {
			w.next[r.Session] = append(w.next[r.Session], i)
			continue
		}
		w.at(w.scaled(r.Arrival), arrive, i, nil)
	}
	w.open = len(w.t.Requests)
	if w.o.Scrape > 0 {
		w.at(0, scrape, 0, nil)
	}
	for i, f := range w.o.Faults {
		w.at(f.At, fault, i, nil)
		if f.Up && len(w.o.Faults) > 0 && i == 0 { // a server that is first heard of when it comes
			w.setHealth(f.Backend, fleet.HealthDown)
		}
	}
}

func (w *world) setHealth(n int, h fleet.Health) {
	for _, r := range w.routers {
		r.members[n].SetHealth(h)
		if h == fleet.HealthDown {
			r.index.Forget(r.members[n].ID())
		}
	}
}

func (w *world) loop() {
	for w.open > 0 && len(w.events) > 0 {
		e := heap.Pop(&w.events).(event)
		w.now = e.at
		switch e.kind {
		case arrive:
			w.arrival(e.n)
		case step:
			s := &w.servers[e.n]
			if int(e.seq) == s.version { // else it was overtaken
				w.finish(e.n)
			}
		case scrape:
			w.scrape()
			w.at(w.now+w.o.Scrape, scrape, 0, nil)
		case fault:
			w.fault(w.o.Faults[e.n])
		case detect:
			w.setHealth(e.n, fleet.HealthDown)
		}
	}
	w.run.Span = w.now
	for i := range w.servers {
		w.run.Preempts += w.servers[i].engine.Stats().Preemptions
	}
	for _, r := range w.routers {
		for _, b := range r.members {
			p, o := b.Drift()
			w.run.Predicted += p
			w.run.Observed += o
		}
	}
	if w.peakTime > 0 {
		w.run.Peak = w.peakSum / w.peakTime
	}
}

func (w *world) arrival(i int) {
	r := &w.t.Requests[i]
	o := &w.run.Outcomes[i]
	*o = Outcome{Request: r, Arrival: w.now, Backend: -1}
	t := &try{index: i, out: o, router: w.routers[w.rand.IntN(len(w.routers))]}
	per := max(w.t.BlockTokens/w.eblock, 1)
	t.blocks = make([]sim.BlockHash, 0, len(r.Blocks)*per)
	for _, b := range r.Blocks {
		for j := range per {
			t.blocks = append(t.blocks, sim.BlockHash(mix(b*64+uint64(j))))
		}
	}
	w.send(t)
}

// send picks a server and gives it the request.
func (w *world) send(t *try) {
	r := t.out.Request
	rt := t.router
	q := &t.query
	q.PromptTokens, q.OutputTokens = int64(r.Prompt), rt.pool.ExpectedOutput(0)
	q.Session, q.Streams = r.Session, true
	q.Blocks, q.BlockTokens = r.Blocks, float64(w.t.BlockTokens)
	q.Home = rt.tracker.Home(session.Key(r.Session))
	if n := rt.tracker.Output(session.Key(r.Session)); n > 0 {
		q.OutputTokens = (q.OutputTokens + n + 1) / 2
	}
	if rt.rule != nil {
		rt.rule.see(r, t.blocks)
	}
	w.observe()
	ticket, err := rt.pool.Take(q)
	if err != nil {
		w.end(t, true)
		return
	}
	t.ticket = ticket
	b := ticket.Backend()
	rt.tracker.Assign(session.Key(r.Session), b, policy.Spilled(ticket.Reason()))
	n := slices.Index(rt.members, b)
	t.out.Backend = n
	s := &w.servers[n]
	if s.dead { // the connection is refused: the next one
		q.Exclude = append(q.Exclude, b.ID())
		ticket.Release()
		w.send(t)
		return
	}
	t.seq, err = s.engine.Add(w.now, sim.Request{PromptTokens: r.Prompt, OutputTokens: r.Output, Blocks: t.blocks, Tag: t})
	if err != nil { // longer than the model's context: nobody could serve it
		w.end(t, true)
		return
	}
	w.kick(n)
}

// kick lets the engine begin a step if it waits for something to do.
func (w *world) kick(n int) {
	s := &w.servers[n]
	if s.dead || s.pending && !s.step.Idle {
		return
	}
	st, ok := s.engine.Begin(w.now)
	s.step, s.pending = st, ok
	if ok {
		w.at(st.End, step, n, nil)
		s.version = int(w.seq)
		if !st.Idle {
			w.run.Busy[n] += st.End - w.now
			w.run.Computed[n] += st.Prefill
		}
	}
}

func (w *world) finish(n int) {
	s := &w.servers[n]
	idle := s.step.Idle
	s.pending = false
	if !idle {
		for _, ev := range s.engine.Finish(w.now) {
			t := ev.Seq.Tag.(*try)
			if ev.First {
				t.out.TTFT = w.now - t.out.Arrival
				t.out.Cached = ev.Seq.Cached
				t.ticket.FirstByte()
			}
			if ev.Token {
				t.ticket.Decoded(1)
			}
			if ev.Done {
				w.observe()
				w.end(t, false)
			}
		}
	}
	w.kick(n)
}

// end completes a request and, in a closed loop, sets off the session's next turn.
func (w *world) end(t *try, failed bool) {
	r, o := t.out.Request, t.out
	o.Failed = failed
	o.Latency = w.now - o.Arrival
	if t.ticket != nil {
		t.ticket.Release()
	}
	if !failed {
		if r.Output > 1 {
			o.PerTok = (o.Latency - o.TTFT) / time.Duration(r.Output-1)
		}
		t.router.pool.ObserveOutput(int64(r.Output))
		t.router.tracker.Observe(session.Key(r.Session), int64(r.Prompt), int64(r.Output))
	}
	w.open--
	if turns := w.next[r.Session]; len(turns) > 0 {
		w.next[r.Session] = turns[1:]
		w.at(w.now+w.scaled(w.t.Requests[turns[0]].Think), arrive, turns[0], nil)
	}
}

func (w *world) scrape() {
	for i := range w.servers {
		s := &w.servers[i]
		if s.dead {
			continue
		}
		s.gauges = s.engine.Stats()
		for _, r := range w.routers {
			r.members[i].SetGauges(fleet.Gauges{Waiting: int64(s.gauges.Waiting), Running: int64(s.gauges.Running), KVUse: s.gauges.KVUsage,
				KVTokens: int64(s.engine.KVBlocks() * w.eblock), Sent: r.members[i].Requests(), At: w.now})
		}
	}
}

func (w *world) fault(f Fault) {
	s := &w.servers[f.Backend]
	if f.Slow > 0 {
		s.engine.Slow(f.Slow)
	}
	switch {
	case f.Down:
		s.dead, s.pending, s.version = true, false, 0
		for _, seq := range s.engine.Crash() {
			t := seq.Tag.(*try)
			if t.seq != seq {
				continue
			}
			if seq.Generated > 0 {
				w.end(t, true)
				continue
			}
			t.query.Exclude = append(t.query.Exclude, t.ticket.Backend().ID())
			t.ticket.Release()
			w.send(t)
		}
		w.at(w.now+time.Second, detect, f.Backend, nil)
	case f.Up:
		s.dead = false
		w.setHealth(f.Backend, fleet.HealthUp)
	}
}

// observe enters the imbalance of the time since the last call.
func (w *world) observe() {
	d := (w.now - w.peakAt).Seconds()
	if d <= 0 {
		return
	}
	w.peakAt = w.now
	var sum, top int64
	for i := range w.servers {
		var n int64
		for _, r := range w.routers {
			l7, _ := r.members[i].Load()
			n += l7
		}
		sum, top = sum+n, max(top, n)
	}
	if sum > 0 {
		w.peakSum += d * float64(top) * float64(len(w.servers)) / float64(sum)
		w.peakTime += d
	}
}

// mix is splitmix64's finaliser.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}
