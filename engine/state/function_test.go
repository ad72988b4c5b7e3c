package state_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/big"
	"slices"
	"sort"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

func function(t tb, kind state.Kind, typ keygroup.Type, text string) *state.Function {
	t.Helper()
	f, err := state.ParseFunction(kind, typ, text)
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return f
}

// allFunctions is every function with every element type that it takes.
func allFunctions(t tb) (fs []*state.Function, types []keygroup.Type, kinds []state.Kind) {
	t.Helper()
	tuple, err := keygroup.TupleOf(keygroup.String, keygroup.Int32)
	if err != nil {
		t.Fatalf("tuple: %v", err)
	}
	for _, kind := range []state.Kind{state.KindReducing, state.KindAggregating} {
		for _, name := range state.FunctionNames(kind) {
			name = strings.NewReplacer("q,...", "0,0.5,0.99,1", "(k)", "(2)").Replace(name)
			for _, typ := range []keygroup.Type{keygroup.String, keygroup.Int32, keygroup.Int64, keygroup.Bool, keygroup.Bytes, keygroup.Float64, keygroup.JSON, tuple} {
				if f, err := state.ParseFunction(kind, typ, name); err == nil {
					fs, types, kinds = append(fs, f), append(types, typ), append(kinds, kind)
				} else if !errors.Is(err, base.ErrInvalid) {
					t.Fatalf("%s over %s: %v", name, typ, err)
				}
			}
		}
	}
	return fs, types, kinds
}

func drawTyped(t *rapid.T, typ keygroup.Type) []byte {
	switch typ {
	case keygroup.String:
		return enc(t, typ, rapid.String().Draw(t, "string"))
	case keygroup.Int32:
		return enc(t, typ, rapid.Int32().Draw(t, "int32"))
	case keygroup.Int64:
		return enc(t, typ, genInt64.Draw(t, "int64"))
	case keygroup.Bool:
		return enc(t, typ, rapid.Bool().Draw(t, "bool"))
	case keygroup.Float64:
		return enc(t, typ, genFloat64.Draw(t, "float64"))
	case keygroup.JSON:
		return enc(t, typ, json.RawMessage(rapid.SampledFrom([]string{"null", "1", `"x"`, "[1, 2]", "{}"}).Draw(t, "json")))
	case keygroup.Bytes:
		return genBytes.Draw(t, "bytes")
	}
	return enc(t, typ, []any{rapid.String().Draw(t, "field"), rapid.Int32().Draw(t, "field")})
}

func mustFold(t tb, f *state.Function, acc []byte, elements ...[]byte) []byte {
	t.Helper()
	out, err := f.Fold(acc, elements)
	if err != nil {
		t.Fatalf("fold: %v", err)
	}
	return out
}

func mustCombine(t tb, f *state.Function, a, b []byte) []byte {
	t.Helper()
	out, err := f.Combine(a, b)
	if err != nil {
		t.Fatalf("combine: %v", err)
	}
	return out
}

// Every function: the accumulator does not depend on how a sequence of adds is
// cut into batches, arguments are never changed, the form is canonical; and
// what is exact does not depend on how parts are grouped, so that the engine's
// merge gives the same bytes.
func TestEveryFunctionIsDeterministicAndPure(t *testing.T) {
	fs, types, kinds := allFunctions(t)
	if len(fs) < 50 {
		t.Fatalf("only %d functions", len(fs))
	}
	for i, f := range fs {
		t.Run(kinds[i].String()+" "+types[i].String()+" "+f.String(), func(t *testing.T) {
			l := state.Layout{M: 128}
			merge := l.FamilyOptions(decl(1, kinds[i], types[i], f.String())).Merge
			leftToRight := types[i] == keygroup.Float64 && merge == engine.MergeNone &&
				slices.Contains([]string{"sum", "mean", "variance"}, f.String())
			rapid.Check(t, func(t *rapid.T) {
				var elements [][]byte
				for range rapid.IntRange(1, 30).Draw(t, "n") {
					elements = append(elements, drawTyped(t, types[i]))
				}
				before := make([][]byte, len(elements))
				for j, e := range elements {
					before[j] = bytes.Clone(e)
				}
				whole := mustFold(t, f, nil, elements...)
				cut := rapid.IntRange(0, len(elements)).Draw(t, "cut")
				var stepwise []byte
				for _, e := range elements {
					stepwise = mustFold(t, f, stepwise, e)
				}
				equal(t, "one by one", stepwise, whole)
				head, tail := mustFold(t, f, nil, elements[:cut]...), mustFold(t, f, nil, elements[cut:]...)
				headCopy, tailCopy := bytes.Clone(head), bytes.Clone(tail)
				equal(t, "in two folds", mustFold(t, f, head, elements[cut:]...), whole)
				merged := mustCombine(t, f, head, tail)
				if !leftToRight && !strings.HasPrefix(f.String(), "topk") {
					equal(t, "in two parts", merged, whole)
				}
				if merge != engine.MergeNone && head != nil && tail != nil {
					h := engine.AppendHeader(nil, engine.Header{Sequence: 1})
					folded, err := engine.Fold(merge, append(bytes.Clone(h), head...), true, append(bytes.Clone(h), tail...))
					if err != nil {
						t.Fatalf("engine fold: %v", err)
					}
					equal(t, "by the engine", folded[engine.HeaderLen:], whole)
				}
				for _, acc := range [][]byte{whole, merged} {
					if err := f.Verify(acc); err != nil {
						t.Fatalf("not canonical: %v", err)
					}
				}
				a, err := f.Result(whole)
				if err == nil {
					if err := keygroup.Validate(f.ResultType(), a); err != nil {
						t.Fatalf("result %x is no %s: %v", a, f.ResultType(), err)
					}
				} else if !errors.Is(err, base.ErrOutOfRange) {
					t.Fatalf("result: %v", err)
				}
				equal(t, "elements afterwards", elements, before)
				equal(t, "head afterwards", [][]byte{head, tail}, [][]byte{headCopy, tailCopy})
			})
		})
	}
}

func decodeResult(t tb, f *state.Function, acc []byte) any {
	t.Helper()
	b, err := f.Result(acc)
	if err != nil {
		t.Fatalf("result: %v", err)
	}
	v, err := keygroup.Decode(f.ResultType(), b)
	if err != nil {
		t.Fatalf("result %x: %v", b, err)
	}
	return v
}

func TestIntegerFunctionsAreExact(t *testing.T) {
	sum := function(t, state.KindReducing, keygroup.Int64, "sum")
	mean := function(t, state.KindAggregating, keygroup.Int64, "mean")
	variance := function(t, state.KindAggregating, keygroup.Int64, "variance")
	count := function(t, state.KindAggregating, keygroup.Int64, "count")
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(rapid.OneOf(genInt64, rapid.SampledFrom([]int64{math.MinInt64, math.MaxInt64})), 1, 40).Draw(t, "values")
		var elements [][]byte
		total, squares := new(big.Int), new(big.Int)
		for _, v := range values {
			elements = append(elements, enc(t, keygroup.Int64, v))
			b := big.NewInt(v)
			total.Add(total, b)
			squares.Add(squares, new(big.Int).Mul(b, b))
		}
		n := big.NewInt(int64(len(values)))
		acc := mustFold(t, sum, nil, elements...)
		if total.IsInt64() {
			equal(t, "sum", decodeResult(t, sum, acc), any(total.Int64()))
		} else if _, err := sum.Result(acc); !errors.Is(err, base.ErrOutOfRange) || !strings.Contains(err.Error(), total.String()) {
			t.Fatalf("sum %s: %v", total, err)
		}
		equal(t, "count", decodeResult(t, count, mustFold(t, count, nil, elements...)), any(int64(len(values))))
		want, _ := new(big.Rat).SetFrac(total, n).Float64()
		equal(t, "mean", decodeResult(t, mean, mustFold(t, mean, nil, elements...)), any(want))
		// variance = mean of squares - square of mean
		m := new(big.Rat).SetFrac(total, n)
		v := new(big.Rat).Sub(new(big.Rat).SetFrac(squares, n), new(big.Rat).Mul(m, m))
		want, _ = v.Float64()
		equal(t, "variance", decodeResult(t, variance, mustFold(t, variance, nil, elements...)), any(want))
	})
}

func TestFloatMeanAndVarianceAreNear(t *testing.T) {
	mean := function(t, state.KindAggregating, keygroup.Float64, "mean")
	variance := function(t, state.KindAggregating, keygroup.Float64, "variance")
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(rapid.Float64Range(-1e6, 1e6), 2, 60).Draw(t, "values")
		cut := rapid.IntRange(1, len(values)-1).Draw(t, "cut")
		var elements [][]byte
		var total, squares float64
		for _, v := range values {
			elements = append(elements, enc(t, keygroup.Float64, v))
			total += v
		}
		n, room := float64(len(values)), 1.0
		for _, v := range values {
			room = max(room, v*v)
			squares += (v - total/n) * (v - total/n)
		}
		near := func(what string, got any, want float64) {
			if d := math.Abs(got.(float64) - want); d > 1e-14*n*room {
				t.Fatalf("%s is %v, want about %v", what, got, want)
			}
		}
		equal(t, "mean", decodeResult(t, mean, mustFold(t, mean, nil, elements...)), any(total/n))
		near("variance", decodeResult(t, variance, mustFold(t, variance, nil, elements...)), squares/n)
		a, b := mustFold(t, variance, nil, elements[:cut]...), mustFold(t, variance, nil, elements[cut:]...)
		near("variance of parts", decodeResult(t, variance, mustCombine(t, variance, a, b)), squares/n)
	})
	same := mustFold(t, variance, nil, enc(t, keygroup.Float64, 4.0), enc(t, keygroup.Float64, 4.0), enc(t, keygroup.Float64, 7.0))
	equal(t, "variance of 4, 4, 7", decodeResult(t, variance, same), any(2.0))
}

func TestDistinctCountIsNearAndDependsOnTheSetOnly(t *testing.T) {
	f := function(t, state.KindAggregating, keygroup.Int64, "distinct")
	var acc []byte
	next := 0
	for _, n := range []int{1, 2, 10, 100, 1000, 4000, 5000, 10_000, 50_000, 200_000} {
		var batch [][]byte
		for ; next < n; next++ {
			batch = append(batch, enc(t, keygroup.Int64, int64(next)))
		}
		acc = mustFold(t, f, acc, batch...)
		got := float64(decodeResult(t, f, acc).(int64))
		if math.Abs(got-float64(n)) > max(0.04*float64(n), 1) { // 5 standard errors
			t.Errorf("%d distinct: estimate %v", n, got)
		}
		if err := f.Verify(acc); err != nil {
			t.Fatal(err)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(rapid.Int64Range(0, 9000), 1, 50).Draw(t, "values")
		stride := rapid.SampledFrom([]int64{1, 100, 7000}).Draw(t, "spread")
		var forward, backward [][]byte
		for _, v := range values {
			for i := range int64(100) {
				forward = append(forward, enc(t, keygroup.Int64, v*stride+i))
			}
		}
		backward = slices.Clone(forward)
		slices.Reverse(backward)
		backward = append(backward, forward[0])
		equal(t, "backwards, with a repetition", mustFold(t, f, nil, backward...), mustFold(t, f, nil, forward...))
	})
}

func TestQuantilesAreWithinTheirBound(t *testing.T) {
	qs := []float64{0, 0.01, 0.25, 0.5, 0.75, 0.9, 0.99, 1}
	f := function(t, state.KindAggregating, keygroup.Float64, "quantiles(0,0.01,0.25,0.5,0.75,0.9,0.99,1)")
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(rapid.OneOf(rapid.Float64Range(-1000, 1000), rapid.Float64Range(-1e300, 1e300), rapid.SampledFrom([]float64{0, 1, 5})), 1, 80).Draw(t, "values")
		var elements [][]byte
		for _, v := range values {
			elements = append(elements, enc(t, keygroup.Float64, v))
		}
		var got []float64
		if err := json.Unmarshal(decodeResult(t, f, mustFold(t, f, nil, elements...)).(json.RawMessage), &got); err != nil {
			t.Fatalf("result: %v", err)
		}
		sort.Float64s(values)
		for i, q := range qs {
			want := values[int(math.Floor(q*float64(len(values)-1)))]
			if math.Abs(got[i]-want) > math.Abs(want)/256 && math.Abs(want) > 1e-300 {
				t.Fatalf("quantile %v is %v, want about %v", q, got[i], want)
			}
			if (q == 0 || q == 1) && got[i] != want {
				t.Fatalf("quantile %v is %v, want exactly %v", q, got[i], want)
			}
		}
	})
	for _, c := range []struct {
		values []float64
		want   string
	}{
		{[]float64{7}, "[7,7,7,7,7,7,7,7]"},
		{[]float64{math.Inf(-1), 0, math.Inf(1), math.NaN()}, `["-Inf","-Inf","-Inf",0,"+Inf","+Inf","+Inf","NaN"]`},
		{[]float64{1, 1, 1, 1e9}, "[1,1,1,1.00390625,1.00390625,1.00390625,1.00390625,1e+09]"},
	} {
		var elements [][]byte
		for _, v := range c.values {
			elements = append(elements, enc(t, keygroup.Float64, v))
		}
		got := string(decodeResult(t, f, mustFold(t, f, nil, elements...)).(json.RawMessage))
		if c.want != got {
			t.Errorf("%v: %s, want %s", c.values, got, c.want)
		}
	}
	ints := function(t, state.KindAggregating, keygroup.Int64, "quantiles(0.5)")
	acc := mustFold(t, ints, nil, enc(t, keygroup.Int64, int64(-4)), enc(t, keygroup.Int64, int64(0)), enc(t, keygroup.Int64, int64(4)))
	equal(t, "median of integers", string(decodeResult(t, ints, acc).(json.RawMessage)), "[0]")
}

func TestTopKIsExactWithinItsCountersAndBoundedBeyond(t *testing.T) {
	f := function(t, state.KindAggregating, keygroup.String, "topk(3)")
	show := func(f *state.Function, acc []byte) string { return string(decodeResult(t, f, acc).(json.RawMessage)) }
	var words [][]byte
	for _, w := range strings.Fields("b a c b a b d d e") {
		words = append(words, []byte(w))
	}
	acc := mustFold(t, f, nil, words...)
	equal(t, "top", show(f, acc), `[{"element":"b","count":3,"error":0},{"element":"a","count":2,"error":0},{"element":"d","count":2,"error":0}]`)

	rapid.Check(t, func(t *rapid.T) {
		k := rapid.IntRange(1, 3).Draw(t, "k")
		f := function(t, state.KindAggregating, keygroup.Int64, fmt.Sprintf("topk(%d)", k))
		n := rapid.IntRange(1, 60*k).Draw(t, "n")
		exact := map[int64]uint64{}
		var acc []byte
		parts := rapid.IntRange(1, 3).Draw(t, "parts")
		for range parts {
			var elements [][]byte
			for range n {
				v := rapid.Int64Range(0, int64(12*k)).Draw(t, "value")
				exact[v]++
				elements = append(elements, enc(t, keygroup.Int64, v))
			}
			acc = mustCombine(t, f, acc, mustFold(t, f, nil, elements...))
		}
		if err := f.Verify(acc); err != nil {
			t.Fatal(err)
		}
		var top []struct {
			Element      int64
			Count, Error uint64
		}
		if err := json.Unmarshal(decodeResult(t, f, acc).(json.RawMessage), &top); err != nil {
			t.Fatal(err)
		}
		for i, c := range top {
			if c.Count < exact[c.Element] || c.Count-c.Error > exact[c.Element] {
				t.Fatalf("%d: count %d, error %d, really %d", c.Element, c.Count, c.Error, exact[c.Element])
			}
			if len(exact) <= 10*k && c.Error != 0 {
				t.Fatalf("%d has an error although all fit", c.Element)
			}
			if i > 0 && (top[i-1].Count < c.Count || top[i-1].Count == c.Count && top[i-1].Element >= c.Element) {
				t.Fatalf("out of order: %+v", top)
			}
		}
	})

	one := function(t, state.KindAggregating, keygroup.Bytes, "topk(1)") // 10 counters
	var ten [][]byte
	for c := byte('a'); c < 'k'; c++ {
		ten = append(ten, []byte{c})
	}
	// A new element takes the place of the largest bytes among the smallest
	// counts: z replaces j, and j then replaces i, which has count 1.
	acc = mustFold(t, one, nil, append(slices.Clone(ten), []byte("z"), []byte("j"), []byte("j"))...)
	equal(t, "after evictions", show(one, acc), `[{"element":"ag==","count":3,"error":1}]`)

	tuple, err := keygroup.TupleOf(keygroup.String, keygroup.Bool)
	if err != nil {
		t.Fatal(err)
	}
	ft := function(t, state.KindAggregating, tuple, "topk(1)")
	acc = mustFold(t, ft, nil, enc(t, tuple, []any{"<\"&\u2028", true}))
	equal(t, "tuple", show(ft, acc), `[{"element":["<\"&\u2028",true],"count":1,"error":0}]`)
}

func TestFunctionTextsAreParsedStrictly(t *testing.T) {
	for _, c := range []struct {
		kind state.Kind
		typ  keygroup.Type
		text string
		want string // canonical, "" = refused
	}{
		{state.KindReducing, keygroup.Int64, " sum ", "sum"},
		{state.KindReducing, keygroup.Int64, "SUM", ""},
		{state.KindReducing, keygroup.Int64, "", ""},
		{state.KindReducing, keygroup.Int64, "sum()", ""},
		{state.KindReducing, keygroup.Int64, "sum(1)", ""},
		{state.KindReducing, keygroup.String, "sum", ""},
		{state.KindReducing, keygroup.JSON, "min", ""},
		{state.KindReducing, keygroup.JSON, "last", "last"},
		{state.KindReducing, keygroup.Int64, "mean", ""},
		{state.KindReducing, keygroup.Float64, "bit-and", ""},
		{state.KindReducing, keygroup.Int64, "concat", ""},
		{state.KindReducing, keygroup.Type{}, "sum", ""},
		{state.KindAggregating, keygroup.Type{}, "count", ""},
		{state.KindAggregating, keygroup.JSON, "count", "count"},
		{state.KindAggregating, keygroup.String, "mean", ""},
		{state.KindAggregating, keygroup.Int64, "first", ""},
		{state.KindAggregating, keygroup.Int64, "quantiles( 0.50 , .99,1e0,-0)", "quantiles(0.5,0.99,1,0)"},
		{state.KindAggregating, keygroup.Int64, "quantiles", ""},
		{state.KindAggregating, keygroup.Int64, "quantiles()", ""},
		{state.KindAggregating, keygroup.Int64, "quantiles(1.1)", ""},
		{state.KindAggregating, keygroup.Int64, "quantiles(NaN)", ""},
		{state.KindAggregating, keygroup.Int64, "quantiles(0.5", ""},
		{state.KindAggregating, keygroup.Int64, "quantiles(0.5)x", ""},
		{state.KindAggregating, keygroup.Int64, "quantiles(" + strings.Repeat("0,", 32) + "0)", ""},
		{state.KindAggregating, keygroup.String, "quantiles(0.5)", ""},
		{state.KindAggregating, keygroup.String, "topk(100)", "topk(100)"},
		{state.KindAggregating, keygroup.String, "topk(0)", ""},
		{state.KindAggregating, keygroup.String, "topk(101)", ""},
		{state.KindAggregating, keygroup.String, "topk(1,2)", ""},
		{state.KindAggregating, keygroup.String, "topk", ""},
		{state.KindValue, keygroup.Int64, "sum", ""},
	} {
		f, err := state.ParseFunction(c.kind, c.typ, c.text)
		switch {
		case c.want == "" && !errors.Is(err, base.ErrInvalid):
			t.Errorf("%s %q over %s: %v", c.kind, c.text, c.typ, err)
		case c.want != "" && (err != nil || f.String() != c.want):
			t.Errorf("%s %q over %s: %v, %v", c.kind, c.text, c.typ, f, err)
		}
	}
	if _, err := state.ParseFunction(state.KindAggregating, keygroup.Int64, "client"); !errors.Is(err, base.ErrUnsupported) {
		t.Errorf("client: %v", err)
	}
}

// sampleAccumulators gives one accumulator of each function and type.
func sampleAccumulators(t tb) (fs []*state.Function, names []string, accs [][]byte) {
	t.Helper()
	fs, types, kinds := allFunctions(t)
	for i, f := range fs {
		var elements [][]byte
		for j := range 5 {
			v := map[string]any{"string": fmt.Sprint("s", j%2), "int32": int32(j - 2), "int64": int64(j-2) << 40, "bool": j%2 == 0,
				"bytes": []byte{0, byte(j)}, "float64": float64(j) - 1.5, "json": json.RawMessage(fmt.Sprintf(`{"j":%d}`, j))}[types[i].String()]
			if v == nil {
				v = []any{"t", int32(j)}
			}
			elements = append(elements, enc(t, types[i], v))
		}
		accs = append(accs, mustFold(t, f, nil, elements...))
		names = append(names, fmt.Sprintf("%s %s %s", kinds[i], types[i], f))
	}
	return fs, names, accs
}

// Frozen: accumulators and results.
func TestGoldenAccumulators(t *testing.T) {
	fs, names, accs := sampleAccumulators(t)
	var out bytes.Buffer
	for i, f := range fs {
		r, err := f.Result(accs[i])
		if err != nil {
			t.Fatal(err)
		}
		v, err := keygroup.Decode(f.ResultType(), r)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&out, "%s\n  accumulator %x\n  result %s %s\n", names[i], accs[i], f.ResultType(), keygroup.FormatText(f.ResultType(), v))
	}
	golden(t, "accumulators.txt", out.Bytes())
}

// A damaged accumulator is an error or another valid one, never a panic; what
// cannot be told from damage by length is told by Verify.
func TestDamagedAccumulatorsNeverPanic(t *testing.T) {
	fs, names, accs := sampleAccumulators(t)
	for i, f := range fs {
		exercise := func(acc []byte) error {
			err := f.Verify(acc)
			if err != nil && !errors.Is(err, base.ErrCorrupt) && !errors.Is(err, base.ErrFormatVersion) {
				t.Fatalf("%s: %v", names[i], err)
			}
			_, _ = f.Result(acc)
			_, _ = f.Combine(acc, accs[i])
			_, _ = f.Combine(accs[i], acc)
			return err
		}
		for n := range accs[i] {
			err := exercise(accs[i][:n:n])
			if sketch := strings.Contains(names[i], "distinct") || strings.Contains(names[i], "quantiles"); sketch && err == nil {
				t.Errorf("%s cut to %d of %d bytes passes", names[i], n, len(accs[i]))
			}
			for bit := range 8 {
				damaged := bytes.Clone(accs[i])
				damaged[n] ^= 1 << bit
				_ = exercise(damaged)
			}
		}
		if accs[i][0] == 1 && strings.ContainsAny(f.String(), "(") {
			newer := append([]byte{2}, accs[i][1:]...)
			if err := f.Verify(newer); !errors.Is(err, base.ErrFormatVersion) {
				t.Errorf("%s of version 2: %v", names[i], err)
			}
		}
	}
}

func FuzzAccumulator(f *testing.F) {
	fs, _, accs := sampleAccumulators(f)
	for i, acc := range accs {
		f.Add(uint8(i), acc)
	}
	f.Fuzz(func(t *testing.T, which uint8, acc []byte) {
		i := int(which) % len(fs)
		fn := fs[i]
		if acc == nil {
			acc = []byte{}
		}
		if err := fn.Verify(acc); err != nil {
			if !errors.Is(err, base.ErrCorrupt) && !errors.Is(err, base.ErrFormatVersion) {
				t.Fatal(err)
			}
			_, _ = fn.Result(acc)
			_, _ = fn.Combine(acc, accs[i])
			return
		}
		if _, err := fn.Result(acc); err != nil && !errors.Is(err, base.ErrOutOfRange) {
			t.Fatalf("result of a verified accumulator: %v", err)
		}
		both, err := fn.Combine(acc, accs[i])
		if err != nil {
			t.Fatalf("combining verified accumulators: %v", err)
		}
		_ = fn.Verify(both)
	})
}

func TestSketchesOfManyElementsKeepTheirForm(t *testing.T) {
	f := function(t, state.KindAggregating, keygroup.Int64, "distinct")
	var acc []byte
	dense := false
	for i := range 6000 {
		acc = mustFold(t, f, acc, binary.BigEndian.AppendUint64(nil, uint64(i)*0x9E3779B97F4A7C15))
		if i%500 == 0 || i > 4700 && i < 4720 {
			if err := f.Verify(acc); err != nil {
				t.Fatalf("after %d: %v", i, err)
			}
		}
		dense = acc[1] == 1
	}
	if !dense {
		t.Fatal("6000 elements do not make it dense")
	}
}
