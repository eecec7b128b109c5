// SPDX-License-Identifier: Apache-2.0

package tokens

import (
	"cmp"
	"math"
	"slices"
	"sync"
	"sync/atomic"
)

const (
	// calibrationWindow is how many of the last samples a factor rests on. It is their weighted median: up to half of them
	// may be anything.
	calibrationWindow = 64
	// calibrationEvery is how often, in samples, the median of a full window is taken anew.
	calibrationEvery = 8
	// A prompt below minCalibrated says more of the chat template than of the vocabulary; one above maxCalibrated has no more
	// weight than one of that size.
	minCalibrated, maxCalibrated = 32, 2048
	// sureAfter is the number of samples for full confidence, if they agree: if half of them are within agreeing of the
	// median. With half of them beyond disagreeing there is none. Both are logarithms of a ratio.
	sureAfter             = 16
	agreeing, disagreeing = 0.10, 0.60
	// A sample beyond maxRatio, either way, is a mistake or a lie. A factor is never beyond maxFactor.
	maxRatio, maxFactor = 8, 4
	// maxFactors bounds the table, whatever the names.
	maxFactors = 4096
)

// Usage is what an engine reports of a request that it has served.
type Usage struct {
	Prompt int64 // tokens of the prompt
	Cached int64 // tokens of the prompt that its cache held
	// Apart: Cached is known not to be part of Prompt, as in Anthropic's API. Otherwise it is taken for a part, until the
	// engine's figures show that it cannot be one.
	Apart bool
}

// Factor is what a Calibration knows of one model of a group of engines.
type Factor struct {
	Group, Model string
	// Value is what a count is multiplied by: Median as far as Confidence goes, within clamps.
	Value      float64
	Median     float64 // of the engine's counts by ours, weighted by size
	Spread     float64 // half of the samples are within the Median times or by 1 + Spread
	Confidence float64 // 0 to 1
	Samples    uint64  // taken
	Rejected   uint64  // not taken: no engine counts like that
}

// Calibration learns, for each model of a group of engines, the factor between the prompt tokens that the engines report and
// the ones that were counted: with a stand-in vocabulary, or a chat template that is not known, weights are then in the
// served model's own tokens. It is safe for concurrent use; Scale takes no lock.
//
// The names must come from a bounded set. Beyond 4,096 pairs nothing more is learned.
type Calibration struct {
	mu      sync.Mutex // adding and removing
	factors atomic.Pointer[map[factorKey]*factor]
}

type factorKey struct{ group, model string }

type factor struct {
	value atomic.Uint64 // bits of a float64

	mu       sync.Mutex
	samples  [calibrationWindow]sample
	taken    uint64
	rejected uint64
	apart    bool // the engines report cached tokens beside the prompt's
	median   float64
	spread   float64
	trust    float64
}

type sample struct {
	ratio  float32 // logarithm of reported by counted
	weight float32
	apart  bool // more tokens cached than in the prompt
}

// NewCalibration returns one that knows nothing: it scales by 1.
func NewCalibration() *Calibration {
	c := new(Calibration)
	c.factors.Store(&map[factorKey]*factor{})
	return c
}

// Scale returns a count in the engines' own tokens.
func (c *Calibration) Scale(group, model string, counted int64) int64 {
	f := (*c.factors.Load())[factorKey{group, model}]
	if f == nil || counted <= 0 {
		return counted
	}
	return max(1, int64(math.Round(float64(counted)*math.Float64frombits(f.value.Load()))))
}

// Observe learns from a request that counted so many tokens, all of them by encoding, and for which an engine reported the
// usage. What no engine can mean is left out.
func (c *Calibration) Observe(group, model string, counted int64, u Usage) {
	if counted < minCalibrated || u.Prompt <= 0 && u.Cached <= 0 {
		return
	}
	if f := c.factor(group, model); f != nil {
		f.observe(float64(counted), u)
	}
}

func (c *Calibration) factor(group, model string) *factor {
	key := factorKey{group, model}
	if f := (*c.factors.Load())[key]; f != nil {
		return f
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	old := *c.factors.Load()
	if f := old[key]; f != nil || len(old) >= maxFactors {
		return f
	}
	f := new(factor)
	f.value.Store(math.Float64bits(1))
	now := make(map[factorKey]*factor, len(old)+1)
	for k, v := range old {
		now[k] = v
	}
	now[key] = f
	c.factors.Store(&now)
	return f
}

// Keep drops what was learned of the pairs for which keep is false.
func (c *Calibration) Keep(keep func(group, model string) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := make(map[factorKey]*factor)
	for k, v := range *c.factors.Load() {
		if keep(k.group, k.model) {
			now[k] = v
		}
	}
	c.factors.Store(&now)
}

// Factors returns what was learned, by group and model.
func (c *Calibration) Factors() []Factor {
	var list []Factor
	for k, f := range *c.factors.Load() {
		f.mu.Lock()
		list = append(list, Factor{Group: k.group, Model: k.model, Value: math.Float64frombits(f.value.Load()), Median: math.Exp(f.median),
			Spread: math.Expm1(f.spread), Confidence: f.trust, Samples: f.taken, Rejected: f.rejected})
		f.mu.Unlock()
	}
	slices.SortFunc(list, func(a, b Factor) int {
		return cmp.Or(cmp.Compare(a.Group, b.Group), cmp.Compare(a.Model, b.Model))
	})
	return list
}

func (f *factor) observe(counted float64, u Usage) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := sample{weight: float32(min(counted, maxCalibrated)), apart: !u.Apart && u.Cached > u.Prompt}
	reported := float64(max(u.Prompt, 0))
	if u.Cached > 0 && (u.Apart || s.apart || f.apart) {
		reported += float64(u.Cached)
	}
	ratio := reported / counted
	if !(ratio >= 1.0/maxRatio && ratio <= maxRatio) {
		f.rejected++
		return
	}
	s.ratio = float32(math.Log(ratio))
	f.samples[f.taken%calibrationWindow] = s
	f.taken++
	if f.taken < calibrationWindow || f.taken%calibrationEvery == 0 {
		f.settle()
	}
}

// settle takes the median of the window and how far it can be trusted.
func (f *factor) settle() {
	n := int(min(f.taken, calibrationWindow))
	window := f.samples // sorted apart from the order in which they came
	s := window[:n]
	f.median = weightedMedian(s)
	apart := 0
	for i := range s {
		if s[i].apart {
			apart++
		}
		s[i].ratio = float32(math.Abs(float64(s[i].ratio) - f.median))
	}
	f.spread = weightedMedian(s)
	// An engine that counts cached tokens as part of the prompt never has more of them: a few such samples are proof.
	f.apart = apart > 1 && 8*apart >= n
	agree := (disagreeing - f.spread) / (disagreeing - agreeing)
	f.trust = min(1, float64(n)/sureAfter) * min(1, max(0, agree))
	value := math.Exp(f.trust * f.median)
	f.value.Store(math.Float64bits(min(max(value, 1.0/maxFactor), maxFactor)))
}

// weightedMedian sorts the samples and returns the ratio at which half of the weight is reached.
func weightedMedian(s []sample) float64 {
	slices.SortFunc(s, func(a, b sample) int { return cmp.Compare(a.ratio, b.ratio) })
	total := float32(0)
	for i := range s {
		total += s[i].weight
	}
	sum := float32(0)
	for i := range s {
		if sum += s[i].weight; 2*sum >= total {
			return float64(s[i].ratio)
		}
	}
	return 0
}
