package cluster

import (
	"fmt"
	"runtime"
	"strings"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/cluster/raftlog"
	"github.com/keelstate/keelstate/internal/base"
)

// hashicorp/raft panics when it cannot read its log or store its term: one
// replica's bad sector would end the whole process, with a stack instead of a
// reason. By the time such an error is known the group has been asked to stop
// (StoppingStore, TermGuard), so the goroutine of raft that would panic is ended
// instead: its deferred functions run, its wait group is told, and the shutdown
// that is under way finds it gone.

// quietLogs keeps errors of reads from raft.
type quietLogs struct {
	*raftlog.StoppingStore
	g *group
}

// GetLog implements raft.LogStore. That the index is not there is an answer.
func (l quietLogs) GetLog(index uint64, out *raft.Log) error {
	err := l.StoppingStore.GetLog(index, out)
	if err != nil && err != raft.ErrLogNotFound && calledBy("(*Raft).processLogs") { //nolint:errorlint // raft's contract is identity
		// Others that read, replication above all, take the error and clean up.
		l.g.leaveRaft()
	}
	return err
}

// calledBy says whether a method of raft is among the callers.
func calledBy(method string) bool {
	var pcs [64]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs[:])])
	for {
		f, more := frames.Next()
		if strings.HasSuffix(f.Function, "hashicorp/raft."+method) {
			return true
		}
		if !more {
			return false
		}
	}
}

// quietTerms keeps errors of writes from raft.
type quietTerms struct {
	*raftlog.TermGuard
	g *group
}

// SetUint64 implements raft.StableStore.
func (t quietTerms) SetUint64(key []byte, v uint64) error {
	err := t.TermGuard.SetUint64(key, v)
	if err != nil {
		t.g.leaveRaft()
	}
	return err
}

// leaveRaft ends the calling goroutine if it is one of a raft that has started;
// while raft starts, the caller is ours and newRaft takes the panic.
func (g *group) leaveRaft() {
	g.life.Lock()
	started := g.life.started
	g.life.Unlock()
	if started {
		runtime.Goexit()
	}
}

// newRaft is raft.NewRaft with an error in place of a panic.
func newRaft(conf *raft.Config, fsm raft.FSM, logs raft.LogStore, stable raft.StableStore,
	snaps raft.SnapshotStore, wire raft.Transport) (r *raft.Raft, err error) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case error:
			r, err = nil, p
		default:
			r, err = nil, fmt.Errorf("%v: %w", p, base.ErrInternal)
		}
	}()
	return raft.NewRaft(conf, fsm, logs, stable, snaps, wire)
}
