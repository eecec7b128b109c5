// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The entries of the datapath; what they do is in include/, one concern a file. */
#include "bounce.h"
#include "sweep.h"
#include "tc.h"
#include "verdict.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

const volatile __u8 ipv6_on = 1;

/* For the generator of the Go types: what no map holds. */
struct exported {
	struct event event;
	struct trace trace;
	enum shunt_sizes sizes;
	enum shunt_reason reason;
	enum shunt_flow_flags flow_flags;
	enum shunt_pin_flags pin_flags;
	enum shunt_backend_flags backend_flags;
};
const struct exported *exported __attribute__((unused));

enum { FAST_NOT = -1 };

/* A plain packet of an open flow: REASON_NONE and *out; of none: why it passes. FAST_NOT: to be decided from scratch. */
static __always_inline int fast4(void *data, void *end, __u32 iif, struct flow **out)
{
	struct ethhdr *eth = data;
	struct iphdr *ip = data + ETH_HLEN;
	struct tcphdr *t = data + V4_L4;
	struct flow_key4 k;
	struct flow *f;
	__u32 len;

	if ((void *)(t + 1) > end || !plain4(ip, t, &len))
		return FAST_NOT;
	if (!port_ours(t->dest))
		return SHUNT_PASS_OTHER_PORT;
	*(__u32 *)k.src = ip->saddr;
	*(__u32 *)k.dst = ip->daddr;
	k.sport = bpf_ntohs(t->source);
	k.dport = bpf_ntohs(t->dest);
	f = bpf_map_lookup_elem(&shunt_flows, &k);
	if (!f && !pure_syn(((__u8 *)t)[13]))
		return SHUNT_PASS_NO_FLOW;
	if (!f || !flow_fast(f, t, len, sizeof(*ip), eth->h_source, iif))
		return FAST_NOT;
	*out = f;
	return SHUNT_REASON_NONE;
}

static __noinline int fast6(void *data, void *end, __u32 iif, struct flow **out)
{
	struct ethhdr *eth = data;
	struct ipv6hdr *ip = data + ETH_HLEN;
	struct tcphdr *t = data + V6_L4;
	struct flow_key k;
	struct flow *f;
	__u32 len;

	if ((void *)(t + 1) > end || !plain6(ip, t, &len))
		return FAST_NOT;
	if (!port_ours(t->dest))
		return SHUNT_PASS_OTHER_PORT;
	addr_copy(k.src, &ip->saddr);
	addr_copy(k.dst, &ip->daddr);
	k.sport = bpf_ntohs(t->source);
	k.dport = bpf_ntohs(t->dest);
	f = bpf_map_lookup_elem(&shunt_flows6, &k);
	if (!f && !pure_syn(((__u8 *)t)[13]))
		return addr_is4(k.src) || addr_is4(k.dst) ? FAST_NOT : SHUNT_PASS_NO_FLOW;
	if (!f || !flow_fast(f, t, len, sizeof(*ip), eth->h_source, iif))
		return FAST_NOT;
	*out = f;
	return SHUNT_REASON_NONE;
}

static __always_inline int xdp_not_forwarded(enum shunt_reason why)
{
	count_reason(why);
	return why >= SHUNT_DROP_ODD_HEADER ? XDP_DROP : XDP_PASS;
}

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
	trace_verdict(p, f, why);
	if (why == SHUNT_DROP_FLOW_KILLED && bounce(p, data, end)) {
		count_reason(why);
		return bpf_redirect(p->iif, 0);
	}
	if (why || !f)
		return xdp_not_forwarded(why);
	if (p->kind == PKT_ICMP ? !nat_rewrite_icmp(p, f, data, end) : !nat_rewrite_tcp(p, f, data, end))
		return xdp_not_forwarded(p->kind == PKT_ICMP ? SHUNT_DROP_ICMP : SHUNT_DROP_ODD_HEADER);
	return bpf_redirect(f->oif, 0);
}

SEC("xdp.frags")
int shunt_xdp(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	struct flow *f = 0;
	int why = FAST_NOT;

	if (data + V4_L4 + sizeof(struct tcphdr) > end)
		return slow_xdp(ctx);
	if (eth->h_proto == bpf_htons(ETH_P_IP)) {
		why = fast4(data, end, ctx->ingress_ifindex, &f);
		if (!why && f && !(flow_flags(f) & SHUNT_FLOW_DSR))
			nat_rewrite4(data + ETH_HLEN, data + V4_L4, f);
	} else if (eth->h_proto == bpf_htons(ETH_P_IPV6) && ipv6_on) {
		why = fast6(data, end, ctx->ingress_ifindex, &f);
		if (!why && f && !(flow_flags(f) & SHUNT_FLOW_DSR)) {
			if (data + V6_L4 + sizeof(struct tcphdr) > end)
				return XDP_DROP;
			nat_rewrite6(data + ETH_HLEN, data + V6_L4, f);
		}
	}
	if (why == FAST_NOT)
		return slow_xdp(ctx);
	if (why || !f)
		return xdp_not_forwarded(why);
	rewrite_macs(eth, f);
	return bpf_redirect(f->oif, 0);
}

static __always_inline int tc_not_forwarded(enum shunt_reason why)
{
	count_reason(why);
	return why >= SHUNT_DROP_ODD_HEADER ? TC_DROP : TC_NEXT;
}

enum { TC_HEAD = 160 }; /* bytes that any decision looks at */

static __noinline int slow_tc(struct __sk_buff *skb)
{
	struct pkt *p = pkt_new(skb->ifindex);
	void *data, *end;
	struct flow *f = 0;
	int why;

	if (!p)
		return TC_NEXT;
	if (skb->vlan_present)
		return tc_not_forwarded(SHUNT_PASS_VLAN);
	bpf_skb_pull_data(skb, skb->len < TC_HEAD ? skb->len : TC_HEAD);
	data = (void *)(long)skb->data;
	end = (void *)(long)skb->data_end;
	p->frame = skb->len;
	p->unfinished = 1;
	why = parse(p, data, end, ipv6_on);
	if (!why)
		why = verdict(skb, p, data, end, &f);
	trace_verdict(p, f, why);
	if (why == SHUNT_DROP_FLOW_KILLED && bounceable(p)) {
		/* It may be many segments in one, which a RST is not. */
		if (bpf_skb_change_tail(skb, p->v6 ? BOUNCE6 : BOUNCE4, 0))
			return tc_not_forwarded(why);
		data = (void *)(long)skb->data;
		end = (void *)(long)skb->data_end;
		if (!bounce(p, data, end))
			return tc_not_forwarded(why);
		count_reason(why);
		return bpf_redirect(p->iif, 0);
	}
	if (why || !f)
		return tc_not_forwarded(why);
	if (p->kind == PKT_ICMP) {
		if (!nat_rewrite_icmp(p, f, data, end))
			return tc_not_forwarded(SHUNT_DROP_ICMP);
	} else if (!tc_rewrite_tcp(skb, f, p->v6)) {
		return tc_not_forwarded(SHUNT_DROP_ODD_HEADER);
	}
	return bpf_redirect(f->oif, 0);
}

SEC("tc") /* attached by a tcx link; no attach type, so that it also loads before Linux 6.6 */
int shunt_tcx(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ethhdr *eth = data;
	struct flow *f = 0;
	int why = FAST_NOT, v6 = 0;

	if (skb->vlan_present || data + V4_L4 + sizeof(struct tcphdr) > end)
		return slow_tc(skb);
	if (eth->h_proto == bpf_htons(ETH_P_IP)) {
		why = fast4(data, end, skb->ifindex, &f);
	} else if (eth->h_proto == bpf_htons(ETH_P_IPV6) && ipv6_on) {
		v6 = 1;
		why = fast6(data, end, skb->ifindex, &f);
	}
	if (why == FAST_NOT)
		return slow_tc(skb);
	if (why || !f)
		return tc_not_forwarded(why);
	if (!tc_rewrite_tcp(skb, f, v6))
		return tc_not_forwarded(SHUNT_DROP_ODD_HEADER);
	return bpf_redirect(f->oif, 0);
}

/* Run once by the daemon, with any packet, for each program that it loads. */
SEC("xdp")
int shunt_arm(struct xdp_md *ctx)
{
	return sweep_arm() ? XDP_PASS : XDP_ABORTED;
}
