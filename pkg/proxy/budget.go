// SPDX-License-Identifier: Apache-2.0

package proxy

import "sync/atomic"

// retryBudget keeps retries within a fifth of the live traffic, so that an outage is not made worse by the requests
// that it fails. A few are lent at the start, or a single dead backend could not be stepped over at low traffic; the
// first requests pay them back.
type retryBudget struct {
	fifths atomic.Int64 // a request brings one, a retry costs five
	owed   atomic.Int64
}

const (
	retryCost  = 5
	retryLoan  = 5 * retryCost
	retryStore = 100 * retryCost // unused budget does not pile up beyond this
)

func (b *retryBudget) init() {
	b.fifths.Store(retryLoan)
	b.owed.Store(retryLoan)
}

// request counts a request that came in.
func (b *retryBudget) request() {
	if b.owed.Load() > 0 && b.owed.Add(-1) >= 0 {
		return
	}
	if b.fifths.Load() < retryStore {
		b.fifths.Add(1)
	}
}

// take asks for a retry.
func (b *retryBudget) take() bool {
	if b.fifths.Add(-retryCost) >= 0 {
		return true
	}
	b.fifths.Add(retryCost)
	return false
}
