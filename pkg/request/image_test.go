// SPDX-License-Identifier: Apache-2.0

package request

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"image"
	"image/gif"
	"image/jpeg"
	"image/png"
	"strings"
	"testing"
)

var formats = []string{"PNG", "JPEG", "JPEG of a camera", "GIF", "WebP", "lossless WebP", "extended WebP"}

// pictureOf returns a picture of a size.
func pictureOf(t testing.TB, format string, w, h int) []byte {
	t.Helper()
	img := image.NewGray(image.Rect(0, 0, w, h))
	var b bytes.Buffer
	encode := func(err error) []byte {
		if err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	riff := func(kind string, chunk []byte) []byte {
		b := append([]byte("RIFF\x00\x00\x00\x00WEBP"+kind), 0, 0, 0, 0)
		return append(append(b, chunk...), make([]byte, 40)...)
	}
	le := binary.LittleEndian
	switch format {
	case "PNG":
		return encode(png.Encode(&b, img))
	case "GIF":
		return encode(gif.Encode(&b, img, nil))
	case "WebP":
		return riff("VP8 ", le.AppendUint16(le.AppendUint16([]byte{0, 0, 0, 0x9d, 0x01, 0x2a}, uint16(w)|0x4000), uint16(h)))
	case "lossless WebP":
		return riff("VP8L", le.AppendUint32([]byte{0x2f}, uint32(w-1)|uint32(h-1)<<14|1<<28))
	case "extended WebP":
		return riff("VP8X", []byte{0, 0, 0, 0, byte(w - 1), byte((w - 1) >> 8), byte((w - 1) >> 16), byte(h - 1), byte((h - 1) >> 8), byte((h - 1) >> 16)})
	}
	file := encode(jpeg.Encode(&b, img, nil))
	if format == "JPEG" {
		return file
	}
	// As a camera writes it: a thumbnail within the notes, a colour profile, fill bytes, then the frame.
	camera := append([]byte(nil), file[:2]...)
	for _, m := range []byte{0xe1, 0xe2, 0xfe} {
		camera = append(camera, 0xff, 0xff, m, 0xff, 0x01)
		camera = append(camera, bytes.Repeat([]byte("\xff\xd8\xff\xc0thumbnail"), 6000)[:0xff01-2]...)
	}
	return append(camera, file[2:]...)
}

func TestHeaderSize(t *testing.T) {
	for _, size := range [][2]int{{1, 1}, {640, 480}, {300, 1029}, {2000, 3}} {
		for _, name := range formats {
			file := pictureOf(t, name, size[0], size[1])
			for _, enc := range []*base64.Encoding{base64.StdEncoding, base64.RawStdEncoding, base64.URLEncoding} {
				w, h := headerSize([]byte(enc.EncodeToString(file)))
				if w != size[0] || h != size[1] {
					t.Errorf("%s: got %d by %d, want %v", name, w, h, size)
				}
			}
			for n := range min(len(file), 60) { // cut off anywhere
				w, h := headerSize([]byte(base64.StdEncoding.EncodeToString(file[:n])))
				if (w != size[0] || h != size[1]) && (w != 0 || h != 0) {
					t.Errorf("%s: got %d by %d from %d bytes", name, w, h, n)
				}
			}
		}
	}
	for _, s := range []string{"", "A", "====", "!!!!", strings.Repeat("/9j/", 100_000), strings.Repeat("/////", 1000)} {
		if w, h := headerSize([]byte(s)); w != 0 || h != 0 {
			t.Errorf("%.20q: got %d by %d", s, w, h)
		}
	}
}

func FuzzHeaderSize(f *testing.F) {
	for _, format := range formats {
		file := pictureOf(f, format, 33, 44)
		f.Add(file[:min(len(file), 300)])
	}
	f.Fuzz(func(t *testing.T, file []byte) {
		w, h := headerSize([]byte(base64.StdEncoding.EncodeToString(file)))
		if w < 0 || h < 0 {
			t.Fatalf("%d by %d", w, h)
		}
		// Where Go's own decoders read a header, it must be the same.
		if c, format, err := image.DecodeConfig(bytes.NewReader(file)); err == nil && format != "gif" && w != 0 && (c.Width != w || c.Height != h) {
			t.Fatalf("%s: %d by %d, want %d by %d", format, w, h, c.Width, c.Height)
		}
		headerSize(file) // as if it were base64
	})
}

func TestImages(t *testing.T) {
	url := func(w, h int, format string) string {
		return "data:image/x;base64," + base64.StdEncoding.EncodeToString(pictureOf(t, format, w, h))
	}
	image := func(u, detail string) string {
		return `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"` + u + `","detail":"` + detail + `"}}]}]}`
	}
	anthropic := func(w, h int) string {
		return `{"messages":[{"role":"user","content":[{"type":"image","source":{"type":"base64","media_type":"image/png","data":"` +
			strings.TrimPrefix(url(w, h, "PNG"), "data:image/x;base64,") + `"}}]}]}`
	}
	for _, tc := range []struct {
		name, model, body string
		want              int
	}{
		// The examples of OpenAI's documentation.
		{"1024 x 1024, high", "gpt-4o", image(url(1024, 1024, "PNG"), "high"), 765},
		{"2048 x 4096, high", "gpt-4o", image(url(2048, 4096, "WebP"), "high"), 1105},
		{"4096 x 8192, low", "gpt-4o", image(url(4096, 8192, "extended WebP"), "low"), 85},
		{"small, auto", "gpt-4o", image(url(100, 100, "WebP"), "auto"), 255},
		{"escaped slashes", "gpt-4o", image(strings.ReplaceAll(url(513, 400, "JPEG of a camera"), "/", `\/`), "high"), 425},
		{"by address", "gpt-4o", image("https://example.com/x.png", "high"), 765},
		{"no picture", "gpt-4o", image("data:image/png;base64,AAAA", "high"), 765},
		{"not base64", "gpt-4o", image("data:image/svg+xml,%3Csvg%3E", "high"), 765},
		{"mini", "openai/gpt-4o-mini-2024-07-18", image(url(100, 100, "PNG"), "low"), 2833},
		{"mini, high", "gpt-4o-mini", image(url(100, 100, "PNG"), "high"), 8500},
		{"patches", "gpt-4.1-mini", image(url(320, 320, "PNG"), "high"), 162},
		{"patches, many", "gpt-5-nano", image(url(4000, 4000, "WebP"), "high"), 3779},
		{"reasoning", "o3", image(url(100, 100, "PNG"), ""), 225},
		{"Claude", "claude-sonnet-4", anthropic(1000, 750), 1000},
		{"Claude, large", "claude-sonnet-4", anthropic(1568, 1568), 1600},
		{"Qwen", "Qwen/Qwen2.5-VL-7B-Instruct", image(url(280, 560, "PNG"), "low"), 202},
		{"Gemma", "google/gemma-3-27b-it", image(url(280, 560, "PNG"), ""), 258},
	} {
		f := parse(t, Chat, tc.body)
		got := f.Parts(counter().For(""), FamilyOf(tc.model), tc.model)
		if got.Images != tc.want || got.Text != 0 || !got.Estimated {
			t.Errorf("%s: got %+v, want %d", tc.name, got, tc.want)
		}
	}
	many := `{"messages":[{"role":"user","content":[` + strings.Repeat(`{"type":"image_url","image_url":"x"},`, maxPictures+50) + `0]}]}`
	if n := len(parse(t, Chat, many).pictures); n != maxPictures {
		t.Errorf("%d pictures kept", n)
	}
}
