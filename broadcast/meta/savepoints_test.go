package meta

import (
	"errors"
	"slices"
	"testing"

	"github.com/keelstate/keelstate/internal/base"
)

// save makes a savepoint and completes it; it returns its record and the keys of
// its objects.
func (w *world) save(complete bool) (c *Checkpoint, keys []string) {
	w.t.Helper()
	return w.saveInto(w.startSavepoint(), complete)
}

func (w *world) startSavepoint() *Checkpoint {
	w.t.Helper()
	txn, c, err := StartCheckpointTxn(w.quick(), 5000, CheckpointSpec{TimeoutMs: 60000, Savepoint: true, Uploaders: uploaders(w.quick())})
	w.do(txn, err)
	return w.quick().Checkpoint(c.Number)
}

func (w *world) saveInto(c *Checkpoint, complete bool) (_ *Checkpoint, keys []string) {
	w.t.Helper()
	folder := c.objectFolder("c1")
	for _, s := range w.view().CheckpointShards(c.Number) {
		object := func(text string) Object {
			return Object{Key: objectKey(folder, sumOf(text), s.Attempt), Size: int64(len(text))}
		}
		r, plain := reported("saved", s.Attempt)
		m, f := object("manifest saved"), object("same everywhere")
		f.Parts = []ObjectPart{{SHA256: sumOf("same"), Length: 4}, {SHA256: sumOf("everywhere"), Offset: 4, Length: 10}}
		r.ManifestKey = m.Key
		_, err := ReportUploadedTxn(w.view(), 1, c.Number, s.Group, s.Attempt, r, []Object{plain, f}, nil)
		if !errors.Is(err, base.ErrInvalid) {
			w.t.Fatalf("an object outside of the folder: %v", err)
		}
		_, err = ReportUploadedTxn(w.view(), 1, c.Number, s.Group, s.Attempt, r, []Object{m, f}, []string{key("shared", 1)})
		if !errors.Is(err, base.ErrInvalid) {
			w.t.Fatalf("a savepoint that reuses: %v", err)
		}
		w.do(ReportUploadedTxn(w.view(), 1, c.Number, s.Group, s.Attempt, r, []Object{m, f}, nil))
		keys = append(keys, m.Key, f.Key)
	}
	if complete {
		w.complete(c, 1)
	}
	return w.view().Checkpoint(c.Number), keys
}

// ME13: savepoints are neither counted nor retired; what they hold is reused by
// nobody and goes when the user says so, all of it and nothing else.
func TestSavepointsAreTheUsers(t *testing.T) {
	w := founded(t)
	c1 := w.start()
	w.upload(c1, []string{"shared"}, nil)
	w.complete(c1, 1)
	s, keys := w.save(true)
	for _, text := range []string{"same everywhere", "same", "everywhere", "manifest saved"} {
		if p, ok := w.view().FindContent(sumOf(text), int64(len(text))); ok {
			t.Errorf("content of a savepoint is found in %s", p.Object)
		}
	}
	if v := w.view(); v.Checkpoint(1).Phase != CheckpointCompleted || v.LastCheckpoint().Number != 1 || len(v.Plans()) != 0 {
		t.Errorf("a savepoint retired something: %v", planned(v))
	}
	c3 := w.start()
	shard := w.view().CheckpointShards(c3.Number)[0]
	r, m := reported("3", shard.Attempt)
	_, err := ReportUploadedTxn(w.view(), 1, c3.Number, shard.Group, shard.Attempt, r, []Object{m}, keys[:1])
	wantField(t, "reuse of a savepoint's object", err, base.ErrConflict, "reused")
	w.upload(c3, nil, []string{"shared"})
	w.complete(c3, 1)
	if v := w.view(); v.Checkpoint(1) != nil || v.Checkpoint(s.Number).Phase != CheckpointCompleted || slices.Contains(planned(v), keys[0]) {
		t.Errorf("retention: %v", planned(v))
	}
	test := w.view().OrphanTest()
	for _, k := range append(keys, s.metadataKey("c1")) {
		if orphan, foreign := test(k); orphan || foreign {
			t.Errorf("%s of a savepoint: orphan %v, foreign %v", k, orphan, foreign)
		}
	}
	_, err = DeleteCheckpointTxn(w.view(), 1, s.Number)
	wantField(t, "deleting a savepoint", err, base.ErrConflict, "savepoint")
	_, err = DeleteSavepointTxn(w.view(), 1, c3.Number)
	wantField(t, "deleting a checkpoint as a savepoint", err, base.ErrConflict, "savepoint")
	before := len(planned(w.view()))
	w.do(DeleteSavepointTxn(w.view(), 1, s.Number))
	want := append(slices.Clone(keys), s.metadataKey("c1"))
	got := slices.Clone(planned(w.view())[before:])
	if got[0] != s.metadataKey("c1") {
		t.Errorf("%s goes first", got[0])
	}
	slices.Sort(want)
	if slices.Sort(got); !slices.Equal(got, want) || w.view().Checkpoint(s.Number) != nil {
		t.Errorf("planned %q, want %q", got, want)
	}
	// Whoever has put it there again is the user; nothing is known of it any more.
	for _, p := range w.view().Plans() {
		w.do(FinishPlanTxn(w.view(), p.ID))
	}
	if orphan, _ := w.view().OrphanTest()(s.metadataKey("c1")); orphan {
		t.Error("a _metadata that the user may own is an orphan")
	}
}

// ME13: of a failed savepoint all that was registered is planned, and the rest is an
// orphan, a `_metadata` that came too late as well.
func TestFailedSavepointLeavesNothing(t *testing.T) {
	w := founded(t)
	s, keys := w.save(false)
	w.do(FailCheckpointTxn(w.view(), 1, s.Number, "test"))
	w.do(PlanDeletionsTxn(w.view(), 1))
	want := append(keys, s.metadataKey("c1"))
	got := planned(w.view())
	slices.Sort(want)
	if slices.Sort(got); !slices.Equal(got, want) {
		t.Errorf("planned %q, want %q", got, want)
	}
	for _, p := range w.view().Plans() {
		w.do(FinishPlanTxn(w.view(), p.ID))
	}
	test := w.view().OrphanTest()
	for _, k := range []string{s.metadataKey("c1"), objectKey(s.objectFolder("c1"), sumOf("unregistered"), 1)} {
		if orphan, foreign := test(k); !orphan || foreign {
			t.Errorf("%s: orphan %v, foreign %v", k, orphan, foreign)
		}
	}
	for _, k := range []string{"c1/savepoints/2/_metadata", "c1/savepoints/0000000002/notes", "c2/savepoints/0000000001/_metadata", "c1/savepoints/0000000001/x/_metadata"} {
		if _, foreign := test(k); !foreign {
			t.Errorf("%s is no key of ours", k)
		}
	}
}
