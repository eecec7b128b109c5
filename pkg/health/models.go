// SPDX-License-Identifier: Apache-2.0

package health

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

const (
	modelsInterval = 10 * time.Second
	modelsTimeout  = 2 * time.Second
	modelsAtOnce   = 32
	// What a backend may list.
	maxModels     = 2000
	maxModelName  = 256
	maxModelEntry = 4 << 10
	maxModelsBody = 4 << 20
)

var errNoList = errors.New("the backend has no list of models")

// ModelsOptions of NewModels.
type ModelsOptions struct {
	Backends func() []*fleet.Backend
	// Key is shown to the backend; "" = none.
	Key func(*fleet.Backend) string
	// Set is told what a backend lists: nil if it has no list. An answer that fails changes nothing.
	Set func(*fleet.Backend, []fleet.Model)
	// Transport carries the requests. nil: a connection of its own for each, without any proxy.
	Transport http.RoundTripper
}

// Models asks the backends that are up which models they list, adapters included.
type Models struct {
	o    ModelsOptions
	mu   sync.Mutex
	next map[*fleet.Backend]time.Time // zero while it is asked
}

// NewModels returns what asks nobody before Run.
func NewModels(o ModelsOptions) *Models {
	if o.Transport == nil {
		o.Transport = &http.Transport{DisableKeepAlives: true, MaxResponseHeaderBytes: 64 << 10}
	}
	return &Models{o: o, next: map[*fleet.Backend]time.Time{}}
}

// Run asks each backend within a second after it came up, and then again and again, until ctx ends.
func (m *Models) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, modelsAtOnce)
	tick := time.NewTicker(look)
	defer tick.Stop()
	for {
		for _, b := range m.due() {
			slots <- struct{}{}
			wg.Go(func() {
				defer func() { <-slots }()
				m.ask(ctx, b)
			})
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// due returns the backends to ask now. One that is down is asked as soon as it is up: it may be another engine then.
func (m *Models) due() (list []*fleet.Backend) {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	for b, next := range m.next {
		if b.Gone() || b.Health() != fleet.HealthUp && !next.IsZero() {
			delete(m.next, b)
		}
	}
	for _, b := range m.o.Backends() {
		if next, asked := m.next[b]; b.Health() == fleet.HealthUp && (!asked || !next.IsZero() && now.After(next)) {
			m.next[b] = time.Time{}
			list = append(list, b)
		}
	}
	return list
}

func (m *Models) ask(ctx context.Context, b *fleet.Backend) {
	defer func() {
		_ = recover() // a list that breaks the reader is none
		m.mu.Lock()
		defer m.mu.Unlock()
		m.next[b] = time.Now().Add(modelsInterval)
	}()
	ctx, cancel := context.WithTimeout(ctx, modelsTimeout)
	defer cancel()
	list, err := m.fetch(ctx, b)
	if err == nil || errors.Is(err, errNoList) {
		m.o.Set(b, list)
	}
}

func (m *Models) fetch(ctx context.Context, b *fleet.Backend) ([]fleet.Model, error) {
	u := *b.URL()
	u.Path = strings.TrimRight(u.Path, "/") + "/v1/models"
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, fmt.Errorf("ask for models: %w", err)
	}
	req.Header.Set("User-Agent", "shunt-models")
	if m.o.Key != nil {
		if key := m.o.Key(b); key != "" {
			req.Header.Set("Authorization", "Bearer "+key)
		}
	}
	resp, err := m.o.Transport.RoundTrip(req)
	if err != nil {
		return nil, fmt.Errorf("ask for models: %w", err)
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusOK:
	case resp.StatusCode >= 400 && resp.StatusCode < 500 && resp.StatusCode != http.StatusTooManyRequests, resp.StatusCode == http.StatusNotImplemented:
		return nil, fmt.Errorf("ask for models: status %d: %w", resp.StatusCode, errNoList)
	default:
		return nil, fmt.Errorf("ask for models: status %d", resp.StatusCode)
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxModelsBody+1))
	if err != nil {
		return nil, fmt.Errorf("ask for models: %w", err)
	}
	if len(text) > maxModelsBody {
		return nil, fmt.Errorf("ask for models: more than %d bytes: %w", maxModelsBody, errNoList)
	}
	return parseModels(text)
}

// parseModels reads a list in OpenAI's shape.
func parseModels(text []byte) ([]fleet.Model, error) {
	var answer struct {
		Data []json.RawMessage `json:"data"`
	}
	if json.Unmarshal(text, &answer) != nil || answer.Data == nil {
		return nil, fmt.Errorf("read models: %w", errNoList)
	}
	list := []fleet.Model{}
	for _, raw := range answer.Data {
		var entry struct {
			ID     string `json:"id"`
			Parent string `json:"parent"`
		}
		var flat bytes.Buffer
		if len(raw) > maxModelEntry || json.Unmarshal(raw, &entry) != nil || entry.ID == "" || len(entry.ID) > maxModelName ||
			len(list) == maxModels || json.Compact(&flat, raw) != nil {
			continue
		}
		list = append(list, fleet.Model{Name: entry.ID, Parent: entry.Parent, Entry: flat.Bytes()})
	}
	return list, nil
}
