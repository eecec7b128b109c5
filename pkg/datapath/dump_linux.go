// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
)

// Dump writes the entries of one pinned map of an instance as `bpftool map dump pinned ...` prints them, for machines
// without bpftool. Keep selects entries by their text, nil takes all. It needs no running daemon; hash maps that
// change meanwhile may show an entry twice or not at all. Per-CPU maps and the ring of events are refused.
func Dump(w io.Writer, bpffs, instance, name string, keep func(entry string) bool) error {
	instance, err := checkInstance(instance)
	if err != nil {
		return err
	}
	if bpffs, err = findBPFFS(bpffs); err != nil {
		return err
	}
	spec, err := loadSteer()
	if err != nil {
		return fmt.Errorf("read program: %w", err)
	}
	ms := spec.Maps[name]
	if ms == nil || ms.Key == nil || ms.Value == nil || ms.Type != ebpf.Hash && ms.Type != ebpf.Array {
		return fmt.Errorf("dump map %q: no hash or array of that name", name)
	}
	m, err := ebpf.LoadPinnedMap(filepath.Join(mapDir(filepath.Join(bpffs, pinRoot, instance), abi), name), &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return fmt.Errorf("open map %s: %w", name, err)
	}
	defer m.Close()

	var out bytes.Buffer
	var key, value []byte
	it := m.Iterate()
	for n := 0; it.Next(&key, &value); {
		var e bytes.Buffer
		e.WriteString("{\n        \"key\": ")
		dumpValue(&e, ms.Key, key, 2)
		e.WriteString(",\n        \"value\": ")
		dumpValue(&e, ms.Value, value, 2)
		e.WriteString("\n    }")
		if keep != nil && !keep(e.String()) {
			continue
		}
		out.WriteString([]string{"[", ","}[min(n, 1)])
		out.Write(e.Bytes())
		n++
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("read map %s: %w", name, err)
	}
	if out.Len() == 0 {
		out.WriteString("[]\n")
	} else {
		out.WriteString("\n]\n")
	}
	_, err = out.WriteTo(w)
	return err
}

// dumpValue writes one value of type t in bpftool's form: characters as text, enums by name.
func dumpValue(w *bytes.Buffer, t btf.Type, b []byte, depth int) {
	t = btf.UnderlyingType(t)
	switch t := t.(type) {
	case *btf.Struct:
		w.WriteByte('{')
		for i, m := range t.Members {
			if i > 0 {
				w.WriteByte(',')
			}
			indent(w, depth+1)
			fmt.Fprintf(w, "%q: ", m.Name)
			size, err := btf.Sizeof(m.Type)
			off := int(m.Offset.Bytes())
			if err != nil || m.BitfieldSize != 0 || off+size > len(b) {
				w.WriteString("null")
				continue
			}
			dumpValue(w, m.Type, b[off:off+size], depth+1)
		}
		indent(w, depth)
		w.WriteByte('}')
	case *btf.Array:
		size, err := btf.Sizeof(t.Type)
		if err != nil || size == 0 || int(t.Nelems)*size > len(b) {
			w.WriteString("null")
			return
		}
		if e, ok := btf.UnderlyingType(t.Type).(*btf.Int); ok && size == 1 && e.Name == "char" {
			text, _, _ := bytes.Cut(b[:t.Nelems], []byte{0})
			fmt.Fprintf(w, "%q", text)
			return
		}
		w.WriteByte('[')
		for i := range int(t.Nelems) {
			if i > 0 {
				w.WriteByte(',')
			}
			dumpValue(w, t.Type, b[i*size:(i+1)*size], depth+1)
		}
		indent(w, depth)
		w.WriteByte(']')
	case *btf.Enum:
		v, ok := unsigned(b, int(t.Size))
		i := slices.IndexFunc(t.Values, func(e btf.EnumValue) bool { return e.Value == v })
		if ok && i >= 0 {
			fmt.Fprintf(w, "%q", t.Values[i].Name)
			return
		}
		w.WriteString(strconv.FormatUint(v, 10))
	case *btf.Int:
		v, ok := unsigned(b, int(t.Size))
		switch {
		case !ok:
			w.WriteString("null")
		case t.Encoding == btf.Signed:
			shift := 64 - 8*t.Size
			w.WriteString(strconv.FormatInt(int64(v<<shift)>>shift, 10))
		default:
			w.WriteString(strconv.FormatUint(v, 10))
		}
	default:
		w.WriteString("null")
	}
}

func unsigned(b []byte, size int) (uint64, bool) {
	if size > len(b) || size > 8 {
		return 0, false
	}
	var word [8]byte
	copy(word[:], b[:size])
	return binary.LittleEndian.Uint64(word[:]), true
}

func indent(w *bytes.Buffer, depth int) {
	w.WriteByte('\n')
	for range depth {
		w.WriteString("    ")
	}
}
