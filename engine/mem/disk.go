package mem

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/internal/durable"
	"github.com/keelstate/keelstate/internal/base"
)

const (
	manifestFile = "MANIFEST"
	lockFile     = "LOCK"
	imagePrefix  = "image-"
)

func imageName(n uint64) string { return fmt.Sprintf("%s%020d", imagePrefix, n) }

// imageNumber is the inverse of imageName.
func imageNumber(name string) (uint64, bool) {
	digits, ok := strings.CutPrefix(name, imagePrefix)
	if !ok || len(digits) != 20 {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	return n, err == nil
}

// usable returns the error after which nothing may be written.
func (s *store) usable() error {
	s.manifest.mu.Lock()
	defer s.manifest.mu.Unlock()
	return s.manifest.failed
}

// fail keeps the store from writing if it is not known what is durable.
func (s *store) fail(err error) {
	var dir *durable.DirError
	if errors.As(err, &dir) {
		s.manifest.mu.Lock()
		defer s.manifest.mu.Unlock()
		s.manifest.failed = err
	}
}

// changeManifest makes a changed manifest durable.
func (s *store) changeManifest(change func(*manifest)) error {
	s.manifest.mu.Lock()
	defer s.manifest.mu.Unlock()
	if s.manifest.failed != nil {
		return s.manifest.failed
	}
	next := *s.manifest.durable
	next.families = maps.Clone(next.families)
	change(&next)
	if err := writeManifest(s.dir, &next); err != nil {
		// A rename that fails has changed nothing; only a directory that could
		// not be synced leaves two possible manifests.
		var dir *durable.DirError
		if errors.As(err, &dir) {
			s.manifest.failed = err
		}
		return err
	}
	s.manifest.durable = &next
	return nil
}

func writeManifest(dir string, m *manifest) error {
	_, err := durable.WriteFile(filepath.Join(dir, manifestFile), func(w io.Writer) error {
		_, err := w.Write(encodeManifest(m))
		return err
	})
	return err
}

// putImage writes r as image n into dir and returns its checksum and size.
func putImage(dir string, r *root, n uint64) (sum uint64, size int64, err error) {
	size, err = durable.WriteFile(filepath.Join(dir, imageName(n)), func(w io.Writer) (err error) {
		sum, err = writeImage(w, r, n)
		return err
	})
	return sum, size, err
}

// Flush implements engine.Store: it writes an image of everything, names it in
// the manifest and removes the one before. If it fails before the manifest is
// replaced, the older image stays the durable one and Flush may be called again.
func (s *store) Flush() error {
	s.disk.Lock()
	defer s.disk.Unlock()
	r, err := s.root("flushing")
	if err != nil {
		return err
	}
	if err := s.usable(); err != nil {
		return fmt.Errorf("flushing: %w", err)
	}
	if r == s.flushed.Load() {
		return nil
	}
	start, n := time.Now(), s.nextImage
	s.nextImage++
	sum, size, err := putImage(s.dir, r, n)
	if err != nil {
		s.fail(err)
		return fmt.Errorf("flushing store %s: %w", s.dir, err)
	}
	var before uint64
	err = s.changeManifest(func(m *manifest) {
		before = m.image
		m.image, m.imageSum = n, sum
	})
	if err != nil {
		return fmt.Errorf("flushing store %s: %w", s.dir, err)
	}
	s.flushed.Store(r)
	s.diskBytes.Store(size)
	s.lastFlush.Store(int64(time.Since(start)))
	if before != 0 {
		// Best effort: an image that no manifest names is removed at the next open.
		_ = os.Remove(filepath.Join(s.dir, imageName(before)))
	}
	return nil
}

// Checkpoint implements engine.Store. The copy is built in dir with the suffix
// ".tmp" and renamed, so that dir is complete whenever it exists.
func (s *store) Checkpoint(dir string) error {
	finish, err := s.BeginCheckpoint(dir)
	if err != nil {
		return err
	}
	return finish()
}

// BeginCheckpoint implements engine.Store: the root of this instant never
// changes, so finish writes it without holding up the writer.
func (s *store) BeginCheckpoint(dir string) (func() error, error) {
	r, err := s.root("checkpointing")
	if err != nil {
		return nil, err
	}
	return func() error { return s.checkpointRoot(dir, r) }, nil
}

func (s *store) checkpointRoot(dir string, r *root) error {
	s.disk.Lock()
	defer s.disk.Unlock()
	if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("checkpointing store %s: %s exists: %w", s.dir, dir, base.ErrConflict)
	}
	temp := filepath.Clean(dir) + durable.TempSuffix
	if err := writeCheckpoint(temp, dir, r); err != nil {
		_ = os.RemoveAll(temp) // best effort: the next attempt removes it too
		return fmt.Errorf("checkpointing store %s to %s: %w", s.dir, dir, err)
	}
	return nil
}

func writeCheckpoint(temp, dir string, r *root) error {
	if err := os.RemoveAll(temp); err != nil {
		return fmt.Errorf("removing %s: %w: %w", temp, base.ErrDiskFailed, err)
	}
	if err := durable.Mkdir(temp); err != nil {
		return err
	}
	if err := engine.WriteMarker(temp, marker); err != nil {
		return err
	}
	m := &manifest{image: 1, families: r.families}
	for _, f := range r.families {
		m.births = max(m.births, f.birth)
	}
	var err error
	if m.imageSum, _, err = putImage(temp, r, m.image); err != nil {
		return err
	}
	if err := writeManifest(temp, m); err != nil {
		return err
	}
	if err := os.Rename(temp, dir); err != nil {
		return fmt.Errorf("renaming %s: %w: %w", temp, base.ErrDiskFailed, err)
	}
	return durable.SyncDir(filepath.Dir(dir))
}
