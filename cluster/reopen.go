package cluster

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
	"github.com/keelstate/keelstate/raftfsm"
	"github.com/keelstate/keelstate/snapshot"
)

// The store of a replica is a function of its snapshot and its log, which is where
// it comes from when it cannot go on.
//
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

// startAnew gives a replica whose store cannot be opened an empty one, and returns
// its name; cause is why. It does so only if the newest snapshot, whole to its last
// byte, and the log behind it have all that the store had: the restart rules then
// build the store of them (checkRestart). A replica has promised nothing by its
// store (W2), so that it stays the one it was: a power loss may spoil the stores of
// all replicas of a shard at once, since RocksDB reads no MANIFEST of which the last
// records reached the disk in another order than they were written in.
func (r *replica) startAnew(cause error) (string, error) {
	lacks := func(err error) (string, error) {
		return "", fmt.Errorf("%w; and it cannot be built again from what the replica has: %w", cause, err)
	}
	manifest, rmeta, files, err := r.snaps.newest()
	if err != nil {
		return lacks(err)
	}
	var index uint64
	if manifest != nil {
		index = rmeta.Index
		if err := snapshot.Verify(r.ctx, files, manifest); r.ctx.Err() != nil {
			return "", fmt.Errorf("verifying the snapshot at %d: %w", index, r.ctx.Err()) // the node stops: no damage
		} else if err != nil {
			return lacks(fmt.Errorf("the snapshot at %d: %w", index, err))
		}
	}
	first, err := r.log.FirstIndex()
	if err != nil {
		return lacks(err)
	}
	if first > index+1 {
		return lacks(fmt.Errorf("the log starts at %d, the newest snapshot ends at %d: %w", first, index, base.ErrDamaged))
	}
	name, err := r.nextStore()
	if err != nil {
		return "", err
	}
	r.logger.Warn("the store cannot be opened; it is built again from the replica's own snapshot and log",
		"cause", cause, "snapshot", index, "logFrom", first, "store", name)
	r.node.metrics.rebuilt.WithLabelValues(r.id.String()).Inc()
	failpoint.Hit("cluster.anew.before-current")
	if err := writeFileDurably(filepath.Join(r.dir, currentFile), []byte(name+"\n")); err != nil {
		return "", errors.Join(err, cause)
	}
	failpoint.Hit("cluster.anew.after-current")
	return name, nil
}

// nextStore is the name of the store that is made next beside the live one, by a
// snapshot, a rollback, or anew: one that no store of the replica has. What a crash
// leaves of it goes when the replica is opened (removeOldStores).
func (r *replica) nextStore() (string, error) {
	names, err := dirNames(r.dir)
	if err != nil {
		return "", fmt.Errorf("looking for stores: %w", err)
	}
	var newest uint64
	for _, name := range names {
		if n, ok := storeNumber(name); ok {
			newest = max(newest, n)
		}
	}
	return fmt.Sprintf("store-%d", newest+1), nil
}
