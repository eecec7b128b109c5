// SPDX-License-Identifier: Apache-2.0

//go:build linux

package datapath

import (
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/datapath/dptest"
)

// charging makes open connections charge by what they do: a fifth is left to decode, 300 bytes a token.
func (r *rig) charging() {
	r.Helper()
	r.cfg.OutputPermille, r.cfg.AnswerBytes, r.cfg.DecayS = 200, 300, 3
	r.setConfig()
}

// TestPacketCharge follows two requests on one connection.
func TestPacketCharge(t *testing.T) {
	eachPath(t, func(t *testing.T, fam family) {
		r := newRig(t, fam, rigOptions{flows: 64, vars: map[string]any{"sweep_ns": uint64(5 * time.Millisecond)}})
		r.charging()
		c := r.open(fam.client).establish()
		r.arm()
		for range 2 {
			c.fromClient(dptest.ACK|dptest.PSH, "first part of a question")
			c.fromClient(dptest.ACK|dptest.PSH, "and the rest")
			r.wantKernel(worldTokens, 0, 1)
			c.backend(dptest.ACK, "") // only acknowledges
			r.afterSweeps()
			r.wantKernel(worldTokens, 0, 1)
			c.backend(dptest.ACK|dptest.PSH, "answer")
			if w := r.weight(); w.KernelTokens > worldTokens/5 {
				t.Fatalf("%d tokens when the answer has begun", w.KernelTokens)
			}
			before := r.weight().KernelTokens
			c.backend(dptest.ACK|dptest.PSH, strings.Repeat("a", 1200)) // four tokens
			c.fromClient(dptest.ACK, "")
			r.eventually("the answer's bytes are taken off", func() bool { return r.weight().KernelTokens <= before-4 })
			if w := r.weight(); w.KernelTokens <= 0 {
				t.Fatalf("%d tokens while the answer goes on", w.KernelTokens)
			}
			r.age(c, 4*time.Second, true, true)
			r.eventually("an idle connection charges nothing", func() bool { return r.weight().KernelTokens == 0 })
		}
		c.fromClient(dptest.ACK|dptest.PSH, "one more")
		r.wantKernel(worldTokens, 0, 1)
		// An engine that thinks is no idle connection.
		r.age(c, time.Minute, true, true)
		r.afterSweeps()
		r.wantKernel(worldTokens, 0, 1)
		c.backend(fin, "")
		c.fromClient(fin, "")
		r.wantKernel(0, 0, 0)
	})
}

// TestPacketChargeUnused: a connection that was opened ahead of its first request.
func TestPacketChargeUnused(t *testing.T) {
	r := newRig(t, families[0], rigOptions{flows: 64, vars: map[string]any{"sweep_ns": uint64(5 * time.Millisecond)}})
	r.charging()
	c := r.open(r.fam.client).establish()
	r.age(c, 4*time.Second, true, true)
	r.arm()
	r.eventually("it charges nothing", func() bool { return r.weight().KernelTokens == 0 })
	r.wantKernel(0, 0, 1)
	c.fromClient(dptest.ACK, "question")
	r.wantKernel(worldTokens, 0, 1)
	c.backend(dptest.ACK, "")
	c.fromClient(rst, "")
	r.wantKernel(0, 0, 0)
}

// TestPacketChargeDSR: what the client acknowledges stands for the answer.
func TestPacketChargeDSR(t *testing.T) {
	eachPath(t, func(t *testing.T, fam family) {
		r := newRig(t, fam, rigOptions{flows: 64, vars: map[string]any{"sweep_ns": uint64(5 * time.Millisecond)}})
		r.dsr()
		r.charging()
		p := r.syn(fam.client)
		r.direct(p)
		p.Options, p.Flags, p.Seq, p.Ack = nil, dptest.ACK, 1001, 5001
		r.direct(p)
		r.arm()
		for range 2 {
			p.Payload = []byte("question")
			r.direct(p)
			r.wantKernel(worldTokens, 0, 1)
			p.Seq, p.Payload = p.End(), nil
			r.direct(p)
			r.wantKernel(worldTokens, 0, 1)
			p.Ack++
			r.direct(p)
			if w := r.weight(); w.KernelTokens > worldTokens/5 || w.KernelTokens <= 0 {
				t.Fatalf("%d tokens when the answer has begun", w.KernelTokens)
			}
			before := r.weight().KernelTokens
			p.Ack += 900
			r.direct(p)
			r.eventually("the answer's bytes are taken off", func() bool { return r.weight().KernelTokens <= before-3 })
			f, _ := r.flow(fam.client, fam.vip)
			f.Last -= uint32(4 * time.Second >> tickShift)
			r.putFlow(flowKey(fam.client, fam.vip), f)
			r.eventually("an idle connection charges nothing", func() bool { return r.weight().KernelTokens == 0 })
		}
		p.Flags = fin
		r.direct(p)
		r.wantKernel(0, 0, 0)
	})
}
