package meta

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/tidwall/btree"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

// View is the typed, immutable view of the metadata in one snapshot of the map.
// What it returns is shared and must not be modified. Lookups by number do not
// allocate.
type View struct {
	snap *broadcast.Snapshot
	tables
}

// tables are the decoded records. In a View they never change; a Mirror works
// on its own set and publishes copies of those that changed.
type tables struct {
	cluster    *Cluster
	floor      *endedFloor
	floorRev   base.Revision
	counters   *btree.Map[string, *counterRecord]
	nodes      *btree.Map[string, *Node]
	shards     *btree.Map[uint64, *Shard]
	keyspaces  *btree.Map[string, *Keyspace]
	states     *btree.Map[string, *Declaration]
	statesByID *btree.Map[uint32, *Declaration]
	dropped    *btree.Map[uint32, *Declaration]
	sessions   *btree.Map[uint64, *Session]
	// ended is ordered by (revision, id); endedByID finds the revision.
	ended      *btree.Map[string, *EndedSession]
	endedByID  *btree.Map[uint64, *EndedSession]
	operations *btree.Map[uint64, *Operation]

	checkpointTables
}

type counterRecord struct {
	counter
	revision base.Revision
}

// tableDegree is small: most changes touch one record, and copy its nodes.
const tableDegree = 8

func newTables() tables {
	return tables{
		counters: btree.NewMap[string, *counterRecord](tableDegree), nodes: btree.NewMap[string, *Node](tableDegree),
		shards: btree.NewMap[uint64, *Shard](tableDegree), keyspaces: btree.NewMap[string, *Keyspace](tableDegree),
		states: btree.NewMap[string, *Declaration](tableDegree), statesByID: btree.NewMap[uint32, *Declaration](tableDegree),
		dropped: btree.NewMap[uint32, *Declaration](tableDegree), sessions: btree.NewMap[uint64, *Session](tableDegree),
		ended: btree.NewMap[string, *EndedSession](tableDegree), endedByID: btree.NewMap[uint64, *EndedSession](tableDegree),
		operations:       btree.NewMap[uint64, *Operation](tableDegree),
		checkpointTables: newCheckpointTables(),
	}
}

// NewView decodes the metadata of a snapshot in full. For a store that goes on,
// a Mirror does so step by step.
func NewView(snap *broadcast.Snapshot) (*View, error) {
	t, err := decodeAll(snap)
	if err != nil {
		return nil, err
	}
	return &View{snap: snap, tables: t}, nil
}

func decodeAll(snap *broadcast.Snapshot) (tables, error) {
	t := newTables()
	var err error
	snap.Scan(Prefix, "", func(key string, e *broadcast.Entry) bool {
		_, err = t.set(key, e.Value, e.ModRevision)
		return err == nil
	})
	return t, err
}

// Snapshot is the snapshot that the view shows.
func (v *View) Snapshot() *broadcast.Snapshot { return v.snap }

// Revision is the version of the map that the view shows.
func (v *View) Revision() base.Revision { return v.snap.Revision() }

// Clock is the system clock in milliseconds.
func (v *View) Clock() uint64 { return v.snap.Clock() }

// Cluster returns the cluster's record, or nil before the founding.
func (v *View) Cluster() *Cluster { return v.cluster }

// Node returns a node's record, or nil.
func (v *View) Node(id base.NodeID) *Node { n, _ := v.nodes.Get(string(id)); return n }

// Nodes returns all nodes, the removed ones too, in the order of their ids.
func (v *View) Nodes() []*Node { return v.nodes.Values() }

// Shard returns a shard's record, or nil.
func (v *View) Shard(id base.GroupID) *Shard { s, _ := v.shards.Get(uint64(id)); return s }

// Shards returns all shards in the order of their ids.
func (v *View) Shards() []*Shard { return v.shards.Values() }

// Keyspace returns a keyspace's record, or nil.
func (v *View) Keyspace(name string) *Keyspace { k, _ := v.keyspaces.Get(name); return k }

// Keyspaces returns all keyspaces in the order of their names.
func (v *View) Keyspaces() []*Keyspace { return v.keyspaces.Values() }

// State returns the declared state of that name, or nil.
func (v *View) State(keyspace, name string) *Declaration {
	d, _ := v.states.Get(stateName(keyspace, name))
	return d
}

// StateByID returns the declared state of that number, or nil; nil for one that
// was dropped.
func (v *View) StateByID(id uint32) *Declaration { d, _ := v.statesByID.Get(id); return d }

// States returns all declared states in the order of their numbers.
func (v *View) States() []*Declaration { return v.statesByID.Values() }

// Dropped returns the dropped states that not every shard is known to have
// dropped, in the order of their numbers.
func (v *View) Dropped() []*Declaration { return v.dropped.Values() }

// SessionAlive says whether the session was opened and has not ended (ME2).
// What is past its lease is alive until it was ended.
func (v *View) SessionAlive(id base.SessionID) bool {
	_, ok := v.sessions.Get(uint64(id))
	return ok
}

// Session returns a living session, or nil.
func (v *View) Session(id base.SessionID) *Session { s, _ := v.sessions.Get(uint64(id)); return s }

// SessionCount is the number of living sessions.
func (v *View) SessionCount() int { return v.sessions.Len() }

// ScanSessions calls fn for each living session in the order of their ids until
// it returns false.
func (v *View) ScanSessions(fn func(*Session) bool) {
	v.sessions.Scan(func(_ uint64, s *Session) bool { return fn(s) })
}

// Ended returns the sessions that ended after a revision, oldest first, at most
// limit of them (0 = all). complete is false if the list was cut behind that
// revision: then sessions are missing, and the caller has to compare what it
// has with the living ones.
func (v *View) Ended(after base.Revision, limit int) (list []*EndedSession, complete bool) {
	v.ended.Ascend(endedKey(after+1, 0), func(_ string, e *EndedSession) bool {
		if limit > 0 && len(list) == limit {
			return false
		}
		list = append(list, e)
		return true
	})
	return list, after >= v.EndedFloor()
}

// EndedCount is the length of the list of ended sessions.
func (v *View) EndedCount() int { return v.ended.Len() }

// EndedFloor is the revision up to which ended sessions may be missing from the
// list (ME3).
func (v *View) EndedFloor() base.Revision {
	if v.floor == nil {
		return 0
	}
	return v.floor.Revision
}

// Operation returns an operation, or nil.
func (v *View) Operation(id uint64) *Operation { o, _ := v.operations.Get(id); return o }

// Operations returns all operations that are kept, oldest first.
func (v *View) Operations() []*Operation { return v.operations.Values() }

// NextOperationID is the number that the next operation will have.
func (v *View) NextOperationID() uint64 { return v.next(counterOperation) }

// NextSessionID is the smallest id that a new session may have.
func (v *View) NextSessionID() base.SessionID { return base.SessionID(v.next(counterSession)) }

// NextShardID is the smallest id that a new shard may have.
func (v *View) NextShardID() base.GroupID { return base.GroupID(v.next(counterShard)) }

func (v *View) next(name string) uint64 {
	if c, ok := v.counters.Get(name); ok {
		return c.Next
	}
	return 1
}

func endedKey(rev base.Revision, id base.SessionID) string {
	b := binary.BigEndian.AppendUint64(make([]byte, 0, 16), uint64(rev))
	return string(binary.BigEndian.AppendUint64(b, uint64(id)))
}

// Mirror keeps the newest View of a store. It decodes what has changed only.
type Mirror struct {
	store *broadcast.Store
	cur   atomic.Pointer[View]

	mu struct {
		sync.Mutex
		// work is the mirror's own set; what is published shares its nodes,
		// copy on write.
		work tables
	}
}

// NewMirror returns a mirror of the store's metadata.
func NewMirror(store *broadcast.Store) *Mirror { return &Mirror{store: store} }

// View returns the view of the store's newest state. It allocates nothing if
// nothing was applied since the last call. The error says that a record cannot
// be read: base.ErrFormatVersion or base.ErrCorrupt.
func (m *Mirror) View() (*View, error) {
	if v := m.cur.Load(); v != nil && v.snap == m.store.Snapshot() {
		return v, nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	snap := m.store.Snapshot()
	v := m.cur.Load()
	if v != nil && v.snap == snap {
		return v, nil
	}
	next, err := m.advanceLocked(v, snap)
	if err != nil {
		return nil, fmt.Errorf("reading the cluster's metadata at revision %d: %w", snap.Revision(), err)
	}
	m.cur.Store(next)
	return next, nil
}

// advanceLocked returns the view of snap, from the view before it if the
// store's history reaches back that far.
func (m *Mirror) advanceLocked(v *View, snap *broadcast.Snapshot) (*View, error) {
	if v == nil || snap.Revision() < v.Revision() {
		return m.rebuildLocked(snap)
	}
	batches, err := m.store.Changes(Prefix, v.Revision(), snap.Revision())
	if errors.Is(err, base.ErrCompacted) {
		return m.rebuildLocked(snap)
	}
	if err != nil {
		return nil, err
	}
	var dirty kindSet
	for _, b := range batches {
		for _, e := range b.Events {
			k, err := m.applyLocked(e)
			if err != nil {
				// The working set is ahead of the published view now.
				m.cur.Store(nil)
				return nil, err
			}
			dirty |= k
		}
	}
	return &View{snap: snap, tables: m.mu.work.publish(v.tables, dirty)}, nil
}

func (m *Mirror) applyLocked(e broadcast.Event) (kindSet, error) {
	if e.Kind == broadcast.EventDelete {
		return m.mu.work.remove(e.Key)
	}
	return m.mu.work.set(e.Key, e.Value, e.Revision)
}

func (m *Mirror) rebuildLocked(snap *broadcast.Snapshot) (*View, error) {
	t, err := decodeAll(snap)
	if err != nil {
		return nil, err
	}
	m.mu.work = t
	return &View{snap: snap, tables: t.publish(tables{}, ^kindSet(0))}, nil
}
