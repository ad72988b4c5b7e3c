package snapshot

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// PutSegment stores a segment of a shard's log and says where it lies. It is
// referenced by nothing until UploadChangelog has stored a manifest that names it.
// The same segment may be stored again under the same attempt.
func PutSegment(ctx context.Context, s *Segment, o UploadOptions) (SegmentRef, error) {
	fail := func(err error) (SegmentRef, error) {
		return SegmentRef{}, fmt.Errorf("storing changelog segment %d to %d of %s: %w", s.First, s.Last(), s.Group, err)
	}
	if err := o.validate(); err != nil {
		return fail(err)
	}
	raw, err := s.Encode()
	if err != nil {
		return fail(err)
	}
	body := objectstore.Bytes(raw)
	ref := SegmentRef{First: s.First, Last: s.Last(), Size: body.Size, SHA256: body.SHA256, Object: o.key(body.SHA256)}
	u := &upload{opts: o, store: &countedStore{Store: o.Store}}
	if err := u.put(ctx, ref.Object, body); err != nil {
		return fail(err)
	}
	return ref, nil
}

// UploadChangelog stores the manifest of a shard that is its files, which an earlier
// upload has stored, and a changelog, whose segments are stored too. Unregistered
// are the keys of those segments that the registry does not know; they are New, as
// the manifest is, and all else is Reused. With CheckReused every object is looked
// at: base.ErrNotFound names one that is missing or too short, and nothing is stored
// then.
func UploadChangelog(ctx context.Context, m *Manifest, unregistered map[string]bool, o UploadOptions) (*Uploaded, error) {
	out, err := uploadChangelog(ctx, m, unregistered, o)
	if err != nil {
		return nil, fmt.Errorf("uploading changelog of %s: %w", m.Group, err)
	}
	return out, nil
}

func uploadChangelog(ctx context.Context, m *Manifest, unregistered map[string]bool, o UploadOptions) (*Uploaded, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	o.ensureDefaults()
	if m.Changelog == nil || o.Savepoint != 0 {
		return nil, base.Invalid("changelog", "a manifest with a changelog, which no savepoint has")
	}
	if err := m.CheckPlaces(); err != nil {
		return nil, err
	}
	raw, err := m.Encode()
	if err != nil {
		return nil, err
	}
	store := &countedStore{Store: o.Store}
	u := &upload{opts: o, store: store, places: map[content]Place{}}
	out := &Uploaded{Files: len(m.Files) + len(m.Changelog.Segments), FullBytes: m.Bytes()}
	ends := map[string]int64{}
	for i := range m.Files {
		if f := &m.Files[i]; f.Object != "" {
			ends[f.Object] = max(ends[f.Object], f.Offset+f.Length)
		}
	}
	for i := range m.Changelog.Segments {
		s := &m.Changelog.Segments[i]
		ends[s.Object] = max(ends[s.Object], s.Size)
		if unregistered[s.Object] {
			out.New = append(out.New, Object{Key: s.Object, Size: s.Size})
			out.NewBytes += s.Size
			out.NewFiles++
		}
	}
	if o.CheckReused {
		if err := u.demand(ctx, ends); err != nil {
			return nil, err
		}
	}
	for key := range ends {
		if !unregistered[key] {
			out.Reused = append(out.Reused, key)
		}
	}
	slices.Sort(out.Reused)
	body := objectstore.Bytes(raw)
	out.ManifestKey = u.opts.key(body.SHA256)
	out.ManifestSHA256, out.ManifestSize = body.SHA256, body.Size
	if err := u.put(ctx, out.ManifestKey, body); err != nil {
		return nil, fmt.Errorf("manifest: %w", err)
	}
	out.New = append(out.New, Object{Key: out.ManifestKey, Size: body.Size})
	out.Requests = int(store.requests.Load())
	return out, nil
}

// demand looks whether objects are there with as many bytes as are wanted of them.
func (u *upload) demand(ctx context.Context, ends map[string]int64) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(u.opts.Parallel)
	for key, end := range ends {
		g.Go(func() error {
			switch o, err := u.store.Stat(ctx, key); {
			case errors.Is(err, base.ErrNotFound):
				return fmt.Errorf("object %s, which an earlier checkpoint has stored, is lost: %w", key, err)
			case err != nil:
				return fmt.Errorf("looking at object %s: %w", key, err)
			case o.Size < end:
				return fmt.Errorf("object %s has %d of %d bytes: %w", key, o.Size, end, base.ErrNotFound)
			}
			return nil
		})
	}
	return g.Wait()
}
