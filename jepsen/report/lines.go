package report

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/keelstate/keelstate/internal/base"
)

// The names in the first lines of the two files of lines.
const (
	TimelineMagic = "keelstate-jepsen-timeline"
	MetricsMagic  = "keelstate-jepsen-metrics"
	LinesVersion  = 1
)

// Limits of the files of lines.
const (
	// MaxLine bounds a line in bytes.
	MaxLine = 1 << 20
	// MaxLines bounds the lines of a file.
	MaxLines = 20_000_000
)

// The types of events.
const (
	EventFault   = "fault"   // from At to End
	EventBegun   = "begun"   // a fault that has begun at At; EventFault follows
	EventSkipped = "skipped" // a fault that was not possible, Text says why
	EventError   = "error"   // a fault that the harness could not inject or heal
	EventDeath   = "death"   // a process ended that nobody had ended
	EventPhase   = "phase"   // the episode went on to the phase in Text
)

// LastPhase is the end of the text of an episode's last phase.
const LastPhase = "verdict"

// Event is a line of the timeline.
type Event struct {
	Type    string `json:"type"`
	Episode int    `json:"episode"`
	// At and End are nanoseconds of the run.
	At  int64 `json:"at"`
	End int64 `json:"end,omitempty"`
	// Step, Name and Kind are those of a fault.
	Step    int      `json:"step,omitempty"`
	Name    string   `json:"name,omitempty"`
	Kind    string   `json:"kind,omitempty"`
	Targets []string `json:"targets,omitempty"`
	Text    string   `json:"text,omitempty"`
}

// Sample is what a node's metrics were at a time. Values has the name of the
// series, and after a colon the group where it is of one.
type Sample struct {
	At   int64  `json:"at"`
	Node string `json:"node"`
	// Missed says that the node did not answer.
	Missed bool               `json:"missed,omitempty"`
	Values map[string]float64 `json:"values,omitempty"`
}

// Writer writes a file of lines.
type Writer struct {
	mu  sync.Mutex
	out io.Writer
	err error // the first
}

type firstLine struct {
	Format  string `json:"format"`
	Version int64  `json:"version"`
}

// NewWriter starts a file of lines; each line is handed to w at once.
func NewWriter(w io.Writer, magic string) *Writer {
	l := &Writer{out: w}
	l.Write(firstLine{magic, LinesVersion})
	return l
}

// Write appends a line. The first error stays and is what Err returns.
func (l *Writer) Write(v any) {
	b, err := json.Marshal(v)
	if err == nil && (len(b) < 2 || b[len(b)-1] != '}') {
		err = fmt.Errorf("a line must be an object: %w", base.ErrInvalid)
	}
	if err == nil {
		b = seal(b)
		if len(b) > MaxLine {
			err = fmt.Errorf("a line of %d bytes: %w", len(b), base.ErrTooLarge)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil && err == nil {
		_, err = l.out.Write(b)
	}
	if l.err == nil {
		l.err = err
	}
}

// Err is the first error of the file.
func (l *Writer) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

const (
	crcBefore = `,"crc":"`
	crcAfter  = `"}`
	crcBytes  = len(crcBefore) + 8 + len(crcAfter)
)

// seal puts the checksum of an object's bytes into it, as its last member.
func seal(object []byte) []byte {
	body := object[:len(object)-1]
	sum := checksum(body)
	return append(append(append(append([]byte{}, body...), crcBefore...), sum...), crcAfter+"\n"...)
}

// unseal checks and returns a line's object without the checksum.
func unseal(line []byte) ([]byte, error) {
	at := len(line) - crcBytes
	if at < 1 || string(line[at:at+len(crcBefore)]) != crcBefore || string(line[len(line)-len(crcAfter):]) != crcAfter {
		return nil, corrupt("no checksum at the end")
	}
	if checksum(line[:at]) != string(line[at+len(crcBefore):len(line)-len(crcAfter)]) {
		return nil, corrupt("the checksum is wrong")
	}
	return append(append([]byte{}, line[:at]...), '}'), nil
}

// ReadEvents reads a timeline (JR4).
func ReadEvents(r io.Reader) ([]Event, error) { return readLines[Event](r, TimelineMagic) }

// ReadSamples reads samples of metrics (JR4).
func ReadSamples(r io.Reader) ([]Sample, error) { return readLines[Sample](r, MetricsMagic) }

func readLines[T any](r io.Reader, magic string) ([]T, error) {
	in := bufio.NewReaderSize(r, 64<<10)
	var all []T
	for n := 1; ; n++ {
		line, err := readLine(in)
		if errors.Is(err, io.EOF) && n > 1 {
			return all, nil // also within a line: a prefix
		}
		if errors.Is(err, io.EOF) {
			err = corrupt("it has no first line")
		}
		var object []byte
		switch {
		case err != nil:
		case n == 1:
			err = checkFirst(line, magic)
		case n > MaxLines:
			err = fmt.Errorf("more than %d lines: %w", MaxLines, base.ErrTooLarge)
		default:
			var v T
			if object, err = unseal(line); err == nil {
				if e := json.Unmarshal(object, &v); e != nil {
					err = corrupt("%v", e)
				}
				all = append(all, v)
			}
		}
		if err != nil {
			return nil, fmt.Errorf("reading line %d of a %s: %w", n, magic, err)
		}
	}
}

func checkFirst(line []byte, magic string) error {
	var f firstLine
	if err := json.Unmarshal(line, &f); err != nil || f.Format != magic {
		return corrupt("not its first line")
	}
	if f.Version != LinesVersion {
		return fmt.Errorf("version %d: %w", f.Version, base.ErrFormatVersion)
	}
	_, err := unseal(line)
	return err
}

// readLine reads a line without its line feed; io.EOF if the file ends before it.
func readLine(in *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		piece, err := in.ReadSlice('\n')
		if len(line)+len(piece) > MaxLine {
			return nil, corrupt("longer than %d bytes", MaxLine)
		}
		line = append(line, piece...)
		if err == nil {
			return line[:len(line)-1], nil
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return nil, err
		}
	}
}

// loadLines reads a file of lines; one that is not there has none.
func loadLines[T any](path string, read func(io.Reader) ([]T, error)) ([]T, error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return read(f)
}
