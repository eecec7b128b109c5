// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

const maxAnswer = 256 << 20

// Client asks a daemon's operator listener.
type Client struct {
	Addr  string // host:port, or the path of a unix socket (it holds a /)
	Token string // bearer token; empty = none
}

// RefusedError is an answer of the daemon that is not 200.
type RefusedError struct {
	Status  int
	Message string
}

func (e *RefusedError) Error() string { return e.Message }

// Status asks for the daemon's state.
func (c Client) Status(ctx context.Context) (Status, error) {
	return ask[Status](ctx, c, http.MethodGet, "/api/v1/status")
}

// Backends lists the backends.
func (c Client) Backends(ctx context.Context) ([]BackendStatus, error) {
	return ask[[]BackendStatus](ctx, c, http.MethodGet, "/api/v1/backends")
}

// Sessions lists at most limit client addresses; 0 is the daemon's default.
func (c Client) Sessions(ctx context.Context, limit int) ([]Session, error) {
	return ask[[]Session](ctx, c, http.MethodGet, "/api/v1/sessions"+limitQuery(limit))
}

// Flows lists at most limit steered connections; 0 is the daemon's default.
func (c Client) Flows(ctx context.Context, limit int) ([]Flow, error) {
	return ask[[]Flow](ctx, c, http.MethodGet, "/api/v1/flows"+limitQuery(limit))
}

// Config is the configuration in force, as JSON.
func (c Client) Config(ctx context.Context) (json.RawMessage, error) {
	return ask[json.RawMessage](ctx, c, http.MethodGet, "/api/v1/config")
}

// SetAdmin puts a backend into an operator's state.
func (c Client) SetAdmin(ctx context.Context, backend string, state fleet.AdminState) error {
	_, err := ask[json.RawMessage](ctx, c, http.MethodPost, "/api/v1/backends/"+url.PathEscape(backend)+"/"+state.String())
	return err
}

// Unpin removes the pins of a client address.
func (c Client) Unpin(ctx context.Context, addr string) error {
	_, err := ask[json.RawMessage](ctx, c, http.MethodDelete, "/api/v1/sessions/"+url.PathEscape(addr))
	return err
}

// Reload makes the daemon read its configuration again.
func (c Client) Reload(ctx context.Context) error {
	_, err := ask[json.RawMessage](ctx, c, http.MethodPost, "/-/reload")
	return err
}

func limitQuery(n int) string {
	if n <= 0 {
		return ""
	}
	return "?limit=" + strconv.Itoa(n)
}

func ask[T any](ctx context.Context, c Client, method, path string) (T, error) {
	var v T
	body, err := c.do(ctx, method, path)
	if err != nil {
		return v, err
	}
	if err := json.Unmarshal(body, &v); err != nil {
		return v, fmt.Errorf("decode answer of %s: %w (is it shunt's admin listener?)", c.Addr, err)
	}
	return v, nil
}

func (c Client) do(ctx context.Context, method, path string) ([]byte, error) {
	// A transport of its own: no proxy of the environment, no connection left behind.
	tr := &http.Transport{DisableKeepAlives: true, ResponseHeaderTimeout: 30 * time.Second}
	host := c.Addr
	if strings.Contains(c.Addr, "/") {
		host = "localhost"
		tr.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, "unix", c.Addr)
		}
	}
	if strings.HasPrefix(host, ":") {
		host = "localhost" + host
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://"+host+path, nil)
	if err != nil {
		return nil, fmt.Errorf("ask admin address %s: it is neither host:port nor the path of a socket", c.Addr)
	}
	if c.Token != "" {
		req.Header.Set("Authorization", "Bearer "+c.Token)
	}
	client := http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	resp, err := client.Do(req)
	if err != nil {
		var ue *url.Error
		if errors.As(err, &ue) {
			err = ue.Err
		}
		return nil, fmt.Errorf("ask admin address %s: %w%s", c.Addr, err, hint(err))
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return nil, fmt.Errorf("read answer of %s: %w", c.Addr, err)
	}
	if resp.StatusCode == http.StatusOK {
		return body, nil
	}
	var e errorBody
	if json.Unmarshal(body, &e) != nil || e.Error == "" {
		e.Error = fmt.Sprintf("status %d: %.200s", resp.StatusCode, bytes.TrimSpace(body))
	}
	return nil, &RefusedError{Status: resp.StatusCode, Message: e.Error}
}

// hint says what to do about a connection that could not be made.
func hint(err error) string {
	switch {
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ENOENT):
		return " (is the daemon running? --admin gives its address or socket)"
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return " (the socket belongs to the daemon's user)"
	}
	return ""
}
