package engine

import "time"

// FamilyID names a family (a RocksDB column family): 0 is the metadata of the
// replica, any other value is the declaration id of a state. Families are named
// by declaration id, never by state name, so that a state that is dropped and
// declared again never meets its old data (rule W7).
type FamilyID uint32

// MetaFamily holds the applied index, sessions, declarations, clock and
// sequence of the replica.
const MetaFamily FamilyID = 0

// Use says how a family is read, which decides its memtable and filters.
type Use uint8

const (
	// UseScanned: point reads and ordered scans (List, Map, metadata).
	UseScanned Use = iota
	// UsePoint: point reads on the hot path; scans are rare and may be slow to
	// start (Value, Reducing, Aggregating).
	UsePoint
)

// MergeKind is the built-in fold of a family's merge operands. Each is exact
// and associative, so that any grouping of operands gives the same bytes; the
// operands and the folded value have the same form: a value header (see
// engine/state) followed by a payload. The numbers are part of the format.
type MergeKind uint8

const (
	// MergeNone: Merge is refused in this family.
	MergeNone MergeKind = 0
	// MergeSum128 adds payloads as 16-byte big-endian two's complement.
	MergeSum128 MergeKind = 1
	// MergeMin keeps the payload that is smallest by unsigned bytes; the element
	// encodings preserve order, so this is the minimum of the elements.
	MergeMin MergeKind = 2
	// MergeMax keeps the payload that is largest by unsigned bytes.
	MergeMax MergeKind = 3
	// MergeFirst keeps the oldest payload.
	MergeFirst MergeKind = 4
	// MergeAnd64 is the bitwise AND of 8-byte payloads in int64 key encoding
	// (big-endian, sign bit flipped).
	MergeAnd64 MergeKind = 5
	// MergeOr64 is the bitwise OR of the same.
	MergeOr64 MergeKind = 6
	// MergeSumCount adds a 16-byte sum and an 8-byte count, both big-endian
	// two's complement: 24 bytes (exact mean of int64).
	MergeSumCount MergeKind = 7
)

// FamilyOptions are fixed when a family is created and kept with it.
type FamilyOptions struct {
	Use   Use
	Merge MergeKind
	// GroupWidth is the number of bytes of the key-group prefix: 1 or 2.
	GroupWidth int
}

// Reader reads either the newest state (a Store) or one instant (a View).
type Reader interface {
	// Get returns the folded value of key, or ok = false if it is absent. The
	// returned slice belongs to the caller.
	Get(f FamilyID, key []byte) (value []byte, ok bool, err error)
	// MultiGet returns one value per key, nil where the key is absent (a present
	// empty value is non-nil and empty). The slices belong to the caller.
	MultiGet(f FamilyID, keys [][]byte) ([][]byte, error)
	// Scan iterates over keys in [lo, hi); hi nil means to the end. The iterator
	// sees one instant: for a Store that of the call.
	Scan(f FamilyID, lo, hi []byte, o ScanOptions) Iterator
}

// ScanOptions tune a scan; the zero value is right for most.
type ScanOptions struct {
	Reverse bool
	// KeysOnly lets the implementation skip values; Value then returns nil.
	KeysOnly bool
	// Limit bounds the number of entries; 0 means no bound. It also sizes the
	// block that is fetched at once.
	Limit int
}

// Iterator walks a scan. Use: for it.Next() { ... }; err := it.Err(); it.Close().
// Key and Value are valid until the next call of Next or Close.
type Iterator interface {
	Next() bool
	Key() []byte
	Value() []byte
	Err() error
	Close()
}

// View is a point-in-time Reader. Close it.
type View interface {
	Reader
	Close()
}

// Store is the ordered key-value store of one shard replica.
type Store interface {
	Reader
	// EnsureFamily creates a family, or checks that the existing one has the
	// same options. Creation is durable at once and harmless when replayed.
	EnsureFamily(f FamilyID, o FamilyOptions) error
	// Families lists the families that exist, with their options.
	Families() map[FamilyID]FamilyOptions
	// DropFamily removes a family at once and durably: call it only after what
	// caused it is flushed (rule W7). Dropping an absent family does nothing.
	DropFamily(f FamilyID) error
	// Write applies the batch atomically (EN1). On a full disk it waits (EN6).
	Write(b *Batch) error
	// NewView returns the state of this instant.
	NewView() (View, error)
	// Flush makes all that was written before durable (EN2).
	Flush() error
	// DurableGet reads a key of the metadata family as it is on disk, that is
	// as a crash at this moment would leave it. It tells up to where the Raft
	// log may be cut (rule W2).
	DurableGet(key []byte) (value []byte, ok bool, err error)
	// Checkpoint writes a consistent copy that can be opened as a store of the
	// same kind into dir, which must not exist, and makes it durable. Immutable
	// files are hard-linked where the implementation has them. Everything
	// written before the call is in it.
	Checkpoint(dir string) error
	// BeginCheckpoint fixes the present instant for a checkpoint in dir, quickly:
	// what takes time should have been flushed before. finish makes the
	// checkpoint whole and durable, beside the writer; a checkpoint that is given
	// up without it is removed by removing dir.
	BeginCheckpoint(dir string) (finish func() error, err error)
	// Compact flushes, and compacts all families.
	Compact() error
	Stats() Stats
	// Close frees everything. Without a Flush before it, unflushed batches are
	// lost (the Raft log has them).
	Close() error
}

// Stats are figures of a store, for metrics and commands.
type Stats struct {
	Keys           uint64 // estimate over all families
	DiskBytes      uint64 // of live files
	MemtableBytes  uint64
	CacheBytes     uint64
	PendingCompact uint64 // bytes
	Level0Files    int
	WriteStalled   bool
	LastFlush      time.Duration // duration of the last flush
	NativeObjects  int64         // open native handles (0 where there are none)
	ByFamilyBytes  map[FamilyID]uint64
	Implementation string // "rocks" or "mem"
	// Failed says why the store refuses writes: a background error that it has
	// not recovered from; empty if there is none.
	Failed string
	// Reopen says that the store refuses writes for good, and can be closed and
	// opened again: what stopped it, a full disk, is over (EN6).
	Reopen bool
}

// Driver opens stores of one implementation. It carries what the stores of one
// node share: the block cache and the write-buffer budget.
type Driver interface {
	// Name is "rocks" or "mem".
	Name() string
	// Open opens the store in dir, creating it if the directory is absent or
	// empty. A directory of another implementation is refused.
	Open(dir string) (Store, error)
	// Verify reads every file of a closed store and checks its checksums.
	Verify(dir string) error
	Close() error
}
