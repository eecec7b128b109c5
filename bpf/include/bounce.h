/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The RST that answers a packet of a flow that was ended. Nothing has to be known of the connection: the packet's own
 * acknowledgement is the one sequence number at which its sender takes a RST (RFC 9293, 3.10.7.4).
 */
#ifndef SHUNT_BOUNCE_H
#define SHUNT_BOUNCE_H

#include "csum.h"

enum { BOUNCE4 = V4_L4 + sizeof(struct tcphdr), BOUNCE6 = V6_L4 + sizeof(struct tcphdr), BOUNCE_TTL = 64 };

static __always_inline __u64 csum_words(const void *from, int n)
{
	const __u32 *w = from;
	__u64 sum = 0;

	for (int i = 0; i < n; i++)
		sum += w[i];
	return sum;
}

/* The sum of TCP's pseudo header, from that of the addresses. */
static __always_inline __u64 csum_pseudo(__u64 addrs, __u32 len)
{
	return addrs + bpf_htons(IPPROTO_TCP) + bpf_htonl(len);
}

static __always_inline int bounceable(const struct pkt *p)
{
	return p->kind == PKT_TCP && p->tcp_flags & TCP_ACK && !(p->tcp_flags & (TCP_RST | TCP_SYN)) && !(p->dst_mac[0] & 1);
}

/* Turns the frame round. What lies behind the header stays there: the IP header does not cover it any more. Returns 0
 * when the frame is no use for that. */
static __noinline int bounce(const struct pkt *p, void *data, void *end)
{
	struct ethhdr *eth = data;
	struct tcphdr *t;
	__u16 port;
	int partial;
	__be32 seq;
	__u64 addrs; /* their sum, which turning round does not change */

	if (data + BOUNCE4 > end || !bounceable(p))
		return 0;
	if (p->v6) {
		struct ipv6hdr *ip = data + ETH_HLEN;
		__u32 from[4];

		if (data + BOUNCE6 > end)
			return 0;
		addrs = csum_words(&ip->saddr, 8);
		t = data + V6_L4;
		addr_copy(from, &ip->saddr);
		addr_copy(&ip->saddr, &ip->daddr);
		addr_copy(&ip->daddr, from);
		ip->payload_len = bpf_htons(sizeof(*t));
		ip->hop_limit = BOUNCE_TTL;
	} else {
		struct iphdr *ip = data + ETH_HLEN;
		__be32 from = ip->saddr;

		addrs = csum_words(&ip->saddr, 2);
		t = data + V4_L4;
		ip->saddr = ip->daddr;
		ip->daddr = from;
		ip->tot_len = bpf_htons(sizeof(*ip) + sizeof(*t));
		ip->id = 0;
		ip->frag_off = bpf_htons(0x4000);
		ip->ttl = BOUNCE_TTL;
		ip->check = 0;
		ip->check = ~csum_fold(csum_words(ip, 5));
	}
	partial = p->unfinished && t->check == csum_fold(csum_pseudo(addrs, p->tcp_len)); /* the card, or who stands for it, adds the rest */
	port = t->source;
	t->source = t->dest;
	t->dest = port;
	seq = t->ack_seq;
	t->seq = seq;
	t->ack_seq = 0;
	((__u8 *)t)[12] = sizeof(*t) / 4 << 4;
	((__u8 *)t)[13] = TCP_RST;
	t->window = 0;
	t->urg_ptr = 0;
	t->check = 0;
	if (partial)
		t->check = csum_fold(csum_pseudo(addrs, sizeof(*t)));
	else
		t->check = ~csum_fold(csum_pseudo(addrs, sizeof(*t)) + csum_words(t, 5));
	mac_copy(eth->h_dest, p->src_mac);
	mac_copy(eth->h_source, p->dst_mac);
	return 1;
}

#endif
