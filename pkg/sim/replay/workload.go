// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// workloads are generated traffic, for when no trace is at hand. They have the shapes that published traces have, not their
// figures.
var workloads = map[string]func(*generator){
	"shared": (*generator).shared,
	"chat":   (*generator).chat,
	"agents": (*generator).agents,
	"bursts": (*generator).bursts,
	"long":   (*generator).long,
}

// Workloads names what Generate makes.
func Workloads() []string { return []string{"shared", "chat", "agents", "bursts", "long"} }

const genBlock = 128

type generator struct {
	*rand.Rand
	t    *Trace
	next uint64
}

// Generate makes a workload: shared (150 system prompts of 6,000 tokens), chat (conversations on one short system prompt),
// agents (few sessions with long, growing prompts, closed loop), bursts (no prefixes, arrivals in bursts), long (answers of
// thousands of tokens).
func Generate(name string, seed uint64) *Trace {
	g := &generator{Rand: rand.New(rand.NewPCG(seed, 3)), t: &Trace{Name: name, BlockTokens: genBlock}, next: 1}
	if make := workloads[name]; make != nil {
		make(g)
	}
	slices.SortStableFunc(g.t.Requests, func(a, b Request) int { return int(a.Arrival - b.Arrival) })
	g.t.rebase()
	return g.t
}

func (g *generator) seconds(mean float64) time.Duration {
	return time.Duration(g.ExpFloat64() * mean * float64(time.Second))
}

func (g *generator) lognormal(mean, sigma float64) int {
	return max(int(mean*math.Exp(sigma*g.NormFloat64()-sigma*sigma/2)), 1)
}

// blocks returns n fresh ids.
func (g *generator) blocks(n int) []uint64 {
	out := make([]uint64, n)
	for i := range out {
		out[i] = g.next
		g.next++
	}
	return out
}

// extend returns the blocks of a prompt that begins as old does and has that many tokens.
func (g *generator) extend(old []uint64, tokens int) []uint64 {
	n := tokens / genBlock
	if n <= len(old) {
		return slices.Clone(old[:n])
	}
	return append(slices.Clone(old), g.blocks(n-len(old))...)
}

func (g *generator) shared() {
	var groups [][]uint64
	for range 150 {
		groups = append(groups, g.blocks(6000/genBlock))
	}
	var at time.Duration
	for range 3000 {
		at += g.seconds(0.2)
		i := int(float64(len(groups)) * math.Pow(g.Float64(), 2)) // some are asked more
		prompt := 6000 + g.lognormal(1200, 0.5)
		g.t.Requests = append(g.t.Requests, Request{Arrival: at, Session: uint64(i) + 1, Prompt: prompt, Output: g.lognormal(300, 0.7),
			Blocks: g.extend(groups[i], prompt)})
	}
}

func (g *generator) chat() {
	system := g.blocks(4)
	var at time.Duration
	for s := range 800 {
		at += g.seconds(1.2)
		when, prompt, blocks := at, 512+g.lognormal(3000, 1), system
		for range 1 + g.IntN(8) {
			out := g.lognormal(350, 0.6)
			blocks = g.extend(blocks, prompt)
			g.t.Requests = append(g.t.Requests, Request{Arrival: when, Session: uint64(s) + 1, Prompt: prompt, Output: out, Blocks: blocks})
			prompt += out + g.lognormal(250, 1)
			when += time.Duration(out)*15*time.Millisecond + g.seconds(60)
		}
	}
}

func (g *generator) agents() {
	g.t.Closed = true
	system := g.blocks(12_000 / genBlock)
	var at time.Duration
	for s := range 80 {
		at += g.seconds(12)
		prompt, blocks, when := 12_000+g.lognormal(4000, 0.8), system, at
		for turn := range 10 + g.IntN(40) {
			out := g.lognormal(350, 1)
			blocks = g.extend(blocks, prompt)
			think := g.seconds(8)
			if turn == 0 {
				think = 0
			}
			when += think + time.Duration(out)*20*time.Millisecond
			g.t.Requests = append(g.t.Requests, Request{Arrival: when, Session: uint64(s) + 1, Think: think, Prompt: prompt, Output: out, Blocks: blocks})
			if prompt += out + g.lognormal(1500, 1); prompt > 120_000 {
				break
			}
		}
	}
}

func (g *generator) bursts() {
	g.t.BlockTokens = 0
	var at time.Duration
	for range 500 {
		at += g.seconds(3)
		when := at
		for range 1 + int(math.Min(60, 4/(1-g.Float64())-4)) {
			when += g.seconds(0.05)
			g.t.Requests = append(g.t.Requests, Request{Arrival: when, Prompt: g.lognormal(2000, 0.9), Output: g.lognormal(60, 1.2)})
		}
	}
}

func (g *generator) long() {
	g.t.BlockTokens = 0
	var at time.Duration
	for range 3000 {
		at += g.seconds(0.3)
		g.t.Requests = append(g.t.Requests, Request{Arrival: at, Prompt: g.lognormal(900, 1.2), Output: min(g.lognormal(2500, 1), 16_000)})
	}
}
