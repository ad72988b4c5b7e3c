package steps

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/snapshot"
)

// seen is what was seen of the metadata before.
type seen struct {
	rev      base.Revision
	newest   uint64
	phases   map[uint64]meta.CheckpointPhase
	attempts map[uint64]string
	planned  map[string]bool
	// running is the checkpoint that ran, registry what there was then.
	running  uint64
	registry map[uint64]bool
	// files are the manifests that were read, by key.
	files map[string][]manifestFile
	// positions are the checkpoints whose positions are counted.
	positions map[uint64]bool
	// asked are the checkpoints that somebody wanted to be deleted.
	asked map[uint64]bool
	// rollback is the one that ran, opened the newest that opened.
	rollback, opened uint64
	rollbackPhase    string
	incarnation      base.Incarnation
	// problems keeps each from being noted again and again.
	problems map[string]bool
}

func newSeen() seen {
	return seen{phases: map[uint64]meta.CheckpointPhase{}, attempts: map[uint64]string{}, planned: map[string]bool{}, registry: map[uint64]bool{},
		files: map[string][]manifestFile{}, problems: map[string]bool{}, positions: map[uint64]bool{}, asked: map[uint64]bool{}}
}

func (w *checkpoints) problem(format string, args ...any) {
	p := fmt.Sprintf(format, args...)
	if !w.seen.problems[p] && len(w.seen.problems) < 20 {
		w.seen.problems[p] = true
		w.loop.Problem("%s", p)
	}
}

// check demands SS6 to SS8, after every change of the metadata or the store.
func (w *checkpoints) check() {
	v := w.view(0)
	if v.Revision() != w.seen.rev {
		w.seen.rev = v.Revision()
		w.checkRecords(v)
	}
	v.ScanObjects(func(o *meta.Object) bool { // SS6
		x, ok := w.store.held[o.Key]
		if !ok || int64(len(x.body)) != o.Size {
			w.problem("object %s of %d bytes is in the registry and not in the store", o.Key, o.Size)
		}
		return true
	})
	for _, c := range v.Checkpoints() {
		if c.Phase == meta.CheckpointCompleted {
			w.checkCompleted(v, c)
		}
	}
	for key, x := range w.foreign { // SS8
		if now, ok := w.store.held[key]; !ok || string(now.body) != string(x.body) {
			w.problem("foreign object %s is gone", key)
		}
	}
}

// checkRecords demands what the records must always show (SS7).
func (w *checkpoints) checkRecords(v *meta.View) {
	for _, c := range v.Checkpoints() {
		was, known := w.seen.phases[c.Number]
		if !known && c.Number <= w.seen.newest {
			w.problem("checkpoint %d comes after %d", c.Number, w.seen.newest)
		}
		if !known {
			w.seen.newest = c.Number
		}
		if known && was != c.Phase {
			switch {
			case c.Phase == meta.CheckpointCompleted:
				w.rep.Completed++
				for _, s := range v.CheckpointShards(c.Number) {
					w.rep.Registered += s.PriorObjects
				}
				if c.Savepoint {
					w.rep.Savepoints++
				}
			case was == meta.CheckpointCompleted:
				w.checkRetired(v, c)
			case c.Phase == meta.CheckpointFailed:
				w.rep.Failed++
				if strings.Contains(c.Error, "participant") {
					w.rep.Lost++
				}
			}
			w.loop.Note("checkpoint %d is %s: %s", c.Number, c.Phase, c.Error)
		}
		w.seen.phases[c.Number] = c.Phase
		for _, s := range v.CheckpointShards(c.Number) {
			is := fmt.Sprintf("%d of %d", s.Group, c.Number)
			if other, given := w.seen.attempts[s.Attempt]; given && other != is {
				w.problem("attempt %d is that of %s and of %s", s.Attempt, other, is)
			}
			w.seen.attempts[s.Attempt] = is
		}
	}
	for _, n := range slices.Sorted(maps.Keys(w.seen.phases)) { // deleted in one go
		if w.seen.phases[n] == meta.CheckpointCompleted && v.Checkpoint(n) == nil {
			w.seen.phases[n] = meta.CheckpointDeleting
			w.checkRetired(v, &meta.Checkpoint{Number: n, Savepoint: w.savepoints[n], Phase: "gone"})
		}
	}
	if w.groups != nil {
		w.checkRollback(v)
	}
	w.checkRegistry(v)
}

// checkRetired demands that a checkpoint which nobody asked to delete is retired only
// when enough newer ones are kept, and a savepoint never (SS15).
func (w *checkpoints) checkRetired(v *meta.View, c *meta.Checkpoint) {
	newer := 0
	for _, o := range v.Checkpoints() {
		if o.Number > c.Number && !o.Savepoint && (o.Phase == meta.CheckpointCompleted || w.seen.asked[o.Number]) {
			newer++
		}
	}
	switch {
	case w.seen.asked[c.Number]:
	case c.Savepoint:
		w.problem("savepoint %d is %s, and nobody has asked for that", c.Number, c.Phase)
	case newer < w.config.Retain:
		w.problem("checkpoint %d is %s, with %d newer ones and not %d", c.Number, c.Phase, newer, w.config.Retain)
	}
}

func (w *checkpoints) checkRegistry(v *meta.View) {
	for _, p := range v.Plans() {
		for _, key := range p.Keys {
			w.seen.planned[key] = true
		}
	}
	used := map[uint64]bool{}
	for _, c := range v.Checkpoints() {
		for _, o := range v.CheckpointObjects(c.Number) {
			used[o.Number] = true
		}
	}
	now := map[uint64]bool{}
	v.ScanObjects(func(o *meta.Object) bool {
		now[o.Number] = true
		if w.seen.planned[o.Key] {
			w.problem("object %s is in the registry and was planned for deletion", o.Key)
		}
		if !used[o.Number] {
			w.problem("object %s is in the registry and nothing uses it", o.Key)
		}
		return true
	})
	r := v.RunningCheckpoint()
	if r != nil && r.Number == w.seen.running {
		for n := range w.seen.registry {
			if !now[n] {
				w.problem("object %d left the registry while checkpoint %d ran", n, r.Number)
			}
		}
	}
	w.seen.running, w.seen.registry = 0, now
	if r != nil {
		w.seen.running = r.Number
	}
}

// checkCompleted demands that everything that a completed checkpoint names is in
// the store, down to the bytes, and in the registry (SS6).
func (w *checkpoints) checkCompleted(v *meta.View, c *meta.Checkpoint) {
	raw, ok := w.store.held[metadataKey(c)]
	if !ok || meta.Sum(sha256.Sum256(raw.body)) != c.MetadataSHA256 {
		w.problem("checkpoint %d is completed, and its _metadata is not in the store", c.Number)
		return
	}
	m, err := snapshot.DecodeCheckpoint(raw.body)
	if err != nil {
		w.problem("checkpoint %d: %v", c.Number, err)
		return
	}
	w.checkParticipants(m)
	for _, s := range m.Shards {
		if c.Savepoint {
			s.ManifestKey = snapshot.SavepointFolder(checkpointCluster, c.Number) + "/" + s.ManifestKey
		}
		for _, f := range w.manifest(s.ManifestKey, [2]uint64{c.Number, uint64(s.Group)}) {
			x, ok := w.store.held[f.Place.Object]
			if end := f.Place.Offset + f.Place.Length; !ok || end > int64(len(x.body)) || string(x.body[f.Place.Offset:end]) != f.Content {
				w.problem("checkpoint %d, shard %s: %q is not in object %s", c.Number, s.Group, f.Content, f.Place.Object)
			}
			if v.ObjectByKey(f.Place.Object) == nil {
				w.problem("checkpoint %d, shard %s: object %s is not in the registry", c.Number, s.Group, f.Place.Object)
			}
		}
	}
}

func metadataKey(c *meta.Checkpoint) string {
	if c.Savepoint {
		return snapshot.SavepointKey(checkpointCluster, c.Number)
	}
	return snapshot.MetadataKey(checkpointCluster, c.Number)
}

// manifest reads a manifest, and demands that it has the files of the cut.
func (w *checkpoints) manifest(key string, cut [2]uint64) []manifestFile {
	if files, ok := w.seen.files[key]; ok {
		if _, there := w.store.held[key]; !there {
			w.problem("manifest %s is not in the store", key)
		}
		return files
	}
	raw, ok := w.store.held[key]
	i := strings.IndexByte(string(raw.body), '[')
	var files []manifestFile
	if !ok || i < 0 || json.Unmarshal(raw.body[i:], &files) != nil {
		w.problem("manifest %s is not in the store", key)
		return nil
	}
	var have []string
	for _, f := range files {
		if !strings.HasPrefix(f.Content, logPrefix) {
			have = append(have, f.Content)
		}
	}
	slices.Sort(have)
	held := w.cuts[cut]
	var attempt, number uint64
	if _, err := fmt.Sscanf(string(raw.body), "manifest of attempt %d base %d", &attempt, &number); err == nil {
		held = w.checkLog(key, cut, number, files)
	}
	want := slices.Sorted(slices.Values(held))
	if !slices.Equal(have, want) {
		w.problem("manifest %s has the files %v, the cut has %v", key, have, want)
	}
	w.seen.files[key] = files
	return files
}

// putForeign puts objects into the store that are not the cluster's.
func (w *checkpoints) putForeign() {
	sum := sha256.Sum256([]byte("foreign"))
	for _, key := range []string{
		snapshot.ObjectKey("ffffffffffffffffffffffffffffffff", sum, 1), snapshot.MetadataKey("ffffffffffffffffffffffffffffffff", 1),
		string(checkpointCluster) + "/notes.txt", string(checkpointCluster) + "/checkpoints/1/_metadata", snapshot.ObjectKey(string(checkpointCluster)+"0", sum, 1),
	} {
		w.foreign[key] = stored{body: []byte(key)}
		w.store.held[key] = w.foreign[key]
	}
}

// checkEnd demands that nothing is left but what is retained (SS9).
func (w *checkpoints) checkEnd() {
	v := w.view(0)
	if r := v.RunningCheckpoint(); r != nil {
		w.problem("checkpoint %d still runs", r.Number)
	}
	if v.DeletionsPending() || len(v.Plans()) > 0 {
		w.problem("deletions are left: %v, %d plans", v.DeletionsPending(), len(v.Plans()))
	}
	want := map[string]bool{}
	for key := range w.foreign {
		want[key] = true
	}
	var completed []uint64
	for _, c := range v.Checkpoints() {
		if c.Phase == meta.CheckpointCompleted {
			completed = append(completed, c.Number)
			want[metadataKey(c)] = true
			for _, o := range v.CheckpointObjects(c.Number) {
				want[o.Key] = true
			}
		}
	}
	v.ScanObjects(func(o *meta.Object) bool {
		if !want[o.Key] {
			w.problem("object %s is in the registry and no retained checkpoint uses it", o.Key)
		}
		return true
	})
	w.checkRetained(v, completed)
	var left []string
	for key := range w.store.held {
		if !want[key] && !w.mayBeCopy(v, key) && !w.mayBeAhead(v, key) {
			left = append(left, key)
		}
	}
	if slices.Sort(left); len(left) > 0 {
		w.problem("%d objects are left of %d, the first is %s", len(left), len(w.store.held), left[0])
	}
	w.loop.Note("at rest: %d objects in the store, %d in the registry, %d checkpoints", len(w.store.held), v.ObjectCount(), len(completed))
}

// mayBeCopy says that a key lies in the folder of a savepoint beside a `_metadata`:
// what an uploader has stored in vain in the folder of one that completed, or what
// stayed since a coordinator that was slow stored the `_metadata` of a deleted one
// again. Nobody deletes what may be a copy that the user has put there.
func (w *checkpoints) mayBeCopy(v *meta.View, key string) bool {
	_, number, _, saved := snapshot.ParseSavepointKey(key)
	_, there := w.store.held[snapshot.SavepointKey(checkpointCluster, number)]
	c := v.Checkpoint(number)
	return saved && there && w.savepoints[number] && (c == nil || c.Phase == meta.CheckpointCompleted)
}

// checkRetained demands that of the completed checkpoints, by number, none is kept
// beyond the newest but for a participant that may go back to it (ME12), one for
// each at most.
func (w *checkpoints) checkRetained(v *meta.View, completed []uint64) {
	completed = slices.DeleteFunc(slices.Clone(completed), func(n uint64) bool { return v.Checkpoint(n).Savepoint })
	beyond := completed[:max(0, len(completed)-w.config.Retain)]
	for _, n := range beyond {
		if !slices.ContainsFunc(v.Positions(n), func(p *meta.Position) bool { return p.Given }) {
			w.problem("checkpoint %d is retained beyond the newest %d, and has no participant's position", n, w.config.Retain)
		}
	}
	if len(beyond) > len(w.participants) {
		w.problem("%d checkpoints are retained, not %d, for %d participants", len(completed), w.config.Retain, len(w.participants))
	}
}

// deletePlansOf executes the plans of a transaction that is only proposed.
func (w *checkpoints) deletePlansOf(txn broadcast.Txn) {
	for _, op := range txn.Then {
		var rec struct{ Data meta.DeletePlan }
		if !strings.HasPrefix(op.Key, meta.Prefix+"delete-plan/") || json.Unmarshal(op.Value, &rec) != nil {
			continue
		}
		for _, key := range rec.Data.Keys {
			if _, ok := w.store.held[key]; ok {
				delete(w.store.held, key)
				w.store.deletes++
			}
		}
		w.check()
	}
}
