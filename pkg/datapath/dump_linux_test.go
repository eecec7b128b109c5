// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"testing"
)

func TestDumpValue(t *testing.T) {
	spec, err := loadSteer()
	if err != nil {
		t.Fatal(err)
	}
	ms := spec.Maps["shunt_backends"]
	v := steerBackend{
		Addr: [16]uint8{10: 255, 11: 255, 12: 10, 15: 7}, Ifindex: 3, Port: 8000, State: 1,
		Generation: 9, Name: [32]int8{'g', 'p', 'u'},
	}
	raw, err := binary.Append(nil, binary.LittleEndian, v)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	dumpValue(&b, ms.Value, raw, 2)
	var got map[string]any
	if err := json.Unmarshal(b.Bytes(), &got); err != nil {
		t.Fatalf("%v in %s", err, &b)
	}
	for field, want := range map[string]any{"port": 8000.0, "ifindex": 3.0, "state": "SHUNT_STATE_UP", "generation": 9.0, "name": "gpu"} {
		if got[field] != want {
			t.Errorf("%s is %v, want %v", field, got[field], want)
		}
	}
	if addr, ok := got["addr"].([]any); !ok || len(addr) != 16 || addr[12] != 10.0 || addr[15] != 7.0 {
		t.Errorf("addr: %v", got["addr"])
	}

	w := spec.Maps["shunt_weights"]
	raw, err = binary.Append(nil, binary.LittleEndian, steerWeight{L7Tokens: -5, Limit: 1 << 40})
	if err != nil {
		t.Fatal(err)
	}
	b.Reset()
	dumpValue(&b, w.Value, raw, 2)
	if !bytes.Contains(b.Bytes(), []byte(`"l7_tokens": -5,`)) || !bytes.Contains(b.Bytes(), []byte(`"limit": 1099511627776,`)) {
		t.Errorf("weights: %s", &b)
	}
	// A value that is too short says so instead of failing.
	b.Reset()
	dumpValue(&b, w.Value, raw[:12], 2)
	if !bytes.Contains(b.Bytes(), []byte(`"limit": null`)) {
		t.Errorf("short value: %s", &b)
	}
}
