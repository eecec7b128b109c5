/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the outside can see of the datapath: counters and events. */
#ifndef SHUNT_COUNT_H
#define SHUNT_COUNT_H

#include "maps.h"
#include "parse.h"

static __always_inline void count_reason(enum shunt_reason why)
{
	__u32 k = why;
	struct drop *d = bpf_map_lookup_elem(&shunt_drops, &k);

	if (d) {
		d->count++;
		d->reason = why;
	}
}

static __always_inline void count_packet(__u32 backend, int reverse, __u32 bytes)
{
	struct stat *s = bpf_map_lookup_elem(&shunt_stats, &backend);

	if (!s)
		return;
	if (reverse) {
		s->packets_out++;
		s->bytes_out += bytes;
	} else {
		s->packets_in++;
		s->bytes_in += bytes;
	}
}

static __always_inline void count_opened(__u32 backend)
{
	struct stat *s = bpf_map_lookup_elem(&shunt_stats, &backend);

	if (s)
		s->opened++;
}

static __always_inline void count_closed(__u32 backend)
{
	struct stat *s = bpf_map_lookup_elem(&shunt_stats, &backend);

	if (s)
		s->closed++;
}

/* Tells whoever traces the client what was decided on its packet. A full ring loses it. */
__noinline int trace_verdict(const struct pkt *p, const struct flow *f, int why)
{
	__u32 zero = 0;
	const struct tracing *on = bpf_map_lookup_elem(&shunt_tracing, &zero);
	struct trace *t;
	__u64 now;

	if (!p || !on || !on->until_ns)
		return 0;
	if (!addr_equal(on->client, p->key.src) && !addr_equal(on->client, p->key.dst) && !(f && addr_equal(on->client, f->dst)))
		return 0;
	now = bpf_ktime_get_ns();
	if (now >= on->until_ns)
		return 0;
	t = bpf_ringbuf_reserve(&shunt_trace, sizeof(*t), 0);
	if (!t)
		return 0;
	__builtin_memset(t, 0, sizeof(*t));
	t->ns = now;
	addr_copy(t->src, p->key.src);
	addr_copy(t->dst, p->key.dst);
	t->sport = p->key.sport;
	t->dport = p->key.dport;
	t->ifindex = p->iif;
	t->reason = why;
	t->tcp_flags = p->tcp_flags;
	if (f) {
		addr_copy(t->to, f->dst);
		t->to_port = f->dport;
		t->backend = f->backend;
	}
	bpf_ringbuf_submit(t, 0);
	return 1;
}

/* An event about the connection whose forward key is k. The caller fills the rest and submits; NULL = ring full. */
static __always_inline struct event *event_start(enum shunt_event_kind kind, const struct flow_key *k, __u32 backend, __u32 vip,
						 __u64 now)
{
	struct event *e = bpf_ringbuf_reserve(&shunt_events, sizeof(*e), 0);

	if (!e) {
		count_reason(SHUNT_LOST_EVENT);
		return 0;
	}
	e->ns = now;
	e->kind = kind;
	e->backend = backend;
	addr_copy(e->client, k->src);
	e->client_port = k->sport;
	e->vip_port = k->dport;
	e->vip_id = vip;
	e->bytes_in = 0;
	e->bytes_out = 0;
	e->duration_ns = 0;
	e->tokens = 0;
	return e;
}

static __always_inline void event_submit(struct event *e)
{
	bpf_ringbuf_submit(e, BPF_RB_NO_WAKEUP);
}

static __always_inline void event_emit(enum shunt_event_kind kind, const struct flow_key *k, __u32 backend, __u32 vip, __u64 now,
				       __s64 tokens)
{
	struct event *e = event_start(kind, k, backend, vip, now);

	if (!e)
		return;
	e->tokens = tokens;
	event_submit(e);
}

#endif
