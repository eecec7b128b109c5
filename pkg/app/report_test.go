// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"net/http"
	"net/url"
	"testing"

	"github.com/shunt-lb/shunt/pkg/fleet"
	"github.com/shunt-lb/shunt/pkg/health"
	"github.com/shunt-lb/shunt/pkg/policy"
	"github.com/shunt-lb/shunt/pkg/proxy"
)

type well struct{}

func (well) RoundTrip(r *http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody, Request: r}, nil
}

// What the front end met at a backend means the same to the health checks: which outcomes end a row of failures, which add to
// it, and which say nothing.
func TestReportedOutcomes(t *testing.T) {
	chooser, err := policy.New("least_tokens", policy.Params{})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		between proxy.Outcome // of two failed connections, with two in a row as the limit
		up      bool
	}{
		{proxy.OutcomeOK, true},
		{proxy.OutcomeBusy, true},
		{proxy.OutcomeUpstreamError, false},
		{proxy.OutcomeClientGone, false},
		{proxy.OutcomeLocalFault, false},
		{proxy.OutcomeConnectFailed, false},
	} {
		f := fleet.New(fleet.Options{})
		if err := f.Apply([]fleet.PoolSpec{{Name: "p", Chooser: chooser, Backends: []fleet.BackendSpec{{Name: "b",
			URL: &url.URL{Scheme: "http", Host: "192.0.2.1:80"}}}}}); err != nil {
			t.Fatal(err)
		}
		a := &app{checker: health.New(health.Options{Backends: f.Backends, Transport: well{},
			Settings: func(*fleet.Backend) health.Settings { return health.Settings{Fall: 2} }})}
		a.checker.CheckAll(context.Background())
		b := f.Backends()[0]
		if b.Health() != fleet.HealthUp {
			t.Fatal("the backend is not up after a good check")
		}
		ticket, err := f.Pools()[0].Take(&fleet.Query{})
		if err != nil {
			t.Fatal(err)
		}
		a.report(ticket, proxy.OutcomeConnectFailed)
		a.report(ticket, tt.between)
		a.report(ticket, proxy.OutcomeConnectFailed)
		if up := b.Health() == fleet.HealthUp; up != tt.up {
			t.Errorf("%s between two failures: up %v, want %v", tt.between, up, tt.up)
		}
	}
}
