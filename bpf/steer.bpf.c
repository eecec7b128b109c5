// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The entries of the datapath; what they do is in include/, one concern a file. */
#include "sweep.h"
#include "verdict.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

const volatile __u8 ipv6_on = 1;

/* For the generator of the Go types: what no map holds. */
struct exported {
	struct event event;
	enum shunt_sizes sizes;
	enum shunt_reason reason;
	enum shunt_flow_flags flow_flags;
	enum shunt_pin_flags pin_flags;
	enum shunt_backend_flags backend_flags;
};
const struct exported *exported __attribute__((unused));

static __always_inline int not_forwarded(enum shunt_reason why)
{
	count_reason(why);
	return why >= SHUNT_DROP_ODD_HEADER ? XDP_DROP : XDP_PASS;
}

enum { FAST_NOT = -1 };

/* Any packet at all, decided from scratch. */
static __noinline int slow_xdp(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct pkt *p = pkt_new(ctx->ingress_ifindex);
	struct flow *f = 0;
	int why;

	if (!p)
		return XDP_PASS;
	why = parse(p, data, end, ipv6_on);
	if (!why)
		why = verdict(ctx, p, data, end, &f);
	if (why || !f)
		return not_forwarded(why);
	if (p->kind == PKT_ICMP ? !nat_rewrite_icmp(p, f, data, end) : !nat_rewrite_tcp(p, f, data, end))
		return not_forwarded(p->kind == PKT_ICMP ? SHUNT_DROP_ICMP : SHUNT_DROP_ODD_HEADER);
	return bpf_redirect(f->oif, 0);
}

static __noinline int fast6_xdp(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	struct ipv6hdr *ip = data + ETH_HLEN;
	struct tcphdr *t = data + V6_L4;
	struct flow_key k;
	struct flow *f;
	__u32 len;

	if ((void *)(t + 1) > end || !plain6(ip, t, &len))
		return FAST_NOT;
	if (!port_ours(t->dest))
		return not_forwarded(SHUNT_PASS_OTHER_PORT);
	addr_copy(k.src, &ip->saddr);
	addr_copy(k.dst, &ip->daddr);
	k.sport = bpf_ntohs(t->source);
	k.dport = bpf_ntohs(t->dest);
	f = bpf_map_lookup_elem(&shunt_flows6, &k);
	if (!f || !flow_fast(f, ((__u8 *)t)[13], bpf_ntohl(t->ack_seq), len, eth->h_source, ctx->ingress_ifindex))
		return FAST_NOT;
	if (!(flow_flags(f) & SHUNT_FLOW_DSR))
		nat_rewrite6(ip, t, f);
	rewrite_macs(eth, f);
	return bpf_redirect(f->oif, 0);
}

SEC("xdp.frags")
int shunt_xdp(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	struct flow *f;

	if (data + V4_L4 + sizeof(struct tcphdr) > end)
		return slow_xdp(ctx);
	if (eth->h_proto == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = data + ETH_HLEN;
		struct tcphdr *t = data + V4_L4;
		struct flow_key4 k;
		__u32 len;

		if (!plain4(ip, t, &len))
			return slow_xdp(ctx);
		if (!port_ours(t->dest))
			return not_forwarded(SHUNT_PASS_OTHER_PORT);
		*(__u32 *)k.src = ip->saddr;
		*(__u32 *)k.dst = ip->daddr;
		k.sport = bpf_ntohs(t->source);
		k.dport = bpf_ntohs(t->dest);
		f = bpf_map_lookup_elem(&shunt_flows, &k);
		if (!f || !flow_fast(f, ((__u8 *)t)[13], bpf_ntohl(t->ack_seq), len, eth->h_source, ctx->ingress_ifindex))
			return slow_xdp(ctx);
		if (!(flow_flags(f) & SHUNT_FLOW_DSR))
			nat_rewrite4(ip, t, f);
	} else if (eth->h_proto == bpf_htons(ETH_P_IPV6) && ipv6_on) {
		int done = fast6_xdp(ctx);

		return done == FAST_NOT ? slow_xdp(ctx) : done;
	} else {
		return slow_xdp(ctx);
	}
	rewrite_macs(eth, f);
	return bpf_redirect(f->oif, 0);
}

/* Run once by the daemon, with any packet, for each program that it loads. */
SEC("xdp")
int shunt_arm(struct xdp_md *ctx)
{
	return sweep_arm() ? XDP_PASS : XDP_ABORTED;
}
