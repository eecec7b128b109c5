// SPDX-License-Identifier: Apache-2.0

package engine

func init() {
	register("llama.cpp",
		metric{name: "llamacpp:requests_deferred", field: waiting},
		metric{name: "llamacpp:requests_processing", field: running},
		metric{name: "llamacpp:kv_cache_usage_ratio", field: kvUse}, // dropped in newer builds
		metric{name: "llamacpp:prompt_tokens_total", field: served},
	)
}
