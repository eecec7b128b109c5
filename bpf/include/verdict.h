/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * From the facts of a packet to what becomes of it; the same for every attach point. The order is part of the
 * contract (README.md): flow, then SYN, and whatever is neither belongs to the stack. A packet of a flow is never
 * passed: the stack knows nothing of it and would answer with a RST.
 */
#ifndef SHUNT_VERDICT_H
#define SHUNT_VERDICT_H

#include "syn.h"

const volatile __u64 retry_ns = 900000000ULL; /* a SYN repeated after this was lost or refused in silence */

enum { SEQ_WINDOW = 1 << 26 }; /* how far a segment may lie from what was acknowledged last */
enum { AGAIN = -1 };           /* the flow is gone: decide as if it had never been */

/* Ends a connection for the daemon: accounts settled, and from here on both sides' packets are answered with a RST. */
__noinline int flow_kill(const struct flow_key *k, struct flow *fwd, __u64 now)
{
	struct flow_key rk;
	struct flow *rev;

	if (!k || !fwd)
		return 0;
	flow_other_key(&rk, fwd);
	rev = flow_find(&rk);
	if (rev && flow_answers(rev, k))
		flow_mark(rev, SHUNT_FLOW_KILLED);
	else
		rev = 0;
	flow_mark(fwd, SHUNT_FLOW_KILLED | SHUNT_FLOW_RST);
	return flow_settle(k, fwd, rev, now);
}

/* Takes over where the backend is now. A record of another backend under the same id changes nothing: the flow goes
 * on to where it went. Returns 1 if its flows are to be ended. */
__noinline int flow_refresh(struct flow *f)
{
	struct backend *b;
	struct epoch *e;
	__u32 id, value;

	if (!f)
		return 0;
	id = f->backend;
	e = bpf_map_lookup_elem(&shunt_epochs, &id);
	if (!e)
		return 0;
	value = *(volatile __u32 *)&e->value;
	b = bpf_map_lookup_elem(&shunt_backends, &id);
	if (b && (flow_flags(f) & SHUNT_FLOW_DSR || (b->port == f->dport && addr_equal(b->addr, f->dst))) && b->ifindex &&
	    mac_known(b->mac) && mac_known(b->src_mac)) {
		mac_copy(f->dst_mac, b->mac);
		mac_copy(f->src_mac, b->src_mac);
		f->oif = b->ifindex;
	}
	f->epoch = value;
	return *(volatile __u32 *)&e->kill != 0;
}

/* The client's packets come from elsewhere: its gateway moved. A segment that does not fit the connection is not
 * believed. */
__noinline int flow_relearn(struct flow *fwd, const struct pkt *p)
{
	struct flow_key rk;
	struct flow *rev;

	if (!fwd || !p)
		return 0;
	if (!(flow_flags(fwd) & SHUNT_FLOW_DSR)) {
		flow_other_key(&rk, fwd);
		rev = flow_find(&rk);
		if (!rev || p->seq - rev->ack + SEQ_WINDOW / 2 >= SEQ_WINDOW)
			return 0;
		mac_copy(rev->dst_mac, p->src_mac);
		mac_copy(rev->src_mac, p->dst_mac);
		rev->oif = p->iif;
	}
	fwd->peer = flow_peer(p->src_mac, p->iif);
	return 1;
}

/* The backend refused or did not answer: the L7 takes over. The pin goes, else the next SYN would go the same way; the
 * operator's own pins rest for a while instead. */
static __always_inline void connect_failed(const struct flow_key *k, struct flow *fwd, __u64 now)
{
	struct session_key sk = {.vip_id = fwd->vip_id, .port = k->dport};
	struct session_use *use;
	struct session *s;

	addr_copy(sk.client, k->src);
	event_emit(SHUNT_EVENT_FAILOVER, k, fwd->backend, fwd->vip_id, now, fwd->charge);
	s = bpf_map_lookup_elem(&shunt_sessions, &sk);
	if (s && s->backend == fwd->backend) {
		if (s->flags & SHUNT_PIN_STATIC) {
			use = bpf_map_lookup_elem(&shunt_sess_use, &sk);
			if (use)
				use->failed_ns = now;
		} else {
			bpf_map_delete_elem(&shunt_sessions, &sk);
		}
	}
	flow_remove(k, fwd, now);
}

/* SYN of the client on an existing flow. */
static __always_inline int on_syn(const struct pkt *p, struct flow *fwd, __u64 now)
{
	__u32 flags = flow_flags(fwd);

	if (flow_tcp_closed(flags)) {
		flow_release(&p->key, fwd, now);
		return AGAIN;
	}
	if (flags & SHUNT_FLOW_SYNACK || !flow_silent(now, fwd->created_ns, retry_ns))
		return SHUNT_REASON_NONE;
	connect_failed(&p->key, fwd, now);
	return SHUNT_PASS_CONNECT_FAILED;
}

static __always_inline int on_rst(const struct pkt *p, const struct flow_key *k, struct flow *fwd, struct flow *rev, int reverse,
				  __u64 now)
{
	struct flow *other = reverse ? fwd : rev;

	if (reverse && !(flow_flags(fwd) & SHUNT_FLOW_SYNACK)) {
		if (!(p->tcp_flags & TCP_ACK) || p->ack != rev->ack)
			return SHUNT_REASON_NONE; /* the client ignores it too */
		connect_failed(k, fwd, now);
		return SHUNT_DROP_CONNECT_RESET;
	}
	if (p->seq == other->ack) {
		flow_mark(fwd, SHUNT_FLOW_RST);
		flow_settle(k, fwd, rev, now);
	} else {
		flow_mark(fwd, SHUNT_FLOW_SUSPECT);
	}
	return SHUNT_REASON_NONE;
}

static __always_inline void on_fin(const struct pkt *p, const struct flow_key *k, struct flow *fwd, struct flow *rev, int reverse,
				   __u64 now)
{
	__u32 was;

	if (p->seq - (reverse ? fwd : rev)->ack >= SEQ_WINDOW)
		return; /* the receiver ignores it too */
	if (!reverse) {
		fwd->fin = p->seq + (p->tcp_len - p->tcp_head) + 1;
		was = flow_mark(fwd, SHUNT_FLOW_CFIN);
	} else {
		was = flow_flags(fwd);
		/* First, or at the same time: it goes to TIME_WAIT unless this acknowledges the client's FIN. */
		if (!(was & SHUNT_FLOW_BFIN) && !(was & SHUNT_FLOW_CFIN && p->ack == fwd->fin))
			flow_mark(fwd, SHUNT_FLOW_BFIN1);
		was = flow_mark(fwd, SHUNT_FLOW_BFIN);
	}
	if (flow_tcp_closed(was | (reverse ? SHUNT_FLOW_BFIN : SHUNT_FLOW_CFIN)))
		flow_settle(k, fwd, rev, now);
}

static __always_inline __u32 pkt_end(const struct pkt *p)
{
	return p->seq + (p->tcp_len - p->tcp_head) + !!(p->tcp_flags & TCP_SYN) + !!(p->tcp_flags & TCP_FIN);
}

/* The same where only the client is seen. Its FIN ends the connection as far as the accounts go: a client that goes on
 * to read keeps the entry alive by acknowledging. */
static __always_inline int on_control_dsr(const struct pkt *p, struct flow *f, __u64 now)
{
	if (p->tcp_flags & TCP_RST) {
		if (p->seq == f->fin) {
			flow_mark(f, SHUNT_FLOW_RST);
			flow_settle(&p->key, f, 0, now);
		} else {
			flow_mark(f, SHUNT_FLOW_SUSPECT);
		}
	} else if (p->tcp_flags & TCP_SYN) {
		return p->tcp_flags & TCP_ACK ? SHUNT_REASON_NONE : on_syn(p, f, now);
	} else if (pkt_end(p) - f->fin < SEQ_WINDOW) {
		flow_mark(f, SHUNT_FLOW_CFIN | SHUNT_FLOW_BFIN);
		flow_settle(&p->key, f, 0, now);
	}
	f->last = tick(now);
	return SHUNT_REASON_NONE;
}

/* A packet with SYN, FIN or RST on a flow; f is the entry that it hit. */
__noinline int on_control(const struct pkt *p, struct flow *f)
{
	struct flow *other, *fwd, *rev;
	struct flow_key ok;
	__u64 now;
	int reverse;

	if (!p || !f)
		return SHUNT_DROP_FLOW_CLOSED;
	now = bpf_ktime_get_ns();
	if (flow_flags(f) & SHUNT_FLOW_DSR)
		return on_control_dsr(p, f, now);
	reverse = !!(flow_flags(f) & SHUNT_FLOW_REVERSE);
	flow_other_key(&ok, f);
	other = flow_find(&ok);
	if (!other || !flow_answers(other, &p->key)) {
		if (reverse)
			return SHUNT_DROP_FLOW_CLOSED;
		/* Without its other half it cannot work: end it, and let the L7 have the next SYN. */
		flow_remove(&p->key, f, now);
		return p->tcp_flags & TCP_SYN ? AGAIN : SHUNT_DROP_FLOW_CLOSED;
	}
	fwd = reverse ? other : f;
	rev = reverse ? f : other;
	if (p->tcp_flags & TCP_RST) {
		f->last = tick(now);
		return on_rst(p, reverse ? &ok : &p->key, fwd, rev, reverse, now);
	}
	if (p->tcp_flags & TCP_SYN) {
		if (!reverse)
			return p->tcp_flags & TCP_ACK ? SHUNT_REASON_NONE : on_syn(p, fwd, now);
		if (p->tcp_flags & TCP_ACK && p->ack == rev->ack && !(flow_mark(fwd, SHUNT_FLOW_SYNACK) & SHUNT_FLOW_SYNACK)) {
			flow_mark(rev, SHUNT_FLOW_SYNACK);
			fwd->ack = p->seq + 1;
			rev->last = tick(now);
		}
		return SHUNT_REASON_NONE;
	}
	f->last = tick(now);
	on_fin(p, reverse ? &ok : &p->key, fwd, rev, reverse, now);
	return SHUNT_REASON_NONE;
}

/* Bookkeeping of a packet that f forwards. */
static __always_inline void flow_count(struct flow *f, int reverse, __u32 len)
{
	__u32 bytes = f->bytes + len;

	if (bytes < len)
		f->bytes_high++;
	f->bytes = bytes;
	f->packets++;
	count_packet(f->backend, reverse, len);
}

/* dsr: what the client's next RST has to carry. */
static __always_inline void flow_sent(struct flow *f, __u32 end)
{
	if (end - f->fin < SEQ_WINDOW)
		f->fin = end;
}

static __always_inline void flow_acked(struct flow *f, __u32 flags, __u32 ack)
{
	__u32 now = tick(bpf_ktime_get_coarse_ns());

	if (flags & SHUNT_FLOW_DSR && flags & SHUNT_FLOW_ESTAB && ack - f->ack < SEQ_WINDOW)
		f->answered += ack - f->ack;
	f->ack = ack;
	if (tick_silent(now, f->last, SECOND))
		f->last = now;
}

/* The packet of an open flow that nothing has happened to, which is nearly every packet: forwards it here and now.
 * 0: on_forward and verdict have to look closer; nothing has changed. */
static __always_inline int flow_fast(struct flow *f, const struct tcphdr *t, __u32 len, __u32 ip_head, const void *src_mac, __u32 iif)
{
	__u8 tcp_flags = ((const __u8 *)t)[13];
	__u32 flags = flow_flags(f), id = f->backend, data;

	if ((tcp_flags & (TCP_SYN | TCP_FIN | TCP_RST | TCP_ACK)) != TCP_ACK)
		return 0;
	if ((flags & (SHUNT_FLOW_SYNACK | SHUNT_FLOW_HELD | SHUNT_FLOW_KILLED)) != SHUNT_FLOW_SYNACK)
		return 0;
	data = len - ip_head - (((const __u8 *)t)[12] >> 4) * 4;
	if (data && !(flags & (flags & SHUNT_FLOW_ANSWERED ? SHUNT_FLOW_REVERSE : SHUNT_FLOW_FORWARD)))
		return 0; /* a request or an answer begins */
	if (flags & SHUNT_FLOW_DSR && !(flags & SHUNT_FLOW_ANSWERED) && bpf_ntohl(t->ack_seq) != f->ack)
		return 0;
	if (!(flags & SHUNT_FLOW_REVERSE)) {
		struct epoch *e = bpf_map_lookup_elem(&shunt_epochs, &id);

		if (!(flags & SHUNT_FLOW_ESTAB) || !e || *(volatile __u32 *)&e->value != f->epoch || f->peer != flow_peer(src_mac, iif))
			return 0;
	}
	if (flags & SHUNT_FLOW_DSR)
		flow_sent(f, bpf_ntohl(t->seq) + data);
	flow_acked(f, flags, bpf_ntohl(t->ack_seq));
	flow_count(f, flags & SHUNT_FLOW_REVERSE, len);
	return 1;
}

/* A segment with data, or with dsr one that acknowledges data: a request or an answer may begin with it. */
__noinline int on_data(const struct pkt *p, struct flow *f)
{
	struct flow_key ok;
	__u32 zero = 0, flags;
	struct config *c = bpf_map_lookup_elem(&shunt_config, &zero);
	struct flow *other = 0;

	if (!p || !f || !c)
		return 0;
	flags = flow_flags(f);
	if (!(flags & SHUNT_FLOW_DSR)) {
		flow_other_key(&ok, f);
		other = flow_find(&ok);
		if (!other)
			return 0;
	}
	if (flags & SHUNT_FLOW_REVERSE) {
		flow_mark(f, SHUNT_FLOW_ANSWERED);
		flow_answered(other ? other : f, c, f->bytes);
	} else if (p->tcp_len > p->tcp_head) {
		flow_asked(f, other, c);
	} else if (flags & SHUNT_FLOW_DSR) {
		flow_answered(f, c, f->answered);
	}
	return 1;
}

/* The same with all that may be new. Returns 0 when the flow is to be ended. */
static __always_inline int on_forward(const struct pkt *p, struct flow *f)
{
	__u32 flags = flow_flags(f);
	int reverse = !!(flags & SHUNT_FLOW_REVERSE), open = p->tcp_flags & TCP_ACK && !(p->tcp_flags & (TCP_SYN | TCP_RST));
	__u32 id = f->backend;

	if (!reverse) {
		struct epoch *e = bpf_map_lookup_elem(&shunt_epochs, &id);

		if (e && *(volatile __u32 *)&e->value != f->epoch && flow_refresh(f)) {
			flow_kill(&p->key, f, bpf_ktime_get_ns());
			return 0;
		}
		if (f->peer != flow_peer(p->src_mac, p->iif))
			flow_relearn(f, p);
		if (open && flags & SHUNT_FLOW_DSR) {
			flags |= flow_mark(f, SHUNT_FLOW_SYNACK) | SHUNT_FLOW_SYNACK; /* the client says so */
			flow_sent(f, pkt_end(p));
		}
		if (open && (flags & (SHUNT_FLOW_SYNACK | SHUNT_FLOW_ESTAB)) == SHUNT_FLOW_SYNACK)
			flow_establish(f);
	}
	if (open && flags & SHUNT_FLOW_SYNACK) {
		int begins = p->tcp_len > p->tcp_head && (flow_flags(f) & SHUNT_FLOW_ANSWERED ? !reverse : reverse);

		if (begins || (flags & SHUNT_FLOW_DSR && flags & SHUNT_FLOW_ESTAB && !(flags & SHUNT_FLOW_ANSWERED) && p->ack != f->ack))
			on_data(p, f);
	}
	/* Before the SYN-ACK, ack is what it has to acknowledge, and the time is the SYN's. */
	if (open && flags & SHUNT_FLOW_SYNACK)
		flow_acked(f, flags, p->ack);
	flow_count(f, reverse, p->ip_len);
	return 1;
}

/* The verdict on a parsed packet. REASON_NONE: *out is the entry to forward it by. DROP_FLOW_KILLED: the packet may be
 * answered with a RST. */
static __noinline int verdict(void *ctx, struct pkt *p, void *data, void *end, struct flow **out)
{
	struct flow *f = flow_find(&p->key);
	int why = AGAIN;

	if (p->kind == PKT_ICMP) {
		if (!f)
			return SHUNT_PASS_ICMP;
		if (flow_flags(f) & SHUNT_FLOW_HELD)
			return SHUNT_DROP_ICMP;
		*out = f;
		return SHUNT_REASON_NONE;
	}
	if (p->kind == PKT_ODD)
		return f ? SHUNT_DROP_ODD_HEADER : SHUNT_PASS_ODD_HEADER;
	if (f) {
		__u32 flags = flow_flags(f);

		if (flags & SHUNT_FLOW_HELD) {
			f->last = tick(bpf_ktime_get_coarse_ns());
			return SHUNT_DROP_FLOW_CLOSED;
		}
		if (flags & SHUNT_FLOW_KILLED && (p->tcp_flags & (TCP_SYN | TCP_ACK)) != TCP_SYN)
			return SHUNT_DROP_FLOW_KILLED;
		why = SHUNT_REASON_NONE;
		if (p->tcp_flags & (TCP_SYN | TCP_FIN | TCP_RST))
			why = on_control(p, f);
	}
	if (why == AGAIN) {
		if (!pure_syn(p->tcp_flags))
			return SHUNT_PASS_NO_FLOW;
		why = syn_verdict(ctx, p, data, end);
		if (why && why != SHUNT_PASS_TABLE_FULL)
			return why;
		/* Another processor may have opened the flow for the same SYN: then this is its repetition. */
		f = flow_find(&p->key);
		if (!f || flow_flags(f) & (SHUNT_FLOW_CLOSED | SHUNT_FLOW_DEAD))
			return SHUNT_PASS_TABLE_FULL;
		why = SHUNT_REASON_NONE;
	}
	if (why)
		return why;
	if (!on_forward(p, f))
		return SHUNT_DROP_FLOW_KILLED;
	*out = f;
	return SHUNT_REASON_NONE;
}

#endif
