package cluster

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/failpoint"
	"github.com/keelstate/keelstate/snapshot"
)

// Between two checkpoints of mode changelog the uploader of a shard stores the log
// that has come together, so that little is left for the barrier, and the next
// checkpoint does not need what the Raft log has cut meanwhile. It does so under the
// attempt of its last upload, which the metadata keep open for it (ME14 of package
// meta), and registers it with the next one. The checkpoint loop looks for what is
// due; one segment at a time is read and stored on a node.

const (
	// agedPart of a segment is stored once it is old; less is left for the barrier,
	// lest few writes make many objects.
	agedPart = 16
	// aheadPauseMin and aheadPauseMax bound the pause after a segment could not be
	// stored; it doubles each time and is drawn between half of it and all.
	aheadPauseMin, aheadPauseMax = time.Second, time.Minute
	// entryOverhead is what an entry takes more in the Raft log than in a segment.
	entryOverhead = 27
)

// aheadStore is what the replicas of a node share that store their logs ahead: one
// that cannot reach the object store holds up all.
type aheadStore struct {
	slot chan struct{}

	mu    sync.Mutex
	again time.Time
	pause time.Duration
}

func (a *aheadStore) init() { a.slot = make(chan struct{}, 1) }

func (a *aheadStore) ready(now time.Time) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return !now.Before(a.again)
}

func (a *aheadStore) ended(now time.Time, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err == nil {
		a.pause, a.again = 0, time.Time{}
		return
	}
	a.pause = min(max(2*a.pause, aheadPauseMin), aheadPauseMax)
	a.again = now.Add(a.pause/2 + rand.N(a.pause/2))
}

// add notes a segment that was stored ahead, unless the lineage is another one by
// now, or a barrier has cut it.
func (c *changelog) add(attempt uint64, s snapshot.SegmentRef) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.lineage
	if l == nil || l.attempt != attempt || l.next() != s.First {
		return false
	}
	longer := *l
	longer.ahead = append(longer.ahead[:len(longer.ahead):len(longer.ahead)], s)
	c.lineage, c.waiting = &longer, time.Time{}
	return true
}

// aged says whether there has been enough to be stored for so long.
func (c *changelog) aged(enough bool, now time.Time, age time.Duration) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case !enough:
		c.waiting = time.Time{}
	case c.waiting.IsZero():
		c.waiting = now
	}
	return enough && now.Sub(c.waiting) >= age
}

// attendChangelog has the log stored that follows the last checkpoint, if that is
// this replica's task and enough has come together.
func (r *replica) attendChangelog(v *meta.View) {
	l := r.changelog.get()
	if l == nil || l.attempt == 0 || r.node.opts.Objects == nil || v.LogAttempt(r.id, r.node.opts.NodeID) != l.attempt {
		return
	}
	if due, _ := r.logDue(l); !due || !r.node.ahead.ready(time.Now()) || !r.storing.CompareAndSwap(false, true) {
		return
	}
	r.spawn(func() {
		defer r.storing.Store(false)
		for r.ctx.Err() == nil {
			more, err := r.storeAhead(l.attempt)
			if err != nil && r.ctx.Err() == nil {
				r.metrics.ahead("failed")
				r.logger.Warn("storing the log between two checkpoints", "error", err)
			}
			if !more {
				return
			}
		}
	})
}

// logDue says whether a segment is to be stored, aged that it may be a small one.
func (r *replica) logDue(l *lineage) (due, aged bool) {
	if r.tooLong(l) != "" {
		return false, false // the next checkpoint stores files
	}
	entries, bytes := r.changelogLag(l)
	pending, segment := bytes-entryOverhead*entries, int64(r.node.opts.ChangelogSegmentBytes)
	aged = r.changelog.aged(pending >= segment/agedPart, time.Now(), r.node.opts.ChangelogSegmentAge)
	return aged || pending >= segment, aged
}

// changelogLag is how much of the log is not stored yet.
func (r *replica) changelogLag(l *lineage) (entries, bytes int64) {
	next := l.next()
	last, err := r.log.LastIndex()
	if err != nil || last < next {
		return 0, 0
	}
	return int64(last - next + 1), int64(r.log.BytesFrom(next))
}

// storeAhead stores the next segment of the log, and says whether there may be more
// to store. An error is the object store's.
func (r *replica) storeAhead(attempt uint64) (more bool, err error) {
	n := r.node
	select {
	case n.ahead.slot <- struct{}{}:
		defer func() { <-n.ahead.slot }()
	case <-r.ctx.Done():
		return false, nil
	}
	v, err := n.metaView()
	l := r.changelog.get()
	if err != nil || l == nil || l.attempt != attempt || v.LogAttempt(r.id, n.opts.NodeID) != attempt || !n.ahead.ready(time.Now()) {
		return false, nil
	}
	due, aged := r.logDue(l)
	h := r.machine.Header()
	if !due || h.AppliedIndex < l.next() || r.cannotGoOn(l, h) != "" {
		return false, nil
	}
	s, full, err := r.segment(l.next(), h)
	if err != nil || !full && !aged {
		return false, nil // a log that was cut: the next checkpoint sees it
	}
	ctx, cancel := context.WithTimeout(r.ctx, storeTimeout)
	defer cancel()
	ref, err := snapshot.PutSegment(ctx, s, snapshot.UploadOptions{Store: n.opts.Objects, Prefix: string(v.Cluster().ID), Attempt: attempt})
	if err == nil {
		err = failpoint.Err("cluster.changelog.ahead")
	}
	if r.ctx.Err() == nil {
		n.ahead.ended(time.Now(), err)
	}
	if err != nil {
		return false, fmt.Errorf("storing entries %d to %d of %s: %w", s.First, s.Last(), r.id, err)
	}
	r.metrics.ahead("stored")
	return r.changelog.add(attempt, ref), nil
}
