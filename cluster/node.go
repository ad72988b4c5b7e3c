package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/keelstate/keelstate/cluster/raftlog"
	"github.com/keelstate/keelstate/cluster/transport"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
	"github.com/keelstate/keelstate/internal/logbridge"
	"github.com/keelstate/keelstate/internal/vfs"
	"github.com/keelstate/keelstate/snapshot"
)

// The node-level calls between nodes. The numbers are part of the protocol
// between nodes (docs/formats/node-calls.md); method 1 is the only one that an
// unfounded node serves.
const (
	methodAdmission     = transport.MethodAdmission
	methodSystemPropose = uint8(2)
	methodSystemIndex   = uint8(3)
	methodStatus        = uint8(4)
	methodHash          = uint8(5)
	methodTransfer      = uint8(6)
	methodSnapshot      = uint8(7)
	methodCompact       = uint8(8)
	methodLeaders       = uint8(9)
	methodRejoin        = uint8(10)
	methodHello         = uint8(12)
	methodScrub         = uint8(13)
	methodProgress      = uint8(14)
)

// Node is one server of a cluster. Make it with New, then Start; Close it when
// nothing uses it any more.
type Node struct {
	opts      Options
	logger    *slog.Logger
	metrics   *metrics
	lock      io.Closer
	log       *raftlog.Log
	transport *transport.Transport
	poller    *transport.Poller
	started   time.Time
	fatalOnce sync.Once
	rename    func(from, to string) error // of the Raft log's files; a seam for tests
	judged    func()                      // called when a damaged replica's peers were found to be a quorum; a seam for tests

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	system atomic.Pointer[system] // nil before the node is founded or admitted
	// changes is closed and replaced whenever metadata, leaders or replicas may
	// have changed (see poke).
	changes notifier

	// opening holds a token per replica that is being opened or ended.
	opening chan struct{}

	disk    diskWatch
	uploads uploads
	ahead   aheadStore
	// preparing holds a token per replica that is being prepared for a rollback.
	preparing chan struct{}
	restores  restorePlans
	fetches   fetchTable
	claim     claim
	// restoring is the checkpoint that the cluster is being founded with, once it
	// was read.
	restoring atomic.Pointer[snapshot.Checkpoint]
	addresses addressBook
	leaders   leaderTable
	remover   *remover

	mu struct {
		sync.Mutex
		identity Identity
		replicas map[base.GroupID]*replica
		// reconciling are the shards for which a goroutine of reconcileBeside runs.
		reconciling map[base.GroupID]bool
		closed      bool
		draining    bool
		// rejoins holds, at the system leader, the newest generation that a node
		// asked for after it had lost its log (R3).
		rejoins map[base.NodeID]uint64
	}
	foundMu sync.Mutex // one founding or admission at a time
}

// New opens the data directory and the Raft log; nothing is served before
// Start.
func New(o Options) (*Node, error) {
	o.EnsureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	n := &Node{opts: o, logger: o.Logger.With("node", string(o.NodeID)), started: time.Now(), rename: o.Log.FS.Rename}
	n.disk.node = n
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.opening = make(chan struct{}, maxOpening())
	n.preparing = make(chan struct{}, maxPreparing)
	n.mu.replicas = map[base.GroupID]*replica{}
	n.mu.reconciling = map[base.GroupID]bool{}
	n.mu.rejoins = map[base.NodeID]uint64{}
	n.changes.init()
	n.leaders.init()
	n.uploads.init()
	n.ahead.init()
	ok := false
	defer func() {
		if !ok {
			n.closeFiles()
		}
	}()
	if err := n.openDir(); err != nil {
		return nil, err
	}
	if err := n.openLog(); err != nil {
		return nil, err
	}
	var err error
	if n.metrics, err = newMetrics(o.Registerer); err != nil {
		return nil, fmt.Errorf("registering metrics: %w", err)
	}
	if o.Registerer != nil {
		if err := o.Registerer.Register(&collector{node: n}); err != nil {
			return nil, fmt.Errorf("registering metrics: %w", err)
		}
	}
	if err := n.openTransport(); err != nil {
		return nil, err
	}
	ok = true
	return n, nil
}

func (n *Node) openDir() error {
	if _, err := os.Stat(n.opts.DataDir); errors.Is(err, fs.ErrNotExist) {
		// One that exists may be in a directory that this process cannot open.
		if err := vfs.MkdirAllDurable(vfs.OS, n.opts.DataDir, 0o750); err != nil {
			return fmt.Errorf("making data directory: %w", err)
		}
	}
	lock, err := vfs.OS.Lock(filepath.Join(n.opts.DataDir, "LOCK"))
	if err != nil {
		return &base.Error{Cause: base.ErrIdentity, Field: "data-dir", Ordinal: -1,
			Hint: fmt.Sprintf("%s is in use by another process (%v); stop it, or use another directory", n.opts.DataDir, err)}
	}
	n.lock = lock
	id, err := openIdentity(n.opts.DataDir, n.opts.NodeID, n.opts.Driver.Name())
	if err != nil {
		return err
	}
	n.mu.identity = *id
	if n.remover, err = newRemover(filepath.Join(n.opts.DataDir, removedDir), n.logger, n.disk.low.Load); err != nil {
		return err
	}
	return n.addresses.open(n.opts.DataDir)
}

// bootGroup is the reserved part of the Raft log that counts the node's starts.
const (
	bootGroup base.GroupID = math.MaxUint64
	bootKey                = "Boots"
)

// openLog opens the Raft log and decides whether it is the one that this node's
// promises are in. A log that is damaged, or older than the promises, is kept
// aside, for a look, and the node comes back with an empty one, under new
// replica ids (R3).
func (n *Node) openLog() error {
	dir := filepath.Join(n.opts.DataDir, "raftlog")
	opts := n.opts.Log
	opts.OnFailure, opts.OnCorrupt, opts.OnFull = n.fatal, n.logCorrupt, n.disk.full
	if n.opts.Registerer != nil {
		opts.Metrics = raftlog.NewMetrics(n.opts.Registerer)
	}
	if err := n.expectNewLog(dir); err != nil {
		return err
	}
	log, boots, err := n.tryLog(dir, opts)
	if errors.Is(err, base.ErrCorrupt) || errors.Is(err, base.ErrDamaged) {
		if aerr := n.keepLogAside(dir, err); aerr != nil {
			return aerr
		}
		log, boots, err = n.tryLog(dir, opts)
	}
	if err != nil {
		return err
	}
	n.log = log
	id := &n.mu.identity
	// The log counts first: a crash between leaves it ahead, never behind.
	boots = max(boots, id.Boots) + 1
	failpoint.Hit("cluster.boot.before-count")
	g := log.Group(bootGroup)
	if err := errors.Join(log.CreateGroup(bootGroup, 1), g.SetUint64([]byte(bootKey), boots)); err != nil {
		return fmt.Errorf("counting the start in the raft log: %w", err)
	}
	failpoint.Hit("cluster.boot.log-counted")
	id.RaftLog, id.Boots = log.ID(), boots
	return id.save(n.opts.DataDir)
}

// keepLogAside puts a log that must not be followed out of the way, durably,
// before the node forgets it: a crash or an error in between leaves a log that
// is expected and gone (expectNewLog), never one that is there and not known.
func (n *Node) keepLogAside(dir string, why error) error {
	aside := fmt.Sprintf("%s.damaged-%d", dir, time.Now().UnixMilli())
	n.logger.Error("the raft log cannot be trusted; it is kept aside and every replica of this node is rebuilt from its peers",
		"error", why, "kept", aside)
	if err := n.rename(dir, aside); err != nil {
		return &base.Error{Cause: base.ErrDamaged, Field: "data-dir", Ordinal: -1, Hint: fmt.Sprintf(
			"%s cannot be trusted (%v) nor renamed (%v); if it is a mount point, move what is in it elsewhere, then start the node again: it is rebuilt from its peers", dir, why, err)}
	}
	if err := n.opts.Log.FS.SyncDir(n.opts.DataDir); err != nil {
		return fmt.Errorf("keeping the raft log aside: %w", err)
	}
	return n.forgetLog()
}

// expectNewLog notes that the log is gone before a new one is made, so that a
// crash between leaves no log that the node does not know.
func (n *Node) expectNewLog(dir string) error {
	if n.mu.identity.RaftLog == "" {
		return nil
	}
	names, err := n.opts.Log.FS.List(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("looking for the raft log: %w", err)
	}
	// A file system that is mounted here alone may have its own directory.
	if len(names) > 0 && !slices.Equal(names, []string{"lost+found"}) {
		return nil
	}
	n.logger.Error("this node's raft log is gone; every replica is rebuilt from its peers")
	return n.forgetLog()
}

// forgetLog makes durable that the next log is a new one, and that the node's
// replicas come back under new ids (R3).
func (n *Node) forgetLog() error {
	id := &n.mu.identity
	id.RaftLog = ""
	if id.Cluster != "" {
		id.SystemGeneration++
		id.Rejoin = true
	}
	return id.save(n.opts.DataDir)
}

// tryLog opens the log and checks that it is this node's, and not older than
// the node remembers.
func (n *Node) tryLog(dir string, opts raftlog.Options) (*raftlog.Log, uint64, error) {
	log, err := raftlog.Open(dir, opts)
	if err != nil {
		return nil, 0, fmt.Errorf("opening the raft log: %w", err)
	}
	id := n.mu.identity
	boots, err := log.Group(bootGroup).GetUint64([]byte(bootKey))
	if err != nil && err.Error() != base.ErrNotFound.Error() {
		return nil, 0, errors.Join(fmt.Errorf("reading the raft log: %w", err), log.Close())
	}
	switch {
	case id.RaftLog == "" && !holdsGroups(log):
		// A new log, whose making a crash may have cut short.
	case id.RaftLog != "" && id.RaftLog != log.ID():
		err = &base.Error{Cause: base.ErrIdentity, Field: "data-dir", Ordinal: -1, Hint: fmt.Sprintf(
			"%s is not this node's raft log (it is %s, not %s); put the right one back, or remove it to have the node rebuilt from its peers", dir, log.ID(), id.RaftLog)}
		return nil, 0, errors.Join(err, log.Close())
	case boots < id.Boots:
		err = fmt.Errorf("the raft log is an older copy: it has seen %d starts of the node, not %d: %w", boots, id.Boots, base.ErrDamaged)
		return nil, 0, errors.Join(err, log.Close())
	}
	return log, boots, nil
}

// holdsGroups says whether promises of any replica are in the log.
func holdsGroups(log *raftlog.Log) bool {
	return slices.ContainsFunc(log.Groups(), func(g raftlog.GroupState) bool { return g.ID != bootGroup })
}

func (n *Node) openTransport() error {
	id := n.mu.identity
	t, err := transport.New(transport.Options{
		Network: n.opts.Network, ListenAddr: n.opts.RaftAddr,
		Identity: transport.Identity{Cluster: id.Cluster, Node: id.Node, Disk: id.Disk, Engine: id.Engine},
		Resolver: n.resolve, CheckPeer: n.checkPeer, Logger: n.logger, Registerer: n.opts.Registerer,
		PingInterval: pingInterval(n.opts.ElectionTimeout),
	})
	if err != nil {
		return err
	}
	n.transport = t
	n.poller = transport.NewPoller(t, transport.PollerOptions{})
	t.HandlePoll(n.answerPoll)
	t.ServeFiles(n.serveFile)
	t.Handle(methodAdmission, n.serveAdmission)
	n.serveAdmin()
	return nil
}

// Start listens, and starts the replicas of a node that belongs to a cluster.
func (n *Node) Start() error {
	if err := n.transport.Start(); err != nil {
		return err
	}
	id := n.Identity()
	if id.Cluster != "" {
		if err := n.joinSystem(); err != nil {
			return err
		}
	}
	n.spawn(n.reconcileLoop)
	n.spawn(n.checkLoop)
	n.spawn(n.disk.run)
	n.spawn(func() { n.remover.run(n.ctx) })
	n.spawn(n.scrubLoop)
	n.spawn(n.checkpointLoop)
	return nil
}

// joinSystem starts the system group's replica of a founded or admitted node.
func (n *Node) joinSystem() error {
	id := n.Identity()
	// Only the first generation founds: a founder that lost its log may have
	// founded already, and what the others promised is not to be made anew (R3).
	s, err := n.startSystem(id.SystemGeneration, id.Founding != nil && id.SystemGeneration == 1 && !id.Rejoin)
	if errors.Is(err, base.ErrDamaged) {
		n.logger.Error("this node's replica of the system group is damaged; it comes back under a new id", "error", err)
		if err := n.changeIdentity(func(id *Identity) { id.SystemGeneration++; id.Rejoin = true }); err != nil {
			return err
		}
		id = n.Identity()
		s, err = n.startSystem(id.SystemGeneration, false)
	}
	if err != nil {
		return err
	}
	if id.Rejoin {
		n.spawn(n.rejoin)
	}
	s.serveSystem()
	n.system.Store(s)
	n.spawn(func() { n.watchMetadata(s) })
	n.poke()
	return nil
}

// watchMetadata pokes whenever the metadata has changed.
func (n *Node) watchMetadata(s *system) {
	rev := s.store.Snapshot().Revision()
	for s.store.WaitForRevision(n.ctx, rev+1) == nil {
		rev = s.store.Snapshot().Revision()
		n.poke()
	}
}

// Identity returns a copy of the node's identity.
func (n *Node) Identity() Identity {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.mu.identity
}

// changeIdentity applies change to the identity and makes it durable before it
// counts.
func (n *Node) changeIdentity(change func(*Identity)) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	next := n.mu.identity
	next.Replicas = maps.Clone(next.Replicas)
	change(&next)
	if err := next.save(n.opts.DataDir); err != nil { // small, rare; under the lock so that two changes cannot cross
		return err
	}
	n.mu.identity = next
	return nil
}

// RaftAddr is the address that the node listens on for other nodes.
func (n *Node) RaftAddr() string {
	if n.opts.AdvertiseRaftAddr != "" {
		return n.opts.AdvertiseRaftAddr
	}
	if a := n.transport.Addr(); a != nil {
		return a.String()
	}
	return n.opts.RaftAddr
}

// initGroup fills in what every group needs.
func (n *Node) initGroup(g *group, id base.GroupID, replica base.ReplicaID, generation uint64) error {
	if st, known := n.log.Group(id).State(); known && !st.Tombstoned && st.Generation < generation {
		// An older generation that was replaced; the record of the new one was
		// committed, so nothing of the old one counts any more.
		if err := n.log.Tombstone(id); err != nil {
			return fmt.Errorf("ending generation %d of %s: %w", st.Generation, id, err)
		}
	}
	if err := n.log.CreateGroup(id, generation); err != nil {
		return fmt.Errorf("opening the log of %s: %w", id, err)
	}
	g.id, g.replica, g.opts = id, replica, &n.opts
	g.logger = n.logger.With("group", id.String(), "replica", string(replica))
	g.metrics = n.metrics.group(id)
	g.log = n.log.Group(id)
	g.poll, g.silent = n.poller, &n.disk.hung
	g.ctx, g.cancel = context.WithCancel(n.ctx)
	guard, err := raftlog.NewTermGuard(g.log, id, g.stop)
	if err != nil {
		return fmt.Errorf("opening the term of %s: %w", id, err)
	}
	g.guard = guard
	return nil
}

func (g *group) raftLogger() hclog.Logger { return logbridge.New(g.logger, "raft") }

// fatal ends the node: its disk failed a write or an fsync, or the log cannot
// be followed. All Raft traffic stops at once, so that nothing is promised that
// is not kept; the composition root ends the process.
func (n *Node) fatal(err error) {
	n.fatalOnce.Do(func() {
		n.disk.failed.Store(true)
		if n.transport != nil {
			n.disk.mute()
		}
		n.logger.Error("the node stops", "error", err)
		go n.opts.OnFatal(err) // never from the failing goroutine: it may hold the log
	})
}

// logCorrupt is called when a read of the Raft log met a damaged entry: the
// replica must not act on it (R3).
func (n *Node) logCorrupt(g base.GroupID, err error) {
	// Looked up now: the replica that is there later may be a newer one.
	n.mu.Lock()
	reading := n.mu.replicas[g]
	n.mu.Unlock()
	n.spawn(func() { // not on the reading goroutine: it is raft's
		r := reading
		if r == nil {
			n.mu.Lock()
			r = n.mu.replicas[g]
			n.mu.Unlock()
		}
		if r == nil && g != base.SystemGroup {
			return // it is being opened, which fails by the same error
		}
		if r == nil {
			n.fatal(fmt.Errorf("the log of %s: %w", g, err))
			return
		}
		if merr := r.markDamaged(r.id, r.replica, err.Error()); merr != nil {
			n.fatal(merr)
		}
		n.poke()
	})
}

// spawn runs f, which must end with n.ctx; nothing is begun once the node is
// closed.
func (n *Node) spawn(f func()) {
	n.mu.Lock()
	if n.mu.closed {
		n.mu.Unlock()
		return
	}
	n.wg.Add(1)
	n.mu.Unlock()
	go func() {
		defer n.wg.Done()
		f()
	}()
}

// poke says that something may have changed that others wait for.
func (n *Node) poke() { n.changes.broadcast() }

// Close stops serving and closes everything. Leadership is not handed over:
// call Drain before for that.
func (n *Node) Close() error {
	n.mu.Lock()
	if n.mu.closed {
		n.mu.Unlock()
		return nil
	}
	n.mu.closed = true
	n.mu.Unlock()
	n.cancel()
	n.wg.Wait()
	n.mu.Lock()
	replicas := make([]*replica, 0, len(n.mu.replicas))
	for _, r := range n.mu.replicas {
		replicas = append(replicas, r)
	}
	n.mu.Unlock()
	errs := closeAll(replicas)
	if s := n.system.Load(); s != nil {
		errs = append(errs, s.group.close())
		s.store.Close()
	}
	errs = append(errs, n.transport.Close(), n.closeFiles())
	return errors.Join(errs...)
}

// closeAll closes replicas beside one another, at most maxOpening at once.
func closeAll(replicas []*replica) []error {
	errs := make([]error, len(replicas))
	room := make(chan struct{}, maxOpening())
	var wg sync.WaitGroup
	for i, r := range replicas {
		room <- struct{}{}
		wg.Go(func() {
			errs[i] = r.close()
			<-room
		})
	}
	wg.Wait()
	return errs
}

func (n *Node) closeFiles() error {
	var errs []error
	if n.log != nil {
		errs = append(errs, n.log.Close())
	}
	if n.lock != nil {
		errs = append(errs, n.lock.Close())
	}
	return errors.Join(errs...)
}

// notifier wakes everybody who waits for a change; changes in quick succession
// may be one wake.
type notifier struct {
	mu sync.Mutex
	ch chan struct{}
}

func (c *notifier) init() { c.ch = make(chan struct{}) }

func (c *notifier) broadcast() {
	c.mu.Lock()
	close(c.ch)
	c.ch = make(chan struct{})
	c.mu.Unlock()
}

// wait returns a channel that is closed at the next change.
func (c *notifier) wait() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ch
}
