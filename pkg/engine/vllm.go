// SPDX-License-Identifier: Apache-2.0

package engine

func init() {
	register("vllm",
		metric{name: "vllm:num_requests_waiting", field: waiting},
		metric{name: "vllm:num_requests_running", field: running},
		metric{name: "vllm:kv_cache_usage_perc", field: kvUse},
		metric{name: "vllm:gpu_cache_usage_perc", field: kvUse, old: true}, // before 0.10
		metric{name: "vllm:cache_config_info", field: kvLabels, size: "block_size", count: "num_gpu_blocks"},
		metric{name: "vllm:prompt_tokens_total", field: served},
		metric{name: "vllm:prompt_tokens", field: served, old: true},
	)
}
