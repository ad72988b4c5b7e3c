package raftfsm

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
)

// Options of a Machine. None of them changes what a command does.
type Options struct {
	// MaxBatchBytes and MaxBatchOps bound an engine batch; it ends with the first
	// entry that reaches one of them. Default 4 MiB and 20,000 operations.
	MaxBatchBytes int
	MaxBatchOps   int
	// HashMarks is how many of the newest hash marks keep their view. Default 4.
	HashMarks int
	// OnBarrier is called on the apply goroutine when a barrier was passed, while
	// the store holds exactly the entries up to it. After a restart it may be
	// called again for the same barrier, never for one that is refused.
	OnBarrier func(Barrier)
	// OnRollback is called on the apply goroutine when the shard is rolled back, in
	// place of what the store held. It opens the store that was prepared for the
	// operation, has it sealed, makes it the one that a restart opens, and returns
	// it; when the last view of the old store is closed, released is called with
	// that one. It is called again for the same rollback after a crash before that.
	// An error, base.ErrDamaged if nothing was prepared, stops the machine.
	OnRollback func(r Rollback, seal func(engine.Store) error) (store engine.Store, released func(old engine.Store), err error)
	// OnFatal is called once, on the apply goroutine, when the machine stops for
	// good: an engine write or read failed, or a command cannot be read.
	OnFatal func(error)
}

// EnsureDefaults fills in zero fields.
func (o *Options) EnsureDefaults() {
	if o.MaxBatchBytes <= 0 {
		o.MaxBatchBytes = 4 << 20
	}
	if o.MaxBatchOps <= 0 {
		o.MaxBatchOps = 20_000
	}
	if o.HashMarks <= 0 {
		o.HashMarks = 4
	}
	if o.OnBarrier == nil {
		o.OnBarrier = func(Barrier) {}
	}
	if o.OnFatal == nil {
		o.OnFatal = func(error) {}
	}
}

// declared is a state that the shard knows.
type declared struct {
	state.Declaration
	options engine.FamilyOptions
}

// declarations is replaced, never changed, so that readers keep theirs.
type declarations map[engine.FamilyID]*declared

// Machine is the state machine of one shard replica.
type Machine struct {
	opts Options

	// The fields of this block belong to the apply goroutine.
	core     core
	layout   state.Layout
	tx       *engine.Txn
	decls    declarations
	dropped  map[engine.FamilyID]dropped
	sessions sessionTable
	hashes   opHashes
	confIdx  uint64
	conf     []byte
	command  Command // scratch
	scratch  []byte
	counts   counts // since the last commit
	// advanced says that entries were applied since the last commit.
	advanced bool
	// undropped counts tombstones whose family still exists.
	undropped int

	// writing is odd while the store, the header or the store's identity
	// changes: a reader that finds it even and unchanged has one instant (RF10).
	writing atomic.Uint64
	header  atomic.Pointer[Header]
	durable atomic.Uint64 // applied index that is known to be durable
	failure atomic.Pointer[error]
	stats   totals
	waits   waitList

	mu struct {
		sync.Mutex
		ref   *storeRef
		marks []*hashMark // newest last; replaced, never changed
		// marked is closed, and dropped, when a mark was added. Made by the first
		// waiter.
		marked chan struct{}
	}
}

// Open loads the state of the store. The machine does not own the store's
// directory; Close closes the store once all views are closed.
func Open(store engine.Store, opts Options) (*Machine, error) {
	opts.EnsureDefaults()
	m := &Machine{opts: opts}
	m.waits.init()
	if err := m.adopt(store, func(s engine.Store) { _ = s.Close() }); err != nil {
		return nil, fmt.Errorf("opening state machine: %w", err)
	}
	return m, nil
}

// adopt loads store and makes it the machine's. Nothing changes on an error.
func (m *Machine) adopt(store engine.Store, released func(engine.Store)) error {
	l, err := loadMeta(store)
	if err != nil {
		return err
	}
	layout := state.Layout{M: l.core.m}
	decls, err := openDeclarations(store, layout, l)
	if err != nil {
		return err
	}
	durable, err := durableIndex(store)
	if err != nil {
		return err
	}
	m.writing.Add(1)
	m.core, m.layout, m.decls = l.core, layout, decls
	m.dropped, m.sessions, m.hashes = l.dropped, l.sessions, l.hashes
	m.confIdx, m.conf = l.configurationIndex, l.configuration
	m.undropped = 0
	for _, d := range m.dropped {
		if !d.gone {
			m.undropped++
		}
	}
	m.tx = engine.NewTxn(store, m.mergeKind)
	m.advanced = false
	m.durable.Store(durable)
	m.mu.Lock()
	m.mu.ref = &storeRef{store: store, refs: 1, released: released}
	ref := m.mu.ref
	m.mu.Unlock()
	m.publish(ref)
	m.writing.Add(1)
	return nil
}

// openDeclarations checks that every declared family exists with its options.
// Since families are durable when they are made, one that is missing is damage.
func openDeclarations(store engine.Store, layout state.Layout, l *loaded) (declarations, error) {
	families := store.Families()
	decls := make(declarations, len(l.decls))
	for _, id := range sortedIDs(l.decls) {
		d := &declared{Declaration: *l.decls[id]}
		d.options = layout.FamilyOptions(&d.Declaration)
		got, ok := families[id]
		if !ok || got != d.options {
			return nil, fmt.Errorf("family %d of state %s/%s is missing or has other options: %w", id, d.Keyspace, d.Name, base.ErrCorrupt)
		}
		decls[id] = d
	}
	return decls, nil
}

func (m *Machine) mergeKind(f engine.FamilyID) engine.MergeKind {
	if d := m.decls[f]; d != nil {
		return d.options.Merge
	}
	return engine.MergeNone
}

// UnreadableCommand says that a committed command cannot be decoded. Every
// replica holds the same bytes (the log has its own checksums), so this is no
// damage of one replica: the node must stop, and a build that knows the command
// must take over.
type UnreadableCommand struct {
	Index uint64
	Cause error
}

func (e *UnreadableCommand) Error() string {
	return fmt.Sprintf("entry %d: the command cannot be read: %v", e.Index, e.Cause)
}

// Unwrap returns the cause.
func (e *UnreadableCommand) Unwrap() error { return e.Cause }

// ApplyBatch applies committed entries in order of their index and returns one
// outcome per entry. An outcome is returned only after its engine batch is
// written; after a failure every outcome is unknown (RF8).
func (m *Machine) ApplyBatch(entries []Entry) []Outcome {
	out := make([]Outcome, len(entries))
	failpoint.Hit("raftfsm.apply.begin")
	first := 0 // of the outcomes whose batch is not written yet
	err := m.failed()
	if err == nil {
		err = m.dropFamilies()
	}
	for i := range entries {
		if err != nil {
			break
		}
		if err = m.applyEntry(&entries[i], &out[i]); err != nil {
			break
		}
		if b := m.tx.Batch(); len(b.Bytes()) >= m.opts.MaxBatchBytes || b.Len() >= m.opts.MaxBatchOps {
			err = m.commit()
		}
		if !m.advanced && err == nil {
			first = i + 1
		}
	}
	if err == nil {
		err = m.commit()
	}
	if err != nil {
		m.stop(err)
		for i := first; i < len(entries); i++ {
			out[i] = Outcome{Index: entries[i].Index, Err: fmt.Errorf("applying entry %d: %w", entries[i].Index, unknownOutcome(m.failed()))}
		}
	}
	return out
}

// commit writes everything since the last commit in one engine batch.
func (m *Machine) commit() error {
	if !m.advanced {
		return nil
	}
	b := m.tx.Batch()
	m.sessions.flush(func(s *session) {
		m.scratch = appendSessionKey(m.scratch[:0], s.id, s.rng)
		b.Delete(engine.MetaFamily, m.scratch)
	}, func(s *session) {
		m.scratch = appendSessionKey(m.scratch[:0], s.id, s.rng)
		n := len(m.scratch)
		m.scratch = s.appendTo(m.scratch)
		b.Put(engine.MetaFamily, m.scratch[:n], m.scratch[n:])
	})
	m.hashes.flush(func(g keyGroup, h OpHash) {
		m.scratch = appendOpHashKey(m.scratch[:0], g)
		n := len(m.scratch)
		m.scratch = appendOpHash(m.scratch, h)
		b.Put(engine.MetaFamily, m.scratch[:n], m.scratch[n:])
	})
	m.scratch = m.core.appendTo(m.scratch[:0])
	b.Put(engine.MetaFamily, coreKey, m.scratch)

	m.mu.Lock()
	ref := m.mu.ref
	m.mu.Unlock()
	if err := failpoint.Err("raftfsm.apply.before-store"); err != nil {
		return fmt.Errorf("writing batch up to index %d: %w", m.core.appliedIndex, err)
	}
	m.writing.Add(1)
	if err := ref.store.Write(b); err != nil {
		m.writing.Add(1)
		return fmt.Errorf("writing batch up to index %d: %w", m.core.appliedIndex, err)
	}
	failpoint.Hit("raftfsm.apply.after-store")
	m.stats.add(&m.counts, b)
	m.publish(ref)
	m.writing.Add(1)
	m.tx.Reset(ref.store)
	m.advanced = false
	m.waits.wake(m.core.appliedIndex)
	return nil
}

// publish shows readers the machine's present state, which is that of ref.
func (m *Machine) publish(ref *storeRef) {
	h := &Header{
		Sessions: len(m.sessions.byID), Undropped: m.undropped, Dropped: len(m.dropped), decls: m.decls, ref: ref,
		configurationIndex: m.confIdx, configuration: m.conf,
	}
	h.setCore(m.core)
	m.header.Store(h)
}

// stop makes the machine refuse everything from now on.
func (m *Machine) stop(err error) {
	if m.failure.CompareAndSwap(nil, &err) {
		m.opts.OnFatal(err)
		m.waits.fail(err)
		m.wakeMarks()
	}
}

// unknownOutcome makes sure that err does not claim that an entry, which is
// committed and may be applied elsewhere, was not applied (W8).
func unknownOutcome(err error) error {
	switch {
	case base.OutcomeOf(err) == base.OutcomeUnknown:
		return err
	case errors.Is(err, base.ErrReopen): // it will be applied when the store is open again
		return fmt.Errorf("%w: %w", base.ErrOutcomeUnknown, err)
	}
	return fmt.Errorf("%w: %w", base.ErrInternal, err)
}

// failed returns why the machine has stopped, nil if it runs.
func (m *Machine) failed() error {
	if p := m.failure.Load(); p != nil {
		return *p
	}
	return nil
}

// Err returns why the machine has stopped for good, nil if it runs.
func (m *Machine) Err() error { return m.failed() }

// dropFamilies removes the families of states whose drop is durable by now; the
// families of replicas go at different times, which nothing can see (RF9).
func (m *Machine) dropFamilies() error {
	if m.undropped == 0 {
		return nil
	}
	durable := m.durable.Load()
	for _, id := range sortedIDs(m.dropped) {
		d := m.dropped[id]
		if d.gone || d.index > durable {
			continue
		}
		m.mu.Lock()
		store := m.mu.ref.store
		m.mu.Unlock()
		failpoint.Hit("raftfsm.drop-family.begin")
		if err := store.DropFamily(id); err != nil {
			return fmt.Errorf("dropping family %d: %w", id, err)
		}
		failpoint.Hit("raftfsm.drop-family.end")
		d.gone = true
		m.dropped[id] = d
		m.undropped--
		m.tx.Batch().Put(engine.MetaFamily, droppedKey(id), encodeDropped(d))
	}
	return nil
}

// Close stops the machine, and closes its store when the last view is closed.
// It must not run beside ApplyBatch or Swap.
func (m *Machine) Close() error {
	m.stopQuietly(fmt.Errorf("state machine: %w", base.ErrClosed))
	m.dropMarks()
	m.mu.Lock()
	ref := m.mu.ref
	m.mu.ref = nil
	m.mu.Unlock()
	if ref != nil {
		m.release(ref)
	}
	return nil
}

func (m *Machine) stopQuietly(err error) {
	if m.failure.CompareAndSwap(nil, &err) {
		m.waits.fail(err)
		m.wakeMarks()
	}
}
