package job

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/csv"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// maxLineBytes bounds one line of the input.
const maxLineBytes = 64 << 10

// Row is a flight and where it stands.
type Row struct {
	Line int64 // in the uncompressed input, from 1; the header is line 1
	Flight
}

// BadLine is a line that is no flight.
type BadLine struct {
	Line   int64
	Text   string // its beginning, if it is long
	Reason string
}

func (e *BadLine) Error() string {
	return fmt.Sprintf("line %d: %s: %q", e.Line, e.Reason, e.Text)
}

// Reader reads flights from CSV with a header line. gzip is recognised by its
// first bytes. Fields may be quoted; a field may not hold a line break.
type Reader struct {
	in      *bufio.Reader
	line    int64
	columns [columns]int // index of each of fields
	width   int          // columns of the header
	source  string
	first   *textLine // read ahead for the source
}

// columns is the number of fields.
const columns = 5

type textLine struct {
	number int64
	text   []byte
	long   bool
}

// NewReader reads the header and the first line.
func NewReader(r io.Reader) (*Reader, error) {
	c := &Reader{in: bufio.NewReaderSize(r, maxLineBytes)}
	if magic, err := c.in.Peek(2); err == nil && magic[0] == 0x1f && magic[1] == 0x8b {
		gz, err := gzip.NewReader(c.in)
		if err != nil {
			return nil, fmt.Errorf("opening the gzip input: %w", err)
		}
		c.in = bufio.NewReaderSize(gz, maxLineBytes)
	}
	head, err := c.readLine()
	if errors.Is(err, io.EOF) {
		return nil, &BadLine{Line: 1, Reason: "the input is empty, a header is needed"}
	}
	if err != nil {
		return nil, err
	}
	if err := c.readHeader(head); err != nil {
		return nil, err
	}
	hash := sha256.New()
	hash.Write(head.text)
	first, err := c.readLine()
	switch {
	case err == nil:
		c.first = first
		hash.Write([]byte{'\n'})
		hash.Write(first.text)
	case !errors.Is(err, io.EOF):
		return nil, err
	}
	c.source = hex.EncodeToString(hash.Sum(nil)[:8])
	return c, nil
}

// SourceID tells inputs apart: it is a hash of the header and the first line, so
// that it stays the same when lines are appended.
func (c *Reader) SourceID() string { return c.source }

// Next returns the next row, io.EOF at the end, a *BadLine for a line that is no
// flight (Next may be called again), and any other error when reading failed.
func (c *Reader) Next() (Row, error) {
	l := c.first
	c.first = nil
	if l == nil {
		var err error
		if l, err = c.readLine(); err != nil {
			return Row{}, err
		}
	}
	if l.long {
		return Row{}, badLine(l, fmt.Sprintf("longer than %d bytes", maxLineBytes))
	}
	values, err := split(l.text)
	if err != nil {
		return Row{}, badLine(l, err.Error())
	}
	if len(values) != c.width {
		return Row{}, badLine(l, fmt.Sprintf("%d fields, the header has %d", len(values), c.width))
	}
	var v [columns]string
	for i, at := range c.columns {
		v[i] = values[at]
	}
	f, err := parseFlight(v)
	if err != nil {
		return Row{}, badLine(l, err.Error())
	}
	return Row{Line: l.number, Flight: f}, nil
}

func badLine(l *textLine, reason string) *BadLine {
	text := l.text
	if len(text) > 200 {
		text = text[:200]
	}
	return &BadLine{Line: l.number, Text: string(text), Reason: reason}
}

func (c *Reader) readHeader(l *textLine) error {
	names, err := split(bytes.TrimPrefix(l.text, []byte("\ufeff")))
	if err != nil || l.long {
		return badLine(l, "the header is no CSV")
	}
	for i, f := range fields {
		at := slices.Index(names, f)
		if at < 0 {
			return badLine(l, fmt.Sprintf("the header lacks the column %q (needed: %s)", f, strings.Join(fields, ", ")))
		}
		c.columns[i] = at
	}
	c.width = len(names)
	return nil
}

// readLine returns the next line that is not empty, without its end. Of one that
// is too long it returns the beginning and skips the rest.
func (c *Reader) readLine() (*textLine, error) {
	for {
		text, err := c.in.ReadSlice('\n')
		if len(text) == 0 && err != nil {
			return nil, c.failed(err)
		}
		c.line++
		l := &textLine{number: c.line, long: errors.Is(err, bufio.ErrBufferFull)}
		l.text = bytes.Clone(bytes.TrimSuffix(bytes.TrimSuffix(text, []byte("\n")), []byte("\r")))
		for errors.Is(err, bufio.ErrBufferFull) {
			_, err = c.in.ReadSlice('\n')
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, c.failed(err)
		}
		if len(l.text) > 0 {
			return l, nil
		}
	}
}

// failed names the place where the input broke off; io.EOF stays as it is.
func (c *Reader) failed(err error) error {
	if err == io.EOF {
		return err
	}
	return fmt.Errorf("reading the input after line %d: %w", c.line, err)
}

// split parts one line. Lines without quotes, the usual ones, take the short
// way.
func split(line []byte) ([]string, error) {
	if bytes.IndexByte(line, '"') < 0 {
		return strings.Split(string(line), ","), nil
	}
	r := csv.NewReader(bytes.NewReader(line))
	r.FieldsPerRecord = -1
	values, err := r.Read()
	var parse *csv.ParseError
	if errors.As(err, &parse) {
		return nil, parse.Err
	}
	return values, err
}

// Check reads the whole input and returns the number of rows, or the first
// line that is no flight unless such lines are to be skipped.
func Check(r io.Reader, skipBad bool) (rows int64, err error) {
	c, err := NewReader(r)
	if err != nil {
		return 0, err
	}
	for {
		_, err := c.Next()
		var bad *BadLine
		switch {
		case err == nil:
			rows++
		case err == io.EOF:
			return rows, nil
		case !skipBad || !errors.As(err, &bad):
			return rows, err
		}
	}
}
