package cluster

import (
	"fmt"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/raftfsm"
	"github.com/keelstate/keelstate/snapshot"
)

// A store that met a full disk is never trusted again (EN6): what it had not
// flushed by then is in the Raft log, so that its replica is closed and opened
// again, as a restart of the node would do, without one.

// markStale asks for the replica to be opened again, once.
func (r *replica) markStale(why string) {
	if r.stale.CompareAndSwap(nil, &why) {
		r.logger.Warn("the replica's store has to be opened again", "cause", why)
		r.node.metrics.reopened.WithLabelValues(r.id.String()).Inc()
		r.node.poke()
	}
}

// findStale looks whether the store of a replica that nobody writes to has to be
// opened again.
func (r *replica) findStale() {
	store, release, err := r.machine.Store()
	if err != nil {
		return
	}
	defer release()
	if s := store.Stats(); s.Reopen {
		r.markStale(s.Failed)
	}
}

// endStale closes the replica; its files stay as they are.
func (r *replica) endStale() error {
	if err := r.close(); err != nil {
		r.node.logger.Warn("closing a replica that is opened again", "group", r.id.String(), "error", err)
	}
	return nil
}

// holds says whether a snapshot's store has what its manifest promises: one that
// has less would lose what the log in front of it no longer has.
func holds(store engine.Store, m *snapshot.Manifest) error {
	index, err := raftfsm.AppliedIn(store)
	if err == nil && index != m.Index {
		err = fmt.Errorf("the files hold index %d, the manifest says %d: %w", index, m.Index, base.ErrCorrupt)
	}
	return err
}
