// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"math/bits"
	"sync"
)

const (
	// expectedQuantile of the answers seen is what is expected of the next one: above the median, since a backend that is given
	// too much costs more than one that is given too little, and unmoved by the few that run to their limit.
	expectedQuantile = 0.6
	// lengthWindow is the number of answers after which the past counts half.
	lengthWindow = 512
	// lengthParts is how many buckets an octave has.
	lengthParts = 4
)

// lengths is a histogram of answers' lengths that forgets.
type lengths struct {
	mu    sync.Mutex
	total float64
	n     [32 * lengthParts]float64
	sum   [32 * lengthParts]float64
}

func lengthBucket(v int64) int {
	if v < lengthParts {
		return int(max(v, 0))
	}
	octave := bits.Len64(uint64(v)) - 1
	return min((octave-1)*lengthParts+int(v>>(octave-2))%lengthParts, 32*lengthParts-1)
}

func (l *lengths) add(v int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.total >= lengthWindow {
		l.total = 0
		for i := range l.n {
			l.n[i] /= 2
			l.sum[i] /= 2
			l.total += l.n[i]
		}
	}
	i := lengthBucket(v)
	l.n[i]++
	l.sum[i] += float64(v)
	l.total++
}

// expected returns the quantile: the mean of the answers in its bucket. start stands for learnTrust answers of that length, so
// that the first ones seen do not count for everything.
func (l *lengths) expected(start int64) float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	prior := learnTrust / (1 + l.total/learnTrust)
	left := expectedQuantile * (l.total + prior)
	at := lengthBucket(start)
	for i := range l.n {
		n, sum := l.n[i], l.sum[i]
		if i == at {
			n, sum = n+prior, sum+prior*float64(start)
		}
		if left -= n; left <= 0 && n > 0 {
			return sum / n
		}
	}
	return float64(start)
}
