// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"fmt"
	"os"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// watcher notices that a client has closed its connection, at once and without reading from it: fasthttp does not
// look at the socket while a request is served. One epoll set holds every client socket, edge-triggered and for the
// peer's close only, so data (pipelined requests) wakes nobody and no byte is taken. The set itself is polled by
// Go's poller: no thread waits in it, and a request costs no system call.
type watcher struct {
	file *os.File
	raw  syscall.RawConn
	ep   int

	mu   sync.Mutex
	next uint64
	conn map[uint64]*clientConn
	done chan struct{}
}

// newWatcher starts watching. close ends its goroutine and waits for it.
func newWatcher() (*watcher, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create epoll set: %w", err)
	}
	if err := unix.SetNonblock(ep, true); err != nil {
		unix.Close(ep)
		return nil, fmt.Errorf("make epoll set pollable: %w", err)
	}
	w := &watcher{file: os.NewFile(uintptr(ep), "epoll"), ep: ep, conn: map[uint64]*clientConn{},
		done: make(chan struct{})}
	if w.raw, err = w.file.SyscallConn(); err != nil {
		w.file.Close()
		return nil, fmt.Errorf("poll epoll set: %w", err)
	}
	go w.run()
	return w, nil
}

func (w *watcher) close() {
	w.file.Close()
	<-w.done
}

// add watches the connection until it is closed. It reports whether that is possible.
func (w *watcher) add(c *clientConn) bool {
	if c.ctl == nil {
		return false
	}
	w.mu.Lock()
	w.next++
	id := w.next
	w.conn[id] = c
	c.watchID = id
	w.mu.Unlock()
	var err error
	ctlErr := c.ctl.Control(func(fd uintptr) {
		ev := unix.EpollEvent{Events: unix.EPOLLRDHUP | unix.EPOLLET&0xffffffff, Fd: int32(uint32(id)), Pad: int32(id >> 32)}
		err = unix.EpollCtl(w.ep, unix.EPOLL_CTL_ADD, int(fd), &ev)
	})
	if err != nil || ctlErr != nil {
		w.remove(c)
		return false
	}
	return true
}

// remove forgets a connection. The kernel does so by itself when the socket is closed.
func (w *watcher) remove(c *clientConn) {
	w.mu.Lock()
	delete(w.conn, c.watchID)
	w.mu.Unlock()
}

func (w *watcher) run() {
	defer close(w.done)
	var events [64]unix.EpollEvent
	for {
		n := 0
		err := w.raw.Read(func(uintptr) bool {
			var err error
			n, err = unix.EpollWait(w.ep, events[:], 0)
			if err == unix.EINTR {
				n = 0
			}
			return n > 0
		})
		if err != nil {
			return
		}
		for i := range events[:max(n, 0)] {
			id := uint64(uint32(events[i].Fd)) | uint64(uint32(events[i].Pad))<<32
			w.mu.Lock()
			c := w.conn[id]
			w.mu.Unlock()
			if c != nil {
				c.peerGone()
			}
		}
	}
}

// socketQuiet reports whether an idle socket is open and has nothing to read. The library's call would allocate.
func socketQuiet(fd uintptr, b *[1]byte) bool {
	_, _, err := unix.RawSyscall6(unix.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(b)), 1, unix.MSG_PEEK|unix.MSG_DONTWAIT, 0, 0)
	return err == unix.EAGAIN
}
