package rocks

import (
	"fmt"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/keelstate/keelstate/engine"
)

// wholeBatch is a batch that takes longer to write than to flush: it is often
// half written when a flush chooses its families.
func wholeBatch(b *engine.Batch, i uint64) {
	n := []byte(strconv.FormatUint(i, 10))
	b.Reset()
	b.Put(crashValue, []byte("v"), n)
	b.Put(crashMap, []byte("m"), n)
	for k := range 40_000 {
		b.Put(crashMap, fmt.Appendf(nil, "key%d", k%100), nil)
	}
	b.Put(crashList, []byte("l"), n)
	b.Merge(crashSum, []byte("s"), fmt.Appendf(engine.AppendHeader(nil, engine.Header{Sequence: i}), "%020d", i))
	b.Put(engine.MetaFamily, []byte("index"), n)
}

// beside runs write over and over, and do from the end of the first write on; it
// returns when both have ended.
func beside(t *testing.T, write func() error, do func()) {
	t.Helper()
	stop := make(chan struct{})
	ended := make(chan error, 1)
	must(t, write())
	go func() {
		for {
			select {
			case <-stop:
				ended <- nil
				return
			default:
			}
			if err := write(); err != nil {
				ended <- err
				return
			}
		}
	}()
	do()
	close(stop)
	must(t, <-ended)
}

// RO1: whatever flushes beside the writer, what is on disk and in a checkpoint
// is the effect of whole batches. (RocksDB itself flushes a part of a batch:
// native_compact.cc, and ks_store in native_internal.h.)
func TestNothingFlushesAPartOfABatch(t *testing.T) {
	for _, flusher := range []struct {
		name  string
		times int
		call  func(s engine.Store, dir string) error
	}{
		{"checkpoint", 6, func(s engine.Store, dir string) error { return s.Checkpoint(dir) }},
		{"compact", 6, func(s engine.Store, _ string) error { return s.Compact() }},
		{"flush", 6, func(s engine.Store, _ string) error { return s.Flush() }},
	} {
		t.Run(flusher.name, func(t *testing.T) {
			d, err := crashDriver("")
			must(t, err)
			defer func() { must(t, d.Close()) }()
			dir := t.TempDir()
			check := func(at string) (i uint64) {
				s, err := d.Open(filepath.Join(dir, at))
				must(t, err)
				defer func() { must(t, s.Close()) }()
				must(t, crashFamilies(s))
				i, err = crashIndex(s)
				if err != nil {
					t.Errorf("%s: %v", at, err)
				}
				return i
			}
			i := uint64(0)
			for round := range 2 {
				s, err := d.Open(filepath.Join(dir, "s"))
				must(t, err)
				must(t, crashFamilies(s))
				var b engine.Batch
				var checkpoints []string
				write := func() error {
					i++
					wholeBatch(&b, i)
					return s.Write(&b)
				}
				beside(t, write, func() {
					for n := range flusher.times {
						c := fmt.Sprintf("c%d-%d", round, n)
						checkpoints = append(checkpoints, c)
						must(t, flusher.call(s, filepath.Join(dir, c)))
					}
				})
				must(t, s.Close())
				i = check("s")
				for _, c := range checkpoints {
					if flusher.name == "checkpoint" {
						check(c)
					}
				}
			}
			if i == 0 {
				t.Error("nothing became durable")
			}
		})
	}
}

// RO1 for a family that is created beside a flush: its part of the first batch
// that writes to it is on disk if the rest is.
func TestNewFamilyIsFlushedWithItsBatch(t *testing.T) {
	d, err := crashDriver("")
	must(t, err)
	defer func() { must(t, d.Close()) }()
	dir := t.TempDir()
	open := func() engine.Store {
		s, err := d.Open(dir)
		must(t, err)
		return s
	}
	key := []byte("newest")
	next := engine.FamilyID(10)
	for range 4 {
		s := open()
		var b engine.Batch
		create := func() error {
			if err := s.EnsureFamily(next, engine.FamilyOptions{Use: engine.UsePoint, GroupWidth: 1}); err != nil {
				return err
			}
			n := []byte(strconv.Itoa(int(next)))
			b.Reset()
			b.Put(next, key, n)
			b.Put(engine.MetaFamily, key, n)
			next++
			return s.Write(&b)
		}
		beside(t, create, func() {
			for range 10 {
				must(t, s.Flush())
			}
		})
		must(t, s.Close())
		s = open()
		v, ok, err := s.Get(engine.MetaFamily, key)
		must(t, err)
		if !ok {
			t.Fatal("no batch became durable")
		}
		newest, err := strconv.Atoi(string(v))
		must(t, err)
		for f := 10; f <= newest; f++ {
			if got, ok, err := s.Get(engine.FamilyID(f), key); err != nil || !ok || string(got) != strconv.Itoa(f) {
				t.Fatalf("family %d of %s: %q, %v, %v", f, v, got, ok, err)
			}
		}
		must(t, s.Close())
		next = engine.FamilyID(newest + 1) // later batches are lost
	}
}
