// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package proxy

func connectionLimit() int { return 4096 }
