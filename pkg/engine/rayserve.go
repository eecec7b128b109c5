// SPDX-License-Identifier: Apache-2.0

package engine

// Ray Serve reports each deployment of an application; what waits for any of them waits. TensorFlow Serving reports counters
// of requests and times only, nothing of its queue, and so has no dialect.
func init() {
	register("rayserve",
		metric{name: "ray_serve_deployment_queued_queries", field: waiting},
		metric{name: "ray_serve_replica_processing_queries", field: running},
		metric{name: "serve_deployment_queued_queries", field: waiting, old: true},
		metric{name: "serve_replica_processing_queries", field: running, old: true},
	)
}
