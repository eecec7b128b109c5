// SPDX-License-Identifier: Apache-2.0

// Command shunt balances the load of LLM inference servers: the daemon and its tool.
//
// Exit codes: 0 done; 1 not done (the message says why and what to do); 2 wrong usage; 3 the daemon cannot be reached.
package main

import (
	"context"
	"os"

	"github.com/shunt-lb/shunt/pkg/app"
)

// version is set when a release is built (-ldflags "-X main.version=...").
var version = "dev"

func main() {
	e := &env{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, getenv: os.Getenv, serve: app.Run}
	os.Exit(e.main(context.Background(), os.Args[1:]))
}
