/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* From a frame to the few facts that decide. Reads only; knows no map. */
#ifndef SHUNT_PARSE_H
#define SHUNT_PARSE_H

#include "abi.h"
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>

enum tcp_flags { TCP_FIN = 1, TCP_SYN = 2, TCP_RST = 4, TCP_PSH = 8, TCP_ACK = 16, TCP_URG = 32 };

static __always_inline int pure_syn(__u8 flags)
{
	return (flags & (TCP_SYN | TCP_ACK | TCP_FIN | TCP_RST | TCP_PSH | TCP_URG)) == TCP_SYN;
}

enum pkt_kind {
	PKT_TCP = 1, /* plain header, whole TCP header in reach */
	PKT_ODD,     /* TCP with ports known, but not to be rewritten: options, extension headers, a first fragment */
	PKT_ICMP,    /* frag-needed or packet-too-big; key is the flow that its packet's receiver would answer on */
};

enum { V4_L4 = ETH_HLEN + sizeof(struct iphdr), V6_L4 = ETH_HLEN + sizeof(struct ipv6hdr) };
enum { IP4_MORE = 0x2000, IP4_OFFSET = 0x1fff, ICMP4_UNREACH = 3, ICMP4_FRAG_NEEDED = 4, ICMP6_TOO_BIG = 2, ICMP_LEN = 8 };
enum { EXT_HOP = 0, EXT_ROUTING = 43, EXT_FRAGMENT = 44, EXT_DEST = 60, EXT_MAX = 4 };

struct pkt {
	struct flow_key key __attribute__((aligned(8)));
	__u32 seq;
	__u32 ack;
	__u32 iif;
	__u32 ip_len;  /* bytes from the IP header on, as that header says */
	__u32 tcp_len; /* TCP header and payload */
	__u8 src_mac[6];
	__u8 dst_mac[6];
	__u8 tcp_flags;
	__u8 tcp_head; /* bytes of the TCP header */
	__u8 kind;
	__u8 v6;
	__u8 unfinished; /* the attach point can finish a checksum that the sender left to its card */
	__u32 frame;     /* bytes of the frame where the IP header may not say (merged segments above 64 KiB); 0 = it does */
};

struct ports {
	__be16 source;
	__be16 dest;
};

struct icmp_head {
	__u8 type;
	__u8 code;
	__sum16 check;
	__u32 rest;
};

static __always_inline void addr4(__u8 *to, __be32 a)
{
	__u32 *w = (__u32 *)to;

	w[0] = 0;
	w[1] = 0;
	w[2] = bpf_htonl(0xffff);
	w[3] = a;
}

static __always_inline void addr_copy(void *to, const void *from)
{
	__u32 *t = to;
	const __u32 *f = from;

	t[0] = f[0];
	t[1] = f[1];
	t[2] = f[2];
	t[3] = f[3];
}

static __always_inline int addr_equal(const void *a, const void *b)
{
	const __u32 *x = a, *y = b;

	return x[0] == y[0] && x[1] == y[1] && x[2] == y[2] && x[3] == y[3];
}

static __always_inline int addr_is4(const void *a)
{
	const __u32 *w = a;

	return w[0] == 0 && w[1] == 0 && w[2] == bpf_htonl(0xffff);
}

static __always_inline void mac_copy(void *to, const void *from)
{
	__u16 *t = to;
	const __u16 *f = from;

	t[0] = f[0];
	t[1] = f[1];
	t[2] = f[2];
}

static __always_inline int mac_equal(const void *a, const void *b)
{
	const __u16 *x = a, *y = b;

	return x[0] == y[0] && x[1] == y[1] && x[2] == y[2];
}

static __always_inline int mac_known(const void *a)
{
	const __u16 *x = a;

	return (x[0] | x[1] | x[2]) != 0;
}

static __always_inline void pkt_ports(struct pkt *p, const struct ports *t)
{
	p->key.sport = bpf_ntohs(t->source);
	p->key.dport = bpf_ntohs(t->dest);
}

/* Ports of a TCP header that is only looked at to find its flow. */
static __always_inline enum shunt_reason pkt_odd(struct pkt *p, void *l4, void *end)
{
	if (l4 + sizeof(struct ports) > end)
		return SHUNT_PASS_ODD_HEADER;
	pkt_ports(p, l4);
	p->kind = PKT_ODD;
	return SHUNT_REASON_NONE;
}

static __always_inline enum shunt_reason pkt_tcp(struct pkt *p, void *l4, void *end)
{
	struct tcphdr *t = l4;

	if (l4 + sizeof(*t) > end)
		return pkt_odd(p, l4, end);
	pkt_ports(p, l4);
	p->seq = bpf_ntohl(t->seq);
	p->ack = bpf_ntohl(t->ack_seq);
	p->tcp_flags = ((__u8 *)l4)[13];
	p->tcp_head = (((__u8 *)l4)[12] >> 4) * 4;
	p->kind = p->tcp_head < sizeof(*t) || p->tcp_head > p->tcp_len ? PKT_ODD : PKT_TCP;
	return SHUNT_REASON_NONE;
}

/* The key of an ICMP error is its embedded packet's tuple turned round: that is the entry whose packets go where the
 * error has to go. The embedded source must be whom the error was sent to. */
static __always_inline enum shunt_reason pkt_icmp4(struct pkt *p, void *data, void *end)
{
	struct icmp_head *h = data + V4_L4;
	struct iphdr *in = data + V4_L4 + ICMP_LEN;
	struct ports *t = data + V4_L4 + ICMP_LEN + sizeof(*in);

	if ((void *)(h + 1) > end || h->type != ICMP4_UNREACH || h->code != ICMP4_FRAG_NEEDED)
		return SHUNT_PASS_NOT_TCP;
	if ((void *)(t + 1) > end || in->version != 4 || in->ihl != 5 || in->protocol != IPPROTO_TCP ||
	    in->frag_off & bpf_htons(IP4_OFFSET) || *(__u32 *)&p->key.dst[12] != in->saddr)
		return SHUNT_PASS_ICMP;
	addr4(p->key.src, in->daddr);
	p->key.sport = bpf_ntohs(t->dest);
	p->key.dport = bpf_ntohs(t->source);
	p->kind = PKT_ICMP;
	return SHUNT_REASON_NONE;
}

static __always_inline enum shunt_reason pkt_icmp6(struct pkt *p, void *data, void *end)
{
	struct icmp_head *h = data + V6_L4;
	struct ipv6hdr *in = data + V6_L4 + ICMP_LEN;
	struct ports *t = data + V6_L4 + ICMP_LEN + sizeof(*in);

	if ((void *)(h + 1) > end || h->type != ICMP6_TOO_BIG)
		return SHUNT_PASS_NOT_TCP;
	if ((void *)(t + 1) > end || in->version != 6 || in->nexthdr != IPPROTO_TCP ||
	    !addr_equal(p->key.dst, &in->saddr))
		return SHUNT_PASS_ICMP;
	addr_copy(p->key.src, &in->daddr);
	p->key.sport = bpf_ntohs(t->dest);
	p->key.dport = bpf_ntohs(t->source);
	p->kind = PKT_ICMP;
	return SHUNT_REASON_NONE;
}

static __always_inline enum shunt_reason pkt_ip4(struct pkt *p, void *data, void *end)
{
	struct iphdr *ip = data + ETH_HLEN;

	if ((void *)(ip + 1) > end || ip->version != 4 || ip->ihl < 5)
		return SHUNT_PASS_NOT_IP;
	addr4(p->key.src, ip->saddr);
	addr4(p->key.dst, ip->daddr);
	p->ip_len = bpf_ntohs(ip->tot_len);
	if (!p->ip_len && p->frame > ETH_HLEN)
		p->ip_len = p->frame - ETH_HLEN;
	p->tcp_len = p->ip_len - sizeof(*ip);
	if (ip->protocol == IPPROTO_ICMP && ip->ihl == 5 && !(ip->frag_off & bpf_htons(IP4_MORE | IP4_OFFSET)))
		return pkt_icmp4(p, data, end);
	if (ip->protocol != IPPROTO_TCP)
		return SHUNT_PASS_NOT_TCP;
	if (ip->frag_off & bpf_htons(IP4_OFFSET))
		return SHUNT_PASS_ODD_HEADER; /* has no ports */
	if (ip->ihl != 5 || ip->frag_off & bpf_htons(IP4_MORE))
		return pkt_odd(p, (void *)ip + ip->ihl * 4, end);
	if (p->ip_len < sizeof(*ip))
		return SHUNT_PASS_ODD_HEADER;
	return pkt_tcp(p, ip + 1, end);
}

/* Walks a short chain of extension headers to TCP's ports. */
static __always_inline enum shunt_reason pkt_ext6(struct pkt *p, void *at, __u8 next, void *end)
{
	for (int i = 0; i < EXT_MAX; i++) {
		__u8 *h = at;

		if (at + 8 > end)
			return SHUNT_PASS_ODD_HEADER;
		if (next == EXT_FRAGMENT) {
			if (*(__be16 *)(h + 2) & bpf_htons(0xfff8))
				return SHUNT_PASS_ODD_HEADER; /* has no ports */
			at += 8;
		} else if (next == EXT_HOP || next == EXT_ROUTING || next == EXT_DEST) {
			at += (h[1] + 1) * 8;
		} else {
			return SHUNT_PASS_NOT_TCP;
		}
		next = h[0];
		if (next == IPPROTO_TCP)
			return pkt_odd(p, at, end);
	}
	return SHUNT_PASS_ODD_HEADER;
}

static __always_inline enum shunt_reason pkt_ip6(struct pkt *p, void *data, void *end)
{
	struct ipv6hdr *ip = data + ETH_HLEN;

	if ((void *)(ip + 1) > end || ip->version != 6)
		return SHUNT_PASS_NOT_IP;
	if (addr_is4(&ip->saddr) || addr_is4(&ip->daddr))
		return SHUNT_PASS_ODD_HEADER; /* mapped addresses do not belong on a wire, and would look like IPv4 flows */
	addr_copy(p->key.src, &ip->saddr);
	addr_copy(p->key.dst, &ip->daddr);
	p->v6 = 1;
	p->tcp_len = bpf_ntohs(ip->payload_len);
	if (!p->tcp_len && p->frame > V6_L4)
		p->tcp_len = p->frame - V6_L4;
	p->ip_len = p->tcp_len + sizeof(*ip);
	if (ip->nexthdr == IPPROTO_TCP)
		return pkt_tcp(p, ip + 1, end);
	if (ip->nexthdr == IPPROTO_ICMPV6)
		return pkt_icmp6(p, data, end);
	return pkt_ext6(p, ip + 1, ip->nexthdr, end);
}

/* A whole TCP header behind an IP header without options, and not a fragment; len is what the IP header says. */
static __always_inline int plain4(const struct iphdr *ip, const struct tcphdr *t, __u32 *len)
{
	__u32 head = (((const __u8 *)t)[12] >> 4) * 4;

	*len = bpf_ntohs(ip->tot_len);
	return *(const __u8 *)ip == 0x45 && ip->protocol == IPPROTO_TCP && !(ip->frag_off & bpf_htons(IP4_MORE | IP4_OFFSET)) &&
	       head >= sizeof(*t) && *len >= sizeof(*ip) + head;
}

static __always_inline int plain6(const struct ipv6hdr *ip, const struct tcphdr *t, __u32 *len)
{
	__u32 head = (((const __u8 *)t)[12] >> 4) * 4, payload = bpf_ntohs(ip->payload_len);

	*len = payload + sizeof(*ip);
	return ip->version == 6 && ip->nexthdr == IPPROTO_TCP && head >= sizeof(*t) && payload >= head;
}

/* Fills p; a reason means that the packet is nothing to steer. */
static __always_inline enum shunt_reason parse(struct pkt *p, void *data, void *end, int ipv6)
{
	struct ethhdr *eth = data;

	if ((void *)(eth + 1) > end)
		return SHUNT_PASS_NOT_IP;
	mac_copy(p->src_mac, eth->h_source);
	mac_copy(p->dst_mac, eth->h_dest);
	if (eth->h_proto == bpf_htons(ETH_P_IP))
		return pkt_ip4(p, data, end);
	if (eth->h_proto == bpf_htons(ETH_P_IPV6) && ipv6)
		return pkt_ip6(p, data, end);
	if (eth->h_proto == bpf_htons(ETH_P_8021Q) || eth->h_proto == bpf_htons(ETH_P_8021AD))
		return SHUNT_PASS_VLAN;
	return SHUNT_PASS_NOT_IP;
}

#endif
