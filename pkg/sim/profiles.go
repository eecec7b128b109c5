// SPDX-License-Identifier: Apache-2.0

package sim

// knots are the batch sizes, in tokens, at which the profiles below were measured. They are common to all of them.
var knots = [...]float64{1, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096}

// profiles is the built-in set. The linear layers' times are medians of the kernel profiles that Vidur publishes
// (github.com/microsoft/vidur, MIT licence, data/profiling), made monotone, plus two all-reduces a layer for tensor parallelism. Where
// Vidur has no H100 profile of a model, the A100 profile is scaled by the ratio of a sister model that has both. The
// attention terms are computed: prefill 4*layers*hidden/(TP * half of the peak FLOP/s), decode KV bytes/(TP * 0.7 of the
// peak bandwidth). The host terms are those of BLIS (github.com/inference-sim/inference-sim, Apache-2.0): 126 us a step
// plus 32.1 us a layer, and 4.4 us a request. KV capacity: an 80 GiB card at 0.9 utilisation, less weights and activations.
//
// Held against vLLM 0.11 with Llama-3.1-8B on one H100 the model is 0 to 13 % low up to 174 decoding sequences; its H100
// prefill rates are the optimistic end of what is published (28,000 to 46,600 tokens/s for an 8B model).
var profiles = map[string]Profile{
	"llama-3-8b-a100-tp1": {
		Name: "llama-3-8b-a100-tp1", Source: "Vidur A100 profile of Meta-Llama-3-8B",
		LinearMS:      [len(knots)]float64{9.696, 9.984, 10.128, 10.912, 11.232, 13.184, 16.768, 19.488, 27.744, 34.64, 52.944, 75.136, 106.912, 145.568, 205.168, 273.568},
		PrefillAttnMS: 3.361e-06, DecodeAttnMS: 9.183e-05,
		HostStepMS: 1.153, HostRequestMS: 0.0044,
		KVTokens: 421008, KVBytesPerToken: 131072,
	},
	// Another model of the same server, for checking that a result does not hang on one: 16.4 ms a step, 47.8 us a prompt token,
	// 18.2 us a decoding sequence; attention costs nothing.
	"llama-3-8b-a100-tp1-blis": {
		Name: "llama-3-8b-a100-tp1-blis", Source: "BLIS's fit of a whole step (github.com/inference-sim/inference-sim before its roofline mode)",
		LinearMS:      [len(knots)]float64{16.048, 16.382, 16.765, 17.53, 19.059, 22.118, 25.178, 28.237, 34.355, 40.474, 52.71, 64.947, 89.421, 113.894, 162.842, 211.789},
		PrefillAttnMS: 1e-12, DecodeAttnMS: 1e-12,
		HostStepMS: 0.442, HostRequestMS: -0.0296,
		KVTokens: 421008, KVBytesPerToken: 131072,
	},
	"llama-3-8b-a100-tp2": {
		Name: "llama-3-8b-a100-tp2", Source: "Vidur A100 profile of Meta-Llama-3-8B",
		LinearMS:      [len(knots)]float64{6.576, 6.784, 6.928, 6.928, 8.064, 10.624, 12.192, 14.96, 18.352, 22.368, 31.744, 42.672, 60.624, 83.008, 119.52, 157.824},
		PrefillAttnMS: 1.68e-06, DecodeAttnMS: 4.592e-05,
		HostStepMS: 1.153, HostRequestMS: 0.0044,
		KVTokens: 1002224, KVBytesPerToken: 131072,
	},
	"llama-3-70b-a100-tp2": {
		Name: "llama-3-70b-a100-tp2", Source: "Vidur A100 profile of meta-llama/Meta-Llama-3-70B",
		LinearMS:      [len(knots)]float64{47.76, 48.36, 49.04, 54.08, 58.08, 71.04, 93.16, 98.16, 141.68, 191.08, 279.12, 372.88, 526.6, 686.56, 1037.52, 1351.72},
		PrefillAttnMS: 8.402e-06, DecodeAttnMS: 0.0001148,
		HostStepMS: 2.694, HostRequestMS: 0.0044,
		KVTokens: 18992, KVBytesPerToken: 327680,
	},
	"llama-3-70b-a100-tp4": {
		Name: "llama-3-70b-a100-tp4", Source: "Vidur A100 profile of meta-llama/Meta-Llama-3-70B",
		LinearMS:      [len(knots)]float64{27.68, 28.96, 29.36, 29.92, 34.08, 41.84, 56.72, 64.56, 81.04, 109.6, 156.88, 218.88, 303.28, 386.56, 584.68, 752.36},
		PrefillAttnMS: 4.201e-06, DecodeAttnMS: 5.74e-05,
		HostStepMS: 2.694, HostRequestMS: 0.0044,
		KVTokens: 486912, KVBytesPerToken: 327680,
	},
	"llama-3-70b-a100-tp8": {
		Name: "llama-3-70b-a100-tp8", Source: "Vidur A100 profile of meta-llama/Meta-Llama-3-70B",
		LinearMS:      [len(knots)]float64{18.4, 19.64, 19.84, 20.0, 21.76, 30.08, 36.96, 46.28, 55.68, 76.72, 99.6, 138.12, 189.84, 249.52, 355.4, 460.52},
		PrefillAttnMS: 2.101e-06, DecodeAttnMS: 2.87e-05,
		HostStepMS: 2.694, HostRequestMS: 0.0044,
		KVTokens: 1422768, KVBytesPerToken: 327680,
	},
	"llama-3-8b-h100-tp1": {
		Name: "llama-3-8b-h100-tp1", Source: "derived: Vidur A100 Meta-Llama-3-8B x (H100 / A100 of Llama-2-7b-hf)",
		LinearMS:      [len(knots)]float64{5.851, 6.068, 6.387, 6.628, 6.784, 6.859, 7.803, 10.015, 12.996, 12.996, 21.641, 23.252, 36.052, 43.99, 66.65, 88.377},
		PrefillAttnMS: 1.06e-06, DecodeAttnMS: 5.589e-05,
		HostStepMS: 1.153, HostRequestMS: 0.0044,
		KVTokens: 421008, KVBytesPerToken: 131072,
	},
	"llama-3-8b-h100-tp2": {
		Name: "llama-3-8b-h100-tp2", Source: "derived: Vidur A100 Meta-Llama-3-8B x (H100 / A100 of Llama-2-7b-hf)",
		LinearMS:      [len(knots)]float64{4.088, 4.161, 4.391, 4.391, 4.543, 5.296, 5.958, 6.659, 8.519, 9.262, 14.122, 16.414, 24.441, 29.104, 41.869, 57.988},
		PrefillAttnMS: 5.299e-07, DecodeAttnMS: 2.795e-05,
		HostStepMS: 1.153, HostRequestMS: 0.0044,
		KVTokens: 1002224, KVBytesPerToken: 131072,
	},
	"llama-3-70b-h100-tp2": {
		Name: "llama-3-70b-h100-tp2", Source: "Vidur H100 profile of meta-llama/Llama-2-70b-hf",
		LinearMS:      [len(knots)]float64{26.64, 26.96, 27.28, 28.24, 30.56, 32.24, 38.8, 38.8, 67.32, 67.32, 97.36, 126.88, 183.0, 234.48, 354.6, 473.56},
		PrefillAttnMS: 2.649e-06, DecodeAttnMS: 6.987e-05,
		HostStepMS: 2.694, HostRequestMS: 0.0044,
		KVTokens: 18992, KVBytesPerToken: 327680,
	},
	"llama-3-70b-h100-tp4": {
		Name: "llama-3-70b-h100-tp4", Source: "Vidur H100 profile of meta-llama/Llama-2-70b-hf",
		LinearMS:      [len(knots)]float64{16.72, 17.36, 17.36, 17.72, 20.24, 21.36, 24.72, 26.08, 37.16, 39.92, 59.12, 76.96, 102.8, 137.28, 217.12, 273.64},
		PrefillAttnMS: 1.325e-06, DecodeAttnMS: 3.493e-05,
		HostStepMS: 2.694, HostRequestMS: 0.0044,
		KVTokens: 486912, KVBytesPerToken: 327680,
	},
	"llama-3-70b-h100-tp8": {
		Name: "llama-3-70b-h100-tp8", Source: "Vidur H100 profile of meta-llama/Llama-2-70b-hf",
		LinearMS:      [len(knots)]float64{11.4, 11.44, 11.72, 14.24, 14.24, 16.24, 20.24, 20.24, 26.48, 29.52, 45.68, 51.04, 73.2, 95.08, 134.76, 173.12},
		PrefillAttnMS: 6.623e-07, DecodeAttnMS: 1.747e-05,
		HostStepMS: 2.694, HostRequestMS: 0.0044,
		KVTokens: 1422768, KVBytesPerToken: 327680,
	},
}
