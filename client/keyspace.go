package keel

import (
	"context"
	"fmt"
	"strings"

	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

var (
	codeNotReady       = base.ErrNotReady.Reason
	codeUnavailable    = base.ErrUnavailable.Reason
	codeOutcomeUnknown = base.ErrOutcomeUnknown.Reason
	codeDeadline       = base.ErrDeadline.Reason
	codePrecondition   = base.ErrPrecondition.Reason
)

// Kind is the kind of a state, by its name on the command line.
type Kind string

// The kinds.
const (
	KindValue       Kind = "value"
	KindList        Kind = "list"
	KindMap         Kind = "map"
	KindReducing    Kind = "reducing"
	KindAggregating Kind = "aggregating"
)

var kinds = map[Kind]keelstatepb.StateKind{
	KindValue:       keelstatepb.StateKind_STATE_KIND_VALUE,
	KindList:        keelstatepb.StateKind_STATE_KIND_LIST,
	KindMap:         keelstatepb.StateKind_STATE_KIND_MAP,
	KindReducing:    keelstatepb.StateKind_STATE_KIND_REDUCING,
	KindAggregating: keelstatepb.StateKind_STATE_KIND_AGGREGATING,
}

// Declaration is a declared state.
type Declaration struct {
	ID           uint32 // given by the cluster
	Keyspace     string
	Name         string
	Kind         Kind
	KeyType      Type
	UserKeyType  Type // maps only
	ValueType    Type
	Function     string // Reducing and Aggregating only
	CodecVersion uint32 // 0 means 1
}

func (d Declaration) toWire() *keelstatepb.Declaration {
	out := &keelstatepb.Declaration{Id: d.ID, Keyspace: d.Keyspace, Name: d.Name, Kind: kinds[d.Kind],
		KeyType: d.KeyType.String(), ValueType: d.ValueType.String(), Function: d.Function, CodecVersion: d.CodecVersion}
	if d.UserKeyType.IsValid() {
		out.UserKeyType = d.UserKeyType.String()
	}
	return out
}

func declarationOf(d *keelstatepb.Declaration) (Declaration, error) {
	out := Declaration{ID: d.GetId(), Keyspace: d.GetKeyspace(), Name: d.GetName(), Function: d.GetFunction(), CodecVersion: d.GetCodecVersion()}
	for k, w := range kinds {
		if w == d.GetKind() {
			out.Kind = k
		}
	}
	if out.Kind == "" {
		return out, newError(ErrUnsupported, OutcomeNotApplied, fmt.Sprintf("state %s/%s is of a kind that this client does not know", out.Keyspace, out.Name))
	}
	var err error
	for _, t := range []struct {
		to   *Type
		text string
	}{{&out.KeyType, d.GetKeyType()}, {&out.UserKeyType, d.GetUserKeyType()}, {&out.ValueType, d.GetValueType()}} {
		if t.text == "" {
			continue
		}
		if *t.to, err = keygroup.ParseType(t.text); err != nil {
			return out, newError(ErrUnsupported, OutcomeNotApplied, fmt.Sprintf("state %s/%s: %v", out.Keyspace, out.Name, err))
		}
	}
	return out, nil
}

// Declare declares a state. Declaring an equal one again does nothing, and
// created is false; one that differs is ErrConflict and names the field.
func (c *Client) Declare(ctx context.Context, d Declaration) (got Declaration, created bool, err error) {
	if kinds[d.Kind] == 0 {
		return d, false, invalid("kind", "one of value, list, map, reducing, aggregating")
	}
	if !d.KeyType.IsValid() || !d.ValueType.IsValid() {
		return d, false, invalid("type", "give the types of key and value")
	}
	var resp *keelstatepb.DeclareStateResponse
	err = c.Call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		resp, err = keelstatepb.NewClusterClient(conn).DeclareState(ctx, &keelstatepb.DeclareStateRequest{Declaration: d.toWire()})
		return err
	})
	if err != nil {
		return d, false, err
	}
	c.sawRevision(resp.GetRevision())
	got, err = declarationOf(resp.GetDeclaration())
	return got, resp.GetCreated(), err
}

// Drop drops a state and all that it holds.
func (c *Client) Drop(ctx context.Context, keyspace, name string) error {
	return c.Call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		resp, err := keelstatepb.NewClusterClient(conn).DropState(ctx, &keelstatepb.DropStateRequest{Keyspace: keyspace, Name: name})
		c.sawRevision(resp.GetRevision())
		return err
	})
}

// States lists the declared states of a keyspace, or of all if it is empty.
func (c *Client) States(ctx context.Context, keyspace string) ([]Declaration, error) {
	var resp *keelstatepb.ListStatesResponse
	err := c.Call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		resp, err = keelstatepb.NewClusterClient(conn).ListStates(ctx, &keelstatepb.ListStatesRequest{Keyspace: keyspace})
		return err
	})
	if err != nil {
		return nil, harmless(err)
	}
	c.sawRevision(resp.GetRevision())
	out := make([]Declaration, len(resp.GetDeclarations()))
	for i, d := range resp.GetDeclarations() {
		if out[i], err = declarationOf(d); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// FindState returns one declared state, or ErrUndeclared.
func (c *Client) FindState(ctx context.Context, keyspace, name string) (Declaration, error) {
	states, err := c.States(ctx, keyspace)
	if err != nil {
		return Declaration{}, err
	}
	var names []string
	for _, d := range states {
		if d.Keyspace == keyspace && d.Name == name {
			return d, nil
		}
		names = append(names, d.Name)
	}
	hint := "the keyspace has no states; declare one with: keelctl state declare"
	if len(names) > 0 {
		hint = "declared in this keyspace: " + strings.Join(names, ", ")
	}
	e := newError(ErrUndeclared, OutcomeNotApplied, hint)
	e.Field = keyspace + "/" + name
	return Declaration{}, e
}

// Keyspace is a named set of states with one key type.
type Keyspace struct {
	client  *Client
	name    string
	keyType Type
}

// Keyspace names a keyspace; nothing is sent. The cluster refuses declarations
// with another key type than the keyspace's first.
func (c *Client) Keyspace(name string, keyType Type) *Keyspace {
	return &Keyspace{client: c, name: name, keyType: keyType}
}

// handle is what all typed states are made of. It is immutable.
type handle struct {
	client    *Client
	decl      Declaration
	namespace *keelstatepb.Namespace
}

// Declaration is the state's declaration.
func (h *handle) Declaration() Declaration { return h.decl }

// declare opens a state, declaring it if it does not exist.
func (k *Keyspace) declare(ctx context.Context, d Declaration) (*handle, error) {
	d.Keyspace, d.KeyType = k.name, k.keyType
	got, _, err := k.client.Declare(ctx, d)
	if err != nil {
		return nil, err
	}
	return &handle{client: k.client, decl: got}, nil
}

// open opens a state that exists and checks that it is what the caller takes
// it for.
func (k *Keyspace) open(ctx context.Context, want Declaration) (*handle, error) {
	got, err := k.client.FindState(ctx, k.name, want.Name)
	if err != nil {
		return nil, err
	}
	mismatch := func(field string, is, asked any) (*handle, error) {
		e := newError(ErrConflict, OutcomeNotApplied, fmt.Sprintf("the state has %v, not %v", is, asked))
		e.Field = field
		return nil, e
	}
	switch {
	case got.Kind != want.Kind:
		return mismatch("kind", got.Kind, want.Kind)
	case got.KeyType != k.keyType:
		return mismatch("key_type", got.KeyType, k.keyType)
	case got.ValueType != want.ValueType:
		return mismatch("value_type", got.ValueType, want.ValueType)
	case got.UserKeyType != want.UserKeyType:
		return mismatch("user_key_type", got.UserKeyType, want.UserKeyType)
	}
	return &handle{client: k.client, decl: got}, nil
}

// in returns the handle for a namespace.
func (h *handle) in(namespace []byte) *handle {
	out := *h
	out.namespace = &keelstatepb.Namespace{Value: append([]byte{}, namespace...)}
	return &out
}

func (h *handle) cell(key any) cell {
	b, err := encodeKey(h.decl.KeyType, key)
	return cell{state: h.decl.ID, keyType: h.decl.KeyType, key: b, namespace: h.namespace, err: err}
}

// mutation builds a mutation; fill may be nil.
func (h *handle) mutation(key any, op keelstatepb.MutationOp, err error) Mutation {
	cl := h.cell(key)
	if cl.err == nil && err != nil {
		cl.err = err
	}
	return Mutation{cell: cl, bytes: len(cl.key) + len(cl.namespace.GetValue()),
		pb: &keelstatepb.Mutation{State: cl.state, Op: op, Key: cl.key, Namespace: cl.namespace}}
}

func (h *handle) precondition(key any, kind keelstatepb.PreconditionKind, err error) Precondition {
	cl := h.cell(key)
	if cl.err == nil && err != nil {
		cl.err = err
	}
	return Precondition{cell: cl, pb: &keelstatepb.Precondition{State: cl.state, Kind: kind, Key: cl.key, Namespace: cl.namespace}}
}

func (h *handle) query(cl *cell, kind keelstatepb.QueryKind) *keelstatepb.Query {
	return &keelstatepb.Query{State: cl.state, Kind: kind, Key: cl.key, Namespace: cl.namespace}
}

// ClearOp clears the whole state of a key.
func (h *handle) ClearOp(key any) Mutation {
	return h.mutation(key, keelstatepb.MutationOp_MUTATION_OP_CLEAR, nil)
}

// Clear clears the whole state of a key.
func (h *handle) Clear(ctx context.Context, key any) (Token, error) {
	return h.client.commit(ctx, h.ClearOp(key))
}

// IfAbsent holds if there is nothing for the key.
func (h *handle) IfAbsent(key any) Precondition {
	return h.precondition(key, keelstatepb.PreconditionKind_PRECONDITION_KIND_ABSENT, nil)
}

// IfPresent holds if there is something for the key.
func (h *handle) IfPresent(key any) Precondition {
	return h.precondition(key, keelstatepb.PreconditionKind_PRECONDITION_KIND_PRESENT, nil)
}

// IsEmpty says whether there is nothing for the key.
func (h *handle) IsEmpty(ctx context.Context, key any) (bool, error) {
	cl := h.cell(key)
	a, _, err := h.client.ask(ctx, &cl, h.query(&cl, keelstatepb.QueryKind_QUERY_KIND_IS_EMPTY))
	if err != nil {
		return false, err
	}
	return !a.GetFound(), nil
}

// Namespace names a namespace, or the void one, as the source of a merge.
type Namespace struct {
	set   bool
	value []byte
}

// VoidNamespace is the namespace of handles on which In was not called. It is
// distinct from the empty one.
var VoidNamespace = Namespace{}

// NamespaceOf names a namespace by its bytes.
func NamespaceOf(value []byte) Namespace {
	return Namespace{set: true, value: append([]byte{}, value...)}
}

// Bytes returns the name; ok is false for the void namespace.
func (n Namespace) Bytes() (value []byte, ok bool) { return n.value, n.set }

func namespaceOf(n *keelstatepb.Namespace) Namespace {
	if n == nil {
		return Namespace{}
	}
	return Namespace{set: true, value: nonNil(n.Value)}
}

func (n Namespace) toWire() *keelstatepb.Namespace {
	if !n.set {
		return nil
	}
	return &keelstatepb.Namespace{Value: n.value}
}

// mergeOp merges sources into the handle's namespace.
func (h *handle) mergeOp(key any, sources []Namespace) Mutation {
	m := h.mutation(key, keelstatepb.MutationOp_MUTATION_OP_MERGE_NAMESPACES, nil)
	for _, s := range sources {
		m.pb.Sources = append(m.pb.Sources, &keelstatepb.NamespaceRef{Namespace: s.toWire()})
		m.bytes += len(s.value)
	}
	return m
}

func encodeValue[T any](codec Codec[T], field string, v T) ([]byte, error) {
	b, err := codec.Encode(v)
	if err != nil {
		return nil, invalid(field, err.Error())
	}
	return nonNil(b), nil
}

func decodeValue[T any](codec Codec[T], b []byte) (T, error) {
	v, err := codec.Decode(b)
	if err != nil {
		e := newError(ErrCorrupt, OutcomeNotApplied, err.Error())
		return v, e
	}
	return v, nil
}

// Item is what a read found.
type Item[T any] struct {
	Value T
	// Found says that there is something; Null that it is a present null.
	Found, Null bool
	// Version is the shard sequence of the last write, for IfVersion; 0 where
	// the kind has none.
	Version uint64
	// Token is the position that was read.
	Token Token
}

func itemOf[T any](codec Codec[T], a *keelstatepb.Answer, t Token) (Item[T], error) {
	it := Item[T]{Found: a.GetFound(), Null: a.GetNull(), Version: a.GetVersion(), Token: t}
	if !it.Found || it.Null {
		return it, nil
	}
	var err error
	it.Value, err = decodeValue(codec, a.GetValue())
	return it, err
}

// load reads one item.
func load[T any](ctx context.Context, h *handle, codec Codec[T], cl cell, q *keelstatepb.Query) (Item[T], error) {
	a, t, err := h.client.ask(ctx, &cl, q)
	if err != nil {
		return Item[T]{}, err
	}
	return itemOf(codec, a, t)
}

// queue adds a read of one item to a batch.
func queue[T any](b *ReadBatch, codec Codec[T], cl cell, q *keelstatepb.Query) *Future[T] {
	f := &Future[T]{}
	b.add(cl, q, func(a *keelstatepb.Answer, t Token, err error) {
		if f.err = err; err == nil {
			f.item, f.err = itemOf(codec, a, t)
		}
	})
	return f
}
