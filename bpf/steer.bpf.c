// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
#include "abi.h"
#include "maps.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Types that no map holds, for the generator of the Go types. */
const struct event *unused_event __attribute__((unused));
const enum shunt_sizes *unused_sizes __attribute__((unused));
const enum shunt_reason *unused_reason __attribute__((unused));
const enum shunt_flow_flags *unused_flow_flags __attribute__((unused));
const enum shunt_pin_flags *unused_pin_flags __attribute__((unused));
const enum shunt_backend_flags *unused_backend_flags __attribute__((unused));

const volatile __u64 half_open_ns = 3000000000ULL;
const volatile __u64 established_ns = 7500000000000ULL;
const volatile __u64 fin_ns = 600000000000ULL;
const volatile __u64 closed_ns = 6000000000ULL;
const volatile __u64 held_ns = 62000000000ULL;
const volatile __u64 retry_ns = 900000000ULL;
const volatile __u64 sweep_ns = 1000000000ULL;
const volatile __u8 ipv6_on = 1;

static int sweep(void *map, __u32 *key, struct state *st)
{
	st->sweeps++;
	bpf_timer_start(&st->timer, sweep_ns, 0);
	return 0;
}

SEC("xdp.frags")
int shunt_xdp(struct xdp_md *ctx)
{
	__u64 x = half_open_ns + established_ns + fin_ns + closed_ns + held_ns + retry_ns + ipv6_on;
	__u32 zero = 0;
	struct config *c = bpf_map_lookup_elem(&shunt_config, &zero);
	return c && c->abi != SHUNT_ABI && x == 42 ? XDP_DROP : XDP_PASS;
}

SEC("xdp")
int shunt_arm(struct xdp_md *ctx)
{
	__u32 zero = 0;
	struct state *st = bpf_map_lookup_elem(&shunt_state, &zero);

	if (!st)
		return XDP_ABORTED;
	bpf_timer_init(&st->timer, &shunt_state, 1 /* CLOCK_MONOTONIC */);
	if (bpf_timer_set_callback(&st->timer, sweep))
		return XDP_ABORTED;
	if (bpf_timer_start(&st->timer, sweep_ns, 0))
		return XDP_ABORTED;
	return XDP_PASS;
}
