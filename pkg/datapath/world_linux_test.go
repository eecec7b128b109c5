// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/netdev"
	"github.com/shunt-lb/shunt/pkg/netdev/lab"
	"github.com/shunt-lb/shunt/pkg/session"
)

const (
	vipPort    = 8080
	enginePort = 8000
)

// world is a testbed with HTTP servers that tell their names, and a bpffs of its own.
type world struct {
	*lab.Testbed
	t      *testing.T
	bpffs  string
	attach string
	vips   map[bool]netip.AddrPort // by IPv6; nil = the balancer's own addresses
}

// Each costs a tenth of a second.
var (
	probeLab = sync.OnceValue(lab.Probe)
	probeBPF = sync.OnceValue(Probe)
)

func need(t testing.TB, err error) {
	t.Helper()
	if err == nil {
		return
	}
	if os.Getenv("SHUNT_REQUIRE_ALL") == "1" {
		t.Fatal(err)
	}
	t.Skip(err)
}

func newWorld(t *testing.T, clients, engines int) *world {
	t.Helper()
	return newWorldAt(t, AttachNative, clients, engines)
}

// newWorldAt is a world whose links suit the attach point: for tcx they are as the kernel makes them.
func newWorldAt(t *testing.T, attach string, clients, engines int) *world {
	t.Helper()
	need(t, probeLab())
	need(t, probeBPF())
	l := lab.New()
	t.Cleanup(func() { must(t, l.Close()) })
	tb, err := l.Steering(lab.SteeringOptions{Clients: clients, Engines: engines, Plain: attach == AttachTCX})
	must(t, err)
	w := &world{Testbed: tb, t: t, bpffs: privateBPFFS(t), attach: attach}
	w.serve(tb.Balancer, vipPort, "l7")
	for i, e := range tb.Engines {
		w.serve(e, enginePort, fmt.Sprintf("e%d", i+1))
	}
	return w
}

// privateBPFFS mounts a bpffs that goes with the test, and with it all pins.
func privateBPFFS(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("bpf", dir, "bpf", 0, "mode=0700"); err != nil {
		need(t, fmt.Errorf("mount bpffs: %w", err))
	}
	t.Cleanup(func() {
		if err := CleanupForced(dir, ""); err != nil {
			t.Error(err)
		}
		must(t, unix.Unmount(dir, unix.MNT_DETACH))
	})
	return dir
}

// serve answers "name remote-address"; /stream?n sends n MB slowly enough to be interrupted; /hold waits for the client.
func (w *world) serve(h *lab.Host, port uint16, name string) {
	for _, a := range []netip.Addr{h.V4, h.V6} {
		w.serveAt(h, netip.AddrPortFrom(a, port), name)
	}
}

func (w *world) serveAt(h *lab.Host, at netip.AddrPort, name string) {
	srv := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/stream" {
			block := []byte(strings.Repeat("shunt..\n", 1<<13))
			for range 16 * 20 {
				if _, err := rw.Write(block); err != nil {
					return
				}
				time.Sleep(5 * time.Millisecond)
			}
			return
		}
		fmt.Fprint(rw, name, " ", r.RemoteAddr)
	})}
	ln, err := h.Listen("tcp", at.String())
	must(w.t, err)
	go srv.Serve(ln)
	w.t.Cleanup(func() { srv.Close() })
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (w *world) vip(v6 bool) netip.AddrPort {
	if v, ok := w.vips[v6]; ok {
		return v
	}
	if v6 {
		return netip.AddrPortFrom(w.Balancer.V6, vipPort)
	}
	return netip.AddrPortFrom(w.Balancer.V4, vipPort)
}

func (w *world) options() Options {
	return Options{
		BPFFS: w.bpffs, Interfaces: []string{"eth0"}, Attach: w.attach,
		Settings: Settings{
			VIPs:     []VIP{{Addr: w.vip(false)}, {Addr: w.vip(true)}},
			NATPorts: netdev.PortRange{First: 20000, Last: 29999},
		},
	}
}

func (w *world) tryOpen(o Options) (d *Datapath, err error) {
	err = w.Balancer.Do(func() (err error) {
		d, err = Open(o)
		return err
	})
	if err == nil {
		w.t.Cleanup(func() { d.Close() })
	}
	return d, err
}

func (w *world) open(o Options) *Datapath {
	w.t.Helper()
	d, err := w.tryOpen(o)
	must(w.t, err)
	return d
}

// records are backends 1.. = engines, up, at their v4 or v6 addresses.
func (w *world) records(v6 bool) []BackendRecord {
	var list []BackendRecord
	for i, e := range w.Engines {
		addr := e.V4
		if v6 {
			addr = e.V6
		}
		list = append(list, BackendRecord{
			ID: fleet.ID(i + 1), Name: fmt.Sprintf("e%d", i+1), Steer: netip.AddrPortFrom(addr, enginePort),
			State: fleet.HealthUp, Generation: 7,
		})
	}
	return list
}

// start opens, attaches and runs a datapath with all engines up, and waits until they can be steered to. stop ends
// the run and closes.
func (w *world) start(o Options, v6 bool) (d *Datapath, stop func()) {
	w.t.Helper()
	d = w.open(o)
	must(w.t, d.SetBackends(w.records(v6)))
	must(w.t, d.Attach())
	for i := range w.Engines {
		d.Table().Slots[i+1].Limit.Store(1 << 40)
	}
	stop = w.run(d)
	w.steerable(d)
	return d, stop
}

func (w *world) run(d *Datapath) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				w.t.Error(err)
			}
			if err := d.Close(); err != nil {
				w.t.Error(err)
			}
		})
	}
	w.t.Cleanup(stop)
	return stop
}

func (w *world) steerable(d *Datapath) {
	w.t.Helper()
	eventually(w.t, "every engine's next hop is known", func() bool {
		for _, b := range d.Status().Backends {
			if b.NextHop == "" || b.Problem != "" {
				return false
			}
		}
		return true
	})
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("never: %s", what)
}

func (w *world) pinKey(client int, v6 bool) session.PinKey {
	c := w.Clients[client].V4
	if v6 {
		c = w.Clients[client].V6
	}
	return session.PinKey{Client: c, VIP: w.vip(v6)}
}

// client returns an HTTP client in a client's namespace, with or without keep-alive.
func (w *world) client(n int, keep bool) *http.Client {
	tr := &http.Transport{
		DisableKeepAlives: !keep,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return w.Clients[n].Dial(ctx, network, addr)
		},
	}
	w.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 30 * time.Second}
}

// ask returns who answered and what client address it saw.
func ask(t *testing.T, c *http.Client, to netip.AddrPort) (name string, remote netip.AddrPort) {
	t.Helper()
	resp, err := c.Get("http://" + to.String() + "/")
	must(t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	must(t, err)
	name, addr, _ := strings.Cut(string(b), " ")
	remote, err = netip.ParseAddrPort(addr)
	must(t, err)
	return name, netip.AddrPortFrom(remote.Addr().Unmap(), remote.Port())
}

func (w *world) expect(c *http.Client, v6 bool, want string) {
	w.t.Helper()
	if got, _ := ask(w.t, c, w.vip(v6)); got != want {
		w.t.Fatalf("%s answered, not %s", got, want)
	}
}
