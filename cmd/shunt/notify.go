// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"strings"

	"golang.org/x/sys/unix"
)

// notifier tells systemd of the daemon's state (Type=notify-reload or notify) over the datagram socket that
// $NOTIFY_SOCKET names. The zero value tells nobody.
type notifier struct{ socket string }

// notify sends a state, "READY=1", "RELOADING=1" or "STOPPING=1". A reload is sent with the time that systemd asks for.
func (n notifier) notify(state string) error {
	if strings.HasPrefix(state, "RELOADING=1") {
		var now unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
			return fmt.Errorf("read the clock: %w", err)
		}
		state += fmt.Sprintf("\nMONOTONIC_USEC=%d", now.Nano()/1000)
	}
	return n.send(state)
}

func (n notifier) send(state string) error {
	if n.socket == "" {
		return nil
	}
	name := n.socket
	if strings.HasPrefix(name, "@") { // systemd's spelling of an abstract address
		name = "\x00" + name[1:]
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: name, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	defer c.Close()
	if _, err := c.Write([]byte(state)); err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	return nil
}
