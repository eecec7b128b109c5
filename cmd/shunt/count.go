// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/pkg/request"
	"github.com/shunt-lb/shunt/pkg/tokens"
)

const maxCounted = 1 << 30 // bytes of a text or request

// countFlags are what a count goes by.
type countFlags struct {
	model, encoding, tokenizer, family string
	request, json                      bool
}

func (e *env) countCommand() *cobra.Command {
	var o countFlags
	cmd := &cobra.Command{
		Use:   "count [--model M | --encoding E | --tokenizer FILE] [FILE]",
		Short: "Count the tokens of a text or of a request",
		Long: `Count prints the number of tokens of a file, or of standard input (- or no file).
With --request the input is the JSON body of an API request, counted as the front end
counts it: texts, roles, tools and images, with the chat framing of the model's family. The
model comes from --model, else from the request. With --json the parts of the number are
printed too.`,
		Args: cobra.MaximumNArgs(1),
		RunE: e.run(func(_ *cobra.Command, args []string) error {
			data, err := e.input(args)
			if err != nil {
				return err
			}
			c, err := count(data, o)
			if err != nil {
				return err
			}
			if o.json {
				enc := json.NewEncoder(e.stdout)
				enc.SetIndent("", "  ")
				return enc.Encode(c)
			}
			fmt.Fprintln(e.stdout, c.Tokens)
			if c.Estimated {
				fmt.Fprintln(e.stderr, "shunt: the number is an estimate: "+c.reason)
			}
			return nil
		}),
	}
	f := cmd.Flags()
	f.StringVar(&o.model, "model", "", "count as for this `MODEL`")
	f.StringVar(&o.encoding, "encoding", "", "count with this `ENCODING`: "+fmt.Sprint(tokens.Encodings()))
	f.StringVar(&o.tokenizer, "tokenizer", "", "count with this Hugging Face tokenizer.json `FILE`")
	f.StringVar(&o.family, "family", "", "frame a request as this `FAMILY` of models does: "+fmt.Sprint(request.Families()))
	f.BoolVar(&o.request, "request", false, "the input is a JSON request")
	f.BoolVar(&o.json, "json", false, "print JSON, with the parts of a request")
	cmd.MarkFlagsMutuallyExclusive("model", "encoding")
	cmd.MarkFlagsMutuallyExclusive("tokenizer", "encoding")
	return cmd
}

// counted is what --json prints.
type counted struct {
	Tokens    int            `json:"tokens"`
	Estimated bool           `json:"estimated"`
	Encoding  string         `json:"encoding"`
	Model     string         `json:"model,omitempty"`
	API       string         `json:"api,omitempty"`
	Family    string         `json:"family,omitempty"`
	Parts     *request.Parts `json:"parts,omitempty"`

	reason string // why it is an estimate
}

func count(data []byte, o countFlags) (counted, error) {
	// Everything is encoded: here a person waits, no client.
	opts := tokens.Options{MaxBytes: maxCounted, CacheEntries: -1}
	if o.tokenizer != "" {
		opts.Files, o.encoding = []string{o.tokenizer}, o.tokenizer
	}
	counter, err := tokens.New(opts)
	if err != nil {
		return counted{}, err
	}
	encoder := func(model string) (*tokens.Encoder, error) {
		if o.encoding != "" {
			return counter.Encoding(o.encoding)
		}
		return counter.For(model), nil
	}
	if !o.request {
		enc, err := encoder(o.model)
		if err != nil {
			return counted{}, err
		}
		n := enc.CountBytes(data)
		return counted{Tokens: n.Tokens, Estimated: n.Estimated, Encoding: enc.Name(), Model: o.model,
			reason: "unbroken runs in the text were cut"}, nil
	}
	api, err := request.Detect(data)
	if err != nil {
		return counted{}, fmt.Errorf("read request: %w", err)
	}
	p := request.Acquire()
	defer p.Release()
	facts, err := p.Parse(api, data)
	if err != nil {
		return counted{}, fmt.Errorf("read request: %w", err)
	}
	model := o.model
	if model == "" {
		model = facts.Model
	}
	enc, err := encoder(model)
	if err != nil {
		return counted{}, err
	}
	family := request.FamilyOf(model)
	if o.family != "" {
		var ok bool
		if family, ok = request.ParseFamily(o.family); !ok {
			return counted{}, fmt.Errorf("unknown family %q (known: %v)", o.family, request.Families())
		}
	}
	parts := facts.Parts(enc, family, model)
	n := parts.Count()
	return counted{Tokens: n.Tokens, Estimated: n.Estimated, Encoding: enc.Name(), Model: model, API: api.String(), Family: family.String(),
		Parts: &parts, reason: "it holds media, more than can be walked, something that only the server knows, or unbroken runs that were cut"}, nil
}

// input reads the file that the arguments name, or standard input.
func (e *env) input(args []string) ([]byte, error) {
	r := e.stdin
	if len(args) == 1 && args[0] != "-" {
		f, err := os.Open(args[0])
		if err != nil {
			return nil, fmt.Errorf("read input: %w", err)
		}
		defer f.Close()
		r = f
	}
	data, err := io.ReadAll(io.LimitReader(r, maxCounted+1))
	if err != nil {
		return nil, fmt.Errorf("read input: %w", err)
	}
	if len(data) > maxCounted {
		return nil, fmt.Errorf("read input: more than %d bytes", maxCounted)
	}
	return data, nil
}
