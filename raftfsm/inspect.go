package raftfsm

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
)

// Sum condenses a report: the content hash of the whole range, which does not
// depend on how the range is cut, and a hash over the op hashes in order.
func (h *HashReport) Sum() (content, ops []byte) {
	var total state.Hash128
	for _, c := range h.Content {
		total = total.Plus(c)
	}
	o := sha256.New()
	for i := range h.Op {
		o.Write(h.Op[i][:])
	}
	return total.Append(nil), o.Sum(nil)[:16]
}

// SessionIDs lists the sessions that the shard remembers at this instant, in
// order; it reads them from the store.
func (v *ReadView) SessionIDs() ([]base.SessionID, error) {
	it := v.view.Scan(engine.MetaFamily, []byte{metaSession}, []byte{metaSession + 1}, engine.ScanOptions{KeysOnly: true})
	defer it.Close()
	var out []base.SessionID
	for it.Next() {
		k := it.Key()
		if len(k) != 1+8+4+4 {
			return nil, fmt.Errorf("reading session key of %d bytes: %w", len(k), base.ErrCorrupt)
		}
		id := base.SessionID(binary.BigEndian.Uint64(k[1:]))
		if n := len(out); n == 0 || out[n-1] != id {
			out = append(out, id)
		}
	}
	return out, it.Err()
}

// ReleaseMarks lets all kept views of hash marks go.
func (m *Machine) ReleaseMarks() { m.dropMarks() }
