// SPDX-License-Identifier: Apache-2.0

package session

import (
	"errors"
	"net/netip"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

// Errors of a PinTable.
var (
	// ErrPinTableFull: the table holds as many pins as it can.
	ErrPinTableFull = errors.New("table of pins is full")
	// ErrNoPin: Touch found no live pin with that backend.
	ErrNoPin = errors.New("no live pin with that backend")
)

// PinKey is all that the kernel can recognise of a client: the address that it comes from and the address and port
// that it comes to. Tables treat an IPv4 address and its IPv4-mapped IPv6 form as one, and ignore zones.
type PinKey struct {
	Client netip.Addr
	VIP    netip.AddrPort
}

// Normal returns the key with IPv4-mapped addresses unmapped and without zones.
func (k PinKey) Normal() PinKey {
	return PinKey{
		Client: k.Client.Unmap().WithZone(""),
		VIP:    netip.AddrPortFrom(k.VIP.Addr().Unmap().WithZone(""), k.VIP.Port()),
	}
}

// Pin tells the kernel where new connections of a PinKey go.
type Pin struct {
	Backend     fleet.ID
	Generation  uint32        // of the backend; the kernel ignores a pin of another generation. 0 = any
	Expires     time.Duration // from now; 0 = never
	Tokens      uint32        // charged to the backend for each connection
	Connections uint32        // that the pin serves; 0 = no bound
	Sessions    uint32        // known behind the key; more open flows than they explain pass to the L7
	Used        uint32        // connections that it has served; Get tells, Put and Touch ignore it
	Static      bool          // written by the operator: honoured, and never changed or removed by Pins
}

// PinTable holds the pins that the kernel obeys. Its methods are safe for concurrent use; calls for one key come one
// at a time from Pins. pintest.Run is the contract that implementations must pass.
type PinTable interface {
	// Put writes a pin, in place of whatever the key had, and starts its lease anew. On an error (ErrPinTableFull)
	// the key's former pin, if any, is still there.
	Put(PinKey, Pin) error
	// Touch sets Sessions and Tokens of a live pin with the same backend and generation; its lease and the rest stay
	// as they are. Anything else there: ErrNoPin, and nothing is changed.
	Touch(PinKey, Pin) error
	// Delete removes the key's pin. That there is none is no error.
	Delete(PinKey) error
	// Get returns the key's pin as it is stored, Expires counted from now. live is false when there is none or its
	// lease has ended: idle, expired or used up. Whether the backend is up is not the table's business.
	Get(PinKey) (pin Pin, live bool)
}
