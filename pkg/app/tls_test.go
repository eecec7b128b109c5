// SPDX-License-Identifier: Apache-2.0

package app

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/config"
)

func certificate(t *testing.T, dir, name string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	k, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "c.pem"), string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})))
	write(t, filepath.Join(dir, "k.pem"), string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: k})))
}

// The front end speaks TLS with the files' certificate, and with their new one soon after they were replaced.
func TestCertificateFilesAreFollowed(t *testing.T) {
	front, adm, dir := freePort(t), freePort(t), t.TempDir()
	file := filepath.Join(dir, "shunt.yaml")
	more := "tls: {certificate: " + filepath.Join(dir, "c.pem") + ", key: " + filepath.Join(dir, "k.pem") + "}\n"
	write(t, file, configText(front, adm, more, engine(t, "a")))
	cfg, err := config.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := Run(t.Context(), cfg, Options{Version: "test", ConfigPath: file, Stderr: &buffer{}}); err == nil || !strings.Contains(err.Error(), "load certificate") {
		t.Fatalf("without the files: %v", err)
	}
	certificate(t, dir, "one")
	d := start(t, file, front, adm)
	shown := func() string {
		c, err := tls.Dial("tcp", front, &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		return c.ConnectionState().PeerCertificates[0].Subject.CommonName
	}
	if n := shown(); n != "one" {
		t.Errorf("certificate %s", n)
	}
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}}
	resp, err := client.Post("https://"+front+"/v1/chat/completions", "application/json", strings.NewReader(`{"model":"m","messages":[]}`))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK || resp.Header.Get("X-Shunt-Backend") != "e0" {
		t.Errorf("status %d from %q", resp.StatusCode, resp.Header.Get("X-Shunt-Backend"))
	}
	certificate(t, dir, "two")
	d.wait("the new certificate", func() bool { return shown() == "two" })
	if body, _ := d.get("/metrics"); !strings.Contains(body, "shunt_certificate_expiry_timestamp_seconds ") {
		t.Error("the metrics do not show when the certificate ends")
	}
}
