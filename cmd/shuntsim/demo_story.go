// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/pkg/admin"
	"github.com/shunt-lb/shunt/pkg/datapath"
	"github.com/shunt-lb/shunt/pkg/sim"
)

const answerTokens = 48

// story runs the demo and says what happens.
type story struct {
	out   io.Writer
	w     *world
	home  string // backend of turn 1
	pins  string // directory of the pinned maps
	turns []turn
}

// turn is what one turn of the conversation brought.
type turn struct {
	*reply
	flow    *admin.Flow // the kernel's record of its connection; nil: it was not steered
	samples []sample
	counted string // tokens, by shunt's own count
}

func (s *story) say(format string, args ...any) { fmt.Fprintf(s.out, format+"\n", args...) }

func (s *story) tell(ctx context.Context, missing error) error {
	steer := missing == nil
	s.say("shunt demo: one conversation of three turns, each on a TCP connection of its own, beside some other load.\n")
	if steer {
		s.say("Network namespaces: two clients, the balancer (%s) and three simulated GPU hosts on one bridge.", s.w.vip)
	} else {
		s.say("Everything is on the loopback interface; the balancer listens on %s.", s.w.vip)
	}
	if err := s.w.start(ctx); err != nil {
		return err
	}
	s.say("Each host serves Llama-3-8B as an A100 would (simulated: step times of a measured profile, KV cache with prefix caching).")
	if steer {
		st, err := s.w.admin.Status(ctx)
		if err != nil {
			return err
		}
		s.pins = st.Kernel.PinDir
		s.say("shunt is up: %d backends, kernel path live (XDP on %s).", st.BackendsUp, strings.Join(st.Kernel.Interfaces, ", "))
	} else {
		s.say("shunt is up. All connections pass through its user space here.")
	}

	load := startBackground(ctx, s.w.clients[1], s.w.vip.String())
	err := poll(ctx, 30*time.Second, "the background load runs", func() bool {
		list, err := s.w.admin.Backends(ctx)
		return err == nil && slices.ContainsFunc(list, func(b admin.BackendStatus) bool { return b.Requests > 0 })
	})
	if err == nil {
		err = s.conversation(ctx, steer)
	}
	answered, loadErr := load.end()
	if err != nil {
		return err
	}
	if loadErr != nil {
		return fmt.Errorf("background load: %w", loadErr)
	}
	return s.result(ctx, missing, answered)
}

// handbook is a system prompt of some 2,800 tokens, as an application would send with every turn.
func handbook() string {
	var b strings.Builder
	b.WriteString("You answer questions about this handbook.\n")
	for i := 1; i <= 140; i++ {
		fmt.Fprintf(&b, "Rule %d: whoever works in building %d may take %d days off after %d months with us.\n", i, i%9+1, 10+i%20, i%12+1)
	}
	return b.String()
}

func (s *story) conversation(ctx context.Context, steer bool) error {
	history := []chatMessage{{"system", handbook()}}
	for i, question := range []string{"How many days may I take off in building 3?", "And after the first year?", "Thanks. Put both into one sentence, please."} {
		history = append(history, chatMessage{"user", question})
		t, err := s.turn(ctx, i+1, history, steer)
		if err != nil {
			return err
		}
		s.turns = append(s.turns, t)
		history = append(history, chatMessage{"assistant", t.text})
		if i == 0 {
			s.home = t.backend
			s.first(ctx, t)
			if steer {
				if err := s.pin(); err != nil {
					return err
				}
			}
		} else {
			s.later(ctx, i+1, t, steer)
		}
		showWeights(s.out, t.samples, t.engine)
		select { // a person reads and types
		case <-time.After(300 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// turn sends the conversation so far over a new connection.
func (s *story) turn(ctx context.Context, n int, history []chatMessage, steer bool) (t turn, err error) {
	body, err := chatBody(history, answerTokens, 0)
	if err != nil {
		return t, err
	}
	s.say("\nTurn %d, connection %d", n, n)
	t.counted = s.count(ctx, body)
	sampler := startSampler(ctx, s.w.admin)
	defer func() {
		t.samples = sampler.end()
	}()
	t.reply, err = chat(ctx, s.w.clients[0], s.w.vip.String(), body)
	if err != nil {
		return t, err
	}
	defer t.close()
	if steer && !t.handoff { // its connection is still open: look for it in the kernel
		flows, err := s.w.admin.Flows(ctx, 0)
		if err != nil {
			return t, err
		}
		if i := slices.IndexFunc(flows, func(f admin.Flow) bool { return f.Client == t.local }); i >= 0 {
			t.flow = &flows[i]
		}
	}
	t.close()
	wait, cancel := context.WithTimeout(ctx, 100*time.Millisecond) // so that the samples show the weight fall
	defer cancel()
	<-wait.Done()
	return t, ctx.Err()
}

// count asks `shunt count` for the tokens of a request.
func (s *story) count(ctx context.Context, body []byte) string {
	file := s.w.path("request.json")
	if err := os.WriteFile(file, body, 0o600); err != nil {
		return ""
	}
	out, err := exec.CommandContext(ctx, s.w.shunt, "count", "--request", file).Output()
	text := strings.TrimSpace(string(out))
	if _, bad := strconv.Atoi(text); err != nil || bad != nil {
		return ""
	}
	return text
}

// first explains turn 1.
func (s *story) first(ctx context.Context, t turn) {
	if t.counted != "" {
		s.say("   tokens: shunt counts %s in the prompt, and expects at most %d in the answer (max_tokens)", t.counted, answerTokens)
	}
	s.say("   backend: %s%s", t.backend, ifSet(" (", s.logged(ctx, t.id), ": a new session goes where the fewest tokens are in flight)"))
	if len(t.samples) > 0 {
		var loads []string
		for _, b := range t.samples[0].backends {
			loads = append(loads, fmt.Sprintf("%s %d", b.Name, weightOf(b)))
		}
		s.say("   in flight some milliseconds before the pick: %s", strings.Join(loads, ", "))
	}
	s.served(t)
	if t.handoff {
		s.say("   the answer carries \"Connection: close\": the client reconnects for its next turn, and that connection can be steered")
	}
}

// later explains turns 2 and 3.
func (s *story) later(ctx context.Context, n int, t turn, steer bool) {
	switch {
	case t.flow != nil && t.backend == "":
		s.say("   connection %d steered in the kernel: its SYN met the pin, XDP sent it to %s, and no packet of it reached user space", n, t.flow.Backend)
		s.say("   (flow %s: %d packets, charged %d tokens; no x-request-id in the answer, shunt's front end never saw the request)", t.flow.Client, t.flow.Packets, t.flow.Charge)
	case steer:
		s.say("   connection %d was NOT steered: served through user space by %s%s", n, t.backend, ifSet(" (", s.logged(ctx, t.id), ")"))
	default:
		s.say("   backend: %s%s", t.backend, ifSet(" (", s.logged(ctx, t.id), ": the session's first turn was there)"))
	}
	s.served(t)
}

func (s *story) served(t turn) {
	s.say("   %s: %d of %d prompt tokens found in its prefix cache; first token after %d ms, all %d after %d ms",
		t.engine, t.cached, t.prompt, t.first.Milliseconds(), answerTokens, t.total.Milliseconds())
}

// pin prints the pin of turn 1 from the map.
func (s *story) pin() error {
	var dump bytes.Buffer
	addr := s.w.client.As16()
	last := fmt.Sprintf("%d,%d,%d,%d\n", addr[12], addr[13], addr[14], addr[15])
	err := datapath.Dump(&dump, s.w.bpffs, "", "shunt_sessions", func(e string) bool { return strings.Contains(e, last) })
	if err != nil {
		return err
	}
	s.say("   the pin, as `bpftool map dump pinned %s/shunt_sessions` prints it:", s.pins)
	for line := range strings.Lines(dump.String()) {
		fmt.Fprint(s.out, "      ", line)
	}
	return nil
}

// logged is the policy's reason for a request, from the access log.
func (s *story) logged(ctx context.Context, id string) (reason string) {
	if id == "" {
		return ""
	}
	_ = poll(ctx, time.Second, "the request is logged", func() bool { // without it the reason is left out
		b, err := os.ReadFile(s.w.path("access.log"))
		if err != nil {
			return false
		}
		for line := range bytes.Lines(b) {
			var rec struct {
				ID     string `json:"request_id"`
				Reason string `json:"reason"`
			}
			if json.Unmarshal(line, &rec) == nil && rec.ID == id {
				reason = rec.Reason
				return true
			}
		}
		return false
	})
	return reason
}

// result sums up, and says whether what should have happened did.
func (s *story) result(ctx context.Context, missing error, answered int) error {
	s.say("\nThe conversation")
	s.say("   %-5s %-12s %-10s %8s %8s %12s", "turn", "path", "engine", "prompt", "cached", "first token")
	for i, t := range s.turns {
		path := "user space"
		if t.flow != nil && t.backend == "" {
			path = "kernel"
		}
		s.say("   %-5d %-12s %-10s %8d %8d %9d ms", i+1, path, t.engine, t.prompt, t.cached, t.first.Milliseconds())
	}
	shared := ""
	if missing == nil {
		shared = "; they share that address, so it is not steered"
	}
	s.say("Beside it %d requests of %d people at another address were answered%s.", answered, backgroundUsers, shared)
	if missing == nil {
		if err := s.packets(ctx); err != nil {
			return err
		}
	}
	err := poll(ctx, 10*time.Second, "all weights are back at 0", func() bool {
		list, err := s.w.admin.Backends(ctx)
		return err == nil && !slices.ContainsFunc(list, func(b admin.BackendStatus) bool { return weightOf(b) != 0 })
	})
	if err != nil {
		return err
	}
	s.say("All weights are back at 0.")
	if missing != nil {
		s.say("\nNot shown here: steering in the kernel (%s).", missing)
		return s.check(ctx, false)
	}
	return s.check(ctx, true)
}

// packets compares the two paths by the kernel's own counters.
func (s *story) packets(ctx context.Context) error {
	var text bytes.Buffer
	if err := s.w.adminGet(ctx, "/metrics", &text); err != nil {
		return err
	}
	steered := sumMetric(text.String(), "shunt_backend_packets_total", "")
	passed := sumMetric(text.String(), "shunt_drops_total", `reason="pass_`) + sumMetric(text.String(), "shunt_drops_total", `reason="shunt_pass_`)
	s.say("Packets on the balancer's interface: %.0f forwarded in the kernel (turns 2 and 3, both ways), %.0f passed up to user space", steered, passed)
	s.say("(turn 1, the background load, health checks and ARP).")
	return nil
}

// sumMetric adds up the series of a metric whose labels contain a text.
func sumMetric(text, name, label string) (sum float64) {
	for line := range strings.Lines(text) {
		series, value, ok := strings.Cut(strings.TrimSpace(line), "} ")
		if !ok {
			continue
		}
		base, labels, _ := strings.Cut(series, "{")
		if v, err := strconv.ParseFloat(value, 64); err == nil && base == name && strings.Contains(labels, label) {
			sum += v
		}
	}
	return sum
}

// check holds the engines' own records against the story.
func (s *story) check(ctx context.Context, steer bool) error {
	for i, t := range s.turns {
		if t.engine != s.home {
			return fmt.Errorf("turn %d was served by %s, the conversation lives on %s", i+1, t.engine, s.home)
		}
		if i > 0 && t.cached == 0 {
			return fmt.Errorf("turn %d found nothing in the prefix cache", i+1)
		}
		if steer && i > 0 && (t.flow == nil || t.backend != "") {
			return fmt.Errorf("turn %d: %w", i+1, errNotSteered)
		}
	}
	for _, e := range s.w.engines {
		if e.name != s.home {
			continue
		}
		var l sim.RequestLog
		if err := s.w.engineGet(ctx, e, "/debug/requests", &l); err != nil {
			return err
		}
		conns := map[uint64]bool{}
		for _, r := range l.Requests {
			if r.CachedTokens > 0 && r.PromptTokens == s.turns[1].prompt || r.PromptTokens == s.turns[2].prompt {
				conns[r.Conn] = true
			}
		}
		if steer && len(conns) != 2 {
			return fmt.Errorf("%s saw turns 2 and 3 on %d connections, want 2", e.name, len(conns))
		}
	}
	return nil
}

// commands says what can be tried while the world is up.
func (s *story) commands() {
	w := s.w
	s.say("\nEverything stays up until Ctrl-C. To try, from another terminal:")
	s.say("   export SHUNT_ADMIN=%s", w.admin.Addr)
	s.say("   %s status     # also: backends, sessions, flows, drain %s, ready %s", w.shunt, s.home, s.home)
	body := fmt.Sprintf(`{"model":"%s","messages":[{"role":"user","content":"hello"}],"max_tokens":20}`, demoModel)
	enter := ""
	if w.lab != nil {
		enter = "nsenter --net=" + w.bed.Clients[0].Path + " "
	}
	s.say("   %scurl -si http://%s/v1/chat/completions -d '%s'", enter, w.vip, body)
	if w.lab != nil {
		s.say("   bpftool map dump pinned %s/shunt_sessions     # also: shunt_weights, shunt_flows, ...", s.pins)
		s.say("   nsenter --net=%s sh     # the balancer; engines: %s ...", w.bed.Balancer.Path, w.bed.Engines[0].Path)
	}
	s.say("   the configuration and the logs are in %s", w.dir)
}

func ifSet(before, text, after string) string {
	if text == "" {
		return ""
	}
	return before + text + after
}
