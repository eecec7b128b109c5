/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Full NAT: NAT ports, the pair of entries, and the rewriting of packets in a plain buffer (XDP). */
#ifndef SHUNT_NAT_H
#define SHUNT_NAT_H

#include "csum.h"
#include "flow.h"

enum { NAT_PROBES = 16, ERR_EXIST = -17 };

static __always_inline struct pkt *pkt_new(__u32 iif)
{
	__u32 zero = 0;
	struct opening *o = bpf_map_lookup_elem(&shunt_scratch, &zero);

	if (!o)
		return 0;
	__builtin_memset(&o->pkt, 0, sizeof(o->pkt));
	o->pkt.iif = iif;
	return &o->pkt;
}

/* Whether a VIP or a NAT port has this number: anything else is not ours, and needs no look at the tables. */
static __always_inline int port_ours(__be16 port_be)
{
	__u32 zero = 0, port = bpf_ntohs(port_be);
	const struct ports_map *m = bpf_map_lookup_elem(&shunt_ports, &zero);

	return !m || m->bits[port >> 6] >> (port & 63) & 1;
}

static __always_inline void nat_diffs(struct flow *f, const struct flow_key *k)
{
	__u64 l3 = csum_swap_addr(k->src, f->src) + csum_swap_addr(k->dst, f->dst);

	f->l3_diff = csum_fold(l3);
	f->l4_diff = csum_fold(l3 + csum_swap16(bpf_htons(k->sport), bpf_htons(f->sport)) +
			       csum_swap16(bpf_htons(k->dport), bpf_htons(f->dport)));
}

/* Sets the tuple that the flow's packets leave with. */
static __always_inline void flow_leaves(struct flow *f, const void *src, const void *dst, __u16 sport, __u16 dport)
{
	addr_copy(f->src, src);
	addr_copy(f->dst, dst);
	*(__u32 *)f->src4 = *(__u32 *)&f->src[12];
	*(__u32 *)f->dst4 = *(__u32 *)&f->dst[12];
	f->sport = sport;
	f->dport = dport;
}

/* Inserts the reverse entry under the first free NAT port; the entry is what makes the port ours. */
static __always_inline enum shunt_reason nat_reserve_port(const struct vip *v, struct flow_key *rk, struct flow *rev, __u64 now)
{
	__u32 zero = 0, next;
	struct state *st = bpf_map_lookup_elem(&shunt_state, &zero);

	if (!st || !v->port_count)
		return SHUNT_PASS_NO_PORT;
	for (int i = 0; i < NAT_PROBES; i++) {
		struct flow *old;
		long err;

		next = __sync_fetch_and_add(&st->next_port, 1);
		rk->dport = v->port_base + next % v->port_count;
		nat_diffs(rev, rk);
		err = flow_insert(rk, rev);
		if (err == ERR_EXIST) {
			old = flow_find(rk);
			if (!old || !flow_expire(rk, old, now))
				continue;
			err = flow_insert(rk, rev);
		}
		if (!err)
			return SHUNT_REASON_NONE;
		if (err != ERR_EXIST)
			return SHUNT_PASS_TABLE_FULL;
	}
	return SHUNT_PASS_NO_PORT;
}

/* Opens the one entry of a connection whose answers do not come back here. */
static __always_inline enum shunt_reason dsr_open(const struct pkt *p, struct opening *o, const struct backend *b)
{
	struct flow *f = &o->flow;

	__builtin_memset(f, 0, sizeof(*f));
	flow_leaves(f, p->key.src, p->key.dst, p->key.sport, p->key.dport);
	f->oif = b->ifindex;
	mac_copy(f->dst_mac, b->mac);
	mac_copy(f->src_mac, b->src_mac);
	f->peer = flow_peer(p->src_mac, p->iif);
	f->backend = o->backend;
	f->vip_id = o->vip.id;
	f->flags = SHUNT_FLOW_FORWARD | SHUNT_FLOW_DSR;
	f->epoch = o->epoch;
	f->created_ns = o->now;
	f->last = tick(o->now);
	f->charge = o->charge;
	f->tokens = o->charge;
	f->fin = p->seq + 1;
	return flow_insert(&p->key, f) ? SHUNT_PASS_TABLE_FULL : SHUNT_REASON_NONE;
}

/* Opens the pair of entries for a SYN. */
__noinline int nat_open(const struct pkt *p, struct opening *o)
{
	const struct backend *b;
	enum shunt_reason why;
	struct flow_key *rk;
	struct flow *f;
	__u32 id;
	long err;

	if (!p || !o)
		return SHUNT_PASS_BACKEND_UNKNOWN;
	id = o->backend;
	b = bpf_map_lookup_elem(&shunt_backends, &id);
	if (!b)
		return SHUNT_PASS_BACKEND_UNKNOWN;
	if (o->vip.mode == SHUNT_MODE_DSR)
		return dsr_open(p, o, b);
	f = &o->flow;
	rk = &o->reverse_key;
	__builtin_memset(f, 0, sizeof(*f));
	__builtin_memset(rk, 0, sizeof(*rk));
	flow_leaves(f, p->key.dst, p->key.src, p->key.dport, p->key.sport);
	f->oif = p->iif;
	mac_copy(f->dst_mac, p->src_mac);
	mac_copy(f->src_mac, p->dst_mac);
	f->backend = id;
	f->vip_id = o->vip.id;
	f->flags = SHUNT_FLOW_REVERSE;
	f->ack = p->seq + 1; /* what a SYN-ACK or a refusal has to acknowledge */
	f->epoch = o->epoch;
	f->created_ns = o->now;
	f->last = tick(o->now);
	addr_copy(rk->src, b->addr);
	addr_copy(rk->dst, o->vip.snat);
	rk->sport = b->port;
	why = nat_reserve_port(&o->vip, rk, f, o->now);
	if (why)
		return why;

	flow_leaves(f, rk->dst, rk->src, rk->dport, rk->sport);
	f->oif = b->ifindex;
	mac_copy(f->dst_mac, b->mac);
	mac_copy(f->src_mac, b->src_mac);
	f->peer = flow_peer(p->src_mac, p->iif);
	f->flags = SHUNT_FLOW_FORWARD;
	f->ack = 0;
	f->charge = o->charge;
	f->tokens = o->charge;
	nat_diffs(f, &p->key);
	err = flow_insert(&p->key, f);
	if (!err)
		return SHUNT_REASON_NONE;
	flow_erase(rk);
	return SHUNT_PASS_TABLE_FULL;
}

static __always_inline void nat_rewrite4(struct iphdr *ip, struct tcphdr *t, const struct flow *f)
{
	ip->saddr = *(__be32 *)f->src4;
	ip->daddr = *(__be32 *)f->dst4;
	ip->check = csum_add(ip->check, f->l3_diff);
	t->source = bpf_htons(f->sport);
	t->dest = bpf_htons(f->dport);
	t->check = csum_add(t->check, f->l4_diff);
}

static __always_inline void nat_rewrite6(struct ipv6hdr *ip, struct tcphdr *t, const struct flow *f)
{
	addr_copy(&ip->saddr, f->src);
	addr_copy(&ip->daddr, f->dst);
	t->source = bpf_htons(f->sport);
	t->dest = bpf_htons(f->dport);
	t->check = csum_add(t->check, f->l4_diff);
}

static __always_inline void rewrite_macs(struct ethhdr *eth, const struct flow *f)
{
	__u32 *to = (__u32 *)eth;
	const __u32 *from = (const __u32 *)f->dst_mac; /* and src_mac behind it */

	to[0] = from[0];
	to[1] = from[1];
	to[2] = from[2];
}

/* Makes the frame the one that leaves. Returns 0 when its headers are not in reach. */
static __always_inline int nat_rewrite_tcp(const struct pkt *p, const struct flow *f, void *data, void *end)
{
	if (!(flow_flags(f) & SHUNT_FLOW_DSR)) {
		if (p->v6) {
			if (data + V6_L4 + sizeof(struct tcphdr) > end)
				return 0;
			nat_rewrite6(data + ETH_HLEN, data + V6_L4, f);
		} else {
			if (data + V4_L4 + sizeof(struct tcphdr) > end)
				return 0;
			nat_rewrite4(data + ETH_HLEN, data + V4_L4, f);
		}
	} else if (data + sizeof(struct ethhdr) > end) {
		return 0;
	}
	rewrite_macs(data, f);
	return 1;
}

/* The embedded packet becomes what its sender sent: f turned round. Returns what that adds to the ICMP sum. */
static __always_inline __u64 nat_rewrite_inner(const struct flow *f, struct ports *t, void *end)
{
	struct tcphdr *tcp = (void *)t;
	__u64 diff = f->l4_diff;
	__u16 check;

	t->source = bpf_htons(f->dport);
	t->dest = bpf_htons(f->sport);
	if ((void *)(tcp + 1) > end) /* eight bytes is all that must be there */
		return diff;
	check = csum_apply(tcp->check, f->l4_diff);
	diff += csum_swap16(tcp->check, check);
	tcp->check = check;
	return diff;
}

static __noinline int nat_rewrite_icmp(const struct pkt *p, const struct flow *f, void *data, void *end)
{
	struct ethhdr *eth = data;
	struct icmp_head *h;
	__u64 diff;

	if (flow_flags(f) & SHUNT_FLOW_DSR) { /* about a packet that the backend sent as the VIP */
		if ((void *)(eth + 1) > end)
			return 0;
		rewrite_macs(eth, f);
		return 1;
	}
	if (p->v6) {
		struct ipv6hdr *ip = data + ETH_HLEN, *in = data + V6_L4 + ICMP_LEN;
		struct ports *t = (void *)(in + 1);

		h = data + V6_L4;
		if ((void *)(t + 1) > end)
			return 0;
		diff = nat_rewrite_inner(f, t, end);
		addr_copy(&in->saddr, f->dst);
		addr_copy(&in->daddr, f->src);
		diff += csum_swap_addr(&ip->saddr, f->src) + csum_swap_addr(&ip->daddr, f->dst);
		addr_copy(&ip->saddr, f->src);
		addr_copy(&ip->daddr, f->dst);
	} else {
		struct iphdr *ip = data + ETH_HLEN, *in = data + V4_L4 + ICMP_LEN;
		struct ports *t = (void *)(in + 1);
		__be32 src = *(__be32 *)&f->src[12], dst = *(__be32 *)&f->dst[12];
		__u16 check;

		h = data + V4_L4;
		if ((void *)(t + 1) > end)
			return 0;
		diff = nat_rewrite_inner(f, t, end);
		in->saddr = dst;
		in->daddr = src;
		check = csum_apply(in->check, f->l3_diff);
		diff += csum_swap16(in->check, check);
		in->check = check;
		ip->check = csum_apply(ip->check, csum_swap32(ip->saddr, src) + csum_swap32(ip->daddr, dst));
		ip->saddr = src;
		ip->daddr = dst;
	}
	h->check = csum_apply(h->check, diff);
	rewrite_macs(eth, f);
	return 1;
}

#endif
