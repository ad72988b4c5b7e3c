package keel

import (
	"context"
	"iter"

	"github.com/keelstate/keelstate/api/keelstatepb"
)

// List is a state with a list of elements per key and namespace.
type List[T any] struct {
	handle
	codec Codec[T]
}

// DeclareList declares a List state, or opens it if an equal one exists.
func DeclareList[T any](ctx context.Context, k *Keyspace, name string, codec Codec[T]) (*List[T], error) {
	h, err := k.declare(ctx, Declaration{Name: name, Kind: KindList, ValueType: codec.Type()})
	if err != nil {
		return nil, err
	}
	return &List[T]{*h, codec}, nil
}

// OpenList opens a List state that exists.
func OpenList[T any](ctx context.Context, k *Keyspace, name string, codec Codec[T]) (*List[T], error) {
	h, err := k.open(ctx, Declaration{Name: name, Kind: KindList, ValueType: codec.Type()})
	if err != nil {
		return nil, err
	}
	return &List[T]{*h, codec}, nil
}

// In returns the handle for a namespace. The empty one is not the void one.
func (l *List[T]) In(namespace string) *List[T] {
	return &List[T]{*l.in([]byte(namespace)), l.codec}
}

// Get returns all elements in order, none if the list is absent, from one
// instant.
func (l *List[T]) Get(ctx context.Context, key any) ([]T, error) {
	cl := l.cell(key)
	a, _, err := l.client.ask(ctx, &cl, l.query(&cl, keelstatepb.QueryKind_QUERY_KIND_PAGE))
	if err != nil {
		return nil, err
	}
	var out []T
	if len(a.GetNext()) == 0 { // the whole list fits into a page
		for _, b := range a.GetElements() {
			v, err := decodeValue(l.codec, b)
			if err != nil {
				return nil, err
			}
			out = append(out, v)
		}
		return out, nil
	}
	for v, err := range l.All(ctx, key) {
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, nil
}

// All iterates over the elements in order, from one instant. After an error,
// which comes last, the loop ends.
func (l *List[T]) All(ctx context.Context, key any) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var none T
		for it, err := range l.client.scanCell(ctx, l.cell(key), false, 0) {
			if err != nil {
				yield(none, err)
				return
			}
			v, err := decodeValue(l.codec, it.GetEntry().GetValue())
			if !yield(v, err) || err != nil {
				return
			}
		}
	}
}

// Pages iterates over the elements in pages of at most size, from one instant.
func (l *List[T]) Pages(ctx context.Context, key any, size int) iter.Seq2[[]T, error] {
	return func(yield func([]T, error) bool) {
		var page []T
		for v, err := range l.All(ctx, key) {
			if err != nil {
				yield(nil, err)
				return
			}
			if page = append(page, v); len(page) >= max(size, 1) {
				if !yield(page, nil) {
					return
				}
				page = nil
			}
		}
		if len(page) > 0 {
			yield(page, nil)
		}
	}
}

// AddAllOp appends elements in order; none does nothing.
func (l *List[T]) AddAllOp(key any, elements ...T) Mutation {
	return elementsOp(&l.handle, l.codec, key, keelstatepb.MutationOp_MUTATION_OP_LIST_ADD, elements)
}

// AddOp appends an element.
func (l *List[T]) AddOp(key any, element T) Mutation { return l.AddAllOp(key, element) }

// Add appends an element.
func (l *List[T]) Add(ctx context.Context, key any, element T) (Token, error) {
	return l.client.commit(ctx, l.AddOp(key, element))
}

// AddAll appends elements in order; none does nothing.
func (l *List[T]) AddAll(ctx context.Context, key any, elements ...T) (Token, error) {
	return l.client.commit(ctx, l.AddAllOp(key, elements...))
}

// UpdateOp replaces the list; no elements clear it.
func (l *List[T]) UpdateOp(key any, elements ...T) Mutation {
	return elementsOp(&l.handle, l.codec, key, keelstatepb.MutationOp_MUTATION_OP_LIST_UPDATE, elements)
}

// Update replaces the list; no elements clear it.
func (l *List[T]) Update(ctx context.Context, key any, elements ...T) (Token, error) {
	return l.client.commit(ctx, l.UpdateOp(key, elements...))
}

// MergeNamespacesOp appends the sources' elements, left to right, to this
// namespace's own and removes the sources.
func (l *List[T]) MergeNamespacesOp(key any, sources ...Namespace) Mutation {
	return l.mergeOp(key, sources)
}

// MergeNamespaces is MergeNamespacesOp as a call of its own.
func (l *List[T]) MergeNamespaces(ctx context.Context, key any, sources ...Namespace) (Token, error) {
	return l.client.commit(ctx, l.mergeOp(key, sources))
}
