// SPDX-License-Identifier: Apache-2.0

// Package tokens counts the tokens of texts, with OpenAI's public vocabularies or with a model's own tokenizer file.
//
// # What a count means
//
// A count is what tiktoken's encode_ordinary returns: special tokens in a text, such as <|endoftext|>, are counted as
// the plain text that they are. It weighs a request for routing. For a model with another tokenizer than the two
// vocabularies here (cl100k_base and o200k_base; o200k_harmony counts as o200k_base, from which it differs in special
// tokens only) it is an estimate even where Count.Estimated is false, unless Options.Files names the model's own
// tokenizer.json: then the count is what Hugging Face's tokenizers return, with added tokens taken as text.
//
// The vocabularies are part of the binary. Nothing is downloaded, and no cache directory is read. Each vocabulary's
// tables are built once in a process, on first use by New, and shared by every Counter: 8 MB of heap and about 0.3 s of CPU
// time for cl100k_base, 14 MB and 0.6 s for o200k_base, and up to 14 MB and a second for a tokenizer file, which each Counter has
// for its own. Everything here is safe for concurrent use. Package bpe does the counting, and can be used without this one.
//
// # Bounds
//
// The work for one call of CountTexts or CountAll, that is for one request, is bounded whatever the text is:
//
//   - A piece, that is a run that the vocabulary's pattern does not split (letters, white space or symbols without an end), is
//     cut every MaxRun bytes. The cost of a piece grows with its length, not its square, and so this is the last guard only.
//     A cut can add up to four tokens where it falls, or hide one: on some fifty kinds of runs (200 KB each, both encodings, cut at
//     the default of 64 KiB) the count was off by less than 0.15 % on every one; the most on box-drawing lines, of which a token
//     holds a whole line.
//   - At most MaxBytes are encoded in a call; each text is charged a small extra for its own overhead. Beyond that,
//     blocks of 4 KiB are taken at even distances over all the texts, and each further block is estimated by its kind, told by
//     its first 256 bytes: prose, code, JSON, digits, text without spaces, and kinds of scripts. It counts as the blocks
//     of its kind that were encoded, else as its kind did in earlier calls. On a megabyte of 17 kinds of text, with a quarter
//     of it encoded, that was off by 0.7 % at most.
//   - With LargeBytes, calls that have more than that to encode are counted a few at a time, so that they cannot take every
//     core from the others. One that finds no place soon is estimated as a whole, by the kinds of its blocks: on the same
//     texts within 5 % on most, and within 17 % on emoji and on characters at random.
//   - Texts counted before are remembered in a table of fixed size, keyed by a hash with a random seed of the encoder, and
//     cost nothing of these bounds. So a long conversation, sent anew with each turn, is counted in full as it grows.
//
// In the first three cases Count.Estimated is true. Whether a long text is estimated or counted may thus depend on
// what was counted before it.
//
// # JSON
//
// CountTexts takes texts as they stand in a JSON body, with their escapes, and remembers them by those very bytes: a text
// that comes again is hashed, and neither decoded nor copied.
//
// # The engines' own tokens
//
// Calibration learns by which factor an engine's counts differ from ours, where the vocabulary is only a stand-in for the
// served model's.
//
// # Errors
//
// New and Counter.Encoding return ErrUnknownEncoding, with the names that exist, for a name that does not exist. New
// returns an error too for a pattern of model names that it cannot read. Counting returns no error: an unknown model gets
// the default encoding, and bytes that are not UTF-8 count as U+FFFD.
package tokens
