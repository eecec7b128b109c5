// SPDX-License-Identifier: Apache-2.0

// Package bpe counts the tokens of byte-pair encodings, exactly and without allocating.
package bpe
