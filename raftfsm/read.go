package raftfsm

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// Header says what a shard is at one instant. It never changes.
type Header struct {
	Group                     base.GroupID
	Birth                     base.Birth
	Range                     keygroup.Range
	M                         int // 0 before Init
	Epoch                     base.Epoch
	Incarnation               base.Incarnation
	AppliedIndex, AppliedTerm uint64
	ClockMs, Sequence         uint64
	Barrier                   uint64
	// Forgotten is the newest system revision of a Forget.
	Forgotten base.Revision
	// Fence is the operation that rolls the shard back and has stopped its writes,
	// 0 if none.
	Fence uint64
	// RolledBack is the newest operation that has rolled the shard back, and
	// RollbackIndex the index of its entry: what is before it in the log leads to a
	// state that is gone. 0 if there was none.
	RolledBack, RollbackIndex uint64
	// Sessions is the number of sessions that the shard remembers; it is not of
	// the same instant in a ReadView that was taken during a write.
	Sessions int
	// Undropped is the number of dropped states whose family still takes space:
	// they go with the first entry that is applied after the drop is durable.
	Undropped int
	// Dropped is the number of states that were ever dropped.
	Dropped int

	core               core
	decls              declarations
	ref                *storeRef
	configurationIndex uint64
	configuration      []byte
}

// Declaration returns a declared state, nil if id is not declared.
func (h *Header) Declaration(id engine.FamilyID) *state.Declaration {
	if d := h.decls[id]; d != nil {
		return &d.Declaration
	}
	return nil
}

// Declarations returns the declared states in order of their ids.
func (h *Header) Declarations() []*state.Declaration {
	out := make([]*state.Declaration, 0, len(h.decls))
	for _, id := range sortedIDs(h.decls) {
		out = append(out, &h.decls[id].Declaration)
	}
	return out
}

// Token is the position of the header.
func (h *Header) Token() Token {
	return Token{Incarnation: h.Incarnation, Group: h.Group, Birth: h.Birth, Sequence: h.Sequence, Barrier: h.Barrier}
}

// storeRef counts who still needs a store: the machine and its views.
type storeRef struct {
	store    engine.Store
	refs     int // under Machine.mu
	released func(engine.Store)
}

func (m *Machine) acquire() (*storeRef, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.ref == nil {
		return nil, fmt.Errorf("state machine: %w", base.ErrClosed)
	}
	m.mu.ref.refs++
	return m.mu.ref, nil
}

func (m *Machine) release(ref *storeRef) {
	m.mu.Lock()
	ref.refs--
	last := ref.refs == 0
	m.mu.Unlock()
	if last {
		ref.released(ref.store)
	}
}

// Store returns the current store and a function that must be called when it is
// not used any more; until then a Swap or Close does not close it. The caller
// may flush, checkpoint, compact and read it, but not write to it.
func (m *Machine) Store() (engine.Store, func(), error) {
	ref, err := m.acquire()
	if err != nil {
		return nil, nil, err
	}
	return ref.store, sync.OnceFunc(func() { m.release(ref) }), nil
}

// Header returns the newest published header; never nil.
func (m *Machine) Header() *Header { return m.header.Load() }

// Applied returns index and term of the newest entry whose batch is written.
func (m *Machine) Applied() (index, term uint64) {
	h := m.header.Load()
	return h.AppliedIndex, h.AppliedTerm
}

// Birth returns the random identity that Init gave the shard, 0 before Init.
func (m *Machine) Birth() base.Birth { return m.header.Load().Birth }

// Configuration returns the newest Raft configuration that was applied, in
// raft's encoding, and its index; nil and 0 if there was none.
func (m *Machine) Configuration() (index uint64, raw []byte) {
	h := m.header.Load()
	return h.configurationIndex, h.configuration
}

// DurableIndex returns the applied index as a crash at this moment would leave
// it: the Raft log may be cut up to it (W2). Calling it after a flush also lets
// the families of dropped states go.
func (m *Machine) DurableIndex() (uint64, error) {
	store, release, err := m.Store()
	if err != nil {
		return 0, err
	}
	defer release()
	index, err := durableIndex(store)
	if err != nil {
		return 0, err
	}
	for {
		old := m.durable.Load()
		if index <= old || m.durable.CompareAndSwap(old, index) {
			return index, nil
		}
	}
}

// AppliedIn returns the index up to which a store that no machine has holds a
// shard; 0 if it holds none.
func AppliedIn(store engine.Store) (uint64, error) {
	v, ok, err := store.Get(engine.MetaFamily, coreKey)
	if err != nil || !ok {
		return 0, err
	}
	c, err := parseCore(v)
	if err != nil {
		return 0, fmt.Errorf("reading the applied index: %w", err)
	}
	return c.appliedIndex, nil
}

func durableIndex(store engine.Store) (uint64, error) {
	v, ok, err := store.DurableGet(coreKey)
	if err != nil || !ok {
		return 0, err
	}
	c, err := parseCore(v)
	if err != nil {
		return 0, fmt.Errorf("reading durable index: %w", err)
	}
	return c.appliedIndex, nil
}

// ReadView is the shard's data and header at one instant. Close it; until then
// the store that it reads stays open.
type ReadView struct {
	*Header
	machine *Machine
	view    engine.View
	layout  state.Layout
	close   sync.Once
	ref     *storeRef
}

// notServing is what a reader gets from a machine that stopped for the reason
// given.
func notServing(err error) error {
	if errors.Is(err, base.ErrClosed) {
		return err
	}
	return fmt.Errorf("%w: %w", base.ErrDamaged, err)
}

// ReadView returns the present instant, if the shard has the given epoch and
// incarnation in it; epoch 0 stands for any epoch.
func (m *Machine) ReadView(epoch base.Epoch, incarnation base.Incarnation) (*ReadView, error) {
	v, err := m.View()
	if err != nil {
		return nil, err
	}
	switch {
	case !v.core.initialised:
		err = base.ErrNotReady
	case v.core.rollback.pending():
		err = v.core.fenced() // all shards open together
	case v.Incarnation != incarnation:
		err = v.core.otherIncarnation(incarnation)
	case epoch != 0 && v.Epoch != epoch:
		err = &base.Error{Cause: base.ErrStaleEpoch, Epoch: v.Epoch, Ordinal: -1}
	}
	if err != nil {
		v.Close()
		return nil, err
	}
	return v, nil
}

// View returns the present instant whatever epoch and incarnation it has.
func (m *Machine) View() (*ReadView, error) {
	if err := m.failed(); err != nil {
		return nil, fmt.Errorf("opening read view: %w", notServing(err))
	}
	for range 2 {
		before := m.writing.Load()
		if before%2 != 0 {
			continue
		}
		h := m.header.Load()
		v, err := m.viewOf(h)
		if err != nil {
			return nil, err
		}
		if m.writing.Load() == before {
			return v, nil
		}
		v.Close()
	}
	return m.viewDuringWrite()
}

func (m *Machine) viewOf(h *Header) (*ReadView, error) {
	ref, err := m.acquire()
	if err != nil {
		return nil, err
	}
	view, err := ref.store.NewView()
	if err != nil {
		m.release(ref)
		return nil, fmt.Errorf("opening read view: %w", err)
	}
	return &ReadView{Header: h, machine: m, view: view, layout: state.Layout{M: h.M}, ref: ref}, nil
}

// viewDuringWrite takes the header from the view itself, because a batch that is
// being written shows in the store before it shows in the published header.
func (m *Machine) viewDuringWrite() (*ReadView, error) {
	h := m.header.Load()
	v, err := m.viewOf(h)
	if err != nil {
		return nil, err
	}
	if err := v.reload(); err != nil {
		v.Close()
		return nil, fmt.Errorf("opening read view: %w", err)
	}
	return v, nil
}

func (v *ReadView) reload() error {
	raw, ok, err := v.view.Get(engine.MetaFamily, coreKey)
	if err != nil {
		return err
	}
	var c core
	if ok {
		if c, err = parseCore(raw); err != nil {
			return err
		}
	}
	h := *v.Header
	if h.ref != v.ref || h.core.generation != c.generation {
		l, err := loadMeta(v.view)
		if err != nil {
			return err
		}
		layout := state.Layout{M: c.m}
		h.decls = make(declarations, len(l.decls))
		for _, id := range sortedIDs(l.decls) {
			d := &declared{Declaration: *l.decls[id]}
			d.options = layout.FamilyOptions(&d.Declaration)
			h.decls[id] = d
		}
	}
	h.setCore(c)
	v.Header, v.layout = &h, state.Layout{M: c.m}
	return nil
}

// Close releases the view.
func (v *ReadView) Close() {
	v.close.Do(func() {
		v.view.Close()
		v.machine.release(v.ref)
	})
}

// Engine is the view itself, for dumps and checks.
func (v *ReadView) Engine() engine.Reader { return v.view }

// Layout is the layout of the shard's states.
func (v *ReadView) Layout() state.Layout { return v.layout }

// resolve checks a query against the header of the same instant.
func (v *ReadView) resolve(q *state.Query) (*state.Declaration, error) {
	if !v.Range.Contains(q.Group) {
		return nil, &base.Error{Cause: base.ErrWrongRange, Epoch: v.Epoch, Ordinal: -1,
			Hint: fmt.Sprintf("group %d is outside %s", q.Group, v.Range)}
	}
	d := v.Declaration(q.State)
	if d == nil {
		return nil, undeclared(q.State, -1, "state")
	}
	return d, nil
}

// Read answers one query.
func (v *ReadView) Read(q *state.Query) (state.Answer, error) {
	d, err := v.resolve(q)
	if err != nil {
		return state.Answer{}, err
	}
	return v.layout.Read(v.view, d, q)
}

// ReadMany answers each query or says why not.
func (v *ReadView) ReadMany(qs []*state.Query) ([]state.Answer, []error) {
	answers, errs := make([]state.Answer, len(qs)), make([]error, len(qs))
	reads := make([]state.ReadRequest, 0, len(qs))
	at := make([]int, 0, len(qs))
	for i, q := range qs {
		d, err := v.resolve(q)
		if err != nil {
			errs[i] = err
			continue
		}
		reads, at = append(reads, state.ReadRequest{D: d, Q: q}), append(at, i)
	}
	got, failures := v.layout.ReadMany(v.view, reads)
	for j, i := range at {
		answers[i], errs[i] = got[j], failures[j]
	}
	return answers, errs
}

// Scan returns a page of a scan and the cursor of the next, nil at the end.
func (v *ReadView) Scan(q *state.ScanQuery) ([]state.ScanItem, []byte, error) {
	d, err := v.scannable(q.State, q.Range)
	if err != nil {
		return nil, nil, err
	}
	return v.layout.Scan(v.view, d, q)
}

// Count estimates the number of keys of a state in a range of key groups.
func (v *ReadView) Count(id engine.FamilyID, r keygroup.Range) (uint64, error) {
	d, err := v.scannable(id, r)
	if err != nil {
		return 0, err
	}
	return v.layout.Count(v.view, d, r)
}

func (v *ReadView) scannable(id engine.FamilyID, r keygroup.Range) (*state.Declaration, error) {
	if r.Empty() || !v.Range.ContainsRange(r) {
		return nil, &base.Error{Cause: base.ErrWrongRange, Epoch: v.Epoch, Ordinal: -1,
			Hint: fmt.Sprintf("groups %s are not within %s", r, v.Range)}
	}
	d := v.Declaration(id)
	if d == nil {
		return nil, undeclared(id, -1, "state")
	}
	return d, nil
}

// Hash returns the content hash of a key group over all declared states.
func (v *ReadView) Hash(g keygroup.Group) (state.Hash128, error) {
	if !v.Range.Contains(g) {
		return state.Hash128{}, &base.Error{Cause: base.ErrWrongRange, Epoch: v.Epoch, Ordinal: -1}
	}
	return v.layout.HashGroup(v.view, v.Declarations(), g)
}

// HashAll returns the content hashes of all key groups of the view, in order.
func (v *ReadView) HashAll(ctx context.Context) ([]state.Hash128, error) {
	return v.layout.HashGroups(ctx, v.view, v.Declarations(), v.Range)
}

// WaitApplied waits until the entry of the given index is applied, the context
// ends, or the machine stops.
func (m *Machine) WaitApplied(ctx context.Context, index uint64) error {
	if m.header.Load().AppliedIndex >= index {
		return nil
	}
	w := m.waits.add(index)
	// The index may have been applied before the waiter was added.
	if m.header.Load().AppliedIndex >= index {
		m.waits.remove(w)
		return nil
	}
	if err := m.failed(); err != nil {
		m.waits.remove(w)
		return fmt.Errorf("waiting for index %d: %w", index, notServing(err))
	}
	select {
	case err := <-w.done:
		if err != nil {
			return fmt.Errorf("waiting for index %d: %w", index, notServing(err))
		}
		return nil
	case <-ctx.Done():
		m.waits.remove(w)
		return fmt.Errorf("waiting for index %d: %w", index, ctx.Err())
	}
}

// waiter waits for an index; done gets exactly one value, and has room for it.
type waiter struct {
	index uint64
	done  chan error
}

type waitList struct {
	mu  sync.Mutex
	set map[*waiter]struct{}
}

func (l *waitList) init() { l.set = make(map[*waiter]struct{}) }

func (l *waitList) add(index uint64) *waiter {
	w := &waiter{index: index, done: make(chan error, 1)}
	l.mu.Lock()
	l.set[w] = struct{}{}
	l.mu.Unlock()
	return w
}

func (l *waitList) remove(w *waiter) {
	l.mu.Lock()
	delete(l.set, w)
	l.mu.Unlock()
}

func (l *waitList) wake(applied uint64) {
	l.mu.Lock()
	for w := range l.set { // the order in which they wake does not matter
		if w.index <= applied {
			w.done <- nil
			delete(l.set, w)
		}
	}
	l.mu.Unlock()
}

func (l *waitList) fail(err error) {
	l.mu.Lock()
	for w := range l.set {
		w.done <- err
		delete(l.set, w)
	}
	l.mu.Unlock()
}
