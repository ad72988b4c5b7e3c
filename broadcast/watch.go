package broadcast

import (
	"context"
	"fmt"
	"strings"

	"github.com/keelstate/keelstate/internal/base"
)

// EventKind says what happened to a key.
type EventKind uint8

// The kinds of events.
const (
	EventPut    EventKind = 1
	EventDelete EventKind = 2
)

// Event is the change of one key by one command.
type Event struct {
	Kind EventKind
	Key  string
	// Value is the new value, nil for a delete. It must not be modified.
	Value    []byte
	Revision base.Revision
	// CreateRevision is the revision that created the key; 0 for a delete.
	CreateRevision base.Revision
}

// Batch is all that one command changed (BC6), in key order.
type Batch struct {
	Revision base.Revision
	Events   []Event
}

// history is the ring of the newest changes.
//
// Invariant: batches[head+i] is that of revision floor+1+i, and the last one
// is that of the store's revision.
type history struct {
	batches []Batch
	head    int
	// floor is the newest revision that is not kept.
	floor  base.Revision
	events int
	bytes  int
}

func (b *Batch) size() int {
	n := 0
	for i := range b.Events {
		n += len(b.Events[i].Key) + len(b.Events[i].Value)
	}
	return n
}

func (h *history) len() int { return len(h.batches) - h.head }

func (h *history) last() base.Revision { return h.floor + base.Revision(h.len()) }

func (h *history) add(b Batch, opts *Options) {
	h.batches = append(h.batches, b)
	h.events += len(b.Events)
	h.bytes += b.size()
	for h.len() > 1 && (h.events > opts.HistoryEvents || h.bytes > opts.HistoryBytes) {
		h.drop()
	}
}

// drop forgets the oldest batch.
func (h *history) drop() {
	b := &h.batches[h.head]
	h.events -= len(b.Events)
	h.bytes -= b.size()
	*b = Batch{}
	h.head++
	h.floor++
	// Move what is left only when the dead half is the larger: O(1) amortised.
	if h.head > 32 && h.head > h.len() {
		h.batches = append(h.batches[:0:0], h.batches[h.head:]...)
		h.head = 0
	}
}

func (h *history) dropThrough(rev base.Revision) {
	for h.floor < rev && h.len() > 0 {
		h.drop()
	}
}

// between returns the batches after one revision, through another, at most n.
// The result is shared and must not be modified.
func (h *history) between(after, through base.Revision, n int) []Batch {
	from := h.head + int(after-h.floor)
	to := h.head + int(min(through, h.last())-h.floor)
	if to-from > n {
		to = from + n
	}
	return h.batches[from:to]
}

// Changes returns what happened to keys with the prefix after one revision,
// through another that the map must have reached. base.ErrCompacted says that
// the history does not reach back, or that the revisions are not of this
// history; the caller then needs a full copy.
func (s *Store) Changes(prefix string, after, through base.Revision) ([]Batch, error) {
	if after >= through {
		return nil, nil
	}
	s.mu.Lock()
	h := &s.mu.history
	if after < h.floor || through > h.last() {
		floor, last := h.floor, h.last()
		s.mu.Unlock()
		return nil, fmt.Errorf("reading changes %d to %d, kept are %d to %d: %w", after+1, through, floor+1, last, base.ErrCompacted)
	}
	all := append([]Batch(nil), h.between(after, through, h.len())...)
	s.mu.Unlock()
	out := all[:0]
	for _, b := range all {
		if b = b.filter(prefix); len(b.Events) > 0 {
			out = append(out, b)
		}
	}
	return out, nil
}

// filter returns the part of the batch under the prefix. Events are in key
// order, so it is one run of them and nothing is copied.
func (b Batch) filter(prefix string) Batch {
	lo := 0
	for lo < len(b.Events) && !strings.HasPrefix(b.Events[lo].Key, prefix) {
		lo++
	}
	hi := lo
	for hi < len(b.Events) && strings.HasPrefix(b.Events[hi].Key, prefix) {
		hi++
	}
	return Batch{Revision: b.Revision, Events: b.Events[lo:hi:hi]}
}

// What a watcher takes from the history at a time: the batches it looks at under
// the lock, and the bytes after which it takes no further one.
const (
	pollBatches = 64
	pollBytes   = 1 << 20
)

// Watcher delivers the changes of the keys with one prefix. It is a cursor into
// the store's history and needs no closing. It is for one goroutine.
type Watcher struct {
	store  *Store
	ctx    context.Context
	prefix string
	// cursor is the newest revision that is delivered or was skipped since it
	// does not concern the prefix.
	cursor base.Revision
	// seen is the newest revision that the store was known to have reached; a
	// store below it was restored to something older.
	seen base.Revision
	// pending is a part of the history behind the cursor, not yet filtered.
	pending []Batch
	err     error
}

// Watch returns a watcher of the changes that follow revision after. The usual
// way is a Snapshot, and a Watch from its revision. A revision that the map has
// not reached yet is fine. The context ends Next, it costs nothing else.
func (s *Store) Watch(ctx context.Context, prefix string, after base.Revision) (*Watcher, error) {
	w := &Watcher{store: s, ctx: ctx, prefix: prefix, cursor: after}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := w.checkLocked(); err != nil {
		return nil, err
	}
	return w, nil
}

// Revision is how far the watcher has come: every change of the prefix up to
// and including it was delivered.
func (w *Watcher) Revision() base.Revision { return w.cursor }

// Next returns the next batch of changes; it waits for one. Its error is the
// context's, base.ErrClosed, or base.ErrCompacted when the watcher was so slow
// that the history has left it behind or the store was restored past it. After
// an error of the store the watcher stays as it is: broken.
func (w *Watcher) Next() (Batch, error) {
	for {
		if err := w.ctx.Err(); err != nil {
			return Batch{}, context.Cause(w.ctx)
		}
		b, ok, changed, err := w.poll()
		if ok || err != nil {
			return b, err
		}
		select {
		case <-changed:
		case <-w.ctx.Done():
			return Batch{}, context.Cause(w.ctx)
		}
	}
}

// Poll is Next without the wait: ok is false if there is nothing yet.
func (w *Watcher) Poll() (b Batch, ok bool, err error) {
	b, ok, _, err = w.poll()
	return b, ok, err
}

// poll returns the next batch, or the channel that the next publish closes.
func (w *Watcher) poll() (Batch, bool, <-chan struct{}, error) {
	for {
		for len(w.pending) > 0 {
			b := w.pending[0].filter(w.prefix)
			w.cursor = b.Revision
			w.pending = w.pending[1:]
			if len(b.Events) > 0 {
				return b, true, nil, nil
			}
		}
		w.pending = nil
		changed, err := w.refill()
		if err != nil || changed != nil {
			return Batch{}, false, changed, err
		}
	}
}

// refill takes the next part of the history, or the channel to wait on. It
// copies the headers of the batches: the ring clears what it drops.
func (w *Watcher) refill() (<-chan struct{}, error) {
	if w.err != nil {
		return nil, w.err
	}
	s := w.store
	s.mu.Lock()
	defer s.mu.Unlock()
	if w.err = w.checkLocked(); w.err != nil {
		return nil, w.err
	}
	h := &s.mu.history
	if w.cursor >= h.last() {
		return s.changedLocked(), nil
	}
	size := 0
	for _, b := range h.between(w.cursor, h.last(), pollBatches) {
		w.pending = append(w.pending, b)
		if size += b.size(); size > pollBytes {
			break
		}
	}
	return nil, nil
}

// checkLocked tells whether the watcher can go on from the history.
func (w *Watcher) checkLocked() error {
	h := &w.store.mu.history
	if w.store.mu.closed {
		return fmt.Errorf("watching %q: %w", w.prefix, base.ErrClosed)
	}
	if w.cursor < h.floor || h.last() < w.seen {
		return fmt.Errorf("watching %q after revision %d, kept are %d to %d: %w", w.prefix, w.cursor, h.floor+1, h.last(), base.ErrCompacted)
	}
	w.seen = h.last()
	return nil
}
