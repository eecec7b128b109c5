// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// maxBody bounds a request's body.
const maxBody = 64 << 20

// failures are what the operator of a test asked for (flags and POST /debug/fail).
type failures struct {
	health atomic.Int64 // status of /health; 0 = 200
	status atomic.Int64 // status of the next requests
	count  atomic.Int64 // how many of them
}

// job is a parsed request.
type job struct {
	idPrefix string
	model    string
	prompts  [][]uint32
	n        int // choices per prompt
	lim      limits
	stream   bool
	dialect  dialect
}

// dialect writes an API's answers. The append functions add server-sent events.
type dialect interface {
	answer(c *call) any
	token(buf []byte, ch *choice, k int) []byte // token k
	end(buf []byte, ch *choice) []byte
	tail(buf []byte, c *call) []byte
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	for path, parse := range map[string]func([]byte) (*job, error){
		"/v1/chat/completions": parseChat,
		"/v1/completions":      parseCompletion,
		"/v1/embeddings":       parseEmbedding,
		"/v1/responses":        parseResponse,
		"/v1/messages":         parseMessage,
	} {
		mux.HandleFunc("POST "+path, s.api(parse))
	}
	mux.HandleFunc("GET /v1/models", s.models)
	mux.HandleFunc("/health", s.health)
	mux.HandleFunc("/ping", s.health)
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]string{"version": "0.11.0+shuntsim"})
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.metrics.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("POST /reset_prefix_cache", func(w http.ResponseWriter, _ *http.Request) {
		s.mu.Lock()
		s.engine.ResetCache()
		s.mu.Unlock()
		w.WriteHeader(http.StatusOK)
	})
	mux.HandleFunc("GET /debug/requests", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, s.log.list(s.o.Name))
	})
	mux.HandleFunc("DELETE /debug/requests", func(w http.ResponseWriter, _ *http.Request) {
		s.log.reset()
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("POST /debug/fail", s.setFailures)
	mux.HandleFunc("GET /debug/blob", s.blob)
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusNotFound, map[string]string{"detail": "Not Found"})
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Sim-Engine", s.o.Name)
		if id := r.Header.Get("X-Request-Id"); id != "" {
			w.Header().Set("X-Request-Id", id)
		}
		mux.ServeHTTP(w, r)
	})
}

// api serves one inference path.
func (s *Server) api(parse func([]byte) (*job, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		rec := s.log.begin(r)
		code := s.serveAPI(w, r, rec, parse)
		s.log.status(rec, code)
	}
}

func (s *Server) serveAPI(w http.ResponseWriter, r *http.Request, rec *record, parse func([]byte) (*job, error)) int {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		return writeError(w, http.StatusBadRequest, "BadRequestError", "read body: "+err.Error(), "")
	}
	if s.fail.status.Load() != 0 && s.fail.count.Add(-1) >= 0 {
		return writeError(w, int(s.fail.status.Load()), "InternalServerError", "failure by request of the test", "")
	}
	j, err := parse(body)
	if err != nil {
		return writeError(w, http.StatusBadRequest, "BadRequestError", err.Error(), "")
	}
	prompt := 0
	for _, p := range j.prompts {
		prompt += len(p)
	}
	s.log.model(rec, j.model, prompt)
	if len(s.o.Models) > 0 && !slices.Contains(s.o.Models, j.model) {
		return writeError(w, http.StatusNotFound, "NotFoundError", "The model `"+j.model+"` does not exist.", "model")
	}
	rec.n = j.n
	c, err := s.submit(rec, j.idPrefix, j.model, j.prompts, j.n, j.lim)
	if err != nil {
		return writeError(w, http.StatusBadRequest, "BadRequestError", err.Error(), "")
	}
	defer c.close()
	if !j.stream {
		if err := c.wait(r.Context()); err != nil {
			return statusClientGone
		}
		c.complete()
		return writeJSON(w, http.StatusOK, j.dialect.answer(c))
	}
	return s.stream(w, r, c, j)
}

// statusClientGone is recorded when nobody was left to answer to (nginx's number for it).
const statusClientGone = 499

// stream writes the answer as server-sent events, each token as soon as it exists. The head leaves before the first
// token, as it does with vLLM.
func (s *Server) stream(w http.ResponseWriter, r *http.Request, c *call, j *job) int {
	h := w.Header()
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	h.Set("Cache-Control", "no-cache")
	w.WriteHeader(http.StatusOK)
	rc := http.NewResponseController(w)
	if rc.Flush() != nil {
		return statusClientGone
	}
	written := make([]int, len(c.choices))
	ended := make([]bool, len(c.choices))
	var buf []byte
	for open := len(c.choices); open > 0; {
		if c.next(r.Context()) != nil {
			return statusClientGone
		}
		buf = buf[:0]
		for i, ch := range c.choices {
			if ended[i] {
				continue
			}
			produced, done := c.progress(i)
			for ; written[i] < produced; written[i]++ {
				buf = j.dialect.token(buf, ch, written[i])
			}
			if done {
				ended[i] = true
				open--
				buf = j.dialect.end(buf, ch)
			}
		}
		if open == 0 {
			buf = j.dialect.tail(buf, c)
			c.complete()
		}
		if len(buf) == 0 {
			continue
		}
		if _, err := w.Write(buf); err != nil || rc.Flush() != nil {
			return statusClientGone
		}
	}
	return http.StatusOK
}

func (s *Server) models(w http.ResponseWriter, _ *http.Request) {
	type model struct {
		ID          string `json:"id"`
		Object      string `json:"object"`
		Created     int64  `json:"created"`
		OwnedBy     string `json:"owned_by"`
		MaxModelLen int    `json:"max_model_len"`
	}
	list := []model{}
	for _, m := range s.o.Models {
		list = append(list, model{m, "model", s.started.Unix(), "shuntsim", s.engine.MaxModelLen()})
	}
	writeJSON(w, http.StatusOK, map[string]any{"object": "list", "data": list})
}

func (s *Server) health(w http.ResponseWriter, _ *http.Request) {
	if code := s.fail.health.Load(); code != 0 {
		w.WriteHeader(int(code))
		return
	}
	w.WriteHeader(http.StatusOK)
}

// setFailures handles POST /debug/fail?health=503&status=500&count=3: the status of health checks (0: good again), and
// of the next inference requests (without count: of all).
func (s *Server) setFailures(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	values := map[string]int64{}
	for _, name := range []string{"health", "status", "count"} {
		text := q.Get(name)
		if text == "" {
			continue
		}
		v, err := strconv.ParseInt(text, 10, 32)
		if err != nil || v < 0 || name != "count" && v != 0 && (v < 200 || v > 599) {
			writeError(w, http.StatusBadRequest, "BadRequestError", "bad value of "+name, name)
			return
		}
		values[name] = v
	}
	if v, ok := values["health"]; ok {
		s.fail.health.Store(v)
	}
	if v, ok := values["status"]; ok {
		n, limited := values["count"]
		if !limited {
			n = 1 << 62
		}
		s.fail.count.Store(n)
		s.fail.status.Store(v)
	}
	w.WriteHeader(http.StatusNoContent)
}

// blob streams /debug/blob?bytes=N&seed=S&rate=R: N bytes of BlobReader, at R bytes per second if given.
func (s *Server) blob(w http.ResponseWriter, r *http.Request) {
	rec := s.log.begin(r)
	q := r.URL.Query()
	num := func(name string) int64 {
		v, err := strconv.ParseInt(q.Get(name), 10, 62)
		if err != nil || v < 0 {
			return 0
		}
		return v
	}
	n, rate := num("bytes"), num("rate")
	src := BlobReader(uint64(num("seed")), n)
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.FormatInt(n, 10))
	chunk := int64(64 << 10)
	if rate > 0 {
		chunk = max(rate/50, 1)
	}
	start, sent := time.Now(), int64(0)
	rc := http.NewResponseController(w)
	for sent < n {
		m, err := io.CopyN(w, src, min(chunk, n-sent))
		sent += m
		if err != nil {
			s.log.status(rec, statusClientGone)
			return
		}
		if rate <= 0 {
			continue
		}
		if rc.Flush() != nil {
			s.log.status(rec, statusClientGone)
			return
		}
		due := time.Duration(float64(sent) / float64(rate) * float64(time.Second))
		select {
		case <-time.After(due - time.Since(start)):
		case <-r.Context().Done():
			s.log.status(rec, statusClientGone)
			return
		}
	}
	s.log.status(rec, http.StatusOK)
}

func writeJSON(w http.ResponseWriter, code int, v any) int {
	b, err := json.Marshal(v)
	if err != nil {
		return writeError(w, http.StatusInternalServerError, "InternalServerError", err.Error(), "")
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	w.WriteHeader(code)
	if _, err := w.Write(b); err != nil {
		return statusClientGone
	}
	return code
}

// writeError answers in vLLM's form.
func writeError(w http.ResponseWriter, code int, kind, message, param string) int {
	e := map[string]any{"message": message, "type": kind, "param": nil, "code": code}
	if param != "" {
		e["param"] = param
	}
	writeJSON(w, code, map[string]any{"error": e})
	return code
}

var errEmpty = errors.New("the request has no prompt")
