package enginetest

import (
	"fmt"
	"sort"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
)

// model is one family as a map; its methods are the naive reference.
type model map[string]string

func (m model) clone() model {
	out := make(model, len(m))
	for k, v := range m {
		out[k] = v
	}
	return out
}

func (m model) scan(lo, hi []byte, o engine.ScanOptions) []pair {
	var out []pair
	for k, v := range m {
		if k >= string(lo) && (hi == nil || k < string(hi)) {
			if o.KeysOnly {
				v = ""
			}
			out = append(out, pair{k, v})
		}
	}
	sort.Slice(out, func(i, j int) bool { return out[i].key < out[j].key != o.Reverse })
	if o.Limit > 0 && len(out) > o.Limit {
		out = out[:o.Limit]
	}
	return out
}

func (m model) deleteRange(lo, hi string) {
	for k := range m {
		if k >= lo && k < hi {
			delete(m, k)
		}
	}
}

// wantScan compares one scan with the model.
func (h *harness) wantScan(r engine.Reader, f engine.FamilyID, m model, lo, hi []byte, o engine.ScanOptions) {
	h.Helper()
	got, want := h.collect(r.Scan(f, lo, hi, o)), m.scan(lo, hi, o)
	if !samePairs(got, want) {
		h.Fatalf("scan of family %d in [%q, %q) (hi nil: %v) with %+v:\n got %q\nwant %q", f, lo, hi, hi == nil, o, got, want)
	}
}

// testScan: order is by unsigned bytes (EN4), for every pair of bounds.
func testScan(h *harness) {
	s := h.open()
	for _, f := range []engine.FamilyID{engine.MetaFamily, scanned, point} {
		m := model{}
		h.wantScan(s, f, m, nil, nil, engine.ScanOptions{})
		h.wantScan(s, f, m, nil, nil, engine.ScanOptions{Reverse: true})
		for i, k := range binaryKeys {
			if i%2 == 0 {
				h.put(f, k, fmt.Sprint(i))
				m[k] = fmt.Sprint(i)
			}
		}
		h.scanAll(s, f, m)
		h.flush()
		h.scanAll(s, f, m)
		for i, k := range binaryKeys {
			switch i % 6 {
			case 1:
				h.put(f, k, "")
				m[k] = ""
			case 2:
				h.write(func(b *engine.Batch) { b.Delete(f, []byte(k)) })
				delete(m, k)
			}
		}
		h.scanAll(s, f, m)
	}
}

func (h *harness) scanAll(s engine.Store, f engine.FamilyID, m model) {
	h.Helper()
	v, err := s.NewView()
	h.must(err, "taking a view")
	defer v.Close()
	bounds := [][]byte{nil}
	for _, k := range binaryKeys {
		bounds = append(bounds, []byte(k))
	}
	options := []engine.ScanOptions{{}, {Reverse: true}, {KeysOnly: true}, {Limit: 1}, {Limit: 3, Reverse: true}, {Limit: 2, KeysOnly: true}}
	for i, lo := range bounds {
		for j, hi := range bounds {
			o := options[(i+j)%len(options)]
			h.wantScan(s, f, m, lo, hi, o)
			o.Reverse = !o.Reverse
			h.wantScan(v, f, m, lo, hi, o)
		}
	}
	it := v.Scan(f, nil, nil, engine.ScanOptions{KeysOnly: true})
	defer it.Close()
	for it.Next() {
		if it.Value() != nil {
			h.Fatalf("keys-only scan has value %q", it.Value())
		}
	}
}

func testScanInstant(h *harness) {
	s := h.open()
	m := model{}
	for i := range 300 {
		k := fmt.Sprintf("k%03d", i)
		h.put(scanned, k, "old")
		m[k] = "old"
	}
	for _, reverse := range []bool{false, true} {
		it := s.Scan(scanned, nil, nil, engine.ScanOptions{Reverse: reverse})
		want := m.scan(nil, nil, engine.ScanOptions{Reverse: reverse})
		var got []pair
		for i := 0; it.Next(); i++ {
			got = append(got, pair{string(it.Key()), string(it.Value())})
			if i == 2 {
				for j := range 300 {
					k := fmt.Sprintf("k%03d", j)
					h.put(scanned, k, fmt.Sprint("new", reverse))
					m[k] = fmt.Sprint("new", reverse)
				}
				h.put(scanned, fmt.Sprint("k150+", reverse), "new")
				m[fmt.Sprint("k150+", reverse)] = "new"
				h.flush()
			}
		}
		h.must(it.Err(), "scanning")
		it.Close()
		if it.Next() {
			h.Fatal("Next is true after Close")
		}
		if !samePairs(got, want) {
			h.Fatalf("reverse %v: a scan saw writes that came after it", reverse)
		}
		h.wantScan(s, scanned, m, nil, nil, engine.ScanOptions{})
	}
	abandoned := s.Scan(scanned, nil, nil, engine.ScanOptions{})
	abandoned.Next()
	abandoned.Close()
}

func testDeleteRange(h *harness) {
	s := h.open()
	fill := func(f engine.FamilyID) model {
		m := model{}
		for _, k := range binaryKeys {
			h.put(f, k, "v")
			m[k] = "v"
		}
		return m
	}
	for _, f := range []engine.FamilyID{scanned, point} {
		for i, lo := range binaryKeys {
			hi := binaryKeys[(i*7+5)%len(binaryKeys)] // also below lo: removes nothing
			m := fill(f)
			if i%3 == 0 {
				h.flush()
			}
			h.write(func(b *engine.Batch) { b.DeleteRange(f, []byte(lo), []byte(hi)) })
			m.deleteRange(lo, hi)
			for _, k := range binaryKeys {
				var want []byte
				if v, ok := m[k]; ok {
					want = []byte(v)
				}
				h.want(s, f, k, want)
			}
			h.wantScan(s, f, m, nil, nil, engine.ScanOptions{})
			h.wantScan(s, f, m, nil, nil, engine.ScanOptions{Reverse: true})
		}
		h.flush()
		h.must(s.Compact(), "compacting")
	}
}

// testViews: nothing that is written later shows in a view (EN3).
func testViews(h *harness) {
	s := h.openMerging()
	sum, _ := mergeFamily(engine.MergeSum128)
	keys := []string{"a", "b", "c", "d"}
	before := model{}
	for _, k := range keys {
		h.put(scanned, k, "old "+k)
		before[k] = "old " + k
	}
	one := value(1, append(make([]byte, 15), 1))
	h.write(func(b *engine.Batch) { b.Merge(sum, []byte("n"), one) })
	v, err := s.NewView()
	h.must(err, "taking a view")
	defer v.Close()
	check := func(after string) {
		h.Helper()
		for _, k := range keys {
			h.want(v, scanned, k, []byte("old "+k))
		}
		h.want(v, scanned, "new", nil)
		h.want(v, sum, "n", one)
		for _, o := range []engine.ScanOptions{{}, {Reverse: true}} {
			if got := h.collect(v.Scan(scanned, nil, nil, o)); !samePairs(got, before.scan(nil, nil, o)) {
				h.Fatalf("after %s: %q", after, got)
			}
		}
	}
	steps := []struct {
		name string
		do   func()
	}{
		{"put", func() { h.put(scanned, "a", "new"); h.put(scanned, "new", "new") }},
		{"delete", func() { h.write(func(b *engine.Batch) { b.Delete(scanned, []byte("b")) }) }},
		{"merge", func() { h.write(func(b *engine.Batch) { b.Merge(sum, []byte("n"), one) }) }},
		{"delete range", func() { h.write(func(b *engine.Batch) { b.DeleteRange(scanned, []byte("a"), []byte("z")) }) }},
		{"flush", func() { h.flush() }},
		{"compact", func() { h.must(s.Compact(), "compacting") }},
		{"put again", func() { h.put(scanned, "c", "newer") }},
		{"flush again", func() { h.flush() }},
	}
	for _, step := range steps {
		step.do()
		check(step.name)
	}
	h.wantScan(s, scanned, model{"c": "newer"}, nil, nil, engine.ScanOptions{})
}

func testClosedView(h *harness) {
	s := h.open()
	v, err := s.NewView()
	h.must(err, "taking a view")
	v.Close()
	_, _, err = v.Get(scanned, []byte("a"))
	h.wantErr(err, base.ErrClosed, "get")
	_, err = v.MultiGet(scanned, [][]byte{[]byte("a")})
	h.wantErr(err, base.ErrClosed, "multi-get")
	_, err = drain(v.Scan(scanned, nil, nil, engine.ScanOptions{}))
	h.wantErr(err, base.ErrClosed, "scan")
}
