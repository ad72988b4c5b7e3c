package meta

import (
	"fmt"
	"math"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

// DeclareTxn declares a state, and its keyspace with it if it is new. ID and
// DroppedMs of want are ignored; validate, if not nil, refuses what this package
// cannot know (kinds, types, functions and what goes together).
//
// If an equal state exists, it is returned and the transaction is empty. If it
// exists otherwise, or the keyspace has another key type, the error is
// base.ErrConflict with the field. Else the declaration with its new id is
// returned with created set; it counts once the transaction has succeeded.
func DeclareTxn(v *View, want Declaration, validate func(*Declaration) error) (txn broadcast.Txn, decl *Declaration, created bool, err error) {
	want.ID, want.DroppedMs, want.Revision = 0, 0, 0
	if err := checkDeclaration(&want); err != nil {
		return txn, nil, false, err
	}
	if validate != nil {
		if err := validate(&want); err != nil {
			return txn, nil, false, err
		}
	}
	if v.RestoreUnderWay() != nil {
		return txn, nil, false, &base.Error{Cause: base.ErrNotReady, Ordinal: -1, Hint: "the cluster is being restored from a checkpoint, which has states of its own; retry when it is founded"}
	}
	ks := v.Keyspace(want.Keyspace)
	if ks != nil && ks.KeyType != want.KeyType {
		return txn, nil, false, differs("key_type", "keyspace "+want.Keyspace, ks.KeyType, want.KeyType)
	}
	if have := v.State(want.Keyspace, want.Name); have != nil {
		if err := sameState(have, &want); err != nil {
			return txn, nil, false, err
		}
		return txn, have, false, nil
	}
	id := v.next(counterState)
	if id > math.MaxUint32 {
		return txn, nil, false, &base.Error{Cause: base.ErrOutOfRange, Field: "id", Hint: "no state numbers are left", Ordinal: -1}
	}
	want.ID = uint32(id)
	var b builder
	b.advance(v, counterState, id+1)
	if ks == nil {
		b.replace(kindKeyspace, nameKey(kindKeyspace, want.Keyspace), 0, Keyspace{Name: want.Keyspace, KeyType: want.KeyType})
	} else {
		b.expect(nameKey(kindKeyspace, want.Keyspace), ks.Revision)
	}
	b.replace(kindState, nameKey(kindState, stateName(want.Keyspace, want.Name)), 0, want)
	txn, err = b.done()
	return txn, &want, err == nil, err
}

func checkDeclaration(d *Declaration) error {
	if err := checkName("keyspace", d.Keyspace); err != nil {
		return err
	}
	if err := checkName("name", d.Name); err != nil {
		return err
	}
	if d.Kind == "" {
		return base.Invalid("kind", "must not be empty")
	}
	if d.KeyType == "" {
		return base.Invalid("key_type", "must not be empty")
	}
	if d.CodecVersion < 0 {
		return base.Invalid("codec_version", "must not be negative")
	}
	for _, f := range stateFields(d) {
		if err := checkText(f.name, f.value); err != nil {
			return err
		}
	}
	return nil
}

type field struct{ name, value string }

// stateFields are the fields of a declaration that never change under one id,
// in the order in which they are compared (ME4).
func stateFields(d *Declaration) []field {
	return []field{
		{"kind", d.Kind}, {"key_type", d.KeyType}, {"user_key_type", d.UserKeyType}, {"value_type", d.ValueType},
		{"function", d.Function}, {"function_params", d.FunctionParams}, {"codec_version", fmt.Sprint(d.CodecVersion)},
	}
}

// sameState names the first field in which a state differs from its wish.
func sameState(have, want *Declaration) error {
	wanted := stateFields(want)
	for i, f := range stateFields(have) {
		if f.value != wanted[i].value {
			return differs(f.name, "state "+stateName(have.Keyspace, have.Name), f.value, wanted[i].value)
		}
	}
	return nil
}

func differs(field, what, have, want string) error {
	return conflict(field, fmt.Sprintf("%s was declared with %q, not %q", what, have, want))
}

// DropTxn drops a state. Its number goes to the list of the dropped, until
// PurgeDroppedTxn; its name may be declared again and gets a new number. The
// keyspace and its key type stay. The error is base.ErrNotFound if there is none.
func DropTxn(v *View, keyspace, name string) (broadcast.Txn, error) {
	d := v.State(keyspace, name)
	if d == nil {
		return broadcast.Txn{}, notFound("name", fmt.Sprintf("no state %q in keyspace %q", name, keyspace))
	}
	gone := *d
	gone.DroppedMs = max(v.Clock(), 1)
	var b builder
	key := nameKey(kindState, stateName(keyspace, name))
	b.expect(key, d.Revision)
	b.delete(key)
	b.replace(kindDropped, idKey(kindDropped, uint64(d.ID)), 0, gone)
	return b.done()
}

// PurgeDroppedTxn forgets dropped states that every shard has dropped. Numbers
// that are not in the list are passed over.
func PurgeDroppedTxn(v *View, ids []uint32) broadcast.Txn {
	var b builder
	for _, id := range ids {
		if d, ok := v.dropped.Get(id); ok {
			key := idKey(kindDropped, uint64(id))
			b.expect(key, d.Revision)
			b.delete(key)
		}
	}
	return b.txn
}
