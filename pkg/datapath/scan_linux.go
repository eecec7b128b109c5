// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// scan calls fn for the entries of a hash map, by batches. Entries that come or go meanwhile may be missed or seen
// twice.
func scan[K, V any](m *ebpf.Map, fn func(K, *V)) error {
	size := min(int(m.MaxEntries()), 4096)
	keys, values := make([]K, size), make([]V, size)
	var cursor ebpf.MapBatchCursor
	for left := 2 * int(m.MaxEntries()); left > 0; {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			if errors.Is(err, unix.ENOSPC) { // a bucket with more entries than the batch
				size *= 2
				keys, values = make([]K, size), make([]V, size)
				continue
			}
			return fmt.Errorf("read map %s: %w", m, err)
		}
		for i := range n {
			fn(keys[i], &values[i])
		}
		if err != nil || n == 0 {
			return nil
		}
		left -= n
	}
	return nil
}
