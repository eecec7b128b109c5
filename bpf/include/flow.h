/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The life of a flow after it was opened: pairs of entries, settled accounts, expiry.
 *
 * An entry is deleted only by whoever sets SHUNT_FLOW_DEAD, accounts are settled only by whoever sets
 * SHUNT_FLOW_CLOSED: both by fetch_or, so each happens once however many processors, timers and packets meet.
 */
#ifndef SHUNT_FLOW_H
#define SHUNT_FLOW_H

#include "count.h"
#include "maps.h"
#include "parse.h"

#define SECOND 1000000000ULL

/* Functions that are not static are verified once, each by itself, and not again for every path that leads to them:
 * inlined, this program is beyond the verifier's million. They see their arguments as memory that may be absent. */

/* A packet's facts, and what the SYN path puts together to open a flow. The stack is too small for it; programs of one
 * processor do not interrupt each other. */
struct opening {
	struct pkt pkt;
	struct flow flow;
	struct flow_key reverse_key;
	struct session_key session;
	struct session_key settled; /* flow_settle's */
	struct vip_key vip_key;
	struct vip vip;
	__u32 backend;
	__u32 charge;
	__u32 epoch;
	__u32 pad;
	__u64 now;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct opening);
} shunt_scratch SEC(".maps");

/* Constants of a loaded program; the daemon may set them before it loads, tests do. */
const volatile __u64 half_open_ns = 3 * SECOND;
const volatile __u64 established_ns = 7500 * SECOND; /* above RFC 5382's 2 h 4 min */
const volatile __u64 fin_ns = 600 * SECOND;          /* only the backend has closed */
const volatile __u64 closed_ns = 6 * SECOND;         /* for retransmissions; a stamp may be a second late */
const volatile __u64 held_ns = 62 * SECOND;          /* the backend's TIME_WAIT is 60 s */

static __always_inline __u32 flow_flags(const struct flow *f)
{
	return *(const volatile __u32 *)&f->flags;
}

static __always_inline __u32 flow_mark(struct flow *f, __u32 bits)
{
	return __sync_fetch_and_or(&f->flags, bits);
}

static __always_inline void flow_key4(struct flow_key4 *to, const struct flow_key *k)
{
	*(__u32 *)to->src = *(const __u32 *)&k->src[12];
	*(__u32 *)to->dst = *(const __u32 *)&k->dst[12];
	to->sport = k->sport;
	to->dport = k->dport;
}

static __always_inline void flow_key6(struct flow_key *to, const struct flow_key4 *k)
{
	addr4(to->src, *(const __u32 *)k->src);
	addr4(to->dst, *(const __u32 *)k->dst);
	to->sport = k->sport;
	to->dport = k->dport;
}

static __noinline struct flow *flow_find(const struct flow_key *k)
{
	struct flow_key4 k4;

	if (!addr_is4(k->src))
		return bpf_map_lookup_elem(&shunt_flows6, k);
	flow_key4(&k4, k);
	return bpf_map_lookup_elem(&shunt_flows, &k4);
}

static __noinline long flow_insert(const struct flow_key *k, const struct flow *f)
{
	struct flow_key4 k4;

	if (!addr_is4(k->src))
		return bpf_map_update_elem(&shunt_flows6, k, f, BPF_NOEXIST);
	flow_key4(&k4, k);
	return bpf_map_update_elem(&shunt_flows, &k4, f, BPF_NOEXIST);
}

static __noinline long flow_erase(const struct flow_key *k)
{
	struct flow_key4 k4;

	if (!addr_is4(k->src))
		return bpf_map_delete_elem(&shunt_flows6, k);
	flow_key4(&k4, k);
	return bpf_map_delete_elem(&shunt_flows, &k4);
}

static __always_inline __u64 flow_bytes(const struct flow *f)
{
	return (__u64)f->bytes_high << 32 | f->bytes;
}

static __always_inline __u32 tick(__u64 ns)
{
	return ns >> SHUNT_TICK_SHIFT;
}

/* flow_silent for a time in ticks. */
static __always_inline int tick_silent(__u32 now, __u32 last, __u64 limit_ns)
{
	return (__s32)(now - last) > (__s32)(limit_ns >> SHUNT_TICK_SHIFT);
}

/* Who sends the client's packets: a hash, as a wrong match costs only a late notice of a gateway that moved. */
static __always_inline __u32 flow_peer(const void *mac, __u32 iif)
{
	const __u16 *m = mac;

	return ((__u32)m[1] << 16 | m[2]) ^ (iif + m[0]) * 0x9e3779b1;
}

/* The key of the entry for packets that answer f's. */
static __always_inline void flow_other_key(struct flow_key *k, const struct flow *f)
{
	addr_copy(k->src, f->dst);
	addr_copy(k->dst, f->src);
	k->sport = f->dport;
	k->dport = f->sport;
}

/* Whether packets that answer f's have key k. */
static __always_inline int flow_answers(const struct flow *f, const struct flow_key *k)
{
	return f->dport == k->sport && f->sport == k->dport && addr_equal(f->dst, k->src) && addr_equal(f->src, k->dst);
}

static __always_inline int flow_tcp_closed(__u32 flags)
{
	return flags & SHUNT_FLOW_RST || (flags & (SHUNT_FLOW_CFIN | SHUNT_FLOW_BFIN)) == (SHUNT_FLOW_CFIN | SHUNT_FLOW_BFIN);
}

static __always_inline __u64 flow_closed_limit(__u32 flags)
{
	return flags & SHUNT_FLOW_BFIN1 && !(flags & SHUNT_FLOW_RST) ? held_ns : closed_ns;
}

/* How long a connection with these flags of its forward entry may be silent. */
static __always_inline __u64 flow_limit(__u32 flags)
{
	if (flow_tcp_closed(flags))
		return flow_closed_limit(flags);
	if (!(flags & SHUNT_FLOW_ESTAB))
		return half_open_ns;
	if (flags & SHUNT_FLOW_BFIN)
		return fin_ns;
	return established_ns;
}

static __always_inline int flow_silent(__u64 now, __u64 last, __u64 limit)
{
	return (__s64)(now - last) > (__s64)limit;
}

static __always_inline void weight_return(__u32 backend, __s64 tokens, __s64 half_open, __s64 flows)
{
	struct weight *w = bpf_map_lookup_elem(&shunt_weights, &backend);

	if (!w)
		return;
	__sync_fetch_and_add(&w->kernel_tokens, -tokens);
	__sync_fetch_and_add(&w->kernel_half_open, -half_open);
	__sync_fetch_and_add(&w->kernel_flows, -flows);
}

/* Gives back what the connection took; k and fwd are its forward key and entry. */
__noinline int flow_settle(const struct flow_key *k, struct flow *fwd, const struct flow *rev, __u64 now)
{
	__u32 was, backend, charge, zero = 0;
	struct session_use *use;
	struct opening *o;
	struct event *e;

	o = bpf_map_lookup_elem(&shunt_scratch, &zero);
	if (!k || !fwd || !o)
		return 0;
	was = flow_mark(fwd, SHUNT_FLOW_CLOSED);
	backend = fwd->backend;
	if (was & SHUNT_FLOW_CLOSED)
		return 0;
	charge = __sync_lock_test_and_set(&fwd->charge, 0);
	weight_return(backend, charge, was & SHUNT_FLOW_ESTAB ? 0 : charge, 1);
	addr_copy(o->settled.client, k->src);
	o->settled.vip_id = fwd->vip_id;
	o->settled.port = k->dport;
	o->settled.pad = 0;
	use = bpf_map_lookup_elem(&shunt_sess_use, &o->settled);
	if (use)
		__sync_fetch_and_add(&use->open, -1);
	count_closed(backend);
	e = event_start(SHUNT_EVENT_CLOSE, k, backend, fwd->vip_id, now);
	if (!e)
		return 1;
	e->bytes_in = flow_bytes(fwd);
	e->bytes_out = rev ? flow_bytes(rev) : fwd->answered;
	e->duration_ns = now - fwd->created_ns;
	e->tokens = charge;
	event_submit(e);
	return 1;
}

static __always_inline __u32 flow_unmark(struct flow *f, __u32 bits)
{
	return __sync_fetch_and_and(&f->flags, ~bits);
}

/* Changes what an open connection charges. Whoever closes it meanwhile finds the new charge or leaves it to us. */
static __always_inline void flow_charge(struct flow *fwd, __u32 to)
{
	__u32 was = __sync_lock_test_and_set(&fwd->charge, to);

	weight_return(fwd->backend, (__s64)was - to, 0, 0);
	if (flow_flags(fwd) & SHUNT_FLOW_CLOSED)
		weight_return(fwd->backend, __sync_lock_test_and_set(&fwd->charge, 0), 0, 0);
}

/* A request begins on an open connection: it charges what the first one did. */
static __always_inline void flow_asked(struct flow *fwd, struct flow *rev, const struct config *c)
{
	flow_unmark(fwd, SHUNT_FLOW_ANSWERED);
	if (rev)
		flow_unmark(rev, SHUNT_FLOW_ANSWERED);
	if (c->output_permille)
		flow_charge(fwd, fwd->tokens);
}

/* Its answer begins: the prompt has been read. */
static __always_inline void flow_answered(struct flow *fwd, const struct config *c, __u32 bytes)
{
	__u32 left = (__u64)fwd->tokens * c->output_permille / 1000;

	flow_mark(fwd, SHUNT_FLOW_ANSWERED);
	fwd->seen = bytes;
	if (c->output_permille && left < fwd->charge)
		flow_charge(fwd, left);
}

/* The handshake is complete: from here on the charge counts for the L7's choices too. */
static __always_inline void flow_establish(struct flow *fwd)
{
	__u32 charge = *(volatile __u32 *)&fwd->charge; /* read first: whoever settles after the mark leaves the half-open part to us */
	__u32 was = flow_mark(fwd, SHUNT_FLOW_ESTAB | SHUNT_FLOW_ANSWERED);

	if (!(was & (SHUNT_FLOW_ESTAB | SHUNT_FLOW_CLOSED)))
		weight_return(fwd->backend, 0, charge, 0);
}

/* Deletes the entry unless someone else is about to. */
static __always_inline int flow_delete(const struct flow_key *k, struct flow *f)
{
	if (flow_mark(f, SHUNT_FLOW_DEAD) & SHUNT_FLOW_DEAD)
		return 0;
	flow_erase(k);
	return 1;
}

/* Ends a connection: accounts settled, both entries deleted. */
__noinline int flow_remove(const struct flow_key *k, struct flow *fwd, __u64 now)
{
	struct flow_key rk;
	struct flow *rev;

	if (!k || !fwd)
		return 0;
	flow_other_key(&rk, fwd);
	rev = flow_find(&rk);
	if (rev && !flow_answers(rev, k))
		rev = 0;
	flow_settle(k, fwd, rev, now);
	if (rev)
		flow_delete(&rk, rev);
	return flow_delete(k, fwd);
}

/* Deletes the client's half of a closed connection, so that its tuple can be used again; the other half stays and
 * holds the NAT port for as long as the backend may remember it. */
__noinline int flow_release(const struct flow_key *k, struct flow *fwd, __u64 now)
{
	struct flow_key rk;
	struct flow *rev;
	__u32 flags;

	if (!k || !fwd)
		return 0;
	flags = flow_flags(fwd);
	flow_other_key(&rk, fwd);
	rev = flow_find(&rk);
	flow_settle(k, fwd, rev, now);
	if (!flow_delete(k, fwd))
		return 0;
	if (rev && flow_answers(rev, k)) {
		if ((__s32)(fwd->last - rev->last) > 0)
			rev->last = fwd->last;
		flow_mark(rev, SHUNT_FLOW_HELD | (flags & (SHUNT_FLOW_CFIN | SHUNT_FLOW_BFIN | SHUNT_FLOW_BFIN1 | SHUNT_FLOW_RST)));
	}
	return 1;
}

const volatile __u64 wait_ns = 600 * SECOND; /* for an answer's first byte */

/* Once a second: the charge follows the answer's bytes, and an idle connection charges nothing. */
__noinline int flow_decay(struct flow *fwd, struct flow *rev, __u32 idle)
{
	__u32 zero = 0, flags, out, moved, give = 0, charge;
	struct config *c = bpf_map_lookup_elem(&shunt_config, &zero);

	if (!fwd || !c || !c->output_permille)
		return 0;
	flags = flow_flags(fwd);
	charge = *(volatile __u32 *)&fwd->charge;
	out = rev ? rev->bytes : fwd->answered;
	moved = out - fwd->seen;
	fwd->seen = out;
	if (!charge || (flags & (SHUNT_FLOW_ESTAB | SHUNT_FLOW_CLOSED)) != SHUNT_FLOW_ESTAB)
		return 0;
	if (flags & SHUNT_FLOW_ANSWERED && c->answer_bytes)
		give = moved / c->answer_bytes;
	if (tick_silent(idle, 0, flags & SHUNT_FLOW_ANSWERED ? c->decay_s * SECOND : wait_ns))
		give = charge;
	if (give)
		flow_charge(fwd, give < charge ? charge - give : 0);
	return 1;
}

/* Whether the daemon has ended what the backend has open. */
static __always_inline int flow_backend_killed(__u32 id)
{
	struct epoch *e = bpf_map_lookup_elem(&shunt_epochs, &id);

	return e && *(volatile __u32 *)&e->kill;
}

/* Deletes what is overdue. k and f may be either half; returns 1 if f is gone. */
__noinline int flow_expire(const struct flow_key *k, struct flow *f, __u64 now)
{
	struct flow *other, *fwd, *rev;
	const struct flow_key *fk;
	__u32 last, other_last, t = tick(now);
	struct flow_key ok;
	__u32 flags, reverse;
	int gone;

	if (!k || !f)
		return 0;
	flags = flow_flags(f);
	last = *(volatile __u32 *)&f->last;
	flow_other_key(&ok, f);
	other = flow_find(&ok);
	if (other && !flow_answers(other, k))
		other = 0;
	if (flags & SHUNT_FLOW_REVERSE && !other)
		return tick_silent(t, last, flow_closed_limit(flags)) && flow_delete(k, f);
	if (other) {
		other_last = *(volatile __u32 *)&other->last;
		if ((__s32)(other_last - last) > 0)
			last = other_last;
	}
	reverse = flags & SHUNT_FLOW_REVERSE;
	fwd = reverse ? other : f;
	rev = reverse ? f : other;
	fk = reverse ? &ok : k;
	flags = flow_flags(fwd);
	if (flow_backend_killed(fwd->backend) && !(flags & SHUNT_FLOW_KILLED)) {
		if (rev)
			flow_mark(rev, SHUNT_FLOW_KILLED);
		flow_mark(fwd, SHUNT_FLOW_KILLED | SHUNT_FLOW_RST);
		flow_settle(fk, fwd, rev, now);
		flags = flow_flags(fwd);
	}
	gone = tick_silent(t, last, flow_limit(flags));
	if (gone || (flags & SHUNT_FLOW_SUSPECT && tick_silent(t, last, closed_ns)))
		flow_settle(fk, fwd, rev, now);
	if (!gone) {
		if (!reverse)
			flow_decay(fwd, rev, t - last);
		return 0;
	}
	if (other)
		flow_delete(&ok, other);
	return flow_delete(k, f);
}

#endif
