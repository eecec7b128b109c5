// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// newCertificate writes a certificate of its own for the name, and its key, into the directory.
func newCertificate(t *testing.T, dir, name string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	k, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{"tls.crt": {Type: "CERTIFICATE", Bytes: der}, "tls.key": {Type: "PRIVATE KEY", Bytes: k}} {
		if err := os.WriteFile(filepath.Join(dir, file), pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func loadCertificate(t *testing.T, dir string) *Certificate {
	t.Helper()
	c, err := LoadCertificate(filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (f *front) dialTLS(cfg *tls.Config) *client {
	f.t.Helper()
	c, err := tls.Dial("tcp", f.addr, cfg)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(2 * wait))
	return &client{c, f.t, bufio.NewReader(c)}
}

func TestTLSListener(t *testing.T) {
	dir := t.TempDir()
	newCertificate(t, dir, "one")
	cert := loadCertificate(t, dir)
	gone := make(chan struct{})
	engine := newEngine(t, func(p *peer) {
		for g := p.request(); g != nil; g = p.request() {
			if !strings.Contains(string(g.body), `"stream":true`) {
				_ = p.json(200, string(g.body))
				continue
			}
			_ = p.send(streamHead + chunk(event("one")))
			_, _ = io.Copy(io.Discard, p) // until the front end hangs up
			close(gone)
			return
		}
	})
	fr := startFront(t, newFleet(t, "round_robin", engine.url()), func(o *Options) { o.ListenTLS = cert.Listener() })

	c := fr.dialTLS(&tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2", "http/1.1"}})
	state := c.Conn.(*tls.Conn).ConnectionState()
	if state.NegotiatedProtocol != "http/1.1" || state.PeerCertificates[0].Subject.CommonName != "one" {
		t.Errorf("negotiated %q with %s", state.NegotiatedProtocol, state.PeerCertificates[0].Subject)
	}
	body := chat(`,"x":"` + strings.Repeat("y", 200<<10) + `"`)
	for range 3 { // large enough for many records
		c.send(post(chatPath, body))
		if a := c.answer("POST"); a.body != body {
			t.Fatalf("%d, %d of %d bytes", a.StatusCode, len(a.body), len(body))
		}
	}
	c.send(post("/none", body))
	if a := c.answer("POST"); a.StatusCode != 404 || a.err != nil {
		t.Errorf("early answer: %d %v", a.StatusCode, a.err)
	}

	// A client that leaves is noticed, as without TLS.
	c = fr.dialTLS(cert.Peer())
	c.send(post(chatPath, chat(`,"stream":true`)))
	if r := c.head("POST"); r.StatusCode != 200 {
		t.Fatalf("stream: %d", r.StatusCode)
	}
	c.Close()
	select {
	case <-gone:
	case <-time.After(wait):
		t.Error("the backend's connection is still open")
	}
	fr.settle()

	for name, cfg := range map[string]*tls.Config{
		"h2 only": {InsecureSkipVerify: true, NextProtos: []string{"h2"}},
		"tls 1.1": {InsecureSkipVerify: true, MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS11},
	} {
		if c, err := tls.Dial("tcp", fr.addr, cfg); err == nil {
			c.Close()
			t.Errorf("%s: accepted", name)
		}
	}
	plain := fr.dial()
	plain.send(post(chatPath, chat("")))
	if b, _ := io.ReadAll(plain.br); strings.Contains(string(b), "200 OK") {
		t.Errorf("plain HTTP was served: %q", b)
	}

	// Replaced files: half of them is not used; then new connections get the new certificate.
	other := t.TempDir()
	newCertificate(t, other, "two")
	old, _ := os.ReadFile(filepath.Join(dir, "tls.crt"))
	for i, file := range []string{"tls.crt", "tls.key"} {
		b, err := os.ReadFile(filepath.Join(other, file))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, file), b, 0o600); err != nil {
			t.Fatal(err)
		}
		if changed, err := cert.Refresh(); changed != (i == 1) || (err != nil) != (i == 0) {
			t.Errorf("%s replaced: changed %v, %v", file, changed, err)
		}
		c := fr.dialTLS(cert.Peer())
		if n := c.Conn.(*tls.Conn).ConnectionState().PeerCertificates[0].Subject.CommonName; n != []string{"one", "two"}[i] {
			t.Errorf("%s replaced: certificate %s", file, n)
		}
	}
	if changed, err := cert.Refresh(); changed || err != nil {
		t.Errorf("nothing replaced: changed %v, %v", changed, err)
	}
	if time.Until(cert.Expires()) < time.Minute {
		t.Errorf("expires %s", cert.Expires())
	}
	// A peer that shows another certificate is no peer.
	if err := os.WriteFile(filepath.Join(other, "tls.crt"), old, 0o600); err != nil {
		t.Fatal(err)
	}
	third := t.TempDir()
	newCertificate(t, third, "two")
	if c, err := tls.Dial("tcp", fr.addr, loadCertificate(t, third).Peer()); err == nil {
		c.Close()
		t.Error("another certificate of the same name was accepted of a peer")
	}
	if _, err := LoadCertificate(filepath.Join(dir, "none"), filepath.Join(dir, "tls.key")); err == nil {
		t.Error("no file, no error")
	}
}
