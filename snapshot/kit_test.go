package snapshot_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/snapshot"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// content is the files of a snapshot by name.
type content map[string][]byte

// sampleContent has immutable and other files, an empty one, and one that is
// larger than a copy buffer.
func sampleContent() content {
	return content{
		"000007.sst":       bytes.Repeat([]byte("sorted strings "), 7000),
		"000009.sst":       []byte("small"),
		"000010.blob":      bytes.Repeat([]byte{0xfe}, 1000),
		"CURRENT":          []byte("MANIFEST-000005\n"),
		"MANIFEST-000005":  bytes.Repeat([]byte("edit"), 300),
		"keelstate-engine": {},
	}
}

func (c content) names() []string {
	names := make([]string, 0, len(c))
	for n := range c {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// manifest describes the files.
func (c content) manifest() *snapshot.Manifest {
	m := &snapshot.Manifest{
		Group: 3, Birth: 0x1122334455667788, Incarnation: 2, Epoch: 5, Range: keygroup.Range{Lo: 16, Hi: 300}, M: 1024,
		Engine: "rocks", Index: 4711, Term: 7, Sequence: 9000, ClockMs: 1_700_000_000_000,
	}
	for _, n := range c.names() {
		m.Files = append(m.Files, snapshot.File{Name: n, Size: int64(len(c[n])), SHA256: sha256.Sum256(c[n])})
	}
	return m
}

// write puts the files into a new directory.
func (c content) write(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	for n, b := range c {
		writeFile(t, filepath.Join(dir, n), b)
	}
	return dir
}

func writeFile(t testing.TB, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o640); err != nil {
		t.Fatal(err)
	}
}

func listDir(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	names := []string{}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// checkDir demands that dir holds exactly the files.
func (c content) checkDir(t testing.TB, dir string) {
	t.Helper()
	if got, want := listDir(t, dir), c.names(); !slices.Equal(got, want) {
		t.Fatalf("the directory holds %v, want %v", got, want)
	}
	for n, want := range c {
		got, err := os.ReadFile(filepath.Join(dir, n))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("file %s has %d other bytes", n, len(got))
		}
	}
}

// checkNamed demands SN2: whatever has its name in dir is right.
func (c content) checkNamed(t testing.TB, dir string) {
	t.Helper()
	for _, n := range listDir(t, dir) {
		if strings.HasSuffix(n, ".part") {
			continue
		}
		got, err := os.ReadFile(filepath.Join(dir, n))
		if err != nil {
			t.Fatal(err)
		}
		if want, ok := c[n]; !ok || !bytes.Equal(got, want) {
			t.Fatalf("file %s got its name with wrong content", n)
		}
	}
}

// opened is one Open that a source was asked for.
type opened struct {
	name   string
	offset int64
}

// source serves files, with faults.
type source struct {
	files content
	// fault may replace what Open returns for a file; it gets the bytes from
	// the offset on. A nil reader with a nil error means no fault.
	fault func(ctx context.Context, name string, rest []byte) (io.ReadCloser, error)

	mu   sync.Mutex
	asks []opened
}

func (s *source) Open(ctx context.Context, name string, offset int64) (io.ReadCloser, error) {
	s.mu.Lock()
	s.asks = append(s.asks, opened{name, offset})
	s.mu.Unlock()
	b, ok := s.files[name]
	if !ok || offset < 0 || offset > int64(len(b)) {
		return nil, fmt.Errorf("opening %s at %d: %w", name, offset, base.ErrNotFound)
	}
	if s.fault != nil {
		if rc, err := s.fault(ctx, name, b[offset:]); rc != nil || err != nil {
			return rc, err
		}
	}
	return io.NopCloser(bytes.NewReader(b[offset:])), nil
}

// asked lists the Opens since the last call, sorted.
func (s *source) asked() []opened {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.asks
	s.asks = nil
	slices.SortFunc(a, func(x, y opened) int { return strings.Compare(x.name, y.name) })
	return a
}

// failingBody gives some bytes and then an error.
func failingBody(b []byte, err error) io.ReadCloser {
	return io.NopCloser(io.MultiReader(bytes.NewReader(b), errReader{err}))
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

// stalledBody gives some bytes and then nothing until it is closed, as a
// connection whose peer hangs.
type stalledBody struct {
	first   io.Reader
	stalled chan struct{} // closed when a Read blocks
	closed  chan struct{}
	once    sync.Once
	stall   sync.Once
}

func newStalledBody(b []byte) *stalledBody {
	return &stalledBody{first: bytes.NewReader(b), stalled: make(chan struct{}), closed: make(chan struct{})}
}

func (s *stalledBody) Read(p []byte) (int, error) {
	if n, err := s.first.Read(p); err == nil {
		return n, nil
	}
	s.stall.Do(func() { close(s.stalled) })
	<-s.closed
	return 0, errors.New("the body was closed")
}

func (s *stalledBody) Close() error {
	s.once.Do(func() { close(s.closed) })
	return nil
}

func testCtx(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	t.Cleanup(cancel)
	return ctx
}
