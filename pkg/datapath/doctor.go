// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"net/netip"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

// Traced is a packet on which the kernel decided something.
type Traced struct {
	At        time.Time      `json:"at"`
	Src       netip.AddrPort `json:"src"`
	Dst       netip.AddrPort `json:"dst"`
	Flags     string         `json:"flags"`     // of TCP: F S R P A U
	Interface int            `json:"interface"` // index, where it came in
	Verdict   string         `json:"verdict"`   // forwarded, or the reason's name
	To        netip.AddrPort `json:"to,omitzero"`
	Backend   fleet.ID       `json:"backend_id,omitempty"`
}

// Verdicts of a Finding.
const (
	FindingOK   = "ok"
	FindingWarn = "warn" // works, but not as well as it could
	FindingFail = "fail" // the kernel path cannot be had like this
)

// Finding is one thing that Diagnose looked at.
type Finding struct {
	Verdict string `json:"verdict"`
	What    string `json:"what"`
	Detail  string `json:"detail"`
	Remedy  string `json:"remedy,omitempty"` // what to do about it
}
