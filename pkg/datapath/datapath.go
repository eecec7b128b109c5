// SPDX-License-Identifier: Apache-2.0

// Package datapath loads the kernel half of shunt, keeps its maps, and reads them back.
//
// The maps and the links to the interfaces are pinned in a bpffs, so that what is steered goes on when the daemon
// ends, and the next daemon takes it over: Open loads the program and finds or makes the maps, the caller writes
// backends, Attach puts the program on the interfaces (in place of the former one, without a gap), Run keeps the
// neighbours fresh and the tables tidy, Close lets go and leaves everything running. Cleanup is the only way to take
// it away.
//
// One instance has one daemon: Open holds a lock. Everything happens in the network namespace in which Open was
// called, whatever thread the later calls come from.
package datapath

import (
	"errors"
	"net/netip"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/netdev"
)

// Errors of this package.
var (
	// ErrUnavailable: this machine or this process cannot have the kernel path. The error's text says what is missing.
	ErrUnavailable = errors.New("kernel path unavailable")
	// ErrLocked: a daemon runs on this instance already.
	ErrLocked = errors.New("instance is in use by another daemon")
	// ErrIncompatible: maps of another layout are pinned for this instance.
	ErrIncompatible = errors.New("pinned maps have another layout")
	// ErrForeignProgram: the interface has an XDP program that is not ours.
	ErrForeignProgram = errors.New("interface has another XDP program")
	// ErrStacked: of two interfaces that are listed one is above the other.
	ErrStacked = errors.New("interfaces lie above each other")
	// ErrStaticPin: the operator wrote this pin; the daemon does not change it.
	ErrStaticPin = errors.New("pin was written by the operator")
	// ErrUnknownVIP: a pin's address and port is no VIP of this instance.
	ErrUnknownVIP = errors.New("no such vip")
)

// Attach modes of Options.Attach.
const (
	AttachAuto    = "auto" // native XDP on hardware, tcx on virtual devices; the other one where that cannot be had
	AttachNative  = "xdp"
	AttachGeneric = "xdp-generic"
	AttachTCX     = "tcx"
)

// VIP is an address and port that clients connect to. Without DSR addresses are rewritten both ways.
type VIP struct {
	Addr netip.AddrPort
	SNAT netip.Addr // source address towards backends, of the same family; zero = Addr
	// DSR leaves packets as they are but for their hardware addresses. The backend is on the same network, has the
	// VIP as an address that it does not announce, listens on the VIP's port, and answers clients itself.
	DSR bool
}

// Lease bounds the use of pins, apart from what each pin says itself.
type Lease struct {
	Idle            time.Duration // a pin unused for so long is void; 0 = no bound
	Sample          uint32        // 1 of so many connections of a pinned address passes to the L7; 0 = none
	FlowsPerSession uint32        // an address may have FlowsPerSession * sessions + FlowsSlack open flows;
	FlowsSlack      uint32        // both 0 = no bound
}

// Charge says how the tokens of an open connection follow its requests. A connection charges its pin's tokens when it
// opens and when a request begins on it, the share of the output when the answer begins, less with each byte of the
// answer, and nothing once it is idle.
type Charge struct {
	OutputShare float64       // of a request's tokens, what is left when its answer begins; 0 = the charge stays until the end
	AnswerBytes uint32        // on the wire for each token of an answer; 0 = unknown
	Idle        time.Duration // without a packet, after an answer has begun or before the first request
}

// Rate bounds new steered connections; more of them pass to the L7. The zero value bounds nothing.
type Rate struct {
	PerSecond float64
	Burst     int // at once, before the rate counts
}

// Settings are what the kernel steers by.
type Settings struct {
	VIPs     []VIP
	NATPorts netdev.PortRange // source ports towards backends
	Lease    Lease
	Charge   Charge
	// New flows of each client address, and of each VIP.
	ClientRate, VIPRate Rate
	// DrainLimit ends the open connections of a backend that has been drained, in maintenance or removed for so long;
	// 0 = they run to their end.
	DrainLimit time.Duration
}

// Options of Open.
type Options struct {
	Instance   string   // names the pins; letters, digits, - and _; "" = "default"
	BPFFS      string   // directory of a mounted bpffs; "" = find one, or mount one
	Interfaces []string // every NIC on which clients or backends are reached
	Attach     string   // AttachAuto ("" too), AttachNative, AttachGeneric or AttachTCX
	Settings
	OnEvent func(Event) // called from Run, in order; it must not block. nil = none
}

// BackendRecord is what the kernel knows of a backend.
type BackendRecord struct {
	ID         fleet.ID
	Name       string
	Steer      netip.AddrPort // zero = never steered
	State      fleet.Health   // only HealthUp takes new connections
	Generation uint32
	Local      bool // on this host: connections pass to the local L7
}

// EventKind says what the kernel reports.
type EventKind uint32

// The kinds of events (enum shunt_event_kind).
const (
	EventNone     EventKind = iota
	EventOpen               // a connection is steered
	EventClose              // and has ended
	EventFull               // shunt_flows is full: the connection passed to the L7
	EventSampled            // a connection of a pinned address passed to the L7 as a sample
	EventFailover           // a backend did not answer: the pin is gone and the L7 takes the connection
)

func (k EventKind) String() string {
	return [...]string{"none", "open", "close", "full", "sampled", "failover", "unknown"}[min(k, 6)]
}

// Event is something that happened in the kernel.
type Event struct {
	Kind     EventKind
	Backend  fleet.ID
	Client   netip.AddrPort
	VIP      netip.AddrPort // the zero address when the VIP is gone
	BytesIn  uint64         // client to backend
	BytesOut uint64
	Duration time.Duration
	Tokens   int64 // charged
}

// Status is the state of the kernel path for people and machines.
type Status struct {
	Instance   string            `json:"instance"`
	Pins       string            `json:"pins"` // directory
	ABI        uint32            `json:"abi"`
	Interfaces []InterfaceStatus `json:"interfaces"`
	VIPs       []VIPStatus       `json:"vips"`
	Backends   []BackendStatus   `json:"backends"`
	Flows      int64             `json:"flows"`    // open steered connections
	Opened     uint64            `json:"opened"`   // since the maps were made
	Closed     uint64            `json:"closed"`   // likewise
	Sessions   int               `json:"sessions"` // pins, as of the last tidying
	Events     map[string]uint64 `json:"events"`   // since the daemon started, by kind
	Notices    []string          `json:"notices,omitempty"`
}

// InterfaceStatus is one interface of Status.
type InterfaceStatus struct {
	Name    string `json:"name"`
	Index   int    `json:"index"` // 0 = not there
	Mode    string `json:"mode"`  // that is live: native, generic, tcx, none
	Adopted bool   `json:"adopted"`
	Problem string `json:"problem,omitempty"`
}

// VIPStatus is one VIP of Status.
type VIPStatus struct {
	Addr     netip.AddrPort `json:"addr"`
	Mode     string         `json:"mode"` // nat, dsr
	SNAT     netip.Addr     `json:"snat,omitzero"`
	NATPorts string         `json:"nat_ports,omitempty"`
}

// BackendStatus is one backend of Status.
type BackendStatus struct {
	ID        fleet.ID       `json:"id"`
	Name      string         `json:"name"`
	Steer     netip.AddrPort `json:"steer"`
	State     string         `json:"state"`
	NextHop   string         `json:"next_hop,omitempty"` // hardware address
	Interface string         `json:"interface,omitempty"`
	Problem   string         `json:"problem,omitempty"` // why nothing is steered to it
	Flows     int64          `json:"flows"`
	Tokens    int64          `json:"tokens"` // charged by its flows
	Opened    uint64         `json:"opened"`
}

// Flow is one steered connection.
type Flow struct {
	Client     netip.AddrPort `json:"client"`
	VIP        netip.AddrPort `json:"vip"`
	NAT        netip.AddrPort `json:"nat"` // the source that the backend sees; with dsr the client
	Steer      netip.AddrPort `json:"steer"`
	Backend    fleet.ID       `json:"backend_id"`
	Name       string         `json:"backend"`
	State      string         `json:"state"` // syn, handshake, open, closing, closed
	Age        time.Duration  `json:"age_ns"`
	Idle       time.Duration  `json:"idle_ns"` // to the second
	Tokens     int64          `json:"tokens"`  // charged now
	PacketsIn  uint64         `json:"packets_in"`
	BytesIn    uint64         `json:"bytes_in"`
	PacketsOut uint64         `json:"packets_out"`
	BytesOut   uint64         `json:"bytes_out"`
}

// Session is one pin with its use.
type Session struct {
	Client      netip.Addr     `json:"client"`
	VIP         netip.AddrPort `json:"vip"`
	Backend     fleet.ID       `json:"backend_id"`
	Name        string         `json:"backend"`
	Live        bool           `json:"live"`
	Static      bool           `json:"static"`
	Age         time.Duration  `json:"age_ns"`
	Expires     time.Duration  `json:"expires_ns"` // from now; 0 = never
	Idle        time.Duration  `json:"idle_ns"`    // since the last steered connection or the pin's writing
	Tokens      uint32         `json:"tokens"`
	Sessions    uint32         `json:"sessions"`
	Used        uint32         `json:"used"`        // connections steered by this pin
	Connections uint32         `json:"connections"` // that it allows; 0 = no bound
	Open        int32          `json:"open"`        // steered connections now
	Sampled     uint32         `json:"sampled"`     // connections that passed to the L7 as samples
}
