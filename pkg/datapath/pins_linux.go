// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/session"
)

// pinTable is shunt_sessions as the L7 sees it.
type pinTable struct {
	d *Datapath

	mu     sync.Mutex // a pin's check and its change are one step, also towards tidy
	serial uint32

	vips atomic.Pointer[vipIndex]
}

type vipIndex struct {
	id  map[netip.AddrPort]uint32
	key map[uint32]netip.AddrPort
}

func newPinTable(d *Datapath) *pinTable {
	// Random, so that no pin continues the use record of one that a former daemon wrote.
	t := &pinTable{d: d, serial: rand.Uint32()}
	t.setVIPs(d.vips)
	return t
}

// PinTable returns the pins that the kernel obeys.
func (d *Datapath) PinTable() session.PinTable { return d.pins }

func (t *pinTable) setVIPs(vips map[steerVipKey]steerVip) {
	x := &vipIndex{id: map[netip.AddrPort]uint32{}, key: map[uint32]netip.AddrPort{}}
	for k, v := range vips {
		addr := netip.AddrPortFrom(fromBytes(k.Addr), k.Port)
		x.id[addr], x.key[v.Id] = v.Id, addr
	}
	t.vips.Store(x)
}

// vipOf is the VIP of a pin's or an event's id, the zero value when it is gone.
func (t *pinTable) vipOf(id uint32) netip.AddrPort { return t.vips.Load().key[id] }

func (t *pinTable) key(k session.PinKey) (steerSessionKey, error) {
	k = k.Normal()
	id, ok := t.vips.Load().id[k.VIP]
	if !ok {
		return steerSessionKey{}, fmt.Errorf("%w: %s", ErrUnknownVIP, k.VIP)
	}
	return steerSessionKey{Client: toBytes(k.Client), VipId: id, Port: k.VIP.Port()}, nil
}

// Put implements session.PinTable. A pin that the operator wrote stays, and the error is ErrStaticPin.
func (t *pinTable) Put(k session.PinKey, p session.Pin) error {
	key, err := t.key(k)
	if err != nil {
		return fmt.Errorf("write pin: %w", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !p.Static {
		if old, err := t.read(key); err == nil && isStatic(&old) {
			return fmt.Errorf("write pin: %w", ErrStaticPin)
		}
	}
	t.serial++
	now := t.d.clock.now()
	s := steerSession{
		Backend: uint32(p.Backend), Generation: p.Generation, SinceNs: now,
		Tokens: p.Tokens, Connections: p.Connections, Sessions: p.Sessions, Serial: t.serial,
	}
	if p.Expires > 0 {
		s.ExpiresNs = now + uint64(p.Expires)
	}
	if p.Static {
		s.Flags = uint32(steerShuntPinFlagsSHUNT_PIN_STATIC)
	}
	switch err := t.d.m.ShuntSessions.Put(key, &s); {
	case errors.Is(err, unix.E2BIG):
		return fmt.Errorf("write pin: %w", session.ErrPinTableFull)
	case err != nil:
		return fmt.Errorf("write pin: %w", err)
	}
	return nil
}

// Touch implements session.PinTable.
func (t *pinTable) Touch(k session.PinKey, p session.Pin) error {
	key, err := t.key(k)
	if err != nil {
		return fmt.Errorf("touch pin: %w", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	s, err := t.read(key)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("touch pin: %w", session.ErrNoPin)
	}
	if err != nil {
		return fmt.Errorf("touch pin: %w", err)
	}
	if isStatic(&s) {
		return fmt.Errorf("touch pin: %w", ErrStaticPin)
	}
	if _, live := t.live(key, &s); !live || s.Backend != uint32(p.Backend) || s.Generation != p.Generation {
		return fmt.Errorf("touch pin: %w", session.ErrNoPin)
	}
	if s.Sessions == p.Sessions && s.Tokens == p.Tokens {
		return nil
	}
	s.Sessions, s.Tokens = p.Sessions, p.Tokens
	// The kernel may have removed it meanwhile: it must not come back.
	switch err := t.d.m.ShuntSessions.Update(key, &s, ebpf.UpdateExist); {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return fmt.Errorf("touch pin: %w", session.ErrNoPin)
	case err != nil:
		return fmt.Errorf("touch pin: %w", err)
	}
	return nil
}

// Delete implements session.PinTable. It removes the operator's pins too: session.Pins never asks for that.
func (t *pinTable) Delete(k session.PinKey) error {
	key, err := t.key(k)
	if err != nil {
		return nil // its VIP is gone, and with it the pin
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.remove(key)
}

// Get implements session.PinTable.
func (t *pinTable) Get(k session.PinKey) (session.Pin, bool) {
	key, err := t.key(k)
	if err != nil {
		return session.Pin{}, false
	}
	s, err := t.read(key)
	if err != nil {
		return session.Pin{}, false
	}
	p := session.Pin{
		Backend: fleet.ID(s.Backend), Generation: s.Generation, Tokens: s.Tokens, Connections: s.Connections,
		Sessions: s.Sessions, Static: isStatic(&s),
	}
	if s.ExpiresNs != 0 {
		p.Expires = time.Duration(s.ExpiresNs - t.d.clock.now())
	}
	use, live := t.live(key, &s)
	if use.Serial == s.Serial {
		p.Used = use.Connections
	}
	return p, live
}

func (t *pinTable) read(key steerSessionKey) (s steerSession, err error) {
	err = t.d.m.ShuntSessions.Lookup(key, &s)
	return s, err
}

func (t *pinTable) use(key steerSessionKey) (u steerSessionUse, ok bool) {
	return u, t.d.m.ShuntSessUse.Lookup(key, &u) == nil
}

func (t *pinTable) remove(key steerSessionKey) error {
	if err := t.d.m.ShuntSessions.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove pin: %w", err)
	}
	return nil
}

func isStatic(s *steerSession) bool { return s.Flags&uint32(steerShuntPinFlagsSHUNT_PIN_STATIC) != 0 }

// live says whether the lease holds, by the kernel's rules, and what the pin was used for.
func (t *pinTable) live(key steerSessionKey, s *steerSession) (use steerSessionUse, ok bool) {
	use, _ = t.use(key)
	return use, leaseHolds(s, &use, t.d.clock.now(), atomic.LoadUint64(&t.d.config.SessionIdleNs))
}

func leaseHolds(s *steerSession, u *steerSessionUse, now, idle uint64) bool {
	if s.ExpiresNs != 0 && now >= s.ExpiresNs {
		return false
	}
	if s.Connections != 0 && u.Serial == s.Serial && u.Connections >= s.Connections {
		return false
	}
	last := max(s.SinceNs, u.LastNs)
	return idle == 0 || isStatic(s) || now < last || now-last <= idle
}

// forgetVIP removes all pins and use records of a VIP.
func (t *pinTable) forgetVIP(id uint32) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.removeAll(func(k steerSessionKey) bool { return k.VipId == id })
}

func (t *pinTable) removeAll(match func(steerSessionKey) bool) error {
	var keys []steerSessionKey
	if err := scan(t.d.m.ShuntSessions, func(k steerSessionKey, _ *steerSession) {
		if match(k) {
			keys = append(keys, k)
		}
	}); err != nil {
		return err
	}
	var errs []error
	for _, k := range keys {
		errs = append(errs, t.remove(k))
	}
	return errors.Join(errs...)
}

// tidy removes pins that can never be obeyed again and use records that nothing needs. A pin that is used up or idle
// goes as well: the L7 writes a new one with the session's next answer.
func (t *pinTable) tidy(generation func(fleet.ID) (uint32, bool)) error {
	now, idle := t.d.clock.now(), atomic.LoadUint64(&t.d.config.SessionIdleNs)
	void := func(k steerSessionKey, s *steerSession) bool {
		if isStatic(s) {
			return false
		}
		if g, known := generation(fleet.ID(s.Backend)); !known || s.Generation != 0 && s.Generation != g {
			return true
		}
		u, _ := t.use(k)
		return !leaseHolds(s, &u, now, idle)
	}
	var stale []steerSessionKey
	pins := int64(0)
	if err := scan(t.d.m.ShuntSessions, func(k steerSessionKey, s *steerSession) {
		pins++
		if void(k, s) {
			stale = append(stale, k)
		}
	}); err != nil {
		return err
	}
	var errs []error
	for _, k := range stale {
		t.mu.Lock()
		if s, err := t.read(k); err == nil && void(k, &s) { // it may have been written anew
			errs = append(errs, t.remove(k))
			pins--
		}
		t.mu.Unlock()
	}
	t.d.npins.Store(pins)

	// A use record without pin and open flow is dead once no SYN that still saw the pin can be on its way.
	keep := max(idle, uint64(10*time.Second))
	var dead []steerSessionKey
	unused := func(u *steerSessionUse) bool { return u.Open <= 0 && now-min(now, u.LastNs) > keep }
	if err := scan(t.d.m.ShuntSessUse, func(k steerSessionKey, u *steerSessionUse) {
		if unused(u) {
			dead = append(dead, k)
		}
	}); err != nil {
		return errors.Join(append(errs, err)...)
	}
	for _, k := range dead {
		t.mu.Lock()
		_, err := t.read(k)
		if u, ok := t.use(k); ok && errors.Is(err, ebpf.ErrKeyNotExist) && unused(&u) {
			if err := t.d.m.ShuntSessUse.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				errs = append(errs, fmt.Errorf("remove use of a pin: %w", err))
			}
		}
		t.mu.Unlock()
	}
	return errors.Join(errs...)
}
