package snapshot

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// Place is where bytes lie in an object store.
type Place struct {
	Object         string
	Offset, Length int64
}

// Part is the content of one file within an object.
type Part struct {
	SHA256         [sha256.Size]byte
	Offset, Length int64
}

// Object is an object that an upload stored. Parts are the files' contents in it,
// in the order of their offsets; a manifest has none.
type Object struct {
	Key   string
	Size  int64
	Parts []Part
}

// UploadOptions say where an upload goes and what is there. Store, Prefix and
// Attempt are required.
type UploadOptions struct {
	Store objectstore.Store
	// Prefix is the cluster's id.
	Prefix string
	// Attempt is the number of this upload, 1 or more: no other upload of the
	// cluster has it, but for the same one begun again.
	Attempt uint64
	// Savepoint is the number of the savepoint for which it is, or 0. Its objects go
	// to the savepoint's folder, the places in the manifest are names within it, and
	// Known must be nil.
	Savepoint uint64
	// Known says where a content lies that was stored when the checkpoint
	// started; nil knows nothing. It is asked once for every content, by one
	// goroutine.
	Known func(sum [sha256.Size]byte, size int64) (Place, bool)
	// CheckReused looks (Stat) at every object that Known names; what is missing
	// or too short is uploaded anew. Without it, it is believed.
	CheckReused bool
	// Files below PackBelow bytes are put together into objects of at least
	// PackTarget, where there are as many bytes. Defaults 1 MiB and 4 MiB; a
	// negative PackBelow packs only where MaxObjects demands it.
	PackBelow, PackTarget int64
	// MaxObjects bounds the new objects; larger files are packed too where it
	// would be exceeded, up to 4096 files to one object. Default 4096.
	MaxObjects int
	// Parallel bounds the objects uploaded at once. Default 4.
	Parallel int
	// Progress is told how many bytes of all files are in the store so far; the
	// last is FullBytes. It is never called twice at once; may be nil.
	Progress func(bytes int64)
}

func (o *UploadOptions) ensureDefaults() {
	if o.Known == nil {
		o.Known = func([sha256.Size]byte, int64) (Place, bool) { return Place{}, false }
	}
	if o.PackBelow == 0 {
		o.PackBelow = 1 << 20
	}
	if o.PackTarget <= 0 {
		o.PackTarget = 4 << 20
	}
	if o.MaxObjects <= 0 {
		o.MaxObjects = 4096
	}
	if o.Parallel <= 0 {
		o.Parallel = 4
	}
	if o.Progress == nil {
		o.Progress = func(int64) {}
	}
}

func (o *UploadOptions) validate() error {
	if o.Store == nil {
		return base.Invalid("store", "an object store")
	}
	if o.Attempt == 0 {
		return base.Invalid("attempt", "1 or more")
	}
	if o.Savepoint != 0 && o.Known != nil {
		return base.Invalid("known", "a savepoint uses no objects but its own")
	}
	return checkPrefix("prefix", o.Prefix)
}

// key is where an object of the upload is stored.
func (o *UploadOptions) key(sum [sha256.Size]byte) string {
	if o.Savepoint != 0 {
		return SavepointObjectKey(base.ClusterID(o.Prefix), o.Savepoint, sum, o.Attempt)
	}
	return ObjectKey(o.Prefix, sum, o.Attempt)
}

// Uploaded is what an upload has done.
type Uploaded struct {
	ManifestKey    string
	ManifestSHA256 [sha256.Size]byte
	ManifestSize   int64
	// New are the objects that were stored, the manifest the last of them.
	New []Object
	// Reused are the keys of the objects that were there and are referenced, in
	// their order, each once.
	Reused []string
	// FullBytes is the size of all files; NewBytes of the contents that were
	// stored, each counted once, without the manifest.
	FullBytes, NewBytes int64
	// NewFiles are those of Files whose content was stored.
	Files, NewFiles int
	// Requests is how often the store was asked for something.
	Requests int
}

// Upload stores the files of dir that the store does not know, and then the
// manifest with the places of all. It reads what it stores and compares it with
// the manifest: a file that has changed or rotted fails the upload with
// base.ErrCorrupt, which names it (B51). On success m has the places; on failure
// it is as before, and the objects that were stored are referenced by nothing.
// The same upload may be begun again with the same attempt: it goes on.
func Upload(ctx context.Context, dir string, m *Manifest, o UploadOptions) (*Uploaded, error) {
	if err := o.validate(); err != nil {
		return nil, fmt.Errorf("uploading snapshot: %w", err)
	}
	o.ensureDefaults()
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("uploading snapshot of %s: %w", m.Group, err)
	}
	defer root.Close()
	store := &countedStore{Store: o.Store}
	u := &upload{opts: o, root: root, store: store, places: map[content]Place{}, files: map[content]int64{}}
	out, files, err := u.run(ctx, m)
	if err != nil {
		return nil, fmt.Errorf("uploading snapshot of %s: %w", m.Group, err)
	}
	out.Requests = int(store.requests.Load())
	m.Files = files
	return out, nil
}

// upload is the state of one call of Upload.
type upload struct {
	opts  UploadOptions
	root  *os.Root
	store *countedStore
	// files is how many files have a content.
	files map[content]int64

	mu     sync.Mutex
	places map[content]Place // of all that is in the store
	bytes  int64             // of files that are there
}

func (u *upload) run(ctx context.Context, m *Manifest) (*Uploaded, []File, error) {
	placed := *m
	placed.Files = slices.Clone(m.Files)
	for i := range placed.Files {
		f := &placed.Files[i]
		f.Object, f.Offset, f.Length = "", 0, 0
	}
	slices.SortFunc(placed.Files, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	if err := placed.validate(); err != nil {
		return nil, nil, err
	}
	out := &Uploaded{Files: len(placed.Files), FullBytes: placed.Bytes()}
	fresh, err := u.fresh(ctx, placed.Files)
	if err != nil {
		return nil, nil, err
	}
	out.Reused = u.reused()
	loads := packing{u.opts.PackBelow, u.opts.PackTarget, u.opts.MaxObjects}.loads(fresh)
	if out.New, err = u.putAll(ctx, loads); err != nil {
		return nil, nil, err
	}
	for i := range fresh {
		out.NewBytes += fresh[i].Size
		out.NewFiles += int(u.files[content{fresh[i].SHA256, fresh[i].Size}])
	}
	for i := range placed.Files {
		f := &placed.Files[i]
		p := u.places[content{f.SHA256, f.Size}]
		f.Object, f.Offset, f.Length = p.Object, p.Offset, p.Length
		if u.opts.Savepoint != 0 {
			f.Object = f.Object[strings.LastIndexByte(f.Object, '/')+1:]
		}
	}
	if err := placed.CheckPlaces(); err != nil {
		return nil, nil, err
	}
	raw, err := placed.Encode()
	if err != nil {
		return nil, nil, err
	}
	body := objectstore.Bytes(raw)
	out.ManifestKey = u.opts.key(body.SHA256)
	out.ManifestSHA256, out.ManifestSize = body.SHA256, body.Size
	if err := u.put(ctx, out.ManifestKey, body); err != nil {
		return nil, nil, fmt.Errorf("manifest: %w", err)
	}
	out.New = append(out.New, Object{Key: out.ManifestKey, Size: body.Size})
	return out, placed.Files, nil
}

// fresh returns one file of every content that is not in the store. An empty file
// needs no object.
func (u *upload) fresh(ctx context.Context, files []File) ([]File, error) {
	var fresh []File
	for i := range files {
		c := content{files[i].SHA256, files[i].Size}
		u.files[c]++
		if u.files[c] > 1 || c.size == 0 {
			continue
		}
		if p, ok := u.opts.Known(c.sum, c.size); ok && u.reusable(p, c) {
			u.places[c] = p
			continue
		}
		fresh = append(fresh, files[i])
	}
	if u.opts.CheckReused {
		lost, err := u.checkReused(ctx)
		if err != nil {
			return nil, err
		}
		fresh = u.forget(files, fresh, lost)
	}
	for c := range u.places {
		u.bytes += c.size * u.files[c]
	}
	u.opts.Progress(u.bytes)
	return fresh, nil
}

// reusable says whether a place can be that of a content stored by an earlier
// attempt of this cluster. What cannot be is not known: it is stored again.
func (u *upload) reusable(p Place, c content) bool {
	prefix, _, attempt, ours := ParseObjectKey(p.Object)
	return ours && prefix == u.opts.Prefix && attempt != u.opts.Attempt &&
		p.Offset >= 0 && p.Length == c.size && p.Offset+p.Length >= p.Offset
}

// checkReused returns the objects that Known named and that are not there with
// the bytes that are wanted of them.
func (u *upload) checkReused(ctx context.Context) (map[string]bool, error) {
	ends := map[string]int64{}
	for _, p := range u.places {
		ends[p.Object] = max(ends[p.Object], p.Offset+p.Length)
	}
	lost := map[string]bool{}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(u.opts.Parallel)
	for key, end := range ends {
		g.Go(func() error {
			o, err := u.store.Stat(ctx, key)
			if err != nil && !errors.Is(err, base.ErrNotFound) {
				return fmt.Errorf("looking at object %s: %w", key, err)
			}
			if err != nil || o.Size < end {
				u.mu.Lock()
				defer u.mu.Unlock()
				lost[key] = true
			}
			return nil
		})
	}
	return lost, g.Wait()
}

// forget makes the contents of lost objects fresh ones; the order stays that of
// the files.
func (u *upload) forget(files, fresh []File, lost map[string]bool) []File {
	if len(lost) == 0 {
		return fresh
	}
	for c, p := range u.places {
		if lost[p.Object] {
			delete(u.places, c)
		}
	}
	fresh = fresh[:0]
	seen := map[content]bool{}
	for i := range files {
		c := content{files[i].SHA256, files[i].Size}
		if _, there := u.places[c]; !there && !seen[c] && c.size > 0 {
			fresh = append(fresh, files[i])
		}
		seen[c] = true
	}
	return fresh
}

func (u *upload) reused() []string {
	keys := make([]string, 0, len(u.places))
	for _, p := range u.places {
		keys = append(keys, p.Object)
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

// putAll stores the loads and notes their places.
func (u *upload) putAll(ctx context.Context, loads []load) ([]Object, error) {
	objects := make([]Object, len(loads), len(loads)+1)
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(u.opts.Parallel)
	for i := range loads {
		if gctx.Err() != nil {
			break
		}
		g.Go(func() (err error) {
			objects[i], err = u.putLoad(gctx, &loads[i])
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	return distinct(objects), ctx.Err() // gctx ends with Wait
}

// distinct leaves each object once. A pack may be byte for byte what another file
// holds, and is then one object with it: the larger number of parts is kept, and
// what only the other names is not found again by its content.
func distinct(objects []Object) []Object {
	at := make(map[string]int, len(objects))
	out := objects[:0]
	for _, o := range objects {
		i, twice := at[o.Key]
		switch {
		case !twice:
			at[o.Key] = len(out)
			out = append(out, o)
		case len(o.Parts) > len(out[i].Parts):
			out[i] = o
		}
	}
	return out
}

func (u *upload) putLoad(ctx context.Context, l *load) (_ Object, err error) {
	body, closer, err := l.body(ctx, u.root)
	if err != nil {
		return Object{}, err
	}
	defer func() { err = errors.Join(err, closer.Close()) }()
	o := Object{Key: u.opts.key(body.SHA256), Size: l.size, Parts: make([]Part, len(l.files))}
	if err := u.put(ctx, o.Key, body); err != nil {
		return Object{}, fmt.Errorf("%s: %w", l, err)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	for i, at := range l.offsets() {
		f := &l.files[i]
		o.Parts[i] = Part{SHA256: f.SHA256, Offset: at, Length: f.Size}
		c := content{f.SHA256, f.Size}
		u.places[c] = Place{Object: o.Key, Offset: at, Length: f.Size}
		u.bytes += c.size * u.files[c]
	}
	u.opts.Progress(u.bytes)
	return o, nil
}

func (l *load) String() string {
	if len(l.files) == 1 {
		return "file " + l.files[0].Name
	}
	return fmt.Sprintf("pack of %d files, %s to %s", len(l.files), l.files[0].Name, l.files[len(l.files)-1].Name)
}

// put stores an object of this attempt. One that is there already is an earlier
// try's, which may have failed after storing: it is read and compared (SN5).
func (u *upload) put(ctx context.Context, key string, body objectstore.Body) error {
	err := u.store.Put(ctx, key, body)
	unsure := errors.Is(err, base.ErrConflict) || errors.Is(err, base.ErrObjectStore)
	if err == nil || !unsure || ctx.Err() != nil || errors.Is(err, base.ErrCorrupt) {
		return err
	}
	same, lookErr := u.holds(ctx, key, body)
	if lookErr != nil {
		return errors.Join(err, lookErr)
	}
	if !same {
		return err
	}
	return nil
}

// holds says whether the store has the object with these bytes. What broke on the
// way is not the object's fault: it is looked at a second time.
func (u *upload) holds(ctx context.Context, key string, body objectstore.Body) (same bool, err error) {
	for range looks {
		same, err = u.compare(ctx, key, body)
		if same || err != nil && !errors.Is(err, base.ErrCorrupt) {
			break
		}
	}
	return same, err
}

func (u *upload) compare(ctx context.Context, key string, body objectstore.Body) (bool, error) {
	o, err := u.store.Stat(ctx, key)
	if errors.Is(err, base.ErrNotFound) {
		return false, nil
	}
	if err != nil || o.Size != body.Size {
		return false, err
	}
	r, err := u.store.Get(ctx, key, 0, o.Size)
	if err != nil {
		return false, err
	}
	h := sha256.New()
	_, err = io.Copy(h, &contextReader{ctx: ctx, r: r})
	if err = errors.Join(err, r.Close()); err != nil {
		return false, err
	}
	return [sha256.Size]byte(h.Sum(nil)) == body.SHA256, nil
}

// countedStore counts the requests.
type countedStore struct {
	objectstore.Store
	requests atomic.Int64
}

func (s *countedStore) Put(ctx context.Context, key string, body objectstore.Body) error {
	s.requests.Add(1)
	return s.Store.Put(ctx, key, body)
}

func (s *countedStore) Get(ctx context.Context, key string, offset, length int64) (io.ReadCloser, error) {
	s.requests.Add(1)
	return s.Store.Get(ctx, key, offset, length)
}

func (s *countedStore) Stat(ctx context.Context, key string) (objectstore.Object, error) {
	s.requests.Add(1)
	return s.Store.Stat(ctx, key)
}
