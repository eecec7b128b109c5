/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Expiry without user space: one timer walks the whole table each second and deletes what is overdue. A timer in each
 * flow was tried: the kernel runs out of memory for them after some hundred, and they keep the code of the program
 * that armed them. The timer lives in a pinned map and holds its program, so both outlast the daemon.
 */
#ifndef SHUNT_SWEEP_H
#define SHUNT_SWEEP_H

#include "flow.h"

const volatile __u64 sweep_ns = SECOND;

enum { SWEEP_SHARE = 50, SWEEP_ANYWAY = 30, CLOCK_MONO = 1 }; /* SHARE: at most one part in so many of a processor */

struct sweep_run {
	__u64 now;
	__u64 expired;
	__u32 entries;
};

static __always_inline int sweep_flow(const struct flow_key *k, struct flow *f, struct sweep_run *run)
{
	run->entries++;
	if (flow_expire(k, f, run->now))
		run->expired++;
	return 0;
}

static int sweep_entry6(void *map, const struct flow_key *k, struct flow *f, struct sweep_run *run)
{
	struct flow_key key = *k;

	return sweep_flow(&key, f, run);
}

static int sweep_entry(void *map, const struct flow_key4 *k, struct flow *f, struct sweep_run *run)
{
	struct flow_key key = {};

	flow_key6(&key, k);
	return sweep_flow(&key, f, run);
}

static int sweep(void *map, __u32 *key, struct state *st)
{
	struct sweep_run run = {.now = bpf_ktime_get_ns()};
	__u64 end, next = sweep_ns;
	__u32 port = st->next_port;

	/* Walking an empty table costs milliseconds too. Now and then it is walked anyway: user space may have filled it. */
	if (st->entries || st->swept_port != port || st->sweeps % SWEEP_ANYWAY == 0) {
		bpf_for_each_map_elem(&shunt_flows, sweep_entry, &run, 0);
		bpf_for_each_map_elem(&shunt_flows6, sweep_entry6, &run, 0);
	}
	end = bpf_ktime_get_ns();
	st->sweeps++;
	st->swept_ns = end;
	st->sweep_took_ns = end - run.now;
	st->expired += run.expired;
	st->entries = run.entries;
	st->swept_port = port;
	if (next < st->sweep_took_ns * SWEEP_SHARE)
		next = st->sweep_took_ns * SWEEP_SHARE;
	bpf_timer_start(&st->timer, next, 0);
	return 0;
}

/* Starts the sweep, or hands it to this program if another one armed it. */
static __always_inline int sweep_arm(void)
{
	__u32 zero = 0;
	struct state *st = bpf_map_lookup_elem(&shunt_state, &zero);

	if (!st)
		return 0;
	if (!st->next_port)
		st->next_port = bpf_get_prandom_u32();
	bpf_timer_init(&st->timer, &shunt_state, CLOCK_MONO); /* busy when it was armed before: that is fine */
	return !bpf_timer_set_callback(&st->timer, sweep) && !bpf_timer_start(&st->timer, sweep_ns, 0);
}

#endif
