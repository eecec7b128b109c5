// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"strings"
	"testing"
)

func TestFormModel(t *testing.T) {
	field := func(head, value string) string {
		return "--b\r\nContent-Disposition: " + head + "\r\n\r\n" + value + "\r\n"
	}
	for _, tt := range []struct {
		name, contentType, body string
		model, code             string
	}{
		{"plain", `multipart/form-data; boundary=b`, field(`form-data; name="model"`, "m") + "--b--\r\n", "m", ""},
		{"quoted boundary", `Multipart/Form-Data; charset=utf-8; boundary="b"`, field(`form-data; name=model`, "m") + "--b--\r\n", "m", ""},
		{"no end", `multipart/form-data; boundary=b`, field(`form-data; name="model"`, "m"), "", ""},
		{"a file of that name", `multipart/form-data; boundary=b`, field(`form-data; name="model"; filename="x"`, "m") + "--b--\r\n", "", ""},
		{"other type", `multipart/mixed; boundary=b`, field(`form-data; name="model"`, "m") + "--b--\r\n", "", ""},
		{"no boundary", `multipart/form-data`, field(`form-data; name="model"`, "m") + "--b--\r\n", "", ""},
		{"no type", ``, field(`form-data; name="model"`, "m") + "--b--\r\n", "", ""},
		{"twice", `multipart/form-data; boundary=b`, field(`form-data; name="model"`, "m") + field(`form-data; name="model"`, "m") + "--b--\r\n", "", "duplicate_key"},
		{"empty, then another", `multipart/form-data; boundary=b`, field(`form-data; name="model"`, "") + field(`form-data; name="model"`, "m") + "--b--\r\n", "", "duplicate_key"},
		{"too many", `multipart/form-data; boundary=b`, strings.Repeat(field(`form-data; name="x"`, ""), maxParts) + "--b--\r\n", "", "too_many_parts"},
		{"long", `multipart/form-data; boundary=b`, field(`form-data; name="model"`, strings.Repeat("m", 5000)) + "--b--\r\n", strings.Repeat("m", 1024), ""},
	} {
		model, e := formModel([]byte(tt.contentType), []byte(tt.body))
		code := ""
		if e != nil {
			code = e.code
		}
		if model != tt.model || code != tt.code {
			t.Errorf("%s: %q %q, want %q %q", tt.name, model, code, tt.model, tt.code)
		}
	}
}

func FuzzFormModel(f *testing.F) {
	f.Add("multipart/form-data; boundary=b", []byte("--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b--\r\n"))
	f.Fuzz(func(t *testing.T, contentType string, body []byte) {
		if model, e := formModel([]byte(contentType), body); model != "" && (e != nil || !strings.Contains(string(body), model)) {
			t.Errorf("model %q, error %v of %q", model, e, body)
		}
	})
}
