// SPDX-License-Identifier: Apache-2.0

package dptest

import (
	"bytes"
	"testing"
)

// Verdicts of an XDP program.
const (
	Aborted = iota
	Drop
	Pass
	Tx
	Redirect
)

// Runner runs a frame through the program under test and returns its verdict and the frame as it left it.
type Runner func(frame []byte) (verdict uint32, out []byte, err error)

// Forwarded runs p and demands that it is redirected, whole and with right sums; it returns what leaves.
func (r Runner) Forwarded(t testing.TB, p Packet) Packet {
	t.Helper()
	verdict, out, err := r(p.Bytes())
	if err != nil {
		t.Fatalf("run %v > %v flags %#x: %v", p.Src, p.Dst, p.Flags, err)
	}
	if verdict != Redirect {
		t.Fatalf("%v > %v flags %#x: verdict is %d, want redirect", p.Src, p.Dst, p.Flags, verdict)
	}
	q, err := Parse(out)
	if err != nil {
		t.Fatalf("%v > %v flags %#x: %v", p.Src, p.Dst, p.Flags, err)
	}
	if q.Seq != p.Seq || q.Ack != p.Ack || q.Flags != p.Flags || !bytes.Equal(q.Payload, p.Payload) {
		t.Fatalf("%v > %v flags %#x: more than addresses changed: %+v became %+v", p.Src, p.Dst, p.Flags, p, q)
	}
	return q
}

// Untouched runs a frame and demands the verdict and that not one byte of the frame changed.
func (r Runner) Untouched(t testing.TB, frame []byte, want uint32) {
	t.Helper()
	verdict, out, err := r(frame)
	if err != nil {
		t.Fatalf("run frame: %v", err)
	}
	if verdict != want {
		t.Fatalf("verdict is %d, want %d", verdict, want)
	}
	if !bytes.Equal(out, frame) {
		t.Fatalf("verdict %d, but the frame changed:\n%x\n%x", verdict, frame, out)
	}
}
