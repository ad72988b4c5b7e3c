package broadcast

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/tidwall/btree"

	"github.com/keelstate/keelstate/internal/base"
)

// Options bound what a store keeps beside the map. They are a node's own: they
// have no influence on the state (BC1).
type Options struct {
	// HistoryEvents bounds the changes that are kept for watchers; default
	// 65536. The newest change is always kept, whatever its size.
	HistoryEvents int
	// HistoryBytes bounds the keys and values of those changes; default
	// 32 MiB.
	HistoryBytes int
}

// EnsureDefaults replaces zero fields by their defaults.
func (o *Options) EnsureDefaults() {
	if o.HistoryEvents <= 0 {
		o.HistoryEvents = 1 << 16
	}
	if o.HistoryBytes <= 0 {
		o.HistoryBytes = 32 << 20
	}
}

// Store is the replicated map on one node. Use New.
type Store struct {
	opts Options

	// applyMu excludes Apply and Restore from each other. It guards tree, the
	// writer's own tree: what is published shares its nodes, copy on write.
	applyMu sync.Mutex
	tree    *tree

	// view is the newest published state; replaced only under mu, so that the
	// history under mu and the view agree.
	view atomic.Pointer[Snapshot]

	mu struct {
		sync.Mutex
		history history
		// changed is closed, and dropped, when anything was applied. Made by
		// the first waiter.
		changed chan struct{}
		closed  bool
	}
}

// New returns an empty store: index, revision and clock are zero.
func New(opts Options) *Store {
	opts.EnsureDefaults()
	s := &Store{opts: opts, tree: btree.NewMap[string, *Entry](treeDegree)}
	s.view.Store(&Snapshot{tree: s.tree.Copy()})
	return s
}

// Snapshot returns the newest state. It takes no lock and copies nothing.
func (s *Store) Snapshot() *Snapshot { return s.view.Load() }

// Get returns the newest entry of key, or nil, and the revision of the map
// that this answer shows.
func (s *Store) Get(key string) (*Entry, base.Revision) {
	v := s.view.Load()
	return v.Get(key), v.revision
}

// Range is Snapshot().Range.
func (s *Store) Range(prefix, from string, limit int) Page {
	return s.view.Load().Range(prefix, from, limit)
}

// Result says what a command did.
type Result struct {
	// Index is the command's log index.
	Index uint64
	// Skipped says that the command was at or below the applied index and
	// nothing was done; the other fields tell the state as it is.
	Skipped bool
	// Succeeded says that all conditions held.
	Succeeded bool
	// FailedCondition is the first condition that did not hold, or -1.
	FailedCondition int
	// Changed says that the command made the revision Revision.
	Changed bool
	// Revision is the version of the map after the command.
	Revision base.Revision
	// Clock is the system clock after the command, in milliseconds.
	Clock uint64
}

// Err returns nil if the command succeeded, else base.ErrPrecondition with the
// condition's number as the ordinal.
func (r Result) Err() error {
	if r.Succeeded || r.Skipped {
		return nil
	}
	return &base.Error{
		Cause:   base.ErrPrecondition,
		Field:   fmt.Sprintf("conditions[%d]", r.FailedCondition),
		Ordinal: r.FailedCondition,
	}
}

// Apply executes the committed command at a log index, which must grow; gaps
// are fine. An error says that the command was refused: nothing changed but the
// applied index, the same on every node whose build is the same. A caller that
// gets base.ErrFormatVersion must stop the replica: a newer build applies what
// this one refuses, so going on would let the copies differ.
func (s *Store) Apply(index uint64, cmd []byte) (Result, error) {
	s.applyMu.Lock()
	defer s.applyMu.Unlock()
	old := s.view.Load()
	res := Result{Index: index, FailedCondition: -1, Revision: old.revision, Clock: old.clock}
	if index <= old.index {
		res.Skipped = true
		return res, nil
	}
	next := *old
	next.index = index
	c, err := DecodeCommand(cmd)
	if err == nil && c.Kind == CommandCompact && c.Compact > old.revision {
		err = base.Invalid("compact.revision", fmt.Sprintf("the map is at revision %d", old.revision))
	}
	if err != nil {
		s.publish(&next, nil)
		return res, fmt.Errorf("applying system command at index %d: %w", index, err)
	}
	next.clock = max(old.clock, c.Stamp)
	next.compacted = max(old.compacted, c.Compact)
	res.Clock = next.clock
	res.FailedCondition = s.firstFailed(c.Conditions)
	res.Succeeded = res.FailedCondition < 0
	var events []Event
	if res.Succeeded {
		events = s.execute(c.Then, old.revision+1)
	}
	if len(events) > 0 {
		next.revision++
		next.tree = s.tree.Copy()
		res.Changed, res.Revision = true, next.revision
	}
	s.publish(&next, events)
	return res, nil
}

// firstFailed returns the first condition that does not hold, or -1.
func (s *Store) firstFailed(conds []Condition) int {
	for i := range conds {
		c := &conds[i]
		e, ok := s.tree.Get(c.Key)
		switch c.Kind {
		case ConditionAbsent:
			ok = !ok
		case ConditionRevision:
			ok = ok && e.ModRevision == c.Revision
		case ConditionValue:
			ok = ok && bytes.Equal(e.Value, c.Value)
		}
		if !ok {
			return i
		}
	}
	return -1
}

// touch is a write to the tree: what stood under the key just before it.
type touch struct {
	key    string
	before *Entry
}

// execute writes the operations to the tree and returns the net changes in key
// order.
func (s *Store) execute(ops []Op, rev base.Revision) []Event {
	touches := make([]touch, 0, len(ops))
	for i := range ops {
		switch op := &ops[i]; op.Kind {
		case OpPut:
			e := &Entry{Value: bytes.Clone(op.Value), CreateRevision: rev, ModRevision: rev}
			if e.Value == nil {
				e.Value = []byte{}
			}
			before, had := s.tree.Get(op.Key)
			if had {
				e.CreateRevision = before.CreateRevision
			}
			s.tree.Set(op.Key, e)
			touches = append(touches, touch{op.Key, before})
		case OpDelete:
			if before, had := s.tree.Delete(op.Key); had {
				touches = append(touches, touch{op.Key, before})
			}
		case OpDeletePrefix:
			first := len(touches)
			s.tree.Ascend(op.Key, func(key string, e *Entry) bool {
				if !strings.HasPrefix(key, op.Key) {
					return false
				}
				touches = append(touches, touch{key, e})
				return true
			})
			for _, t := range touches[first:] {
				s.tree.Delete(t.key)
			}
		}
	}
	return s.netEvents(touches, rev)
}

// netEvents turns the touches into one event per key whose entry differs from
// what it was before the first touch.
func (s *Store) netEvents(touches []touch, rev base.Revision) []Event {
	slices.SortStableFunc(touches, func(a, b touch) int { return strings.Compare(a.key, b.key) })
	events := make([]Event, 0, len(touches))
	for i, t := range touches {
		if i > 0 && touches[i-1].key == t.key {
			continue
		}
		after, exists := s.tree.Get(t.key)
		switch {
		case exists:
			events = append(events, Event{Kind: EventPut, Key: t.key, Value: after.Value, Revision: rev, CreateRevision: after.CreateRevision})
		case t.before != nil:
			events = append(events, Event{Kind: EventDelete, Key: t.key, Revision: rev})
		}
	}
	return events
}

// publish makes next the newest state, keeps its events for watchers and wakes
// whoever waits.
func (s *Store) publish(next *Snapshot, events []Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.view.Store(next)
	if len(events) > 0 {
		s.mu.history.add(Batch{Revision: next.revision, Events: events}, &s.opts)
	}
	s.mu.history.dropThrough(next.compacted)
	s.wakeLocked()
}

func (s *Store) wakeLocked() {
	if s.mu.changed != nil {
		close(s.mu.changed)
		s.mu.changed = nil
	}
}

// changedLocked returns the channel that the next publish closes.
func (s *Store) changedLocked() <-chan struct{} {
	if s.mu.changed == nil {
		s.mu.changed = make(chan struct{})
	}
	return s.mu.changed
}

// WaitForRevision returns when the map has reached rev, or with the context's
// error, or with base.ErrClosed.
func (s *Store) WaitForRevision(ctx context.Context, rev base.Revision) error {
	return s.waitFor(ctx, func(v *Snapshot) bool { return v.revision >= rev })
}

// WaitForIndex returns when the command at the log index has been applied, or
// with the context's error, or with base.ErrClosed.
func (s *Store) WaitForIndex(ctx context.Context, index uint64) error {
	return s.waitFor(ctx, func(v *Snapshot) bool { return v.index >= index })
}

func (s *Store) waitFor(ctx context.Context, reached func(*Snapshot) bool) error {
	for {
		if reached(s.view.Load()) {
			return nil
		}
		s.mu.Lock()
		if s.mu.closed {
			s.mu.Unlock()
			return base.ErrClosed
		}
		if reached(s.view.Load()) {
			s.mu.Unlock()
			return nil
		}
		changed := s.changedLocked()
		s.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Close ends every wait and every watcher with base.ErrClosed. Reads and Apply
// go on working, so that the order of a shutdown does not matter.
func (s *Store) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.closed = true
	s.wakeLocked()
}
