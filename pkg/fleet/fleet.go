// SPDX-License-Identifier: Apache-2.0

// Package fleet holds the backends, their pools, and the ledger of tokens in flight.
//
// It is a leaf: policies, health, the front end and the datapath all meet here. A backend's token weight lies in a
// table that may be memory shared with the kernel (see Table), so one definition serves with and without BPF.
package fleet

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"net/url"
)

// ID is a backend's slot in the weight table. 0 means none.
type ID uint32

// MaxBackends is the number of slots of the weight table, slot 0 included (SHUNT_MAX_BACKENDS in bpf/include/abi.h).
const MaxBackends = 1024

// Errors of Pool.Take.
var (
	// ErrNoBackend: no backend of the pool may take new work (down, drained, all tried).
	ErrNoBackend = errors.New("no backend available")
	// ErrOverloaded: backends are up, but each is at its limit of tokens in flight.
	ErrOverloaded = errors.New("every backend is at its limit of tokens in flight")
)

// Reason says why a policy chose a backend. It is a metric label and the output of `shunt explain`, so the set of
// values is bounded: each policy declares its reasons as constants.
type Reason string

// Health is what the health checks say of a backend.
type Health uint32

// The states of health. A backend takes no work before its first good check.
const (
	HealthUnknown Health = iota
	HealthUp
	HealthDown
)

func (h Health) String() string { return [...]string{"unknown", "up", "down"}[min(h, 2)] }

// AdminState is the operator's word on a backend (enum shunt_admin in bpf/include/abi.h).
type AdminState uint32

// The operator's states, in HAProxy's words: drain takes no new work but keeps checks and open requests, maint
// stops checks too.
const (
	AdminNone AdminState = iota
	AdminDrain
	AdminMaint
)

func (a AdminState) String() string {
	return [...]string{"ready", "drain", "maint", "invalid"}[min(a, 3)]
}

// BackendSpec is the configured part of a backend. Name is unique in the whole fleet and at most 31 bytes.
type BackendSpec struct {
	Name              string
	URL               *url.URL       // scheme, host and optional path prefix of the inference server
	Weight            int            // capacity relative to the others; 0 means 1
	Steer             netip.AddrPort // where the kernel steers its sessions: the peer shunt or the engine; zero = never
	MaxInflightTokens int64          // 0 = no bound
	Local             bool           // runs on this host
}

// PoolSpec is the configured part of a pool.
type PoolSpec struct {
	Name     string
	Models   []string // empty: takes any model name
	Chooser  Chooser
	Backends []BackendSpec
}

// Candidate is a backend that may take the request, with its load at the moment of the pick.
type Candidate struct {
	ID       ID
	Weight   float64 // capacity share, > 0
	Tokens   int64   // tokens in flight: the L7's and the kernel's
	Requests int64   // requests in flight at the L7 plus open steered flows
	Backend  *Backend
}

// Query is what a policy may know of a request. Fields that the route does not need stay zero.
type Query struct {
	Model        string
	Session      uint64 // hash of the session; 0 = none
	Home         ID     // backend that holds the session; 0 = none or unknown
	HomeFull     bool   // set by Take: the home is up, but at its limit of tokens in flight
	PromptTokens int64
	OutputTokens int64 // expected, capped by the request's own limit
	Exclude      []ID  // backends tried before for this request
	LocalOnly    bool  // prefer backends of this host (a connection that another shunt steered here)
	Rand         *rand.Rand
}

// Chooser picks one of the candidates (never empty) and says why. It is called under the pool's lock: it must not
// allocate, block or keep the slice. policy.Policy is the contract that implementations follow.
type Chooser interface {
	Pick(q *Query, c []Candidate) (index int, why Reason)
}
