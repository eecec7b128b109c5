// SPDX-License-Identifier: Apache-2.0

package proxy

import "golang.org/x/sys/unix"

// connectionLimit is how many client connections the process can serve: each may need a second descriptor for a
// backend, and some are wanted for the rest.
func connectionLimit() int {
	var r unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &r) != nil || r.Cur > 1<<21 {
		return 1 << 20
	}
	return max((int(r.Cur)-64)/2, 16)
}
