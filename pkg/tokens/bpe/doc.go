// SPDX-License-Identifier: Apache-2.0

// Package bpe counts the tokens of byte-pair encodings: exactly as tiktoken's encode_ordinary and Hugging Face's tokenizers
// do, in time linear in the text, without allocating, and without making the tokens themselves.
//
//	loader := tiktoken_loader.NewOfflineLoader()                      // github.com/pkoukk/tiktoken-go-loader
//	ranks, err := loader.LoadTiktokenBpe("o200k_base.tiktoken")
//	enc, err := bpe.New(ranks, bpe.O200k)
//	n := enc.Count("Hello, world!")
//
//	enc, err = bpe.LoadFile("tokenizer.json")                         // of Llama 3, Qwen 2 and 3, DeepSeek, gpt-oss
//
// # How it counts
//
// A text is split into pieces by hand-written code for each of the patterns, over words of eight bytes where it is ASCII. A
// piece of up to 15 bytes is looked up in a cache of 16,384 pieces that no other call uses at the time, and then among the tokens.
// What is left is merged: the longest token first, and where two neighbours cannot stand next to each other in any encoding, a
// shorter one. Whether two tokens can is found by taking their own merges apart from the last one on. A piece of Chinese or
// other scripts is first taken apart where no merge can cross. So the cost of a piece grows with its length, not its square;
// what is repeated in rulers (----) is looked up in tables of its own.
//
// # What it costs
//
// On one core of an EPYC server that others loaded too, 16 KB of text that was not seen before: 70 to 180 MB/s for English,
// 80 to 240 for code, 50 to 150 for Chinese, 10 to 25 for base64, which is 7 to 35 times tiktoken-go's speed; `make
// bench-tokens` prints the table for the machine at hand. The slowest of some 200,000 texts made to be slow costs 17 times the
// steps of English, by the steps that the tests count, and 8 times its time.
//
// The tables of cl100k_base take 8 MB and 80 to 200 ms of CPU time to build on an idle machine, those of o200k_base 14 MB and
// 200 to 450 ms, beside the reading of the ranks (80 and 200 ms); Encoding.Size tells the size of any. Each call in flight
// uses 400 KB of work space, which is kept for as many calls as there are cores.
//
// # Errors
//
// New and Load return ErrVocabulary for a vocabulary that cannot be counted with in this way, and Load ErrUnsupported for a
// tokenizer file with a part that would change counts in a way that is not known here; both name the part. Counting returns no
// error. Bytes that are not UTF-8 count as U+FFFD each.
//
// Two things are less than exact, and CountCut says so: pieces longer than the bound that it is given, and, where a tokenizer
// file asks for NFC, runs of over 30 combining marks.
package bpe
