// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"os"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/pkg/config"
	"github.com/shunt-lb/shunt/pkg/proxy"
)

// secrets are what the configuration names, but does not hold.
type secrets struct {
	keys     *proxy.Keys       // the clients'; nil: none are asked for
	backends map[string]string // by pool
	sum      [sha256.Size]byte // of all of it
}

// secret is where the configuration says that one is.
type secret struct{ pool, file, env string } // pool "": the clients' keys

func secretsOf(cfg *config.Config) []secret {
	var list []secret
	if cfg.Keys != "" {
		list = append(list, secret{file: cfg.Keys})
	}
	for _, p := range cfg.Pools {
		if name, env := strings.CutPrefix(p.KeyFrom, config.KeyFromEnv); env {
			list = append(list, secret{pool: p.Name, env: name})
		} else if p.KeyFrom != "" {
			list = append(list, secret{pool: p.Name, file: p.KeyFrom})
		}
	}
	return list
}

func readSecrets(cfg *config.Config) (*secrets, error) {
	s := &secrets{backends: map[string]string{}}
	sum := sha256.New()
	for _, from := range secretsOf(cfg) {
		if err := s.read(from, sum); err != nil {
			return nil, err
		}
	}
	s.sum = [sha256.Size]byte(sum.Sum(nil))
	return s, nil
}

func (s *secrets) read(from secret, sum hash.Hash) (err error) {
	text := []byte(os.Getenv(from.env))
	if from.file != "" {
		if text, err = os.ReadFile(from.file); err != nil {
			return fmt.Errorf("read keys: %w", err)
		}
	}
	fmt.Fprintf(sum, "%q %q\n", from.pool, text)
	if from.pool == "" {
		s.keys, err = proxy.ParseKeys(text)
		return err
	}
	key := strings.TrimSpace(string(text))
	switch {
	case key == "":
		err = errors.New("it is empty")
	case strings.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r >= 0x7f }):
		err = errors.New("it cannot stand in a header") // without the key itself
	}
	if err != nil {
		return fmt.Errorf("read key of pool %s from %s%s: %w", from.pool, from.file, from.env, err)
	}
	s.backends[from.pool] = key
	return nil
}

// watchSecrets takes keys that were replaced into use. What cannot be read changes nothing.
func (a *app) watchSecrets(ctx context.Context) error {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	told := ""
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if err := a.refreshSecrets(); err == nil {
			told = ""
		} else if err.Error() != told {
			told = err.Error()
			a.log.Error("keys cannot be read; the former ones stay in use", "error", err)
		}
	}
}

func (a *app) refreshSecrets() error {
	a.reloading.Lock()
	defer a.reloading.Unlock()
	cfg := a.cfg.Load()
	s, err := readSecrets(cfg)
	if err != nil || s.sum == a.secrets.Load().sum {
		return err
	}
	a.secrets.Store(s)
	if err := a.proxy.Update(a.dynamic(cfg)); err != nil {
		return err
	}
	a.log.Info("keys replaced")
	return nil
}
