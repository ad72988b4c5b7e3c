package history

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"

	"github.com/keelstate/keelstate/internal/base"
)

// ReadOptions bound a reader.
type ReadOptions struct {
	// MaxOps is the most operations to take; 0 is DefaultMaxOps.
	MaxOps int
}

// line is any line after the first, as JSON.
type line struct {
	T       string     `json:"t"`
	ID      int64      `json:"id"`
	At      int64      `json:"at"`
	P       int64      `json:"p"`
	W       string     `json:"w"`
	F       string     `json:"f"`
	K       string     `json:"k"`
	Level   string     `json:"level"`
	Arg     []int64    `json:"arg"`
	Parts   []linePart `json:"parts"`
	Result  []int64    `json:"result"`
	Results [][]int64  `json:"results"`
	Node    string     `json:"node"`
	Shard   uint64     `json:"shard"`
	Code    string     `json:"code"`
	Ops     int64      `json:"ops"`
}

type linePart struct {
	K   string  `json:"k"`
	Arg []int64 `json:"arg"`
}

type headerLine struct {
	Format  string `json:"format"`
	Version int64  `json:"version"`
	Seed    int64  `json:"seed"`
	Start   string `json:"start"`
	Note    string `json:"note"`
}

type reader struct {
	max   int
	h     *History
	texts map[string]string // each name is kept once
	ended bool
}

// Read reads a saved history. A file that only ends early, also within a line,
// gives the history until there, with Complete false (JH6).
func Read(r io.Reader, o ReadOptions) (*History, error) {
	if o.MaxOps <= 0 {
		o.MaxOps = DefaultMaxOps
	}
	d := &reader{max: o.MaxOps, h: &History{}, texts: map[string]string{}}
	in := bufio.NewReaderSize(r, 256<<10)
	var buf []byte
	for n := 1; ; n++ {
		var err error
		buf, err = readLine(in, buf[:0])
		torn := errors.Is(err, io.EOF)
		if err != nil && !torn {
			return nil, fmt.Errorf("reading line %d of a history: %w", n, err)
		}
		if torn && n > 1 {
			d.h.Complete = d.ended && len(buf) == 0
			if d.ended && len(buf) > 0 {
				return nil, fmt.Errorf("reading line %d of a history: %w", n, corrupt("more after the end"))
			}
			return d.h, nil
		}
		if torn {
			err = corrupt("it has no first line")
		} else if n == 1 {
			err = d.header(buf)
		} else {
			err = d.line(buf)
		}
		if err != nil {
			return nil, fmt.Errorf("reading line %d of a history: %w", n, err)
		}
	}
}

// readLine reads a line without its line feed; io.EOF with what was there if
// the file ends before it.
func readLine(in *bufio.Reader, buf []byte) ([]byte, error) {
	for {
		piece, err := in.ReadSlice('\n')
		if len(buf)+len(piece) > MaxLine {
			return nil, corrupt("longer than %d bytes", MaxLine)
		}
		buf = append(buf, piece...)
		switch {
		case err == nil:
			return buf[:len(buf)-1], nil
		case !errors.Is(err, bufio.ErrBufferFull):
			return buf, err
		}
	}
}

func (d *reader) header(text []byte) error {
	// The version decides before the checksum does: another version may have
	// another one.
	var h headerLine
	if err := json.Unmarshal(text, &h); err != nil || h.Format != Magic {
		return corrupt("not the first line of a history")
	}
	if h.Version != Version {
		return fmt.Errorf("version %d: %w", h.Version, base.ErrFormatVersion)
	}
	if _, err := unseal(text); err != nil {
		return err
	}
	if len(h.Note) > MaxNote || len(h.Start) > MaxText {
		return corrupt("the header's text is too long")
	}
	d.h.Header = Header{Seed: h.Seed, Start: h.Start, Note: h.Note}
	return nil
}

func (d *reader) line(text []byte) error {
	if d.ended {
		return corrupt("more after the end")
	}
	object, err := unseal(text)
	if err != nil {
		return err
	}
	var l line
	if !scanLine(object, &l, d.bytes) { // what this build writes; else the general way
		l = line{}
		if err := json.Unmarshal(object, &l); err != nil {
			return corrupt("not JSON of a history: %v", err)
		}
	}
	for _, s := range [...]string{l.W, l.F, l.K, l.Level, l.Node, l.Code} {
		if len(s) > MaxText {
			return corrupt("a name is longer than %d bytes", MaxText)
		}
	}
	switch l.T {
	case lineInvoke:
		return d.invoke(&l)
	case lineEnd:
		if l.Ops != int64(len(d.h.Ops)) {
			return corrupt("the end counts %d operations of %d", l.Ops, len(d.h.Ops))
		}
		d.ended = true
		return nil
	case OK.String():
		return d.complete(&l, OK)
	case Fail.String():
		return d.complete(&l, Fail)
	case Unknown.String():
		return d.complete(&l, Unknown)
	}
	return corrupt("unknown kind of line %q", l.T)
}

func (d *reader) invoke(l *line) error {
	if len(d.h.Ops) >= d.max {
		return fmt.Errorf("more than %d operations: %w", d.max, base.ErrTooLarge)
	}
	if l.ID != int64(len(d.h.Ops))+1 {
		return corrupt("operation %d where %d is next", l.ID, len(d.h.Ops)+1)
	}
	if l.At < 0 || l.At == math.MaxInt64 || len(l.Parts) > MaxParts {
		return corrupt("operation %d is out of bounds", l.ID)
	}
	o := Op{
		ID: l.ID, Process: l.P, Workload: d.text(l.W), F: d.text(l.F), Key: d.text(l.K), Level: Level(d.text(l.Level)),
		Arg: l.Arg, Invoke: l.At, Return: Never,
	}
	for _, p := range l.Parts {
		if len(p.K) > MaxText {
			return corrupt("a name is longer than %d bytes", MaxText)
		}
		o.Parts = append(o.Parts, Part{Key: d.text(p.K), Arg: p.Arg})
	}
	d.h.Ops = append(d.h.Ops, o)
	return nil
}

func (d *reader) complete(l *line, outcome Outcome) error {
	if l.ID < 1 || l.ID > int64(len(d.h.Ops)) {
		return corrupt("operation %d returns and never began", l.ID)
	}
	o := &d.h.Ops[l.ID-1]
	if o.Outcome != Unknown || o.Code != "" {
		return corrupt("operation %d returns twice", l.ID)
	}
	if l.At < o.Invoke || l.At == math.MaxInt64 {
		return corrupt("operation %d returns before it begins", l.ID)
	}
	if len(l.Results) > len(o.Parts) {
		return corrupt("operation %d has more results than parts", l.ID)
	}
	done := Done{Outcome: outcome, Result: l.Result, Parts: l.Results, Node: d.text(l.Node), Shard: l.Shard, Code: d.text(l.Code)}
	o.complete(l.At, &done)
	return nil
}

// bytes is text without an allocation for what is known.
func (d *reader) bytes(b []byte) string {
	if kept, ok := d.texts[string(b)]; ok {
		return kept
	}
	return d.text(string(b))
}

// text keeps one copy of each name.
func (d *reader) text(s string) string {
	if s == "" {
		return ""
	}
	if kept, ok := d.texts[s]; ok {
		return kept
	}
	s = strings.Clone(s)
	d.texts[s] = s
	return s
}
