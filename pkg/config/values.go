// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"net/url"
	"reflect"
	"strconv"
	"strings"
	"time"
)

// Size is a number of bytes, written with its unit: 512KiB, 32MiB, 10MB.
type Size int64

var sizeUnits = []struct {
	name string
	n    int64
}{
	{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10},
	{"GB", 1e9}, {"MB", 1e6}, {"KB", 1e3}, {"kB", 1e3}, {"B", 1},
}

// String writes the size with the largest binary unit that divides it.
func (s Size) String() string {
	for _, u := range sizeUnits[:3] {
		if s != 0 && int64(s)%u.n == 0 {
			return strconv.FormatInt(int64(s)/u.n, 10) + u.name
		}
	}
	return strconv.FormatInt(int64(s), 10) + "B"
}

func parseSize(text string) (Size, error) {
	for _, u := range sizeUnits {
		digits, ok := strings.CutSuffix(text, u.name)
		if !ok {
			continue
		}
		n, err := strconv.ParseUint(digits, 10, 63)
		if err != nil || n > uint64(math.MaxInt64/u.n) {
			break
		}
		return Size(int64(n) * u.n), nil
	}
	if _, err := strconv.ParseUint(text, 10, 63); err == nil {
		return 0, fmt.Errorf("%s has no unit: write %sB, %sKiB or %sMiB", text, text, text, text)
	}
	return 0, fmt.Errorf("%q is not a size: write a whole number and its unit, like 512KiB or 32MiB", text)
}

// PortRange is an inclusive range of ports, written 20000-32767. The zero value is no range.
type PortRange struct {
	First, Last uint16
}

// IsZero says whether there is no range.
func (r PortRange) IsZero() bool { return r == PortRange{} }

// Count is the number of ports in the range.
func (r PortRange) Count() int {
	if r.IsZero() {
		return 0
	}
	return int(r.Last) - int(r.First) + 1
}

// Contains says whether port is in the range.
func (r PortRange) Contains(port uint16) bool {
	return !r.IsZero() && r.First <= port && port <= r.Last
}

// Overlaps says whether the ranges share a port.
func (r PortRange) Overlaps(o PortRange) bool {
	return !r.IsZero() && !o.IsZero() && r.First <= o.Last && o.First <= r.Last
}

// String writes the range as the file has it; empty for none.
func (r PortRange) String() string {
	if r.IsZero() {
		return ""
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

func parsePortRange(text string) (PortRange, error) {
	bad := fmt.Errorf("%q is not a range of ports: write FIRST-LAST, like 20000-32767", text)
	a, b, ok := strings.Cut(text, "-")
	if !ok {
		return PortRange{}, bad
	}
	first, err1 := strconv.ParseUint(a, 10, 16)
	last, err2 := strconv.ParseUint(b, 10, 16)
	if err1 != nil || err2 != nil {
		return PortRange{}, bad
	}
	if first < 1024 {
		return PortRange{}, fmt.Errorf("range %s: ports below 1024 are the host's services", text)
	}
	if last < first {
		return PortRange{}, fmt.Errorf("range %s ends before it begins", text)
	}
	return PortRange{uint16(first), uint16(last)}, nil
}

func parseAddrPort(text string) (netip.AddrPort, error) {
	if port, ok := strings.CutPrefix(text, ":"); ok {
		text = "[::]:" + port
	}
	ap, err := netip.ParseAddrPort(text)
	if err != nil {
		return ap, fmt.Errorf("%q is not an address and port: write IP:PORT, like 10.0.0.1:8080 or [2001:db8::1]:8080", text)
	}
	if ap.Addr().Zone() != "" {
		return ap, fmt.Errorf("%q has a zone: only addresses without one can be used", text)
	}
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()), nil
}

func parseAddr(text string) (netip.Addr, error) {
	a, err := netip.ParseAddr(text)
	if err != nil {
		if _, err := netip.ParseAddrPort(text); err == nil {
			return a, fmt.Errorf("%q has a port: write the address alone", text)
		}
		return a, fmt.Errorf("%q is not an IP address", text)
	}
	if a.Zone() != "" {
		return a, fmt.Errorf("%q has a zone: only addresses without one can be used", text)
	}
	return a.Unmap(), nil
}

func parsePrefix(text string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(text); err == nil && a.Zone() == "" {
		a = a.Unmap()
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(text)
	if err != nil {
		return p, fmt.Errorf("%q is not a range of addresses: write an address or a CIDR, like 10.0.0.0/24", text)
	}
	if p.Addr().Is4In6() {
		return p, fmt.Errorf("%q is IPv4 in IPv6: write the IPv4 range", text)
	}
	if p != p.Masked() {
		return p, fmt.Errorf("%s has host bits set: write %s", text, p.Masked())
	}
	return p, nil
}

func parseURL(text string) (*url.URL, error) {
	if !strings.Contains(text, "://") {
		return nil, fmt.Errorf("%q has no scheme: write http://%s", text, text)
	}
	u, err := url.Parse(text)
	if err != nil {
		// The text is left out: it may hold a password.
		var ue *url.Error
		if errors.As(err, &ue) {
			err = ue.Err
		}
		return nil, fmt.Errorf("is not a URL: %w", err)
	}
	u.Scheme = strings.ToLower(u.Scheme)
	switch {
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, fmt.Errorf("scheme %q is not http or https", u.Scheme)
	case u.User != nil:
		return nil, errors.New("holds a user or password: remove it")
	case u.RawQuery != "" || u.ForceQuery:
		return nil, errors.New("holds a query: remove everything from the ?")
	case u.Fragment != "" || strings.HasSuffix(text, "#"):
		return nil, errors.New("holds a fragment: remove everything from the #")
	case u.Hostname() == "":
		return nil, errors.New("names no host")
	case strings.HasSuffix(u.Host, ":"):
		return nil, errors.New("names no port after the colon")
	case strings.Contains(u.Hostname(), "%"):
		return nil, errors.New("holds an address with a zone: only addresses without one can be used")
	case strings.ContainsAny(u.Hostname(), " \t\"'<>\\^`{|}*,;!$&()=~+"):
		return nil, fmt.Errorf("%q is not a host", u.Hostname())
	}
	if p := u.Port(); p != "" {
		if n, err := strconv.ParseUint(p, 10, 16); err != nil || n == 0 {
			return nil, fmt.Errorf("port %s is not between 1 and 65535", p)
		}
	}
	u.Host = strings.ToLower(u.Host)
	u.Path, u.RawPath = strings.TrimRight(u.Path, "/"), ""
	return u, nil
}

var (
	typeDuration = reflect.TypeFor[time.Duration]()
	typeSize     = reflect.TypeFor[Size]()
	typePorts    = reflect.TypeFor[PortRange]()
	typeAddrPort = reflect.TypeFor[netip.AddrPort]()
	typeAddr     = reflect.TypeFor[netip.Addr]()
	typePrefix   = reflect.TypeFor[netip.Prefix]()
	typeURL      = reflect.TypeFor[*url.URL]()
)

// isScalar says whether a value of the type is one word in the file.
func isScalar(t reflect.Type) bool {
	switch t {
	case typePorts, typeAddrPort, typeAddr, typePrefix, typeURL:
		return true
	}
	switch t.Kind() {
	case reflect.Struct, reflect.Slice, reflect.Map:
		return false
	}
	return true
}

// parseScalar reads text into a value of type t. It is the one place that knows how values are spelled.
func parseScalar(t reflect.Type, text string) (reflect.Value, error) {
	var x any
	var err error
	switch t {
	case typeDuration:
		x, err = parseDuration(text)
	case typeSize:
		x, err = parseSize(text)
	case typePorts:
		x, err = parsePortRange(text)
	case typeAddrPort:
		x, err = parseAddrPort(text)
	case typeAddr:
		x, err = parseAddr(text)
	case typePrefix:
		x, err = parsePrefix(text)
	case typeURL:
		x, err = parseURL(text)
	default:
		switch t.Kind() {
		case reflect.String:
			x = text
		case reflect.Bool:
			if text != "true" && text != "false" {
				err = fmt.Errorf("%q is not true or false", text)
			}
			x = text == "true"
		case reflect.Int, reflect.Int64:
			n, e := strconv.ParseInt(text, 10, 64)
			if e != nil {
				err = fmt.Errorf("%q is not a whole number", text)
			}
			return reflect.ValueOf(n).Convert(t), err
		case reflect.Float64:
			f, e := strconv.ParseFloat(text, 64)
			if e != nil || math.IsNaN(f) || math.IsInf(f, 0) {
				err = fmt.Errorf("%q is not a number", text)
			}
			x = f
		default:
			panic("config: no spelling for " + t.String())
		}
	}
	return reflect.ValueOf(x), err
}

func parseDuration(text string) (time.Duration, error) {
	if _, err := strconv.ParseFloat(text, 64); err == nil {
		return 0, fmt.Errorf("%s has no unit: write %ss, %sms or %sm", text, text, text, text)
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		return 0, fmt.Errorf("%q is not a duration: write a number and its unit, like 500ms, 2s or 5m", text)
	}
	return d, nil
}

// formatScalar is the inverse of parseScalar; empty for a value that stands for nothing.
func formatScalar(v reflect.Value) string {
	switch x := v.Interface().(type) {
	case time.Duration:
		return formatDuration(x)
	case *url.URL:
		if x == nil {
			return ""
		}
		return x.String()
	case netip.AddrPort:
		if !x.IsValid() {
			return ""
		}
		return x.String()
	case netip.Addr:
		if !x.IsValid() {
			return ""
		}
		return x.String()
	}
	return fmt.Sprint(v.Interface())
}

// formatDuration writes 5m, not 5m0s.
func formatDuration(d time.Duration) string {
	s := d.String()
	if d != 0 && strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// inRange checks v against a range tag "LEAST..GREATEST".
func inRange(v reflect.Value, tag string) error {
	lo, hi, _ := strings.Cut(tag, "..")
	low, err1 := parseScalar(v.Type(), lo)
	high, err2 := parseScalar(v.Type(), hi)
	if err1 != nil || err2 != nil {
		panic("config: bad range tag " + tag)
	}
	if number(v) < number(low) || number(v) > number(high) {
		return fmt.Errorf("%s is not between %s and %s", formatScalar(v), lo, hi)
	}
	return nil
}

func number(v reflect.Value) float64 {
	if v.CanFloat() {
		return v.Float()
	}
	return float64(v.Int())
}
