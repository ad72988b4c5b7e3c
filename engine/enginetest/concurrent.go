package enginetest

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/keelstate/keelstate/engine"
)

// testReadersBesideWriter: readers, flushes and checkpoints run beside the one
// writer; every view shows whole batches (EN1, EN3), and never an older one
// than was written before it was taken.
func testReadersBesideWriter(h *harness) {
	s := h.openMerging()
	sum, _ := mergeFamily(engine.MergeSum128)
	const batches = 400
	var written atomic.Uint64
	done := make(chan struct{})
	errs := make(chan error, 8)
	var wg sync.WaitGroup
	run := func(name string, step func(round int) error) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for round := 0; ; round++ {
				select {
				case <-done:
					return
				default:
				}
				if err := step(round); err != nil {
					errs <- fmt.Errorf("%s: %w", name, err)
					return
				}
			}
		}()
	}
	for range 2 {
		run("reading a view", func(int) error { return checkView(s, sum, &written) })
	}
	run("reading the store", func(int) error {
		floor := written.Load()
		v, ok, err := s.Get(point, []byte("n"))
		if err != nil || !ok && floor > 0 || ok && numberOf(v) < floor {
			return fmt.Errorf("got %x, %v, %v after batch %d", v, ok, err, floor)
		}
		return nil
	})
	run("flushing", func(int) error {
		if err := s.Flush(); err != nil {
			return err
		}
		_, _, err := s.DurableGet([]byte("n"))
		return err
	})
	checkpoints := h.TempDir()
	run("checkpointing", func(round int) error {
		if round >= 3 {
			return nil
		}
		return s.Checkpoint(filepath.Join(checkpoints, fmt.Sprint(round)))
	})
	one := value(0, append(make([]byte, 15), 1))
	for n := uint64(1); n <= batches; n++ {
		h.write(func(b *engine.Batch) {
			for _, f := range []engine.FamilyID{engine.MetaFamily, scanned, point} {
				b.Put(f, []byte("n"), number(n))
			}
			b.Merge(sum, []byte("n"), one)
			b.Put(scanned, fmt.Appendf(nil, "k%04d", n), number(n))
			if n > 50 {
				b.Delete(scanned, fmt.Appendf(nil, "k%04d", n-50))
			}
		})
		written.Store(n)
	}
	close(done)
	wg.Wait()
	select {
	case err := <-errs:
		h.Fatal(err)
	default:
	}
}

// checkView checks one view of testReadersBesideWriter's store.
func checkView(s engine.Store, sum engine.FamilyID, written *atomic.Uint64) error {
	floor := written.Load()
	v, err := s.NewView()
	if err != nil {
		return err
	}
	defer v.Close()
	var first uint64
	for i, f := range []engine.FamilyID{point, engine.MetaFamily, scanned, sum} {
		got, ok, err := v.Get(f, []byte("n"))
		if err != nil {
			return err
		}
		var n uint64
		if ok {
			n = numberOf(got)
		}
		if i == 0 {
			first = n
		}
		if n != first || n < floor {
			return fmt.Errorf("family %d at batch %d, another at %d, written %d", f, n, first, floor)
		}
	}
	pairs, err := drain(v.Scan(scanned, []byte("k"), []byte("l"), engine.ScanOptions{Reverse: floor%2 == 0}))
	if err != nil {
		return err
	}
	if uint64(len(pairs)) != min(first, 50) {
		return fmt.Errorf("%d entries at batch %d", len(pairs), first)
	}
	if len(pairs) > 0 && pairs[0].value != string(number(first)) && pairs[len(pairs)-1].value != string(number(first)) {
		return errors.New("the newest entry is not at an end of the scan")
	}
	return nil
}
