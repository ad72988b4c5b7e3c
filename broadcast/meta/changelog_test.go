package meta

import (
	"errors"
	"slices"
	"testing"

	"github.com/keelstate/keelstate/internal/base"
)

// A checkpoint of mode changelog takes reports of files and of a log; another one,
// and every savepoint, of files only. What a report says of its log adds up.
func TestReportsOfALog(t *testing.T) {
	w := founded(t)
	for _, c := range []struct {
		changelog, savepoint bool
	}{{false, false}, {true, false}, {true, true}} {
		txn, rec, err := StartCheckpointTxn(w.view(), 5000, CheckpointSpec{TimeoutMs: 1000, Changelog: c.changelog, Savepoint: c.savepoint, Uploaders: uploaders(w.view())})
		w.do(txn, err)
		number, logs := rec.Number, c.changelog && !c.savepoint
		if got := w.view().Checkpoint(number); got.Changelog != logs {
			t.Errorf("%+v is %+v", c, got)
		}
		s := w.view().CheckpointShards(number)[0]
		good, m := reported("m", s.Attempt)
		good.BaseIndex, good.Segments, good.LogBytes, good.FullBytes = good.Index-1, 2, 10, 100
		for name, change := range map[string]func(r *ShardReport){
			"no segments":     func(r *ShardReport) { r.Segments = 0 },
			"no bytes":        func(r *ShardReport) { r.LogBytes = 0 },
			"more than all":   func(r *ShardReport) { r.LogBytes = 101 },
			"base of the cut": func(r *ShardReport) { r.BaseIndex = r.Index },
			"a log of files":  func(r *ShardReport) { r.BaseIndex = 0 },
		} {
			r := good
			change(&r)
			_, err := ReportUploadedTxn(w.view(), 1, number, s.Group, s.Attempt, r, []Object{m}, nil)
			wantField(t, name, err, base.ErrInvalid, "report")
		}
		if !c.savepoint {
			_, err = ReportUploadedTxn(w.view(), 1, number, s.Group, s.Attempt, good, []Object{m}, nil)
			if logs && err != nil {
				t.Errorf("a log: %v", err)
			} else if !logs {
				wantField(t, "a log", err, base.ErrInvalid, "report")
			}
		}
		w.do(FailCheckpointTxn(w.view(), 1, number, "test"))
		w.do(PlanDeletionsTxn(w.view(), 1))
	}
}

// startLog starts a checkpoint of mode changelog, the first shard of which a node
// uploads that did not before, if one is named.
func (w *world) startLog(moved base.NodeID) *Checkpoint {
	w.t.Helper()
	nodes := uploaders(w.quick())
	if moved != "" {
		nodes[w.quick().Shards()[0].ID] = moved
	}
	txn, c, err := StartCheckpointTxn(w.quick(), 5000, CheckpointSpec{TimeoutMs: 60000, Changelog: true, Uploaders: nodes})
	w.do(txn, err)
	return w.quick().Checkpoint(c.Number)
}

// orphaned says whether the view takes a key for an orphan.
func (w *world) orphaned(key string) bool {
	w.t.Helper()
	orphan, foreign := w.view().OrphanTest()(key)
	if foreign {
		w.t.Fatalf("%s is foreign", key)
	}
	return orphan
}

// logAttempts gives, for each shard, the attempt under which its uploader may store.
func (w *world) logAttempts() (out []uint64) {
	v := w.view()
	for _, s := range v.Shards() {
		out = append(out, v.LogAttempt(s.ID, uploaders(v)[s.ID]))
	}
	return out
}

// ME14: what an uploader stores of the log between two checkpoints is no orphan, is
// registered by the next one under numbers of its own, and goes with the checkpoints
// that use it.
func TestTheLogBetweenCheckpoints(t *testing.T) {
	w := founded(t)
	c0 := w.start() // attempts 1 to 4, files only
	w.upload(c0, nil, nil)
	w.complete(c0, 1)
	none := []uint64{0, 0, 0, 0}
	if got := w.logAttempts(); !slices.Equal(got, none) {
		t.Fatalf("after a checkpoint of files: %v", got)
	}
	c1 := w.startLog("") // 5 to 8
	w.upload(c1, nil, nil)
	if got := w.logAttempts(); !slices.Equal(got, none) {
		t.Errorf("while it runs: %v", got)
	}
	w.complete(c1, 1)
	if got := w.logAttempts(); !slices.Equal(got, []uint64{5, 6, 7, 8}) {
		t.Fatalf("after a checkpoint of mode changelog: %v", got)
	}
	first := w.view().Shards()[0].ID
	if got := w.view().LogAttempt(first, "n1"); got != 0 {
		t.Errorf("a node that is not the uploader has attempt %d", got)
	}
	logs := []Object{object("log a", 5), object("log b", 5)}
	c2, keys := w.save(true) // 9 to 12; a savepoint closes nothing
	if got := w.logAttempts(); !slices.Equal(got, []uint64{5, 6, 7, 8}) || w.orphaned(logs[0].Key) || w.orphaned(keys[0]) {
		t.Errorf("after a savepoint: %v", got)
	}
	c3 := w.startLog("n1") // 13 to 16
	if got := w.logAttempts(); !slices.Equal(got, none) {
		t.Errorf("while the next one runs: %v", got)
	}
	for i, s := range w.view().CheckpointShards(c3.Number) {
		if want := []uint64{0, 6, 7, 8}[i]; s.Prior != want {
			t.Errorf("shard %s has prior attempt %d, not %d", s.Group, s.Prior, want)
		}
	}
	if !w.orphaned(logs[0].Key) {
		t.Error("what another node has stored is no orphan")
	}
	s := w.view().CheckpointShards(c3.Number)[1]
	logs = []Object{object("log a", 6), object("log b", 6)}
	if w.orphaned(logs[0].Key) {
		t.Error("the log that the running checkpoint may register is an orphan")
	}
	for _, bad := range []Object{object("log a", 5), object("log a", 7), object("log a", 9)} {
		_, err := RegisterObjectsTxn(w.view(), 1, c3.Number, s.Group, s.Attempt, []Object{bad})
		wantField(t, bad.Key, err, base.ErrInvalid, "key")
	}
	w.do(RegisterObjectsTxn(w.view(), 1, c3.Number, s.Group, s.Attempt, []Object{logs[1], object("log c", s.Attempt)}))
	r, m := reported("m", s.Attempt)
	r.BaseIndex, r.Segments, r.LogBytes = r.Index-1, 2, 10
	w.do(ReportUploadedTxn(w.view(), 1, c3.Number, s.Group, s.Attempt, r, []Object{m, logs[0], logs[1], object("log c", s.Attempt)}, nil))
	s = w.view().CheckpointShard(c3.Number, s.Group)
	if s.Objects != 2 || s.PriorObjects != 2 {
		t.Errorf("%+v", s)
	}
	for i, want := range []uint64{6<<objectPlaceBits | (MaxUploadObjects + 1), 6<<objectPlaceBits | MaxUploadObjects} {
		if o := w.view().ObjectByKey(logs[i].Key); o == nil || o.Number != want {
			t.Errorf("%s is %+v, want number %d", logs[i].Key, o, want)
		}
	}
	for _, other := range w.view().CheckpointShards(c3.Number) {
		if other.Group != s.Group {
			r, m := reported("m", other.Attempt)
			w.do(ReportUploadedTxn(w.view(), 1, c3.Number, other.Group, other.Attempt, r, []Object{m}, nil))
		}
	}
	lost := key("log d", 6) // stored when the cut was made already
	if w.orphaned(lost) {
		t.Error("an attempt of which objects may yet be registered has orphans")
	}
	w.complete(c3, 1)
	if got := w.view().Checkpoint(c3.Number).Totals.Objects; got != 4+3 {
		t.Errorf("%d objects were stored", got)
	}
	if !w.orphaned(lost) || w.orphaned(logs[0].Key) {
		t.Errorf("orphans: %v, %v", w.orphaned(lost), w.orphaned(logs[0].Key))
	}
	w.do(DeleteSavepointTxn(w.view(), 1, c2.Number))
	w.finish()
	w.do(DeleteCheckpointTxn(w.view(), 1, c3.Number))
	if got := planned(w.view()); !slices.Contains(got, logs[0].Key) || !slices.Contains(got, logs[1].Key) {
		t.Errorf("planned %v", got)
	}
}

// What follows a checkpoint is closed by the next one whatever becomes of it, and by
// the deletion of its own; nothing opens it again.
func TestTheLogIsClosedOnce(t *testing.T) {
	for name, end := range map[string]func(w *world, open *Checkpoint){
		"a failed one": func(w *world, _ *Checkpoint) {
			c := w.startLog("")
			w.do(FailCheckpointTxn(w.view(), 1, c.Number, "test"))
			w.do(PlanDeletionsTxn(w.view(), 1))
			w.do(DeleteCheckpointTxn(w.view(), 1, c.Number)) // nobody knows of it any more
		},
		"one of files": func(w *world, _ *Checkpoint) { w.fail() },
		"its deletion": func(w *world, open *Checkpoint) { w.do(DeleteCheckpointTxn(w.view(), 1, open.Number)) },
	} {
		w := founded(t)
		older := w.startLog("")
		w.upload(older, nil, nil)
		w.complete(older, 2)
		open := w.startLog("")
		w.upload(open, nil, nil)
		w.complete(open, 2)
		s := w.view().CheckpointShards(open.Number)[2]
		log := key("log", s.Attempt)
		if w.orphaned(log) {
			t.Fatalf("%s: the log is an orphan", name)
		}
		end(w, open)
		for range 2 {
			if got := w.logAttempts(); !slices.Equal(got, []uint64{0, 0, 0, 0}) || !w.orphaned(log) {
				t.Errorf("%s: %v, orphan %v", name, got, w.orphaned(log))
			}
			w.save(true)
		}
		next := w.startLog("")
		for _, s := range w.view().CheckpointShards(next.Number) {
			if s.Prior != 0 {
				t.Errorf("%s: prior attempt %d", name, s.Prior)
			}
		}
	}
}

// A start that relies on the log after a checkpoint fails if that is deleted first.
func TestStartBesideTheDeletionOfTheOpenOne(t *testing.T) {
	w := founded(t)
	open := w.startLog("")
	w.upload(open, nil, nil)
	w.complete(open, 2)
	v := w.view()
	start, _, err := StartCheckpointTxn(v, 1, CheckpointSpec{TimeoutMs: 1, Changelog: true, Uploaders: uploaders(v)})
	if err != nil {
		t.Fatal(err)
	}
	w.do(DeleteCheckpointTxn(v, 1, open.Number))
	if err := w.try(start); !errors.Is(err, base.ErrPrecondition) {
		t.Errorf("%v", err)
	}
}
