package snapshot

import (
	"bufio"
	"crypto/sha256"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/keelstate/keelstate/internal/base"
)

// Dump prints a manifest, a changelog segment or a `_metadata`, whichever the bytes
// are, as text. It fails as Decode, DecodeSegment and DecodeCheckpoint do, and
// prints nothing then.
func Dump(w io.Writer, raw []byte) error {
	b := bufio.NewWriter(w)
	switch {
	case strings.HasPrefix(string(raw), manifestMagic):
		m, err := Decode(raw)
		if err != nil {
			return err
		}
		dumpManifest(b, m)
	case strings.HasPrefix(string(raw), segmentMagic):
		s, err := DecodeSegment(raw)
		if err != nil {
			return err
		}
		dumpSegment(b, s)
	case strings.HasPrefix(string(raw), checkpointMagic):
		c, err := DecodeCheckpoint(raw)
		if err != nil {
			return err
		}
		dumpCheckpoint(b, c)
	default:
		return fmt.Errorf("dumping: neither a manifest nor a changelog segment nor a checkpoint's _metadata: %w", base.ErrCorrupt)
	}
	return b.Flush()
}

func stamp(ms uint64) string {
	if ms > 1<<52 { // beyond what a time can print
		return fmt.Sprintf("%d ms", ms)
	}
	return time.UnixMilli(int64(ms)).UTC().Format("2006-01-02T15:04:05.000Z")
}

func dumpManifest(w io.Writer, m *Manifest) {
	fmt.Fprintf(w, "shard manifest, version %d\n", m.version())
	fmt.Fprintf(w, "group %s birth %016x epoch %d incarnation %d\n", m.Group, uint64(m.Birth), m.Epoch, m.Incarnation)
	fmt.Fprintf(w, "range %s of %d, engine %q\n", m.Range, m.M, m.Engine)
	fmt.Fprintf(w, "index %d term %d sequence %d clock %s\n", m.Index, m.Term, m.Sequence, stamp(m.ClockMs))
	fmt.Fprintf(w, "%d files, %d bytes\n", len(m.Files), m.Bytes()-m.Changelog.Bytes())
	for i := range m.Files {
		f := &m.Files[i]
		fmt.Fprintf(w, "file %q size %d sha256 %x", f.Name, f.Size, f.SHA256)
		if f.Object != "" {
			fmt.Fprintf(w, " object %q offset %d length %d", f.Object, f.Offset, f.Length)
		}
		fmt.Fprintln(w)
	}
	c := m.Changelog
	if c == nil {
		return
	}
	fmt.Fprintf(w, "files of index %d term %d sequence %d clock %s\n", c.Base.Index, c.Base.Term, c.Base.Sequence, stamp(c.Base.ClockMs))
	fmt.Fprintf(w, "%d changelog segments, %d bytes, digest %x\n", len(c.Segments), c.Bytes(), c.Digest)
	for i := range c.Segments {
		s := &c.Segments[i]
		fmt.Fprintf(w, "segment %d to %d size %d sha256 %x object %q\n", s.First, s.Last, s.Size, s.SHA256, s.Object)
	}
}

func dumpSegment(w io.Writer, s *Segment) {
	fmt.Fprintf(w, "changelog segment, version %d\n", segmentVersion)
	fmt.Fprintf(w, "group %s birth %016x incarnation %d\n", s.Group, uint64(s.Birth), s.Incarnation)
	fmt.Fprintf(w, "%d entries, %d to %d\n", len(s.Entries), s.First, s.Last())
	for i := range s.Entries {
		e := &s.Entries[i]
		if e.Command == nil {
			fmt.Fprintf(w, "entry %d term %d empty\n", s.First+uint64(i), e.Term)
			continue
		}
		fmt.Fprintf(w, "entry %d term %d command of %d bytes, sha256 %x\n", s.First+uint64(i), e.Term, len(e.Command), sha256.Sum256(e.Command))
	}
}

func dumpCheckpoint(w io.Writer, c *Checkpoint) {
	kind := "checkpoint"
	version, _ := c.version()
	if c.Savepoint {
		kind = "savepoint"
	}
	fmt.Fprintf(w, "checkpoint metadata, version %d\n", version)
	fmt.Fprintf(w, "%s %d of cluster %q incarnation %d format %d\n", kind, c.Number, c.ClusterID, c.Incarnation, c.FormatVersion)
	fmt.Fprintf(w, "M %d engine %q created %s\n", c.M, c.Engine, stamp(c.CreatedMs))
	fmt.Fprintf(w, "%d shards, %d bytes, %d of them new\n", len(c.Shards), c.FullBytes(), c.NewBytes())
	for i := range c.Shards {
		s := &c.Shards[i]
		fmt.Fprintf(w, "shard %s range %s birth %016x epoch %d index %d term %d sequence %d clock %s full %d new %d\n",
			s.Group, s.Range, uint64(s.Birth), s.Epoch, s.Index, s.Term, s.Sequence, stamp(s.ClockMs), s.FullBytes, s.NewBytes)
		fmt.Fprintf(w, "  manifest %q size %d sha256 %x\n", s.ManifestKey, s.ManifestSize, s.ManifestSHA256)
	}
	for i := range c.Keyspaces {
		fmt.Fprintf(w, "keyspace %q key %q\n", c.Keyspaces[i].Name, c.Keyspaces[i].KeyType)
	}
	for i := range c.States {
		s := &c.States[i]
		fmt.Fprintf(w, "state %d %q of %q kind %q key %q user key %q value %q function %q %q codec %d", s.ID, s.Name, s.Keyspace, s.Kind,
			s.KeyType, s.UserKeyType, s.ValueType, s.Function, s.FunctionParams, s.CodecVersion)
		if s.DroppedMs > 0 {
			fmt.Fprintf(w, " dropped %s", stamp(s.DroppedMs))
		}
		fmt.Fprintln(w)
	}
	for i := range c.Participants {
		fmt.Fprintf(w, "participant %q, %d bytes: %.64x\n", c.Participants[i].ID, len(c.Participants[i].Bytes), c.Participants[i].Bytes)
	}
	fmt.Fprintf(w, "broadcast %d bytes, operator %d bytes\n", len(c.Broadcast), len(c.Operator))
}
