// SPDX-License-Identifier: Apache-2.0

package datapath

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
