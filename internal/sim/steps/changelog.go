package steps

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/snapshot"
)

// The mode changelog of checkpoints: an uploader that has stored the files of a shard
// stores the entries behind them, at the barrier and ahead of it, as package cluster
// does. A shard's log is a number of entries.

// logPrefix begins the content of a segment, and of no file.
const logPrefix = "log of shard "

// logSegment is an object with entries of a shard's log.
type logSegment struct {
	first, last int
	object      meta.Object
	body        string
}

// lineage is what an uploader remembers of a shard.
type lineage struct {
	// base is the checkpoint of which it has stored the files, which are there, of
	// the log up to at.
	base  uint64
	at    int
	epoch base.Epoch
	files []manifestFile
	// segments are registered; ahead were stored since, under attempt.
	segments, ahead []logSegment
	attempt         uint64
	storing         bool
}

func (l *lineage) all() []logSegment { return slices.Concat(l.segments, l.ahead) }

func (l *lineage) next() int {
	if all := l.all(); len(all) > 0 {
		return all[len(all)-1].last + 1
	}
	return l.at + 1
}

// keys are those of the registry that a checkpoint on the lineage uses.
func (l *lineage) keys() (keys []string) {
	for _, f := range l.files {
		keys = append(keys, f.Place.Object)
	}
	for _, s := range l.segments {
		keys = append(keys, s.object.Key)
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

// segment makes the object of some entries.
func segment(group base.GroupID, first, last int, attempt uint64) logSegment {
	body := fmt.Sprintf("%s%d: entries %d to %d", logPrefix, group, first, last)
	sum := sha256.Sum256([]byte(body))
	return logSegment{first: first, last: last, body: body, object: meta.Object{
		Key: snapshot.ObjectKey(string(checkpointCluster), sum, attempt), Size: int64(len(body)), Parts: []meta.ObjectPart{{SHA256: sum, Length: int64(len(body))}}}}
}

func (s *logSegment) file() manifestFile {
	return manifestFile{s.body, meta.Place{Object: s.object.Key, Length: s.object.Size}}
}

// plan says whether a job is to store the log, as the uploader finds out when the
// checkpoint is announced.
func (w *checkpoints) plan(n *checkpointNode, c *meta.Checkpoint, s *meta.CheckpointShard) bool {
	l := n.lineages[s.Group]
	if l == nil || !c.Changelog || c.Savepoint {
		return false
	}
	if l.attempt == 0 || l.attempt != s.Prior {
		l.ahead, l.attempt = nil, 0
	}
	v := w.view(n.i)
	return l.epoch == s.Epoch && len(l.all()) < 12 &&
		!slices.ContainsFunc(l.keys(), func(key string) bool { return v.ObjectByKey(key) == nil })
}

// beginLog is begin for a job that stores the log.
func (j *uploadJob) beginLog(at int) {
	l := j.lineage
	l.attempt = 0 // nothing is added behind the barrier
	j.reused = l.keys()
	for _, s := range l.ahead {
		j.stored = append(j.stored, s.object)
	}
	j.files = slices.Clone(l.files)
	next := &lineage{base: l.base, at: l.at, epoch: l.epoch, files: l.files, segments: l.all(), attempt: j.rec.Attempt}
	for from := l.next(); from <= at; {
		s := segment(j.rec.Group, from, min(at, from+j.w.loop.IntN(6)), j.rec.Attempt)
		next.segments = append(next.segments, s)
		j.open = append(j.open, uploadObject{s.object, s.body})
		from = s.last + 1
	}
	for _, s := range next.segments {
		j.files = append(j.files, s.file())
	}
	j.lineage = next
}

// remember notes what an upload has stored, once it is reported.
func (j *uploadJob) remember() {
	defer func() { j.remembered = true }()
	switch {
	case j.node.life != j.life || j.savepoint || j.remembered:
	case !j.changelog:
		delete(j.node.lineages, j.rec.Group)
	default:
		j.node.lineages[j.rec.Group] = j.lineage
		if len(j.lineage.segments) > 0 {
			j.w.rep.Logged++
		}
	}
}

// describe says in a report of a log how many segments it has and where it begins.
func (j *uploadJob) describe(r *meta.ShardReport) {
	if j.lineage == nil {
		return
	}
	for _, s := range j.lineage.segments {
		r.BaseIndex, r.Segments, r.LogBytes = j.lineage.base, r.Segments+1, r.LogBytes+s.object.Size
	}
	r.FullBytes = r.LogBytes
}

// storeAhead has a node store what has come together of the logs that it uploads.
func (w *checkpoints) storeAhead(n *checkpointNode) {
	if !n.up {
		return
	}
	for g := base.GroupID(1); g <= checkpointShards; g++ {
		l := n.lineages[g]
		if l == nil || l.attempt == 0 || l.storing || w.view(n.i).LogAttempt(g, n.id) != l.attempt || w.loop.chance(0.4) {
			continue
		}
		first, last := l.next(), w.shards[g-1].entries
		if last < first || len(l.all()) >= 12 {
			continue
		}
		s, attempt, life := segment(g, first, first+w.loop.IntN(last-first+1), l.attempt), l.attempt, n.life
		l.storing = true
		w.loop.Soon(w.latency(), func() {
			err := w.store.Put(context.Background(), s.object.Key, objectstore.Bytes([]byte(s.body)))
			if errors.Is(err, base.ErrConflict) {
				err = nil // an object under its own name is the same
			}
			w.loop.Note("%s stores entries %d to %d of shard %s ahead: %v", n.id, s.first, s.last, g, err)
			l.storing = false
			if err == nil && n.life == life && n.lineages[g] == l && l.attempt == attempt && l.next() == s.first {
				l.ahead = append(l.ahead, s)
				w.rep.Ahead++
			}
		})
	}
}

// liveChangelog is the life of what the mode changelog adds.
func (w *checkpoints) liveChangelog() {
	w.config.Changelog = w.loop.chance(0.8)
	w.loop.Every(6*time.Second, func() bool { w.config.Changelog = w.loop.chance(0.8); return !w.quiet })
	for _, s := range w.shards {
		w.loop.Every(120*time.Millisecond, func() bool { s.entries += w.loop.IntN(3); return !w.quiet })
	}
	for _, n := range w.nodes {
		w.loop.Every(150*time.Millisecond, func() bool { w.storeAhead(n); return true })
	}
}

// checkLog demands of the manifest of a checkpoint that its segments lead from the
// base that it names to the cut, without a gap, and returns what the base held.
func (w *checkpoints) checkLog(key string, cut [2]uint64, number uint64, files []manifestFile) []string {
	from := [2]uint64{number, cut[1]}
	if w.cuts[from] == nil || number >= cut[0] {
		w.problem("manifest %s leads on from checkpoint %d, which has no cut", key, number)
		return nil
	}
	next := w.logs[from] + 1
	for _, f := range files {
		if !strings.HasPrefix(f.Content, logPrefix) {
			continue
		}
		var group uint64
		var first, last int
		if _, err := fmt.Sscanf(f.Content, logPrefix+"%d: entries %d to %d", &group, &first, &last); err != nil || group != cut[1] || first != next || last < first {
			w.problem("manifest %s has %q where entry %d of shard %d is next", key, f.Content, next, cut[1])
			return nil
		}
		next = last + 1
	}
	if at := w.logs[cut]; next != at+1 {
		w.problem("manifest %s has the log up to entry %d, the cut is at %d", key, next-1, at)
	}
	return w.cuts[from]
}

// mayBeAhead says that an object is a segment that was stored under an attempt which
// is open: it stays until the next checkpoint.
func (w *checkpoints) mayBeAhead(v *meta.View, key string) bool {
	orphan, foreign := v.OrphanTest()(key)
	return !orphan && !foreign && v.ObjectByKey(key) == nil && strings.HasPrefix(string(w.store.held[key].body), logPrefix)
}
