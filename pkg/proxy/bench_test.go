// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bufio"
	"context"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/pkg/session"
)

// quiet serves canned answers with as little work as a goroutine can, so that a profile shows the proxy.
func quiet(b testing.TB, body, answer string) (url string) {
	b.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				buf := make([]byte, 64<<10)
				have := ""
				for {
					n, err := c.Read(buf)
					if err != nil {
						return
					}
					have += string(buf[:n])
					if strings.HasSuffix(have, body) {
						have = ""
						if _, err := io.WriteString(c, answer); err != nil {
							return
						}
					}
				}
			}()
		}
	}()
	return "http://" + ln.Addr().String()
}

func benchmarkRelay(b *testing.B, answer, last string) {
	body := `{"model":"llama","messages":[{"role":"user","content":"` + strings.Repeat("some words of a prompt ", 85) + `"}],"max_tokens":64}`
	request := post(chatPath, body, "Authorization: Bearer abc", "User-Agent: OpenAI/JS", "Accept: application/json", "Accept-Encoding: gzip, deflate", "X-Stainless-Lang: js")
	o := Options{Fleet: newFleet(b, "session", quiet(b, body, answer), quiet(b, body, answer)), Tracker: session.NewTracker(session.TrackerOptions{}), AccessLog: func(*Record) {}}
	o.Identifier = session.NewIdentifier(nil)
	withCounter(b)(&o)
	s, err := New(o)
	if err != nil {
		b.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	go func() { _ = s.Serve(ln) }()
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = s.Shutdown(ctx)
	})
	b.ReportAllocs()
	var before, after syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &before)
	b.SetParallelism(16)
	b.RunParallel(func(pb *testing.PB) {
		c, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			b.Error(err)
			return
		}
		defer c.Close()
		br := bufio.NewReader(c)
		for pb.Next() {
			if _, err := io.WriteString(c, request); err != nil {
				b.Error(err)
				return
			}
			for {
				line, err := br.ReadSlice('\n')
				if err != nil {
					b.Error(err)
					return
				}
				if string(line) == last {
					break
				}
			}
		}
	})
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &after)
	cpu := after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano()
	// Of the whole process: client and engine are in it, too.
	b.ReportMetric(float64(cpu)/float64(b.N)/1000, "cpu-us/op")
}

func BenchmarkUnary(b *testing.B) {
	body := `{"choices":[{"message":{"content":"` + strings.Repeat("x", 900) + `"}}],"usage":{"prompt_tokens":9,"completion_tokens":3}}` + "\n\n"
	benchmarkRelay(b, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "+string(appendInt(nil, int64(len(body))))+"\r\n\r\n"+body, "\n")
}

func BenchmarkStream(b *testing.B) {
	var s strings.Builder
	s.WriteString(streamHead)
	for range 64 {
		s.WriteString(chunk(event("word")))
	}
	s.WriteString("0\r\n\r\n")
	benchmarkRelay(b, s.String(), "0\r\n")
}
