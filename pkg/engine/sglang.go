// SPDX-License-Identifier: Apache-2.0

package engine

func init() {
	register("sglang",
		metric{name: "sglang:num_queue_reqs", field: waiting},
		metric{name: "sglang:num_running_reqs", field: running},
		metric{name: "sglang:token_usage", field: kvUse},
		metric{name: "sglang:max_total_num_tokens", field: kvTokens},
		metric{name: "sglang:cache_config_info", field: kvLabels, size: "page_size", count: "num_pages"},
		metric{name: "sglang:prompt_tokens_total", field: served},
		// With a colon in the name a scrape through some gateways has an underscore.
		metric{name: "sglang_num_queue_reqs", field: waiting, old: true},
		metric{name: "sglang_num_running_reqs", field: running, old: true},
		metric{name: "sglang_token_usage", field: kvUse, old: true},
	)
}
