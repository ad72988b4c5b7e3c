package history

import (
	"encoding/json"
	"fmt"
	"hash/crc32"
	"strconv"
	"unicode/utf8"

	"github.com/keelstate/keelstate/internal/base"
)

// Frozen constants of the saved file, docs/formats/jepsen-history.md.
const (
	// Magic is the value of "format" in the first line.
	Magic = "keelstate-jepsen-history"
	// Version is the only version that is written and read.
	Version = 1
	// MaxLine bounds a line with its line feed, in bytes.
	MaxLine = 4 << 20
	// MaxNote bounds Header.Note, in bytes.
	MaxNote = 4096
	// MaxText bounds every name: workload, f, key, node, code, level.
	MaxText = 1024
	// MaxParts bounds the parts of an operation.
	MaxParts = 1024
	// DefaultMaxOps bounds the operations that a reader takes.
	DefaultMaxOps = 32 << 20

	crcBefore = `,"crc":"`
	crcAfter  = `"}`
	crcBytes  = len(crcBefore) + 8 + len(crcAfter)
)

// The kinds of lines after the first.
const (
	lineInvoke = "invoke"
	lineEnd    = "end"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

const hexDigits = "0123456789abcdef"

// seal ends the JSON object that starts at from with its checksum: the closing
// brace is not written yet.
func seal(b []byte, from int) []byte {
	sum := crc32.Checksum(b[from:], castagnoli)
	b = append(b, crcBefore...)
	for shift := 28; shift >= 0; shift -= 4 {
		b = append(b, hexDigits[sum>>shift&15])
	}
	b = append(b, crcAfter...)
	return append(b, '\n')
}

// unseal checks a line without its line feed and returns the object, closed, in
// the same bytes.
func unseal(line []byte) ([]byte, error) {
	at := len(line) - crcBytes
	if at < 1 || string(line[at:at+len(crcBefore)]) != crcBefore || string(line[len(line)-len(crcAfter):]) != crcAfter {
		return nil, corrupt("no checksum at the end")
	}
	var sum uint32
	for _, c := range line[at+len(crcBefore) : len(line)-len(crcAfter)] {
		switch {
		case c >= '0' && c <= '9':
			sum = sum<<4 | uint32(c-'0')
		case c >= 'a' && c <= 'f':
			sum = sum<<4 | uint32(c-'a'+10)
		default:
			return nil, corrupt("the checksum is not hexadecimal")
		}
	}
	if crc32.Checksum(line[:at], castagnoli) != sum {
		return nil, corrupt("the checksum is wrong")
	}
	line[at] = '}'
	return line[:at+1], nil
}

func corrupt(format string, args ...any) error {
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), base.ErrCorrupt)
}

func appendHeader(b []byte, h Header) []byte {
	from := len(b)
	b = append(b, `{"format":"`+Magic+`","version":`...)
	b = strconv.AppendInt(b, Version, 10)
	b = appendInt(b, "seed", h.Seed)
	b = appendText(b, "start", h.Start)
	b = appendText(b, "note", h.Note)
	return seal(b, from)
}

func appendInvoke(b []byte, o *Op) []byte {
	from := len(b)
	b = append(b, `{"t":"invoke"`...)
	b = appendInt(b, "id", o.ID)
	b = appendInt(b, "at", o.Invoke)
	b = appendInt(b, "p", o.Process)
	b = appendText(b, "w", o.Workload)
	b = appendText(b, "f", o.F)
	b = appendText(b, "k", o.Key)
	b = appendText(b, "level", string(o.Level))
	b = appendInts(b, "arg", o.Arg)
	if len(o.Parts) > 0 {
		b = append(b, `,"parts":[`...)
		for i := range o.Parts {
			if i > 0 {
				b = append(b, ',')
			}
			b = append(b, `{"k":`...)
			b = appendString(b, o.Parts[i].Key)
			b = appendInts(b, "arg", o.Parts[i].Arg)
			b = append(b, '}')
		}
		b = append(b, ']')
	}
	return seal(b, from)
}

func appendReturn(b []byte, id, at int64, d *Done) []byte {
	from := len(b)
	b = append(b, `{"t":"`...)
	b = append(b, d.Outcome.String()...)
	b = append(b, '"')
	b = appendInt(b, "id", id)
	b = appendInt(b, "at", at)
	b = appendInts(b, "result", d.Result)
	if len(d.Parts) > 0 {
		b = append(b, `,"results":[`...)
		for i, r := range d.Parts {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendList(b, r)
		}
		b = append(b, ']')
	}
	b = appendText(b, "node", d.Node)
	if d.Shard != 0 {
		b = append(b, `,"shard":`...)
		b = strconv.AppendUint(b, d.Shard, 10)
	}
	b = appendText(b, "code", d.Code)
	return seal(b, from)
}

func appendEnd(b []byte, ops, at int64) []byte {
	from := len(b)
	b = append(b, `{"t":"end"`...)
	b = appendInt(b, "at", at)
	b = appendInt(b, "ops", ops)
	return seal(b, from)
}

func appendInt(b []byte, name string, v int64) []byte {
	b = append(b, ',', '"')
	b = append(b, name...)
	b = append(b, '"', ':')
	return strconv.AppendInt(b, v, 10)
}

func appendInts(b []byte, name string, v []int64) []byte {
	if len(v) == 0 {
		return b
	}
	b = append(b, ',', '"')
	b = append(b, name...)
	b = append(b, '"', ':')
	return appendList(b, v)
}

func appendList(b []byte, v []int64) []byte {
	b = append(b, '[')
	for i, x := range v {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, x, 10)
	}
	return append(b, ']')
}

func appendText(b []byte, name, v string) []byte {
	if v == "" {
		return b
	}
	b = append(b, ',', '"')
	b = append(b, name...)
	b = append(b, '"', ':')
	return appendString(b, v)
}

func appendString(b []byte, v string) []byte {
	for i := 0; i < len(v); i++ {
		if c := v[i]; c < ' ' || c == '"' || c == '\\' || c >= utf8.RuneSelf {
			quoted, _ := json.Marshal(v) // a string always has a JSON form
			return append(b, quoted...)
		}
	}
	b = append(b, '"')
	b = append(b, v...)
	return append(b, '"')
}
