// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shunt-lb/shunt/pkg/fleet"
)

// lister answers every request with what it is set to.
type lister struct {
	mu     sync.Mutex
	status int
	body   string
	asked  int
	key    string
}

func (l *lister) RoundTrip(r *http.Request) (*http.Response, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asked++
	l.key = r.URL.Path + " " + r.Header.Get("Authorization")
	if l.status == 0 {
		return nil, io.ErrUnexpectedEOF
	}
	return &http.Response{StatusCode: l.status, Body: io.NopCloser(strings.NewReader(l.body)), Request: r}, nil
}

func (l *lister) seen() (asked int, key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.asked, l.key
}

func (l *lister) set(status int, body string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.status, l.body = status, body
}

func TestModels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, map[string]string{"a": "http://a/prefix/"})
		b := f.Backend("a")
		l := &lister{}
		l.set(200, `{"object":"list","data":[{"id": "base", "max_model_len": 5}, {"id":"lora","parent":"base"}, 7, {"id":""}, {"id":"`+
			strings.Repeat("x", 300)+`"}]}`)
		m := NewModels(ModelsOptions{Backends: f.Backends, Set: f.SetModels, Transport: l, Key: func(*fleet.Backend) string { return "k" }})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- m.Run(ctx) }()
		defer func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		}()
		want := func(what string, known bool, names ...string) {
			t.Helper()
			time.Sleep(2 * time.Second)
			synctest.Wait()
			list, k := b.Models()
			var got []string
			for _, m := range list {
				got = append(got, m.Name)
			}
			if k != known || !slices.Equal(got, names) {
				t.Errorf("%s: known %v, %v; want %v, %v", what, k, got, known, names)
			}
		}
		want("not up", false)
		if n, _ := l.seen(); n != 0 {
			t.Error("a backend that is not up was asked")
		}
		b.SetHealth(fleet.HealthUp)
		want("up", true, "base", "lora")
		_, key := l.seen()
		if list, _ := b.Models(); string(list[0].Entry) != `{"id":"base","max_model_len":5}` || list[1].Parent != "base" || key != "/prefix/v1/models Bearer k" {
			t.Errorf("%s, parent %q, asked for %s", list[0].Entry, list[1].Parent, key)
		}
		l.set(500, "")
		time.Sleep(time.Minute)
		want("an error", true, "base", "lora")
		l.set(0, "")
		time.Sleep(time.Minute)
		want("no answer", true, "base", "lora")
		before, _ := l.seen()
		time.Sleep(time.Minute)
		after, _ := l.seen()
		if n := after - before; n < 4 || n > 7 {
			t.Errorf("asked %d times in a minute", n)
		}
		l.set(200, `{"data":[{"id":"new"}]}`)
		b.SetHealth(fleet.HealthDown)
		want("down", true, "base", "lora")
		b.SetHealth(fleet.HealthUp)
		want("up again", true, "new")
		for _, none := range []struct {
			status int
			body   string
		}{{404, ""}, {200, "hello"}, {200, `{"models":[]}`}, {200, strings.Repeat(" ", maxModelsBody+1)}} {
			l.set(200, `{"data":[]}`)
			time.Sleep(modelsInterval)
			want("an empty list", true)
			l.set(none.status, none.body)
			time.Sleep(modelsInterval)
			want("no list", false)
		}
	})
}
