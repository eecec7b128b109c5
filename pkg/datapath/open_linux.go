// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/netdev"
)

const (
	abi = uint32(ABI)

	// Between the daemon's death and the last heartbeat's end the kernel leaves connections to nobody. A daemon that is
	// late for a beat loses a sample, no more.
	heartbeatEvery = 100 * time.Millisecond
	heartbeatMax   = 500 * time.Millisecond
)

// Datapath is the kernel path of one instance. Its methods may be called concurrently.
type Datapath struct {
	silent atomic.Bool // Silence was called

	opt     Options
	dir     string // of the instance
	lock    *os.File
	net     *netdev.Net
	m       steerMaps
	prog    *ebpf.Program // XDP
	tcx     *ebpf.Program
	arm     *ebpf.Program
	clock   clock
	reasons []string // names, by enum shunt_reason

	// The mappings live as long as the process: tickets may still count in them after Close.
	config  *steerConfig
	table   fleet.Table
	epochs  []epochWord
	ports   *portBits
	pins    *pinTable
	known   map[string]fleet.Known
	mu      sync.Mutex // all below
	set     Settings
	vips    map[steerVipKey]steerVip
	links   map[string]*attachment
	targets map[fleet.ID]*target
	retired struct{ opened, closed uint64 } // of slots that passed to other backends
	notices []string
	closed  bool

	events [EventFailover + 2]atomic.Uint64
	npins  atomic.Int64
	hops   atomic.Pointer[map[nextHop]bool] // towards backends
}

// epochWord is struct epoch.
type epochWord struct{ value, kill atomic.Uint32 }

// portBits is struct ports_map.
type portBits [1024]atomic.Uint64

func (p *portBits) add(r netdev.PortRange) {
	for port := int(r.First); port <= int(r.Last); port++ {
		p[port>>6].Or(1 << (port & 63))
	}
}

// clock turns the process's time into CLOCK_MONOTONIC without a system call.
type clock struct {
	base uint64
	at   time.Time
}

func newClock() (clock, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return clock{}, fmt.Errorf("read monotonic clock: %w", err)
	}
	return clock{base: uint64(ts.Nano()), at: time.Now()}, nil
}

func (c clock) now() uint64 { return c.base + uint64(time.Since(c.at)) }

// Open loads the program and takes over the instance's pinned maps, or makes them. Nothing is attached yet, and VIPs
// are not written before Attach. The L7's tokens in the weight table are zeroed; the limits and the kernel's words stay.
func Open(o Options) (_ *Datapath, err error) {
	if o.Instance, err = checkInstance(o.Instance); err != nil {
		return nil, err
	}
	if len(o.Interfaces) == 0 {
		return nil, errors.New("open datapath: no interface given")
	}
	switch o.Attach {
	case "":
		o.Attach = AttachAuto
	case AttachAuto, AttachNative, AttachGeneric, AttachTCX:
	default:
		return nil, fmt.Errorf("open datapath: no attach mode %q", o.Attach)
	}
	if err := checkCapabilities(); err != nil {
		return nil, err
	}
	d := &Datapath{opt: o, set: o.Settings, vips: map[steerVipKey]steerVip{}, links: map[string]*attachment{},
		targets: map[fleet.ID]*target{}, known: map[string]fleet.Known{}}
	defer func() {
		if err != nil {
			d.release()
		}
	}()
	if d.clock, err = newClock(); err != nil {
		return nil, err
	}
	if d.net, err = netdev.Open(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	if err := d.checkSettings(o.Settings); err != nil {
		return nil, err
	}
	bpffs, err := findBPFFS(o.BPFFS)
	if err != nil {
		return nil, err
	}
	if d.dir, d.lock, err = makeInstance(bpffs, o.Instance); err != nil {
		return nil, err
	}
	if err := d.checkVersion(); err != nil {
		return nil, err
	}
	if err := d.load(); err != nil {
		return nil, err
	}
	if err := d.mapMemory(); err != nil {
		return nil, err
	}
	if err := d.adopt(); err != nil {
		return nil, err
	}
	d.writeConfig(o.Settings)
	d.pins = newPinTable(d)
	return d, nil
}

// release closes what Open has opened.
func (d *Datapath) release() {
	for _, a := range d.links {
		a.close()
	}
	for _, p := range []*ebpf.Program{d.prog, d.tcx, d.arm} {
		if p != nil {
			p.Close()
		}
	}
	if d.m.ShuntConfig != nil {
		_ = d.m.Close()
	}
	if d.net != nil {
		d.net.Close()
	}
	if d.lock != nil {
		d.lock.Close()
	}
}

// checkVersion refuses to run beside the maps of another ABI: their flows would be cut when the link changes hands.
func (d *Datapath) checkVersion() error {
	list, err := os.ReadDir(d.dir)
	if err != nil {
		return fmt.Errorf("read %s: %w", d.dir, err)
	}
	for _, e := range list {
		var v uint32
		if n, _ := fmt.Sscanf(e.Name(), "v%d", &v); n == 1 && e.IsDir() && v != abi {
			return fmt.Errorf("%w: %s holds maps of abi %d, this shunt has abi %d: let their flows end and run `shunt cleanup` with the former version",
				ErrIncompatible, filepath.Join(d.dir, e.Name()), v, abi)
		}
	}
	return nil
}

// statistics are the maps whose loss costs numbers only: one of another layout is replaced, not refused.
var statistics = []string{steerMapShuntStats, steerMapShuntDrops, steerMapShuntEvents}

func (d *Datapath) load() (err error) {
	spec, err := loadSteer()
	if err != nil {
		return fmt.Errorf("read program: %w", err)
	}
	var reasons *btf.Enum
	if err := spec.Types.TypeByName("shunt_reason", &reasons); err != nil {
		return fmt.Errorf("read program: find enum shunt_reason: %w", err)
	}
	d.reasons = reasonNames(reasons)
	if _, err := os.Stat("/proc/net/if_inet6"); err != nil {
		if err := spec.Variables[steerVarIpv6On].Set(uint8(0)); err != nil {
			return fmt.Errorf("configure program: %w", err)
		}
	}
	dir := mapDir(d.dir, abi)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make %s: %w", dir, err)
	}
	var fresh []string
	pinnable := 0
	for name, m := range spec.Maps {
		if m.Pinning != ebpf.PinByName {
			continue
		}
		pinnable++
		pinned, err := ebpf.LoadPinnedMap(filepath.Join(dir, name), nil)
		if errors.Is(err, os.ErrNotExist) {
			fresh = append(fresh, name)
			continue
		}
		if err != nil {
			return fmt.Errorf("load map %s: %w", name, err)
		}
		err = m.Compatible(pinned)
		if err != nil && slices.Contains(statistics, name) {
			d.notices = append(d.notices, fmt.Sprintf("map %s had another layout and was replaced; its counts begin anew", name))
			err = pinned.Unpin()
			fresh = append(fresh, name)
		}
		pinned.Close()
		if err != nil {
			return fmt.Errorf("load map %s: %w: %w (pinned value first): run `shunt cleanup` and start again", name, ErrIncompatible, err)
		}
	}
	memlock := rlimit.RemoveMemlock() // needed before Linux 5.11 only
	var objs steerObjects
	if err := spec.LoadAndAssign(&objs, &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: dir}}); err != nil {
		for _, name := range fresh {
			_ = os.Remove(filepath.Join(dir, name))
		}
		if len(fresh) == pinnable {
			_ = os.Remove(dir)
			_ = os.Remove(d.dir)
		}
		return errors.Join(loadError(err), memlock)
	}
	d.m, d.prog, d.tcx, d.arm = objs.steerMaps, objs.ShuntXdp, objs.ShuntTcx, objs.ShuntArm
	return d.armSweep()
}

// armSweep starts the timer that ends flows in the kernel, or hands it over to this program. The first time it also
// gives the NAT ports a random start: those that a former instance used may rest in TIME_WAIT at backends.
func (d *Datapath) armSweep() error {
	code, err := d.arm.Run(&ebpf.RunOptions{Data: make([]byte, 64)})
	if err != nil {
		return fmt.Errorf("arm the sweep of flows: %w", err)
	}
	if code != xdpPass {
		return fmt.Errorf("arm the sweep of flows: program returned %d", code)
	}
	return nil
}

const xdpPass = 2

func reasonNames(e *btf.Enum) []string {
	names := make([]string, len(e.Values))
	for _, v := range e.Values {
		if v.Value < uint64(len(names)) {
			names[v.Value] = strings.ToLower(strings.TrimPrefix(v.Name, "SHUNT_"))
		}
	}
	return names[:min(len(names), int(steerShuntReasonSHUNT_REASON_MAX))]
}

func (d *Datapath) mapMemory() error {
	config, err := mapArray[steerConfig](d.m.ShuntConfig)
	if err != nil {
		return err
	}
	d.config = &config[0]
	if d.table.Slots, err = mapArray[fleet.Slot](d.m.ShuntWeights); err != nil {
		return err
	}
	if d.table.Admin, err = mapArray[fleet.AdminWord](d.m.ShuntAdmin); err != nil {
		return err
	}
	if d.epochs, err = mapArray[epochWord](d.m.ShuntEpochs); err != nil {
		return err
	}
	ports, err := mapArray[portBits](d.m.ShuntPorts)
	if err != nil {
		return err
	}
	d.ports = &ports[0]
	for i := range d.table.Slots {
		// The limit stays: until the front end knows the load, flows are opened as the former daemon would.
		d.table.Slots[i].L7Tokens.Store(0)
	}
	return nil
}

// mapArray maps the memory of an array map.
func mapArray[T any](m *ebpf.Map) ([]T, error) {
	size := int(unsafe.Sizeof(*new(T)))
	if int(m.ValueSize()) != size {
		return nil, fmt.Errorf("map memory of %s: values have %d bytes, not %d", m, m.ValueSize(), size)
	}
	mem, err := unix.Mmap(m.FD(), 0, size*int(m.MaxEntries()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map memory of %s: %w", m, err)
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(mem))), m.MaxEntries()), nil
}

func (d *Datapath) writeConfig(s Settings) {
	c, l := d.config, s.Lease
	atomic.StoreUint64(&c.SessionIdleNs, uint64(max(l.Idle, 0)))
	atomic.StoreUint64(&c.HeartbeatMaxNs, uint64(heartbeatMax))
	atomic.StoreUint32(&c.Sample, l.Sample)
	atomic.StoreUint32(&c.FlowsPerSession, l.FlowsPerSession)
	atomic.StoreUint32(&c.FlowsSlack, l.FlowsSlack)
	atomic.StoreUint32(&c.DecayS, uint32(max(s.Charge.Idle, time.Second)/time.Second))
	atomic.StoreUint32(&c.AnswerBytes, s.Charge.AnswerBytes)
	atomic.StoreUint32(&c.OutputPermille, uint32(1000*min(max(s.Charge.OutputShare, 0), 1)))
	every, burst := s.ClientRate.nanoseconds()
	atomic.StoreUint64(&c.ClientBurstNs, burst)
	atomic.StoreUint64(&c.ClientEveryNs, every)
	every, burst = s.VIPRate.nanoseconds()
	atomic.StoreUint64(&c.VipBurstNs, burst)
	atomic.StoreUint64(&c.VipEveryNs, every)
	atomic.StoreUint32(&c.Abi, abi)
}

// nanoseconds are the time between two flows, and how far a burst may run ahead.
func (r Rate) nanoseconds() (every, burst uint64) {
	if r.PerSecond <= 0 {
		return 0, 0
	}
	every = uint64(max(1e9/r.PerSecond, 1))
	return every, every * uint64(max(r.Burst-1, 0))
}

// adopt reads what the former daemon left: backends by name, and VIPs.
func (d *Datapath) adopt() error {
	err := scan(d.m.ShuntBackends, func(id uint32, b *steerBackend) {
		if id == 0 || id >= fleet.MaxBackends {
			return
		}
		name := unix.ByteSliceToString(asBytes(b.Name[:]))
		rec := BackendRecord{ID: fleet.ID(id), Name: name, State: fleet.HealthDown, Generation: b.Generation}
		if b.Port != 0 {
			rec.Steer = netip.AddrPortFrom(fromBytes(b.Addr), b.Port)
		}
		value := *b
		d.targets[rec.ID] = &target{rec: rec, written: &value, left: true}
		// Twice there when it left and came back while its flows ran: the one that takes connections counts.
		if _, twice := d.known[name]; name != "" && (!twice || b.State == uint32(fleet.HealthUp)) {
			d.known[name] = fleet.Known{ID: rec.ID, Generation: b.Generation, Steer: rec.Steer}
		}
	})
	if err != nil {
		return err
	}
	return scan(d.m.ShuntVips, func(k steerVipKey, v *steerVip) { d.vips[k] = *v })
}

// Table returns the memory that both planes share.
func (d *Datapath) Table() fleet.Table { return d.table }

// Known returns the backends that the pinned maps held when Open took them over, by name.
func (d *Datapath) Known() map[string]fleet.Known { return d.known }

// Close lets go of the instance and leaves everything pinned and attached: what is steered goes on. Run must have
// ended. The Table stays usable.
func (d *Datapath) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	// Without an L7 nothing is to be passed to it, and nothing is in flight through it.
	atomic.StoreUint64(&d.config.HeartbeatNs, 0)
	for i := range d.table.Slots {
		d.table.Slots[i].L7Tokens.Store(0)
	}
	d.release()
	return nil
}

func toBytes(a netip.Addr) [16]byte { return a.WithZone("").As16() }

func fromBytes(b [16]byte) netip.Addr { return netip.AddrFrom16(b).Unmap() }

func asBytes(s []int8) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(s))), len(s))
}
