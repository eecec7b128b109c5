// SPDX-License-Identifier: Apache-2.0

package engine

// TGI does not report its KV cache.
func init() {
	register("tgi",
		metric{name: "tgi_queue_size", field: waiting},
		metric{name: "tgi_batch_current_size", field: running},
		metric{name: "tgi_request_count", field: served},
	)
}
