/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What happens to a SYN of no flow: steered if everything agrees, else left to the L7 with nothing changed. */
#ifndef SHUNT_SYN_H
#define SHUNT_SYN_H

#include "nat.h"
#include "sample.h"

const volatile __u64 rest_ns = 5 * SECOND; /* a static pin rests so long after a failed connect */

enum { TCP_STATE_TIME_WAIT = 6, TCP_STATE_LISTEN = 10 };

static __always_inline enum shunt_reason syn_lease(const struct config *c, const struct session *s, const struct session_use *use,
						    __u64 now)
{
	__u64 last = s->since_ns;

	if (s->expires_ns && now >= s->expires_ns)
		return SHUNT_PASS_LEASE_EXPIRED;
	if (use && (__s64)(use->last_ns - last) > 0)
		last = use->last_ns;
	if (c->session_idle_ns && !(s->flags & SHUNT_PIN_STATIC) && flow_silent(now, last, c->session_idle_ns))
		return SHUNT_PASS_LEASE_IDLE;
	if (!use)
		return SHUNT_REASON_NONE;
	if (s->connections && use->serial == s->serial && use->connections >= s->connections)
		return SHUNT_PASS_LEASE_USED_UP;
	if (use->failed_ns && !flow_silent(now, use->failed_ns, rest_ns))
		return SHUNT_PASS_CONNECT_FAILED;
	return SHUNT_REASON_NONE;
}

static __always_inline enum shunt_reason syn_backend(const struct session *s, const struct backend *b, __u32 id, const struct vip *v,
						      int v6, __u16 port)
{
	struct admin_word *a = bpf_map_lookup_elem(&shunt_admin, &id);

	if (!id || !a)
		return SHUNT_PASS_BACKEND_UNKNOWN;
	if (s->generation && s->generation != b->generation)
		return SHUNT_PASS_GENERATION;
	if (b->state != SHUNT_STATE_UP)
		return SHUNT_PASS_BACKEND_DOWN;
	if (*(volatile __u32 *)&a->state != SHUNT_ADMIN_NONE)
		return SHUNT_PASS_BACKEND_ADMIN;
	if (b->flags & SHUNT_BACKEND_LOCAL)
		return SHUNT_PASS_BACKEND_LOCAL;
	if (addr_is4(b->addr) == v6 || addr_is4(v->snat) == v6)
		return SHUNT_PASS_BACKEND_FAMILY;
	if (v->mode == SHUNT_MODE_DSR && b->port != port)
		return SHUNT_PASS_BACKEND_PORT;
	if (!b->ifindex || !mac_known(b->mac) || !mac_known(b->src_mac))
		return SHUNT_PASS_NO_NEIGHBOUR;
	return SHUNT_REASON_NONE;
}

/* The L7 (or anyone) already has this connection: it must stay there. */
static __noinline int syn_live_socket(void *ctx, const struct pkt *p)
{
	struct bpf_sock_tuple t = {};
	struct bpf_sock *sk;
	__u32 state;

	if (p->v6) {
		addr_copy(t.ipv6.saddr, p->key.src);
		addr_copy(t.ipv6.daddr, p->key.dst);
		t.ipv6.sport = bpf_htons(p->key.sport);
		t.ipv6.dport = bpf_htons(p->key.dport);
		sk = bpf_skc_lookup_tcp(ctx, &t, sizeof(t.ipv6), BPF_F_CURRENT_NETNS, 0);
	} else {
		t.ipv4.saddr = *(__be32 *)&p->key.src[12];
		t.ipv4.daddr = *(__be32 *)&p->key.dst[12];
		t.ipv4.sport = bpf_htons(p->key.sport);
		t.ipv4.dport = bpf_htons(p->key.dport);
		sk = bpf_skc_lookup_tcp(ctx, &t, sizeof(t.ipv4), BPF_F_CURRENT_NETNS, 0);
	}
	if (!sk)
		return 0;
	state = sk->state;
	bpf_sk_release(sk);
	return state != TCP_STATE_LISTEN && state != TCP_STATE_TIME_WAIT;
}

static __always_inline enum shunt_reason syn_guards(void *ctx, const struct pkt *p, void *data, void *end)
{
	if (p->dst_mac[0] & 1)
		return SHUNT_PASS_ODD_HEADER; /* multicast */
	if (p->tcp_len != p->tcp_head)
		return SHUNT_PASS_SYN_DATA;
	if (!csum_syn_ok(p, data, end))
		return SHUNT_PASS_BAD_CHECKSUM;
	if (syn_live_socket(ctx, p))
		return SHUNT_PASS_LIVE_SOCKET;
	return SHUNT_REASON_NONE;
}

static __noinline struct session_use *syn_use(const struct session_key *sk)
{
	struct session_use new = {.seed = bpf_get_prandom_u32()};

	bpf_map_update_elem(&shunt_sess_use, sk, &new, BPF_NOEXIST);
	return bpf_map_lookup_elem(&shunt_sess_use, sk);
}

/* Whether anybody is there to serve what passes. */
static __always_inline int l7_alive(const struct config *c, __u64 now)
{
	__u64 beat = *(volatile __u64 *)&c->heartbeat_ns;

	return beat && !flow_silent(now, beat, c->heartbeat_max_ns);
}

/* Some connections of an address go to the L7, so that it sees when a second session hides behind the address.
 * Without a living L7 that would help nobody. What the operator pinned is not questioned. */
static __always_inline enum shunt_reason syn_question(const struct config *c, const struct session *s, struct session_use *use, __u64 now)
{
	__u64 bound = (__u64)c->flows_per_session * (s->sessions ? s->sessions : 1) + c->flows_slack;
	int alive = l7_alive(c, now);
	__u32 n;

	if (s->flags & SHUNT_PIN_STATIC)
		return SHUNT_REASON_NONE;
	if (alive && bound && *(volatile __s32 *)&use->open >= (__s64)bound)
		return SHUNT_PASS_OPEN_FLOWS;
	n = __sync_fetch_and_add(&use->seen, 1);
	if (!alive || !sample_hit(use->seed, n, c->sample))
		return SHUNT_REASON_NONE;
	__sync_fetch_and_add(&use->sampled, 1);
	return SHUNT_PASS_SAMPLED;
}

/* One word for a bucket: when the next new flow would be due at the bounded rate. It may run ahead of the clock by the
 * burst. Of two processors that meet one may be refused: then the L7 serves. */
static __always_inline int rate_take(__u64 *due, __u64 every, __u64 burst, __u64 now)
{
	__u64 was = *(volatile __u64 *)due, from = (__s64)(was - now) > 0 ? was : now;

	if (!every)
		return 1;
	if (from - now > burst)
		return 0;
	return __sync_val_compare_and_swap(due, was, from + every) == was;
}

/* A flood from a pinned address, or from many, must not fill the tables. What one client sends too much of is the L7's,
 * as long as there is one. */
static __always_inline enum shunt_reason syn_rate(const struct config *c, struct session_use *use, __u32 vip, __u64 now)
{
	struct vip_use *v = bpf_map_lookup_elem(&shunt_vip_use, &vip);

	if (l7_alive(c, now) && !rate_take(&use->rate_ns, c->client_every_ns, c->client_burst_ns, now))
		return SHUNT_PASS_CLIENT_RATE;
	if (v && !rate_take(&v->rate_ns, c->vip_every_ns, c->vip_burst_ns, now))
		return SHUNT_PASS_VIP_RATE;
	return SHUNT_REASON_NONE;
}

/* Takes one of the pin's connections. The first use of a new pin starts the count anew. */
static __always_inline enum shunt_reason syn_take_connection(const struct session *s, struct session_use *use)
{
	__u32 was = *(volatile __u32 *)&use->serial;

	if (was != s->serial && __sync_val_compare_and_swap(&use->serial, was, s->serial) == was)
		*(volatile __u32 *)&use->connections = 0;
	if (__sync_fetch_and_add(&use->connections, 1) >= s->connections && s->connections) {
		__sync_fetch_and_add(&use->connections, -1);
		return SHUNT_PASS_LEASE_USED_UP;
	}
	__sync_fetch_and_add(&use->open, 1);
	return SHUNT_REASON_NONE;
}

/* Adds first and looks then, so that no two processors can both take the last tokens. */
static __always_inline enum shunt_reason syn_take_tokens(struct weight *w, __s64 charge)
{
	__s64 had = __sync_fetch_and_add(&w->kernel_tokens, charge);
	__s64 limit = *(volatile __s64 *)&w->limit;

	if (limit <= 0 || *(volatile __s64 *)&w->l7_tokens + had + charge > limit) {
		__sync_fetch_and_add(&w->kernel_tokens, -charge);
		return SHUNT_PASS_OVER_LIMIT;
	}
	__sync_fetch_and_add(&w->kernel_half_open, charge);
	__sync_fetch_and_add(&w->kernel_flows, 1);
	return SHUNT_REASON_NONE;
}

/* REASON_NONE: the flow is open. */
static __noinline enum shunt_reason syn_verdict(void *ctx, const struct pkt *p, void *data, void *end)
{
	struct session_use *use;
	enum shunt_reason why;
	struct backend *b;
	struct session *s;
	struct config *c;
	struct weight *w;
	struct epoch *e;
	struct vip *v;
	struct opening *o;
	__u32 zero = 0;

	o = bpf_map_lookup_elem(&shunt_scratch, &zero);
	if (!o)
		return SHUNT_PASS_NO_VIP;
	addr_copy(o->vip_key.addr, p->key.dst);
	o->vip_key.port = p->key.dport;
	o->vip_key.pad = 0;
	v = bpf_map_lookup_elem(&shunt_vips, &o->vip_key);
	if (!v || (v->mode != SHUNT_MODE_NAT && v->mode != SHUNT_MODE_DSR))
		return SHUNT_PASS_NO_VIP;
	o->session.pad = 0;
	addr_copy(o->session.client, p->key.src);
	o->session.vip_id = v->id;
	o->session.port = o->vip_key.port;
	s = bpf_map_lookup_elem(&shunt_sessions, &o->session);
	c = bpf_map_lookup_elem(&shunt_config, &zero);
	if (!s || !c)
		return SHUNT_PASS_NO_SESSION;
	use = bpf_map_lookup_elem(&shunt_sess_use, &o->session);
	o->now = bpf_ktime_get_ns();
	why = syn_lease(c, s, use, o->now);
	if (why)
		return why;

	o->backend = s->backend;
	o->charge = s->tokens;
	o->vip = *v;
	e = bpf_map_lookup_elem(&shunt_epochs, &o->backend);
	o->epoch = e ? *(volatile __u32 *)&e->value : 0; /* before the record: a change between the two is seen later */
	b = bpf_map_lookup_elem(&shunt_backends, &o->backend);
	w = bpf_map_lookup_elem(&shunt_weights, &o->backend);
	if (!b || !w)
		return SHUNT_PASS_BACKEND_UNKNOWN;
	why = syn_backend(s, b, o->backend, v, p->v6, o->vip_key.port);
	if (why)
		return why;
	why = syn_guards(ctx, p, data, end);
	if (why)
		return why;

	if (!use)
		use = syn_use(&o->session);
	if (!use)
		return SHUNT_PASS_TABLE_FULL;
	why = syn_rate(c, use, o->session.vip_id, o->now);
	if (why)
		return why;
	why = syn_question(c, s, use, o->now);
	if (why) {
		if (why == SHUNT_PASS_SAMPLED)
			event_emit(SHUNT_EVENT_SAMPLED, &p->key, o->backend, o->session.vip_id, o->now, o->charge);
		return why;
	}
	why = syn_take_connection(s, use);
	if (why)
		return why;
	why = syn_take_tokens(w, o->charge);
	if (!why) {
		why = nat_open(p, o);
		if (!why) {
			use->last_ns = o->now;
			count_opened(o->backend);
			event_emit(SHUNT_EVENT_OPEN, &p->key, o->backend, o->session.vip_id, o->now, o->charge);
			return SHUNT_REASON_NONE;
		}
		weight_return(o->backend, o->charge, o->charge, 1);
	}
	__sync_fetch_and_add(&use->connections, -1);
	__sync_fetch_and_add(&use->open, -1);
	if (why == SHUNT_PASS_TABLE_FULL)
		event_emit(SHUNT_EVENT_FULL, &p->key, o->backend, o->session.vip_id, o->now, o->charge);
	return why;
}

#endif
