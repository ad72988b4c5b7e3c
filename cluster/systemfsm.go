package cluster

import (
	"errors"
	"fmt"
	"io"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
)

// systemFSM feeds the system group's committed entries to the replicated map.
// The map is memory: system.restore builds it at start, before raft does anything.
type systemFSM struct {
	store *broadcast.Store
	// fatal is called when the map cannot follow its log (base.ErrFormatVersion:
	// a newer build wrote an entry); the replica must stop.
	fatal func(error)
}

// systemResult is what an entry's future responds.
type systemResult struct {
	result broadcast.Result
	err    error
}

// Apply implements raft.FSM.
func (f *systemFSM) Apply(l *raft.Log) any {
	failpoint.Hit("cluster.metadata.before-apply")
	r, err := f.store.Apply(l.Index, l.Data)
	failpoint.Hit("cluster.metadata.applied")
	if err != nil && isFormatVersion(err) {
		f.fatal(fmt.Errorf("the system group's log has an entry of a newer version; upgrade this node: %w", err))
	}
	return systemResult{result: r, err: err}
}

// Snapshot implements raft.FSM in O(1).
func (f *systemFSM) Snapshot() (raft.FSMSnapshot, error) {
	return &systemSnapshot{snap: f.store.Snapshot()}, nil
}

// Restore implements raft.FSM: all or nothing.
func (f *systemFSM) Restore(r io.ReadCloser) error {
	defer r.Close()
	return f.store.Restore(r)
}

type systemSnapshot struct{ snap *broadcast.Snapshot }

// Persist implements raft.FSMSnapshot.
func (s *systemSnapshot) Persist(sink raft.SnapshotSink) error {
	failpoint.Hit("cluster.system-snapshot.begin")
	if err := s.snap.Write(sink); err != nil {
		cerr := sink.Cancel()
		return fmt.Errorf("writing the system snapshot: %w (cancel: %v)", err, cerr)
	}
	failpoint.Hit("cluster.system-snapshot.written")
	return sink.Close()
}

// Release implements raft.FSMSnapshot.
func (s *systemSnapshot) Release() {}

func isFormatVersion(err error) bool { return errors.Is(err, base.ErrFormatVersion) }
