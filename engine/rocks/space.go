package rocks

// #include "native.h"
import "C"

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/keelstate/keelstate/internal/base"
)

// What a store does about a full disk (RO8). RocksDB is never asked to go on after
// it has met one: DESIGN.md, Errors.

// failed returns the background error that stands, if one does.
func (s *Store) failed() error { return take(C.ks_background_error(s.c)) }

// fullRetry is the time between two looks for room.
const fullRetry = 250 * time.Millisecond

// waitForSpace calls do, and while it meets a full disk, again: RocksDB refuses a
// batch before it applies any of it. Once there is room after RocksDB itself met
// the end of the disk, it fails with base.ErrReopen. It gives up when the store is
// closing.
func (s *Store) waitForSpace(do func() error) error {
	for {
		err := s.orReopen(do())
		if !errors.Is(err, syscall.ENOSPC) {
			return err
		}
		select {
		case <-s.closing:
			return err
		case <-time.After(fullRetry):
		}
	}
}

// orReopen turns the background error of a full disk into base.ErrReopen when
// there is room again.
func (s *Store) orReopen(err error) error {
	if !errors.Is(err, syscall.ENOSPC) {
		return err
	}
	if stands := s.failed(); !errors.Is(stands, syscall.ENOSPC) || s.roomToFlush() != nil {
		return err
	}
	// Not the disk's error any more, which would end the node.
	return fmt.Errorf("there is room again after %q: %w", err, base.ErrReopen)
}

// familyRoom is more than the files take that change with a family.
const familyRoom = 1 << 20

// roomToFlush fails with ENOSPC unless what is in memory would find room on the
// disk, with as much again: the store that is opened next gets it from the log.
func (s *Store) roomToFlush() error { return s.room(2*s.memtableBytes() + familyRoom) }

// room fails with ENOSPC unless so many bytes are free on the store's disk.
func (s *Store) room(need uint64) error {
	var disk unix.Statfs_t
	if err := unix.Statfs(s.dir, &disk); err != nil {
		return fmt.Errorf("asking for the room of %s: %w: %w", s.dir, base.ErrDiskFailed, err)
	}
	if free := disk.Bavail * uint64(disk.Bsize); free < need {
		return fmt.Errorf("%d bytes are free, %d may be needed: %w: %w", free, need, base.ErrDiskFailed, syscall.ENOSPC)
	}
	return nil
}

// memtableBytes is what the families that exist have in memory. The caller is
// inside the store's gate.
func (s *Store) memtableBytes() (n uint64) {
	for id := range *s.families.Load() {
		_ = s.inFamily(id, "reading figures", func(f *family) error {
			var c C.ks_family_stats
			err := take(C.ks_stats(f.ref, &c))
			n += uint64(c.memtable_bytes)
			return err
		}) // a family that was dropped just now has no figures
	}
	return n
}
