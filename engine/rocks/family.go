package rocks

// #include "native.h"
import "C"

import (
	"fmt"
	"maps"
	"strconv"
	"strings"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// metaOptions are those of the metadata family, which every store has: it is
// RocksDB's default column family.
var metaOptions = engine.FamilyOptions{Use: engine.UseScanned, Merge: engine.MergeNone}

const metaName = "default"

// The words of a column family's name are frozen (docs/formats/engine-rocks.md).
var (
	useWords   = map[engine.Use]string{engine.UseScanned: "scan", engine.UsePoint: "point"}
	mergeWords = map[engine.MergeKind]string{
		engine.MergeNone: "none", engine.MergeSum128: "sum128", engine.MergeMin: "min", engine.MergeMax: "max",
		engine.MergeFirst: "first", engine.MergeAnd64: "and64", engine.MergeOr64: "or64",
		engine.MergeSumCount: "sumcount",
	}
)

func checkOptions(f engine.FamilyID, o engine.FamilyOptions) error {
	_, use := useWords[o.Use]
	_, merge := mergeWords[o.Merge]
	width := o.GroupWidth == 1 || o.GroupWidth == 2
	if f == engine.MetaFamily {
		use, merge, width = true, o == metaOptions, true
	}
	if !use || !merge || !width {
		return fmt.Errorf("family %d with options %+v: %w", f, o, base.ErrInvalid)
	}
	return nil
}

// familyName is the column family's name of a family whose options are good.
func familyName(f engine.FamilyID, o engine.FamilyOptions) string {
	if f == engine.MetaFamily {
		return metaName
	}
	return fmt.Sprintf("f%d.%s.%s.w%d", f, useWords[o.Use], mergeWords[o.Merge], o.GroupWidth)
}

// parseFamilyName is the inverse. A name that this build would not give is of
// another format version: RocksDB keeps names under its own checksums.
func parseFamilyName(name string) (engine.FamilyID, engine.FamilyOptions, error) {
	if name == metaName {
		return engine.MetaFamily, metaOptions, nil
	}
	var o engine.FamilyOptions
	words := strings.Split(name, ".")
	if len(words) == 4 && strings.HasPrefix(words[0], "f") && strings.HasPrefix(words[3], "w") {
		id, err := strconv.ParseUint(words[0][1:], 10, 32)
		width, werr := strconv.Atoi(words[3][1:])
		for u, w := range maps.All(useWords) {
			if w == words[1] {
				o.Use = u
			}
		}
		for k, w := range maps.All(mergeWords) {
			if w == words[2] {
				o.Merge = k
			}
		}
		o.GroupWidth = width
		f := engine.FamilyID(id)
		if err == nil && werr == nil && f != engine.MetaFamily && checkOptions(f, o) == nil && familyName(f, o) == name {
			return f, o, nil
		}
	}
	return 0, o, fmt.Errorf("parsing column family name %q: %w", name, base.ErrFormatVersion)
}

// family is an open column family.
type family struct {
	id      engine.FamilyID
	options engine.FamilyOptions
	ref     *C.ks_family
	gate    *gate
	// iters are the open native iterators; guarded by Store.mu.
	iters map[*iterator]struct{}
	// droppedAt is the number of the newest view that may still read the family
	// after it was dropped; guarded by Store.mu.
	droppedAt uint64
}

func newFamily(f engine.FamilyID, o engine.FamilyOptions, ref *C.ks_family) *family {
	return &family{id: f, options: o, ref: ref, gate: newGate(), iters: make(map[*iterator]struct{})}
}

// families is an immutable set of open families.
type families map[engine.FamilyID]*family

func (fs families) with(f *family) families {
	n := maps.Clone(fs)
	n[f.id] = f
	return n
}

func (fs families) without(id engine.FamilyID) families {
	n := maps.Clone(fs)
	delete(n, id)
	return n
}
