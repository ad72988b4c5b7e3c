package state

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/mem"
	"github.com/keelstate/keelstate/keygroup"
)

// Count extrapolates when it may not look at everything, and stays near.
func TestCountEstimatesBeyondItsLimit(t *testing.T) {
	s, err := mem.NewDriver().Open(filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	l := Layout{M: 128}
	d := &Declaration{ID: 1, Keyspace: "k", Name: "n", Kind: KindValue, KeyType: keygroup.String, ValueType: keygroup.Bytes, CodecVersion: 1}
	if err := s.EnsureFamily(d.ID, l.FamilyOptions(d)); err != nil {
		t.Fatal(err)
	}
	const n = 20_000
	var b engine.Batch
	for i := range n {
		key := fmt.Append(nil, "key-", i)
		g, err := keygroup.GroupOfKey(d.KeyType, key, l.M)
		if err != nil {
			t.Fatal(err)
		}
		b.Put(d.ID, l.cell(g, key, Namespace{}), appendValue(nil, d, Stamp{Sequence: 1}, 0, nil))
	}
	if err := s.Write(&b); err != nil {
		t.Fatal(err)
	}
	for _, limit := range []int{1, 10, 2_000, 10_000, n - 1, n, n + 1} {
		got, err := l.count(s, d, keygroup.FullRange(l.M), limit)
		if err != nil {
			t.Fatal(err)
		}
		if limit > n && got != n {
			t.Errorf("limit %d: %d, want exactly %d", limit, got, n)
		}
		if limit >= 2_000 && (got < n*8/10 || got > n*12/10) {
			t.Errorf("limit %d: %d is far from %d", limit, got, n)
		}
		if got == 0 {
			t.Errorf("limit %d: nothing", limit)
		}
	}
}
