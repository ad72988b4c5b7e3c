package keel

import (
	"context"

	"github.com/keelstate/keelstate/api/keelstatepb"
)

// Value is a state with one value per key and namespace.
type Value[T any] struct {
	handle
	codec Codec[T]
}

// DeclareValue declares a Value state, or opens it if an equal one exists.
func DeclareValue[T any](ctx context.Context, k *Keyspace, name string, codec Codec[T]) (*Value[T], error) {
	h, err := k.declare(ctx, Declaration{Name: name, Kind: KindValue, ValueType: codec.Type()})
	if err != nil {
		return nil, err
	}
	return &Value[T]{*h, codec}, nil
}

// OpenValue opens a Value state that exists; ErrUndeclared if it does not, and
// ErrConflict if it is another.
func OpenValue[T any](ctx context.Context, k *Keyspace, name string, codec Codec[T]) (*Value[T], error) {
	h, err := k.open(ctx, Declaration{Name: name, Kind: KindValue, ValueType: codec.Type()})
	if err != nil {
		return nil, err
	}
	return &Value[T]{*h, codec}, nil
}

// In returns the handle for a namespace. The empty one is not the void one.
func (v *Value[T]) In(namespace string) *Value[T] {
	return &Value[T]{*v.in([]byte(namespace)), v.codec}
}

// Get returns the value; found is false if there is none.
func (v *Value[T]) Get(ctx context.Context, key any) (value T, found bool, err error) {
	it, err := v.Load(ctx, key)
	return it.Value, it.Found, err
}

// Load is Get with version and token.
func (v *Value[T]) Load(ctx context.Context, key any) (Item[T], error) {
	cl := v.cell(key)
	return load(ctx, &v.handle, v.codec, cl, v.query(&cl, keelstatepb.QueryKind_QUERY_KIND_GET))
}

// Queue adds a Load to a batch of reads.
func (v *Value[T]) Queue(b *ReadBatch, key any) *Future[T] {
	cl := v.cell(key)
	return queue(b, v.codec, cl, v.query(&cl, keelstatepb.QueryKind_QUERY_KIND_GET))
}

// SetOp sets the value.
func (v *Value[T]) SetOp(key any, value T) Mutation {
	b, err := encodeValue(v.codec, "value", value)
	m := v.mutation(key, keelstatepb.MutationOp_MUTATION_OP_VALUE_PUT, err)
	m.pb.Value = b
	m.bytes += len(b)
	return m
}

// Set sets the value.
func (v *Value[T]) Set(ctx context.Context, key any, value T) (Token, error) {
	return v.client.commit(ctx, v.SetOp(key, value))
}

// IfEqual holds if the value is there and has the same bytes as this one.
func (v *Value[T]) IfEqual(key any, value T) Precondition {
	b, err := encodeValue(v.codec, "value", value)
	p := v.precondition(key, keelstatepb.PreconditionKind_PRECONDITION_KIND_EQUAL, err)
	p.pb.Value = b
	return p
}

// IfVersion holds if the value's version is the one given.
func (v *Value[T]) IfVersion(key any, version uint64) Precondition {
	p := v.precondition(key, keelstatepb.PreconditionKind_PRECONDITION_KIND_VERSION, nil)
	p.pb.Version = version
	return p
}

// CompareAndSet sets the value if the conditions hold (IfAbsent, IfEqual,
// IfVersion, of this or another state whose key shares the shard). It is false,
// without an error, if one does not.
func (v *Value[T]) CompareAndSet(ctx context.Context, key any, value T, conditions ...Precondition) (set bool, t Token, err error) {
	t, err = v.client.commit(ctx, v.SetOp(key, value), conditions...)
	if e, ok := err.(*Error); ok && e.Code == codePrecondition {
		return false, Token{}, nil
	}
	return err == nil, t, err
}
