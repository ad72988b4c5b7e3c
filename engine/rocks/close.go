package rocks

// #include "native.h"
import "C"

import (
	"fmt"
	"maps"
	"slices"

	"github.com/keelstate/keelstate/internal/base"
)

// Close implements engine.Store. It ends flushes and compactions early, waits
// for the calls that are running, and frees everything. Views and iterators
// that are still open fail with base.ErrClosed from then on; Close frees them
// too and returns an error wrapping base.ErrConflict that counts them, since
// their owner forgot them or still believes in them. A second Close does
// nothing.
func (s *Store) Close() error {
	s.mu.Lock()
	if s.mu.closed {
		s.mu.Unlock()
		return nil
	}
	s.mu.closed = true
	s.mu.Unlock()
	close(s.closing)
	C.ks_interrupt(s.c)
	s.gate.shut()

	// From here on nobody changes families, views or dropped; reads and
	// iterators stop at the gates of the families.
	all := slices.Collect(maps.Values(*s.families.Load()))
	all = append(all, s.mu.dropped...)
	iterators := 0
	for _, f := range all {
		f.gate.shut()
		for it := range f.iters {
			C.ks_iter_free(it.c)
			iterators++
		}
		f.iters = nil
	}
	for v := range s.mu.views {
		C.ks_snapshot_release(v.c)
	}
	for _, f := range all {
		C.ks_family_release(f.ref)
	}
	err := take(C.ks_close(s.c))
	if s.abs != "" {
		s.driver.release(s.abs)
	}
	if err != nil {
		return fmt.Errorf("closing store %s: %w", s.dir, err)
	}
	if n := len(s.mu.views); n > 0 || iterators > 0 {
		return fmt.Errorf("closing store %s with %d views and %d iterators open: %w", s.dir, n, iterators, base.ErrConflict)
	}
	return nil
}
