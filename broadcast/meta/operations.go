package meta

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

// MaxFinishedOperations is how many finished operations are kept to be shown.
const MaxFinishedOperations = 256

// MaxOperationErrorBytes bounds the error text of an operation; a longer one is
// cut.
const MaxOperationErrorBytes = 4096

// StartOperationTxn persists a new operation in its first phase, with its
// specification as JSON, and forgets the oldest finished ones but the founding.
func StartOperationTxn(v *View, nowMs uint64, kind, phase string, spec any) (broadcast.Txn, *Operation, error) {
	if kind == "" || phase == "" {
		return broadcast.Txn{}, nil, base.Invalid("kind", "an operation has a kind and a phase")
	}
	raw, err := json.Marshal(spec)
	if err != nil {
		return broadcast.Txn{}, nil, fmt.Errorf("encoding the specification of a %s operation: %w: %w", kind, err, base.ErrInvalid)
	}
	now := max(nowMs, v.Clock())
	op := Operation{ID: v.next(counterOperation), Kind: kind, Phase: phase, Spec: raw, CreatedMs: now, UpdatedMs: now}
	b := builder{txn: broadcast.Txn{Stamp: nowMs}}
	b.advance(v, counterOperation, op.ID+1)
	b.replace(kindOperation, idKey(kindOperation, op.ID), 0, op)
	b.cutOperations(v)
	txn, err := b.done()
	return txn, &op, err
}

func (b *builder) cutOperations(v *View) {
	var finished []*Operation
	for _, o := range v.Operations() {
		if o.Finished() && o.ID != foundingOperation {
			finished = append(finished, o)
		}
	}
	for len(finished) > MaxFinishedOperations {
		key := idKey(kindOperation, finished[0].ID)
		b.expect(key, finished[0].Revision)
		b.delete(key)
		finished = finished[1:]
	}
}

// AdvanceOperationTxn brings a running operation to another phase. problem says
// why it failed or what it waits for; it may be empty. PhaseDone and PhaseFailed
// end the operation; an ended one is base.ErrConflict.
func AdvanceOperationTxn(v *View, nowMs uint64, id uint64, phase, problem string) (broadcast.Txn, error) {
	o := v.Operation(id)
	switch {
	case o == nil:
		return broadcast.Txn{}, notFound("operation", fmt.Sprintf("no operation %d", id))
	case o.Finished():
		return broadcast.Txn{}, conflict("phase", fmt.Sprintf("operation %d has ended: %s", id, o.Phase))
	case phase == "":
		return broadcast.Txn{}, base.Invalid("phase", "must not be empty")
	}
	if len(problem) > MaxOperationErrorBytes {
		problem = problem[:MaxOperationErrorBytes]
	}
	next := *o
	next.Phase, next.UpdatedMs = phase, max(nowMs, v.Clock())
	next.Error = string(bytes.ToValidUTF8([]byte(problem), []byte("?")))
	b := builder{txn: broadcast.Txn{Stamp: nowMs}}
	b.replace(kindOperation, idKey(kindOperation, id), o.Revision, next)
	return b.done()
}
