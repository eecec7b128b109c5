// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"fmt"
	"strconv"
	"strings"
)

// parsePorts reads the kernel's list of ports, "8080,9000-9100"; an empty list is none.
func parsePorts(s string) ([]PortRange, error) {
	if s == "" {
		return nil, nil
	}
	var out []PortRange
	for _, part := range strings.Split(s, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		a, err := strconv.ParseUint(first, 10, 16)
		if err != nil {
			return nil, fmt.Errorf("parse list of ports: %w", err)
		}
		b, err := strconv.ParseUint(last, 10, 16)
		if err != nil {
			return nil, fmt.Errorf("parse list of ports: %w", err)
		}
		if a > b {
			return nil, fmt.Errorf("parse list of ports: %q runs backwards", part)
		}
		out = append(out, PortRange{uint16(a), uint16(b)})
	}
	return out, nil
}
