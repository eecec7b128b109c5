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

SEC("xdp.frags")
int shunt_xdp(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct pkt p = {.iif = ctx->ingress_ifindex};
	struct flow *f = 0;
	enum shunt_reason why = parse(&p, data, end, ipv6_on);

	if (!why)
		why = verdict(ctx, &p, data, end, &f);
	if (why || !f)
		return not_forwarded(why);
	if (p.kind == PKT_ICMP ? !nat_rewrite_icmp(&p, f, data, end) : !nat_rewrite_tcp(&p, f, data, end))
		return not_forwarded(p.kind == PKT_ICMP ? SHUNT_DROP_ICMP : SHUNT_DROP_ODD_HEADER);
	return bpf_redirect(f->oif, 0);
}

/* Run once by the daemon, with any packet, for each program that it loads. */
SEC("xdp")
int shunt_arm(struct xdp_md *ctx)
{
	return sweep_arm() ? XDP_PASS : XDP_ABORTED;
}
