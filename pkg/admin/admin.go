// SPDX-License-Identifier: Apache-2.0

// Package admin is the operator's listener (health, metrics, status, control) and its client.
//
//	GET    /healthz                          the process lives
//	GET    /readyz                           it can serve; 503 with a reason when not
//	GET    /metrics                          Prometheus text
//	POST   /-/reload                         read the configuration again; 422 with what is wrong
//	GET    /api/v1/status                    Status
//	GET    /api/v1/backends                  []BackendStatus
//	POST   /api/v1/backends/{name}/{state}   state: ready, drain, maint
//	GET    /api/v1/sessions?limit=N          []Session
//	DELETE /api/v1/sessions/{addr}           unpin a client address
//	GET    /api/v1/flows?limit=N             []Flow
//	GET    /api/v1/config                    the configuration in force
//
// Who may ask: everybody who reaches the listener may ask for health and metrics. The rest is open on a unix socket (its
// mode is the guard) and on a loopback address, where a request must also name a loopback host, so that a web page cannot
// reach it by rebinding its name. With a token it asks for that on TCP; on another address without a token it is closed.
package admin

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

// Errors that callbacks wrap so that the answer has the fitting status.
var (
	ErrNotFound    = errors.New("not found")     // 404
	ErrUnavailable = errors.New("not available") // 503: the kernel path is not live, for example
)

const defaultLimit = 1000 // rows of sessions and flows when none is asked for

// Options are what the listener shows and does. Callbacks run on the request's goroutine and may be called at the same
// time. A nil callback answers 404.
type Options struct {
	Registry prometheus.Gatherer
	Version  string
	Token    string       // bearer token; empty = none
	Logger   *slog.Logger // control actions and the HTTP server's own errors; nil = none

	Ready    func() error // nil = can serve
	Status   func() Status
	Backends func() []BackendStatus
	Sessions func(limit int) ([]Session, error)
	Flows    func(limit int) ([]Flow, error)
	Config   func() any // encoded as JSON

	SetAdmin func(name string, state fleet.AdminState) error
	Unpin    func(client netip.Addr) error
	Reload   func() error
}

// Server serves the operator's listener.
type Server struct {
	o     Options
	token [sha256.Size]byte
	mux   *http.ServeMux
	http  *http.Server
}

// New makes a server. Nothing runs before Serve.
func New(o Options) *Server {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Server{o: o, token: sha256.Sum256([]byte(o.Token)), mux: http.NewServeMux()}
	s.routes()
	s.http = &http.Server{
		Handler:           http.HandlerFunc(s.serve),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      time.Minute,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          log.New(logWriter{o.Logger}, "", 0),
		BaseContext: func(ln net.Listener) context.Context {
			return context.WithValue(context.Background(), accessKey{}, accessOf(ln, o.Token != ""))
		},
	}
	return s
}

type logWriter struct{ log *slog.Logger }

func (w logWriter) Write(p []byte) (int, error) {
	w.log.Debug("admin listener", "error", strings.TrimSpace(string(p)))
	return len(p), nil
}

// Serve answers on a listener until Shutdown; then it returns nil. Several listeners may be served at once.
func (s *Server) Serve(ln net.Listener) error {
	if err := s.http.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve admin listener %s: %w", ln.Addr(), err)
	}
	return nil
}

// Shutdown closes the listeners and waits for open requests until ctx ends, then cuts them.
func (s *Server) Shutdown(ctx context.Context) error {
	if err := s.http.Shutdown(ctx); err != nil {
		_ = s.http.Close()
		return fmt.Errorf("shut admin listener down: %w", err)
	}
	return nil
}

// access is what a listener lets through beside health and metrics.
type access uint8

const (
	accessClosed   access = iota // nothing
	accessToken                  // with the token
	accessLoopback               // what names a loopback host
	accessSocket                 // everything
)

type accessKey struct{}

func accessOf(ln net.Listener, token bool) access {
	switch a := ln.Addr().(type) {
	case *net.UnixAddr:
		return accessSocket
	case *net.TCPAddr:
		switch {
		case token:
			return accessToken
		case a.IP.IsLoopback():
			return accessLoopback
		}
	}
	return accessClosed
}

func (s *Server) routes() {
	get := func(route string, set bool, f func(*http.Request) (any, error)) {
		if set {
			s.mux.HandleFunc("GET "+route, func(w http.ResponseWriter, r *http.Request) { s.answer(w, r, f) })
		}
	}
	get("/healthz", true, func(*http.Request) (any, error) {
		return map[string]string{"status": "ok", "version": s.o.Version}, nil
	})
	s.mux.HandleFunc("GET /readyz", s.ready)
	if s.o.Registry != nil {
		s.mux.Handle("GET /metrics", promhttp.HandlerFor(s.o.Registry, promhttp.HandlerOpts{MaxRequestsInFlight: 8}))
	}
	get("/api/v1/status", s.o.Status != nil, func(*http.Request) (any, error) { return s.o.Status(), nil })
	get("/api/v1/backends", s.o.Backends != nil, func(*http.Request) (any, error) { return list(s.o.Backends()), nil })
	get("/api/v1/sessions", s.o.Sessions != nil, func(r *http.Request) (any, error) { return limited(r, s.o.Sessions) })
	get("/api/v1/flows", s.o.Flows != nil, func(r *http.Request) (any, error) { return limited(r, s.o.Flows) })
	get("/api/v1/config", s.o.Config != nil, func(*http.Request) (any, error) { return s.o.Config(), nil })

	do := func(pattern string, set bool, f func(*http.Request) (any, error)) {
		if set {
			s.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
				s.answer(w, r, func(r *http.Request) (any, error) {
					v, err := f(r)
					if err == nil {
						s.o.Logger.Debug("admin request done", "method", r.Method, "path", r.URL.Path)
					}
					return v, err
				})
			})
		}
	}
	do("POST /-/reload", s.o.Reload != nil, func(*http.Request) (any, error) {
		if err := s.o.Reload(); err != nil {
			return nil, statusError{http.StatusUnprocessableEntity, err}
		}
		return map[string]bool{"reloaded": true}, nil
	})
	do("POST /api/v1/backends/{name}/{state}", s.o.SetAdmin != nil, s.setAdmin)
	do("DELETE /api/v1/sessions/{addr}", s.o.Unpin != nil, func(r *http.Request) (any, error) {
		a, err := netip.ParseAddr(r.PathValue("addr"))
		if err != nil || a.Zone() != "" {
			return nil, statusError{http.StatusBadRequest, fmt.Errorf("%.64q is not an IP address", r.PathValue("addr"))}
		}
		if err := s.o.Unpin(a.Unmap()); err != nil {
			return nil, err
		}
		return map[string]string{"unpinned": a.Unmap().String()}, nil
	})
}

var adminStates = []fleet.AdminState{fleet.AdminNone, fleet.AdminDrain, fleet.AdminMaint}

func (s *Server) setAdmin(r *http.Request) (any, error) {
	name, word := r.PathValue("name"), r.PathValue("state")
	for _, state := range adminStates {
		if state.String() != word {
			continue
		}
		if err := s.o.SetAdmin(name, state); err != nil {
			return nil, err
		}
		return map[string]string{"name": name, "admin": word}, nil
	}
	return nil, statusError{http.StatusNotFound, fmt.Errorf("%.64q is not ready, drain or maint", word)}
}

// list keeps an empty list from being written as null.
func list[T any](l []T) []T {
	if l == nil {
		return []T{}
	}
	return l
}

func limited[T any](r *http.Request, f func(int) ([]T, error)) (any, error) {
	limit := defaultLimit
	if q := r.URL.Query().Get("limit"); q != "" {
		n, err := strconv.Atoi(q)
		if err != nil || n < 1 || n > 1_000_000 {
			return nil, statusError{http.StatusBadRequest, fmt.Errorf("limit %.32q is not between 1 and 1000000", q)}
		}
		limit = n
	}
	l, err := f(limit)
	return list(l), err
}

func (s *Server) ready(w http.ResponseWriter, _ *http.Request) {
	if s.o.Ready != nil {
		if err := s.o.Ready(); err != nil {
			writeJSON(w, http.StatusServiceUnavailable, Readiness{Reason: err.Error()})
			return
		}
	}
	writeJSON(w, http.StatusOK, Readiness{Ready: true})
}

// statusError is an error with the status of its answer.
type statusError struct {
	status int
	err    error
}

func (e statusError) Error() string { return e.err.Error() }
func (e statusError) Unwrap() error { return e.err }

func (s *Server) answer(w http.ResponseWriter, r *http.Request, f func(*http.Request) (any, error)) {
	v, err := f(r)
	if err == nil {
		writeJSON(w, http.StatusOK, v)
		return
	}
	status := http.StatusInternalServerError
	var se statusError
	switch {
	case errors.As(err, &se):
		status = se.status
	case errors.Is(err, ErrNotFound):
		status = http.StatusNotFound
	case errors.Is(err, ErrUnavailable):
		status = http.StatusServiceUnavailable
	}
	if r.Method != http.MethodGet {
		s.o.Logger.Warn("admin request refused", "method", r.Method, "path", r.URL.Path, "status", status, "error", err)
	}
	writeError(w, status, err.Error())
}

func writeError(w http.ResponseWriter, status int, text string) {
	writeJSON(w, status, errorBody{Error: text})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		status, body = http.StatusInternalServerError, []byte(`{"error":"encode answer"}`)
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n'))
}

var crossOrigin = http.NewCrossOriginProtection()

// serve is the gate before all routes.
func (s *Server) serve(w http.ResponseWriter, r *http.Request) {
	kind, _ := r.Context().Value(accessKey{}).(access)
	if status, text := s.refuse(kind, r); status != 0 {
		if status == http.StatusUnauthorized {
			w.Header().Set("WWW-Authenticate", "Bearer")
		}
		writeError(w, status, text)
		return
	}
	if p := r.URL.EscapedPath(); path.Clean(p) != p {
		writeError(w, http.StatusNotFound, "not found")
		return
	}
	r.Body = http.MaxBytesReader(w, r.Body, 4<<10)
	h, pattern := s.mux.Handler(r)
	if pattern != "" {
		s.mux.ServeHTTP(w, r) // not h: the mux fills in the path's values
		return
	}
	// The mux's own answer (unknown path, wrong method with Allow) in our form.
	c := &capture{header: http.Header{}}
	h.ServeHTTP(c, r)
	if v := c.header.Get("Allow"); v != "" {
		w.Header().Set("Allow", v)
	}
	writeError(w, c.status, strings.ToLower(http.StatusText(c.status)))
}

// capture keeps the status and header of an answer.
type capture struct {
	header http.Header
	status int
}

func (c *capture) Header() http.Header         { return c.header }
func (c *capture) WriteHeader(status int)      { c.status = status }
func (c *capture) Write(p []byte) (int, error) { return len(p), nil }

// refuse says with which status and text a request is turned away; 0 = it is let through.
func (s *Server) refuse(kind access, r *http.Request) (int, string) {
	if kind == accessLoopback && !loopbackHost(r.Host) {
		return http.StatusForbidden, "the host named in the request is not loopback"
	}
	if err := crossOrigin.Check(r); err != nil {
		return http.StatusForbidden, "cross-origin requests are not allowed"
	}
	switch r.URL.Path {
	case "/healthz", "/readyz", "/metrics":
		return 0, ""
	}
	switch kind {
	case accessClosed:
		return http.StatusForbidden, "only health and metrics are served on this address: set admin.token_file, or ask on loopback or the socket"
	case accessToken:
		token, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		sum := sha256.Sum256([]byte(token))
		if subtle.ConstantTimeCompare(sum[:], s.token[:]) != 1 {
			return http.StatusUnauthorized, "the bearer token is missing or wrong"
		}
	}
	return 0, ""
}

// loopbackHost says whether a Host header names this host and nothing that a name server could have pointed here.
func loopbackHost(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.ToLower(strings.Trim(host, "[]"))
	if host == "" || host == "localhost" {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsLoopback()
}
