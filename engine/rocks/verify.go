package rocks

// #include <stdlib.h>
// #include "native.h"
import "C"

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

var _ engine.Verifier = (*Store)(nil)

// VerifyFiles implements engine.Verifier: the marker, CURRENT, the MANIFEST and
// every SST file are read. OPTIONS has no checksum, and nothing is read from it.
func (s *Store) VerifyFiles(pace func(int64) error) error {
	if err := s.verifyFiles(pace); err != nil {
		return fmt.Errorf("verifying store %s: %w", s.dir, err)
	}
	return nil
}

func (s *Store) verifyFiles(pace func(int64) error) error {
	if err := engine.CheckDirectory(s.dir, marker); err != nil {
		return err
	}
	files, _, err := s.liveFiles()
	if err != nil {
		return err
	}
	var damage []error
	keep := func(err error) error { // returns what ends the scrub
		if errors.Is(err, base.ErrCorrupt) {
			damage = append(damage, err)
			return nil
		}
		return err
	}
	if err := keep(s.verifyManifest(pace)); err != nil {
		return errors.Join(append(damage, err)...)
	}
	for _, name := range files {
		if !strings.HasSuffix(name, ".sst") {
			continue
		}
		if err := keep(s.verifyTable(name, pace)); err != nil {
			return errors.Join(append(damage, err)...)
		}
	}
	return errors.Join(damage...)
}

// liveFiles names the files that the database needs at this moment, and says how
// much of the MANIFEST is valid.
func (s *Store) liveFiles() (names []string, manifest int64, err error) {
	if err := s.enter("listing files"); err != nil {
		return nil, 0, err
	}
	defer s.gate.leave()
	var packed *C.char
	var n C.size_t
	var size C.uint64_t
	if err := take(C.ks_live_files(s.c, &packed, &n, &size)); err != nil {
		return nil, 0, fmt.Errorf("listing files: %w", err)
	}
	defer C.free(unsafe.Pointer(packed))
	for _, name := range strings.Split(string(unsafe.Slice((*byte)(unsafe.Pointer(packed)), int(n))), "\x00") {
		if name = strings.TrimPrefix(name, "/"); name != "" {
			names = append(names, name)
		}
	}
	return names, int64(size), nil
}

// gone says that the database does not need a file any more.
func (s *Store) gone(name string) bool {
	names, _, err := s.liveFiles()
	return err != nil || !slices.Contains(names, name)
}

// verifyTable checks one SST file; one that a compaction removed meanwhile is
// skipped.
func (s *Store) verifyTable(name string, pace func(int64) error) error {
	path := filepath.Join(s.dir, name)
	size, err := fromDisk(path)
	if err == nil {
		if err = s.enter("verifying a file"); err != nil {
			return err
		}
		cpath := C.CString(path)
		err = take(C.ks_verify_file(s.c, cpath))
		C.free(unsafe.Pointer(cpath))
		s.gate.leave()
	}
	if err != nil {
		if s.gone(name) {
			return nil
		}
		if _, serr := os.Stat(path); errors.Is(serr, fs.ErrNotExist) {
			return fmt.Errorf("%s is missing: %w", path, base.ErrCorrupt)
		}
		if !errors.Is(err, base.ErrDiskFailed) && !errors.Is(err, base.ErrClosed) && !errors.Is(err, base.ErrCorrupt) {
			err = fmt.Errorf("%w: %w", base.ErrCorrupt, err) // a kind of file that was not written like that
		}
		return fmt.Errorf("verifying %s: %w", path, err)
	}
	return pace(size)
}

// fromDisk asks the system to forget what it holds of a file in memory, so that
// the next read tells what is on the disk; it returns the file's size.
func fromDisk(path string) (int64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED) // a wish
	st, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return st.Size(), nil
}

// verifyManifest checks CURRENT and what is valid of the MANIFEST that it names.
func (s *Store) verifyManifest(pace func(int64) error) error {
	for {
		names, size, err := s.liveFiles()
		if err != nil {
			return err
		}
		k := slices.IndexFunc(names, func(n string) bool { return strings.HasPrefix(n, "MANIFEST-") })
		if k < 0 {
			return fmt.Errorf("listing files: no MANIFEST in %q: %w", names, base.ErrInternal)
		}
		name := names[k]
		err = s.checkCurrent(name)
		if err == nil {
			err = checkManifest(filepath.Join(s.dir, name), size)
		}
		if err == nil {
			return pace(size)
		}
		if !s.gone(name) {
			return err
		}
		// RocksDB began a new one meanwhile.
	}
}

func (s *Store) checkCurrent(manifest string) error {
	path := filepath.Join(s.dir, currentFile)
	raw, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("reading %s: %w: %w", path, base.ErrCorrupt, err)
	}
	if string(raw) != manifest+"\n" {
		return fmt.Errorf("%s at offset 0: it says %.64q, not %s: %w", path, raw, manifest, base.ErrCorrupt)
	}
	return nil
}

const (
	logBlock      = 32 << 10
	logHeader     = 7
	logRecycled   = 5 // record types from here on have 4 bytes more in the header
	logMaxType    = 8
	crcMaskDelta  = 0xa282ead8
	logTypeOffset = 6
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// checkManifest checks the first size bytes of a MANIFEST, which is a sequence of
// checksummed records in RocksDB's log format.
func checkManifest(path string, size int64) error {
	if _, err := fromDisk(path); err != nil {
		return fmt.Errorf("reading %s: %w: %w", path, base.ErrCorrupt, err)
	}
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("reading %s: %w: %w", path, base.ErrCorrupt, err)
	}
	defer f.Close()
	block := make([]byte, logBlock)
	for at := int64(0); at < size; at += logBlock {
		b := block[:min(logBlock, size-at)]
		if _, err := f.ReadAt(b, at); err != nil {
			cause := base.ErrDiskFailed
			if errors.Is(err, io.EOF) {
				cause = base.ErrCorrupt
			}
			return fmt.Errorf("reading %s at offset %d: %w: %w", path, at, cause, err)
		}
		if off, bad := checkLogBlock(b); bad != "" {
			return fmt.Errorf("%s at offset %d: %s: %w", path, at+int64(off), bad, base.ErrCorrupt)
		}
	}
	return nil
}

// checkLogBlock checks the records of one block and says where and how one is
// damaged.
func checkLogBlock(b []byte) (off int, bad string) {
	for len(b)-off >= logHeader {
		sum, n, typ := binary.LittleEndian.Uint32(b[off:]), int(binary.LittleEndian.Uint16(b[off+4:])), b[off+logTypeOffset]
		header := logHeader
		if typ >= logRecycled {
			header += 4
		}
		if typ == 0 || typ > logMaxType {
			return off, fmt.Sprintf("a record of type %d", typ)
		}
		if off+header+n > len(b) {
			return off, fmt.Sprintf("a record of %d bytes passes the end of its block", n)
		}
		crc := crc32.Checksum(b[off+logTypeOffset:off+header+n], castagnoli)
		if (crc>>15|crc<<17)+crcMaskDelta != sum {
			return off, "checksum of a record differs"
		}
		off += header + n
	}
	return off, ""
}
