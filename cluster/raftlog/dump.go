package raftlog

import (
	"fmt"
	"io"
	"sort"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/vfs"
)

// Report is what Verify found in a log.
type Report struct {
	ID       string
	Segments int
	Records  int
	// TornBytes at the end would be cut off by Open: a batch that was never
	// acknowledged.
	TornBytes int64
	// Unfinished files would be removed by Open: a segment whose creation a
	// crash cut short.
	Unfinished []string
	Groups     []GroupState
}

// Verify reads a whole log without changing it and checks every checksum. It
// returns base.ErrCorrupt, with file and offset, at the first damage.
func Verify(fsys vfs.FS, dir string) (Report, error) {
	sc := scan{fs: fsys, dir: dir}
	err := sc.run()
	return sc.report(), err
}

func (sc *scan) report() Report {
	rep := Report{ID: sc.ident.String(), Segments: len(sc.segments), Records: sc.records, Unfinished: sc.discard}
	if n := len(sc.segments); n > 0 {
		if last := sc.segments[n-1]; last.torn != "" {
			rep.TornBytes = last.fileSize - last.end
		}
	}
	for id, g := range sc.replay.groups {
		rep.Groups = append(rep.Groups, GroupState{
			ID: id, Generation: g.generation, Tombstoned: g.tombstone,
			First: g.index.first, Last: g.index.last(), Bytes: g.index.bytesFrom(0),
		})
	}
	sort.Slice(rep.Groups, func(i, j int) bool { return rep.Groups[i].ID < rep.Groups[j].ID })
	return rep
}

// Dump writes one line per record and per entry, then the state of the groups,
// without changing the log. Damage ends the dump and is returned.
func Dump(w io.Writer, fsys vfs.FS, dir string) error {
	d := &dumper{w: w}
	sc := scan{fs: fsys, dir: dir, visit: d.record}
	err := sc.run()
	for _, s := range sc.segments {
		if s.torn != "" {
			d.printf("torn tail of segment %08x: %d bytes at offset %d: %s\n", s.id, s.fileSize-s.end, s.end, s.torn)
		}
	}
	for _, path := range sc.discard {
		d.printf("unfinished segment %s\n", path)
	}
	if err != nil {
		d.printf("damaged: %v\n", err)
	}
	for _, g := range sc.report().Groups {
		d.printf("group %s generation %d tombstone %t entries %d..%d bytes %d\n", g.ID, g.Generation, g.Tombstoned, g.First, g.Last, g.Bytes)
	}
	if err == nil {
		err = d.err
	}
	return err
}

type dumper struct {
	w   io.Writer
	seg uint32
	err error
}

func (d *dumper) printf(format string, args ...any) {
	if d.err == nil {
		_, d.err = fmt.Fprintf(d.w, format, args...)
	}
}

func (d *dumper) record(s *scannedSegment, off int64, r record, payload []byte) {
	if d.seg != s.id {
		d.seg = s.id
		d.printf("segment %08x version %d bytes %d\n", s.id, formatVersion, s.fileSize)
	}
	d.printf("  %8d seq %d unit %d+%d %s", off, r.seq, r.unitStart(), r.unitPos, r.typ)
	switch r.typ {
	case recMark, recSeal, recHeadEnd:
		d.printf("\n")
		return
	}
	d.printf(" %s", r.group)
	switch r.typ {
	case recAppend, recMoved:
		d.printf("\n")
		_ = walkEntries(payload, func(_ int, h entryHead) error {
			d.printf("           entry %d term %d %s bytes %d\n", h.index, h.term, h.typ, h.size)
			return nil
		})
		return
	case recDelete:
		lo, hi, _ := parseRange(payload)
		d.printf(" %d..%d", lo, hi)
	case recStable:
		d.kv(payload)
	case recCreate:
		gen, _ := parseUint64(payload)
		d.printf(" generation %d", gen)
	case recState:
		d.image(r.group, payload)
	}
	d.printf("\n")
}

func (d *dumper) kv(payload []byte) {
	if k, v, _, err := parseKV(payload); err == nil {
		d.printf(" %q=%x", k, v)
	}
}

func (d *dumper) image(_ base.GroupID, payload []byte) {
	im, err := parseImage(payload)
	if err != nil {
		return
	}
	d.printf(" generation %d tombstone %t entries %d..%d", im.generation, im.tombstone, im.first, im.last)
	for _, k := range sortedKeys(im.stable) {
		d.printf(" %q=%x", k, im.stable[k])
	}
}
