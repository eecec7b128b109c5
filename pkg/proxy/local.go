// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/session"
	"github.com/valyala/fasthttp"
)

// peerProbe answers another shunt that asks if this is one. It reports whether the request was that.
func (s *Server) peerProbe(ctx *fasthttp.RequestCtx, ex *exchange) bool {
	if string(ex.path) != session.PeerPath || s.o.PeerInfo == nil || string(ex.method) != "GET" && !ex.isHead {
		return false
	}
	if s.o.OnProbe != nil && string(lookup(ex.fields, session.IngressHeader)) == "1" {
		s.o.OnProbe(ex.client.remote.Addr())
	}
	ex.probe = true
	ex.answer(ctx, s.o.PeerInfo())
	return true
}

// local answers the paths that the front end serves itself. It reports whether the request was one.
func (s *Server) local(ctx *fasthttp.RequestCtx, ex *exchange) bool {
	get := string(ex.method) == "GET" || ex.isHead
	if string(ex.path) == "/v1/models" && get && ex.set.paths.allows(ex.path) && (len(s.o.Fleet.Pools()) > 1 || s.modelsKnown()) {
		ex.answer(ctx, s.modelList())
		return true
	}
	return false
}

func (ex *exchange) answer(ctx *fasthttp.RequestCtx, json []byte) {
	ex.status = 200
	ctx.Response.Header.SetContentType("application/json")
	ctx.Response.Header.AddBytesV(headerRequestID, ex.id)
	ctx.Response.SetBody(json)
	if ex.framing.chunked || ex.framing.length > prefetched {
		ctx.SetConnectionClose()
		ex.client.lingers = true
	}
}

// modelsKnown reports whether a backend that is ready has said what it lists. Before that, its own answer is passed on.
func (s *Server) modelsKnown() bool {
	for _, b := range s.o.Fleet.Backends() {
		if _, known := b.Models(); known && b.Eligible() {
			return true
		}
	}
	return false
}

// modelList is what can be asked for at the moment, in OpenAI's shape: of each pool that has a backend ready, its configured models, and
// what those backends list that would get there. An entry is the backend's own.
func (s *Server) modelList() []byte {
	b := []byte(`{"object":"list","data":[`)
	seen := map[string]bool{}
	add := func(name string, entry []byte, pool *fleet.Pool) {
		if seen[name] {
			return
		}
		if len(seen) > 0 {
			b = append(b, ',')
		}
		if seen[name] = true; entry != nil {
			b = append(b, entry...)
			return
		}
		b = append(b, `{"id":`...)
		b = appendQuoted(b, name)
		b = append(b, `,"object":"model","created":0,"owned_by":`...)
		b = appendQuoted(b, pool.Name())
		b = append(b, '}')
	}
	for _, p := range s.o.Fleet.Pools() {
		listed, ready := map[string][]byte{}, false
		var names []string
		for _, back := range p.Backends() {
			if !back.Eligible() {
				continue
			}
			ready = true
			list, _ := back.Models()
			for _, m := range list {
				if listed[m.Name] == nil && s.o.Fleet.PoolFor(m.Name) == p {
					listed[m.Name] = m.Entry
					names = append(names, m.Name)
				}
			}
		}
		if !ready {
			continue
		}
		for _, m := range p.Models() {
			add(m, listed[m], p)
		}
		for _, m := range names {
			add(m, listed[m], p)
		}
	}
	return append(b, "]}"...)
}

// modelsName returns NAME of /v1/models/NAME, or nil. Names may contain slashes.
func modelsName(path []byte) []byte {
	name, ok := bytes.CutPrefix(path, []byte("/v1/models/"))
	if !ok || len(name) == 0 {
		return nil
	}
	return name
}
