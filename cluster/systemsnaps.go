package cluster

import (
	"fmt"
	"path/filepath"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
)

// retainSystemSnapshots is how many snapshots of the system group are kept.
const retainSystemSnapshots = 2

// systemSnapshots is raft's file store made durable. It syncs the files of a
// snapshot and the directory above, but not the directory that has the files'
// names: after a power loss the newest snapshot may be an empty directory, and the
// log that it replaced is cut.
type systemSnapshots struct {
	*raft.FileSnapshotStore
	dir string
}

func openSystemSnapshots(root, dir string, logger hclog.Logger) (*systemSnapshots, error) {
	if err := makeDirs(root, filepath.Join(dir, "snapshots")); err != nil {
		return nil, err
	}
	files, err := raft.NewFileSnapshotStoreWithLogger(dir, retainSystemSnapshots, logger)
	if err != nil {
		return nil, err
	}
	return &systemSnapshots{FileSnapshotStore: files, dir: filepath.Join(dir, "snapshots")}, nil
}

// Create implements raft.SnapshotStore.
func (s *systemSnapshots) Create(version raft.SnapshotVersion, index, term uint64, c raft.Configuration, configuration uint64, t raft.Transport) (raft.SnapshotSink, error) {
	sink, err := s.FileSnapshotStore.Create(version, index, term, c, configuration, t)
	if err != nil {
		return nil, err
	}
	return &systemSink{SnapshotSink: sink, dir: s.dir}, nil
}

type systemSink struct {
	raft.SnapshotSink
	dir  string
	done bool
}

// Cancel drops the snapshot.
func (k *systemSink) Cancel() error {
	k.done = true
	return k.SnapshotSink.Cancel()
}

// Close publishes the snapshot and makes the names of its files durable. raft cuts
// the log only after it.
func (k *systemSink) Close() error {
	if k.done {
		return nil
	}
	k.done = true
	if err := k.SnapshotSink.Close(); err != nil {
		return err
	}
	if err := syncDir(filepath.Join(k.dir, k.ID())); err != nil {
		return fmt.Errorf("making snapshot %s of the system group durable: %w", k.ID(), err)
	}
	return nil
}
