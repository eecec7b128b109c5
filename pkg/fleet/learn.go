// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"math"
	"sync"
	"time"
)

// Constants of what is learned. Prompts are timed as a queue's departures: a backend works prompts off one after the other, so a
// prompt's own time is from the later of its dispatch and the first byte before it to its own first byte.
const (
	// learnWindow is how many samples the past of a backend counts for, poolWindow those of its pool.
	learnWindow = 128
	poolWindow  = 512
	// learnTrust is the number of samples at which a backend counts as much as its pool, and a pool as much as DefaultSpeed.
	learnTrust = 8
	// mergeWithin: first bytes closer than this come from one step of the engine.
	mergeWithin = 2 * time.Millisecond
	// sampleBound: a sample beyond this multiple of what was predicted counts as that multiple, either way.
	sampleBound = 4
	// latencyFade is the time in which the peak of the first-byte times fades to a third.
	latencyFade = 10 * time.Second
	// inflowFade is the time in which what was sent fades to a third: the pauses of conversations, over which a cache must keep.
	inflowFade = 5 * time.Minute
)

// Speed is what a backend's requests have cost in time. Prefill of u tokens takes PrefillBase + u/PrefillRate seconds, or
// QueueBase + u/PrefillRate after another prompt; one token of an answer DecodeBase + DecodeSlope*c while requests with c tokens
// of context are in flight. A zero Speed is unknown.
type Speed struct {
	PrefillBase float32 // seconds per prompt, network and front part of the engine included
	QueueBase   float32 // seconds per prompt that waits behind another: what does not overlap
	PrefillRate float32 // tokens per second
	DecodeBase  float32 // seconds per token of an answer
	DecodeSlope float32 // seconds per token of an answer and token of context
}

// DefaultSpeed is assumed of a pool that has served nothing: an 8B model on one current GPU.
var DefaultSpeed = Speed{PrefillBase: 0.04, QueueBase: 0.01, PrefillRate: 10_000, DecodeBase: 0.015, DecodeSlope: 8e-8}

// line is a straight line through samples, the older ones fading.
type line struct {
	n, x, y, xx, xy float64
}

func (l *line) add(x, y float64) {
	const keep = 1 - 1.0/poolWindow
	l.n, l.x, l.y, l.xx, l.xy = l.n*keep+1, l.x*keep+x, l.y*keep+y, l.xx*keep+x*x, l.xy*keep+x*y
}

// fit returns base and slope of the line, neither below 0. prior counts as learnTrust samples spread around the mean.
func (l *line) fit(base, slope float64) (b, s float64) {
	if l.n < 1 {
		return base, slope
	}
	p := *l
	mean := l.x / l.n
	for _, x := range [...]float64{0.5 * mean, 1.5*mean + 1} {
		const w = learnTrust / 2
		y := base + slope*x
		p.n, p.x, p.y, p.xx, p.xy = p.n+w, p.x+w*x, p.y+w*y, p.xx+w*x*x, p.xy+w*x*y
	}
	d := p.n*p.xx - p.x*p.x
	if d <= 0 {
		return base, slope
	}
	s = (p.n*p.xy - p.x*p.y) / d
	b = (p.y - s*p.x) / p.n
	if b < 0 {
		b, s = 0, p.xy/p.xx
	}
	if s < 0 {
		b, s = p.y/p.n, 0
	}
	return b, s
}

// lines is what all backends of a pool have taught together. Each one's own speed is the pool's times a factor: the shape of the
// curve needs many samples, a factor few, and equal backends stay equal.
type lines struct {
	mu     sync.Mutex
	idle   line // seconds over tokens that were not cached, of prompts that found no other
	queued line // of those that waited
	decode line // seconds a token over tokens of context
	speed  Speed
}

func (p *lines) read() Speed {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.speed.PrefillRate <= 0 {
		return DefaultSpeed
	}
	return p.speed
}

// add enters a sample into one of the lines.
func (p *lines) add(l *line, x, y float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l.add(x, y)
	d := DefaultSpeed
	base, slope := p.decode.fit(float64(d.DecodeBase), float64(d.DecodeSlope))
	p.speed.DecodeBase, p.speed.DecodeSlope = float32(base), float32(slope)
	// One slope for both kinds of prompts, from how each kind spreads around its own mean.
	wi, ci, mi, ti := p.idle.spread(float64(d.PrefillBase), 1/float64(d.PrefillRate))
	wq, cq, mq, tq := p.queued.spread(float64(d.QueueBase), 1/float64(d.PrefillRate))
	slope = max((ci+cq)/(wi+wq), 1e-7)
	p.speed.PrefillRate = float32(1 / slope)
	p.speed.PrefillBase, p.speed.QueueBase = float32(max(ti-slope*mi, 0)), float32(max(tq-slope*mq, 0))
}

// spread returns the sums of squares of x and of products with y around the means, and the means, the prior included.
func (l *line) spread(base, slope float64) (xx, xy, x, y float64) {
	p := *l
	for _, u := range [...]float64{100, 4000} {
		const w = learnTrust / 2
		v := base + slope*u
		p.n, p.x, p.y, p.xx, p.xy = p.n+w, p.x+w*u, p.y+w*v, p.xx+w*u*u, p.xy+w*u*v
	}
	x, y = p.x/p.n, p.y/p.n
	return p.xx - p.n*x*x, p.xy - p.n*x*y, x, y
}

// factor is how much slower than its pool a backend is: what came over what the pool's line predicted.
type factor struct {
	n, predicted, observed float64
}

// add enters a sample and returns it within its bounds.
func (f *factor) add(predicted, observed float64) float64 {
	want := predicted * f.value()
	observed = min(max(observed, want/sampleBound), want*sampleBound)
	const keep = 1 - 1.0/learnWindow
	f.n, f.predicted, f.observed = f.n*keep+1, f.predicted*keep+predicted, f.observed*keep+observed
	return observed
}

func (f *factor) value() float64 {
	if f.n == 0 || f.predicted <= 0 {
		return 1
	}
	prior := learnTrust * f.predicted / f.n
	return (f.observed + prior) / (f.predicted + prior)
}

// learned is the running knowledge of one backend, guarded by mu.
type learned struct {
	mu        sync.Mutex
	pool      *lines
	prefill   factor
	decode    factor
	last      time.Duration
	openTok   float64 // sample that further first bytes of the same step join
	openTime  float64
	openQueue bool    // it waited behind another
	peak      float64 // of the time to the first byte, in seconds
	peakAt    time.Duration
	inflow    float64 // prompt tokens that were not cached, fading
	inflowAt  time.Duration
	predicted float64 // sums for the prediction error
	observed  float64
	// The tickets whose answer has not begun, in the order in which they were sent: what an engine works on is the oldest.
	head, tail *Ticket
}

// teach names the pool that the backend belongs to. An instance never changes it.
func (l *learned) teach(p *lines) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pool = p
}

func (l *learned) enqueue(t *Ticket) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if t.before = l.tail; t.before != nil {
		t.before.after = t
	} else {
		l.head = t
	}
	l.tail = t
	l.inflow, l.inflowAt = fade(l.inflow, t.taken-l.inflowAt, inflowFade)+float64(t.queued), t.taken
}

// fade is what is left of x after a time in which it fades to a third (1/e) every tau.
func fade(x float64, d, tau time.Duration) float64 {
	if x == 0 || d <= 0 {
		return x
	}
	return x * math.Exp(-d.Seconds()/tau.Seconds())
}

func (l *learned) dequeue(t *Ticket) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if t.before != nil {
		t.before.after = t.after
	} else {
		l.head = t.after
	}
	if t.after != nil {
		t.after.before = t.before
	} else {
		l.tail = t.before
	}
	t.before, t.after = nil, nil
}

// progress is how many queued tokens are likely to be computed by now: of the oldest prompt whose answer will begin as soon as
// they are all, and of those before it whose answers come whole, later. mu is held.
func (l *learned) progress(now time.Duration, s Speed) (done int64) {
	t := l.head
	if t == nil {
		return 0
	}
	left := int64(((now - max(t.taken, l.last)).Seconds() - float64(s.PrefillBase)) * float64(s.PrefillRate))
	for range maxProgress {
		if t == nil || left <= 0 {
			break
		}
		n := min(left, t.queued)
		done, left = done+n, left-n
		if t.streams {
			break
		}
		t = t.after
	}
	return done
}

// maxProgress bounds the prompts that progress looks at.
const maxProgress = 64

// firstByte enters that a prompt of which u tokens were not cached, sent at taken, had its first byte at now.
func (l *learned) firstByte(u float64, taken, now time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	wait := (now - taken).Seconds()
	peak := l.peakNow(now)
	if wait > peak {
		peak = wait
	} else {
		peak += (wait - peak) / 8
	}
	l.peak, l.peakAt = peak, now
	if l.openTime > 0 && now-l.last < mergeWithin && taken < l.last {
		l.openTok += u
		return
	}
	if l.openTime > 0 {
		s := l.pool.read()
		f := l.prefill.value()
		base, line := s.PrefillBase, &l.pool.idle
		if l.openQueue {
			base, line = s.QueueBase, &l.pool.queued
		}
		t := l.prefill.add(float64(base)+l.openTok/float64(s.PrefillRate), l.openTime)
		l.pool.add(line, l.openTok, t/f)
	}
	l.openTok, l.openTime, l.openQueue = u, (now - max(taken, l.last)).Seconds(), taken < l.last
	l.last = now
}

// answered enters an answer: its mean time a token while context tokens were in flight.
func (l *learned) answered(perToken, context float64) {
	if perToken <= 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.pool.read()
	f := l.decode.value()
	t := l.decode.add(float64(s.DecodeBase)+float64(s.DecodeSlope)*context, perToken)
	l.pool.add(&l.pool.decode, context, t/f)
}

func (l *learned) peakNow(now time.Duration) float64 {
	return fade(l.peak, now-l.peakAt, latencyFade)
}

// read returns what the pick needs: the speed by that of the pool, the peak latency, the inflow, and how many queued tokens are
// done.
func (l *learned) read(now time.Duration, pool Speed) (s Speed, latency, inflow float64, done int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f, g := float32(l.prefill.value()), float32(l.decode.value())
	s = Speed{PrefillBase: pool.PrefillBase * f, QueueBase: pool.QueueBase * f, PrefillRate: pool.PrefillRate / f, DecodeBase: pool.DecodeBase * g, DecodeSlope: pool.DecodeSlope * g}
	return s, l.peakNow(now), fade(l.inflow, now-l.inflowAt, inflowFade), l.progress(now, s)
}

// predict enters a prediction of the time to the first byte and what came, for Drift.
func (l *learned) predict(predicted, observed float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	const keep = 1 - 1.0/learnWindow
	l.predicted, l.observed = l.predicted*keep+predicted, l.observed*keep+observed
}
