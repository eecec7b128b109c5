// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Offloads of a link that change what XDP sees of a frame.
type Offloads struct {
	LRO    bool // merges segments before the program
	RxVLAN bool // takes the tag off before the program
}

// Offloads asks the driver of the link of that name.
func (n *Net) Offloads(name string) (Offloads, error) {
	const lro, rxVLAN = 1 << 15, 1 << 8 // ETH_FLAG_*
	value := struct{ cmd, data uint32 }{cmd: unix.ETHTOOL_GFLAGS}
	var req struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}
	if copy(req.name[:unix.IFNAMSIZ-1], name) < len(name) {
		return Offloads{}, fmt.Errorf("read offloads of %s: %w", name, unix.ENAMETOOLONG)
	}
	req.data = unsafe.Pointer(&value)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(n.udp4), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req)))
	runtime.KeepAlive(&value)
	if errno != 0 {
		return Offloads{}, fmt.Errorf("read offloads of %s: %w", name, errno)
	}
	return Offloads{LRO: value.data&lro != 0, RxVLAN: value.data&rxVLAN != 0}, nil
}
