package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/cluster/raftlog"
	"github.com/keelstate/keelstate/cluster/transport"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
	"github.com/keelstate/keelstate/internal/logbridge"
)

// group is what every Raft group of this node has in common: the raft instance
// on its part of the log and the transport, the office of a leader, and the
// confirmation of linearizable reads. The system group and the shard replicas
// build on it.
type group struct {
	id      base.GroupID
	replica base.ReplicaID
	opts    *Options
	logger  *slog.Logger
	metrics *groupMetrics

	log   *raftlog.GroupLog
	guard *raftlog.TermGuard
	wire  *transport.Group
	poll  poller
	raft  *raft.Raft
	reads *readIndexer

	ctx    context.Context // ends when the group is closed
	cancel context.CancelFunc
	wg     sync.WaitGroup

	// applied is the index of the newest command that was applied here.
	applied func() uint64
	// stopped is told, on a goroutine of its own, why the log stopped raft.
	stopped func(error)

	life struct {
		sync.Mutex
		started bool  // raft's goroutines were started
		running bool  // raft was started and not asked to stop
		refused error // why the log or the term guard asked to stop
		closing bool  // no goroutine may be added to wg any more
	}
	// learners holds, under life, the commit index at which this leader first
	// looked at promoting a learner.
	learners map[raft.ServerID]uint64
	// lateness orders the voters that are asked for a confirmation; owned by the
	// round that runs.
	lateness map[raft.ServerID]int
	// pulse is what liveness is told by.
	pulse pulse
	// transfers guards raft against a second transfer of its office (CL7).
	transfers transfers
	// ended ends when raft's goroutines have; end says so.
	ended context.Context
	end   context.CancelFunc

	// office is set while this replica leads and its TermStart is applied.
	office atomic.Pointer[office]
	// changed is told when leadership may have changed; it must not block.
	changed func()
	// silent is set while the node's disk hangs; nil: never.
	silent *atomic.Bool
}

// office is a leader's term in which it may propose and serve (CL3).
type office struct {
	term  uint64
	clock *leaderClock
	since time.Time
}

// poller asks other nodes for the highest term they ever stored or voted.
type poller interface {
	Poll(ctx context.Context, node base.NodeID, group base.GroupID) (transport.TermAnswer, error)
}

// hooks are what differs between the system group and a shard replica.
type groupHooks struct {
	fsm   raft.FSM
	snaps raft.SnapshotStore
	// prepare fetches the files of a snapshot before Raft sees it; may be nil.
	prepare func(ctx context.Context, meta transport.SnapshotMeta, manifest []byte, from base.NodeID) error
	// refused is told why a replica elsewhere did not take a snapshot; may be nil.
	refused func(error)
	// takeOffice proposes what a new leader proposes first, waits until it is
	// applied and returns the newest stamp of the group's clock.
	takeOffice func(ctx context.Context, r *raft.Raft, term uint64) (stampMs uint64, err error)
	// changed is told when leadership may have changed; it must not block.
	changed func()
	// applied is the index of the newest command that was applied here.
	applied func() uint64
	// stopped is told why the log or the term guard stopped the replica.
	stopped func(error)
}

// raftConfig is the configuration of every raft instance (R1-R4; design,
// section 9). Snapshots are taken by our own rule, by bytes, never by raft's; at
// start every state machine is what it was before raft is started.
func (g *group) raftConfig() *raft.Config {
	c := raft.DefaultConfig()
	c.LocalID = raft.ServerID(g.replica)
	c.HeartbeatTimeout = g.opts.ElectionTimeout
	c.ElectionTimeout = g.opts.ElectionTimeout
	c.LeaderLeaseTimeout = g.opts.ElectionTimeout
	c.CommitTimeout = g.opts.CommitTimeout
	c.MaxAppendEntries = 512
	c.BatchApplyCh = true
	c.ShutdownOnRemove = false
	c.SnapshotThreshold = math.MaxUint64
	c.SnapshotInterval = time.Hour
	c.TrailingLogs = 1 << 20
	c.NoSnapshotRestoreOnStart = true
	c.NoLegacyTelemetry = true
	c.Logger = logbridge.New(g.logger, "raft")
	return c
}

// start opens the transport of the group and starts raft on it. bootstrap is
// the first configuration if this replica founds the group; nil elsewhere.
func (g *group) start(t *transport.Transport, h groupHooks, bootstrap *raft.Configuration) error {
	conf := g.raftConfig()
	logs := raftlog.NewStoppingStore(g.log, g.stop)
	if bootstrap != nil {
		exists, err := raft.HasExistingState(logs, g.guard, h.snaps)
		if err != nil {
			return fmt.Errorf("starting group %s: %w", g.id, err)
		}
		if !exists {
			if err := raft.BootstrapCluster(conf, logs, g.guard, h.snaps, bootstrapTransport{}, *bootstrap); err != nil {
				return fmt.Errorf("bootstrapping group %s: %w", g.id, err)
			}
		}
	}
	wire, err := t.Group(g.id, transport.GroupOptions{Local: conf.LocalID, PrepareSnapshot: h.prepare, SnapshotRefused: h.refused,
		HasSnapshot:  func(m transport.SnapshotMeta) (bool, error) { return g.hasSnapshot(h.snaps, m) },
		SnapshotOver: func(index uint64) (uint64, error) { return g.snapshotOver(h.snaps, index) }})
	if err != nil {
		return fmt.Errorf("starting group %s: %w", g.id, err)
	}
	g.wire, g.changed, g.applied, g.stopped = wire, h.changed, h.applied, h.stopped
	g.ended, g.end = context.WithCancel(context.Background())
	r, err := newRaft(conf, h.fsm, quietLogs{logs, g}, quietTerms{g.guard, g}, h.snaps, wire)
	if err != nil {
		g.end()
		return errors.Join(fmt.Errorf("starting raft of group %s: %w", g.id, err), wire.Close())
	}
	g.raft = r
	g.reads = newReadIndexer(g.ctx, g.confirm)
	g.life.Lock()
	g.life.started, g.life.running = true, true
	refused := g.life.refused
	g.life.Unlock()
	if refused != nil { // the log failed while raft was starting
		g.stop(refused)
		return nil
	}
	g.spawn(func() { g.watchOffice(h.takeOffice) })
	g.spawn(g.watchLeader)
	g.spawn(g.watchPulse)
	return nil
}

// snapshotOver returns the end of the replica's own newest snapshot if that covers
// an entry which the log does not hold (any more); else 0.
func (g *group) snapshotOver(snaps raft.SnapshotStore, index uint64) (uint64, error) {
	first, err := g.log.FirstIndex()
	if err != nil || first != 0 && first <= index {
		return 0, err
	}
	own, err := snaps.List()
	if err != nil {
		return 0, fmt.Errorf("listing the snapshots of %s: %w", g.id, err)
	}
	if len(own) == 0 || own[0].Index < index {
		return 0, nil
	}
	return own[0].Index, nil
}

// hasSnapshot says whether raft must not get a snapshot that a leader sends,
// because this replica holds what it covers and more: in a snapshot of its own,
// or in a log that has the last entry, with its term, and entries behind it (the
// log matching property then says that it has all before). Such a request was
// delayed on its way, or while its files were fetched.
func (g *group) hasSnapshot(snaps raft.SnapshotStore, m transport.SnapshotMeta) (bool, error) {
	if m.Term < g.guard.HighestTerm() {
		return false, nil // raft refuses it and tells the sender of the newer term
	}
	own, err := snaps.List()
	if err != nil {
		return false, fmt.Errorf("listing the snapshots of %s: %w", g.id, err)
	}
	if len(own) > 0 && m.LastIndex <= own[0].Index {
		return true, nil
	}
	last, err := g.log.LastIndex()
	if err != nil || last <= m.LastIndex {
		return false, err
	}
	var e raft.Log
	if err := g.log.GetLog(m.LastIndex, &e); err != nil {
		if errors.Is(err, raft.ErrLogNotFound) {
			return false, nil
		}
		return false, fmt.Errorf("looking for the end of a snapshot of %s in the log: %w", g.id, err)
	}
	return e.Term == m.LastTerm, nil
}

// spawn runs f, which must end with g.ctx; nothing is begun once the group is
// closing.
func (g *group) spawn(f func()) {
	g.life.Lock()
	if g.life.closing {
		g.life.Unlock()
		return
	}
	g.wg.Add(1)
	g.life.Unlock()
	go func() {
		defer g.wg.Done()
		f()
	}()
}

// stop is called when the log or the term guard cannot go on (W2, R1): the
// replica must not act on what it cannot keep. raft calls it from its main loop,
// or while it is starting: it never waits here.
func (g *group) stop(err error) {
	g.life.Lock()
	if g.life.refused == nil {
		g.life.refused = err
	}
	running := g.life.running
	g.life.Unlock()
	if !running {
		return // start looks at refused, or raft stops already
	}
	g.logger.Error("the replica stops: its log failed", "error", err)
	g.spawn(func() {
		if err := g.shutdown(); err != nil {
			g.logger.Warn("stopping raft", "error", err)
		}
		if g.stopped != nil {
			g.stopped(err)
		}
	})
}

// shutdown ends raft, once, and waits until its goroutines have ended.
func (g *group) shutdown() error {
	g.life.Lock()
	first := g.life.running
	g.life.running = false
	g.life.Unlock()
	if !first {
		<-g.ended.Done()
		return nil
	}
	// raft closes its transport only after its goroutines have ended, and these
	// may wait for a peer that is gone: close it first.
	f := g.raft.Shutdown()
	err := errors.Join(g.wire.Close(), f.Error())
	g.end()
	return err
}

// watchOffice takes office whenever this replica becomes the leader.
func (g *group) watchOffice(take func(context.Context, *raft.Raft, uint64) (uint64, error)) {
	leads := false
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	for {
		select {
		case <-g.ctx.Done():
			return
		case leads = <-g.raft.LeaderCh():
		case <-retry.C:
			leads = leads && g.raft.State() == raft.Leader
		}
		if !leads {
			g.office.Store(nil)
			g.changed()
			continue
		}
		term := g.raft.CurrentTerm()
		if o := g.office.Load(); o != nil && o.term == term {
			continue
		}
		g.office.Store(nil)
		failpoint.Hit("cluster.office.before-term-start")
		stamp, err := take(g.ctx, g.raft, term)
		if err == nil && (g.raft.State() != raft.Leader || g.raft.CurrentTerm() != term) {
			err = base.ErrNotLeader
		}
		if err != nil {
			g.logger.Debug("taking office failed", "term", term, "error", err)
			retry.Reset(20 * time.Millisecond)
			continue
		}
		failpoint.Hit("cluster.office.taken")
		start := time.Now()
		clock := newLeaderClock(func() time.Duration { return time.Since(start) }, stamp)
		g.office.Store(&office{term: term, clock: clock, since: start})
		g.logger.Info("leading", "term", term)
		g.changed()
	}
}

// watchLeader tells changed about every change of the leader that raft
// observes.
func (g *group) watchLeader() {
	ch := make(chan raft.Observation, 16) // non-blocking for raft: one lost is made up by the next check
	o := raft.NewObserver(ch, false, func(o *raft.Observation) bool {
		_, ok := o.Data.(raft.LeaderObservation)
		return ok
	})
	g.raft.RegisterObserver(o)
	defer g.raft.DeregisterObserver(o)
	for {
		select {
		case <-g.ctx.Done():
			return
		case <-ch:
			g.changed()
		}
	}
}

// leading returns the office of this replica, or an error with the leader's
// name as far as it is known.
func (g *group) leading() (*office, error) {
	o := g.office.Load()
	if g.silent != nil && g.silent.Load() {
		// raft's main loop waits for the disk and does not know yet that others
		// may lead; what it took now would wait with it.
		id := g.id
		return nil, &base.Error{Cause: base.ErrNotReady, Group: &id, Ordinal: -1, RetryAfter: 50 * time.Millisecond,
			Hint: "the node's disk hangs; another node takes over, retry there"}
	}
	if o != nil && g.raft.State() == raft.Leader && g.raft.CurrentTerm() == o.term {
		return o, nil
	}
	return nil, g.notLeader()
}

func (g *group) notLeader() error {
	id := g.id
	e := &base.Error{Cause: base.ErrNotLeader, Group: &id, Ordinal: -1, LeaderHint: g.leaderNode()}
	if g.raft.State() == raft.Leader {
		e.Cause = base.ErrNotReady
		e.Hint = "the leader has not finished taking office; retry"
		e.RetryAfter = 10 * time.Millisecond
	} else if e.LeaderHint == "" {
		e.Hint = "the shard has no leader at the moment; retry"
		e.RetryAfter = 50 * time.Millisecond
	}
	return e
}

// leaderNode is the node that leads, as this replica knows; empty if unknown.
func (g *group) leaderNode() base.NodeID {
	addr, _ := g.raft.LeaderWithID()
	return base.NodeID(addr)
}

// readIndex returns the index that a linearizable read which arrived now must
// see applied. It fails unless this replica leads (CL2).
func (g *group) readIndex(ctx context.Context) (uint64, error) {
	if _, err := g.leading(); err != nil {
		return 0, err
	}
	return g.reads.wait(ctx)
}

// confirm is one round of confirming office (design, section 3): note the term,
// then the newest command at or below the commit index, then ask the voters of
// the newest configuration for the highest term they ever stored or voted. A
// quorum must answer with a term not above ours.
func (g *group) confirm(ctx context.Context) readPoint {
	g.metrics.readRounds.Inc()
	o, err := g.leading()
	if err != nil {
		return readPoint{err: err}
	}
	index := g.log.NewestCommandAtOrBelow(g.raft.CommitIndex())
	if index == 0 {
		// No command at or below is in the log any more: all of them were cut,
		// which happens only after they were applied and flushed (W2).
		index = g.applied()
	}
	voters, self, err := g.voters()
	if err != nil {
		return readPoint{err: err}
	}
	quorum := len(voters)/2 + 1
	granted := 0
	if self && g.guard.HighestTerm() <= o.term {
		granted++
	}
	if granted < quorum {
		granted += g.askVoters(ctx, voters, o.term, quorum-granted)
	}
	if granted < quorum {
		id := g.id
		return readPoint{err: &base.Error{Cause: base.ErrNoQuorum, Group: &id, Ordinal: -1,
			Hint: fmt.Sprintf("%d of %d voters confirmed the leader; retry, and check the nodes with keelctl cluster status", granted, len(voters))}}
	}
	return readPoint{index: index}
}

// voters returns the voters of the newest configuration, committed or not, and
// whether this replica is one of them.
func (g *group) voters() ([]raft.Server, bool, error) {
	f := g.raft.GetConfiguration()
	if err := f.Error(); err != nil {
		return nil, false, fmt.Errorf("%w: reading the configuration: %v", base.ErrNotReady, err)
	}
	var voters []raft.Server
	self := false
	for _, s := range f.Configuration().Servers {
		if s.Suffrage == raft.Voter {
			voters = append(voters, s)
			self = self || s.ID == raft.ServerID(g.replica)
		}
	}
	return voters, self, nil
}

// hedgeAfter is how long a voter may take to confirm before the others are
// asked too: far above an answer, far below what a reader notices.
const hedgeAfter = 10 * time.Millisecond

// askVoters polls as many of the other voters as are needed, those first that
// confirmed last; the others too when one refuses, fails or takes long. It
// returns how many confirmed, as soon as need have. Only the rounds of the read
// indexer call it, one at a time.
func (g *group) askVoters(ctx context.Context, voters []raft.Server, term uint64, need int) int {
	ctx, cancel := context.WithTimeout(ctx, 2*g.opts.ElectionTimeout)
	defer cancel()
	others := slices.DeleteFunc(slices.Clone(voters), func(s raft.Server) bool { return s.ID == raft.ServerID(g.replica) })
	slices.SortStableFunc(others, func(a, b raft.Server) int { return cmp.Compare(g.lateness[a.ID], g.lateness[b.ID]) })
	type answer struct {
		id      raft.ServerID
		confirm bool
	}
	answers := make(chan answer, len(others))
	asked := 0
	ask := func(count int) {
		for ; asked < min(count, len(others)); asked++ {
			s := others[asked]
			go func() {
				a, err := g.poll.Poll(ctx, base.NodeID(s.Address), g.id)
				answers <- answer{s.ID, err == nil && a.Known && a.Replica == base.ReplicaID(s.ID) && a.Term <= term}
			}()
		}
	}
	ask(need)
	hedge := time.NewTimer(hedgeAfter)
	defer hedge.Stop()
	granted, heard := 0, map[raft.ServerID]bool{}
	for granted < need && len(heard) < len(others) {
		select {
		case a := <-answers:
			heard[a.id] = a.confirm
			if a.confirm {
				granted++
			} else {
				ask(len(others))
			}
		case <-hedge.C:
			ask(len(others))
		}
	}
	late := map[raft.ServerID]int{}
	for i, s := range others {
		switch {
		case i >= asked:
			late[s.ID] = g.lateness[s.ID]
		case !heard[s.ID]:
			late[s.ID] = 1 // asked in vain, or slower than the others
		}
	}
	g.lateness = late
	return granted
}

// close stops raft and waits for the group's goroutines.
func (g *group) close() error {
	g.cancel()
	var err error
	if g.raft != nil {
		err = g.shutdown()
	}
	g.life.Lock()
	g.life.closing = true
	g.life.Unlock()
	if g.reads != nil {
		g.reads.close()
	}
	g.wg.Wait()
	return err
}

// bootstrapTransport stands in for a transport in raft.BootstrapCluster, which
// only encodes the configuration with it.
type bootstrapTransport struct{ raft.Transport }

func (bootstrapTransport) EncodePeer(_ raft.ServerID, a raft.ServerAddress) []byte { return []byte(a) }
func (bootstrapTransport) DecodePeer(b []byte) raft.ServerAddress                  { return raft.ServerAddress(b) }
