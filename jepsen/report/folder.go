package report

import (
	"compress/flate"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/jepsen/history"
)

// LoadEvents reads the timeline of a folder.
func LoadEvents(dir string) ([]Event, error) {
	return loadLines(filepath.Join(dir, TimelineFile), ReadEvents)
}

// LoadSamples reads the samples of a folder.
func LoadSamples(dir string) ([]Sample, error) {
	return loadLines(filepath.Join(dir, MetricsFile), ReadSamples)
}

// LoadHistory reads an episode's history, packed or not.
func LoadHistory(dir string, e *Episode) (*history.History, error) {
	f, err := os.Open(filepath.Join(dir, e.History))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("the history of episode %d, %s: %w", e.Number, e.History, base.ErrNotFound)
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var r io.Reader = f
	if strings.HasSuffix(e.History, ".gz") {
		z, err := gzip.NewReader(f)
		if err != nil {
			return nil, fmt.Errorf("the history of episode %d, %s: %w", e.Number, e.History, corrupt("%v", err))
		}
		defer z.Close()
		r = packed{z}
	}
	h, err := history.Read(r, history.ReadOptions{})
	if err != nil {
		return nil, fmt.Errorf("the history of episode %d, %s: %w", e.Number, e.History, err)
	}
	return h, nil
}

// packed makes the errors of a damaged gzip stream those of a damaged file.
type packed struct{ z *gzip.Reader }

func (p packed) Read(b []byte) (int, error) {
	n, err := p.z.Read(b)
	var flaw flate.CorruptInputError
	if errors.Is(err, gzip.ErrChecksum) || errors.Is(err, gzip.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, &flaw) {
		err = corrupt("%v", err)
	}
	return n, err
}

// Pack compresses an episode's history, which a passed episode is kept as.
func Pack(dir string, e *Episode) error {
	from := filepath.Join(dir, e.History)
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.Create(from + ".gz")
	if err != nil {
		return err
	}
	z, err := gzip.NewWriterLevel(out, gzip.BestSpeed)
	if err == nil {
		_, err = io.Copy(z, in)
		err = errors.Join(err, z.Close())
	}
	if err = errors.Join(err, out.Close()); err != nil {
		return errors.Join(err, os.Remove(from+".gz"))
	}
	e.History += ".gz"
	return os.Remove(from)
}
