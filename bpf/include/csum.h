/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* One's complement sums (RFC 1071, RFC 1624), all in the order of memory. */
#ifndef SHUNT_CSUM_H
#define SHUNT_CSUM_H

#include "parse.h"

static __always_inline __u16 csum_fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + ((sum >> 16) & 0xffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

/* What replacing from by to adds to a sum. */
static __always_inline __u64 csum_swap32(__u32 from, __u32 to)
{
	return (__u64)(__u32)~from + to;
}

static __always_inline __u64 csum_swap16(__u16 from, __u16 to)
{
	return (__u64)(__u16)~from + to;
}

static __always_inline __u64 csum_swap_addr(const void *from, const void *to)
{
	const __u32 *f = from, *t = to;

	return csum_swap32(f[0], t[0]) + csum_swap32(f[1], t[1]) + csum_swap32(f[2], t[2]) + csum_swap32(f[3], t[3]);
}

/* A checksum after its data changed by diff. */
static __always_inline __u16 csum_apply(__u16 check, __u64 diff)
{
	return ~csum_fold((__u16)~check + diff);
}

/* csum_apply for a diff of sixteen bits. */
static __always_inline __u16 csum_add(__u16 check, __u16 diff)
{
	__u32 sum = (__u32)(__u16)~check + diff;

	return ~((sum & 0xffff) + (sum >> 16));
}

/* Whether the IPv4 header's and TCP's sums of a packet without payload are right. The sender's card may have been
 * left to fill them in (CHECKSUM_PARTIAL on virtual devices): such a packet must not go on the wire as it is. */
static __noinline int csum_syn_ok(const struct pkt *p, void *data, void *end)
{
	__u64 sum = bpf_htons(IPPROTO_TCP) + bpf_htons(p->tcp_len);
	const struct tcphdr *t;
	__u32 len = p->tcp_head;
	void *at;

	if (p->v6) {
		struct ipv6hdr *ip = data + ETH_HLEN;
		__u32 *w = (__u32 *)&ip->saddr;

		if ((void *)(ip + 1) > end)
			return 0;
		for (int i = 0; i < 8; i++)
			sum += w[i];
		at = ip + 1;
	} else {
		struct iphdr *ip = data + ETH_HLEN;
		__u32 *w = (__u32 *)ip;
		__u64 head = 0;

		if ((void *)(ip + 1) > end)
			return 0;
		for (int i = 0; i < 5; i++)
			head += w[i];
		if (csum_fold(head) != 0xffff)
			return 0;
		sum += ip->saddr;
		sum += ip->daddr;
		at = ip + 1;
	}
	t = at;
	if ((void *)(t + 1) > end)
		return 0;
	if (p->unfinished && t->check == csum_fold(sum))
		return 1; /* holds the sum of the pseudo header only, and the rewrite keeps it so */
	for (int i = 0; i < 15; i++) {
		asm volatile("" : "+r"(at)); /* keeps clang from arithmetic on the packet's end */
		if (i * 4 >= len)
			break;
		if (at + 4 > end)
			return 0;
		sum += *(__u32 *)at;
		at += 4;
	}
	return csum_fold(sum) == 0xffff;
}

#endif
