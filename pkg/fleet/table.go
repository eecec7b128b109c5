// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"sync/atomic"
	"unsafe"
)

// Slot is one backend's line in the weight table, laid out as struct weight in bpf/include/abi.h: one cache line, one
// owner a word. The L7 writes L7Tokens and Limit, the kernel the others. All words count tokens but the last.
type Slot struct {
	L7Tokens     atomic.Int64 // in flight through the front end
	Limit        atomic.Int64 // the kernel opens no flow that lifts the sum above it; 0 = no new flow
	KernelTokens atomic.Int64 // charged by steered flows
	KernelFlows  atomic.Int64 // open steered flows
	HalfOpen     atomic.Int64 // part of KernelTokens whose handshake is not done
	_            [3]int64
}

// AdminWord is struct admin_word in bpf/include/abi.h: the operator's state of one backend.
type AdminWord struct {
	State atomic.Uint32
	_     uint32
}

// Both sizes are the kernel's: a drift does not compile.
const (
	_ = uint(unsafe.Sizeof(Slot{}) - 64)
	_ = uint(64 - unsafe.Sizeof(Slot{}))
	_ = uint(unsafe.Sizeof(AdminWord{}) - 8)
	_ = uint(8 - unsafe.Sizeof(AdminWord{}))
)

// Table is the memory that both planes share, indexed by ID: MaxBackends slots each. With BPF it is the memory of the
// maps shunt_weights and shunt_admin, so that a change by either side is seen at once and costs no system call.
type Table struct {
	Slots []Slot
	Admin []AdminWord
}

// NewHeapTable returns a table of ordinary memory, for running without BPF.
func NewHeapTable() Table {
	return Table{Slots: make([]Slot, MaxBackends), Admin: make([]AdminWord, MaxBackends)}
}
