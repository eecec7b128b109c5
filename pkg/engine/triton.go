// SPDX-License-Identifier: Apache-2.0

package engine

// TensorRT-LLM behind Triton and behind its own server, and plain Triton, whose only gauge is what waits.
func init() {
	register("triton",
		metric{name: "nv_trt_llm_request_metrics", field: waiting, label: `request_type="waiting"`},
		metric{name: "nv_trt_llm_request_metrics", field: running, label: `request_type="scheduled"`},
		metric{name: "nv_trt_llm_kv_cache_block_metrics", field: kvUse, label: `kv_cache_block_type="fraction"`},
		metric{name: "nv_trt_llm_kv_cache_block_metrics", field: kvSize, label: `kv_cache_block_type="tokens_per"`},
		metric{name: "nv_trt_llm_kv_cache_block_metrics", field: kvCount, label: `kv_cache_block_type="max"`},
		metric{name: "nv_inference_pending_request_count", field: waiting, old: true},
		metric{name: "nv_inference_exec_count", field: served},
	)
	register("trtllm",
		metric{name: "trtllm_num_requests_waiting", field: waiting},
		metric{name: "trtllm_num_requests_running", field: running},
		metric{name: "trtllm_kv_cache_utilization", field: kvUse},
		metric{name: "trtllm_kv_cache_tokens_per_block", field: kvSize},
		metric{name: "trtllm_kv_cache_max_blocks", field: kvCount},
	)
}
