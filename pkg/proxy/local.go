// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"

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
	if string(ex.path) == "/v1/models" && get && ex.set.paths.allows(ex.path) && len(s.o.Fleet.Pools()) > 1 {
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

// modelList is the union of the pools' configured models in OpenAI's shape.
func (s *Server) modelList() []byte {
	b := []byte(`{"object":"list","data":[`)
	first := true
	for _, p := range s.o.Fleet.Pools() {
		for _, m := range p.Models() {
			if !first {
				b = append(b, ',')
			}
			first = false
			b = append(b, `{"id":`...)
			b = appendQuoted(b, m)
			b = append(b, `,"object":"model","created":0,"owned_by":`...)
			b = appendQuoted(b, p.Name())
			b = append(b, '}')
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
