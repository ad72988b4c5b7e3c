package raftfsm

import (
	"errors"
	"fmt"
	"io"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
)

// Hooks is what the owner of a replica does about snapshots.
type Hooks struct {
	// Snapshot returns a snapshot of what the machine has applied. It runs on
	// raft's FSM goroutine and must return at once; work goes into Persist.
	Snapshot func() (raft.FSMSnapshot, error)
	// Restore makes the machine hold the state that the manifest names, by
	// Machine.Swap. The files are local already. It runs on raft's FSM goroutine
	// in place of ApplyBatch.
	Restore func(manifest io.ReadCloser) error
}

// Adapter gives a Machine to raft. The response of a command's future is an
// *Outcome, that of a configuration an *Outcome too.
type Adapter struct {
	machine *Machine
	hooks   Hooks
	entries []Entry // scratch of ApplyBatch
}

var (
	_ raft.FSM                = (*Adapter)(nil)
	_ raft.BatchingFSM        = (*Adapter)(nil)
	_ raft.ConfigurationStore = (*Adapter)(nil)
)

// NewAdapter returns the raft.FSM of a machine.
func NewAdapter(m *Machine, h Hooks) *Adapter { return &Adapter{machine: m, hooks: h} }

// Machine returns the adapted machine.
func (a *Adapter) Machine() *Machine { return a.machine }

// Apply implements raft.FSM. Raft calls ApplyBatch instead.
func (a *Adapter) Apply(l *raft.Log) any { return a.ApplyBatch([]*raft.Log{l})[0] }

// ApplyBatch implements raft.BatchingFSM.
func (a *Adapter) ApplyBatch(logs []*raft.Log) []any {
	a.entries = a.entries[:0]
	for _, l := range logs {
		e := Entry{Index: l.Index, Term: l.Term}
		switch l.Type {
		case raft.LogCommand:
			e.Command = nonNil(l.Data)
		case raft.LogConfiguration:
			e.Configuration = nonNil(l.Data)
		}
		a.entries = append(a.entries, e)
	}
	outcomes := a.machine.ApplyBatch(a.entries)
	clear(a.entries)
	out := make([]any, len(outcomes))
	for i := range outcomes {
		out[i] = &outcomes[i]
	}
	return out
}

// nonNil keeps an empty command a command, which is then refused as corrupt,
// and not an entry without one.
func nonNil(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

// StoreConfiguration implements raft.ConfigurationStore. Raft sends
// configurations through ApplyBatch, where they come with their term.
func (a *Adapter) StoreConfiguration(index uint64, c raft.Configuration) {
	_, term := a.machine.Applied()
	a.machine.ApplyBatch([]Entry{{Index: index, Term: term, Configuration: raft.EncodeConfiguration(c)}})
}

// Snapshot implements raft.FSM.
func (a *Adapter) Snapshot() (raft.FSMSnapshot, error) {
	if err := a.machine.Err(); err != nil {
		return nil, fmt.Errorf("snapshotting a stopped state machine: %w", err)
	}
	if a.hooks.Snapshot == nil {
		return nil, fmt.Errorf("snapshotting: no hook: %w", base.ErrUnsupported)
	}
	return a.hooks.Snapshot()
}

// Restore implements raft.FSM.
func (a *Adapter) Restore(manifest io.ReadCloser) error {
	if a.hooks.Restore == nil {
		return errors.Join(fmt.Errorf("restoring: no hook: %w", base.ErrUnsupported), manifest.Close())
	}
	return a.hooks.Restore(manifest)
}

// RaftConfiguration decodes the newest configuration that m has applied. The
// index is 0 if there was none.
func RaftConfiguration(m *Machine) (index uint64, c raft.Configuration, err error) {
	index, raw := m.Configuration()
	if index == 0 {
		return 0, raft.Configuration{}, nil
	}
	// raft panics on bytes that are no configuration.
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("decoding configuration of index %d: %v: %w", index, r, base.ErrCorrupt)
		}
	}()
	return index, raft.DecodeConfiguration(raw), nil
}
