package raftlog

import (
	"errors"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/vfs"
)

// Verify reads what the cache hides, and names file and offset of a damaged
// entry.
func TestVerifyReadsPastTheCache(t *testing.T) {
	fsys, told := vfs.NewMem(), atomic.Int32{}
	l := mustOpen(t, fsys, Options{CacheBytes: 1 << 20, MarkDelay: -1, OnCorrupt: func(base.GroupID, error) { told.Add(1) }})
	defer func() { must(t, l.Close()) }()
	g := l.Group(3)
	must(t, g.StoreLogs(entries(5, 60, 2)))
	read := int64(0)
	pace := func(n int64) error { read += n; return nil }
	must(t, l.Group(4).Verify(pace)) // an empty one
	must(t, g.Verify(pace))
	if uint64(read) != g.Bytes() {
		t.Errorf("%d bytes were read of %d", read, g.Bytes())
	}
	stop := errors.New("enough")
	if err := g.Verify(func(int64) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("pace ended it: %v", err)
	}
	s, _ := g.slotOf(40)
	f, err := fsys.OpenReadWrite(filepath.Join("log", segmentName(s.seg)))
	must(t, err)
	var b [1]byte
	_, err = f.ReadAt(b[:], int64(s.off+s.len-1))
	must(t, err)
	_, err = f.WriteAt([]byte{b[0] ^ 1}, int64(s.off+s.len-1))
	must(t, err)
	must(t, f.Close())
	err = g.Verify(pace)
	if !errors.Is(err, base.ErrCorrupt) || !strings.Contains(err.Error(), ".rlog offset ") || !strings.Contains(err.Error(), "entry 40") || told.Load() != 1 {
		t.Errorf("a flipped byte of entry 40: %v, told %d times", err, told.Load())
	}
}

// Cuts at both ends, appends and moves of the compactor beside a Verify are no
// damage.
func TestVerifyBesideChanges(t *testing.T) {
	opt := small()
	opt.OnCorrupt = func(g base.GroupID, err error) { t.Errorf("told of %v", err) }
	l := mustOpen(t, vfs.NewMem(), opt)
	defer func() { must(t, l.Close()) }()
	g, other := l.Group(3), l.Group(4)
	must(t, g.StoreLogs(entries(1, 200, 1)))
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
			}
			if err := g.Verify(func(int64) error { return nil }); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	for i := uint64(1); i <= 150; i++ {
		last, err := g.LastIndex()
		must(t, err)
		must(t, g.DeleteRange(last-9, last))
		must(t, g.StoreLogs(entries(last-9, last+20, i+1)))
		must(t, other.StoreLogs(entries(i, i, 1)))
		if i%3 == 0 {
			first, err := g.FirstIndex()
			must(t, err)
			must(t, g.DeleteRange(first, first+40))
		}
		if i%50 == 0 { // empty for a moment, as after a snapshot
			must(t, g.DeleteRange(0, 1<<60))
			must(t, g.StoreLogs(entries(last+1000, last+1200, i+1)))
		}
	}
	close(stop)
	<-done
	must(t, g.Verify(func(int64) error { return nil }))
}
