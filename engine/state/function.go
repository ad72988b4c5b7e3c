package state

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// foldMode says how an add reaches the store.
type foldMode uint8

const (
	// foldRead: read the accumulator, fold, put it back.
	foldRead foldMode = iota
	// foldMerge: fold the elements alone and hand the result to the engine's
	// merge, which needs no read. Only for exact, associative folds.
	foldMerge
	// foldPut: the elements decide alone; put without a read.
	foldPut
)

// accumulator is the arithmetic of one function over accumulator payloads. All
// methods are pure. An accumulator is nil when absent; a present one is never
// nil, though it may be empty. Results may alias arguments.
type accumulator interface {
	// fold adds the elements (at least one) in order.
	fold(acc []byte, elements [][]byte) ([]byte, error)
	// combine merges two present accumulators; a is the first argument.
	combine(a, b []byte) ([]byte, error)
	// result is the user's view of a present accumulator.
	result(acc []byte) ([]byte, error)
	// verify returns base.ErrCorrupt unless acc is in canonical form, and
	// base.ErrFormatVersion for a form of another version.
	verify(acc []byte) error
	// checkElement refuses, by base.ErrInvalid or base.ErrTooLarge, a canonical
	// element that the function cannot take.
	checkElement(element []byte) error
}

// Function is a built-in function of a Reducing or Aggregating state over
// elements of one type. It is immutable. docs/functions.md lists all of them
// with their exact results.
type Function struct {
	accumulator
	text       string
	mode       foldMode
	merge      engine.MergeKind
	resultType keygroup.Type
}

// String returns the canonical text, which ParseFunction reads back.
func (f *Function) String() string { return f.text }

// ResultType is the type of the result's encoding.
func (f *Function) ResultType() keygroup.Type { return f.resultType }

// Fold folds canonical elements in order into an accumulator (nil = absent) and
// returns the new one. Nothing is modified; the result may alias arguments.
func (f *Function) Fold(acc []byte, elements [][]byte) ([]byte, error) {
	if len(elements) == 0 {
		return acc, nil
	}
	return f.fold(acc, elements)
}

// Combine merges accumulators a and b, a first; nil is absent.
func (f *Function) Combine(a, b []byte) ([]byte, error) {
	switch {
	case a == nil:
		return b, nil
	case b == nil:
		return a, nil
	}
	return f.combine(a, b)
}

// Result returns the encoded result of a present accumulator, or
// base.ErrOutOfRange when it does not fit its type.
func (f *Function) Result(acc []byte) ([]byte, error) { return f.result(acc) }

// Verify returns base.ErrCorrupt unless acc is a canonical accumulator.
func (f *Function) Verify(acc []byte) error { return f.verify(acc) }

// FunctionNames lists the names of the functions of a kind, for messages.
func FunctionNames(kind Kind) []string {
	switch kind {
	case KindReducing:
		return []string{"sum", "min", "max", "first", "last", "concat", "bit-and", "bit-or"}
	case KindAggregating:
		return []string{"count", "sum", "mean", "min", "max", "variance", "distinct", "quantiles(q,...)", "topk(k)"}
	}
	return nil
}

// ParseFunction reads the text of a function, for example "sum",
// "quantiles(0.5,0.99)" or "topk(10)". Errors are base.ErrInvalid, and
// base.ErrUnsupported for functions that run in the client.
func ParseFunction(kind Kind, valueType keygroup.Type, text string) (*Function, error) {
	name, args, err := splitFunction(text)
	if err != nil {
		return nil, err
	}
	if kind == KindAggregating && name == "client" {
		return nil, fmt.Errorf("functions that run in the client: %w", base.ErrUnsupported)
	}
	var f *Function
	switch kind {
	case KindReducing:
		f, err = reducing(name, valueType)
	case KindAggregating:
		f, err = aggregating(name, args, valueType)
		if name == "quantiles" || name == "topk" {
			args = nil
		}
	default:
		return nil, fmt.Errorf("%w: a state of kind %s has no function", base.ErrInvalid, kind)
	}
	if err != nil {
		return nil, err
	}
	if len(args) != 0 {
		return nil, fmt.Errorf("%w: function %s takes no arguments", base.ErrInvalid, name)
	}
	return f, nil
}

// functionOf returns the function of a declaration that was validated. It is on
// the path of every add, so the functions that have no arguments are not parsed
// again but looked up.
func functionOf(d *Declaration) (*Function, error) {
	if f := plainFunctions[functionKey{d.Kind, d.ValueType, d.Function}]; f != nil {
		return f, nil
	}
	return ParseFunction(d.Kind, d.ValueType, d.Function)
}

type functionKey struct {
	kind Kind
	t    keygroup.Type
	text string
}

// plainFunctions holds every function without arguments over the scalar types.
// It is never changed after its initialisation.
var plainFunctions = func() map[functionKey]*Function {
	all := make(map[functionKey]*Function)
	for _, kind := range []Kind{KindReducing, KindAggregating} {
		for _, name := range FunctionNames(kind) {
			for _, t := range []keygroup.Type{keygroup.String, keygroup.Int32, keygroup.Int64, keygroup.Bool,
				keygroup.Bytes, keygroup.Float64, keygroup.JSON} {
				if f, err := ParseFunction(kind, t, name); err == nil {
					all[functionKey{kind, t, name}] = f
				}
			}
		}
	}
	return all
}()

func splitFunction(text string) (name string, args []string, err error) {
	s := strings.TrimSpace(text)
	name, inner, has := strings.Cut(s, "(")
	if !has {
		return s, nil, nil
	}
	inner, closed := strings.CutSuffix(inner, ")")
	if !closed || len(inner) > maxFunctionText {
		return "", nil, fmt.Errorf("%w: function %.80q is not of the form name(argument,...)", base.ErrInvalid, text)
	}
	args = strings.Split(inner, ",")
	for i := range args {
		args[i] = strings.TrimSpace(args[i])
	}
	return strings.TrimSpace(name), args, nil
}

// maxFunctionText bounds the arguments' text in bytes.
const maxFunctionText = 1024

func unknownFunction(kind Kind, name string, t keygroup.Type) error {
	return fmt.Errorf("%w: no function %.80q for elements of type %s in a state of kind %s (functions: %s)",
		base.ErrInvalid, name, t, kind, strings.Join(FunctionNames(kind), ", "))
}

func reducing(name string, t keygroup.Type) (*Function, error) {
	if !t.IsValid() {
		return nil, unknownFunction(KindReducing, name, t)
	}
	switch {
	case name == "sum":
		return sumFunction(KindReducing, t)
	case name == "min" || name == "max":
		return extremeFunction(KindReducing, name, t)
	case name == "first":
		return &Function{accumulator: pick{t: t}, text: name, mode: foldMerge, merge: engine.MergeFirst, resultType: t}, nil
	case name == "last":
		return &Function{accumulator: pick{t: t, last: true}, text: name, mode: foldPut, resultType: t}, nil
	case name == "concat" && (t == keygroup.String || t == keygroup.Bytes):
		return &Function{accumulator: concat{t: t}, text: name, resultType: t}, nil
	case name == "bit-and" && t == keygroup.Int64:
		return &Function{accumulator: bitwise{}, text: name, mode: foldMerge, merge: engine.MergeAnd64, resultType: t}, nil
	case name == "bit-or" && t == keygroup.Int64:
		return &Function{accumulator: bitwise{or: true}, text: name, mode: foldMerge, merge: engine.MergeOr64, resultType: t}, nil
	}
	return nil, unknownFunction(KindReducing, name, t)
}

func sumFunction(kind Kind, t keygroup.Type) (*Function, error) {
	switch t {
	case keygroup.Int64:
		return &Function{accumulator: sumInt{}, text: "sum", mode: foldMerge, merge: engine.MergeSum128, resultType: t}, nil
	case keygroup.Float64:
		return &Function{accumulator: sumFloat{}, text: "sum", resultType: t}, nil
	}
	return nil, unknownFunction(kind, "sum", t)
}

func extremeFunction(kind Kind, name string, t keygroup.Type) (*Function, error) {
	if t == keygroup.JSON { // its bytes have no order
		return nil, unknownFunction(kind, name, t)
	}
	f := &Function{accumulator: extreme{t: t, max: name == "max"}, text: name, mode: foldMerge, merge: engine.MergeMin, resultType: t}
	if name == "max" {
		f.merge = engine.MergeMax
	}
	return f, nil
}

func aggregating(name string, args []string, t keygroup.Type) (*Function, error) {
	if !t.IsValid() {
		return nil, unknownFunction(KindAggregating, name, t)
	}
	switch {
	case name == "count":
		return &Function{accumulator: sumInt{count: true}, text: name, mode: foldMerge, merge: engine.MergeSum128, resultType: keygroup.Int64}, nil
	case name == "sum":
		return sumFunction(KindAggregating, t)
	case name == "min" || name == "max":
		return extremeFunction(KindAggregating, name, t)
	case name == "mean" && t == keygroup.Int64:
		return &Function{accumulator: meanInt{}, text: name, mode: foldMerge, merge: engine.MergeSumCount, resultType: keygroup.Float64}, nil
	case name == "mean" && t == keygroup.Float64:
		return &Function{accumulator: meanFloat{}, text: name, resultType: keygroup.Float64}, nil
	case name == "variance" && t == keygroup.Int64:
		return &Function{accumulator: varianceInt{}, text: name, resultType: keygroup.Float64}, nil
	case name == "variance" && t == keygroup.Float64:
		return &Function{accumulator: varianceFloat{}, text: name, resultType: keygroup.Float64}, nil
	case name == "distinct":
		return &Function{accumulator: distinct{}, text: name, resultType: keygroup.Int64}, nil
	case name == "quantiles" && (t == keygroup.Int64 || t == keygroup.Float64):
		return quantilesFunction(args, t)
	case name == "topk":
		return topKFunction(args, t)
	}
	return nil, unknownFunction(KindAggregating, name, t)
}

// MaxQuantiles is the largest number of quantiles of one state.
const MaxQuantiles = 32

func quantilesFunction(args []string, t keygroup.Type) (*Function, error) {
	if len(args) == 0 || len(args) > MaxQuantiles {
		return nil, fmt.Errorf("%w: quantiles takes 1 to %d numbers between 0 and 1", base.ErrInvalid, MaxQuantiles)
	}
	qs, texts := make([]float64, len(args)), make([]string, len(args))
	for i, a := range args {
		q, err := strconv.ParseFloat(a, 64)
		if err != nil || !(q >= 0 && q <= 1) {
			return nil, fmt.Errorf("%w: quantile %.40q is not a number between 0 and 1", base.ErrInvalid, a)
		}
		qs[i] = math.Abs(q) // -0 is 0
		texts[i] = strconv.FormatFloat(qs[i], 'g', -1, 64)
	}
	return &Function{
		accumulator: quantiles{qs: qs, integers: t == keygroup.Int64},
		text:        "quantiles(" + strings.Join(texts, ",") + ")",
		resultType:  keygroup.JSON,
	}, nil
}

// MaxTopK is the largest k of topk(k).
const MaxTopK = 100

func topKFunction(args []string, t keygroup.Type) (*Function, error) {
	if len(args) == 1 {
		if k, err := strconv.ParseUint(args[0], 10, 16); err == nil && k >= 1 && k <= MaxTopK {
			return &Function{
				accumulator: topK{k: int(k), t: t},
				text:        "topk(" + strconv.FormatUint(k, 10) + ")",
				resultType:  keygroup.JSON,
			}, nil
		}
	}
	return nil, fmt.Errorf("%w: topk takes one whole number from 1 to %d", base.ErrInvalid, MaxTopK)
}
