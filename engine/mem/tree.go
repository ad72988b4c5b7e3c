package mem

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/tidwall/btree"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/internal/treescan"
	"github.com/keelstate/keelstate/internal/base"
)

// entry is one key with its value; it never changes once it is in a tree.
type entry struct{ key, value []byte }

// item is what the trees hold: a pointer keeps the nodes that copy-on-write
// copies small, and the first bytes of the key decide most comparisons without
// following it.
type item struct {
	head uint64
	*entry
}

type tree = btree.BTreeG[item]

// treeDegree is smaller than the library's default because a batch of one key
// copies one node per level.
const treeDegree = 16

func newTree() *tree {
	return btree.NewBTreeGOptions(less, btree.Options{NoLocks: true, Degree: treeDegree})
}

func less(a, b item) bool {
	if a.head != b.head {
		return a.head < b.head
	}
	return bytes.Compare(a.key, b.key) < 0
}

// head is the first eight bytes of key, zeros where it is shorter: if two heads
// differ, they order as the keys do.
func head(key []byte) uint64 {
	if len(key) >= 8 {
		return binary.BigEndian.Uint64(key)
	}
	var b [8]byte
	copy(b[:], key)
	return binary.BigEndian.Uint64(b[:])
}

func pivot(key []byte) item { return item{head(key), &entry{key: key}} }

// newItem copies key and value into one allocation.
func newItem(key, value []byte) item {
	b := make([]byte, len(key)+len(value))
	copy(b, key)
	copy(b[len(key):], value)
	return item{head(key), &entry{key: b[:len(key):len(key)], value: b[len(key):]}}
}

// family is one family of a root. It is immutable; a Write makes a new one.
type family struct {
	id      engine.FamilyID
	options engine.FamilyOptions
	// birth tells this family from an earlier one with the same id (ME4).
	birth uint64
	tree  *tree
	bytes uint64 // of keys and values
}

// root is the state of a store at one instant (ME1).
type root struct {
	families map[engine.FamilyID]*family
}

func (r *root) family(f engine.FamilyID) (*family, error) {
	fam := r.families[f]
	if fam == nil {
		return nil, fmt.Errorf("family %d does not exist: %w", f, base.ErrNotFound)
	}
	return fam, nil
}

func (r *root) get(f engine.FamilyID, key []byte) ([]byte, bool, error) {
	fam, err := r.family(f)
	if err != nil {
		return nil, false, err
	}
	it, ok := fam.tree.Get(pivot(key))
	if !ok {
		return nil, false, nil
	}
	return clone(it.value), true, nil
}

func (r *root) multiGet(f engine.FamilyID, keys [][]byte) ([][]byte, error) {
	fam, err := r.family(f)
	if err != nil {
		return nil, err
	}
	out := make([][]byte, len(keys))
	for i, k := range keys {
		if it, ok := fam.tree.Get(pivot(k)); ok {
			out[i] = clone(it.value)
		}
	}
	return out, nil
}

func (r *root) scan(f engine.FamilyID, lo, hi []byte, o engine.ScanOptions) engine.Iterator {
	fam, err := r.family(f)
	if err != nil {
		return engine.FailedIterator(err)
	}
	return &iterator{cursor: scanTree(fam.tree, bytes.Clone(lo), bytes.Clone(hi), o.Reverse), options: o}
}

// scanTree walks [lo, hi); hi nil means to the end.
func scanTree(t *tree, lo, hi []byte, reverse bool) *treescan.Cursor[item] {
	from := pivot(lo)
	if hi == nil {
		return treescan.New(t, &from, nil, reverse)
	}
	to := pivot(hi)
	return treescan.New(t, &from, &to, reverse)
}

// iterator walks a published tree; its slices alias the tree's entries, which
// never change.
type iterator struct {
	cursor  *treescan.Cursor[item]
	options engine.ScanOptions
	emitted int
	current *entry
}

func (it *iterator) Next() bool {
	it.current = nil
	if it.cursor == nil || it.options.Limit > 0 && it.emitted >= it.options.Limit || !it.cursor.Next() {
		return false
	}
	it.emitted++
	it.current = it.cursor.Item().entry
	return true
}

func (it *iterator) Key() []byte {
	if it.current == nil {
		return nil
	}
	return it.current.key
}

func (it *iterator) Value() []byte {
	if it.current == nil || it.options.KeysOnly {
		return nil
	}
	return it.current.value
}

func (it *iterator) Err() error { return nil }
func (it *iterator) Close()     { it.cursor, it.current = nil, nil }

// clone copies b; the copy is never nil, since an empty value is not absent.
func clone(b []byte) []byte {
	out := make([]byte, len(b))
	copy(out, b)
	return out
}
