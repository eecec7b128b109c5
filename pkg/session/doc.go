// SPDX-License-Identifier: Apache-2.0

// Package session says which conversation a request belongs to, where that conversation is at home, and which client
// addresses the kernel may steer there.
//
// # Who is the session
//
// An Identifier makes a Key of the first of these that a request has: one of the configured headers, in their order; the
// body's prompt_cache_key; the fingerprint that package request takes of model, system prompt, tools and first user
// message. The client's address, a system prompt alone, and the Authorization header never make a session: many
// conversations share each of them.
//
// A Key is a hash with a random seed. The value that a client sent is not kept, a Key cannot be turned back into it, and
// nobody outside can choose values that meet in one Key. It follows that Keys mean nothing in another process, nor in this
// one after a restart. A client that copies another's session id shares that session's home, and nothing else.
//
// # Where it is at home
//
// A Tracker remembers the home backend of up to Max sessions, and what each is expected to cost next. It forgets those
// that are idle, and the oldest when it is full.
//
// # What the kernel may steer
//
// The kernel sees a client's address only, so Pins writes a pin for an address while all its recent sessions have one home
// backend, and removes it as soon as two disagree: see Pins.Offer. Errors of a PinTable are not errors of a request: a pin
// that cannot be written leaves the address to the L7.
package session
