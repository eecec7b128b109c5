// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"encoding/binary"
	"io"
)

// BlobReader returns n bytes that depend on the seed and the offset only, so that both ends of a download can know
// what it must contain.
func BlobReader(seed uint64, n int64) io.Reader { return &blob{seed: seed, n: n} }

type blob struct {
	seed   uint64
	off, n int64
}

func (b *blob) Read(p []byte) (int, error) {
	if b.off >= b.n {
		return 0, io.EOF
	}
	p = p[:min(int64(len(p)), b.n-b.off)]
	var w [8]byte
	for i := 0; i < len(p); {
		binary.LittleEndian.PutUint64(w[:], mix(b.seed^uint64((b.off+int64(i))/8)*0x9e3779b97f4a7c15))
		i += copy(p[i:], w[(b.off+int64(i))%8:])
	}
	b.off += int64(len(p))
	return len(p), nil
}
