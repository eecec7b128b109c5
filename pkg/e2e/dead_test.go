// SPDX-License-Identifier: Apache-2.0

//go:build linux

package e2e

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The host of an engine vanishes under an open steered connection: the client, which only waits, is told with a RST,
// and its next connection is served by the L7 from the other engine.
func TestDeadHostResetsItsClients(t *testing.T) {
	w := newWorld(t, 1, 2)
	w.engine(0)
	w.engine(1)
	d := w.serve(w.Balancer, w.vipConfig(false, rareSample))
	url, client := vipURL(w, false), w.Clients[0]
	first := w.chat(client, url, []message{{"user", longPrompt}}, 4)
	home := 0
	if first.backend == engineName(1) {
		home = 1
	}
	conn, err := client.Dial(context.Background(), "tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Fatal(err)
	}
	drain(resp)
	if resp.Header.Get("x-shunt-backend") != "" {
		t.Fatal("the connection is not steered")
	}
	if err := w.Switch.SetDown(w.Engines[home].Port); err != nil {
		t.Fatal(err)
	}
	if err := conn.SetReadDeadline(time.Now().Add(60 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(r); !errors.Is(err, unix.ECONNRESET) {
		t.Fatalf("the client reads %v", err)
	}
	if again := w.chat(client, url, []message{{"user", longPrompt}}, 4); again.backend != engineName(1-home) {
		t.Errorf("served by %q, want %q", again.backend, engineName(1-home))
	}
	d.weightsReturn()
}
