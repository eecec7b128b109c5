// SPDX-License-Identifier: Apache-2.0

package datapath

//go:generate go tool bpf2go -target bpfel -output-stem steer -type event -type trace -type shunt_sizes -type shunt_reason -type shunt_flow_flags -type shunt_pin_flags -type shunt_backend_flags steer ../../bpf/steer.bpf.c -- -I../../bpf/include -I../../bpf/third_party -mcpu=v3 -O2 -g -Wall -Werror
//go:generate go tool bpf2go -target bpfel -output-stem bench -output-suffix _test bench ../../bpf/bench.bpf.c -- -I../../bpf/third_party -mcpu=v3 -O2 -g -Wall -Werror
