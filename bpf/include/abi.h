/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The layout that the kernel programs and the daemon share: every key, value, enum and size, and nothing else.
 * Go types are generated from the BTF of these definitions; there is no second copy.
 *
 * Conventions: addresses are 16 bytes, IPv4 as v4-mapped IPv6 (::ffff:a.b.c.d); ports are in host order unless the
 * name ends in _be; times are CLOCK_MONOTONIC nanoseconds; padding is explicit and zero.
 */
#ifndef SHUNT_ABI_H
#define SHUNT_ABI_H

#include <linux/bpf.h>
#include <linux/types.h>

enum shunt_sizes {
	SHUNT_ABI = 2, /* part of the pin directory's name; raised by every change of this file that changes a map */
	SHUNT_MAX_BACKENDS = 1024, /* ids 1..1023; 0 means none */
	SHUNT_MAX_VIPS = 64,
	SHUNT_MAX_SESSIONS = 65536,
	SHUNT_MAX_FLOWS = 262144, /* IPv4 entries; a connection has two (one with dsr) */
	SHUNT_MAX_FLOWS6 = 131072, /* IPv6 entries */
	SHUNT_TICK_SHIFT = 20, /* a tick is 2^20 ns */
	SHUNT_EVENTS_BYTES = 1 << 20,
	SHUNT_TRACE_BYTES = 1 << 16,
	SHUNT_NAME_LEN = 32,
};

enum shunt_mode { SHUNT_MODE_OFF, SHUNT_MODE_NAT, SHUNT_MODE_DSR };

/* Health as the L7 sees it. Only UP takes new connections. */
enum shunt_state { SHUNT_STATE_NONE, SHUNT_STATE_UP, SHUNT_STATE_DOWN };

/* The operator's word on a backend; both planes obey it. Any value that is not NONE keeps new work away. */
enum shunt_admin { SHUNT_ADMIN_NONE, SHUNT_ADMIN_DRAIN, SHUNT_ADMIN_MAINT };

/* shunt_sessions.flags */
enum shunt_pin_flags { SHUNT_PIN_STATIC = 1 /* written by the operator: never idle, honoured and kept by the daemon */ };

/* shunt_backends.flags */
enum shunt_backend_flags { SHUNT_BACKEND_LOCAL = 1 /* the steered address is on this host: pass to the local L7 */ };

enum shunt_flow_flags {
	SHUNT_FLOW_FORWARD = 1 << 0, /* client to backend; the forward entry holds the connection's shared state */
	SHUNT_FLOW_REVERSE = 1 << 1,
	SHUNT_FLOW_SYNACK = 1 << 2,  /* the backend answered; in both entries */
	SHUNT_FLOW_ESTAB = 1 << 3,   /* the handshake's last ACK was seen */
	SHUNT_FLOW_CFIN = 1 << 4,    /* the client sent FIN */
	SHUNT_FLOW_BFIN = 1 << 5,    /* the backend sent FIN */
	SHUNT_FLOW_BFIN1 = 1 << 6,   /* the backend sent FIN first: its TIME_WAIT holds the NAT port */
	SHUNT_FLOW_RST = 1 << 7,     /* a RST whose sequence was exact */
	SHUNT_FLOW_SUSPECT = 1 << 8, /* a RST whose sequence did not match: accounts are settled if silence follows */
	SHUNT_FLOW_CLOSED = 1 << 9,  /* accounts settled (charge, flow count, open count); whoever sets it does it */
	SHUNT_FLOW_DEAD = 1 << 10,   /* about to be deleted, by whoever set this */
	SHUNT_FLOW_HELD = 1 << 11,   /* reverse entry without its forward entry: only holds the NAT port */
	SHUNT_FLOW_KILLED = 1 << 12, /* ended by the daemon: each packet is answered with a RST; in both entries */
	SHUNT_FLOW_ANSWERED = 1 << 14, /* no request is waiting for its answer's begin; a reverse entry has its own */
	SHUNT_FLOW_DSR = 1 << 13,    /* forward entry alone; the backend answers the client itself */
};

struct config {
	__u32 abi;
	__u32 flags;
	__u64 session_idle_ns;   /* lease.idle: a pin unused for longer is void; 0 = no bound */
	__u64 heartbeat_ns;      /* written several times a second by the daemon */
	__u64 heartbeat_max_ns;  /* older than this: the L7 is not there; nothing is sampled */
	__u32 sample;            /* 1 of this many connections of a pinned address passes to the L7; 0 = none */
	__u32 flows_per_session; /* open flows allowed to an address: flows_per_session * sessions + flows_slack */
	__u32 flows_slack;       /* both 0 = no bound */
	__u32 decay_s;           /* an open flow that moves no bytes for so long charges nothing; 0 = it keeps its charge */
	__u32 output_permille;   /* of a request's tokens: what is left to decode when the answer begins; 0 = the charge stays */
	__u32 answer_bytes;      /* of an answer's bytes for each token of it; 0 = unknown */
	__u64 client_every_ns;   /* new flows of one client address: one in so long, */
	__u64 client_burst_ns;   /* after a burst of client_burst_ns / client_every_ns; every 0 = no bound */
	__u64 vip_every_ns;      /* likewise of one VIP */
	__u64 vip_burst_ns;
};

struct vip_key {
	__u8 addr[16];
	__u16 port;
	__u16 pad;
};

struct vip {
	__u32 id;
	enum shunt_mode mode;
	__u8 snat[16];     /* source address towards backends (nat); same family as the VIP */
	__u16 port_base;   /* NAT source ports: port_base .. port_base + port_count - 1 */
	__u16 port_count;
	__u32 flags;
};

/* Written before the backend's word in shunt_epochs is raised: a flow reads the epoch first. */
struct backend {
	__u8 addr[16];     /* where steered connections go */
	__u8 mac[6];       /* next hop; all zero = unknown: SYNs pass to the L7 */
	__u8 src_mac[6];   /* of the interface that reaches it */
	__u32 ifindex;
	__u16 port;
	__u16 pad;
	enum shunt_state state;
	__u32 generation;  /* a pin with another generation (not 0) is void */
	__u32 flags;
	char name[SHUNT_NAME_LEN];
};

/* One cache line. One owner a word: the L7 writes the first two, the kernel the others. */
struct weight {
	__s64 l7_tokens;
	__s64 limit;            /* l7_tokens + kernel_tokens + charge may not exceed it; 0 = no new steered flow */
	__s64 kernel_tokens;
	__s64 kernel_flows;
	__s64 kernel_half_open; /* part of kernel_tokens whose handshake is not complete: not to be believed in routing */
	__u64 pad[3];
};

struct admin_word {
	enum shunt_admin state;
	__u32 pad;
};

struct epoch {
	__u32 value;
	__u32 kill; /* 1 = the backend's open flows are to be ended; set before value is raised */
};

/* What the kernel knows of a VIP. */
struct vip_use {
	__u64 rate_ns; /* when the next new flow would be due at the bounded rate */
};

/* One bit a destination port: those of VIPs and of NAT. A packet to another one is nobody's. */
struct ports_map {
	__u64 bits[1024];
};

struct session_key {
	__u8 client[16];
	__u32 vip_id;
	__u16 port;        /* of the VIP */
	__u16 pad;
};

struct session {
	__u32 backend;
	__u32 generation;   /* 0 = any */
	__u64 since_ns;     /* when the pin was written; 0 counts as the kernel's start, so an idle bound voids it */
	__u64 expires_ns;   /* lease.max; 0 = never */
	__u32 tokens;       /* charge of one connection */
	__u32 connections;  /* lease.connections: how many the pin serves; 0 = no bound */
	__u32 sessions;     /* sessions known behind this address; 0 counts as 1 */
	__u32 flags;        /* enum shunt_pin_flags */
	__u32 serial;       /* differs for each pin of one key, so that the use record starts anew */
	__u32 pad;
};

struct session_use {
	__u64 last_ns;      /* last connection that was steered */
	__u32 serial;       /* of the pin that connections counts for */
	__u32 connections;  /* used by the pin with this serial */
	__s32 open;         /* open flows of the address, over all pins */
	__u32 seen;         /* connections that could be steered, over all pins; places the samples (see sample.h) */
	__u32 seed;         /* random, set when the record is made */
	__u32 sampled;      /* connections passed to the L7 as samples */
	__u64 failed_ns;    /* last connect that the backend refused or left unanswered: a static pin rests for a while */
	__u64 rate_ns;      /* when the next new flow of the address would be due at the bounded rate */
};

/* A packet's tuple in the programs, and the key of IPv6 flows. */
struct flow_key {
	__u8 src[16];
	__u8 dst[16];
	__u16 sport;
	__u16 dport;
};

/* The key of IPv4 flows: hashing twelve bytes costs a third of hashing thirty-six. */
struct flow_key4 {
	__u8 src[4];
	__u8 dst[4];
	__u16 sport;
	__u16 dport;
};

/* Two cache lines. All that a packet of an open flow needs is in the first; with a key of twelve bytes it is a line of
 * its own in the table too. */
struct flow {
	__u8 src4[4];       /* the packet as it leaves; IPv6 below */
	__u8 dst4[4];
	__u16 sport;
	__u16 dport;
	__u32 oif;
	__u8 dst_mac[6];
	__u8 src_mac[6];
	__u16 l3_diff;      /* what the rewrite adds to the IPv4 header's sum and to TCP's (RFC 1624, network order) */
	__u16 l4_diff;
	__u16 backend;
	__u16 vip_id;
	__u32 peer;         /* of a forward entry: a hash of the interface and MAC that its packets come from */
	__u32 flags;        /* enum shunt_flow_flags, by fetch_or; shared ones in the forward entry only */
	__u32 ack;          /* last acknowledgement seen in this direction */
	__u32 epoch;        /* of the backend when oif and the MACs were read */
	__u32 last;         /* packet, in ticks (SHUNT_TICK_SHIFT), modulo 2^32; at most one write a second */
	__u32 bytes;        /* modulo 2^32 */
	__u32 packets;      /* modulo 2^32 */

	__u8 src[16];       /* as src4 and dst4, of both families */
	__u8 dst[16];
	__u64 created_ns;
	__u32 charge;       /* tokens charged to the backend; given back by exchange with 0 */
	__u32 tokens;       /* what one request of this connection charges */
	__u32 bytes_high;   /* how often bytes began anew */
	__u32 fin;          /* forward entry: what acknowledges the client's FIN; dsr: the client's next sequence number */
	__u32 seen;         /* forward entry: bytes of answers at the last sweep */
	__u32 answered;     /* dsr: bytes of answers that the client acknowledged, modulo 2^32 */
};

struct stat {
	__u64 packets_in;   /* client to backend */
	__u64 bytes_in;
	__u64 packets_out;  /* backend to client */
	__u64 bytes_out;
	__u64 opened;
	__u64 closed;
};

enum shunt_event_kind { SHUNT_EVENT_NONE, SHUNT_EVENT_OPEN, SHUNT_EVENT_CLOSE, SHUNT_EVENT_FULL, SHUNT_EVENT_SAMPLED, SHUNT_EVENT_FAILOVER };

struct event {
	__u64 ns;
	enum shunt_event_kind kind;
	__u32 backend;
	__u8 client[16];
	__u16 client_port;
	__u16 vip_port;
	__u32 vip_id;
	__u64 bytes_in;
	__u64 bytes_out;
	__u64 duration_ns;
	__s64 tokens;
};

/* Why a packet was not forwarded. PASS_* goes up the stack, DROP_* dies. */
enum shunt_reason {
	SHUNT_REASON_NONE,          /* forwarded */
	SHUNT_PASS_NOT_IP,
	SHUNT_PASS_VLAN,            /* tagged: never steered */
	SHUNT_PASS_NOT_TCP,
	SHUNT_PASS_OTHER_PORT,      /* to a port that no VIP and no NAT has */
	SHUNT_PASS_ODD_HEADER,      /* options, extension headers, fragments, cut short: of no flow */
	SHUNT_PASS_NO_FLOW,         /* not a SYN and of no flow: the stack's own connection */
	SHUNT_PASS_NO_VIP,
	SHUNT_PASS_NO_SESSION,
	SHUNT_PASS_LEASE_IDLE,
	SHUNT_PASS_LEASE_EXPIRED,
	SHUNT_PASS_LEASE_USED_UP,
	SHUNT_PASS_GENERATION,
	SHUNT_PASS_BACKEND_UNKNOWN,
	SHUNT_PASS_BACKEND_DOWN,
	SHUNT_PASS_BACKEND_ADMIN,
	SHUNT_PASS_BACKEND_LOCAL,
	SHUNT_PASS_BACKEND_FAMILY,
	SHUNT_PASS_BACKEND_PORT,    /* dsr cannot translate the VIP's port */
	SHUNT_PASS_NO_NEIGHBOUR,
	SHUNT_PASS_SAMPLED,
	SHUNT_PASS_OPEN_FLOWS,
	SHUNT_PASS_CLIENT_RATE,     /* too many new flows of this client in a short time */
	SHUNT_PASS_VIP_RATE,        /* of this VIP */
	SHUNT_PASS_OVER_LIMIT,
	SHUNT_PASS_BAD_CHECKSUM,
	SHUNT_PASS_SYN_DATA,
	SHUNT_PASS_LIVE_SOCKET,
	SHUNT_PASS_NO_PORT,
	SHUNT_PASS_TABLE_FULL,
	SHUNT_PASS_CONNECT_FAILED,  /* a SYN repeated before the SYN-ACK: handed to the L7 */
	SHUNT_PASS_ICMP,            /* frag-needed or packet-too-big of no flow */
	SHUNT_DROP_ODD_HEADER,      /* options, extension headers or a fragment of a flow, or one cut short */
	SHUNT_DROP_CONNECT_RESET,   /* RST before the SYN-ACK: the client's next SYN reaches the L7 */
	SHUNT_DROP_FLOW_CLOSED,     /* for a NAT port that is only held */
	SHUNT_DROP_FLOW_KILLED,     /* answered with a RST: the daemon has ended the flow */
	SHUNT_DROP_ICMP,            /* for a NAT port that is only held, or too short to translate */
	SHUNT_LOST_EVENT,           /* the ring of events was full (not a packet) */
	SHUNT_REASON_MAX,
};

/* shunt_drops; the reason is repeated in the value so that a dump prints its name. */
struct drop {
	__u64 count;
	enum shunt_reason reason;
	__u32 pad;
};

/* shunt_tracing: whose packets are told of in shunt_trace, and until when. */
struct tracing {
	__u8 client[16];
	__u64 until_ns; /* 0 = nobody's */
};

/* shunt_trace: what was decided on a packet from or to the client. Those of an open flow that nothing happens to are
 * not told of. */
struct trace {
	__u64 ns;
	__u8 src[16];
	__u8 dst[16];
	__u16 sport;
	__u16 dport;
	__u32 ifindex;
	enum shunt_reason reason; /* REASON_NONE: forwarded, to the address that follows */
	__u8 to[16];
	__u16 to_port;
	__u8 tcp_flags;
	__u8 pad;
	__u32 backend;
	__u32 pad2;
};

/* shunt_state: the kernel's own, one entry. */
struct state {
	struct bpf_timer timer; /* the sweep's */
	__u64 sweeps;
	__u64 swept_ns;         /* when the last sweep ended; the daemon re-arms when this stands still */
	__u64 sweep_took_ns;
	__u64 expired;          /* entries deleted by sweeps */
	__u32 entries;          /* of shunt_flows and shunt_flows6, at the last sweep */
	__u32 next_port;        /* counter of NAT ports; random start */
	__u32 swept_port;       /* that counter at the last sweep: when it stands and there were no entries, there are none */
	__u32 pad;
};

_Static_assert(sizeof(struct config) == 88, "config");
_Static_assert(sizeof(struct vip_key) == 20, "vip_key");
_Static_assert(sizeof(struct vip) == 32, "vip");
_Static_assert(sizeof(struct backend) == 80, "backend");
_Static_assert(sizeof(struct weight) == 64, "weight");
_Static_assert(sizeof(struct admin_word) == 8, "admin_word");
_Static_assert(sizeof(struct epoch) == 8, "epoch");
_Static_assert(sizeof(struct vip_use) == 8, "vip_use");
_Static_assert(sizeof(struct ports_map) == 8192, "ports_map");
_Static_assert(sizeof(struct session_key) == 24, "session_key");
_Static_assert(sizeof(struct session) == 48, "session");
_Static_assert(sizeof(struct session_use) == 48, "session_use");
_Static_assert(sizeof(struct flow_key) == 36, "flow_key");
_Static_assert(sizeof(struct flow_key4) == 12, "flow_key4");
_Static_assert(sizeof(struct flow) == 128 && __builtin_offsetof(struct flow, src) == 64, "flow");
_Static_assert(sizeof(struct stat) == 48, "stat");
_Static_assert(sizeof(struct event) == 72, "event");
_Static_assert(sizeof(struct drop) == 16, "drop");
_Static_assert(sizeof(struct state) == 64, "state");
_Static_assert(sizeof(struct tracing) == 24, "tracing");
_Static_assert(sizeof(struct trace) == 80, "trace");

#endif
