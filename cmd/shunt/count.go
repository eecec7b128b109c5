// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/pkg/request"
	"github.com/shunt-lb/shunt/pkg/tokens"
)

const maxCounted = 1 << 30 // bytes of a text or request

func (e *env) countCommand() *cobra.Command {
	var model, encoding string
	var asRequest bool
	cmd := &cobra.Command{
		Use:   "count [--model M | --encoding E] [FILE]",
		Short: "Count the tokens of a text or of a request",
		Long: `Count prints the number of tokens of a file, or of standard input (- or no file).
With --request the input is the JSON body of an API request, counted as the front end
counts it: texts, roles and tools, with the chat framing. The model comes from --model,
else from the request.`,
		Args: cobra.MaximumNArgs(1),
		RunE: e.run(func(_ *cobra.Command, args []string) error {
			data, err := e.input(args)
			if err != nil {
				return err
			}
			// Everything is encoded: here a person waits, no client.
			counter, err := tokens.New(tokens.Options{MaxBytes: maxCounted, CacheEntries: -1})
			if err != nil {
				return err
			}
			n, err := countTokens(counter, data, model, encoding, asRequest)
			if err != nil {
				return err
			}
			fmt.Fprintln(e.stdout, n.Tokens)
			if n.Estimated {
				fmt.Fprintln(e.stderr, "shunt: the number is an estimate: unbroken runs in the text were cut")
			}
			return nil
		}),
	}
	cmd.Flags().StringVar(&model, "model", "", "count as for this `MODEL`")
	cmd.Flags().StringVar(&encoding, "encoding", "", "count with this `ENCODING`: "+fmt.Sprint(tokens.Encodings()))
	cmd.Flags().BoolVar(&asRequest, "request", false, "the input is a JSON request")
	cmd.MarkFlagsMutuallyExclusive("model", "encoding")
	return cmd
}

func countTokens(counter *tokens.Counter, data []byte, model, encoding string, asRequest bool) (tokens.Count, error) {
	var enc *tokens.Encoder
	if encoding != "" {
		var err error
		if enc, err = counter.Encoding(encoding); err != nil {
			return tokens.Count{}, err
		}
	} else if model != "" || !asRequest {
		enc = counter.For(model)
	}
	if !asRequest {
		return enc.CountBytes(data), nil
	}
	api, err := request.Detect(data)
	if err != nil {
		return tokens.Count{}, fmt.Errorf("read request: %w", err)
	}
	p := request.Acquire()
	defer p.Release()
	facts, err := p.Parse(api, data)
	if err != nil {
		return tokens.Count{}, fmt.Errorf("read request: %w", err)
	}
	if enc != nil {
		return facts.PromptTokensIn(enc), nil
	}
	return facts.PromptTokens(counter), nil
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
