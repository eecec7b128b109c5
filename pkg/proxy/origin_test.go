// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
)

// told is an engine that answers with the X-Forwarded-For that it got.
func told(p *peer) {
	for g := p.request(); g != nil; g = p.request() {
		if p.json(200, fmt.Sprintf("%d:%s", g.count("x-forwarded-for"), g.value("x-forwarded-for"))) != nil {
			return
		}
	}
}

var local = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("2001:db8::/32")}

// Only what a trusted proxy says of a client's address is believed, and of that only what no client can have written.
func TestForwardedForIsBelievedFromTrustedProxies(t *testing.T) {
	for _, tt := range []struct {
		name    string
		trusted bool
		headers []string
		want    string
	}{
		{"nobody is trusted", false, []string{"X-Forwarded-For: 198.51.100.7"}, "127.0.0.1"},
		{"no header", true, nil, "127.0.0.1"},
		{"one", true, []string{"X-Forwarded-For: 198.51.100.7"}, "198.51.100.7"},
		{"spoofed before it", true, []string{"X-Forwarded-For: 203.0.113.1, 198.51.100.7"}, "198.51.100.7"},
		{"two proxies", true, []string{"X-Forwarded-For: 203.0.113.1,198.51.100.7 , 10.1.2.3"}, "198.51.100.7"},
		{"in two headers", true, []string{"x-forwarded-for: 203.0.113.1, 198.51.100.7", "X-Forwarded-For: 10.1.2.3"}, "198.51.100.7"},
		{"all trusted", true, []string{"X-Forwarded-For: 10.1.2.4, 10.1.2.3"}, "10.1.2.4"},
		{"ipv6", true, []string{"X-Forwarded-For: 2001:db9::1, 2001:db8::5"}, "2001:db9::1"},
		{"ipv4 in ipv6", true, []string{"X-Forwarded-For: ::ffff:198.51.100.7, ::ffff:10.1.2.3"}, "198.51.100.7"},
		{"with ports", true, []string{"X-Forwarded-For: 198.51.100.7:4711, [2001:db8::5]:80"}, "198.51.100.7"},
		{"no address", true, []string{"X-Forwarded-For: 198.51.100.7, unknown, 10.1.2.3"}, "10.1.2.3"},
		{"empty", true, []string{"X-Forwarded-For: "}, "127.0.0.1"},
		{"long", true, []string{"X-Forwarded-For: " + strings.Repeat("1", 3000)}, "127.0.0.1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			fr := startFront(t, newFleet(t, "round_robin", newEngine(t, told).url()), func(o *Options) {
				if tt.trusted {
					o.TrustedProxies = local
				}
			})
			a := fr.do(post(chatPath, chat(""), tt.headers...))
			if a.body != "1:"+tt.want {
				t.Errorf("the backend was told %s, want %s", a.body, tt.want)
			}
		})
	}
}

func v2(command, family byte, body []byte) string {
	return string(proxyV2) + string([]byte{command, family, byte(len(body) >> 8), byte(len(body))}) + string(body)
}

func v2tcp4(more int) string {
	return v2(0x21, 0x11, append([]byte{198, 51, 100, 7, 10, 0, 0, 1, 0x12, 0x34, 0, 80}, make([]byte, more)...))
}

func v2tcp6() string {
	src, dst := netip.MustParseAddr("2001:db9::1").As16(), netip.MustParseAddr("2001:db9::2").As16()
	return v2(0x21, 0x21, append(append(src[:], dst[:]...), 0, 1, 0, 2))
}

// proxyHeaders are what a connection may begin with, and the address that it tells; "" = it is refused, "-" = none is told.
var proxyHeaders = []struct{ name, header, want string }{
	{"v1", "PROXY TCP4 198.51.100.7 10.0.0.1 4711 80\r\n", "198.51.100.7"},
	{"v1 ipv6", "PROXY TCP6 2001:db9::1 2001:db9::2 4711 80\r\n", "2001:db9::1"},
	{"v1 unknown", "PROXY UNKNOWN\r\n", "-"},
	{"v1 unknown with more", "PROXY UNKNOWN ffff:f...f:ffff 1 2 3\r\n", "-"},
	{"v2", v2tcp4(0), "198.51.100.7"},
	{"v2 with extensions", v2tcp4(2000), "198.51.100.7"},
	{"v2 ipv6", v2tcp6(), "2001:db9::1"},
	{"v2 local", v2(0x20, 0, nil), "-"},
	{"v2 unix", v2(0x21, 0x31, make([]byte, 216)), "-"},
	{"none", "", ""},
	{"v1 family", "PROXY TCP4 2001:db9::1 2001:db9::2 4711 80\r\n", ""},
	{"v1 name", "PROXY TCP4 a.example 10.0.0.1 4711 80\r\n", ""},
	{"v1 zone", "PROXY TCP6 fe80::1%eth0 fe80::2 4711 80\r\n", ""},
	{"v1 port", "PROXY TCP4 198.51.100.7 10.0.0.1 65536 80\r\n", ""},
	{"v1 blanks", "PROXY TCP4  198.51.100.7 10.0.0.1 4711 80\r\n", ""},
	{"v1 short", "PROXY TCP4 198.51.100.7\r\n", ""},
	{"v1 small", "proxy TCP4 198.51.100.7 10.0.0.1 4711 80\r\n", ""},
	{"v1 long", "PROXY UNKNOWN " + strings.Repeat("x", 120) + "\r\n", ""},
	{"v2 version", v2(0x11, 0x11, make([]byte, 12)), ""},
	{"v2 command", v2(0x22, 0x11, make([]byte, 12)), ""},
	{"v2 cut off", v2(0x21, 0x11, make([]byte, 11)), ""},
	{"v2 too long", v2tcp4(5000), ""},
}

func TestProxyProtocol(t *testing.T) {
	engine := newEngine(t, told)
	fr := startFront(t, newFleet(t, "round_robin", engine.url()), func(o *Options) { o.ProxyProtocol = local })
	requests := 0
	for _, tt := range proxyHeaders {
		for _, pieces := range []int{1, 7} {
			c := fr.dial()
			text := tt.header + post(chatPath, chat(""))
			for len(text) > 0 { // as segments of their own, as far as the stack lets them
				n := min(len(text), max(len(tt.header)/pieces, 1))
				if pieces == 1 {
					n = len(text)
				}
				if _, err := c.Write([]byte(text[:n])); err != nil {
					break // refused already
				}
				text = text[n:]
			}
			if tt.want == "" {
				if r, err := http.ReadResponse(c.br, nil); err == nil { // else the close was faster
					_, _ = io.Copy(io.Discard, r.Body)
					if r.StatusCode != 400 || !c.closed() {
						t.Errorf("%s: not refused: %d", tt.name, r.StatusCode)
					}
				}
				c.Close()
				continue
			}
			want := "1:" + strings.Replace(tt.want, "-", "127.0.0.1", 1)
			for range 2 {
				if a := c.answer("POST"); a.StatusCode != 200 || a.body != want {
					t.Errorf("%s: %d %s, want %s", tt.name, a.StatusCode, a.body, want)
				}
				requests++
				c.send(post(chatPath, chat("")))
			}
			c.answer("POST")
			requests++
			c.Close()
		}
	}
	if n := engine.requests.Load(); n != int64(requests) {
		t.Errorf("%d requests reached the backend, want %d", n, requests)
	}
	fr.settle()
	// What a balancer's client says of itself does not count where only the balancer's own header is believed.
	c := fr.dial()
	c.send("PROXY TCP4 198.51.100.7 10.0.0.1 4711 80\r\n" + post(chatPath, chat(""), "X-Forwarded-For: 203.0.113.9"))
	if a := c.answer("POST"); a.body != "1:198.51.100.7" {
		t.Errorf("backend was told %s", a.body)
	}
}

// A header from an address that is no balancer's is no request.
func TestProxyHeaderFromOthersIsRefused(t *testing.T) {
	engine := newEngine(t, told)
	fr := startFront(t, newFleet(t, "round_robin", engine.url()), func(o *Options) {
		o.ProxyProtocol = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	})
	c := fr.dial()
	c.send("PROXY TCP4 198.51.100.7 10.0.0.1 4711 80\r\n" + post(chatPath, chat("")))
	if a := c.answer("POST"); a.StatusCode != 400 || engine.requests.Load() != 0 {
		t.Errorf("status %d, and %d requests reached the backend", a.StatusCode, engine.requests.Load())
	}
}

// Over TLS the header comes before the handshake.
func TestProxyProtocolUnderTLS(t *testing.T) {
	dir := t.TempDir()
	newCertificate(t, dir, "one")
	cert := loadCertificate(t, dir)
	fr := startFront(t, newFleet(t, "round_robin", newEngine(t, told).url()), func(o *Options) {
		o.ProxyProtocol, o.ListenTLS = local, cert.Listener()
	})
	raw, err := net.Dial("tcp", fr.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	if _, err := raw.Write([]byte(v2tcp6())); err != nil {
		t.Fatal(err)
	}
	tc := tls.Client(raw, cert.Peer())
	c := &client{tc, t, bufio.NewReader(tc)}
	c.send(post(chatPath, chat("")))
	if a := c.answer("POST"); a.body != "1:2001:db9::1" {
		t.Errorf("the backend was told %s", a.body)
	}
}

func FuzzProxyHeader(f *testing.F) {
	for _, tt := range proxyHeaders {
		f.Add([]byte(tt.header + "GET / HTTP/1.1\r\n"))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		src, used, err := parseProxyHeader(b)
		if used < 0 || used > len(b) || err != nil && (used != 0 || src.IsValid()) || used == 0 && src.IsValid() {
			t.Fatalf("%v, %d of %d bytes, %v", src, used, len(b), err)
		}
		// What is decided does not change with what follows, and nothing is decided too early.
		for n := range len(b) {
			s, u, e := parseProxyHeader(b[:n])
			if u > 0 && (s != src || u != used || !bytes.Equal(b[:u], b[:used])) || e != nil && err == nil {
				t.Fatalf("%d of %d bytes: %v %d %v, all: %v %d %v", n, len(b), s, u, e, src, used, err)
			}
		}
	})
}
