// SPDX-License-Identifier: Apache-2.0

package tokens

import (
	"fmt"
	"slices"

	"github.com/shunt-lb/shunt/pkg/tokens/bpe"
)

// LoadFile returns an encoder of a Hugging Face tokenizer.json, with the default options and the path as its name. A file
// that cannot be counted with exactly is refused with an error that names the part; see package bpe.
func LoadFile(path string) (*Encoder, error) {
	c, err := New(Options{Default: path, Files: []string{path}})
	if err != nil {
		return nil, err
	}
	return c.Encoding(path)
}

// addFiles loads o.Files. Models often share a file, and each is read once.
func (c *Counter) addFiles(o Options) error {
	for i, path := range o.Files {
		if slices.Contains(o.Files[:i], path) {
			continue
		}
		if c.encoders[path] != nil {
			return fmt.Errorf("load tokenizer: %q is the name of an encoding: write ./%s", path, path)
		}
		eng, err := bpe.LoadFile(path)
		if err != nil {
			return fmt.Errorf("load tokenizer: %w", err)
		}
		c.encoders[path] = newEncoder(path, eng, o)
	}
	return nil
}
