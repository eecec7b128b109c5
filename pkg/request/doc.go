// SPDX-License-Identifier: Apache-2.0

// Package request reads from a request's bytes what routing needs: the model, whether the answer is a stream, how much
// output may come, what names the conversation, and the text that the model will have to read.
//
// The body is never changed and never encoded anew; it goes to the backend as it came. Parse first goes over it without
// recursion, checks it strictly (RFC 8259) and notes where arrays and objects end, then walks those members that hold the
// prompt.
//
// # Errors
//
// Parse and Detect return an error for what no backend would serve, or what two backends would read in two ways. All wrap
// one of:
//
//   - ErrSyntax: not JSON, or not one object. A byte-order mark, UTF-16, NaN, trailing commas and raw control characters
//     in strings are syntax errors; bytes that are not UTF-8 within strings are not.
//   - ErrDepth: arrays and objects nested deeper than 512, the body's own object counted.
//   - ErrDuplicateKey: a member that this package or a backend routes by, twice at the top level. Escaped spellings
//     ("mo\u0064el") and other cases ("Model", which Go backends read as "model") are the same key. Members below the top
//     level may repeat; as for most backends, the last one counts.
//
// Messages carry a position or a key's name, never a part of the body. Shapes that the APIs do not know are never an error:
// what can be read as text is counted, the rest is ignored.
//
// # Limits
//
// A member with more than 131,072 arrays and objects is not walked: it counts as one token for four of its bytes, and
// Count.Estimated says so; so do the texts of a request beyond 65,536. Images are counted by the size in their header, audio,
// video and files by flat figures, and no base64 is ever read as text (see Facts.PromptTokens). What a backend adds by itself,
// such as the hidden prompt of a hosted tool, earlier turns behind previous_response_id, or a chat template's own system
// prompt, is not counted, and neither is a schema in response_format; where the body shows that there is such a thing,
// Count.Estimated is true.
//
// Each value of the body is looked at twice at most, whatever its depth, and texts are handed to the counter as they stand,
// with their escapes: one that was counted before is neither decoded nor copied.
package request
