package state

import (
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/keygroup"
)

// Kind is the kind of a keyed state. The numbers are part of the formats.
type Kind uint8

const (
	KindValue       Kind = 1
	KindList        Kind = 2
	KindMap         Kind = 3
	KindReducing    Kind = 4
	KindAggregating Kind = 5
)

// Declaration is a declared state as the shards know it. Its ID is unique in
// the cluster for ever and names the state's family.
type Declaration struct {
	ID       engine.FamilyID
	Keyspace string
	Name     string
	Kind     Kind
	// KeyType is the keyspace's; UserKeyType is for maps only.
	KeyType     keygroup.Type
	UserKeyType keygroup.Type
	// ValueType is the type of the value, list element, map value, or of the
	// element that is added to a Reducing or Aggregating state.
	ValueType keygroup.Type
	// Function is the built-in function of a Reducing or Aggregating state.
	Function string
	// CodecVersion is the version of the value codec; 1 for now.
	CodecVersion uint16
}

// Op is what a mutation does. The numbers are part of the command format.
type Op uint8

const (
	OpValuePut   Op = 1 // Value: set to Value
	OpClear      Op = 2 // any kind: clear the whole state of (key, namespace)
	OpListAdd    Op = 3 // List: append Elements in order; none is null
	OpListUpdate Op = 4 // List: replace by Elements; none = clear
	OpMapPut     Op = 5 // Map: put every entry of Entries
	OpMapRemove  Op = 6 // Map: remove the user keys of Entries
	// OpAdd folds Elements in order into a Reducing or Aggregating state.
	OpAdd Op = 7
	// OpMergeNamespaces merges Sources into Namespace (List, Reducing,
	// Aggregating; for Value and Map it is refused as the wrong kind).
	OpMergeNamespaces Op = 8
)

// Namespace is a namespace of a key. The zero value is the void namespace,
// which is distinct from the empty one.
type Namespace struct {
	Set   bool
	Bytes []byte
}

// Entry is one entry of a map mutation or answer.
type Entry struct {
	UserKey []byte
	// Null marks a present null value; Value is empty then.
	Null  bool
	Value []byte
	// Version is the shard sequence of the entry's last write (answers only).
	Version uint64
}

// Mutation is one change of one (state, key, namespace). All byte strings are
// canonical encodings of package keygroup.
type Mutation struct {
	State     engine.FamilyID
	Op        Op
	Group     keygroup.Group // key group of Key, computed by the leader
	Key       []byte
	Namespace Namespace
	Value     []byte      // OpValuePut
	Elements  [][]byte    // OpListAdd, OpListUpdate, OpAdd
	Entries   []Entry     // OpMapPut, OpMapRemove
	Sources   []Namespace // OpMergeNamespaces
}

// PreKind is the kind of a precondition.
type PreKind uint8

const (
	PreAbsent  PreKind = 1 // nothing there (for a list or whole map: empty)
	PrePresent PreKind = 2 // something there
	// PreEqual: the value (Value), the accumulator's bytes as read by
	// QueryAccumulator (Reducing, Aggregating) or the entry's value (Map with a
	// user key) equals Bytes. Refused for lists and whole maps.
	PreEqual PreKind = 3
	// PreVersion: the version equals Version. Refused for lists and whole maps.
	PreVersion PreKind = 4
	// PreNull: the map entry is present and null.
	PreNull PreKind = 5
)

// Precondition must hold on the state before the request's first mutation.
type Precondition struct {
	State      engine.FamilyID
	Kind       PreKind
	Group      keygroup.Group
	Key        []byte
	Namespace  Namespace
	HasUserKey bool // Map: the entry, not the whole map
	UserKey    []byte
	Bytes      []byte
	Version    uint64
}

// Stamp is what a leader and the log give to a mutation: the shard sequence of
// the request (rule W6) and the shard clock in milliseconds (rule W5).
type Stamp struct {
	Sequence uint64
	ClockMs  uint64
}

// QueryKind is what a read asks for.
type QueryKind uint8

const (
	// QueryGet: the value (Value), the result (Reducing, Aggregating), or the
	// entry of UserKey (Map).
	QueryGet QueryKind = 1
	// QueryContains: whether the user key is present (Map).
	QueryContains QueryKind = 2
	// QueryIsEmpty: whether there is nothing (any kind).
	QueryIsEmpty QueryKind = 3
	// QueryPage: a page of elements (List) or entries (Map) in order, after
	// Cursor, at most Limit and at most PageBytes.
	QueryPage QueryKind = 4
	// QueryAccumulator: the stored accumulator's bytes and version.
	QueryAccumulator QueryKind = 5
)

// Query is one point read, or one page of a list or map.
type Query struct {
	State     engine.FamilyID
	Kind      QueryKind
	Group     keygroup.Group
	Key       []byte
	Namespace Namespace
	UserKey   []byte
	Cursor    []byte // opaque, from Answer.Next
	Limit     int    // 0 = the default
	PageBytes int    // 0 = the default
	KeysOnly  bool   // Map pages: leave the values out
}

// Answer is the result of a Query.
type Answer struct {
	Found    bool
	Null     bool
	Value    []byte
	Version  uint64
	Elements [][]byte
	Entries  []Entry
	// Next continues the page; nil at the end.
	Next []byte
}

// ScanQuery lists keys, or all entries, of a state over a range of key groups,
// in order of (group, key, namespace, user key).
type ScanQuery struct {
	State engine.FamilyID
	Range keygroup.Range
	// Namespace restricts the scan when Filter is set.
	Filter    bool
	Namespace Namespace
	KeysOnly  bool   // each (key, namespace) once, without values
	Cursor    []byte // opaque
	Limit     int
	PageBytes int
}

// ScanItem is one item of a scan. For a list Value is one element; for
// Reducing and Aggregating it is the result.
type ScanItem struct {
	Group     keygroup.Group
	Key       []byte
	Namespace Namespace
	Entry     Entry // UserKey is set for maps only
}
