/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Rewriting a packet that is a socket buffer (tcx). Its checksum may be left to a card, and it may be many segments: the
 * kernel's helper knows both. */
#ifndef SHUNT_TC_H
#define SHUNT_TC_H

#include "nat.h"

enum { TC_NEXT = -1, TC_DROP = 2 }; /* TCX_* */

static __always_inline int tc_rewrite_tcp(struct __sk_buff *skb, const struct flow *f, int v6)
{
	__u32 at = (v6 ? V6_L4 : V4_L4) + __builtin_offsetof(struct tcphdr, check);
	void *data, *end;
	int dsr = flow_flags(f) & SHUNT_FLOW_DSR;

	if (!dsr) {
		__u16 ports = csum_fold((__u64)f->l4_diff + (__u16)~f->l3_diff);

		if (bpf_l4_csum_replace(skb, at, 0, f->l3_diff, BPF_F_PSEUDO_HDR) || bpf_l4_csum_replace(skb, at, 0, ports, 0))
			return 0;
	}
	data = (void *)(long)skb->data;
	end = (void *)(long)skb->data_end;
	if (data + V4_L4 + sizeof(struct tcphdr) > end)
		return 0;
	if (!dsr && v6) {
		struct ipv6hdr *ip = data + ETH_HLEN;
		struct tcphdr *t = data + V6_L4;

		if ((void *)(t + 1) > end)
			return 0;
		addr_copy(&ip->saddr, f->src);
		addr_copy(&ip->daddr, f->dst);
		t->source = bpf_htons(f->sport);
		t->dest = bpf_htons(f->dport);
	} else if (!dsr) {
		struct iphdr *ip = data + ETH_HLEN;
		struct tcphdr *t = data + V4_L4;

		ip->saddr = *(__be32 *)f->src4;
		ip->daddr = *(__be32 *)f->dst4;
		ip->check = csum_add(ip->check, f->l3_diff);
		t->source = bpf_htons(f->sport);
		t->dest = bpf_htons(f->dport);
	}
	rewrite_macs(data, f);
	return 1;
}

#endif
