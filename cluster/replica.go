package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
	"github.com/keelstate/keelstate/snapshot"
)

// replica is this node's copy of one shard: an engine store under a state
// machine, fed by a Raft group.
//
// Its directory (docs/formats/replica-directory.md) holds CURRENT, which names
// the live store; store-<n>/; the snapshot store; and DAMAGED, if the replica
// may not act any more.
type replica struct {
	group
	node       *Node
	generation uint64
	dir        string
	birth      base.Birth
	rng        keygroup.Range

	snaps    *snapStore
	machine  *raftfsm.Machine
	writes   *proposer
	snapping atomic.Bool // one snapshot at a time, begun by us

	// damage is why the replica may not act; set once (R3).
	damage atomic.Pointer[string]
	// stale is why the store has to be opened again; set once.
	stale atomic.Pointer[string]
	// declaring holds one token for who proposes declarations: a lock that can be
	// waited for within a context.
	declaring chan struct{}
	// passing holds one token for who proposes a barrier, as declaring does.
	passing chan struct{}
	// passedBarrier is the newest barrier for which the uploader's part was begun,
	// or that the store held when it was opened or installed.
	passedBarrier atomic.Uint64
	// telling says that the system group is being told that an upload is lost.
	telling atomic.Bool
	// flushWait is since when the leader waits for an uploader's flush; owned by
	// the checkpoint loop.
	flushWait struct {
		attempt uint64
		since   time.Time
	}
	// keptBytes is the size of the log after the last snapshot.
	keptBytes atomic.Uint64
	// hashedAt is when a hash mark was last used; not set: no marks.
	hashedAt moment
	// purging counts the looks in which an idle leader still proposes ticks, for
	// dropped families to go; owned by the check loop.
	purging int
	scrubs  scrubState
	lag     lag
	// balanceSince is when this leader was first seen not to be the preferred
	// one; owned by the check loop.
	balanceSince time.Time
	rollback     rollbackWork
	linked       linkedCheckpoints
	changelog    changelog
	// storing says that the log is being stored between two checkpoints.
	storing atomic.Bool
	// alone: no files of older generations are left beside this one's.
	alone bool
}

const (
	currentFile = "CURRENT"
	damagedFile = "DAMAGED"
)

// openReplica opens or creates the replica that rec gives to this node and
// starts it. A replica that is found damaged is returned with its damage set
// and is not started.
func (n *Node) openReplica(rec *meta.Shard, self meta.Replica) (_ *replica, err error) {
	r := &replica{node: n, generation: self.Generation, birth: rec.Birth, declaring: make(chan struct{}, 1), passing: make(chan struct{}, 1), group: group{id: rec.ID, replica: self.ReplicaID},
		rng: keygroup.Range{Lo: keygroup.Group(rec.Lo), Hi: keygroup.Group(rec.Hi)},
		dir: filepath.Join(n.opts.DataDir, "groups", fmt.Sprintf("%d", uint64(rec.ID)), fmt.Sprintf("%d", self.Generation))}
	existed := n.Identity().Replicas[rec.ID] >= self.Generation
	if why := r.lost(rec.ID, existed); why != "" {
		return r, r.markDamaged(rec.ID, self.ReplicaID, why)
	}
	defer func() {
		if err != nil && r.cancel != nil {
			r.cancel() // it is tried again, with a new context
		}
	}()
	if err := n.initGroup(&r.group, rec.ID, self.ReplicaID, self.Generation); err != nil {
		return nil, err
	}
	failpoint.Hit("cluster.replica.log-made")
	if !existed {
		// After the log exists, before anything is promised in it.
		err := n.changeIdentity(func(id *Identity) {
			if id.Replicas == nil {
				id.Replicas = map[base.GroupID]uint64{}
			}
			id.Replicas[rec.ID] = self.Generation
		})
		if err != nil {
			return nil, err
		}
	}
	failpoint.Hit("cluster.replica.noted")
	err = r.openStore()
	if err == nil {
		failpoint.Hit("cluster.replica.store-open")
		err = r.seed(rec, self)
	}
	if err == nil {
		err = r.checkRestart()
	}
	if errors.Is(err, base.ErrCorrupt) || errors.Is(err, base.ErrDamaged) || errors.Is(err, base.ErrIdentity) {
		r.closeStore()
		return r, r.markDamaged(rec.ID, self.ReplicaID, err.Error())
	}
	if err != nil {
		r.closeStore()
		return nil, fmt.Errorf("opening replica %s of %s: %w", self.ReplicaID, rec.ID, err)
	}
	r.writes = newProposer(r.propose, r.stampEntry, r.await, r.metrics)
	err = r.group.start(n.transport, groupHooks{
		fsm:   raftfsm.NewAdapter(r.machine, raftfsm.Hooks{Snapshot: r.snapshotFSM, Restore: r.restoreFSM}),
		snaps: r.snaps, prepare: r.prepareSnapshot, refused: r.snapshotRefused, takeOffice: r.takeOffice, changed: n.poke, stopped: r.stopped,
		applied: func() uint64 { index, _ := r.machine.Applied(); return index },
	}, firstConfiguration(rec, self))
	if err != nil {
		r.writes.close()
		r.closeStore()
		if errors.Is(err, base.ErrCorrupt) || errors.Is(err, base.ErrDamaged) {
			return r, r.markDamaged(rec.ID, self.ReplicaID, err.Error())
		}
		return nil, err
	}
	return r, nil
}

// firstConfiguration is what the founding replica bootstraps with: only the
// first replica of the record does, and only in generation 1, which comes with
// an empty log once; the others start empty and get everything from it. So there
// is never more than one bootstrapped first entry (B24).
func firstConfiguration(rec *meta.Shard, self meta.Replica) *raft.Configuration {
	if rec.Seed != nil || self.Generation != 1 || rec.Replicas[0].Node != self.Node {
		return nil
	}
	c := &raft.Configuration{}
	for _, p := range rec.Replicas {
		c.Servers = append(c.Servers, raft.Server{ID: raft.ServerID(p.ReplicaID), Address: raft.ServerAddress(p.Node), Suffrage: raft.Voter})
	}
	return c
}

// lost says why the replica cannot be the one that it was, empty if it can.
func (r *replica) lost(id base.GroupID, existed bool) string {
	raw, err := os.ReadFile(filepath.Join(r.dir, damagedFile))
	switch {
	case err == nil:
		return strings.TrimSpace(string(raw))
	case !errors.Is(err, fs.ErrNotExist):
		return fmt.Sprintf("the mark of damage cannot be read: %v", err)
	}
	st, known := r.node.log.Group(id).State()
	if existed && (!known || st.Generation != r.generation || st.Tombstoned) {
		return "the replica's raft log is gone"
	}
	return ""
}

// markDamaged makes the damage durable: the replica does not vote, stand or
// count under this id any more, whatever happens to the node (R3, CL5).
func (r *replica) markDamaged(id base.GroupID, replica base.ReplicaID, why string) error {
	if !r.damage.CompareAndSwap(nil, &why) {
		return nil
	}
	if r.wire != nil { // its own, not that of a replica which has replaced it meanwhile
		r.wire.Mute(true)
	}
	r.node.logger.Error("replica damaged; it will be rebuilt from its peers under a new id",
		"group", id.String(), "replica", string(replica), "cause", why)
	r.node.metrics.damaged.WithLabelValues(id.String()).Inc()
	failpoint.Hit("cluster.damage.before-mark")
	if err := makeDirs(r.node.opts.DataDir, r.dir); err != nil {
		return fmt.Errorf("marking %s damaged: %w", replica, err)
	}
	return writeFileDurably(filepath.Join(r.dir, damagedFile), []byte(why+"\n"))
}

// openStore opens the live store and the snapshots.
func (r *replica) openStore() error {
	if err := makeDirs(r.node.opts.DataDir, r.dir); err != nil {
		return err
	}
	var err error
	if r.snaps, err = openSnapStore(r.dir, r.logger, r.node.remover.remove); err != nil {
		return err
	}
	name, err := r.currentStore()
	if err == nil {
		err = r.openMachine(name)
	}
	if errors.Is(err, base.ErrCorrupt) {
		if name, err = r.startAnew(err); err == nil {
			err = r.openMachine(name)
		}
	}
	if err != nil {
		return err
	}
	r.passedBarrier.Store(r.machine.Header().Barrier)
	return r.removeOldStores(name)
}

// openMachine opens a state machine on the store of that name.
func (r *replica) openMachine(name string) error {
	store, err := r.node.opts.Driver.Open(filepath.Join(r.dir, name))
	if err != nil {
		return fmt.Errorf("opening %s: %w", name, err)
	}
	r.machine, err = raftfsm.Open(store, raftfsm.Options{OnFatal: r.machineFailed, OnBarrier: r.barrierPassed, OnRollback: r.rollBack})
	if err != nil {
		return errors.Join(err, store.Close())
	}
	return nil
}

// currentStore returns the directory name of the live store; a new replica
// gets its first.
func (r *replica) currentStore() (string, error) {
	raw, err := os.ReadFile(filepath.Join(r.dir, currentFile))
	if errors.Is(err, fs.ErrNotExist) {
		return "store-1", writeFileDurably(filepath.Join(r.dir, currentFile), []byte("store-1\n"))
	}
	if err != nil {
		return "", fmt.Errorf("reading %s: %w", currentFile, err)
	}
	name := strings.TrimSpace(string(raw))
	if _, ok := storeNumber(name); !ok {
		return "", fmt.Errorf("%s names %q: %w", currentFile, name, base.ErrCorrupt)
	}
	return name, nil
}

func storeNumber(name string) (n uint64, ok bool) {
	digits, found := strings.CutPrefix(name, "store-")
	if !found || digits == "" || len(digits) > 18 {
		return 0, false
	}
	for _, c := range digits {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + uint64(c-'0')
	}
	return n, true
}

func (r *replica) removeOldStores(live string) error {
	names, err := dirNames(r.dir)
	if err != nil {
		return err
	}
	for _, n := range names {
		if _, ok := storeNumber(n); ok && n != live {
			if err := r.node.remover.remove(filepath.Join(r.dir, n)); err != nil {
				return fmt.Errorf("removing old store %s: %w", n, err)
			}
		}
	}
	return nil
}

// checkRestart applies the restart rules of the design (section 2): the store
// must be that of this group and birth, the newest snapshot is taken if it
// holds more than the store, and log and snapshot together must explain what
// the store has applied. Else the replica is damaged.
func (r *replica) checkRestart() error {
	if h := r.machine.Header(); h.Birth != 0 && (h.Group != r.id || h.Birth != r.birth) {
		return fmt.Errorf("the store is that of group %s birth %x: %w", h.Group, uint64(h.Birth), base.ErrIdentity)
	}
	manifest, rmeta, files, err := r.snaps.newest()
	if err != nil {
		return err
	}
	var snapIndex, engineIndex uint64
	if manifest != nil {
		snapIndex, engineIndex = rmeta.Index, manifest.Index
		if applied, _ := r.machine.Applied(); engineIndex > applied {
			r.logger.Warn("the newest snapshot holds more than the store; rebuilding from it", "applied", applied, "snapshot", engineIndex)
			if err := r.installStore(manifest, files); err != nil {
				return err
			}
		}
	}
	first, err := r.log.FirstIndex()
	if err != nil {
		return err
	}
	last, err := r.log.LastIndex()
	if err != nil {
		return err
	}
	applied, _ := r.machine.Applied()
	// A crash between the installation of a snapshot and the cut of the log
	// before it leaves entries that the snapshot has overtaken.
	if last > 0 && last < snapIndex {
		if err := r.log.DeleteRange(first, last); err != nil {
			return fmt.Errorf("cutting the log before snapshot %d: %w", snapIndex, err)
		}
		first, last = 0, 0
	}
	switch {
	case first > snapIndex+1:
		return fmt.Errorf("the log starts at %d, the newest snapshot ends at %d, the store at %d: %w", first, snapIndex, applied, base.ErrDamaged)
	case applied > max(last, engineIndex):
		return fmt.Errorf("the store has applied %d, the log ends at %d: %w", applied, max(last, engineIndex), base.ErrDamaged)
	}
	return nil
}

// closeStore closes what openStore opened.
func (r *replica) closeStore() {
	if r.machine != nil {
		if err := r.machine.Close(); err != nil {
			r.logger.Warn("closing the state machine", "error", err)
		}
	}
}

// machineFailed is called when the state machine stops for good.
func (r *replica) machineFailed(err error) {
	if errors.Is(err, base.ErrReopen) {
		r.markStale(err.Error())
		return
	}
	var unreadable *raftfsm.UnreadableCommand
	if (errors.Is(err, base.ErrCorrupt) || errors.Is(err, base.ErrDamaged)) && !errors.As(err, &unreadable) {
		r.damaged(err)
		return
	}
	r.node.fatal(fmt.Errorf("replica %s of %s: %w", r.replica, r.id, err))
}

// damaged marks the running replica damaged.
func (r *replica) damaged(err error) {
	if merr := r.markDamaged(r.id, r.replica, err.Error()); merr != nil {
		r.node.fatal(merr)
	}
	r.node.poke()
}

// stopped is called when the replica's log or term refused what raft asked: a
// failed disk ends the node by itself; anything else means that log and promises
// do not fit together, which only a new replica id mends (R3).
func (r *replica) stopped(err error) {
	if !errors.Is(err, base.ErrDiskFailed) && !errors.Is(err, base.ErrClosed) {
		r.damaged(err)
	}
}

// restoreFSM swaps in the snapshot whose manifest Raft hands over; its files
// are local and verified. It runs in place of an apply.
func (r *replica) restoreFSM(rc io.ReadCloser) error {
	defer rc.Close()
	raw, err := io.ReadAll(io.LimitReader(rc, maxManifestBytes+1))
	if err != nil {
		return fmt.Errorf("reading manifest: %w", err)
	}
	manifest, err := snapshot.Decode(raw)
	if err != nil {
		return err
	}
	if applied, _ := r.machine.Applied(); applied >= manifest.Index {
		// The store survived a restart with more than the snapshot holds; what
		// comes next in the log is skipped up to there.
		r.logger.Info("the snapshot holds nothing new", "applied", applied, "snapshot", manifest.Index)
		return nil
	}
	files, err := r.snaps.filesOf(manifestSum(raw))
	if err != nil {
		return err
	}
	if err := r.installStore(manifest, files); err != nil {
		r.metrics.snapshot("failed")
		return err
	}
	r.metrics.snapshot("installed")
	return nil
}

// installStore builds a new store from a snapshot's files beside the live one,
// opens it, makes it the live one by one rename, and swaps the machine to it.
func (r *replica) installStore(manifest *snapshot.Manifest, files string) error {
	live, err := r.currentStore()
	if err != nil {
		return err
	}
	failpoint.Hit("cluster.install.begin")
	name, err := r.nextStore()
	if err != nil {
		return fmt.Errorf("installing snapshot: %w", err)
	}
	dir := filepath.Join(r.dir, name)
	if err := snapshot.Link(dir, files, manifest); err != nil {
		return errors.Join(fmt.Errorf("installing snapshot: %w", err), os.RemoveAll(dir))
	}
	failpoint.Hit("cluster.install.linked")
	store, err := r.node.opts.Driver.Open(dir)
	if err != nil {
		return errors.Join(fmt.Errorf("installing snapshot: opening %s: %w", name, err), os.RemoveAll(dir))
	}
	if err := holds(store, manifest); err != nil {
		return errors.Join(fmt.Errorf("installing snapshot: %w", err), store.Close(), os.RemoveAll(dir))
	}
	failpoint.Hit("cluster.install.before-current")
	if err := writeFileDurably(filepath.Join(r.dir, currentFile), []byte(name+"\n")); err != nil {
		return errors.Join(err, store.Close())
	}
	failpoint.Hit("cluster.install.after-current")
	old := filepath.Join(r.dir, live)
	if err := r.machine.Swap(store, func(s engine.Store) {
		failpoint.Hit("cluster.install.before-remove-old")
		if err := errors.Join(s.Close(), r.node.remover.remove(old)); err != nil {
			r.logger.Warn("removing the replaced store", "error", err)
		}
	}); err != nil {
		back := writeFileDurably(filepath.Join(r.dir, currentFile), []byte(live+"\n"))
		return errors.Join(fmt.Errorf("installing snapshot: %w", err), back, store.Close())
	}
	r.passedBarrier.Store(r.machine.Header().Barrier)
	return nil
}

// close stops the replica and closes its store. What is not flushed is in the
// Raft log.
func (r *replica) close() error {
	if r.raft == nil {
		return nil
	}
	err := r.group.close()
	r.writes.close()
	return errors.Join(err, r.machine.Close())
}

// jsonReply encodes a reply of a node-level call.
func jsonReply(v any, err error) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	return json.Marshal(v)
}
