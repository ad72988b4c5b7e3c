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
)

// verifier is the state of one call of VerifyCheckpoint.
type verifier struct {
	opts   VerifyOptions
	store  *countedStore
	folder string

	mu      sync.Mutex
	out     *Verification
	objects int                      // known so far
	wanted  map[string]*wantedObject // of the files
}

// wantedObject is what the manifests want of an object.
type wantedObject struct {
	// key is what the manifests say if it is not ours.
	key   string
	sum   [sha256.Size]byte
	ours  bool
	shard base.GroupID
	parts []wantedPart
	// segment says what is wrong with the bytes if they are to be a segment.
	segment func(raw []byte) error
}

type wantedPart struct {
	Part
	name string
}

// verdict is what one look at an object says of it; without a fault it is good.
type verdict struct {
	fault      Fault
	why        string
	size, read int64
}

func (v *verifier) run(ctx context.Context, key string) error {
	c, err := v.metadata(ctx, key)
	if c == nil {
		return err
	}
	v.objects += len(c.Shards)
	err = v.each(ctx, len(c.Shards), func(ctx context.Context, i int) error { return v.manifest(ctx, c, &c.Shards[i]) })
	if err != nil {
		return err
	}
	wanted := make([]*wantedObject, 0, len(v.wanted))
	for _, w := range v.wanted {
		slices.SortFunc(w.parts, func(a, b wantedPart) int { return cmp.Compare(a.Offset, b.Offset) })
		wanted = append(wanted, w)
	}
	slices.SortFunc(wanted, func(a, b *wantedObject) int { return strings.Compare(a.key, b.key) })
	v.objects += len(wanted)
	return v.each(ctx, len(wanted), func(ctx context.Context, i int) error {
		w := wanted[i]
		_, err := v.examine(ctx, w.key, w.shard, func() (verdict, error) { return v.object(ctx, w) })
		return err
	})
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

// examine looks at an object, more than once if it seems bad, and notes it if it
// stays so. It says whether the object is good.
func (v *verifier) examine(ctx context.Context, key string, shard base.GroupID, look func() (verdict, error)) (bool, error) {
	var d verdict
	for range looks {
		var err error
		if d, err = look(); err != nil {
			return false, fmt.Errorf("looking at object %s: %w", key, errors.Join(err, ctx.Err()))
		}
		if d.fault == "" {
			break
		}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if d.fault != "" {
		v.out.Bad = append(v.out.Bad, BadObject{Key: key, Fault: d.fault, Why: d.why, Shard: shard})
	}
	v.out.Objects++
	v.out.Bytes += d.size
	v.out.ReadBytes += d.read
	v.opts.Progress(v.out.Objects, v.objects)
	return d.fault == "", nil
}

// stat looks at an object's size.
func (v *verifier) stat(ctx context.Context, key string) (verdict, error) {
	o, err := v.store.Stat(ctx, key)
	if errors.Is(err, base.ErrNotFound) {
		return verdict{fault: FaultMissing, why: "no such object"}, nil
	}
	return verdict{size: o.Size}, err
}

// stream reads an object whose size is known.
func (v *verifier) stream(ctx context.Context, key string, d verdict, to io.Writer) (verdict, error) {
	r, err := v.store.Get(ctx, key, 0, d.size)
	if err == nil {
		d.read, err = io.Copy(to, &contextReader{ctx: ctx, r: r})
		err = errors.Join(err, r.Close())
	}
	switch {
	case err == nil && d.read == d.size:
	case errors.Is(err, base.ErrNotFound):
		d.fault, d.why = FaultMissing, "it has gone meanwhile"
	case d.read < d.size && (err == nil || errors.Is(err, base.ErrCorrupt)):
		d.fault, d.why = FaultShort, fmt.Sprintf("its body ends after %d of %d bytes", d.read, d.size)
	case err == nil || errors.Is(err, base.ErrCorrupt):
		d.fault, d.why = FaultDamaged, fmt.Sprintf("reading it: %v", err)
	default:
		return d, err
	}
	return d, nil
}

// read reads a whole object to memory.
func (v *verifier) read(ctx context.Context, key string, limit int64) ([]byte, verdict, error) {
	d, err := v.stat(ctx, key)
	if err != nil || d.fault != "" {
		return nil, d, err
	}
	if d.size > limit {
		d.fault, d.why = FaultDamaged, fmt.Sprintf("it has %d bytes, %d at most are possible", d.size, limit)
		return nil, d, nil
	}
	b := &memory{b: make([]byte, 0, d.size)}
	d, err = v.stream(ctx, key, d, b)
	return b.b, d, err
}

type memory struct{ b []byte }

func (m *memory) Write(p []byte) (int, error) {
	m.b = append(m.b, p...)
	return len(p), nil
}

// undecodable is the verdict on bytes that cannot be decoded; a newer format is
// an error, not damage.
func (d verdict) undecodable(err error) (verdict, error) {
	if errors.Is(err, base.ErrFormatVersion) {
		return d, err
	}
	d.fault, d.why = FaultDamaged, err.Error()
	return d, nil
}

// metadata reads `_metadata`; it returns nothing if that is not possible.
func (v *verifier) metadata(ctx context.Context, key string) (*Checkpoint, error) {
	_, err := v.examine(ctx, key, base.SystemGroup, func() (verdict, error) {
		raw, d, err := v.read(ctx, key, MaxCheckpointBytes)
		if err != nil || d.fault != "" {
			return d, err
		}
		c, err := DecodeCheckpoint(raw)
		if err != nil {
			return d.undecodable(err)
		}
		c.folder, v.out.Checkpoint = v.folder, c
		if why := c.misplaced(key); why != "" {
			d.fault, d.why = FaultForeign, why
		}
		return d, nil
	})
	return v.out.Checkpoint, err
}

// maxManifestBytes bounds what is read as a manifest: the most files with the
// longest names and keys take less.
const maxManifestBytes = 256 << 20

// manifest looks at the manifest of a shard and notes what it wants.
func (v *verifier) manifest(ctx context.Context, c *Checkpoint, s *Shard) error {
	var m *Manifest
	key, sum, ours := c.resolve(s.ManifestKey)
	if !ours {
		key = s.ManifestKey
	}
	_, err := v.examine(ctx, key, s.Group, func() (_ verdict, err error) {
		if !ours || sum != s.ManifestSHA256 {
			return verdict{fault: FaultForeign, why: fmt.Sprintf("it is not named as a manifest of %s in this checkpoint", s.Group)}, nil
		}
		raw, d, err := v.read(ctx, key, maxManifestBytes)
		switch {
		case err != nil || d.fault != "":
			return d, err
		case d.size < s.ManifestSize:
			d.fault, d.why = FaultShort, fmt.Sprintf("it has %d of %d bytes", d.size, s.ManifestSize)
			return d, nil
		case d.size > s.ManifestSize || sha256.Sum256(raw) != sum:
			d.fault, d.why = FaultDamaged, "its SHA-256 is not the one of its name"
			return d, nil
		}
		got, err := Decode(raw)
		if err == nil {
			err = got.CheckPlaces()
		}
		if err != nil {
			return d.undecodable(err)
		}
		m = got
		if why := c.differs(s, m); why != "" {
			d.fault, d.why = FaultForeign, why
		}
		return d, nil
	})
	if err == nil && m != nil {
		v.want(c, m)
	}
	return err
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
func (v *verifier) want(c *Checkpoint, m *Manifest) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.out.Files += len(m.Files)
	for i := range m.Files {
		f := &m.Files[i]
		if f.Object == "" {
			continue
		}
		w := v.wantObject(c, m, f.Object)
		w.parts = append(w.parts, wantedPart{Part{f.SHA256, f.Offset, f.Length}, f.Name})
	}
	if m.Changelog == nil {
		return
	}
	v.out.Segments += len(m.Changelog.Segments)
	for i := range m.Changelog.Segments {
		s := &m.Changelog.Segments[i]
		w := v.wantObject(c, m, s.Object)
		w.parts = append(w.parts, wantedPart{Part{s.SHA256, 0, s.Size}, s.FileName()})
		w.segment = func(raw []byte) error {
			_, err := m.OpenSegment(s, raw)
			return err
		}
	}
}

// wantObject returns what is wanted of an object that a manifest names.
func (v *verifier) wantObject(c *Checkpoint, m *Manifest, name string) *wantedObject {
	w := v.wanted[name]
	if w == nil {
		w = &wantedObject{key: name, shard: m.Group}
		if key, sum, ours := c.resolve(name); ours {
			w.key, w.sum, w.ours = key, sum, true
		}
		v.wanted[name] = w
	}
	return w
}

// object looks at an object that holds files.
func (v *verifier) object(ctx context.Context, w *wantedObject) (verdict, error) {
	if !w.ours {
		return verdict{fault: FaultForeign, why: fmt.Sprintf("it is no object of cluster %s", v.out.Checkpoint.ClusterID)}, nil
	}
	d, err := v.stat(ctx, w.key)
	if err != nil || d.fault != "" {
		return d, err
	}
	if d.fault, d.why = w.sizeFault(d.size); d.fault != "" || !v.opts.Full {
		return d, nil
	}
	whole, parts := sha256.New(), &partHashes{todo: w.parts}
	to := []io.Writer{whole, parts}
	raw := &memory{}
	if w.segment != nil { // it has no more than MaxSegmentBytes: its size was compared
		to = append(to, raw)
	}
	d, err = v.stream(ctx, w.key, d, io.MultiWriter(to...))
	switch {
	case err != nil || d.fault != "":
	case [sha256.Size]byte(whole.Sum(nil)) != w.sum:
		d.fault, d.why = FaultDamaged, "its SHA-256 is not the one of its name"
	case parts.wrong != "":
		d.fault, d.why = FaultDamaged, fmt.Sprintf("where file %s should be is another content", parts.wrong)
	case w.segment != nil:
		if err := w.segment(raw.b); err != nil {
			if errors.Is(err, base.ErrFormatVersion) {
				return d, err
			}
			d.fault, d.why = FaultForeign, err.Error()
		}
	}
	return d, err
}

// sizeFault says what is wrong with an object of that size. Its parts tell the
// least; one file that is the whole object tells the size.
func (w *wantedObject) sizeFault(size int64) (Fault, string) {
	for i := range w.parts {
		p := &w.parts[i]
		if end := p.Offset + p.Length; size < end {
			return FaultShort, fmt.Sprintf("it has %d bytes, file %s needs %d", size, p.name, end)
		}
		if p.SHA256 == w.sum && (p.Offset != 0 || p.Length != size) {
			return FaultDamaged, fmt.Sprintf("it has %d bytes, file %s, which is the whole of it, %d", size, p.name, p.Length)
		}
	}
	return "", ""
}

// partHashes hashes parts of a stream, which may overlap. todo is in the order of
// the offsets; no part is empty or goes beyond the stream.
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

// Write implements io.Writer.
func (p *partHashes) Write(b []byte) (int, error) {
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
	return len(b), nil
}
