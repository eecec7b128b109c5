// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"
	"io"
	"mime"
	"mime/multipart"
)

// maxParts bounds the parts of a form that are looked at. Forms that ask for speech or pictures have a dozen.
const maxParts = 256

// formModel returns the field "model" of a form with files, which is how speech and pictures are sent; "" if the body is no
// such form or has no such field. A form that could be read in two ways is an error.
func formModel(contentType, body []byte) (string, *apiError) {
	if !hasMediaType(contentType, "multipart/form-data") {
		return "", nil
	}
	_, params, err := mime.ParseMediaType(string(contentType))
	if err != nil || params["boundary"] == "" {
		return "", nil
	}
	model, found := "", false
	r := multipart.NewReader(bytes.NewReader(body), params["boundary"])
	for range maxParts {
		part, err := r.NextRawPart()
		if err != nil {
			return model, nil
		}
		if part.FormName() != "model" || part.FileName() != "" {
			continue
		}
		value, err := io.ReadAll(io.LimitReader(part, 1<<10))
		switch {
		case err != nil:
			return "", nil
		case found:
			return "", badRequest("duplicate_key", "The request's form has more than one field model.")
		}
		model, found = string(value), true
	}
	return "", badRequest("too_many_parts", "The request's form has too many fields.")
}
