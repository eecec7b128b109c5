// SPDX-License-Identifier: Apache-2.0

// Package house holds the rules of the house as tests: which package may import which, how long a file may be, what
// an error sounds like. It has no code of its own; CONTRIBUTING.md says the same rules in words.
package house
