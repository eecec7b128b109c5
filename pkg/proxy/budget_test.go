// SPDX-License-Identifier: Apache-2.0

package proxy

import "testing"

// After the loan is paid back, retries are the configured share of the requests.
func TestRetryBudgetShare(t *testing.T) {
	for _, share := range []float64{0.01, 0.1, 0.2, 0.3, 1} {
		var b retryBudget
		b.init()
		b.set(share)
		n := 0
		for b.take() {
			n++
		}
		if n != retryLoan/retryCost {
			t.Errorf("share %v: %d retries are lent, want %d", share, n, retryLoan/retryCost)
		}
		const requests = 10000
		for range requests {
			b.request()
			if b.take() {
				n++
			}
		}
		if want := int(share * requests); n < want-1 || n > want+1 {
			t.Errorf("share %v: %d retries of %d requests, want %d", share, n, requests, want)
		}
	}
	var b retryBudget
	b.init()
	b.set(1)
	for range 100 * retryStore / retryCost {
		b.request()
	}
	n := 0
	for b.take() {
		n++
	}
	if n > retryStore/retryCost+1 {
		t.Errorf("%d retries have piled up", n)
	}
}
