package steps

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/snapshot"
)

// uploadJob is one attempt at a shard's part of a checkpoint, at its uploader.
type uploadJob struct {
	w    *checkpoints
	node *checkpointNode
	life int
	rec  *meta.CheckpointShard
	// zombie goes on though its checkpoint has ended.
	zombie bool

	files   []manifestFile
	open    []uploadObject // to be stored
	stored  []meta.Object
	reused  []string
	started bool
	// saw says that the registry was read in a view that showed the checkpoint
	// running. A late one, or one whose node begins anew, may read an older view;
	// then its report may be refused.
	saw bool
	// savepoint: everything is stored anew, in a folder of its own.
	savepoint bool
	// changelog: the checkpoint is of that mode. logging: the log is to be stored that
	// follows the lineage, which becomes what is stored.
	changelog, logging bool
	lineage            *lineage
	remembered         bool
}

// uploadObject is an object that is to be stored.
type uploadObject struct {
	object meta.Object
	body   string
}

// manifestFile is a line of a simulated manifest: where a content lies.
type manifestFile struct {
	Content string
	Place   meta.Place
}

// work is what a node does now and then: it sees what it has to upload.
func (w *checkpoints) work(n *checkpointNode) {
	if !n.up {
		return
	}
	r := w.view(n.i).RunningCheckpoint()
	if r == nil || r.Phase == meta.CheckpointWaiting {
		return
	}
	for _, s := range w.view(n.i).CheckpointShards(r.Number) {
		if s.Uploader != n.id || s.State == meta.CheckpointShardUploaded || n.jobs[s.Attempt] != nil {
			continue
		}
		w.savepoints[r.Number] = r.Savepoint
		j := &uploadJob{w: w, node: n, life: n.life, rec: s, zombie: w.loop.chance(0.1)}
		n.jobs[s.Attempt] = j
		j.changelog, j.logging = r.Changelog, w.plan(n, r, s)
		if s.State == meta.CheckpointShardFlushed && w.loop.chance(0.3) {
			j.fail("restarted") // it does not know what it did before
			continue
		}
		j.report("flushed", func(v *meta.View) (broadcast.Txn, error) {
			return meta.ReportFlushedTxn(v, w.meta.nowMs(), s.Checkpoint, s.Group, s.Attempt)
		}, func() { w.loop.Soon(150*time.Millisecond, j.begin) })
	}
}

// alive says that the process that runs the job goes on, and wants to.
func (j *uploadJob) alive() bool {
	if j.node.life != j.life {
		return false
	}
	c := j.w.view(j.node.i).Checkpoint(j.rec.Checkpoint)
	return c != nil && c.Running() || j.zombie && !j.w.quiet
}

// report brings a report into the metadata, again and again until it is known to
// be there or is refused; then may be called.
func (j *uploadJob) report(what string, build func(*meta.View) (broadcast.Txn, error), then func()) {
	var refused error
	j.w.meta.update(j.node.i, fmt.Sprintf("%s %s %d of %d", what, j.rec.Group, j.rec.Attempt, j.rec.Checkpoint), func(v *meta.View) (broadcast.Txn, error) {
		txn, err := build(v)
		refused = err
		return txn, err
	}, func(ok bool) {
		j.w.check()
		switch {
		case ok:
			then()
		case refused != nil:
			j.refused(refused)
		case j.alive():
			j.w.loop.Soon(100*time.Millisecond, func() { j.report(what, build, then) })
		}
	})
}

// refused ends a job. While its checkpoint runs only a report of something that
// the view does not show yet is refused (ME7).
func (j *uploadJob) refused(err error) {
	var e *base.Error
	v := j.w.view(0)
	c, s := v.Checkpoint(j.rec.Checkpoint), v.CheckpointShard(j.rec.Checkpoint, j.rec.Group)
	running := c != nil && c.Running() && s != nil && s.State != meta.CheckpointShardUploaded
	if errors.As(err, &e) && e.Field == "reused" && running && j.saw && j.w.view(j.node.i).Revision() == v.Revision() {
		j.w.loop.Problem("attempt %d of checkpoint %d, which runs: %v", j.rec.Attempt, c.Number, err)
	}
	delete(j.node.jobs, j.rec.Attempt)
	if j.logging && j.node.life == j.life && j.w.loop.chance(0.5) { // else it has seen the end before it was refused
		delete(j.node.lineages, j.rec.Group)
	}
}

func (j *uploadJob) fail(reason string) {
	j.report("failed", func(v *meta.View) (broadcast.Txn, error) {
		return meta.ReportFailedTxn(v, j.w.meta.nowMs(), j.rec.Checkpoint, j.rec.Group, j.rec.Attempt, reason)
	}, func() {})
}

// begin cuts the shard, which gives the same whenever it is done, and sees what
// the registry has.
func (j *uploadJob) begin() {
	if !j.alive() || j.started {
		return
	}
	j.started = true
	w := j.w
	id := [2]uint64{j.rec.Checkpoint, uint64(j.rec.Group)}
	if !w.cut(id) {
		j.started = false
		w.loop.Soon(100*time.Millisecond, j.begin)
		return
	}
	v := w.view(j.node.i)
	c := v.Checkpoint(j.rec.Checkpoint)
	j.saw, j.savepoint = c != nil && c.Running(), w.savepoints[j.rec.Checkpoint]
	if w.fault == ReusePlanned && j.node.old != nil {
		v = j.node.old
	}
	body := fmt.Sprintf("manifest of attempt %d", j.rec.Attempt)
	if l := j.node.lineages[j.rec.Group]; j.logging && l != nil && w.logs[id] >= l.next() {
		body += fmt.Sprintf(" base %d", l.base)
		j.lineage = l
		at := w.logs[id]
		if w.fault == LogBeyond {
			at += 2
		}
		j.beginLog(at)
	} else {
		j.beginFiles(v, id)
	}
	raw, err := json.Marshal(j.files)
	if err != nil {
		w.loop.Problem("%v", err)
		return
	}
	// The barrier's place makes each manifest another one.
	j.add([]string{fmt.Sprintf("%s %s", body, raw)})
	if w.fault == RegisterBeforePut {
		j.uploaded()
		w.loop.Soon(300*time.Millisecond, j.next)
		return
	}
	j.next()
}

// beginFiles sees which files have to be stored.
func (j *uploadJob) beginFiles(v *meta.View, id [2]uint64) {
	w := j.w
	var pack []string
	for _, text := range w.cuts[id] {
		if p, ok := v.FindContent(sha256.Sum256([]byte(text)), int64(len(text))); ok && !j.savepoint {
			j.reused = append(j.reused, p.Object)
			j.files = append(j.files, manifestFile{text, p})
			continue
		}
		if w.loop.chance(0.5) {
			pack = append(pack, text)
			continue
		}
		j.add([]string{text})
	}
	if len(pack) > 0 {
		j.add(pack)
	}
	slices.Sort(j.reused)
	j.reused = slices.Compact(j.reused)
	if j.changelog && !j.savepoint {
		j.lineage = &lineage{base: j.rec.Checkpoint, at: w.logs[id], epoch: j.rec.Epoch, files: slices.Clone(j.files), attempt: j.rec.Attempt}
	}
}

// add makes an object of contents.
func (j *uploadJob) add(texts []string) {
	body := strings.Join(texts, "")
	sum := sha256.Sum256([]byte(body))
	o := meta.Object{Key: snapshot.ObjectKey(string(checkpointCluster), sum, j.rec.Attempt), Size: int64(len(body))}
	if j.savepoint {
		o.Key = snapshot.SavepointObjectKey(checkpointCluster, j.rec.Checkpoint, sum, j.rec.Attempt)
	}
	at := int64(0)
	for _, text := range texts {
		part := meta.ObjectPart{SHA256: sha256.Sum256([]byte(text)), Offset: at, Length: int64(len(text))}
		o.Parts = append(o.Parts, part)
		j.files = append(j.files, manifestFile{text, meta.Place{Object: o.Key, Offset: at, Length: part.Length}})
		at += part.Length
	}
	j.open = append(j.open, uploadObject{o, body})
	if j.w.fault == RegisterBeforePut {
		j.stored = append(j.stored, o)
	}
}

// next stores the next object. A request that is under way when the process ends
// may be carried out all the same.
func (j *uploadJob) next() {
	if len(j.open) == 0 {
		if j.w.fault != RegisterBeforePut {
			j.uploaded()
		}
		return
	}
	if !j.alive() {
		return
	}
	o := j.open[0]
	j.w.loop.Soon(j.w.latency(), func() {
		err := j.w.store.Put(context.Background(), o.object.Key, objectstore.Bytes([]byte(o.body)))
		if err != nil && !errors.Is(err, base.ErrConflict) { // an object under its own name is the same
			j.w.loop.Soon(100*time.Millisecond, j.next)
			return
		}
		j.open = j.open[1:]
		if j.w.fault != RegisterBeforePut {
			j.stored = append(j.stored, o.object)
		}
		j.next()
	})
}

// uploaded registers some of the objects ahead, and reports.
func (j *uploadJob) uploaded() {
	if !j.alive() {
		return
	}
	manifest := j.stored[len(j.stored)-1]
	ahead := j.stored[:j.w.loop.IntN(len(j.stored))]
	if len(ahead) == 0 {
		j.finish(manifest)
		return
	}
	j.report("register", func(v *meta.View) (broadcast.Txn, error) {
		return meta.RegisterObjectsTxn(v, j.w.meta.nowMs(), j.rec.Checkpoint, j.rec.Group, j.rec.Attempt, ahead)
	}, func() { j.finish(manifest) })
}

func (j *uploadJob) finish(manifest meta.Object) {
	sum := manifest.Parts[0].SHA256
	r := meta.ShardReport{Index: j.rec.Checkpoint, Term: 1, Sequence: j.rec.Checkpoint, ManifestKey: manifest.Key, ManifestSHA256: sum, ManifestSize: manifest.Size}
	j.describe(&r)
	j.report("uploaded", func(v *meta.View) (broadcast.Txn, error) {
		reused := j.reused
		if j.w.fault == ReusePlanned {
			reused = slices.DeleteFunc(slices.Clone(reused), func(key string) bool { return v.ObjectByKey(key) == nil })
		}
		return meta.ReportUploadedTxn(v, j.w.meta.nowMs(), j.rec.Checkpoint, j.rec.Group, j.rec.Attempt, r, j.stored, reused)
	}, func() {
		j.w.rep.Reused += len(j.reused)
		j.remember()
		if j.w.loop.chance(0.2) { // it reports twice
			j.w.loop.Soon(2*time.Second, func() { j.finish(manifest) })
		}
	})
}
