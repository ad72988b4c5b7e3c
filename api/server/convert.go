package server

import (
	"fmt"
	"math"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

// The bytes of a decoded message belong to the message alone, so what is built
// here aliases them; nobody changes them afterwards.

var empty = []byte{}

// present makes the bytes of a field that is always a value non-nil: an empty
// value decodes as nil, and nil would mean null.
func present(b []byte) []byte {
	if b == nil {
		return empty
	}
	return b
}

// setID assigns a number of the wire to an id of another package's type.
func setID[T ~uint32](id *T, n uint32) { *id = T(n) }

func namespace(n *keelstatepb.Namespace) state.Namespace {
	if n == nil {
		return state.Namespace{}
	}
	return state.Namespace{Set: true, Bytes: n.GetValue()}
}

func wireNamespace(n state.Namespace) *keelstatepb.Namespace {
	if !n.Set {
		return nil
	}
	return &keelstatepb.Namespace{Value: n.Bytes}
}

// badEnum refuses a number that this build has no meaning for.
func badEnum(field string, n int32) *base.Error {
	return base.Invalid(field, fmt.Sprintf("%d is unknown to this version", n))
}

// writeRequest converts a write. size is roughly what it occupies in memory.
func writeRequest(w *keelstatepb.WriteRequest) (route cluster.Route, req *raftfsm.Request, size int, err error) {
	route = cluster.Route{Group: base.GroupID(w.GetShard()), Epoch: base.Epoch(w.GetEpoch()),
		Incarnation: base.Incarnation(w.GetIncarnation()), MetadataRevision: base.Revision(w.GetMetadataRevision())}
	if n := len(w.Mutations) + len(w.Preconditions); n > state.MaxRequestMutations {
		return route, nil, 0, &base.Error{Cause: base.ErrTooLarge, Field: "mutations", Ordinal: -1,
			Hint: fmt.Sprintf("%d mutations and preconditions, at most %d", n, state.MaxRequestMutations)}
	}
	req = &raftfsm.Request{
		Incarnation: route.Incarnation, Epoch: route.Epoch, Session: base.SessionID(w.GetSession()),
		Seq: w.GetSequence(), Prev: w.GetPrevious(), Floor: w.GetFloor(), Atomic: w.GetAtomic(), BarrierSeen: w.GetBarrierSeen(),
	}
	size = 256
	if n := len(w.Preconditions); n > 0 {
		req.Preconditions = make([]state.Precondition, n)
	}
	for i, p := range w.Preconditions {
		if err := precondition(&req.Preconditions[i], p, i); err != nil {
			return route, nil, 0, err
		}
		size += 128 + len(p.GetKey()) + len(p.GetUserKey()) + len(p.GetValue()) + len(p.GetNamespace().GetValue())
	}
	if n := len(w.Mutations); n > 0 {
		req.Mutations = make([]raftfsm.Mutation, n)
	}
	for i, m := range w.Mutations {
		n, err := mutation(&req.Mutations[i], m)
		if err != nil {
			return route, nil, 0, err
		}
		size += n
	}
	return route, req, size, nil
}

func precondition(to *state.Precondition, p *keelstatepb.Precondition, i int) error {
	kind := p.GetKind()
	if kind < keelstatepb.PreconditionKind_PRECONDITION_KIND_ABSENT || kind > keelstatepb.PreconditionKind_PRECONDITION_KIND_NULL {
		e := badEnum(fmt.Sprintf("preconditions[%d].kind", i), int32(kind))
		e.Ordinal = i
		return e
	}
	*to = state.Precondition{Kind: state.PreKind(kind), Key: present(p.GetKey()), Namespace: namespace(p.GetNamespace()),
		HasUserKey: p.GetHasUserKey(), UserKey: p.GetUserKey(), Bytes: p.GetValue(), Version: p.GetVersion()}
	setID(&to.State, p.GetState())
	return nil
}

// mutation converts one mutation; errors name it by its ordinal, as the
// backend's do.
func mutation(to *raftfsm.Mutation, m *keelstatepb.Mutation) (size int, err error) {
	op := m.GetOp()
	if op < keelstatepb.MutationOp_MUTATION_OP_VALUE_PUT || op > keelstatepb.MutationOp_MUTATION_OP_MERGE_NAMESPACES {
		return 0, atMutation(m, badEnum("op", int32(op)))
	}
	to.Ordinal = m.GetOrdinal()
	to.Op, to.Key, to.Namespace, to.Value = state.Op(op), present(m.GetKey()), namespace(m.GetNamespace()), m.GetValue()
	setID(&to.State, m.GetState())
	if op == keelstatepb.MutationOp_MUTATION_OP_VALUE_PUT {
		to.Value = present(to.Value)
	}
	size = 192 + len(to.Key) + len(to.Namespace.Bytes) + len(to.Value)
	if to.Elements, err = elements(m); err != nil {
		return 0, err
	}
	for _, e := range to.Elements {
		size += 24 + len(e)
	}
	if n := len(m.Entries); n > 0 {
		to.Entries = make([]state.Entry, n)
		for i, e := range m.Entries {
			to.Entries[i] = entry(e, op)
			size += 96 + len(e.GetUserKey()) + len(e.GetValue())
		}
	}
	if n := len(m.Sources); n > 0 {
		to.Sources = make([]state.Namespace, n)
		for i, ref := range m.Sources {
			to.Sources[i] = namespace(ref.GetNamespace())
			size += 32 + len(to.Sources[i].Bytes)
		}
	}
	return size, nil
}

// elements reuses the message's slice. The elements listed as null become nil,
// which validation refuses by name; all others are values, also empty ones.
func elements(m *keelstatepb.Mutation) ([][]byte, error) {
	for i, e := range m.Elements {
		m.Elements[i] = present(e)
	}
	for i, n := range m.NullElements {
		if uint64(n) >= uint64(len(m.Elements)) {
			return nil, atMutation(m, base.Invalid(fmt.Sprintf("null_elements[%d]", i), fmt.Sprintf("there is no element %d", n)))
		}
		m.Elements[n] = nil
	}
	return m.Elements, nil
}

func entry(e *keelstatepb.MapEntry, op keelstatepb.MutationOp) state.Entry {
	to := state.Entry{UserKey: present(e.GetUserKey()), Null: e.GetNull(), Value: e.GetValue()}
	if op == keelstatepb.MutationOp_MUTATION_OP_MAP_PUT && !to.Null {
		to.Value = present(to.Value)
	}
	return to
}

func atMutation(m *keelstatepb.Mutation, e *base.Error) *base.Error {
	e.Ordinal = int(m.GetOrdinal())
	e.Field = fmt.Sprintf("mutations[%d].%s", m.GetOrdinal(), e.Field)
	return e
}

func token(t raftfsm.Token) *keelstatepb.Token {
	return &keelstatepb.Token{Incarnation: uint64(t.Incarnation), Shard: uint64(t.Group), Birth: uint64(t.Birth),
		Sequence: t.Sequence, Barrier: t.Barrier}
}

// readRequest converts a read.
func readRequest(r *keelstatepb.ReadRequest) (*cluster.ReadRequest, error) {
	if r.GetConsistency() != keelstatepb.Consistency_CONSISTENCY_LINEARIZABLE {
		return nil, badEnum("consistency", int32(r.GetConsistency()))
	}
	if n := len(r.Queries); n > maxQueries {
		return nil, &base.Error{Cause: base.ErrTooLarge, Field: "queries", Ordinal: -1, Hint: fmt.Sprintf("%d queries, at most %d", n, maxQueries)}
	}
	out := &cluster.ReadRequest{
		Route: cluster.Route{Group: base.GroupID(r.GetShard()), Epoch: base.Epoch(r.GetEpoch()),
			Incarnation: base.Incarnation(r.GetIncarnation()), MetadataRevision: base.Revision(r.GetMetadataRevision())},
		Queries: make([]state.Query, len(r.Queries)),
	}
	pages := 0
	for i, q := range r.Queries {
		if err := query(&out.Queries[i], q, i); err != nil {
			return nil, err
		}
		if out.Queries[i].Kind == state.QueryPage {
			pages++
		}
	}
	if pages > 1 {
		shrinkPages(out.Queries, pages)
	}
	return out, nil
}

const (
	// maxQueries bounds the queries of one read.
	maxQueries = state.MaxRequestMutations
	// answerBytes bounds the answers of one read, framing included: the rest of
	// a message is left for the framing around them.
	answerBytes = state.MaxMessageBytes - 1<<20
	// pagesBytes is shared by the pages of one read. A page has at least one
	// element and says how to go on, so a smaller one is right too.
	pagesBytes = 8 << 20
)

func shrinkPages(queries []state.Query, pages int) {
	share := max(pagesBytes/pages, 4<<10)
	for i := range queries {
		q := &queries[i]
		if q.Kind != state.QueryPage {
			continue
		}
		if q.PageBytes == 0 {
			q.PageBytes = state.DefaultPageBytes
		}
		q.PageBytes = min(q.PageBytes, share)
	}
}

func query(to *state.Query, q *keelstatepb.Query, i int) error {
	kind := q.GetKind()
	if kind < keelstatepb.QueryKind_QUERY_KIND_GET || kind > keelstatepb.QueryKind_QUERY_KIND_ACCUMULATOR {
		e := badEnum(fmt.Sprintf("queries[%d].kind", i), int32(kind))
		e.Ordinal = i
		return e
	}
	*to = state.Query{Kind: state.QueryKind(kind), Key: present(q.GetKey()), Namespace: namespace(q.GetNamespace()),
		UserKey: q.GetUserKey(), Cursor: q.GetCursor(), Limit: clampInt(q.GetLimit()), PageBytes: clampInt(q.GetPageBytes()),
		KeysOnly: q.GetKeysOnly()}
	setID(&to.State, q.GetState())
	return nil
}

// clampInt keeps a size that the wire allows positive on any platform; the
// limits of package state cut it further.
func clampInt(n uint32) int { return int(min(n, math.MaxInt32)) }

// wireAnswer converts an answer and says how many bytes it has, roughly and not
// less.
func wireAnswer(a *state.Answer) (*keelstatepb.Answer, int) {
	out := &keelstatepb.Answer{Found: a.Found, Null: a.Null, Value: a.Value, Version: a.Version, Elements: a.Elements, Next: a.Next}
	size := 48 + len(a.Value) + len(a.Next)
	for _, e := range a.Elements {
		size += 8 + len(e)
	}
	if n := len(a.Entries); n > 0 {
		out.Entries = make([]*keelstatepb.MapEntry, n)
		entries := make([]keelstatepb.MapEntry, n)
		for i := range a.Entries {
			fillEntry(&entries[i], &a.Entries[i])
			out.Entries[i] = &entries[i]
			size += 40 + len(a.Entries[i].UserKey) + len(a.Entries[i].Value)
		}
	}
	return out, size
}

func fillEntry(to *keelstatepb.MapEntry, e *state.Entry) {
	to.UserKey, to.Null, to.Value, to.Version = e.UserKey, e.Null, e.Value, e.Version
}

func wireRange(r keygroup.Range) *keelstatepb.Range {
	return &keelstatepb.Range{Lo: uint32(r.Lo), Hi: uint32(r.Hi)}
}
