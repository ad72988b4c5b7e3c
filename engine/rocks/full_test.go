package rocks

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// needsRelease leaves a test out where the library checks its own assertions:
// Debian's does, and one of them (sync_without_flush_called_) may abort the
// process when a file that met the end of the disk is written to again.
func needsRelease(t *testing.T) {
	t.Helper()
	f, err := elf.Open("/proc/self/exe")
	must(t, err)
	defer f.Close()
	libraries, err := f.ImportedLibraries()
	must(t, err)
	if slices.ContainsFunc(libraries, func(l string) bool { return strings.HasPrefix(l, "librocksdb.so") }) {
		t.Skip("the system's RocksDB has assertions that may abort on a full disk; build one without by make rocksdb-release")
	}
}

// smallDisk mounts a file system of so many bytes in memory.
func smallDisk(t *testing.T, size int) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d", size)); err != nil {
		t.Skipf("a small disk needs root: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// fill takes what is left of a disk.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	must(t, err)
	for block := make([]byte, 64<<10); err == nil; {
		_, err = f.Write(block)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	must(t, f.Close())
}

// RO8, B17: on a full disk a write waits, whatever the flush failed at, and goes
// on when there is space; nothing is lost, and the store opens again.
func TestFullDiskStopsNothingForGood(t *testing.T) {
	needsRelease(t)
	disk := smallDisk(t, 24<<20)
	d, err := NewDriver(Options{MemoryBytes: 8 << 20, FamilyBufferBytes: 512 << 10})
	must(t, err)
	defer func() { must(t, d.Close()) }()
	dir := filepath.Join(disk, "s")
	s, err := d.Open(dir)
	must(t, err)
	family := engine.FamilyID(1)
	must(t, s.EnsureFamily(family, engine.FamilyOptions{Use: engine.UsePoint, GroupWidth: 1}))
	filler := filepath.Join(disk, "filler")
	key := func(i int) []byte { return fmt.Appendf(nil, "%08d", i) }
	value := func(i int) []byte { return bytes.Repeat([]byte{byte(i), byte(i >> 8), 3}, 300) }
	written := make(chan error, 1)
	n := 0
	for round := range 2 {
		fill(t, filler)
		from := n
		n += 6000 // beyond what memory buffers hold
		go func() {
			var b engine.Batch
			for i := from; i < n; i++ {
				b.Reset()
				b.Put(family, key(i%4000), value(i))
				if err := s.Write(&b); err != nil {
					written <- err
					return
				}
			}
			written <- s.Flush()
		}()
		deadline := time.Now().Add(20 * time.Second)
		for s.Stats().Failed == "" {
			select {
			case err := <-written:
				t.Fatalf("round %d: it wrote beside the full disk, or failed: %v", round, err)
			default:
			}
			if time.Now().After(deadline) {
				t.Fatal("the full disk went unnoticed")
			}
			pause()
		}
		must(t, os.Remove(filler))
		select {
		case err := <-written:
			must(t, err)
		case <-time.After(30 * time.Second):
			t.Fatalf("round %d: it did not go on after the disk had space: %s", round, s.Stats().Failed)
		}
	}
	check := func() {
		t.Helper()
		for i := n - 4000; i < n; i++ {
			if v, ok, err := s.Get(family, key(i%4000)); err != nil || !ok || !bytes.Equal(v, value(i)) {
				t.Fatalf("key %d: %v, %v", i, ok, err)
			}
		}
	}
	check()
	if err := s.Close(); err != nil {
		t.Logf("closed after a full disk: %v", err) // the log of messages has lost lines
	}
	s, err = d.Open(dir)
	must(t, err)
	check()
	// A store that is closed while a write waits does not hang.
	fill(t, filler)
	go func() {
		var b engine.Batch
		var err error
		for i := 0; err == nil; i++ {
			b.Reset()
			b.Put(family, key(i), value(i))
			err = s.Write(&b)
		}
		written <- err
	}()
	for s.Stats().Failed == "" {
		pause()
	}
	if err := s.Close(); err != nil {
		t.Logf("closed on the full disk: %v", err) // it may say what could not be written
	}
	if err := <-written; !errors.Is(err, base.ErrDiskFailed) && !errors.Is(err, base.ErrClosed) {
		t.Fatalf("the write that waited: %v", err)
	}
}

// pause is the time between two looks at a condition.
func pause() { time.Sleep(5 * time.Millisecond) }
