// SPDX-License-Identifier: Apache-2.0

//go:build linux

package lab

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

func needLab(t *testing.T) *Lab {
	t.Helper()
	if err := Probe(); err != nil {
		if os.Getenv("SHUNT_REQUIRE_ALL") == "1" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	l := New()
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

func TestSteering(t *testing.T) {
	l := needLab(t)
	before, _ := os.ReadDir(runDir)
	tb, err := l.Steering(SteeringOptions{Name: "shunt-labtest", Clients: 2, Engines: 2,
		Extra: []netip.Prefix{netip.MustParsePrefix("10.77.0.2/16")}})
	if err != nil {
		t.Fatal(err)
	}
	if tb.Balancer.Path != "/run/netns/shunt-labtest-lb" {
		t.Errorf("path %q", tb.Balancer.Path)
	}
	pairs := []struct {
		name     string
		from, to *Host
		addr     netip.Addr
	}{
		{"client to balancer, v4", tb.Clients[0], tb.Balancer, tb.Balancer.V4},
		{"client to balancer, v6", tb.Clients[1], tb.Balancer, tb.Balancer.V6},
		{"client to the extra address", tb.Clients[1], tb.Balancer, netip.MustParseAddr("10.77.0.2")},
		{"balancer to engine, v4", tb.Balancer, tb.Engines[1], tb.Engines[1].V4},
		{"balancer to engine, v6", tb.Balancer, tb.Engines[0], tb.Engines[0].V6},
	}
	for _, p := range pairs {
		t.Run(p.name, func(t *testing.T) { echo(t, p.from, p.to, p.addr) })
	}
	if err := tb.Replug(tb.Engines[0]); err != nil {
		t.Fatal(err)
	}
	echo(t, tb.Clients[0], tb.Engines[0], tb.Engines[0].V4)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	after, _ := os.ReadDir(runDir)
	if len(after) != len(before) {
		t.Errorf("names left behind: %v, before: %v", after, before)
	}
}

func echo(t *testing.T, from, to *Host, addr netip.Addr) {
	t.Helper()
	ln, err := to.Listen("tcp", netip.AddrPortFrom(addr, 7000).String())
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		io.Copy(c, c)
	}()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	c, err := from.Dial(ctx, "tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(5 * time.Second))
	want := bytes.Repeat([]byte("shunt"), 1000)
	go c.Write(want)
	got := make([]byte, len(want))
	if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, want) {
		t.Errorf("echo: %v", err)
	}
}

// A child process must see the namespace's interfaces and no others, and Close must end it.
func TestProcess(t *testing.T) {
	l := needLab(t)
	tb, err := l.Steering(SteeringOptions{Clients: 1})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	cmd := exec.Command("/bin/cat", "/proc/net/dev")
	cmd.Stdout = &out
	p, err := tb.Clients[0].Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(); err != nil {
		t.Fatal(err)
	}
	if lines := strings.Count(out.String(), ":"); lines < 2 || !strings.Contains(out.String(), "eth0:") {
		t.Errorf("interfaces seen by the child:\n%s", &out)
	}
	stopped, err := tb.Clients[0].Start(exec.Command("/bin/sleep", "100"))
	if err != nil {
		t.Fatal(err)
	}
	if err := stopped.Stop(5 * time.Second); err != nil {
		t.Error(err)
	}
	left, err := tb.Clients[0].Start(exec.Command("/bin/sleep", "100"))
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-left.Done():
	default:
		t.Error("process still runs after Close")
	}
	if _, err := tb.Clients[0].Start(exec.Command("/bin/true")); err == nil {
		t.Error("started a process in a closed lab")
	}
}

func TestNameTaken(t *testing.T) {
	l := needLab(t)
	if _, err := l.Namespace("shunt-labtest-x"); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Namespace("shunt-labtest-x"); !errors.Is(err, os.ErrExist) {
		t.Errorf("second namespace of one name: %v", err)
	}
	if err := Sweep("shunt-labtest-x"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("/run/netns/shunt-labtest-x"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left after Sweep: %v", err)
	}
	if _, err := l.Namespace("../x"); err == nil {
		t.Error("a path was taken for a name")
	}
}
