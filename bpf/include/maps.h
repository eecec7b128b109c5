/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The maps. All are pinned by name; who writes which is part of the contract (see README.md). */
#ifndef SHUNT_MAPS_H
#define SHUNT_MAPS_H

#include "abi.h"
#include <bpf/bpf_helpers.h>

/* Settings that may change at run time, and the daemon's heartbeat. Writer: daemon. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct config);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} shunt_config SEC(".maps");

/* What clients connect to. Writer: daemon. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SHUNT_MAX_VIPS);
	__type(key, struct vip_key);
	__type(value, struct vip);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} shunt_vips SEC(".maps");

/* Where backend ids are. A hash, because an update of an array's value is not atomic. Writer: daemon. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SHUNT_MAX_BACKENDS);
	__type(key, __u32);
	__type(value, struct backend);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} shunt_backends SEC(".maps");

/* The operator's word on a backend id. Writer: operator. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SHUNT_MAX_BACKENDS);
	__type(key, __u32);
	__type(value, struct admin_word);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} shunt_admin SEC(".maps");

/* Tokens in flight by backend id. Writers: one a word, see struct weight. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SHUNT_MAX_BACKENDS);
	__type(key, __u32);
	__type(value, struct weight);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} shunt_weights SEC(".maps");

/* Pins: which client address goes to which backend. Not an LRU: what user space wrote would be evicted first.
 * Writers: daemon and operator; the kernel deletes a pin whose backend refuses. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SHUNT_MAX_SESSIONS);
	__type(key, struct session_key);
	__type(value, struct session);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} shunt_sessions SEC(".maps");

/* What pins have been used for. Writer: kernel; the daemon deletes records that nothing needs. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SHUNT_MAX_SESSIONS);
	__type(key, struct session_key);
	__type(value, struct session_use);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} shunt_sess_use SEC(".maps");

/* Steered connections, one entry a direction, keyed by the packet as it arrives; one table a family. Not an LRU: a flood
 * of SYNs would evict live flows; a full table sends new connections to the L7. Writer: kernel. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SHUNT_MAX_FLOWS);
	__type(key, struct flow_key4);
	__type(value, struct flow);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} shunt_flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SHUNT_MAX_FLOWS6);
	__type(key, struct flow_key);
	__type(value, struct flow);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} shunt_flows6 SEC(".maps");

/* Ports that a packet of ours may be sent to. Writer: daemon. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct ports_map);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} shunt_ports SEC(".maps");

/* What bounds the rate of new flows, by VIP id. Writer: kernel. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SHUNT_MAX_VIPS + 1);
	__type(key, __u32);
	__type(value, struct vip_use);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} shunt_vip_use SEC(".maps");

/* Raised after each change of a backend's record; flows read the record again when it differs. Writer: daemon. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SHUNT_MAX_BACKENDS);
	__type(key, __u32);
	__type(value, struct epoch);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} shunt_epochs SEC(".maps");

/* Traffic by backend id. Writer: kernel. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, SHUNT_MAX_BACKENDS);
	__type(key, __u32);
	__type(value, struct stat);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} shunt_stats SEC(".maps");

/* Packets that were not forwarded, by enum shunt_reason. Writer: kernel. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, SHUNT_REASON_MAX);
	__type(key, __u32);
	__type(value, struct drop);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} shunt_drops SEC(".maps");

/* struct event, submitted without a wake-up: the daemon reads with a deadline. Writer: kernel. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, SHUNT_EVENTS_BYTES);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} shunt_events SEC(".maps");

/* Whose packets are traced. Writer: operator (`shunt trace`). */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct tracing);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} shunt_tracing SEC(".maps");

/* struct trace, for whoever traces. Writer: kernel. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, SHUNT_TRACE_BYTES);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} shunt_trace SEC(".maps");

/* The kernel's own: the timer of the sweep and the counter of NAT ports. Writer: kernel. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct state);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} shunt_state SEC(".maps");

#endif
