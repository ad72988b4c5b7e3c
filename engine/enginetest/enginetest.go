package enginetest

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/keelstate/keelstate/engine"
)

// Run runs the suite. newDriver is called once per test; the suite closes what
// it returns.
func Run(t *testing.T, newDriver func(t *testing.T) engine.Driver) {
	for _, c := range []struct {
		name string
		run  func(h *harness)
	}{
		{"Families", testFamilies},
		{"FamiliesSurviveReopen", testFamiliesReopen},
		{"DroppedFamilyComesBackEmpty", testDropAndRecreate},
		{"UnknownFamily", testUnknownFamily},
		{"PutGetDelete", testPutGetDelete},
		{"MultiGet", testMultiGet},
		{"SlicesBelongToCaller", testSlices},
		{"BatchOrder", testBatchOrder},
		{"RefusedBatchWritesNothing", testRefusedBatch},
		{"LargeValues", testLargeValues},
		{"Scan", testScan},
		{"ScanSeesOneInstant", testScanInstant},
		{"DeleteRange", testDeleteRange},
		{"ViewsDoNotChange", testViews},
		{"ClosedView", testClosedView},
		{"Merge", testMerge},
		{"MergeAcrossFlushes", testMergeAcrossFlushes},
		{"MalformedOperand", testMalformedOperand},
		{"DurableGet", testDurableGet},
		{"LostSuffixIsWholeBatches", testLostSuffix},
		{"FlushCoversAllFamilies", testFlushAll},
		{"Checkpoint", testCheckpoint},
		{"CheckpointRefusesExisting", testCheckpointExisting},
		{"UseAfterClose", testUseAfterClose},
		{"CloseWithOpenReaders", testCloseWithReaders},
		{"ForeignDirectory", testForeignDirectory},
		{"OpenTwice", testOpenTwice},
		{"Verify", testVerify},
		{"Stats", testStats},
		{"ReadersBesideWriter", testReadersBesideWriter},
		{"Model", testModel},
		{"Txn", testTxnModel},
		{"Absorb", testAbsorb},
		{"AbsorbRefuses", testAbsorbRefuses},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := newDriver(t)
			h := &harness{T: t, driver: d, dir: filepath.Join(t.TempDir(), "store")}
			t.Cleanup(func() {
				h.close()
				if err := d.Close(); err != nil {
					t.Errorf("closing the driver: %v", err)
				}
			})
			c.run(h)
		})
	}
}

// Families of the tests, one of each use and one of each merge kind.
const (
	scanned engine.FamilyID = 7
	point   engine.FamilyID = 8
	// merging + k is the family with merge kind k.
	merging engine.FamilyID = 100
)

var (
	scannedOptions = engine.FamilyOptions{Use: engine.UseScanned, GroupWidth: 2}
	pointOptions   = engine.FamilyOptions{Use: engine.UsePoint, GroupWidth: 1}
)

var mergeKinds = []engine.MergeKind{
	engine.MergeSum128, engine.MergeMin, engine.MergeMax, engine.MergeFirst,
	engine.MergeAnd64, engine.MergeOr64, engine.MergeSumCount,
}

func mergeFamily(k engine.MergeKind) (engine.FamilyID, engine.FamilyOptions) {
	use := engine.UsePoint
	if k%2 == 0 {
		use = engine.UseScanned
	}
	return merging + engine.FamilyID(k), engine.FamilyOptions{Use: use, Merge: k, GroupWidth: 2}
}

// harness is a test with its driver and at most one open store of its own.
type harness struct {
	*testing.T
	driver engine.Driver
	dir    string
	store  engine.Store
}

func (h *harness) must(err error, doing string, args ...any) {
	h.Helper()
	if err != nil {
		h.Fatalf("%s: %v", fmt.Sprintf(doing, args...), err)
	}
}

// wantErr checks that err wraps want.
func (h *harness) wantErr(err, want error, doing string, args ...any) {
	h.Helper()
	if !errors.Is(err, want) {
		h.Fatalf("%s: got error %v, want %v", fmt.Sprintf(doing, args...), err, want)
	}
}

// open opens the store with the scanned and the point family.
func (h *harness) open() engine.Store {
	h.Helper()
	s, err := h.driver.Open(h.dir)
	h.must(err, "opening")
	h.store = s
	h.must(s.EnsureFamily(scanned, scannedOptions), "creating the scanned family")
	h.must(s.EnsureFamily(point, pointOptions), "creating the point family")
	return s
}

// openMerging opens the store with a family per merge kind too.
func (h *harness) openMerging() engine.Store {
	h.Helper()
	s := h.open()
	for _, k := range mergeKinds {
		f, o := mergeFamily(k)
		h.must(s.EnsureFamily(f, o), "creating family %d", f)
	}
	return s
}

// close closes the store if one is open; without a Flush before it, what was
// not flushed may be lost.
func (h *harness) close() {
	h.Helper()
	if h.store == nil {
		return
	}
	if err := h.store.Close(); err != nil {
		h.Errorf("closing the store: %v", err)
	}
	h.store = nil
}

func (h *harness) reopen() engine.Store {
	h.Helper()
	h.close()
	return h.open()
}

func (h *harness) flush() {
	h.Helper()
	h.must(h.store.Flush(), "flushing")
}

// write writes what fill puts into a batch.
func (h *harness) write(fill func(b *engine.Batch)) {
	h.Helper()
	var b engine.Batch
	fill(&b)
	h.must(h.store.Write(&b), "writing a batch of %d", b.Len())
}

func (h *harness) put(f engine.FamilyID, key, value string) {
	h.Helper()
	h.write(func(b *engine.Batch) { b.Put(f, []byte(key), []byte(value)) })
}

// want checks a key's value by Get and MultiGet; nil means absent.
func (h *harness) want(r engine.Reader, f engine.FamilyID, key string, value []byte) {
	h.Helper()
	got, ok, err := r.Get(f, []byte(key))
	h.must(err, "getting %q of family %d", key, f)
	if ok != (value != nil) || !bytes.Equal(got, value) {
		h.Fatalf("get %q of family %d: got %s, %v; want %s", key, f, short(got), ok, short(value))
	}
	many, err := r.MultiGet(f, [][]byte{[]byte(key)})
	h.must(err, "multi-getting %q of family %d", key, f)
	if len(many) != 1 || (many[0] != nil) != (value != nil) || !bytes.Equal(many[0], value) {
		h.Fatalf("multi-get %q of family %d: got %q; want %s", key, f, many, short(value))
	}
}

func short(b []byte) string {
	if len(b) > 64 {
		return fmt.Sprintf("%q... (%d bytes)", b[:64], len(b))
	}
	return fmt.Sprintf("%q", b)
}

type pair struct{ key, value string }

// collect reads a scan to its end.
func (h *harness) collect(it engine.Iterator) []pair {
	h.Helper()
	pairs, err := drain(it)
	h.must(err, "scanning")
	return pairs
}

func drain(it engine.Iterator) ([]pair, error) {
	defer it.Close()
	var out []pair
	for it.Next() {
		out = append(out, pair{string(it.Key()), string(it.Value())})
	}
	if err := it.Err(); err != nil {
		return nil, err
	}
	if it.Next() {
		return nil, errors.New("Next is true again after the end")
	}
	return out, nil
}

func samePairs(a, b []pair) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

// value is a stored value with a header.
func value(sequence uint64, payload []byte) []byte {
	return append(engine.AppendHeader(nil, engine.Header{Codec: 1, Sequence: sequence, TimestampMs: sequence * 10}), payload...)
}
