// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
)

var errNoRedirect = errors.New("a redirect is no answer")

// maxBody is how much of an answer is read, so that the connection ends in order.
const maxBody = 4 << 10

// probe makes one check. An explicit path must answer 2xx.
func probe(ctx context.Context, rt http.RoundTripper, base *url.URL, path string) error {
	if path != "" {
		status, err := get(ctx, rt, base, path)
		if err != nil {
			return err
		}
		if status/100 != 2 {
			return badStatus(path, status)
		}
		return nil
	}
	status, err := get(ctx, rt, base, "/health")
	switch {
	case err != nil:
		return err
	case status/100 == 2:
		return nil
	case status >= 500 && status != http.StatusNotImplemented:
		// An engine that still loads its model says so here, and lists the model all the same.
		return badStatus("/health", status)
	}
	status, err = get(ctx, rt, base, "/v1/models")
	if err != nil {
		return err
	}
	// Below 500 something speaks HTTP there: it may want a key, or know no list of models.
	if status >= 500 && status != http.StatusNotImplemented {
		return badStatus("/v1/models", status)
	}
	return nil
}

func badStatus(path string, status int) error {
	err := fmt.Errorf("check %s: status %d", path, status)
	if status/100 == 3 {
		err = fmt.Errorf("%w: %w", err, errNoRedirect)
	}
	return err
}

func get(ctx context.Context, rt http.RoundTripper, base *url.URL, path string) (status int, err error) {
	ref, err := url.Parse(path)
	if err != nil {
		return 0, fmt.Errorf("check %s: %w", path, err)
	}
	u := url.URL{Scheme: base.Scheme, Host: base.Host, RawQuery: ref.RawQuery,
		Path: strings.TrimRight(base.Path, "/") + "/" + strings.TrimLeft(ref.Path, "/")}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return 0, fmt.Errorf("check %s: %w", path, err)
	}
	req.Header.Set("User-Agent", "shunt-health")
	resp, err := rt.RoundTrip(req) // without http.Client: no redirects, no cookies
	if err != nil {
		return 0, fmt.Errorf("check %s: %w", path, err)
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxBody)) // the status is what counts
	return resp.StatusCode, nil
}
