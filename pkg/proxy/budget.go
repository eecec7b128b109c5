// SPDX-License-Identifier: Apache-2.0

package proxy

import "sync/atomic"

// retryBudget keeps retries within a share of the live traffic, so that an outage is not made worse by the requests
// that it fails. A few are lent at the start, or a single dead backend could not be stepped over at low traffic; the
// first requests pay them back.
type retryBudget struct {
	share  atomic.Int64 // what a request brings; a retry costs retryCost
	credit atomic.Int64
	owed   atomic.Int64
}

const (
	retryShare = 0.2 // of the requests, where none is configured
	retryCost  = 1000
	retryLoan  = 5 * retryCost
	retryStore = 100 * retryCost // unused budget does not pile up beyond this
)

func (b *retryBudget) init() {
	b.credit.Store(retryLoan)
	b.owed.Store(retryLoan)
	b.set(retryShare)
}

// set changes the share of the requests that may be retried.
func (b *retryBudget) set(share float64) { b.share.Store(int64(share * retryCost)) }

// request counts a request that came in.
func (b *retryBudget) request() {
	n := b.share.Load()
	if b.owed.Load() > 0 && b.owed.Add(-n) > -n {
		return
	}
	if b.credit.Load() < retryStore {
		b.credit.Add(n)
	}
}

// giveBack returns a retry that found no backend to go to.
func (b *retryBudget) giveBack() { b.credit.Add(retryCost) }

// take asks for a retry.
func (b *retryBudget) take() bool {
	if b.credit.Add(-retryCost) >= 0 {
		return true
	}
	b.credit.Add(retryCost)
	return false
}
