// SPDX-License-Identifier: Apache-2.0

package session

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

// Defaults of TrackerOptions.
const (
	// DefaultTrackedSessions bounds the sessions that a Tracker remembers: about 12 MB when full.
	DefaultTrackedSessions = 1 << 17
	// DefaultTrackerIdle outlasts the pauses of a human conversation. A home that has evicted the prefix by then costs
	// no more than another backend would, since the bound still holds.
	DefaultTrackerIdle = 30 * time.Minute
)

const (
	trackerShards = 32
	// outputWindow: each answer counts 1/outputWindow in a session's mean output.
	outputWindow = 4
	// sweepStep is how many idle sessions each call retires, so that memory is reused without a goroutine.
	sweepStep = 2
)

// TrackerOptions configure a Tracker. Zero values mean the defaults.
type TrackerOptions struct {
	Max  int           // sessions remembered; the least recently used go first
	Idle time.Duration // a session unused for longer is forgotten
	Now  func() time.Time
}

// Tracker remembers the home of each session and how many tokens its next turn is likely to bring. It is bounded, holds
// no pointers that the garbage collector would follow, and starts no goroutine. Methods are safe for concurrent use.
type Tracker struct {
	idle   time.Duration
	start  time.Time
	clock  func() time.Time
	shards [trackerShards]trackerShard
	epochs [fleet.MaxBackends]atomic.Uint32 // bumped by Forget: homes of an older epoch are void
}

type trackerShard struct {
	mu    sync.Mutex
	max   int
	index map[Key]int32
	list  []tracked // a slab: index 0 is the sentinel of the list by last use
	free  int32     // list of unused entries, by next; 0 = none
}

type tracked struct {
	key        Key
	last       time.Duration // since the tracker's start
	context    int64         // tokens that the next turn will send again: the last prompt and its answer
	output     float32
	home       fleet.ID
	epoch      uint32
	prev, next int32
}

// NewTracker returns an empty tracker.
func NewTracker(o TrackerOptions) *Tracker {
	if o.Max <= 0 {
		o.Max = DefaultTrackedSessions
	}
	if o.Idle <= 0 {
		o.Idle = DefaultTrackerIdle
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	t := &Tracker{idle: o.Idle, start: o.Now(), clock: o.Now}
	for i := range t.shards {
		s := &t.shards[i]
		s.max = max((o.Max+trackerShards-1)/trackerShards, 1)
		s.index = map[Key]int32{}
		s.list = make([]tracked, 1)
	}
	return t
}

// Home returns the backend that holds the session, or 0: not known, idle for too long, or its home was forgotten.
func (t *Tracker) Home(k Key) fleet.ID {
	if k == 0 {
		return 0
	}
	now := t.now()
	s := t.shard(k)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.use(k, now, t.idle)
	if e == nil || e.home == 0 || e.epoch != t.epochs[e.home].Load() {
		return 0
	}
	return e.home
}

// Assign records that a request of the session went to b, and makes b its home unless the request was spilled. It is
// called when the backend is picked, so that siblings that arrive meanwhile find the home. A backend that has left the
// fleet becomes nobody's home.
func (t *Tracker) Assign(k Key, b *fleet.Backend, spilled bool) {
	if k == 0 || b == nil || int(b.ID()) >= len(t.epochs) {
		return
	}
	// In this order: if b leaves after the second line, Forget comes after the first and voids what is written here.
	epoch := t.epochs[b.ID()].Load()
	gone := b.Gone()
	now := t.now()
	s := t.shard(k)
	s.mu.Lock()
	defer s.mu.Unlock()
	if spilled || gone {
		s.use(k, now, t.idle)
		return
	}
	e := s.add(k, now, t.idle)
	e.home, e.epoch = b.ID(), epoch
}

// Observe enters the sizes of a whole turn, in tokens.
func (t *Tracker) Observe(k Key, promptTokens, outputTokens int64) {
	if k == 0 {
		return
	}
	promptTokens, outputTokens = max(promptTokens, 0), max(outputTokens, 0)
	now := t.now()
	s := t.shard(k)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.add(k, now, t.idle)
	if e.context == 0 {
		e.output = float32(outputTokens)
	} else {
		e.output += (float32(outputTokens) - e.output) / outputWindow
	}
	e.context = promptTokens + outputTokens
}

// Expected returns the tokens that the session's next turn is likely to bring: the last prompt and answer, which it
// sends again, and an answer of the session's mean length. 0 means that no turn was observed.
func (t *Tracker) Expected(k Key) int64 {
	context, output := t.lengths(k)
	return context + output
}

// Output returns the mean length of the session's recent answers in tokens, 0 if none was observed.
func (t *Tracker) Output(k Key) int64 {
	_, output := t.lengths(k)
	return output
}

// lengths returns what the next turn will send again and the mean answer, both 0 for a session that is not known.
func (t *Tracker) lengths(k Key) (context, output int64) {
	if k == 0 {
		return 0, 0
	}
	now := t.now()
	s := t.shard(k)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.use(k, now, t.idle)
	if e == nil {
		return 0, 0
	}
	return e.context, int64(e.output + 0.5)
}

// Forget makes the backend nobody's home: it has left the fleet, and its ID may pass to another. It costs the same
// however many sessions there are.
func (t *Tracker) Forget(id fleet.ID) {
	if int(id) < len(t.epochs) {
		t.epochs[id].Add(1)
	}
}

// Len returns how many sessions are remembered.
func (t *Tracker) Len() int {
	n := 0
	for i := range t.shards {
		s := &t.shards[i]
		s.mu.Lock()
		n += len(s.index)
		s.mu.Unlock()
	}
	return n
}

// shard spreads keys by their high bits, which the maps of the shards do not depend on; keys are hashes already.
func (t *Tracker) shard(k Key) *trackerShard { return &t.shards[uint64(k)>>58%trackerShards] }

// now is monotonic, so a step of the wall clock ages nobody.
func (t *Tracker) now() time.Duration { return t.clock().Sub(t.start) }

// use returns the session's entry, now the most recently used, or nil.
func (s *trackerShard) use(k Key, now, idle time.Duration) *tracked {
	s.sweep(now - idle)
	i, ok := s.index[k]
	if !ok {
		return nil
	}
	e := &s.list[i]
	if e.last <= now-idle {
		s.remove(i)
		return nil
	}
	s.unlink(i)
	s.pushFront(i)
	e.last = max(e.last, now)
	return e
}

// add returns the session's entry, which it makes if there is none.
func (s *trackerShard) add(k Key, now, idle time.Duration) *tracked {
	if e := s.use(k, now, idle); e != nil {
		return e
	}
	if len(s.index) >= s.max {
		s.remove(s.list[0].prev)
	}
	i := s.free
	if i != 0 {
		s.free = s.list[i].next
	} else {
		s.list = append(s.list, tracked{})
		i = int32(len(s.list) - 1)
	}
	s.list[i] = tracked{key: k, last: now}
	s.index[k] = i
	s.pushFront(i)
	return &s.list[i]
}

// sweep retires sessions last used at or before the given time, oldest first, some at a time.
func (s *trackerShard) sweep(before time.Duration) {
	for range sweepStep {
		i := s.list[0].prev
		if i == 0 || s.list[i].last > before {
			return
		}
		s.remove(i)
	}
}

func (s *trackerShard) remove(i int32) {
	s.unlink(i)
	delete(s.index, s.list[i].key)
	s.list[i] = tracked{next: s.free}
	s.free = i
}

func (s *trackerShard) pushFront(i int32) {
	first := s.list[0].next
	s.list[i].prev, s.list[i].next = 0, first
	s.list[first].prev = i
	s.list[0].next = i
}

func (s *trackerShard) unlink(i int32) {
	e := &s.list[i]
	s.list[e.prev].next = e.next
	s.list[e.next].prev = e.prev
}
