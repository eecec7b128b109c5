// SPDX-License-Identifier: Apache-2.0

//go:build race

package tokens

// raceEnabled: the race detector makes pools lose things on purpose.
const raceEnabled = true
