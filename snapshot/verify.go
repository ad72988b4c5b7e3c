package snapshot

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
)

// VerifyOptions tune VerifyCheckpoint.
type VerifyOptions struct {
	// Full reads and hashes every object; otherwise only `_metadata` and manifests
	// are read, and the sizes of the others are looked at.
	Full bool
	// Parallel bounds the objects looked at once. Default 4.
	Parallel int
	// Progress is told how many of the objects known so far are looked at. It is
	// never called twice at once; may be nil.
	Progress func(done, objects int)
}

// Fault says what is wrong with an object.
type Fault string

// The faults.
const (
	// FaultMissing: there is no such object.
	FaultMissing Fault = "missing"
	// FaultShort: it has fewer bytes than are wanted of it.
	FaultShort Fault = "short"
	// FaultForeign: it is not one of this checkpoint: of another cluster, shard,
	// or number, or of a name that is not ours.
	FaultForeign Fault = "foreign"
	// FaultDamaged: its bytes are not what they were.
	FaultDamaged Fault = "damaged"
)

// BadObject is an object that is not as it must be.
type BadObject struct {
	Key   string
	Fault Fault
	// Why says more, in words; Shard is one that needs the object, 0 if all do.
	Why   string
	Shard base.GroupID
}

// Verification is what VerifyCheckpoint found.
type Verification struct {
	Key string
	// Checkpoint is what `_metadata` says; nil if it cannot be read.
	Checkpoint *Checkpoint
	Full       bool
	// Objects is how many were looked at, `_metadata` and manifests included;
	// Bytes is their size, ReadBytes how much of it was read.
	Objects          int
	Bytes, ReadBytes int64
	Files, Requests  int
	// Bad is in the order of the keys.
	Bad []BadObject
}

// Err is nil if nothing is bad, else it names every bad object, and is
// base.ErrCorrupt.
func (v *Verification) Err() error {
	if len(v.Bad) == 0 {
		return nil
	}
	texts := make([]string, len(v.Bad))
	for i, b := range v.Bad {
		texts[i] = fmt.Sprintf("%s is %s (%s)", b.Key, b.Fault, b.Why)
	}
	return fmt.Errorf("%d bad objects: %s: %w", len(v.Bad), strings.Join(texts, "; "), base.ErrCorrupt)
}

// VerifyCheckpoint looks at all objects of a checkpoint, and names each that is
// missing, short, foreign or damaged (SN10). The error is nil only if all are as
// they must be: it is base.ErrCorrupt if objects are bad, and another if not all
// could be looked at. The verification holds what was found so far, except after
// base.ErrInvalid, for a key that is not one of a checkpoint.
func VerifyCheckpoint(ctx context.Context, store objectstore.Store, metadataKey string, o VerifyOptions) (*Verification, error) {
	cluster, number, ok := ParseMetadataKey(metadataKey)
	if !ok {
		return nil, fmt.Errorf("verifying checkpoint: %w", base.Invalid("key", fmt.Sprintf("%.200q is not the key of a checkpoint", metadataKey)))
	}
	if o.Parallel <= 0 {
		o.Parallel = 4
	}
	if o.Progress == nil {
		o.Progress = func(int, int) {}
	}
	counted := &countedStore{Store: store}
	v := &verifier{
		opts: o, store: counted, cluster: cluster, wanted: map[string]*wantedObject{},
		out: &Verification{Key: metadataKey, Full: o.Full}, objects: 1,
	}
	err := v.run(ctx, metadataKey, number)
	v.out.Requests = int(counted.requests.Load())
	slices.SortFunc(v.out.Bad, func(a, b BadObject) int { return strings.Compare(a.Key, b.Key) })
	if err = errors.Join(err, v.out.Err()); err != nil {
		return v.out, fmt.Errorf("verifying checkpoint %d: %w", number, err)
	}
	return v.out, nil
}

// verifier is the state of one call of VerifyCheckpoint.
type verifier struct {
	opts    VerifyOptions
	store   *countedStore
	cluster base.ClusterID

	mu      sync.Mutex
	out     *Verification
	objects int                      // known so far
	wanted  map[string]*wantedObject // of the files
}

// wantedObject is what the manifests want of an object.
type wantedObject struct {
	key   string
	shard base.GroupID
	parts []wantedPart
}

type wantedPart struct {
	Part
	name string
}

func (v *verifier) run(ctx context.Context, key string, number uint64) error {
	raw, err := v.read(ctx, key, base.SystemGroup, MaxCheckpointBytes)
	if raw == nil {
		return err
	}
	c, err := DecodeCheckpoint(raw)
	if err != nil {
		return v.undecodable(key, base.SystemGroup, err)
	}
	v.out.Checkpoint = c
	if c.ClusterID != v.cluster || c.Number != number {
		v.bad(key, base.SystemGroup, FaultForeign, fmt.Sprintf("it is of checkpoint %d of cluster %s", c.Number, c.ClusterID))
	}
	v.objects += len(c.Shards)
	err = v.each(ctx, len(c.Shards), func(ctx context.Context, i int) error { return v.manifest(ctx, c, &c.Shards[i]) })
	if err != nil {
		return err
	}
	wanted := make([]*wantedObject, 0, len(v.wanted))
	for _, w := range v.wanted {
		wanted = append(wanted, w)
	}
	slices.SortFunc(wanted, func(a, b *wantedObject) int { return strings.Compare(a.key, b.key) })
	v.objects += len(wanted)
	return v.each(ctx, len(wanted), func(ctx context.Context, i int) error { return v.object(ctx, wanted[i]) })
}

// each calls f for every number below n, some at once, and stops at an error.
func (v *verifier) each(ctx context.Context, n int, f func(ctx context.Context, i int) error) error {
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(v.opts.Parallel)
	for i := range n {
		if gctx.Err() != nil {
			break
		}
		g.Go(func() error { return f(gctx, i) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	return ctx.Err()
}

func (v *verifier) bad(key string, shard base.GroupID, fault Fault, why string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.out.Bad = append(v.out.Bad, BadObject{Key: key, Fault: fault, Why: why, Shard: shard})
}

// looked counts an object that was looked at.
func (v *verifier) looked(size, read int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.out.Objects++
	v.out.Bytes += size
	v.out.ReadBytes += read
	v.opts.Progress(v.out.Objects, v.objects)
}

// stat looks at an object; it says false if it is missing, which is noted.
func (v *verifier) stat(ctx context.Context, key string, shard base.GroupID) (int64, bool, error) {
	o, err := v.store.Stat(ctx, key)
	switch {
	case errors.Is(err, base.ErrNotFound):
		v.bad(key, shard, FaultMissing, "no such object")
		v.looked(0, 0)
		return 0, false, nil
	case err != nil:
		return 0, false, fmt.Errorf("looking at object %s: %w", key, err)
	}
	return o.Size, true, nil
}

// read reads a whole object to memory. Without bytes and error it is bad, which
// is noted.
func (v *verifier) read(ctx context.Context, key string, shard base.GroupID, limit int64) ([]byte, error) {
	size, ok, err := v.stat(ctx, key, shard)
	if err != nil || !ok {
		return nil, err
	}
	if size > limit {
		v.bad(key, shard, FaultDamaged, fmt.Sprintf("it has %d bytes, %d at most are possible", size, limit))
		v.looked(size, 0)
		return nil, nil
	}
	raw := make([]byte, 0, size)
	if ok, err := v.stream(ctx, key, shard, size, func(b []byte) { raw = append(raw, b...) }); err != nil || !ok {
		return nil, err
	}
	return raw, nil
}

// stream reads an object of a known size; it says false if the object is bad,
// which is noted.
func (v *verifier) stream(ctx context.Context, key string, shard base.GroupID, size int64, to func([]byte)) (bool, error) {
	r, err := v.store.Get(ctx, key, 0, size)
	var n int64
	if err == nil {
		n, err = io.Copy(writerFunc(to), &contextReader{ctx: ctx, r: r})
		err = errors.Join(err, r.Close())
	}
	switch {
	case err == nil && n == size:
		v.looked(size, n)
		return true, nil
	case err == nil, errors.Is(err, base.ErrCorrupt):
		v.bad(key, shard, FaultShort, fmt.Sprintf("its body ends after %d of %d bytes, or does not end there", n, size))
	case errors.Is(err, base.ErrNotFound):
		v.bad(key, shard, FaultMissing, "it has gone meanwhile")
	default:
		return false, fmt.Errorf("reading object %s: %w", key, err)
	}
	v.looked(size, n)
	return false, nil
}

type writerFunc func([]byte)

func (f writerFunc) Write(p []byte) (int, error) {
	f(p)
	return len(p), nil
}

// undecodable notes a damaged object; a newer format is an error, not damage.
func (v *verifier) undecodable(key string, shard base.GroupID, err error) error {
	if errors.Is(err, base.ErrFormatVersion) {
		return fmt.Errorf("object %s: %w", key, err)
	}
	v.bad(key, shard, FaultDamaged, err.Error())
	return nil
}

// maxManifestBytes bounds what is read as a manifest: the most files with the
// longest names and keys take less.
const maxManifestBytes = 256 << 20

// manifest looks at the manifest of a shard and notes what it wants.
func (v *verifier) manifest(ctx context.Context, c *Checkpoint, s *Shard) error {
	prefix, sum, _, ours := ParseObjectKey(s.ManifestKey)
	if !ours || prefix != string(v.cluster) || sum != s.ManifestSHA256 {
		v.bad(s.ManifestKey, s.Group, FaultForeign, fmt.Sprintf("it is not named as a manifest of %s in this checkpoint", s.Group))
		v.looked(0, 0)
		return nil
	}
	raw, err := v.read(ctx, s.ManifestKey, s.Group, maxManifestBytes)
	if raw == nil {
		return err
	}
	switch {
	case int64(len(raw)) < s.ManifestSize:
		v.bad(s.ManifestKey, s.Group, FaultShort, fmt.Sprintf("it has %d of %d bytes", len(raw), s.ManifestSize))
		return nil
	case sha256.Sum256(raw) != s.ManifestSHA256:
		v.bad(s.ManifestKey, s.Group, FaultDamaged, "its SHA-256 is another")
		return nil
	}
	m, err := Decode(raw)
	if err == nil {
		err = m.CheckPlaces()
	}
	if err != nil {
		return v.undecodable(s.ManifestKey, s.Group, err)
	}
	if why := c.differs(s, m); why != "" {
		v.bad(s.ManifestKey, s.Group, FaultForeign, why)
	}
	v.want(m)
	return nil
}

// differs says in what a manifest is not the one of a shard's cut, or nothing.
func (c *Checkpoint) differs(s *Shard, m *Manifest) string {
	for _, f := range []struct {
		name      string
		got, want any
	}{
		{"group", m.Group, s.Group}, {"birth", m.Birth, s.Birth}, {"epoch", m.Epoch, s.Epoch}, {"range", m.Range, s.Range},
		{"incarnation", m.Incarnation, c.Incarnation}, {"M", m.M, c.M}, {"engine", m.Engine, c.Engine},
		{"index", m.Index, s.Index}, {"term", m.Term, s.Term}, {"sequence", m.Sequence, s.Sequence}, {"clock", m.ClockMs, s.ClockMs},
		{"size of all files", m.Bytes(), s.FullBytes},
	} {
		if f.got != f.want {
			return fmt.Sprintf("its %s is %v, the checkpoint says %v", f.name, f.got, f.want)
		}
	}
	return ""
}

// want notes the objects of a manifest's files.
func (v *verifier) want(m *Manifest) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.out.Files += len(m.Files)
	for i := range m.Files {
		f := &m.Files[i]
		if f.Object == "" {
			continue
		}
		w := v.wanted[f.Object]
		if w == nil {
			w = &wantedObject{key: f.Object, shard: m.Group}
			v.wanted[f.Object] = w
		}
		w.parts = append(w.parts, wantedPart{Part{f.SHA256, f.Offset, f.Length}, f.Name})
	}
}

// object looks at an object that holds files.
func (v *verifier) object(ctx context.Context, w *wantedObject) error {
	prefix, sum, _, ours := ParseObjectKey(w.key)
	if !ours || prefix != string(v.cluster) {
		v.bad(w.key, w.shard, FaultForeign, fmt.Sprintf("it is no object of cluster %s", v.cluster))
		v.looked(0, 0)
		return nil
	}
	size, ok, err := v.stat(ctx, w.key, w.shard)
	if err != nil || !ok {
		return err
	}
	slices.SortFunc(w.parts, func(a, b wantedPart) int { return cmp.Compare(a.Offset, b.Offset) })
	if fault, why := w.sizeFault(size, sum); fault != "" {
		v.bad(w.key, w.shard, fault, why)
		v.looked(size, 0)
		return nil
	}
	if !v.opts.Full {
		v.looked(size, 0)
		return nil
	}
	whole := sha256.New()
	parts := &partHashes{todo: w.parts}
	ok, err = v.stream(ctx, w.key, w.shard, size, func(b []byte) {
		whole.Write(b)
		parts.write(b)
	})
	switch {
	case err != nil || !ok:
		return err
	case [sha256.Size]byte(whole.Sum(nil)) != sum:
		v.bad(w.key, w.shard, FaultDamaged, "its SHA-256 is not the one of its name")
	case parts.wrong != "":
		v.bad(w.key, w.shard, FaultDamaged, fmt.Sprintf("where file %s should be is another content", parts.wrong))
	}
	return nil
}

// sizeFault says what is wrong with an object of that size. Its parts tell the
// least; one file that is the whole object tells the size.
func (w *wantedObject) sizeFault(size int64, sum [sha256.Size]byte) (Fault, string) {
	for i := range w.parts {
		p := &w.parts[i]
		if end := p.Offset + p.Length; size < end {
			return FaultShort, fmt.Sprintf("it has %d bytes, file %s needs %d", size, p.name, end)
		}
		if p.SHA256 == sum && (p.Offset != 0 || p.Length != size) {
			return FaultDamaged, fmt.Sprintf("it has %d bytes, file %s, which is the whole of it, %d", size, p.name, p.Length)
		}
	}
	return "", ""
}

// partHashes hashes parts of a stream, which may overlap. todo is in the order of
// the offsets.
type partHashes struct {
	todo  []wantedPart
	open  []openPart
	at    int64
	wrong string // the name of a file whose part is another
}

type openPart struct {
	*wantedPart
	h    hash.Hash
	left int64
}

func (p *partHashes) write(b []byte) {
	end := p.at + int64(len(b))
	for len(p.todo) > 0 && p.todo[0].Offset < end {
		p.open = append(p.open, openPart{&p.todo[0], sha256.New(), p.todo[0].Length})
		p.todo = p.todo[1:]
	}
	still := p.open[:0]
	for _, o := range p.open {
		chunk := b[max(0, o.Offset-p.at):]
		chunk = chunk[:min(int64(len(chunk)), o.left)]
		o.h.Write(chunk)
		if o.left -= int64(len(chunk)); o.left > 0 {
			still = append(still, o)
		} else if [sha256.Size]byte(o.h.Sum(nil)) != o.SHA256 {
			p.wrong = o.name
		}
	}
	p.open = still
	p.at = end
}
