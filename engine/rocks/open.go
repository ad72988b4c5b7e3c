package rocks

// #include <stdlib.h>
// #include "native.h"
import "C"

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"unsafe"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

const (
	currentFile = "CURRENT"
	// firstManifest is the only manifest that can be there before CURRENT is: a
	// crash while the database was created leaves it.
	firstManifest = "MANIFEST-000001"
)

// isFresh tells whether RocksDB has yet to be created in dir. Data without
// CURRENT is damage: creating a database over it would hide the loss.
func isFresh(dir string) (bool, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return false, fmt.Errorf("listing %s: %w: %w", dir, base.ErrDiskFailed, err)
	}
	lost := ""
	for _, e := range entries {
		name := e.Name()
		if name == currentFile {
			return false, nil
		}
		if strings.HasSuffix(name, ".sst") || strings.HasPrefix(name, "MANIFEST-") && name != firstManifest {
			lost = name
		}
	}
	if lost != "" {
		return false, fmt.Errorf("%s is missing beside %s: %w", filepath.Join(dir, currentFile), lost, base.ErrCorrupt)
	}
	return true, nil
}

func listFamilies(dir string) ([]string, error) {
	cdir := C.CString(dir)
	defer C.free(unsafe.Pointer(cdir))
	var names *C.char
	var n C.size_t
	if err := take(C.ks_list_families(cdir, &names, &n)); err != nil {
		return nil, fmt.Errorf("listing column families: %w", err)
	}
	defer C.free(unsafe.Pointer(names))
	all := string(unsafe.Slice((*byte)(unsafe.Pointer(names)), int(n)))
	return strings.Split(strings.TrimSuffix(all, "\x00"), "\x00"), nil
}

func (d *Driver) nativeOptions(f engine.FamilyID, o engine.FamilyOptions) (C.ks_family_options, error) {
	c := C.ks_family_options{
		id:          C.uint32_t(f),
		use:         C.uint8_t(o.Use),
		merge:       C.uint8_t(o.Merge),
		group_width: C.uint8_t(o.GroupWidth),
		filter:      C.uint8_t(FilterWholeKey),
	}
	if d.options.FilterOf != nil {
		mode := d.options.FilterOf(f, o)
		if mode > FilterPrefix || mode == FilterPrefix && o.GroupWidth == 0 {
			return c, base.Invalid(fmt.Sprintf("FilterOf(%d)", f), "a family without a prefix takes none or whole keys")
		}
		c.filter = C.uint8_t(mode)
	}
	if d.options.BufferOf != nil {
		n := d.options.BufferOf(f)
		if n != 0 && n < minBufferBytes {
			return c, base.Invalid(fmt.Sprintf("BufferOf(%d)", f), "at least 64 KiB")
		}
		c.buffer_bytes = C.uint64_t(n)
	}
	return c, nil
}

func (d *Driver) openFamilies(dir, abs string, names []string, readOnly bool) (*Store, error) {
	type parsed struct {
		id engine.FamilyID
		o  engine.FamilyOptions
	}
	list := make([]parsed, len(names))
	seen := make(map[engine.FamilyID]string)
	native := make([]C.ks_family_options, len(names))
	for i, name := range names {
		id, o, err := parseFamilyName(name)
		if err != nil {
			return nil, err
		}
		if other, twice := seen[id]; twice {
			return nil, fmt.Errorf("column families %s and %s of one id: %w", other, name, base.ErrCorrupt)
		}
		seen[id], list[i] = name, parsed{id, o}
		if native[i], err = d.nativeOptions(id, o); err != nil {
			return nil, err
		}
	}
	if _, ok := seen[engine.MetaFamily]; !ok {
		return nil, fmt.Errorf("no metadata family: %w", base.ErrCorrupt)
	}
	cdir, cnames := C.CString(dir), C.CString(strings.Join(names, "\x00")+"\x00")
	defer C.free(unsafe.Pointer(cdir))
	defer C.free(unsafe.Pointer(cnames))
	refs := make([]*C.ks_family, len(names))
	var c *C.ks_store
	ro := C.int(0)
	if readOnly {
		ro = 1
	}
	if err := take(C.ks_open(d.c, cdir, ro, &native[0], cnames, C.size_t(len(names)), &refs[0], &c)); err != nil {
		return nil, err
	}
	s := &Store{driver: d, dir: dir, abs: abs, c: c, gate: newGate(), closing: make(chan struct{})}
	fs := make(families, len(names))
	for i, p := range list {
		fs[p.id] = newFamily(p.id, p.o, refs[i])
	}
	s.families.Store(&fs)
	s.mu.views = make(map[*view]struct{})
	return s, nil
}
