// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"fmt"
	"net"
	"os"
	"time"
)

// ListenUnix listens on a unix socket of mode 0600. A socket that a dead process left is replaced; one that answers is
// an error. The socket appears with its final mode, and goes when the listener is closed.
func ListenUnix(path string) (net.Listener, error) {
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		_ = c.Close()
		return nil, fmt.Errorf("listen on %s: another process answers there", path)
	}
	if st, err := os.Lstat(path); err == nil && st.Mode()&os.ModeSocket == 0 {
		return nil, fmt.Errorf("listen on %s: the path exists and is not a socket", path)
	}
	temp := fmt.Sprintf("%s.%d", path, os.Getpid())
	_ = os.Remove(temp)
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: temp, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	ln.SetUnlinkOnClose(false)
	if err = os.Chmod(temp, 0o600); err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		_ = ln.Close()
		_ = os.Remove(temp)
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	st, err := os.Lstat(path)
	if err != nil {
		_ = ln.Close()
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return &socket{UnixListener: ln, path: path, made: st}, nil
}

type socket struct {
	*net.UnixListener
	path string
	made os.FileInfo
}

// Close removes the path if it is still this socket's.
func (s *socket) Close() error {
	if st, err := os.Lstat(s.path); err == nil && os.SameFile(st, s.made) {
		_ = os.Remove(s.path)
	}
	return s.UnixListener.Close()
}
