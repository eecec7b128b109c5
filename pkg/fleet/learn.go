// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"math"
	"sync"
	"time"
)

// Constants of what is learned of a backend. Prompts are timed as a queue's departures: a backend works prompts off one after
// the other, so a prompt's own time is from the later of its dispatch and the first byte before it to its own first byte.
const (
	// learnWindow is how many samples the past counts for.
	learnWindow = 64
	// learnTrust is the number of samples at which a backend's own figures count as much as its pool's.
	learnTrust = 4
	// mergeWithin: first bytes closer than this come from one step of the engine.
	mergeWithin = 2 * time.Millisecond
	// sampleBound: a sample beyond this multiple of what was predicted counts as that multiple, either way.
	sampleBound = 4
	// latencyFade is the time in which the peak of the first-byte times fades to a third.
	latencyFade = 10 * time.Second
)

// Speed is what a backend's requests have cost in time. Prefill of u tokens takes PrefillBase + u/PrefillRate seconds; one
// token of an answer DecodeBase + DecodeSlope*c while requests with c tokens of context are in flight. A zero Speed is unknown.
type Speed struct {
	PrefillBase float32 // seconds per prompt, network and front part of the engine included
	PrefillRate float32 // tokens per second
	DecodeBase  float32 // seconds per token of an answer
	DecodeSlope float32 // seconds per token of an answer and token of context
}

// DefaultSpeed is assumed of a pool that has served nothing: an 8B model on one current GPU.
var DefaultSpeed = Speed{PrefillBase: 0.03, PrefillRate: 10_000, DecodeBase: 0.015, DecodeSlope: 8e-8}

// line is a straight line through samples, the older ones fading.
type line struct {
	n, x, y, xx, xy float64
}

func (l *line) add(x, y float64) {
	const keep = 1 - 1.0/learnWindow
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

// learned is the running knowledge of one backend, guarded by mu.
type learned struct {
	mu        sync.Mutex
	prefill   line // seconds over tokens that were not cached
	decode    line // seconds a token over tokens of context
	last      time.Duration
	openTok   float64 // sample that further first bytes of the same step join
	openTime  float64
	peak      float64 // of the time to the first byte, in seconds
	peakAt    time.Duration
	predicted float64 // sums for the prediction error
	observed  float64
	speed     Speed // fit of the lines, around the pool's figures
}

// firstByte enters that a prompt of which u tokens were not cached, sent at taken, had its first byte at now.
func (l *learned) firstByte(u float64, taken, now time.Duration, prior Speed) {
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
	l.commit(prior)
	l.openTok, l.openTime = u, (now - max(taken, l.last)).Seconds()
	l.last = now
}

// commit enters the open sample, bounded by what is believed so far: one stalled or mistaken request must not turn it over.
func (l *learned) commit(prior Speed) {
	if l.openTime <= 0 {
		return
	}
	t := l.openTime
	if s := l.speed; s.PrefillRate > 0 {
		want := float64(s.PrefillBase) + l.openTok/float64(s.PrefillRate)
		t = min(max(t, want/sampleBound), want*sampleBound)
	}
	l.prefill.add(l.openTok, t)
	l.openTime = 0
	l.refit(prior)
}

// answered enters an answer: its mean time a token while context tokens were in flight.
func (l *learned) answered(perToken, context float64, prior Speed) {
	if perToken <= 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if s := l.speed; s.DecodeBase > 0 {
		want := float64(s.DecodeBase) + float64(s.DecodeSlope)*context
		perToken = min(max(perToken, want/sampleBound), want*sampleBound)
	}
	l.decode.add(context, perToken)
	l.refit(prior)
}

func (l *learned) refit(prior Speed) {
	base, slope := l.prefill.fit(float64(prior.PrefillBase), 1/float64(prior.PrefillRate))
	l.speed.PrefillBase, l.speed.PrefillRate = float32(base), float32(1/max(slope, 1e-7))
	base, slope = l.decode.fit(float64(prior.DecodeBase), float64(prior.DecodeSlope))
	l.speed.DecodeBase, l.speed.DecodeSlope = float32(base), float32(slope)
}

func (l *learned) peakNow(now time.Duration) float64 {
	if l.peak == 0 {
		return 0
	}
	return l.peak * math.Exp(-max(now-l.peakAt, 0).Seconds()/latencyFade.Seconds())
}

// read returns what the pick needs. own is false while nothing is known of this backend.
func (l *learned) read(now time.Duration) (s Speed, latency float64, own bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.speed, l.peakNow(now), l.speed.PrefillRate > 0
}

// predict enters a prediction of the time to the first byte and what came, for Drift.
func (l *learned) predict(predicted, observed float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	const keep = 1 - 1.0/learnWindow
	l.predicted, l.observed = l.predicted*keep+predicted, l.observed*keep+observed
}
