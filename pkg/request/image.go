// SPDX-License-Identifier: Apache-2.0

package request

import (
	"bytes"
	"encoding/base64"
	"strings"

	"github.com/shunt-lb/shunt/pkg/tokens"
)

// picture is an image in a prompt.
type picture struct {
	width, height int32 // 0 if not known
	low           bool  // asked for at low detail
}

// maxSide bounds what a header may claim.
const maxSide = 1 << 20

// An image whose size is not known is taken for one of 1,024 by 1,024 pixels.
const unknownSide = 1024

func (p *Parser) image(n *node) {
	detail, identity := n.detail, n.imageURL
	if p.kind(n.imageURL) == '{' {
		if d := p.find(n.imageURL, "detail"); d.end != 0 {
			detail = d
		}
		identity = p.find(n.imageURL, "url")
	}
	if identity.end == 0 {
		identity = n.source
	}
	pic := picture{low: strings.EqualFold(p.stringOf(detail), "low")}
	pic.width, pic.height = p.imageSize(identity)
	f := &p.facts
	f.mediaParts++
	if len(f.pictures) < maxPictures {
		f.pictures = append(f.pictures, pic)
	}
	p.identify(identity)
}

// imageSize reads an image's size from its header, if the image stands in the request: as a data: URL, or as Anthropic's
// source of type base64. It looks at no more of it than the header.
func (p *Parser) imageSize(v value) (width, height int32) {
	data := p.inner(v)
	if p.kind(v) == '{' {
		data = p.inner(p.find(v, "data"))
	} else {
		const longestType = 256
		i := bytes.IndexByte(data[:min(len(data), longestType)], ',')
		if i < 0 || !bytes.HasPrefix(data, []byte("data:")) || !bytes.Contains(data[:i], []byte(";base64")) {
			return 0, 0
		}
		data = data[i+1:]
	}
	if bytes.IndexByte(data[:min(len(data), maxHeader)], '\\') >= 0 { // some encoders write \/ for each slash
		start := len(p.scratch)
		p.scratch = tokens.AppendUnescaped(p.scratch, view(data[:min(len(data), maxHeader)]))
		data = p.scratch[start:]
	}
	w, h := headerSize(data)
	if w <= 0 || h <= 0 || w > maxSide || h > maxSide {
		return 0, 0
	}
	return int32(w), int32(h)
}

// maxHeader is how much base64 is decoded of escapes, and maxSegments how many segments of a JPEG are gone over, to find the
// size: cameras put a thumbnail, colour profiles and notes in front of it.
const (
	maxHeader   = 512 << 10
	maxSegments = 256
)

// headerSize reads the width and height of a PNG, JPEG, GIF or WebP in base64. It returns 0, 0 if it does not find them.
func headerSize(data []byte) (width, height int) {
	b := base64Reader(data)
	var head [30]byte
	n := b.read(head[:], 0)
	h := head[:n]
	switch {
	case n >= 24 && string(h[:8]) == "\x89PNG\r\n\x1a\n" && string(h[12:16]) == "IHDR":
		return be32(h[16:]), be32(h[20:])
	case n >= 10 && (string(h[:6]) == "GIF89a" || string(h[:6]) == "GIF87a"):
		return le16(h[6:]), le16(h[8:])
	case n >= 30 && string(h[:4]) == "RIFF" && string(h[8:12]) == "WEBP":
		switch string(h[12:16]) {
		case "VP8 ":
			if string(h[23:26]) == "\x9d\x01\x2a" {
				return le16(h[26:]) & 0x3fff, le16(h[28:]) & 0x3fff
			}
		case "VP8L":
			if h[20] == 0x2f {
				bits := le16(h[21:]) | le16(h[23:])<<16
				return bits&0x3fff + 1, bits>>14&0x3fff + 1
			}
		case "VP8X":
			return le16(h[24:]) | int(h[26])<<16 + 1, le16(h[27:]) | int(h[29])<<16 + 1
		}
	case n >= 4 && h[0] == 0xff && h[1] == 0xd8:
		return b.jpeg()
	}
	return 0, 0
}

// jpeg goes from segment to segment to the frame's header.
func (b base64Reader) jpeg() (width, height int) {
	at := 2
	for range maxSegments {
		var s [9]byte
		n := b.read(s[:], at)
		if n < 4 || s[0] != 0xff {
			return 0, 0
		}
		switch m := s[1]; {
		case m == 0xff: // fill
			at++
		case m == 0x01 || 0xd0 <= m && m <= 0xd8: // no length
			at += 2
		case 0xc0 <= m && m <= 0xcf && m != 0xc4 && m != 0xc8 && m != 0xcc:
			if n < 9 {
				return 0, 0
			}
			return be16(s[7:]), be16(s[5:])
		case m == 0xd9 || m == 0xda: // the data, or the end
			return 0, 0
		default:
			at += 2 + be16(s[2:])
		}
	}
	return 0, 0
}

// base64Reader reads bytes of base64, of either alphabet, at any place without decoding what is before it.
type base64Reader []byte

// read fills dst from the byte at on and returns how many bytes there are.
func (b base64Reader) read(dst []byte, at int) int {
	n := 0
	for quad := at / 3 * 4; n < len(dst); quad += 4 {
		var out [3]byte
		end := min(quad+4, len(b))
		if quad < 0 || end-quad < 2 {
			return n
		}
		in := bytes.TrimRight(b[quad:end], "=")
		m, err := base64.RawStdEncoding.Decode(out[:], in)
		if err != nil {
			if m, err = base64.RawURLEncoding.Decode(out[:], in); err != nil {
				return n
			}
		}
		skip := 0
		if n == 0 {
			skip = at % 3
		}
		if skip > m {
			return n
		}
		n += copy(dst[n:], out[skip:m])
		if m < 3 {
			return n
		}
	}
	return n
}

func le16(b []byte) int { return int(b[0]) | int(b[1])<<8 }
func be16(b []byte) int { return int(b[0])<<8 | int(b[1]) }
func be32(b []byte) int { return be16(b)<<16 | be16(b[2:]) }

// imageRule is how a model counts an image: by tiles of 512 pixels (OpenAI's larger models), by patches, or by its area.
type imageRule struct {
	prefix string // of the model's name
	base   int    // at low detail, and beside the tiles
	tile   int
	patch  float64 // tokens a patch of 32 pixels, at most 1,536 patches; 0: tiles
}

// openaiImages is in the order in which names are tried. Models that are not in it count as the last one.
var openaiImages = [...]imageRule{
	{prefix: "gpt-4o-mini", base: 2833, tile: 5667},
	{prefix: "gpt-4.1-mini", patch: 1.62},
	{prefix: "gpt-4.1-nano", patch: 2.46},
	{prefix: "gpt-5-mini", patch: 1.62},
	{prefix: "gpt-5-nano", patch: 2.46},
	{prefix: "o4-mini", patch: 1.72},
	{prefix: "gpt-5", base: 70, tile: 140},
	{prefix: "o1", base: 75, tile: 150},
	{prefix: "o3", base: 75, tile: 150},
	{base: 85, tile: 170}, // gpt-4o, gpt-4.1, gpt-4-turbo
}

// tokens is what an image counts in a model.
func (pic picture) tokens(family Family, model string) int {
	w, h := float64(pic.width), float64(pic.height)
	if w == 0 || h == 0 {
		w, h = unknownSide, unknownSide
	}
	switch family {
	case Claude: // a pixel count, after the long side was brought down to 1,568
		w, h = fit(w, h, 1568)
		return int(min(w*h/750, 1600) + 0.5)
	case Qwen: // patches of 28 pixels, between two marks
		return min(max(4, patches(w, h, 28)), 16384) + 2
	case Gemma:
		return 256 + 2
	}
	rule := &openaiImages[len(openaiImages)-1]
	model = model[strings.LastIndexByte(model, '/')+1:]
	for i := range openaiImages {
		if strings.HasPrefix(model, openaiImages[i].prefix) {
			rule = &openaiImages[i]
			break
		}
	}
	if rule.patch > 0 {
		if pic.low {
			w, h = fit(w, h, 512)
		}
		return int(float64(min(patches(w, h, 32), 1536))*rule.patch + 0.5)
	}
	if pic.low {
		return rule.base
	}
	w, h = fit(w, h, 2048)
	if short := min(w, h); short > 768 {
		w, h = w*768/short, h*768/short
	}
	return rule.base + rule.tile*patches(w, h, 512)
}

// fit scales a picture down so that its longer side is at most this.
func fit(w, h, longest float64) (float64, float64) {
	if long := max(w, h); long > longest {
		return w * longest / long, h * longest / long
	}
	return w, h
}

// patches is how many squares of that side cover the picture.
func patches(w, h, side float64) int {
	up := func(x float64) int { return int((x + side - 0.001) / side) }
	return max(1, up(w)) * max(1, up(h))
}
