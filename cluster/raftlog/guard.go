package raftlog

import (
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
)

// The keys under which hashicorp/raft keeps its term, its vote's term and for
// whom it voted.
const (
	keyCurrentTerm  = "CurrentTerm"
	keyLastVoteTerm = "LastVoteTerm"
	keyLastVoteCand = "LastVoteCand"
)

// TermGuard is a StableStore that never lets a term go back (rules R1, RL10).
// hashicorp/raft with a heartbeat fast path can write an older term over a newer
// one; a replica that did so has broken its promise, so it must stop.
//
// On a refused write, and on any failed one, the guard calls stop and returns an
// error. hashicorp/raft panics when storing its term fails; stop is called first.
type TermGuard struct {
	store raft.StableStore
	group base.GroupID
	stop  func(error)
	// highest is at least every term that was ever stored or voted in.
	highest atomic.Uint64
	// mu keeps check and write of one term together, so that two writers cannot
	// pass the check in one order and reach the store in the other.
	mu sync.Mutex
}

var _ raft.StableStore = (*TermGuard)(nil)

// NewTermGuard reads the highest term from the store. stop must not block.
func NewTermGuard(store raft.StableStore, group base.GroupID, stop func(error)) (*TermGuard, error) {
	t := &TermGuard{store: store, group: group, stop: stop}
	for _, key := range []string{keyCurrentTerm, keyLastVoteTerm} {
		v, err := store.GetUint64([]byte(key))
		if err != nil && err.Error() != base.ErrNotFound.Error() {
			return nil, fmt.Errorf("reading %s of %s: %w", key, group, err)
		}
		if err == nil {
			t.highest.Store(max(t.highest.Load(), v))
		}
	}
	return t, nil
}

// HighestTerm is the highest term that was stored or voted in, counting one whose
// write is under way. It takes no lock: the read path polls it.
func (t *TermGuard) HighestTerm() uint64 { return t.highest.Load() }

// guarded writes a term if it is not below the highest.
func (t *TermGuard) guarded(key []byte, term uint64, write func() error) error {
	if k := string(key); k != keyCurrentTerm && k != keyLastVoteTerm {
		return t.stopOn(write())
	}
	t.mu.Lock()
	err := t.guardedLocked(key, term, write)
	t.mu.Unlock()
	return t.stopOn(err)
}

func (t *TermGuard) guardedLocked(key []byte, term uint64, write func() error) error {
	if high := t.highest.Load(); term < high {
		return fmt.Errorf("storing %s %d of %s after term %d: the replica would break its promise: %w", key, term, t.group, high, base.ErrDamaged)
	}
	// Raised before the write: a reader must not miss a term that is about to
	// be promised.
	t.highest.Store(term)
	if err := failpoint.Err("raftlog.term.before-store"); err != nil {
		return err
	}
	err := write()
	failpoint.Hit("raftlog.term.after-store")
	return err
}

func (t *TermGuard) stopOn(err error) error {
	if err != nil {
		t.stop(err)
	}
	return err
}

// Set implements raft.StableStore.
func (t *TermGuard) Set(key, val []byte) error {
	if failpoint.Enabled && string(key) == keyLastVoteCand {
		// Between the two halves of a vote: its term is stored, for whom is not.
		failpoint.Hit("raftlog.vote.before-candidate")
	}
	write := func() error { return t.store.Set(key, val) }
	if len(val) == 8 {
		return t.guarded(key, binary.BigEndian.Uint64(val), write)
	}
	return t.stopOn(write())
}

// SetUint64 implements raft.StableStore.
func (t *TermGuard) SetUint64(key []byte, val uint64) error {
	return t.guarded(key, val, func() error { return t.store.SetUint64(key, val) })
}

// SetTerm stores the term at which a group begins that is made of files.
func (t *TermGuard) SetTerm(term uint64) error { return t.SetUint64([]byte(keyCurrentTerm), term) }

// Get implements raft.StableStore.
func (t *TermGuard) Get(key []byte) ([]byte, error) { return t.store.Get(key) }

// GetUint64 implements raft.StableStore.
func (t *TermGuard) GetUint64(key []byte) (uint64, error) { return t.store.GetUint64(key) }

// StoppingStore is a LogStore that calls stop on every error of a write, and on
// damage found by a read: raft only logs these and goes on (rule W2).
type StoppingStore struct {
	store raft.LogStore
	stop  func(error)
}

var (
	_ raft.LogStore          = (*StoppingStore)(nil)
	_ raft.MonotonicLogStore = (*StoppingStore)(nil)
)

// NewStoppingStore wraps a store. stop must not block.
func NewStoppingStore(store raft.LogStore, stop func(error)) *StoppingStore {
	return &StoppingStore{store: store, stop: stop}
}

func (s *StoppingStore) stopOn(err error) error {
	if err != nil {
		s.stop(err)
	}
	return err
}

// IsMonotonic implements raft.MonotonicLogStore.
func (s *StoppingStore) IsMonotonic() bool {
	m, ok := s.store.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}

// FirstIndex implements raft.LogStore.
func (s *StoppingStore) FirstIndex() (uint64, error) { return s.store.FirstIndex() }

// LastIndex implements raft.LogStore.
func (s *StoppingStore) LastIndex() (uint64, error) { return s.store.LastIndex() }

// GetLog implements raft.LogStore. An index that the store does not hold is no
// reason to stop.
func (s *StoppingStore) GetLog(index uint64, out *raft.Log) error {
	err := s.store.GetLog(index, out)
	if err == nil || err == raft.ErrLogNotFound { //nolint:errorlint // raft's contract is identity
		return err
	}
	return s.stopOn(err)
}

// StoreLog implements raft.LogStore.
func (s *StoppingStore) StoreLog(e *raft.Log) error { return s.stopOn(s.store.StoreLog(e)) }

// StoreLogs implements raft.LogStore.
func (s *StoppingStore) StoreLogs(logs []*raft.Log) error { return s.stopOn(s.store.StoreLogs(logs)) }

// DeleteRange implements raft.LogStore.
func (s *StoppingStore) DeleteRange(lo, hi uint64) error {
	return s.stopOn(s.store.DeleteRange(lo, hi))
}
