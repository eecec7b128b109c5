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
	"time"
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
	// Panic is the share of the otherwise eligible backends that must be left by ejection; with fewer all are tried.
	Panic float64
	// SlowStart is the time in which a backend that came up or back grows into its weight; 0 = it has it at once.
	SlowStart time.Duration
	// Weighted tells that the chooser goes by weights. With one that does not the slow start leaves a backend out of a
	// shrinking share of the picks.
	Weighted bool
}

// Candidate is a backend that may take the request, with its load at the moment of the pick. Of what follows Backend a zero
// value is unknown, and a policy must make do without it.
type Candidate struct {
	ID       ID
	Weight   float64 // capacity share, > 0
	Tokens   int64   // tokens in flight: the L7's and the kernel's
	Requests int64   // requests in flight at the L7 plus open steered flows
	Backend  *Backend

	Cached  int64   // tokens of this prompt that the backend is believed to hold
	Queued  int64   // prompt tokens in flight whose answer has not begun, less what was believed cached
	Waiting int64   // the L7's requests whose answer has not begun
	Context int64   // tokens that requests in flight hold in the KV cache, or will; the kernel's tokens included
	Speed   Speed   // learned from the backend's own answers and its pool's
	Latency float64 // peak EWMA of the time to the first byte, in seconds
	Inflow  float64 // prompt tokens sent there lately that were not cached: what has driven others' prompts out of its cache
	Gauges  Gauges  // what the engine itself reported
	Fresh   bool    // Gauges are recent enough to be believed
}

// Gauges are an engine's own figures. Waiting and Running are requests from all balancers and clients.
type Gauges struct {
	Waiting, Running int64
	KVUse            float64       // share of the KV cache in use, 0 to 1; below 0 = not reported
	KVTokens         int64         // capacity of the KV cache; 0 = not reported
	Sent             int64         // the L7's requests in flight when the figures were read
	At               time.Duration // when they were read, on the fleet's clock
}

// Query is what a policy may know of a request. Fields that the route does not need stay zero.
type Query struct {
	Model        string
	Session      uint64 // hash of the session; 0 = none
	Home         ID     // backend that holds the session; 0 = none or unknown
	HomeFull     bool   // set by Take: the home is up, but at its limit of tokens in flight or busy
	PromptTokens int64
	OutputTokens int64         // expected, capped by the request's own limit
	Blocks       []uint64      // chained hashes of the prompt's blocks, in order; empty = nothing known
	BlockTokens  float64       // tokens that one of Blocks stands for
	Streams      bool          // the answer's first byte comes when the prefill is done, not with the whole answer
	Deadline     time.Duration // time to the first byte that the request is held to; 0 = none
	Exclude      []ID          // backends tried before for this request
	MayProbe     bool          // the request's fate tells whether a backend works
	LocalOnly    bool          // prefer backends of this host (a connection that another shunt steered here)
	Rand         *rand.Rand
}

// Index knows which backend holds how much of a prompt. It must be safe for concurrent use, and none of its methods may
// block or call back. prefix.Index is the implementation.
type Index interface {
	// Held returns how many of the first blocks the backend is believed to hold.
	Held(id ID, blocks []uint64) int
	// Enter records that the backend is given a prompt of these blocks.
	Enter(id ID, blocks []uint64)
	// Forget drops all of a backend that left the fleet.
	Forget(id ID)
}

// Chooser picks one of the candidates (never empty) and says why. It is called under the pool's lock: it must not
// allocate, block or keep the slice. policy.Policy is the contract that implementations follow.
type Chooser interface {
	Pick(q *Query, c []Candidate) (index int, why Reason)
}
