// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const runDir = "/run/netns"

// Lab owns namespaces and the processes in them.
type Lab struct {
	mu    sync.Mutex
	nss   []*Namespace
	procs []*Process
	made  bool // we made /run/netns
	dead  bool
}

// New returns an empty lab. It makes nothing yet.
func New() *Lab { return &Lab{} }

// Namespace is a network namespace.
type Namespace struct {
	Name string // "" for an anonymous one
	Path string // /run/netns/NAME, "" for an anonymous one

	lab    *Lab
	handle netns.NsHandle
}

// Namespace makes a network namespace with lo up. With a name it is also mounted at /run/netns/NAME, as `ip netns` does;
// a name that exists already is an error.
func (l *Lab) Namespace(name string) (*Namespace, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dead {
		return nil, errors.New("make namespace: the lab is closed")
	}
	n := &Namespace{Name: name, lab: l, handle: netns.None()}
	err := onNewThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make network namespace: %w%s", err, hint(err))
		}
		h, err := netns.Get()
		if err != nil {
			return fmt.Errorf("open network namespace: %w", err)
		}
		n.handle = h
		return nil
	})
	if err != nil {
		return nil, err
	}
	l.nss = append(l.nss, n)
	if name != "" {
		if err := l.mountName(n); err != nil {
			return nil, err
		}
	}
	if err := n.Do(setDefaults); err != nil {
		return nil, fmt.Errorf("set up namespace %s: %w", n, err)
	}
	return n, nil
}

func (l *Lab) mountName(n *Namespace) error {
	if strings.ContainsAny(n.Name, "/ \n") || n.Name == "." || n.Name == ".." {
		return fmt.Errorf("name namespace: %q is not a file name", n.Name)
	}
	if _, err := os.Stat(runDir); errors.Is(err, os.ErrNotExist) {
		if err := os.MkdirAll(runDir, 0o755); err != nil {
			return fmt.Errorf("make %s: %w", runDir, err)
		}
		l.made = true
	}
	path := filepath.Join(runDir, n.Name)
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return fmt.Errorf("name namespace %s: %w", n.Name, err)
	}
	f.Close()
	n.Path = path
	if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", int(n.handle)), path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount namespace at %s: %w%s", path, err, hint(err))
	}
	return nil
}

func unmountName(path string) error {
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return nil
}

// Close ends what runs in the lab and removes everything that the lab made.
func (l *Lab) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dead = true
	var errs []error
	for _, p := range l.procs {
		p.kill()
	}
	for _, p := range l.procs {
		<-p.done
	}
	for i := len(l.nss) - 1; i >= 0; i-- {
		n := l.nss[i]
		if n.Path != "" {
			errs = append(errs, unmountName(n.Path))
		}
		if n.handle.IsOpen() {
			errs = append(errs, n.handle.Close())
		}
	}
	l.procs, l.nss = nil, nil
	if l.made {
		l.made = false
		os.Remove(runDir) // refused when others use it: theirs then
	}
	return errors.Join(errs...)
}

// Sweep removes the named namespaces whose names begin with prefix, which a killed lab left behind. Processes that still
// run in them are not touched.
func Sweep(prefix string) error {
	if prefix == "" {
		return errors.New("sweep namespaces: empty prefix")
	}
	paths, err := filepath.Glob(filepath.Join(runDir, prefix+"*"))
	if err != nil {
		return fmt.Errorf("sweep namespaces: %w", err)
	}
	var errs []error
	for _, p := range paths {
		errs = append(errs, unmountName(p))
	}
	return errors.Join(errs...)
}

// Probe says in words what is missing for a lab on this machine, nil when all is there. It builds and removes a small one.
func Probe() error {
	l := New()
	defer l.Close()
	if _, err := l.Steering(SteeringOptions{Clients: 1, Engines: 1}); err != nil {
		return fmt.Errorf("network lab: %w", err)
	}
	return nil
}

// String is the namespace's name, or its inode when it has none.
func (n *Namespace) String() string {
	if n.Name != "" {
		return n.Name
	}
	return n.handle.UniqueId()
}

// Do runs fn in this goroutine, with its OS thread locked and inside the namespace. Goroutines that fn starts are not
// in the namespace; sockets that fn opens stay in it for ever.
func (n *Namespace) Do(fn func() error) (err error) {
	runtime.LockOSThread()
	old, err := netns.Get()
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("open own network namespace: %w", err)
	}
	defer old.Close()
	if err := netns.Set(n.handle); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter namespace %s: %w%s", n, err, hint(err))
	}
	defer func() {
		if back := netns.Set(old); back != nil {
			// The thread stays locked: it must not serve other goroutines.
			err = errors.Join(err, fmt.Errorf("leave namespace %s: %w", n, back))
			return
		}
		runtime.UnlockOSThread()
	}()
	return fn()
}

// Dial connects from inside the namespace. address is a literal IP address and port; it fits http.Transport.DialContext.
func (n *Namespace) Dial(ctx context.Context, network, address string) (c net.Conn, err error) {
	if _, err := net.ResolveTCPAddr(network, address); err != nil {
		return nil, fmt.Errorf("dial in namespace %s: %w", n, err)
	}
	err = n.Do(func() (err error) {
		c, err = new(net.Dialer).DialContext(ctx, network, address)
		return err
	})
	return c, err
}

// DialFrom is Dial with a local address (port 0 = any).
func (n *Namespace) DialFrom(ctx context.Context, local net.Addr, network, address string) (c net.Conn, err error) {
	err = n.Do(func() (err error) {
		c, err = (&net.Dialer{LocalAddr: local}).DialContext(ctx, network, address)
		return err
	})
	return c, err
}

// Listen listens inside the namespace (plain TCP, no MPTCP).
func (n *Namespace) Listen(network, address string) (ln net.Listener, err error) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	err = n.Do(func() (err error) {
		ln, err = lc.Listen(context.Background(), network, address)
		return err
	})
	return ln, err
}

// Sysctl writes a value under /proc/sys as the namespace sees it; key has slashes or dots ("net/ipv4/ip_forward").
func (n *Namespace) Sysctl(key, value string) error {
	return n.Do(func() error { return sysctl(key, value) })
}

func sysctl(key, value string) error {
	path := key
	if !strings.Contains(key, "/") {
		path = strings.ReplaceAll(key, ".", "/")
	}
	if err := os.WriteFile("/proc/sys/"+path, []byte(value), 0o644); err != nil {
		return fmt.Errorf("set sysctl %s: %w", key, err)
	}
	return nil
}

// onNewThread runs fn on a thread that dies afterwards, whatever fn did to it.
func onNewThread(fn func() error) error {
	errc := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked
		errc <- fn()
	}()
	return <-errc
}

func hint(err error) string {
	switch {
	case errors.Is(err, unix.EPERM):
		return " (needs CAP_SYS_ADMIN and CAP_NET_ADMIN)"
	case errors.Is(err, unix.EOPNOTSUPP):
		return " (this kernel lacks it)"
	}
	return ""
}
