package metamorphic

import (
	"fmt"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/keygroup"
)

// Declarations returns a state of every kind, function and type of element.
func Declarations() []state.Declaration {
	var ds []state.Declaration
	add := func(k state.Kind, value keygroup.Type, function string) {
		d := state.Declaration{
			ID: engine.FamilyID(len(ds) + 1), Keyspace: "ks", Name: fmt.Sprintf("s%d", len(ds)+1), Kind: k,
			KeyType: keygroup.String, ValueType: value, Function: function, CodecVersion: 1,
		}
		if k == state.KindMap {
			d.UserKeyType = keygroup.Bytes
		}
		ds = append(ds, d)
	}
	add(state.KindValue, keygroup.Bytes, "")
	add(state.KindValue, keygroup.Int64, "")
	add(state.KindList, keygroup.Bytes, "")
	add(state.KindMap, keygroup.Bytes, "")
	for _, f := range []string{"sum", "min", "max", "first", "last", "bit-and", "bit-or"} {
		add(state.KindReducing, keygroup.Int64, f)
	}
	for _, f := range []string{"sum", "min"} {
		add(state.KindReducing, keygroup.Float64, f)
	}
	for _, f := range []string{"concat", "max", "first"} {
		add(state.KindReducing, keygroup.Bytes, f)
	}
	for _, f := range []string{"count", "sum", "mean", "min", "max", "variance", "quantiles(0.5,0.9)"} {
		add(state.KindAggregating, keygroup.Int64, f)
	}
	for _, f := range []string{"mean", "variance", "quantiles(0.25)"} {
		add(state.KindAggregating, keygroup.Float64, f)
	}
	for _, f := range []string{"distinct", "topk(3)"} {
		add(state.KindAggregating, keygroup.Bytes, f)
	}
	return ds
}
