package broadcast

import (
	"strings"

	"github.com/tidwall/btree"

	"github.com/keelstate/keelstate/internal/base"
)

// Entry is what the map holds under a key. It never changes; a write makes a
// new one.
type Entry struct {
	// Value must not be modified.
	Value []byte
	// CreateRevision is the revision that created the key, since it was last
	// absent.
	CreateRevision base.Revision
	// ModRevision is the revision that last wrote the key.
	ModRevision base.Revision
}

// KV is a key with its entry.
type KV struct {
	Key string
	*Entry
}

// tree is the copy-on-write map. Its nodes hold pointers to entries, so that
// the copy of a node on its first write after a Snapshot is small.
type tree = btree.Map[string, *Entry]

// treeDegree is a compromise by BenchmarkApplyPut: 8 is faster in small maps,
// since less is copied, 32 in large ones with many writes per transaction.
const treeDegree = 16

// Snapshot is the whole state after one applied command. It is immutable and
// cheap to hold (BC5); keeping it keeps the entries that later writes replace.
type Snapshot struct {
	tree      *tree
	index     uint64
	revision  base.Revision
	clock     uint64
	compacted base.Revision
}

// AppliedIndex is the log index of the newest command that the state covers.
func (s *Snapshot) AppliedIndex() uint64 { return s.index }

// Revision is the version of the map (BC2).
func (s *Snapshot) Revision() base.Revision { return s.revision }

// Clock is the system clock in milliseconds (BC3).
func (s *Snapshot) Clock() uint64 { return s.clock }

// Compacted is the newest revision that a Compact command dropped from the
// history of changes. A node's own history may begin later.
func (s *Snapshot) Compacted() base.Revision { return s.compacted }

// Len is the number of keys.
func (s *Snapshot) Len() int { return s.tree.Len() }

// Get returns the entry of key, or nil if it is absent.
func (s *Snapshot) Get(key string) *Entry {
	e, _ := s.tree.Get(key)
	return e
}

// Scan calls fn for each key that has the prefix and is not below from, in
// order, until fn returns false.
func (s *Snapshot) Scan(prefix, from string, fn func(key string, e *Entry) bool) {
	s.tree.Ascend(max(prefix, from), func(key string, e *Entry) bool {
		return strings.HasPrefix(key, prefix) && fn(key, e)
	})
}

// Bounds of one page of Range.
const (
	// MaxPageKeys bounds the keys of a page; a limit that is 0 or above it
	// means it.
	MaxPageKeys = 10_000
	// MaxPageBytes bounds the keys and values of a page; a page always has at
	// least one entry if there is one. It leaves room below gRPC's 4 MiB.
	MaxPageBytes = 1 << 20
)

// Page is a part of a range.
type Page struct {
	KVs []KV
	// More says that the range goes on, from the key Next.
	More bool
	Next string
	// Revision is the version of the map that the page shows. Pages of one
	// Snapshot fit together; pages of a Store may not.
	Revision base.Revision
}

// Range returns the entries whose key has the prefix and is not below from, in
// key order, at most limit of them.
func (s *Snapshot) Range(prefix, from string, limit int) Page {
	if limit <= 0 || limit > MaxPageKeys {
		limit = MaxPageKeys
	}
	p := Page{Revision: s.revision}
	size := 0
	s.Scan(prefix, from, func(key string, e *Entry) bool {
		size += len(key) + len(e.Value)
		if len(p.KVs) == limit || (len(p.KVs) > 0 && size > MaxPageBytes) {
			p.More, p.Next = true, key
			return false
		}
		p.KVs = append(p.KVs, KV{Key: key, Entry: e})
		return true
	})
	return p
}
