// SPDX-License-Identifier: Apache-2.0

package admin

// Status is the answer of GET /api/v1/status.
type Status struct {
	Version            string  `json:"version"`
	UptimeSeconds      float64 `json:"uptime_seconds"`
	Listen             string  `json:"listen"` // address that clients connect to
	Ready              bool    `json:"ready"`
	NotReady           string  `json:"not_ready,omitempty"` // why not
	ConfigFile         string  `json:"config_file,omitempty"`
	ReloadError        string  `json:"reload_error,omitempty"` // of the last reload; the configuration before it is in force
	Kernel             Kernel  `json:"kernel"`
	BackendsUp         int     `json:"backends_up"`
	Backends           int     `json:"backends"`
	Requests           int64   `json:"requests"`            // that the front end served since the start
	InflightRequests   int64   `json:"inflight_requests"`   // at the front end
	SteeredConnections int64   `json:"steered_connections"` // opened in the kernel since the program was loaded
	SteeredFlows       int64   `json:"steered_flows"`       // open now
	Sessions           int64   `json:"sessions"`            // that the front end knows
	Pins               int64   `json:"pins"`                // client addresses that are pinned now
	Tokens             Tokens  `json:"tokens"`
}

// Tokens says how prompts are counted.
type Tokens struct {
	CacheHitRatio  float64       `json:"cache_hit_ratio"` // bytes of prompts whose count was remembered, of all
	EstimatedBytes int64         `json:"estimated_bytes"` // not encoded but estimated
	Calibration    []Calibration `json:"calibration,omitempty"`
}

// Calibration is what was learned of a model's own tokens from the usage that its engines report.
type Calibration struct {
	Pool       string  `json:"pool"`
	Model      string  `json:"model"`      // as configured, or "other"
	Factor     float64 `json:"factor"`     // by which counts are multiplied
	Applied    bool    `json:"applied"`    // the pool's encoding is auto; otherwise the factor is only shown
	Confidence float64 `json:"confidence"` // 0 to 1; the factor is 1 at 0
	Spread     float64 `json:"spread"`     // half of the requests are that near, as a share
	Samples    int64   `json:"samples"`
	Rejected   int64   `json:"rejected"` // requests whose usage cannot be true
}

// Kernel is the state of the kernel path.
type Kernel struct {
	Live       bool     `json:"live"`
	Reason     string   `json:"reason,omitempty"`     // why it is not live
	Mode       string   `json:"mode"`                 // off, nat
	Target     string   `json:"target,omitempty"`     // peer, engine
	Attach     string   `json:"attach,omitempty"`     // how it is attached: native, generic, tcx
	Interfaces []string `json:"interfaces,omitempty"` // each with its mode, and its problem if it has one
	VIPs       []string `json:"vips,omitempty"`
	NATPorts   string   `json:"nat_ports,omitempty"`
	Instance   string   `json:"instance,omitempty"`
	PinDir     string   `json:"pin_dir,omitempty"` // directory of the pinned maps
}

// BackendStatus is one element of GET /api/v1/backends.
type BackendStatus struct {
	Name           string  `json:"name"`
	Pool           string  `json:"pool"`
	ID             uint32  `json:"id"` // slot in the kernel's maps
	URL            string  `json:"url"`
	Steer          string  `json:"steer,omitempty"`
	Weight         int     `json:"weight"`
	Local          bool    `json:"local,omitempty"`            // on this host
	Health         string  `json:"health"`                     // unknown, up, down
	Detail         string  `json:"detail,omitempty"`           // what the last check found
	Ejected        string  `json:"ejected,omitempty"`          // why its requests took it out, if they did
	ProbeInSeconds float64 `json:"probe_in_seconds,omitempty"` // of an ejected one, until a request may probe it
	Admin          string  `json:"admin"`                      // ready, drain, maint
	Signal         string  `json:"signal,omitempty"`           // by what its load is known, and how old that is
	Steerable      bool    `json:"steerable"`                  // new connections may be steered to it
	NotSteerable   string  `json:"not_steerable,omitempty"`    // why not
	L7Tokens       int64   `json:"l7_tokens"`                  // in flight at the front end
	KernelTokens   int64   `json:"kernel_tokens"`              // charged to steered flows
	Limit          int64   `json:"limit"`                      // of both together, for new steered connections
	Requests       int64   `json:"requests"`                   // in flight at the front end
	SteeredFlows   int64   `json:"steered_flows"`              // open now
	Generation     uint32  `json:"generation"`
	Share          float64 `json:"share,omitempty"` // of the pool's capacity, 0 to 1
}

// Session is one element of GET /api/v1/sessions: a client address that the front end knows.
type Session struct {
	Client         string  `json:"client"`
	VIP            string  `json:"vip"`
	Backend        string  `json:"backend"`            // empty for mixed
	State          string  `json:"state"`              // pinned, mixed, static (by the operator), ended (the lease has run out)
	Sessions       int     `json:"sessions"`           // recent ones behind the address
	Tokens         int64   `json:"tokens"`             // charge of one connection
	ExpiresSeconds float64 `json:"expires_in_seconds"` // until the pin is void; 0 = never
	Connections    int64   `json:"connections"`        // that used the pin
	OpenFlows      int64   `json:"open_flows"`
}

// Flow is one element of GET /api/v1/flows: a connection that the kernel steers.
type Flow struct {
	Client      string  `json:"client"` // address:port
	VIP         string  `json:"vip"`
	Backend     string  `json:"backend"`
	NATPort     uint16  `json:"nat_port"`
	State       string  `json:"state"` // opening, open, closing, closed, suspect
	AgeSeconds  float64 `json:"age_seconds"`
	IdleSeconds float64 `json:"idle_seconds"`
	Packets     uint64  `json:"packets"` // both ways
	Bytes       uint64  `json:"bytes"`   // both ways
	Charge      int64   `json:"charge"`  // tokens that it holds of the backend's weight
}

// Readiness is the answer of GET /readyz.
type Readiness struct {
	Ready  bool   `json:"ready"`
	Reason string `json:"reason,omitempty"`
}

// errorBody is the answer of everything that did not work.
type errorBody struct {
	Error string `json:"error"`
}
