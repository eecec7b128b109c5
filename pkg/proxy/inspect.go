// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"errors"
	"unsafe"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/policy"
	"github.com/shunt-lb/shunt/pkg/prefix"
	"github.com/shunt-lb/shunt/pkg/request"
)

// otherModel labels a model that no pool lists.
const otherModel = "other"

// inspect finds out what the request is about and which pool serves it.
func (ex *exchange) inspect() *apiError {
	ex.s.budget.request()
	if string(ex.method) == "POST" {
		ex.api = request.APIOf(view(ex.path))
	}
	if ex.api == request.Other {
		return ex.routeByPath()
	}
	if lookup(ex.fields, "content-encoding") != nil {
		// An encoded body passes as it is: unpacking it is how a small request fills the memory.
		if ex.pool = ex.s.poolForAny(); ex.pool == nil {
			return errEncoded
		}
		ex.label = otherModel
		ex.plan()
		return nil
	}
	p := request.Acquire()
	defer p.Release()
	facts, err := p.Parse(ex.api, ex.body)
	if err != nil {
		return parseError(err)
	}
	if facts.Model == "" {
		if ex.pool = ex.s.poolForAny(); ex.pool == nil {
			return errModelMissing
		}
		ex.label = otherModel
	} else if e := ex.setModel(facts.Model); e != nil {
		return e
	}
	ex.maxTokens = facts.MaxTokens
	if ex.s.o.Counter != nil {
		ex.count(facts)
	}
	if ex.needs(policy.PrefixIndex) && ex.api != request.Embeddings {
		ex.blocks(p)
	}
	ex.query.Streams = facts.Stream
	if ex.set.Identifier != nil && (ex.needs(policy.Session) || ex.s.o.Pins != nil) {
		key, source := ex.set.Identifier.Key(ex.header, facts)
		ex.key, ex.source = key, source.String()
	}
	ex.plan()
	return nil
}

// blocks finds the hashes of the prompt's blocks, by which the index knows who holds its beginning.
func (ex *exchange) blocks(p *request.Parser) {
	p.Prefix(&ex.hasher)
	blocks, bytes := ex.hasher.Blocks()
	ex.query.Blocks = blocks
	ex.query.BlockTokens = float64(ex.prompt) * prefix.BlockBytes / float64(max(bytes, prefix.BlockBytes))
}

// count counts the prompt, in the counter's vocabulary and in the engines' own.
func (ex *exchange) count(facts *request.Facts) {
	o := &ex.s.o
	family := request.FamilyOf(facts.Model)
	if o.Family != nil {
		family = o.Family(ex.pool.Name(), facts.Model)
	}
	n := facts.Parts(o.Counter.For(facts.Model), family, facts.Model).Count()
	ex.counted, ex.exact = int64(n.Tokens), !n.Estimated
	ex.prompt = ex.counted
	if o.Calibration != nil {
		ex.prompt = o.Calibration.Scale(ex.pool.Name(), ex.label, ex.counted)
	}
}

func (ex *exchange) needs(n policy.Needs) bool {
	return ex.s.o.Needs == nil || ex.s.o.Needs(ex.pool.Name()).Has(n)
}

// plan fills in what the policy may know.
func (ex *exchange) plan() {
	q := &ex.query
	q.Model = view(ex.model)
	q.PromptTokens = ex.prompt
	q.Exclude = ex.tried[:0]
	switch ex.api {
	case request.Other, request.Embeddings:
	default:
		q.OutputTokens = ex.pool.ExpectedOutput(ex.maxTokens)
	}
	q.Session = uint64(ex.key)
	if ex.s.o.Tracker != nil {
		q.Home = ex.s.o.Tracker.Home(ex.key)
		// A session's own answers say more than everybody's; a few of them not everything.
		if n := ex.s.o.Tracker.Output(ex.key); n > 0 && q.OutputTokens > 0 {
			q.OutputTokens = (q.OutputTokens + n + 1) / 2
			if ex.maxTokens > 0 {
				q.OutputTokens = min(q.OutputTokens, ex.maxTokens)
			}
		}
	}
	if q.Home == 0 && ex.key != 0 && ex.s.o.Pins != nil {
		q.Home = ex.s.o.Pins.Inherited(ex.client.remote, ex.client.local)
	}
	q.LocalOnly = ex.ingress()
}

// ingress reports whether another shunt steered the connection here.
func (ex *exchange) ingress() bool {
	return ex.s.o.Ingress != nil && ex.s.o.Ingress(ex.client.remote.Addr())
}

func (ex *exchange) routeByPath() *apiError {
	name := v2Model(ex.path)
	if name == nil {
		name = modelsName(ex.path)
	}
	var e *apiError
	if name != nil {
		e = ex.setModel(view(name))
	} else {
		e = ex.routeUnnamed()
	}
	if e != nil {
		return e
	}
	ex.plan()
	return nil
}

// routeUnnamed finds the pool of a request whose path names no model. Where there is a choice, the body of a POST may make it.
func (ex *exchange) routeUnnamed() *apiError {
	pools := ex.s.o.Fleet.Pools()
	if len(pools) == 0 {
		return errNoBackend
	}
	posted := string(ex.method) == "POST"
	encoded := lookup(ex.fields, "content-encoding") != nil
	if posted && !encoded && len(pools) > 1 {
		if e := ex.routeByBody(); e != nil || ex.pool != nil {
			return e
		}
	}
	ex.pool = ex.s.poolForAny()
	switch {
	case ex.pool != nil:
		return nil
	case string(ex.method) == "OPTIONS": // about the path, whatever the model
		ex.pool = pools[0]
		return nil
	case !posted:
		return errNoRoute
	case encoded:
		return errEncoded
	}
	return errModelMissing
}

// routeByBody routes by the model that the body names. If it names none there is neither a pool nor an error.
func (ex *exchange) routeByBody() *apiError {
	p := request.Acquire()
	defer p.Release()
	facts, err := p.Parse(ex.api, ex.body)
	switch {
	case err == nil && facts.Model != "":
		return ex.setModel(facts.Model)
	case err == nil:
		return nil
	case !errors.Is(err, request.ErrSyntax):
		return parseError(err)
	}
	model, e := formModel(lookup(ex.fields, "content-type"), ex.body)
	if e != nil || model == "" {
		return e
	}
	return ex.setModel(model)
}

// setModel routes by the model's name.
func (ex *exchange) setModel(name string) *apiError {
	ex.pool = ex.s.o.Fleet.PoolFor(name)
	if ex.pool == nil {
		return modelNotFound(name)
	}
	ex.model = append(ex.model[:0], name...)
	ex.label = otherModel
	for _, m := range ex.pool.Models() {
		if m == name {
			ex.label = m
		}
	}
	return nil
}

// poolForAny is the pool of a request whose model is not known: the only one, else the only one without a list.
func (s *Server) poolForAny() *fleet.Pool {
	if pools := s.o.Fleet.Pools(); len(pools) == 1 {
		return pools[0]
	}
	return s.o.Fleet.PoolFor("")
}

func parseError(err error) *apiError {
	switch {
	case errors.Is(err, request.ErrDuplicateKey):
		return badRequest("duplicate_key", "The request body repeats a key that routing depends on: "+clip(err.Error(), 200)+".")
	case errors.Is(err, request.ErrDepth):
		return badRequest("too_deep", "The request body is nested too deeply.")
	}
	return badRequest("invalid_json", "The request body is not valid JSON, or not an object.")
}

// view is the bytes as a string, valid while they do not change.
func view(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
