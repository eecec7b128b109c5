// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/pkg/netdev"
)

// attachMode says how the program is attached; the words are those of Status.
type attachMode string

const (
	modeNone    attachMode = "none"
	modeNative  attachMode = "native"
	modeGeneric attachMode = "generic"
	modeTCX     attachMode = "tcx"
)

// attachment is the program on one interface.
type attachment struct {
	link    link.Link
	index   int
	mode    attachMode
	adopted bool // taken over from a former daemon
	problem string
}

// attached says whether the program is still on the interface.
func (a *attachment) attached(nic netdev.Link) bool {
	if a.mode != modeTCX {
		return nic.XDP != netdev.XDPNone
	}
	info, err := a.link.Info()
	return err != nil || info.TCX() == nil || info.TCX().Ifindex != 0
}

func (a *attachment) close() {
	if a.link != nil {
		a.link.Close()
		a.link = nil
	}
}

// Attach writes the VIPs and puts the program on the interfaces. A link that a former daemon left is updated in place,
// and no packet passes between the two programs. Interfaces that are no longer configured are detached last. When one
// interface fails, those that this call attached anew are detached again.
func (d *Datapath) Attach() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.beat()
	if err := d.syncVIPs(); err != nil {
		return err
	}
	if err := d.checkStacked(); err != nil {
		return err
	}
	for _, name := range d.opt.Interfaces {
		a, err := d.attach(name)
		if err != nil {
			for _, a := range d.links {
				if !a.adopted {
					_ = a.link.Unpin()
				}
				a.close()
			}
			clear(d.links)
			return err
		}
		d.links[name] = a
	}
	if err := d.refresh(); err != nil { // backends are reached through these interfaces only
		return err
	}
	return d.detachOthers()
}

// attach takes over the interface's pinned link, or makes one.
func (d *Datapath) attach(name string) (*attachment, error) {
	nic, err := d.net.Link(name)
	if err != nil {
		return nil, fmt.Errorf("attach to %s: %w", name, err)
	}
	path := linkPath(d.dir, name)
	l, err := link.LoadPinnedLink(path, nil)
	switch {
	case err == nil:
		a, err := d.takeOver(l, nic)
		if err != nil {
			return nil, fmt.Errorf("attach to %s: %w", name, err)
		}
		if a != nil {
			return a, nil
		}
	case !errors.Is(err, os.ErrNotExist):
		return nil, fmt.Errorf("attach to %s: load pinned link %s: %w", name, path, err)
	}
	return d.attachAnew(nic, path)
}

// takeOver updates a pinned link to this program. It returns nil when the link is no use any more and was removed.
func (d *Datapath) takeOver(l link.Link, nic netdev.Link) (*attachment, error) {
	drop := func(why string, gap bool) (*attachment, error) {
		if gap {
			d.notices = append(d.notices, fmt.Sprintf("%s: %s: the program was attached anew, and packets passed by for a moment", nic.Name, why))
		}
		err := l.Unpin()
		l.Close()
		if err != nil {
			return nil, fmt.Errorf("remove pinned link: %w", err)
		}
		return nil, nil
	}
	info, err := l.Info()
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("read pinned link: %w", err)
	}
	index, prog := uint32(0), d.prog
	switch {
	case info.XDP() != nil:
		index = info.XDP().Ifindex
	case info.TCX() != nil:
		index, prog = info.TCX().Ifindex, d.tcx
	default:
		l.Close()
		return nil, fmt.Errorf("pinned link is of kind %v, not XDP or tcx", info.Type)
	}
	switch {
	case index == 0:
		return drop("the interface was gone for a while", false)
	case int(index) != nic.Index:
		return drop(fmt.Sprintf("the pinned link was attached to interface index %d", index), false)
	}
	mode, err := d.liveMode(info, nic.Index)
	if err != nil {
		l.Close()
		return nil, err
	}
	if want := d.wantedModes(nic); !slices.Contains(want, mode) {
		return drop(fmt.Sprintf("attach mode changed from %s to %s", mode, want[0]), true)
	}
	switch err := l.Update(prog); {
	case err == nil:
		return &attachment{link: l, index: nic.Index, mode: mode, adopted: true}, nil
	case errors.Is(err, unix.ENOLINK):
		return drop("the interface was gone for a while", false)
	case errors.Is(err, unix.EINVAL):
		return drop("the pinned link was made by another version of the loader", true)
	default:
		l.Close()
		return nil, fmt.Errorf("update pinned link: %w", err)
	}
}

// liveMode is how a link is attached.
func (d *Datapath) liveMode(info *link.Info, index int) (attachMode, error) {
	if info.TCX() != nil {
		return modeTCX, nil
	}
	now, err := d.net.LinkByIndex(index)
	if err != nil {
		return modeNone, err
	}
	return attachMode(now.XDP.String()), nil
}

// wantedModes are the modes to try, best first. Native XDP is made for hardware. On virtual devices it takes away
// their offloads and needs settings at the other end; tcx needs none, and is faster there.
func (d *Datapath) wantedModes(nic netdev.Link) []attachMode {
	switch d.opt.Attach {
	case AttachNative:
		return []attachMode{modeNative}
	case AttachGeneric:
		return []attachMode{modeGeneric}
	case AttachTCX:
		return []attachMode{modeTCX}
	}
	if nic.Kind == "device" {
		return []attachMode{modeNative, modeTCX}
	}
	return []attachMode{modeTCX, modeNative}
}

// checkStacked refuses an interface and the bridge or bond above it: a packet that the one passes to the L7 would be
// asked again by the other. (Above a VLAN's NIC it is not: there the packet is tagged, and passes for that.)
func (d *Datapath) checkStacked() error {
	index := map[int]string{}
	for _, name := range d.opt.Interfaces {
		if l, err := d.net.Link(name); err == nil {
			index[l.Index] = name
		}
	}
	for _, name := range d.opt.Interfaces {
		l, err := d.net.Link(name)
		if err != nil {
			continue
		}
		if above, ok := index[l.Master]; ok && l.Master != 0 {
			return fmt.Errorf("attach to %s: %w: it is a port of %s, which is listed too: a packet must meet the program once, list one of the two",
				name, ErrStacked, above)
		}
	}
	return nil
}

// attachAnew tries the wanted modes in turn. That the best one could not be had is no secret: it becomes a notice.
func (d *Datapath) attachAnew(nic netdev.Link, path string) (*attachment, error) {
	var why []error
	for _, mode := range d.wantedModes(nic) {
		l, err := d.attachIn(nic, mode)
		if err != nil {
			why = append(why, err)
			if errors.Is(err, ErrUnavailable) {
				continue
			}
			break
		}
		if err := l.Pin(path); err != nil {
			l.Close()
			return nil, fmt.Errorf("attach to %s: pin link: %w", nic.Name, err)
		}
		for _, err := range why {
			d.notices = append(d.notices, fmt.Sprintf("%s: attached by %s: %v", nic.Name, mode, err))
		}
		return &attachment{link: l, index: nic.Index, mode: mode}, nil
	}
	return nil, errors.Join(why...)
}

func (d *Datapath) attachIn(nic netdev.Link, mode attachMode) (l link.Link, err error) {
	now, err := d.net.LinkByIndex(nic.Index)
	if err != nil {
		return nil, fmt.Errorf("attach to %s: %w", nic.Name, err)
	}
	if mode != modeTCX && now.XDP != netdev.XDPNone {
		return nil, foreign(now)
	}
	err = d.net.Do(func() (err error) {
		switch mode {
		case modeTCX:
			l, err = link.AttachTCX(link.TCXOptions{Interface: nic.Index, Program: d.tcx, Attach: ebpf.AttachTCXIngress, Anchor: link.Head()})
		case modeGeneric:
			l, err = link.AttachXDP(link.XDPOptions{Program: d.prog, Interface: nic.Index, Flags: link.XDPGenericMode})
		default:
			l, err = link.AttachXDP(link.XDPOptions{Program: d.prog, Interface: nic.Index, Flags: link.XDPDriverMode})
		}
		return err
	})
	if err != nil {
		return nil, attachError(now, mode, err)
	}
	return l, nil
}

func foreign(nic netdev.Link) error {
	name, hint := "of unknown name", "detach it, use `attach: tcx` beside it, or leave the interface out of steering.interfaces"
	if p, err := ebpf.NewProgramFromID(ebpf.ProgramID(nic.XDPID)); err == nil {
		if info, err := p.Info(); err == nil {
			name = fmt.Sprintf("%q", info.Name)
			if info.Name == steerProgShuntXdp {
				hint = "it belongs to another instance of shunt, or to one whose pins are lost"
			}
		}
		p.Close()
	}
	return fmt.Errorf("attach to %s: %w: program %s with id %d (%s mode); %s", nic.Name, ErrForeignProgram, name, nic.XDPID, nic.XDP, hint)
}

func attachError(nic netdev.Link, mode attachMode, err error) error {
	switch {
	case mode == modeTCX && (errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EINVAL)):
		return fmt.Errorf("attach to %s: %w: the kernel has no tcx (needs Linux 6.6): %w", nic.Name, ErrUnavailable, err)
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EEXIST):
		return fmt.Errorf("attach to %s: %w: %w", nic.Name, ErrForeignProgram, err)
	case errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, ebpf.ErrNotSupported):
		return fmt.Errorf("attach to %s: %w: driver %q has no %s XDP; `attach: tcx` (Linux 6.6) and `attach: xdp-generic` work on every interface: %w",
			nic.Name, ErrUnavailable, nic.Driver, mode, err)
	case errors.Is(err, unix.ERANGE), errors.Is(err, unix.EINVAL), errors.Is(err, unix.E2BIG):
		return fmt.Errorf("attach to %s: %w: driver %q refuses %s XDP, often for an MTU (%d) or a set of queues that it cannot do with XDP: %w",
			nic.Name, ErrUnavailable, nic.Driver, mode, nic.MTU, err)
	}
	return fmt.Errorf("attach to %s in %s mode: %w", nic.Name, mode, err)
}

// detachOthers removes the links of interfaces that are no longer configured.
func (d *Datapath) detachOthers() error {
	list, err := os.ReadDir(d.dir)
	if err != nil {
		return fmt.Errorf("read %s: %w", d.dir, err)
	}
	for _, e := range list {
		name, ok := linkIface(e.Name())
		if !ok || slices.Contains(d.opt.Interfaces, name) {
			continue
		}
		if err := detach(linkPath(d.dir, name)); err != nil {
			return fmt.Errorf("detach from %s: %w", name, err)
		}
		d.notices = append(d.notices, name+": detached, it is no longer configured")
	}
	return nil
}

// detach ends a pinned link, whoever else holds it, and removes its pin.
func detach(path string) error {
	l, err := link.LoadPinnedLink(path, nil)
	if err != nil {
		return fmt.Errorf("load pinned link %s: %w", path, err)
	}
	defer l.Close()
	// A severed link answers ENOLINK, an old kernel EOPNOTSUPP: the last close detaches then.
	if err := l.Detach(); err != nil && !errors.Is(err, unix.ENOLINK) && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, link.ErrNotSupported) {
		return fmt.Errorf("detach link %s: %w", path, err)
	}
	if err := l.Unpin(); err != nil {
		return fmt.Errorf("unpin link %s: %w", path, err)
	}
	return nil
}

// tendLinks attaches to interfaces that went away and are back.
func (d *Datapath) tendLinks() {
	if len(d.links) == 0 {
		return // not attached yet
	}
	for name, a := range d.links {
		nic, err := d.net.Link(name)
		if err != nil {
			a.problem = err.Error()
			if errors.Is(err, netdev.ErrNoLink) {
				a.close()
				a.index, a.mode = 0, modeNone
			}
			continue
		}
		if a.link != nil && nic.Index == a.index {
			a.problem = ""
			if !a.attached(nic) {
				a.problem = "the program was detached by somebody else"
			}
			continue
		}
		a.close()
		again, err := d.attach(name)
		if err != nil {
			a.index, a.mode, a.problem = 0, modeNone, err.Error()
			continue
		}
		d.links[name] = again
		d.notices = append(d.notices, name+": attached again, the interface had gone away")
	}
}
