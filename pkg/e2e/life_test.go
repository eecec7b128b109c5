// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/admin"
)

func needTool(t testing.TB, name string) string {
	t.Helper()
	p, err := exec.LookPath(name)
	if err != nil {
		need(t, fmt.Errorf("%s is not installed", name))
	}
	return p
}

// A steered download runs through kill -9 and a restart of the daemon, and ends with the right checksum.
func TestDownloadSurvivesRestart(t *testing.T) {
	const size = 200 << 20
	w := newWorld(t, 1, 1)
	w.engine(0)
	d := w.serve(w.Balancer, w.vipConfig(false, rareSample))
	url, client := vipURL(w, false), w.Clients[0]
	w.chat(client, url, []message{{"user", longPrompt}}, 4)

	get := func(base string) (string, error) {
		resp, err := httpClient(client.Namespace, false).Get(fmt.Sprintf("%s/debug/blob?bytes=%d", base, size))
		if err != nil {
			return "", err
		}
		defer resp.Body.Close()
		if id := resp.Header.Get("x-request-id"); id != "" || resp.StatusCode != http.StatusOK {
			return "", fmt.Errorf("status %d, request id %q", resp.StatusCode, id)
		}
		h := sha256.New()
		n, err := io.Copy(h, resp.Body)
		if err == nil && n != size {
			err = fmt.Errorf("%d bytes of %d", n, size)
		}
		return fmt.Sprintf("%x", h.Sum(nil)), err
	}
	want, err := get("http://" + w.Engines[0].V4.String() + ":8000")
	if err != nil {
		t.Fatal(err)
	}
	type result struct {
		sum string
		err error
	}
	done := make(chan result, 1)
	go func() {
		sum, err := get(url)
		done <- result{sum, err}
	}()
	wait(t, 20*time.Second, "the download is steered", func() bool {
		f := decode[[]admin.Flow](d, "/api/v1/flows")
		return len(f) == 1 && f[0].Bytes > 1<<20
	})
	if err := d.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = d.Wait()
	d = d.restart()
	select {
	case r := <-done:
		if r.err != nil || r.sum != want {
			t.Errorf("download: %v, checksum right: %v", r.err, r.sum == want)
		}
	case <-time.After(2 * time.Minute):
		t.Fatal("download hangs after the restart")
	}
	// The next daemon knows the pin: the session goes on in the kernel.
	if r := w.chat(client, url, []message{{"user", longPrompt}}, 4); r.backend != "" {
		t.Error("the pin did not survive the restart")
	}
	d.weightsReturn()
}

// SIGTERM ends the daemon cleanly; steered connections go on without it, and cleanup takes everything away.
func TestStopAndCleanup(t *testing.T) {
	w := newWorld(t, 1, 1)
	w.engine(0)
	d := w.serve(w.Balancer, w.vipConfig(false, rareSample))
	url, client := vipURL(w, false), w.Clients[0]
	w.chat(client, url, []message{{"user", longPrompt}}, 4)
	if err := d.Stop(20 * time.Second); err != nil {
		t.Fatal(err)
	}
	if r := w.chat(client, url, []message{{"user", longPrompt}}, 4); r.status != http.StatusOK {
		t.Errorf("without the daemon a pinned session gets status %d", r.status)
	}
	pins := func() (list []string) {
		_ = filepath.WalkDir(filepath.Join(w.bpffs, "shunt"), func(p string, _ os.DirEntry, err error) error {
			if err == nil {
				list = append(list, p)
			}
			return nil
		})
		return list
	}
	if len(pins()) == 0 {
		t.Fatal("the daemon left no pins: the maps are gone")
	}
	p := w.start(w.Balancer.Namespace, nil, binary(t, "shunt"), "cleanup", "--bpffs", w.bpffs)
	if err := p.Wait(); err != nil {
		t.Fatalf("cleanup: %v\n%s", err, p.out)
	}
	if left := pins(); len(left) != 0 {
		t.Errorf("left in the bpffs: %v", left)
	}
	if _, err := tryChat(client, url, []message{{"user", "x"}}, 4); err == nil {
		t.Error("a request was served after cleanup and without the daemon: something is still attached")
	}
}

// Every pinned map prints named fields, and the documented bpftool command drains a backend in both planes.
func TestBpftool(t *testing.T) {
	bpftool := needTool(t, "bpftool")
	for _, v6 := range []bool{false, true} {
		t.Run(map[bool]string{false: "v4", true: "v6"}[v6], func(t *testing.T) {
			w := newWorld(t, 2, 2)
			w.engine(0)
			w.engine(1)
			d := w.serve(w.Balancer, w.vipConfig(v6, rareSample))
			url, client := vipURL(w, v6), w.Clients[0]
			one := w.chat(client, url, []message{{"user", longPrompt}}, 4)
			keep := httpClient(client.Namespace, true)
			resp, err := keep.Get(url + "/v1/models") // an open flow, so that only the other family's flows are empty
			if err != nil {
				t.Fatal(err)
			}
			drain(resp)

			dir := ""
			_ = filepath.WalkDir(w.bpffs, func(p string, _ os.DirEntry, _ error) error {
				if filepath.Base(p) == "shunt_weights" {
					dir = filepath.Dir(p)
				}
				return nil
			})
			field := map[string]string{
				"shunt_config": `"abi"`, "shunt_vips": `"port_base"`, "shunt_backends": `"generation"`, "shunt_admin": `"state"`,
				"shunt_weights": `"kernel_tokens"`, "shunt_sessions": `"expires_ns"`, "shunt_sess_use": `"last_ns"`,
				"shunt_flows": `"charge"`, "shunt_flows6": `[]`, "shunt_epochs": `"value"`, "shunt_stats": `"packets_in"`,
				"shunt_drops": `"key"`, "shunt_ports": `"value"`, "shunt_vip_use": `"value"`, "shunt_state": `"next_port"`,
				"shunt_tracing": `"until_ns"`,
			}
			if v6 {
				field["shunt_flows"], field["shunt_flows6"] = field["shunt_flows6"], field["shunt_flows"]
			}
			pinned, err := os.ReadDir(dir)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range pinned {
				name := m.Name()
				if !strings.HasPrefix(name, "shunt_") || name == "shunt_events" || name == "shunt_trace" { // a ring buffer has no entries to dump
					continue
				}
				want, known := field[name]
				delete(field, name)
				out, err := exec.Command(bpftool, "map", "dump", "pinned", filepath.Join(dir, name)).CombinedOutput()
				if err != nil || !known || !strings.Contains(string(out), want) {
					t.Errorf("bpftool map dump %s: %v, no %s in\n%s", name, err, want, tail(string(out), 500))
				}
			}
			if len(field) > 0 {
				t.Errorf("maps that are not pinned in %s: %v", dir, field)
			}
			keep.CloseIdleConnections()

			id := d.backends()[one.backend].ID
			out, err := exec.Command(bpftool, "map", "update", "pinned", filepath.Join(dir, "shunt_admin"),
				"key", fmt.Sprint(id&0xff), fmt.Sprint(id>>8), "0", "0", "value", "1", "0", "0", "0", "0", "0", "0", "0").CombinedOutput()
			if err != nil {
				t.Fatalf("bpftool map update shunt_admin: %v %s", err, out)
			}
			// Within a second, and what a busy machine may add to it.
			wait(t, 2*time.Second, "the L7 knows of the drain", func() bool { return d.backends()[one.backend].Admin == "drain" })
			// The pinned client meets the kernel first, the other one the L7 only.
			for i, from := range w.Clients {
				r := w.chat(from, url, []message{{"user", longPrompt}}, 4)
				if r.backend == "" || r.backend == one.backend {
					t.Errorf("client %d: drained through the map, yet served by %q (pinned to %q)", i, r.backend, one.backend)
				}
			}
		})
	}
}

// Without the privileges the daemon serves at L7 and says why; with require it refuses to start.
func TestWithoutPrivileges(t *testing.T) {
	w := newWorld(t, 1, 1)
	w.engine(0)
	nobody := &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	config := w.vipConfig(false, "")
	strict := w.launch(w.Balancer, nobody, config)
	var exit *exec.ExitError
	if err := strict.Wait(); !errors.As(err, &exit) {
		t.Fatalf("require: true without privileges: %v", err)
	}
	if !strings.Contains(strict.out.String(), "CAP_") && !strings.Contains(strict.out.String(), "permission") {
		t.Errorf("the refusal names no missing capability:\n%s", strict.out)
	}

	lax := w.launch(w.Balancer, nobody, strings.Replace(config, "require: true", "require: false", 1))
	wait(t, 20*time.Second, "the daemon serves without the kernel path", func() bool { return lax.status("/readyz") == http.StatusOK })
	for range 2 {
		if r := w.chat(w.Clients[0], vipURL(w, false), []message{{"user", "hello"}}, 4); r.status != http.StatusOK || r.backend == "" || r.closed {
			t.Errorf("status %d, backend %q, asked to reconnect %v", r.status, r.backend, r.closed)
		}
	}
	body, _ := lax.get("/api/v1/status")
	if !strings.Contains(string(body), "CAP_") && !strings.Contains(string(body), "permission") {
		t.Errorf("status does not say what is missing: %s", body)
	}
	lax.weightsReturn()
}
