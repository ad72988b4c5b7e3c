package snapshot

import (
	"bytes"
	"context"
	"fmt"
	"io"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// StoreSource gives the files of a manifest from where it says that they lie in a
// store. What it gives is as long as the file, or ends with an error (OS3); Fetch
// compares the content. A file without a place is base.ErrCorrupt, one whose
// object is gone base.ErrNotFound.
func StoreSource(store objectstore.Store, m *Manifest) Source {
	s := &storeSource{store: store, files: make(map[string]File, len(m.Files))}
	for _, f := range m.Files {
		s.files[f.Name] = f
	}
	return s
}

type storeSource struct {
	store objectstore.Store
	files map[string]File
}

// Open implements Source.
func (s *storeSource) Open(ctx context.Context, name string, offset int64) (io.ReadCloser, error) {
	f, ok := s.files[name]
	switch {
	case !ok:
		return nil, fmt.Errorf("opening %s: the manifest does not know it: %w", name, base.ErrNotFound)
	case offset < 0 || offset > f.Size:
		return nil, fmt.Errorf("opening %s: %w", name, base.Invalid("offset", fmt.Sprintf("0 to %d", f.Size)))
	case !f.placed():
		return nil, fmt.Errorf("opening %s: it has no place in an object store: %w", name, base.ErrCorrupt)
	case offset == f.Size:
		return io.NopCloser(bytes.NewReader(nil)), nil
	}
	r, err := s.store.Get(ctx, f.Object, f.Offset+offset, f.Length-offset)
	if err != nil {
		return nil, fmt.Errorf("opening %s in object %s: %w", name, f.Object, err)
	}
	return r, nil
}
