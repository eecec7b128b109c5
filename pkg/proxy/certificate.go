// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

var errNoCertificate = errors.New("the peer shows another certificate than this listener's")

// Certificate is a listener's certificate and its key, in files that may be replaced.
type Certificate struct {
	certFile, keyFile string

	mu     sync.Mutex // Refresh
	loaded [sha256.Size]byte

	current atomic.Pointer[tls.Certificate]
}

// LoadCertificate reads the PEM files of a chain and its key.
func LoadCertificate(certFile, keyFile string) (*Certificate, error) {
	c := &Certificate{certFile: certFile, keyFile: keyFile}
	if _, err := c.Refresh(); err != nil {
		return nil, err
	}
	return c, nil
}

// Refresh reads the files again and reports whether they hold something new. On an error, as when only one of the two has
// been replaced yet, what was loaded before stays in use.
func (c *Certificate) Refresh() (changed bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	cert, err := os.ReadFile(c.certFile)
	if err != nil {
		return false, fmt.Errorf("load certificate: %w", err)
	}
	key, err := os.ReadFile(c.keyFile)
	if err != nil {
		return false, fmt.Errorf("load key of certificate: %w", err)
	}
	sum := sha256.Sum256(bytes.Join([][]byte{cert, key}, []byte{0}))
	if sum == c.loaded {
		return false, nil
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return false, fmt.Errorf("load certificate %s with key %s: %w", c.certFile, c.keyFile, err)
	}
	c.loaded = sum
	c.current.Store(&pair)
	return true, nil
}

// Expires returns the end of the certificate's validity.
func (c *Certificate) Expires() time.Time {
	if leaf := c.current.Load().Leaf; leaf != nil {
		return leaf.NotAfter
	}
	return time.Time{}
}

// Listener returns the settings of a listener: TLS 1.2 or later, HTTP/1.1.
func (c *Certificate) Listener() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return c.current.Load(), nil }}
}

// Peer returns the settings to connect to another shunt that must show this very certificate, whatever its address is: a
// client that is steered there goes on with the name it asked for.
func (c *Certificate) Peer() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
		InsecureSkipVerify: true, // VerifyConnection is stricter
		VerifyConnection: func(s tls.ConnectionState) error {
			if len(s.PeerCertificates) == 0 || !bytes.Equal(s.PeerCertificates[0].Raw, c.current.Load().Certificate[0]) {
				return errNoCertificate
			}
			return nil
		}}
}
