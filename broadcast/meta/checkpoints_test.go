package meta

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

func sumOf(text string) Sum { return sha256.Sum256([]byte(text)) }

// dumpCheckpoints prints what a view answers about checkpoints and the registry.
func dumpCheckpoints(v *View) string {
	var b []byte
	line := func(name string, x any) {
		text, err := json.Marshal(x)
		b = fmt.Appendf(b, "%s %s %v\n", name, text, err)
	}
	for _, c := range v.Checkpoints() {
		line(fmt.Sprintf("checkpoint at %d", c.Revision), c)
		for _, s := range v.CheckpointShards(c.Number) {
			line(fmt.Sprintf("checkpoint shard at %d", s.Revision), s)
		}
	}
	v.shardsOf.Scan(func(_ string, s *CheckpointShard) bool { line("shard of", s); return true })
	v.usesOf.Scan(func(_ string, u *objectUse) bool { line(fmt.Sprintf("uses at %d", u.revision), u); return true })
	v.ScanObjects(func(o *Object) bool { line("object", o); return true })
	v.byKey.Scan(func(key string, o *Object) bool { line("key "+key, o.Number); return true })
	v.contents.Scan(func(key string, c content) bool {
		b = fmt.Appendf(b, "content %x %d %d %d\n", key, c.object.Number, c.offset, c.length)
		return true
	})
	v.rollbacks.Scan(func(_ string, s *RollbackShard) bool {
		line(fmt.Sprintf("rollback shard at %d", s.Revision), s)
		return true
	})
	for _, p := range v.Participants() {
		line(fmt.Sprintf("participant at %d", p.Revision), p)
	}
	v.positions.Scan(func(key string, p *Position) bool {
		line(fmt.Sprintf("position %x at %d", key, p.Revision), p)
		return true
	})
	v.restored.Scan(func(_ string, p *RestoredPosition) bool {
		line(fmt.Sprintf("restored at %d", p.Revision), p)
		return true
	})
	for _, p := range v.Plans() {
		line(fmt.Sprintf("plan at %d", p.Revision), p)
	}
	return string(b)
}

// key is the key of an object with this content in the world's cluster.
func key(text string, attempt uint64) string { return objectKey("c1", sumOf(text), attempt) }

// object is one that an attempt stored; its content is text.
func object(text string, attempt uint64) Object {
	return Object{Key: key(text, attempt), Size: int64(len(text))}
}

func uploaders(v *View) map[base.GroupID]base.NodeID {
	m := make(map[base.GroupID]base.NodeID)
	for _, s := range v.Shards() {
		m[s.ID] = s.Replicas[len(s.Replicas)-1].Node
	}
	return m
}

// start starts a checkpoint and returns its record.
func (w *world) start() *Checkpoint {
	w.t.Helper()
	txn, c, err := StartCheckpointTxn(w.quick(), 5000, CheckpointSpec{TimeoutMs: 60000, Uploaders: uploaders(w.quick())})
	w.do(txn, err)
	return w.quick().Checkpoint(c.Number)
}

// fail starts a checkpoint and fails it.
func (w *world) fail() {
	w.t.Helper()
	c := w.start()
	w.do(FailCheckpointTxn(w.view(), 1, c.Number, "test"))
	w.do(PlanDeletionsTxn(w.view(), 1))
}

// reported is a report with a manifest, which the object is.
func reported(text string, attempt uint64) (ShardReport, Object) {
	o := object("manifest "+text, attempt)
	return ShardReport{Index: 10, Term: 1, Sequence: 9, ClockMs: 8, ManifestKey: o.Key, ManifestSHA256: sumOf("manifest " + text), ManifestSize: o.Size, FullBytes: 100, NewBytes: 10, Files: 2, NewFiles: 1}, o
}

// upload reports every shard of a checkpoint: each has a file of its own, those
// named, and reuses what holds the contents named.
func (w *world) upload(c *Checkpoint, files, reused []string) {
	w.t.Helper()
	for _, s := range w.view().CheckpointShards(c.Number) {
		r, m := reported(fmt.Sprintf("%d %d", c.Number, s.Group), s.Attempt)
		objects := []Object{m, object(fmt.Sprintf("file %d %d", c.Number, s.Group), s.Attempt)}
		for _, f := range files {
			objects = append(objects, object(f, s.Attempt))
		}
		var keys []string
		for _, f := range reused {
			p, ok := w.quick().FindContent(sumOf(f), int64(len(f)))
			if !ok {
				w.t.Fatalf("content %q is not in the registry", f)
			}
			keys = append(keys, p.Object)
		}
		w.do(ReportFlushedTxn(w.view(), 6000, c.Number, s.Group, s.Attempt))
		w.do(ReportUploadedTxn(w.view(), 6001, c.Number, s.Group, s.Attempt, r, objects, keys))
	}
}

func (w *world) complete(c *Checkpoint, retain int) {
	w.t.Helper()
	w.do(MetadataPhaseTxn(w.quick(), 7000, c.Number))
	w.do(CompleteTxn(w.quick(), 7001, c.Number, sumOf("metadata"), 8, retain))
}

// planned are the keys in all plans.
func planned(v *View) []string {
	var keys []string
	for _, p := range v.Plans() {
		keys = append(keys, p.Keys...)
	}
	slices.Sort(keys)
	return keys
}

// finish executes all plans.
func (w *world) finish() {
	w.t.Helper()
	for _, p := range w.view().Plans() {
		w.do(FinishPlanTxn(w.quick(), p.ID))
	}
}

// A checkpoint from its start to its completion.
func TestCheckpointCompletes(t *testing.T) {
	w := founded(t)
	c := w.start()
	shards := w.view().CheckpointShards(c.Number)
	if c.Number != 1 || c.Phase != CheckpointAnnounced || c.Shards != 4 || len(shards) != 4 || w.view().RunningCheckpoint() != c {
		t.Fatalf("%+v, %d shards", c, len(shards))
	}
	for i, s := range shards {
		want := w.view().Shard(s.Group)
		if s.Attempt != uint64(i+1) || s.Uploader != "n3" || s.Lo != want.Lo || s.Hi != want.Hi || s.Epoch != want.Epoch || s.Birth != want.Birth || s.State != CheckpointShardAnnounced {
			t.Errorf("shard %+v", s)
		}
	}
	if _, _, err := StartCheckpointTxn(w.view(), 1, CheckpointSpec{Uploaders: uploaders(w.view())}); err == nil {
		t.Error("a second one starts")
	} else {
		wantField(t, "a second one", err, base.ErrConflict, "checkpoint")
	}
	_, err := MetadataPhaseTxn(w.view(), 1, c.Number)
	wantField(t, "metadata before the uploads", err, base.ErrConflict, "shards")
	w.upload(c, nil, nil)
	_, err = CompleteTxn(w.view(), 1, c.Number, sumOf("x"), 1, 1)
	wantField(t, "completion before the metadata", err, base.ErrConflict, "checkpoint")
	w.complete(c, 1)
	got := w.view().LastCheckpoint()
	if got == nil || got.Phase != CheckpointCompleted || got.EndedMs != 7001 || got.MetadataSHA256 != sumOf("metadata") || got.Totals.FullBytes != 400 || got.Totals.Objects != 8 {
		t.Fatalf("%+v", got)
	}
	v := w.view()
	if v.RunningCheckpoint() != nil || v.ObjectCount() != 8 || len(v.CheckpointObjects(1)) != 8 || len(v.Plans()) != 0 || v.DeletionsPending() {
		t.Errorf("%d objects, %d used, %d plans", v.ObjectCount(), len(v.CheckpointObjects(1)), len(v.Plans()))
	}
	for what, txn := range map[string]func() (broadcast.Txn, error){
		"complete": func() (broadcast.Txn, error) { return CompleteTxn(v, 1, 1, sumOf("metadata"), 8, 1) },
		"plan":     func() (broadcast.Txn, error) { return PlanDeletionsTxn(v, 1) },
		"finish":   func() (broadcast.Txn, error) { return FinishPlanTxn(v, 9) },
	} {
		if got, err := txn(); err != nil || !Empty(got) {
			t.Errorf("%s again: %v, %v", what, got, err)
		}
	}
}

// What a new checkpoint needs.
func TestCheckpointStartIsRefused(t *testing.T) {
	empty := newWorld(t, broadcast.Options{})
	_, _, err := StartCheckpointTxn(empty.view(), 1, CheckpointSpec{})
	wantField(t, "before the founding", err, base.ErrNotFounded, "")
	w := founded(t)
	up := uploaders(w.view())
	up[2] = "n9"
	_, _, err = StartCheckpointTxn(w.view(), 1, CheckpointSpec{Uploaders: up})
	wantField(t, "an uploader without a replica", err, base.ErrInvalid, "uploaders")
	delete(up, 2)
	_, _, err = StartCheckpointTxn(w.view(), 1, CheckpointSpec{Uploaders: up})
	wantField(t, "no uploader", err, base.ErrInvalid, "uploaders")

	// Two that are built from the same view, and one beside a change of the map.
	a, _, err := StartCheckpointTxn(w.view(), 1, CheckpointSpec{Uploaders: uploaders(w.view())})
	if err != nil {
		t.Fatal(err)
	}
	w.do(UpdateReplicasTxn(w.view(), 1, replicas(1, "n1", "n2"), "n1"))
	wantField(t, "beside a change of the map", w.try(a), base.ErrPrecondition, "")
	b, _, _ := StartCheckpointTxn(w.view(), 1, CheckpointSpec{Uploaders: uploaders(w.view())})
	w.start()
	wantField(t, "beside another start", w.try(b), base.ErrPrecondition, "")
}

// Reports of other attempts, of checkpoints that ended, and such as cannot be.
func TestReportsAreRefused(t *testing.T) {
	w := founded(t)
	old := w.start()
	w.do(FailCheckpointTxn(w.view(), 1, old.Number, "test"))
	c := w.start()
	v := w.view()
	s := v.CheckpointShards(c.Number)[0]
	r, m := reported("m", s.Attempt)
	report := func(v *View, number uint64, group base.GroupID, attempt uint64, r ShardReport, objects []Object, reused ...string) error {
		_, err := ReportUploadedTxn(v, 1, number, group, attempt, r, objects, reused)
		return err
	}
	wantField(t, "of a failed one", report(v, old.Number, s.Group, 1, r, []Object{m}), base.ErrConflict, "checkpoint")
	wantField(t, "of none", report(v, 9, s.Group, 1, r, []Object{m}), base.ErrConflict, "checkpoint")
	wantField(t, "of another shard", report(v, c.Number, 99, s.Attempt, r, []Object{m}), base.ErrConflict, "group")
	wantField(t, "of another attempt", report(v, c.Number, s.Group, 1, r, []Object{m}), base.ErrConflict, "attempt")
	_, err := ReportFlushedTxn(v, 1, c.Number, s.Group, 1)
	wantField(t, "flushed by another attempt", err, base.ErrConflict, "attempt")
	_, err = ReportFailedTxn(v, 1, c.Number, s.Group, 1, "x")
	wantField(t, "failed by another attempt", err, base.ErrConflict, "attempt")
	wantField(t, "no manifest", report(v, c.Number, s.Group, s.Attempt, r, nil), base.ErrConflict, "manifest_key")
	wrong := r
	wrong.ManifestSize++
	wantField(t, "a manifest of another size", report(v, c.Number, s.Group, s.Attempt, wrong, []Object{m}), base.ErrConflict, "manifest_key")
	wrong = r
	wrong.ManifestSHA256 = sumOf("y")
	wantField(t, "another manifest", report(v, c.Number, s.Group, s.Attempt, wrong, []Object{m}), base.ErrInvalid, "manifest_key")
	wrong = r
	wrong.Index = 0
	wantField(t, "no cut", report(v, c.Number, s.Group, s.Attempt, wrong, []Object{m}), base.ErrInvalid, "report")
	wantField(t, "a reused object that is not there", report(v, c.Number, s.Group, s.Attempt, r, []Object{m}, key("x", 1)), base.ErrConflict, "reused")
	for what, o := range map[string]Object{
		"an object of another attempt": object("x", s.Attempt+1),
		"an object of another cluster": {Key: objectKey("c2", sumOf("x"), s.Attempt)},
		"no object":                    {Key: "c1/x"},
		"a folder":                     {Key: "c1/a/" + sumOf("x").String() + ".1"},
	} {
		wantField(t, what, report(v, c.Number, s.Group, s.Attempt, r, []Object{m, o}), base.ErrInvalid, "key")
	}
	o := object("x", s.Attempt)
	o.Size = -1
	wantField(t, "a negative size", report(v, c.Number, s.Group, s.Attempt, r, []Object{m, o}), base.ErrInvalid, "size")
	for _, p := range []ObjectPart{{Offset: -1}, {Length: -1}, {Offset: 1, Length: 1}, {Length: 2}, {Offset: 1<<63 - 1, Length: 1}, {Offset: 2}} {
		o := object("x", s.Attempt)
		o.Parts = []ObjectPart{p}
		wantField(t, fmt.Sprintf("part %+v", p), report(v, c.Number, s.Group, s.Attempt, r, []Object{m, o}), base.ErrInvalid, "parts")
	}
	o = object("x", s.Attempt)
	other := o
	other.Size++
	wantField(t, "two objects of one key", report(v, c.Number, s.Group, s.Attempt, r, []Object{m, o, other}), base.ErrConflict, "objects")
}

// A report may come twice, but not differ; one that is built beside the failing of
// the checkpoint does nothing.
func TestReportsAreRepeated(t *testing.T) {
	w := founded(t)
	c := w.start()
	s := w.view().CheckpointShards(c.Number)[1]
	w.do(ReportFlushedTxn(w.view(), 1, c.Number, s.Group, s.Attempt))
	if txn, err := ReportFlushedTxn(w.view(), 1, c.Number, s.Group, s.Attempt); err != nil || !Empty(txn) {
		t.Errorf("flushed again: %v, %v", txn, err)
	}
	r, m := reported("m", s.Attempt)
	batch := []Object{object("x", s.Attempt), object("y", s.Attempt)}
	w.do(RegisterObjectsTxn(w.view(), 1, c.Number, s.Group, s.Attempt, batch))
	if txn, err := RegisterObjectsTxn(w.view(), 1, c.Number, s.Group, s.Attempt, batch); err != nil || !Empty(txn) {
		t.Errorf("registered again: %v, %v", txn, err)
	}
	w.do(RegisterObjectsTxn(w.view(), 1, c.Number, s.Group, s.Attempt, append(batch, object("z", s.Attempt))))
	txn, err := ReportUploadedTxn(w.view(), 1, c.Number, s.Group, s.Attempt, r, append(batch, m), []string{batch[0].Key})
	w.do(txn, err)
	got := w.view().CheckpointShard(c.Number, s.Group)
	if got.Objects != 4 || len(w.view().CheckpointObjects(c.Number)) != 4 || w.view().ObjectCount() != 4 || *got.Report != r {
		t.Errorf("%+v, uses %v", got, w.view().CheckpointObjects(c.Number))
	}
	if txn, err := ReportUploadedTxn(w.view(), 1, c.Number, s.Group, s.Attempt, r, append(batch, m), nil); err != nil || !Empty(txn) {
		t.Errorf("reported again: %v, %v", txn, err)
	}
	r.Sequence++
	_, err = ReportUploadedTxn(w.view(), 1, c.Number, s.Group, s.Attempt, r, append(batch, m), nil)
	wantField(t, "another report", err, base.ErrConflict, "report")
	_, err = RegisterObjectsTxn(w.view(), 1, c.Number, s.Group, s.Attempt, []Object{object("late", s.Attempt)})
	wantField(t, "an object after the report", err, base.ErrConflict, "group")
	_, err = ReportFailedTxn(w.view(), 1, c.Number, s.Group, s.Attempt, "x")
	wantField(t, "failed after the report", err, base.ErrConflict, "group")

	o := w.view().CheckpointShards(c.Number)[2]
	r, m = reported("o", o.Attempt)
	late, err := ReportUploadedTxn(w.view(), 1, c.Number, o.Group, o.Attempt, r, []Object{m}, nil)
	if err != nil {
		t.Fatal(err)
	}
	w.do(ReportFailedTxn(w.view(), 2, c.Number, o.Group, o.Attempt, " disk\nfull\xff"))
	wantField(t, "a report beside the failure", w.try(late), base.ErrPrecondition, "")
	if f := w.view().Checkpoint(c.Number); f.Phase != CheckpointFailed || f.Error != "shard S3 on node n3: disk\nfull?" {
		t.Errorf("%+v", f)
	}
}

// Retention: what only retired ones used is planned, with `_metadata` first; what
// a retained one uses stays.
func TestCompletionRetires(t *testing.T) {
	w := founded(t)
	c1 := w.start()
	w.upload(c1, []string{"shared"}, nil)
	w.complete(c1, 2)
	c2 := w.start()
	w.upload(c2, nil, []string{"shared"})
	w.complete(c2, 2)
	if len(w.view().Plans()) != 0 || w.view().Checkpoint(1).Phase != CheckpointCompleted {
		t.Fatalf("two are to be retained: %v", planned(w.view()))
	}
	c3 := w.start()
	w.upload(c3, nil, []string{"file 2 1"})
	w.complete(c3, 2)
	v := w.view()
	// Checkpoint 1 is gone. "shared" was stored by all four shards; the second
	// checkpoint uses the newest of these objects.
	kept, _ := v.FindContent(sumOf("shared"), 6)
	if v.Checkpoint(1) != nil || v.CheckpointShards(1) != nil || kept.Object != key("shared", 4) {
		t.Errorf("checkpoint 1: %+v, shared in %+v", v.Checkpoint(1), kept)
	}
	want := []string{metadataKey("c1", 1)}
	for i := range uint64(4) {
		want = append(want, key(fmt.Sprintf("manifest 1 %d", i+1), i+1), key(fmt.Sprintf("file 1 %d", i+1), i+1))
		if i < 3 {
			want = append(want, key("shared", i+1))
		}
	}
	slices.Sort(want)
	if got := planned(v); !slices.Equal(got, want) {
		t.Errorf("planned %v, want %v", got, want)
	}
	if v.Plans()[0].Keys[0] != metadataKey("c1", 1) {
		t.Error("`_metadata` is not the first")
	}
	test := v.OrphanTest()
	for _, k := range planned(v) {
		if orphan, foreign := test(k); orphan || foreign {
			t.Errorf("%s is planned and an orphan %v or foreign %v", k, orphan, foreign)
		}
	}
	w.finish()
	if len(w.view().Plans()) != 0 {
		t.Error("plans are left")
	}
}

// A failed checkpoint leaves nothing but its record, and takes nothing along that
// others use.
func TestFailurePlansWhatWasRegistered(t *testing.T) {
	w := founded(t)
	c1 := w.start()
	w.upload(c1, nil, nil)
	w.complete(c1, 1)
	before := w.view().ObjectCount()
	c2 := w.start()
	w.upload(c2, nil, []string{"file 1 1", "file 1 2"})
	w.do(MetadataPhaseTxn(w.view(), 1, c2.Number))
	w.do(FailCheckpointTxn(w.view(), 1, c2.Number, strings.Repeat("ü", MaxCheckpointErrorBytes)))
	v := w.view()
	if f := v.Checkpoint(2); !f.Garbage || !v.DeletionsPending() || len(v.Plans()) != 0 {
		t.Errorf("%+v, planned %v", f, planned(v))
	}
	w.do(PlanDeletionsTxn(v, 1))
	v = w.view()
	if f := v.Checkpoint(2); f.Phase != CheckpointFailed || f.Garbage || !f.MetadataPlanned || len(f.Error) > MaxCheckpointErrorBytes+2 {
		t.Errorf("%+v", f)
	}
	if v.ObjectCount() != before || len(planned(v)) != 9 || len(v.CheckpointObjects(2)) != 0 || len(v.CheckpointShards(2)) != 4 {
		t.Errorf("%d objects, planned %v", v.ObjectCount(), planned(v))
	}
	if txn, err := FailCheckpointTxn(v, 1, 2, "again"); err != nil || !Empty(txn) {
		t.Errorf("failed again: %v, %v", txn, err)
	}
	_, err := CompleteTxn(v, 1, 2, sumOf("metadata"), 8, 1)
	wantField(t, "completing a failed one", err, base.ErrConflict, "checkpoint")
	_, err = FailCheckpointTxn(v, 1, 1, "x")
	wantField(t, "failing a completed one", err, base.ErrConflict, "checkpoint")
}

// A shard may report beside the failure, by a newer view than that of the failure:
// what it registers is not forgotten. Found by the simulation (internal/sim/steps).
func TestFailureBesideAReport(t *testing.T) {
	w := founded(t)
	c := w.start()
	txn, err := FailCheckpointTxn(w.view(), 1, c.Number, "test")
	w.upload(c, nil, nil)
	w.do(txn, err)
	w.do(PlanDeletionsTxn(w.view(), 1))
	if v := w.view(); v.ObjectCount() != 0 || len(planned(v)) != 9 {
		t.Errorf("%d objects, planned %v", v.ObjectCount(), planned(v))
	}
}

// Failed ones are kept to be shown, not for ever.
func TestFailedCheckpointsAreCut(t *testing.T) {
	w := founded(t)
	for range MaxFailedCheckpoints + 3 {
		w.fail()
		w.finish()
	}
	list := w.view().Checkpoints()
	if len(list) != MaxFailedCheckpoints || list[0].Number != 4 || w.view().CheckpointShards(3) != nil {
		t.Errorf("%d are kept, from %d on", len(list), list[0].Number)
	}
	w.do(DeleteCheckpointTxn(w.view(), 1, 7))
	if w.view().Checkpoint(7) != nil || w.view().CheckpointShards(7) != nil || len(w.view().Plans()) != 0 {
		t.Error("7 was deleted")
	}
}

// While a checkpoint runs nothing leaves the registry; a deletion waits (ME7).
func TestDeletionWaitsForTheRunningOne(t *testing.T) {
	w := founded(t)
	for range 2 {
		c := w.start()
		w.upload(c, nil, nil)
		w.complete(c, 5)
	}
	beside, err := DeleteCheckpointTxn(w.view(), 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	c := w.start()
	wantField(t, "a deletion beside a start", w.try(beside), base.ErrPrecondition, "")
	before := w.view().ObjectCount()
	w.do(DeleteCheckpointTxn(w.view(), 1, 1))
	_, err = DeleteCheckpointTxn(w.view(), 1, c.Number)
	wantField(t, "deleting the running one", err, base.ErrConflict, "checkpoint")
	_, err = DeleteCheckpointTxn(w.view(), 1, 99)
	wantField(t, "deleting none", err, base.ErrNotFound, "checkpoint")
	v := w.view()
	if txn, err := PlanDeletionsTxn(v, 1); err != nil || !Empty(txn) {
		t.Errorf("planning while one runs: %v, %v", txn, err)
	}
	if v.ObjectCount() != before || len(v.Plans()) != 0 || v.Checkpoint(1).Phase != CheckpointDeleting || !v.DeletionsPending() {
		t.Errorf("%d objects of %d, checkpoint 1 %+v", v.ObjectCount(), before, v.Checkpoint(1))
	}
	if txn, err := DeleteCheckpointTxn(v, 1, 1); err != nil || !Empty(txn) {
		t.Errorf("deleting again: %v, %v", txn, err)
	}
	// The running one may use what is being deleted.
	w.upload(c, nil, []string{"file 1 1"})
	w.complete(c, 5)
	v = w.view()
	if v.ObjectByKey(key("file 1 1", 1)) == nil || v.ObjectByKey(key("file 1 2", 2)) != nil || v.Checkpoint(1) != nil {
		t.Errorf("planned %v", planned(v))
	}
}

// Two deletions that are built from the same view would both leave what both use.
func TestDeletionsExcludeEachOther(t *testing.T) {
	w := founded(t)
	c := w.start()
	w.upload(c, []string{"shared"}, nil)
	w.complete(c, 5)
	for range 2 {
		c = w.start()
		w.upload(c, nil, []string{"shared"})
		w.complete(c, 5)
	}
	a, err := DeleteCheckpointTxn(w.view(), 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	for n := range uint64(2) {
		w.do(DeleteCheckpointTxn(w.view(), 1, n+2))
	}
	wantField(t, "the first deletion", w.try(a), base.ErrPrecondition, "")
	w.do(DeleteCheckpointTxn(w.view(), 1, 1))
	if n := w.view().ObjectCount(); n != 0 || len(w.view().Checkpoints()) != 0 {
		t.Errorf("%d objects are left", n)
	}
}

// More objects than a transaction can hold: in batches, and planned so too.
func TestManyObjects(t *testing.T) {
	w := founded(t)
	c := w.start()
	total := 0
	for _, s := range w.quick().CheckpointShards(c.Number) {
		var objects []Object
		for i := range 10_000 {
			objects = append(objects, object(fmt.Sprintf("file %d %d", s.Group, i), s.Attempt))
		}
		batches := CutObjects(objects)
		if len(batches) < 2 {
			t.Fatal("one batch")
		}
		for _, b := range batches {
			w.do(RegisterObjectsTxn(w.quick(), 1, c.Number, s.Group, s.Attempt, b))
		}
		r, m := reported("m", s.Attempt)
		_, err := ReportUploadedTxn(w.quick(), 1, c.Number, s.Group, s.Attempt, r, append(objects, m), nil)
		wantField(t, "all at once", err, base.ErrTooLarge, "")
		w.do(ReportUploadedTxn(w.quick(), 1, c.Number, s.Group, s.Attempt, r, []Object{m}, nil))
		total += len(objects) + 1
	}
	w.complete(c, 1)
	if v := w.quick(); v.ObjectCount() != total || len(v.CheckpointObjects(c.Number)) != total {
		t.Fatalf("%d objects of %d", v.ObjectCount(), total)
	}
	// The next one reuses every second object of the first shard.
	c2 := w.start()
	for _, s := range w.quick().CheckpointShards(c2.Number) {
		var reused []string
		for i := 0; i < 10_000 && s.Group == 1; i += 2 {
			reused = append(reused, key(fmt.Sprintf("file 1 %d", i), 1))
		}
		r, m := reported("m2", s.Attempt)
		w.do(ReportUploadedTxn(w.quick(), 1, c2.Number, s.Group, s.Attempt, r, []Object{m}, reused))
	}
	w.complete(c2, 1)
	rounds := 0
	for ; w.quick().DeletionsPending(); rounds++ {
		w.do(PlanDeletionsTxn(w.quick(), 1))
	}
	v := w.quick()
	if v.ObjectCount() != 5004 || rounds < 4 || len(planned(v)) != total-5000+1 || v.Checkpoint(1) != nil {
		t.Errorf("%d objects are left after %d rounds, %d planned of %d", v.ObjectCount(), rounds, len(planned(v)), total)
	}
	if !slices.Equal(slices.Compact(planned(v)), planned(v)) {
		t.Error("a key is planned twice")
	}
}

// FindContent finds files and parts of packs, and nothing else.
func TestFindContent(t *testing.T) {
	w := founded(t)
	c := w.start()
	s := w.view().CheckpointShards(c.Number)[0]
	pack := Object{Key: key("pack", s.Attempt), Size: 10, Parts: []ObjectPart{{SHA256: sumOf("abc"), Length: 3}, {SHA256: sumOf("abc"), Offset: 3, Length: 3}, {SHA256: sumOf("defg"), Offset: 6, Length: 4}}}
	single := Object{Key: key("whole", s.Attempt), Size: 5, Parts: []ObjectPart{{SHA256: sumOf("whole"), Length: 5}}}
	w.do(RegisterObjectsTxn(w.view(), 1, c.Number, s.Group, s.Attempt, []Object{pack, single, object("empty", s.Attempt)}))
	v := w.view()
	for _, want := range []struct {
		text  string
		size  int64
		place Place
	}{
		{"abc", 3, Place{pack.Key, 3, 3}}, {"defg", 4, Place{pack.Key, 6, 4}}, {"whole", 5, Place{single.Key, 0, 5}},
		{"abc", 4, Place{}}, {"pack", 10, Place{}}, {"whole", 4, Place{}}, {"other", 5, Place{}}, {"whole", -1, Place{}},
	} {
		if got, ok := v.FindContent(sumOf(want.text), want.size); got != want.place || ok != (want.place != Place{}) {
			t.Errorf("%s of %d: %+v, %v", want.text, want.size, got, ok)
		}
	}
	if o := v.ObjectByKey(single.Key); o == nil || o.Parts != nil {
		t.Errorf("the only part is written: %+v", o)
	}
	w.do(FailCheckpointTxn(v, 1, c.Number, "test"))
	w.do(PlanDeletionsTxn(w.view(), 1))
	if _, ok := w.view().FindContent(sumOf("abc"), 3); ok || w.view().contents.Len() != 0 {
		t.Error("content of a planned object is found")
	}
}

// Orphans: own, of ended attempts or checkpoints, neither registered nor planned.
func TestOrphans(t *testing.T) {
	w := founded(t)
	c1 := w.start() // attempts 1 to 4
	w.upload(c1, nil, nil)
	w.complete(c1, 1)
	w.fail() // 5 to 8
	failedPlan := planned(w.view())
	c3 := w.start() // 9 to 12
	s := w.view().CheckpointShards(c3.Number)[0]
	w.do(RegisterObjectsTxn(w.view(), 1, c3.Number, s.Group, s.Attempt, []Object{object("new", 9)}))
	test := w.view().OrphanTest()
	for _, k := range []struct {
		key             string
		orphan, foreign bool
	}{
		{key("manifest 1 1", 1), false, false}, {key("lost", 1), true, false}, {key("lost", 8), true, false},
		{key("new", 9), false, false}, {key("under way", 9), false, false}, {key("under way", 12), false, false},
		{key("of the future", 13), false, false}, {key("of the future", 1000), false, false},
		{metadataKey("c1", 1), false, false}, {metadataKey("c1", 2), false, false}, {metadataKey("c1", 3), false, false}, {metadataKey("c1", 4), false, false},
		{objectKey("c2", sumOf("lost"), 1), false, true}, {objectKey("c11", sumOf("lost"), 1), false, true}, {metadataKey("c2", 1), false, true},
		{"c1/" + strings.ToUpper(sumOf("x").String()) + ".1", false, true}, {key("x", 1) + "0x", false, true}, {"c1/" + sumOf("x").String() + ".01", false, true},
		{"c1/x", false, true}, {"c1/sub/" + sumOf("x").String() + ".1", false, true}, {"c1/checkpoints/1/_metadata", false, true}, {"c1/checkpoints/0000000001/other", false, true},
		{"c1/checkpoints/0000000000/_metadata", false, true}, {"c1/checkpoints/00000000001/_metadata", false, true}, {key("x", 0), false, true}, {"", false, true}, {"c1/", false, true},
	} {
		if orphan, foreign := test(k.key); orphan != k.orphan || foreign != k.foreign {
			t.Errorf("%s: orphan %v, foreign %v", k.key, orphan, foreign)
		}
	}
	if len(failedPlan) != 1 || failedPlan[0] != metadataKey("c1", 2) {
		t.Errorf("planned of the failed one: %v", failedPlan)
	}
	w.finish()
	if orphan, _ := w.view().OrphanTest()(metadataKey("c1", 2)); !orphan {
		t.Error("a late _metadata of a failed checkpoint is no orphan")
	}
	found := []string{key("lost", 1), key("new", 9), metadataKey("c1", 2), key("lost", 1), "c1/foreign", metadataKey("c1", 1), key("lost", 8)}
	txn, rest, err := PlanOrphansTxn(w.view(), 1, found)
	w.do(txn, err)
	if got := planned(w.view()); len(rest) != 0 || len(got) != 3 || slices.Contains(got, key("new", 9)) {
		t.Errorf("planned %v, rest %v", got, rest)
	}
	if txn, _, err := PlanOrphansTxn(w.view(), 1, found); err != nil || !Empty(txn) {
		t.Errorf("planned again: %v, %v", txn, err)
	}
	var many []string
	for i := range MaxPlannedPerTxn + 10 {
		many = append(many, key(fmt.Sprint(i), 3))
	}
	txn, rest, err = PlanOrphansTxn(w.view(), 1, many)
	w.do(txn, err)
	if len(rest) != 10 || len(planned(w.view())) != 3+MaxPlannedPerTxn || len(w.view().Plans()) != 3 {
		t.Errorf("%d planned in %d plans, %d left", len(planned(w.view())), len(w.view().Plans()), len(rest))
	}
}

// The largest records and transactions stay below the limits.
func TestCheckpointLimits(t *testing.T) {
	w := founded(t)
	c := w.start()
	s := w.view().CheckpointShards(c.Number)[0]
	pack := Object{Key: key("pack", s.Attempt), Size: 1 << 40}
	for i := range MaxObjectParts {
		pack.Parts = append(pack.Parts, ObjectPart{SHA256: sumOf(fmt.Sprint(i)), Offset: 1 << 39, Length: 1 << 39})
	}
	w.do(RegisterObjectsTxn(w.view(), 1, c.Number, s.Group, s.Attempt, []Object{pack}))
	pack.Parts = append(pack.Parts, ObjectPart{})
	_, err := RegisterObjectsTxn(w.view(), 1, c.Number, s.Group, s.Attempt, []Object{pack})
	wantField(t, "too many parts", err, base.ErrTooLarge, "")
	_, err = encode(kindCheckpointUses, objectUse{Checkpoint: 1<<64 - 1, Group: 1<<64 - 1, Part: 1 << 20, Objects: slices.Repeat([]uint64{1<<53 - 1}, maxUsesPerRecord)})
	if err != nil {
		t.Error(err)
	}
	long := metadataKey("00112233445566778899aabbccddeeff", 1<<63)
	long = strings.Repeat("x", max(0, len("00112233445566778899aabbccddeeff/")+64+11-len(long))) + long
	if _, err = encode(kindDeletePlan, DeletePlan{Keys: slices.Repeat([]string{long}, MaxPlanKeys)}); err != nil {
		t.Error(err)
	}
}

func BenchmarkRegistry(b *testing.B) {
	w := founded(b)
	c := w.start()
	s := w.quick().CheckpointShards(c.Number)[0]
	var objects []Object
	for i := range 100_000 {
		objects = append(objects, object(fmt.Sprint("file ", i), s.Attempt))
	}
	for _, batch := range CutObjects(objects) {
		w.do(RegisterObjectsTxn(w.quick(), 1, c.Number, s.Group, s.Attempt, batch))
	}
	b.Run("find", func(b *testing.B) {
		v := w.quick()
		for b.Loop() {
			if _, ok := v.FindContent(sumOf("file 77777"), int64(len("file 77777"))); !ok {
				b.Fatal("not found")
			}
		}
	})
	n := 0
	b.Run("one-more", func(b *testing.B) {
		for b.Loop() {
			n++
			w.do(RegisterObjectsTxn(w.quick(), 1, c.Number, s.Group, s.Attempt, []Object{object(fmt.Sprint("more ", n), s.Attempt)}))
			w.quick()
		}
	})
}
