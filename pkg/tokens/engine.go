// SPDX-License-Identifier: Apache-2.0

package tokens

import (
	"sync"

	"github.com/pkoukk/tiktoken-go"
	tiktokenloader "github.com/pkoukk/tiktoken-go-loader"

	"github.com/shunt-lb/shunt/pkg/tokens/bpe"
)

// engine is the vocabulary's own count of a text, with pieces cut every maxRun bytes; cut says that there was such a piece.
type engine interface {
	CountCut(text string, maxRun int) (n int, cut bool)
}

// The tables are built on first use and shared by the whole process.
var (
	loadCL100k = sync.OnceValues(func() (*bpe.Encoding, error) { return buildEngine(CL100kBase, bpe.CL100k) })
	loadO200k  = sync.OnceValues(func() (*bpe.Encoding, error) { return buildEngine(O200kBase, bpe.O200k) })
)

func loadEngine(name string) (*bpe.Encoding, error) {
	if name == CL100kBase {
		return loadCL100k()
	}
	return loadO200k()
}

func buildEngine(name string, p bpe.Pattern) (*bpe.Encoding, error) {
	// The library's own loader would download over HTTP without a timeout, or trust files in the shared temporary directory.
	var loader tiktoken.BpeLoader = tiktokenloader.NewOfflineLoader()
	ranks, err := loader.LoadTiktokenBpe(name + ".tiktoken")
	if err != nil {
		return nil, err
	}
	return bpe.New(ranks, p)
}
