// SPDX-License-Identifier: Apache-2.0

package tokens

import (
	"sync"

	"github.com/pkoukk/tiktoken-go"
	tiktokenloader "github.com/pkoukk/tiktoken-go-loader"
)

// engine is the vocabulary's own count of a text. Its cost may grow with the square of the longest piece in the text, so
// callers hand it cut text only.
type engine interface {
	count(text string) int
}

// tiktokenEngine is the reference: exact, and slow (2 to 6 MB/s on one core, 1.2 allocations a byte).
type tiktokenEngine struct{ t *tiktoken.Tiktoken }

// count uses EncodeOrdinary only: Encode panics on a text that spells a special token, or rescans it each time.
func (e tiktokenEngine) count(text string) int { return len(e.t.EncodeOrdinary(text)) }

// offlineOnce replaces the library's loader, which would download over HTTP without a timeout or trust files under the
// shared temporary directory.
var offlineOnce = sync.OnceFunc(func() { tiktoken.SetBpeLoader(tiktokenloader.NewOfflineLoader()) })

// The library builds its tables anew in each call, so they are kept here.
var (
	loadCL100k = sync.OnceValues(func() (engine, error) { return buildEngine(CL100kBase) })
	loadO200k  = sync.OnceValues(func() (engine, error) { return buildEngine(O200kBase) })
)

func loadEngine(name string) (engine, error) {
	if name == CL100kBase {
		return loadCL100k()
	}
	return loadO200k()
}

func buildEngine(name string) (engine, error) {
	offlineOnce()
	t, err := tiktoken.GetEncoding(name)
	if err != nil {
		return nil, err
	}
	return tiktokenEngine{t}, nil
}
