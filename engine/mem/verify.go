package mem

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

var _ engine.Verifier = (*store)(nil)

// VerifyFiles implements engine.Verifier: the marker, the manifest and the image
// that it names are read again.
func (s *store) VerifyFiles(pace func(int64) error) error {
	if err := s.verifyFiles(pace); err != nil {
		return fmt.Errorf("verifying store %s: %w", s.dir, err)
	}
	return nil
}

func (s *store) verifyFiles(pace func(int64) error) error {
	if err := engine.CheckDirectory(s.dir, marker); err != nil {
		return err
	}
	for {
		if _, err := s.root("verifying files"); err != nil {
			return err
		}
		m, err := readManifest(s.dir) // replaced by a rename: this one is whole
		if errors.Is(err, os.ErrNotExist) {
			return corrupt("%s is missing", filepath.Join(s.dir, manifestFile))
		}
		if err != nil {
			return fmt.Errorf("%s: %w", filepath.Join(s.dir, manifestFile), err)
		}
		if err := pace(int64(len(encodeManifest(m)))); err != nil {
			return err
		}
		var paced error // that pace ended it is no damage
		_, err = scanImageThrough(s.dir, m, &discard{}, func(f *os.File) io.Reader {
			_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED) // a wish: the disk is to be read
			return &pacedReader{f, pace, &paced}
		})
		if paced != nil {
			return paced
		}
		if err == nil || !errors.Is(err, base.ErrCorrupt) || s.manifestIs(m) {
			return err
		}
		// A flush replaced the image before it was opened: look at the new one.
	}
}

// manifestIs says that m is still the durable manifest.
func (s *store) manifestIs(m *manifest) bool {
	s.manifest.mu.Lock()
	defer s.manifest.mu.Unlock()
	return s.manifest.durable.image == m.image
}

type pacedReader struct {
	r    io.Reader
	pace func(int64) error
	err  *error
}

func (p *pacedReader) Read(b []byte) (int, error) {
	n, err := p.r.Read(b)
	if perr := p.pace(int64(n)); perr != nil {
		*p.err = perr
		return n, perr
	}
	return n, err
}
