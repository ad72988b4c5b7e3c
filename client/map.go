package keel

import (
	"context"
	"iter"

	"github.com/keelstate/keelstate/api/keelstatepb"
)

// Map is a state with a map per key and namespace.
type Map[K, V any] struct {
	handle
	keys   Codec[K]
	values Codec[V]
}

// DeclareMap declares a Map state, or opens it if an equal one exists.
func DeclareMap[K, V any](ctx context.Context, k *Keyspace, name string, keys Codec[K], values Codec[V]) (*Map[K, V], error) {
	h, err := k.declare(ctx, Declaration{Name: name, Kind: KindMap, UserKeyType: keys.Type(), ValueType: values.Type()})
	if err != nil {
		return nil, err
	}
	return &Map[K, V]{*h, keys, values}, nil
}

// OpenMap opens a Map state that exists.
func OpenMap[K, V any](ctx context.Context, k *Keyspace, name string, keys Codec[K], values Codec[V]) (*Map[K, V], error) {
	h, err := k.open(ctx, Declaration{Name: name, Kind: KindMap, UserKeyType: keys.Type(), ValueType: values.Type()})
	if err != nil {
		return nil, err
	}
	return &Map[K, V]{*h, keys, values}, nil
}

// In returns the handle for a namespace. The empty one is not the void one.
func (m *Map[K, V]) In(namespace string) *Map[K, V] {
	return &Map[K, V]{*m.in([]byte(namespace)), m.keys, m.values}
}

// Entry is one entry of a map.
type Entry[K, V any] struct {
	Key   K
	Value V
	// Null says that the value is a present null.
	Null bool
	// Version is the shard sequence of the entry's last write.
	Version uint64
}

func (m *Map[K, V]) point(key any, userKey K, kind keelstatepb.QueryKind) (cell, *keelstatepb.Query) {
	cl := m.cell(key)
	b, err := encodeValue(m.keys, "user_key", userKey)
	if cl.err == nil && err != nil {
		cl.err = err
	}
	q := m.query(&cl, kind)
	q.UserKey = b
	return cl, q
}

// Get returns an entry's value. It is absent (not Found), null (Found and Null)
// or a value.
func (m *Map[K, V]) Get(ctx context.Context, key any, userKey K) (Item[V], error) {
	cl, q := m.point(key, userKey, keelstatepb.QueryKind_QUERY_KIND_GET)
	return load(ctx, &m.handle, m.values, cl, q)
}

// Queue adds a Get to a batch of reads.
func (m *Map[K, V]) Queue(b *ReadBatch, key any, userKey K) *Future[V] {
	cl, q := m.point(key, userKey, keelstatepb.QueryKind_QUERY_KIND_GET)
	return queue(b, m.values, cl, q)
}

// Contains says whether the entry is present, be it null.
func (m *Map[K, V]) Contains(ctx context.Context, key any, userKey K) (bool, error) {
	cl, q := m.point(key, userKey, keelstatepb.QueryKind_QUERY_KIND_CONTAINS)
	a, _, err := m.client.ask(ctx, &cl, q)
	return a.GetFound(), err
}

// entriesOp builds a mutation of entries.
func (m *Map[K, V]) entriesOp(key any, op keelstatepb.MutationOp, n int, entry func(i int) (Entry[K, V], bool)) Mutation {
	out := m.mutation(key, op, nil)
	for i := range n {
		e, withValue := entry(i)
		uk, err := encodeValue(m.keys, "user_key", e.Key)
		pb := &keelstatepb.MapEntry{UserKey: uk, Null: e.Null}
		if err == nil && withValue && !e.Null {
			pb.Value, err = encodeValue(m.values, "value", e.Value)
		}
		if err != nil && out.err == nil {
			out.err = err
		}
		out.pb.Entries = append(out.pb.Entries, pb)
		out.bytes += len(pb.UserKey) + len(pb.Value)
	}
	return out
}

// PutAllOp puts entries; of two with one user key the later counts.
func (m *Map[K, V]) PutAllOp(key any, entries ...Entry[K, V]) Mutation {
	return m.entriesOp(key, keelstatepb.MutationOp_MUTATION_OP_MAP_PUT, len(entries),
		func(i int) (Entry[K, V], bool) { return entries[i], true })
}

// PutOp puts one entry.
func (m *Map[K, V]) PutOp(key any, userKey K, value V) Mutation {
	return m.PutAllOp(key, Entry[K, V]{Key: userKey, Value: value})
}

// PutNullOp puts a present null value.
func (m *Map[K, V]) PutNullOp(key any, userKey K) Mutation {
	return m.PutAllOp(key, Entry[K, V]{Key: userKey, Null: true})
}

// RemoveOp removes entries; those that are absent do not matter.
func (m *Map[K, V]) RemoveOp(key any, userKeys ...K) Mutation {
	return m.entriesOp(key, keelstatepb.MutationOp_MUTATION_OP_MAP_REMOVE, len(userKeys),
		func(i int) (Entry[K, V], bool) { return Entry[K, V]{Key: userKeys[i]}, false })
}

// Put puts one entry.
func (m *Map[K, V]) Put(ctx context.Context, key any, userKey K, value V) (Token, error) {
	return m.client.commit(ctx, m.PutOp(key, userKey, value))
}

// PutAll puts entries, all or none.
func (m *Map[K, V]) PutAll(ctx context.Context, key any, entries ...Entry[K, V]) (Token, error) {
	return m.client.commit(ctx, m.PutAllOp(key, entries...))
}

// PutNull puts a present null value.
func (m *Map[K, V]) PutNull(ctx context.Context, key any, userKey K) (Token, error) {
	return m.client.commit(ctx, m.PutNullOp(key, userKey))
}

// Remove removes entries; those that are absent do not matter.
func (m *Map[K, V]) Remove(ctx context.Context, key any, userKeys ...K) (Token, error) {
	return m.client.commit(ctx, m.RemoveOp(key, userKeys...))
}

// Entries iterates over the entries in the byte order of the encoded user keys,
// from one instant: changes on the way, by this loop or by others, do not show.
// After an error, which comes last, the loop ends. If the connection is lost on
// the way, the rest comes from a later instant; no entry comes twice.
func (m *Map[K, V]) Entries(ctx context.Context, key any) iter.Seq2[Entry[K, V], error] {
	return m.walk(ctx, key, false)
}

func (m *Map[K, V]) walk(ctx context.Context, key any, keysOnly bool) iter.Seq2[Entry[K, V], error] {
	return func(yield func(Entry[K, V], error) bool) {
		for it, err := range m.client.scanCell(ctx, m.cell(key), keysOnly, 0) {
			if err != nil {
				yield(Entry[K, V]{}, err)
				return
			}
			e, err := m.entry(it.GetEntry(), keysOnly)
			if !yield(e, err) || err != nil {
				return
			}
		}
	}
}

func (m *Map[K, V]) entry(pb *keelstatepb.MapEntry, keysOnly bool) (Entry[K, V], error) {
	e := Entry[K, V]{Null: pb.GetNull(), Version: pb.GetVersion()}
	var err error
	if e.Key, err = decodeValue(m.keys, pb.GetUserKey()); err != nil || keysOnly || e.Null {
		return e, err
	}
	e.Value, err = decodeValue(m.values, pb.GetValue())
	return e, err
}

// Keys iterates over the user keys, as Entries does.
func (m *Map[K, V]) Keys(ctx context.Context, key any) iter.Seq2[K, error] {
	return func(yield func(K, error) bool) {
		for e, err := range m.walk(ctx, key, false) {
			if !yield(e.Key, err) {
				return
			}
		}
	}
}

// Values iterates over the values, as Entries does; a null is the zero value.
func (m *Map[K, V]) Values(ctx context.Context, key any) iter.Seq2[V, error] {
	return func(yield func(V, error) bool) {
		for e, err := range m.walk(ctx, key, false) {
			if !yield(e.Value, err) {
				return
			}
		}
	}
}

func (m *Map[K, V]) entryIs(key any, userKey K, kind keelstatepb.PreconditionKind) Precondition {
	b, err := encodeValue(m.keys, "user_key", userKey)
	p := m.precondition(key, kind, err)
	p.pb.HasUserKey, p.pb.UserKey = true, b
	return p
}

// IfEntryAbsent holds if the map has no such entry.
func (m *Map[K, V]) IfEntryAbsent(key any, userKey K) Precondition {
	return m.entryIs(key, userKey, keelstatepb.PreconditionKind_PRECONDITION_KIND_ABSENT)
}

// IfEntryPresent holds if the map has the entry, be it null.
func (m *Map[K, V]) IfEntryPresent(key any, userKey K) Precondition {
	return m.entryIs(key, userKey, keelstatepb.PreconditionKind_PRECONDITION_KIND_PRESENT)
}

// IfEntryNull holds if the entry is present and null.
func (m *Map[K, V]) IfEntryNull(key any, userKey K) Precondition {
	return m.entryIs(key, userKey, keelstatepb.PreconditionKind_PRECONDITION_KIND_NULL)
}

// IfEntryEqual holds if the entry is present with the same bytes as this value.
func (m *Map[K, V]) IfEntryEqual(key any, userKey K, value V) Precondition {
	p := m.entryIs(key, userKey, keelstatepb.PreconditionKind_PRECONDITION_KIND_EQUAL)
	b, err := encodeValue(m.values, "value", value)
	if p.err == nil && err != nil {
		p.err = err
	}
	p.pb.Value = b
	return p
}

// IfEntryVersion holds if the entry's version is the one given.
func (m *Map[K, V]) IfEntryVersion(key any, userKey K, version uint64) Precondition {
	p := m.entryIs(key, userKey, keelstatepb.PreconditionKind_PRECONDITION_KIND_VERSION)
	p.pb.Version = version
	return p
}
