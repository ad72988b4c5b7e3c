package keel

import (
	"context"
	"fmt"
	"strings"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/keygroup"
)

// fold is what Reducing and Aggregating states share: elements go in, a result
// comes out.
type fold[In, Out any] struct {
	handle
	elements Codec[In]
	results  Codec[Out]
}

// Get returns the result; found is false if nothing was added. A result that
// does not fit its type is ErrOutOfRange.
func (f *fold[In, Out]) Get(ctx context.Context, key any) (result Out, found bool, err error) {
	it, err := f.Load(ctx, key)
	return it.Value, it.Found, err
}

// Load is Get with version and token.
func (f *fold[In, Out]) Load(ctx context.Context, key any) (Item[Out], error) {
	cl := f.cell(key)
	return load(ctx, &f.handle, f.results, cl, f.query(&cl, keelstatepb.QueryKind_QUERY_KIND_GET))
}

// Queue adds a Load to a batch of reads.
func (f *fold[In, Out]) Queue(b *ReadBatch, key any) *Future[Out] {
	cl := f.cell(key)
	return queue(b, f.results, cl, f.query(&cl, keelstatepb.QueryKind_QUERY_KIND_GET))
}

// AddAllOp folds elements in, in order; none does nothing.
func (f *fold[In, Out]) AddAllOp(key any, elements ...In) Mutation {
	return elementsOp(&f.handle, f.elements, key, keelstatepb.MutationOp_MUTATION_OP_ADD, elements)
}

// AddOp folds an element in.
func (f *fold[In, Out]) AddOp(key any, element In) Mutation { return f.AddAllOp(key, element) }

// Add folds an element in.
func (f *fold[In, Out]) Add(ctx context.Context, key any, element In) (Token, error) {
	return f.client.commit(ctx, f.AddOp(key, element))
}

// AddAll folds elements in, in order; none does nothing.
func (f *fold[In, Out]) AddAll(ctx context.Context, key any, elements ...In) (Token, error) {
	return f.client.commit(ctx, f.AddAllOp(key, elements...))
}

// MergeNamespacesOp folds the sources, left to right, and then this namespace
// into this namespace, and removes the sources.
func (f *fold[In, Out]) MergeNamespacesOp(key any, sources ...Namespace) Mutation {
	return f.mergeOp(key, sources)
}

// MergeNamespaces is MergeNamespacesOp as a call of its own.
func (f *fold[In, Out]) MergeNamespaces(ctx context.Context, key any, sources ...Namespace) (Token, error) {
	return f.client.commit(ctx, f.mergeOp(key, sources))
}

// IfVersion holds if the accumulator's version is the one given.
func (f *fold[In, Out]) IfVersion(key any, version uint64) Precondition {
	p := f.precondition(key, keelstatepb.PreconditionKind_PRECONDITION_KIND_VERSION, nil)
	p.pb.Version = version
	return p
}

// LoadAccumulator reads the stored accumulator's bytes, for IfAccumulator.
func (f *fold[In, Out]) LoadAccumulator(ctx context.Context, key any) (Item[[]byte], error) {
	cl := f.cell(key)
	return load(ctx, &f.handle, Bytes, cl, f.query(&cl, keelstatepb.QueryKind_QUERY_KIND_ACCUMULATOR))
}

// IfAccumulator holds if the stored accumulator has the bytes given.
func (f *fold[In, Out]) IfAccumulator(key any, accumulator []byte) Precondition {
	p := f.precondition(key, keelstatepb.PreconditionKind_PRECONDITION_KIND_EQUAL, nil)
	p.pb.Value = nonNil(accumulator)
	return p
}

// elementsOp builds a mutation that carries elements.
func elementsOp[T any](h *handle, codec Codec[T], key any, op keelstatepb.MutationOp, elements []T) Mutation {
	m := h.mutation(key, op, nil)
	for i, e := range elements {
		field := fmt.Sprintf("elements[%d]", i)
		b, err := encodeValue(codec, field, e)
		if raw, is := any(e).([]byte); is && raw == nil && h.decl.Kind == KindList {
			err = invalid(field, "a list has no null elements; the empty one is []byte{}")
		}
		if err != nil && m.err == nil {
			m.err = err
		}
		m.pb.Elements = append(m.pb.Elements, b)
		m.bytes += len(b)
	}
	return m
}

// Reducing is a state that folds elements into one of their own type.
type Reducing[T any] struct{ fold[T, T] }

// DeclareReducing declares a Reducing state, or opens it if an equal one
// exists. The functions are sum, min, max, first, last, concat, bit-and, bit-or.
func DeclareReducing[T any](ctx context.Context, k *Keyspace, name, function string, codec Codec[T]) (*Reducing[T], error) {
	h, err := k.declare(ctx, Declaration{Name: name, Kind: KindReducing, ValueType: codec.Type(), Function: function})
	if err != nil {
		return nil, err
	}
	return &Reducing[T]{fold[T, T]{*h, codec, codec}}, nil
}

// OpenReducing opens a Reducing state that exists.
func OpenReducing[T any](ctx context.Context, k *Keyspace, name string, codec Codec[T]) (*Reducing[T], error) {
	h, err := k.open(ctx, Declaration{Name: name, Kind: KindReducing, ValueType: codec.Type()})
	if err != nil {
		return nil, err
	}
	return &Reducing[T]{fold[T, T]{*h, codec, codec}}, nil
}

// In returns the handle for a namespace. The empty one is not the void one.
func (r *Reducing[T]) In(namespace string) *Reducing[T] {
	return &Reducing[T]{fold[T, T]{*r.in([]byte(namespace)), r.elements, r.results}}
}

// Aggregating is a state that folds elements into an accumulator and gives the
// function's result.
type Aggregating[In, Out any] struct{ fold[In, Out] }

// DeclareAggregating declares an Aggregating state, or opens it if an equal one
// exists. The functions are count, sum, mean, min, max, variance, distinct,
// quantiles(q,...), topk(k). The type of out must be ResultType's.
func DeclareAggregating[In, Out any](ctx context.Context, k *Keyspace, name, function string, in Codec[In], out Codec[Out]) (*Aggregating[In, Out], error) {
	if err := checkResult(function, in.Type(), out.Type()); err != nil {
		return nil, err
	}
	h, err := k.declare(ctx, Declaration{Name: name, Kind: KindAggregating, ValueType: in.Type(), Function: function})
	if err != nil {
		return nil, err
	}
	return &Aggregating[In, Out]{fold[In, Out]{*h, in, out}}, nil
}

// OpenAggregating opens an Aggregating state that exists.
func OpenAggregating[In, Out any](ctx context.Context, k *Keyspace, name string, in Codec[In], out Codec[Out]) (*Aggregating[In, Out], error) {
	h, err := k.open(ctx, Declaration{Name: name, Kind: KindAggregating, ValueType: in.Type()})
	if err != nil {
		return nil, err
	}
	if err := checkResult(h.decl.Function, in.Type(), out.Type()); err != nil {
		return nil, err
	}
	return &Aggregating[In, Out]{fold[In, Out]{*h, in, out}}, nil
}

// In returns the handle for a namespace. The empty one is not the void one.
func (a *Aggregating[In, Out]) In(namespace string) *Aggregating[In, Out] {
	return &Aggregating[In, Out]{fold[In, Out]{*a.in([]byte(namespace)), a.elements, a.results}}
}

// ResultType is the type of what an Aggregating state's Get returns, from its
// function and the type of its elements.
func ResultType(function string, element Type) Type {
	name, _, _ := strings.Cut(strings.TrimSpace(function), "(")
	switch strings.TrimSpace(name) {
	case "count", "distinct":
		return keygroup.Int64
	case "mean", "variance":
		return keygroup.Float64
	case "quantiles", "topk":
		return keygroup.JSON
	}
	return element
}

func checkResult(function string, in, out Type) error {
	if want := ResultType(function, in); want != out {
		return invalid("out", fmt.Sprintf("the result of %s over %s is a %s, not a %s", function, in, want, out))
	}
	return nil
}
