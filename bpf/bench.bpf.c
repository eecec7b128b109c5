// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * For measurements only, never attached: the kernel does not restore a packet between the repeats of a test run, and
 * a program that rewrites it would be timed on its own output. This one writes the headers anew, of one flow or of a
 * random one, and hands over to the program under test.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

enum { HEAD4 = 54, HEAD6 = 74, HEAD_MAX = 80 };

const volatile __u8 head[HEAD_MAX] __attribute__((aligned(8))) = {}; /* of the first flow's packets */
const volatile __u32 mask = 0;       /* flows - 1; flow i has the client's address + (i >> 14) and port + (i & 16383) */
const volatile __u32 in_turn = 0;    /* 1: the flows one after the other, each with right checksums; 0: at random */

__u32 turn = 0;
__u64 seed = 88172645463325252ULL;

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} target SEC(".maps");

static __always_inline __u32 next(void)
{
	if (in_turn)
		return turn++;
	if (!mask)
		return 0;
	seed ^= seed << 13;
	seed ^= seed >> 7;
	seed ^= seed << 17;
	return seed >> 32;
}

static __always_inline __u16 add(__u16 check, __u32 word_be)
{
	__u32 s = (__u16)~check + (word_be & 0xffff) + (word_be >> 16);

	s = (s & 0xffff) + (s >> 16);
	s = (s & 0xffff) + (s >> 16);
	return ~s;
}

static __always_inline void copy(void *to, int n)
{
	for (int i = 0; i + 4 <= n; i += 4)
		*(__u32 *)(to + i) = *(const volatile __u32 *)&head[i];
	if (n & 2)
		*(__u16 *)(to + n - 2) = *(const volatile __u16 *)&head[n - 2];
}

SEC("xdp.frags")
int bench4(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__u32 i = next() & mask;
	struct tcphdr *t = data + ETH_HLEN + sizeof(struct iphdr);
	struct iphdr *ip = data + ETH_HLEN;

	if (data + HEAD4 > end)
		return XDP_ABORTED;
	copy(data, HEAD4);
	if (mask) {
		ip->saddr = bpf_htonl(bpf_ntohl(ip->saddr) + (i >> 14));
		t->source = bpf_htons(bpf_ntohs(t->source) + (i & 16383));
	}
	if (in_turn) { /* addresses and ports only grow, without a carry beyond sixteen bits */
		ip->check = add(ip->check, bpf_htonl(i >> 14));
		t->check = add(add(t->check, bpf_htonl(i >> 14)), bpf_htons(i & 16383));
	}
	bpf_tail_call(ctx, &target, 0);
	return XDP_ABORTED;
}

SEC("xdp.frags")
int bench6(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;

	if (data + HEAD6 > end)
		return XDP_ABORTED;
	copy(data, HEAD6);
	bpf_tail_call(ctx, &target, 0);
	return XDP_ABORTED;
}

SEC("xdp.frags")
int empty(struct xdp_md *ctx)
{
	return XDP_PASS;
}
