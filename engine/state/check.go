package state

import (
	"bytes"
	"fmt"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// Check returns nil if the precondition holds, an error that wraps
// base.ErrPrecondition if it does not, and another error if it is refused or
// the store fails.
func (l Layout) Check(r engine.Reader, d *Declaration, p *Precondition) error {
	if err := l.ValidatePrecondition(d, p); err != nil {
		return err
	}
	found, err := l.lookup(r, d, p)
	if err != nil {
		return err
	}
	switch p.Kind {
	case PreAbsent:
		if found.present {
			return violated("it is present")
		}
		return nil
	case PrePresent:
		if found.present {
			return nil
		}
	case PreEqual:
		if found.present && !found.null && bytes.Equal(found.payload, p.Bytes) {
			return nil
		}
		if found.present {
			return violated("it has another value")
		}
	case PreVersion:
		if found.present && found.version == p.Version {
			return nil
		}
		if found.present {
			return violated(fmt.Sprintf("it has version %d", found.version))
		}
	case PreNull:
		if found.present && found.null {
			return nil
		}
		if found.present {
			return violated("it is not null")
		}
	}
	return violated("it is absent")
}

func violated(is string) error { return fmt.Errorf("%w: %s", base.ErrPrecondition, is) }

// stored is what is under one engine key.
type stored struct {
	present bool
	null    bool
	version uint64
	payload []byte
}

func parseStored(d *Declaration, raw []byte) (stored, error) {
	h, payload, err := engine.ParseHeader(raw)
	if err != nil {
		return stored{}, fmt.Errorf("reading state %d: %w", d.ID, err)
	}
	return stored{present: true, null: h.Flags&engine.FlagNull != 0, version: h.Sequence, payload: payload}, nil
}

// lookup reads what a precondition is about. For a list or whole map only
// present is set.
func (l Layout) lookup(r engine.Reader, d *Declaration, p *Precondition) (stored, error) {
	cell := l.cell(p.Group, p.Key, p.Namespace)
	if d.Kind == KindList || d.Kind == KindMap && !p.HasUserKey {
		some, err := anyUnder(r, d, cell)
		return stored{present: some}, err
	}
	if p.HasUserKey {
		cell = appendPart(cell, p.UserKey)
	}
	raw, ok, err := r.Get(d.ID, cell)
	if err != nil || !ok {
		return stored{}, err
	}
	return parseStored(d, raw)
}

// anyUnder says whether any entry is under a cell: one seek.
func anyUnder(r engine.Reader, d *Declaration, cell []byte) (bool, error) {
	it := r.Scan(d.ID, cell, prefixEnd(cell), engine.ScanOptions{KeysOnly: true, Limit: 1})
	defer it.Close()
	some := it.Next()
	return some, it.Err()
}
