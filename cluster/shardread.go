package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/raftfsm"
)

// view waits until this leader may serve a read that has arrived now, and
// returns the shard's state of one instant with its epoch checked in it (CL2).
func (r *replica) view(ctx context.Context, route Route) (*raftfsm.ReadView, error) {
	if err := r.healthy(); err != nil {
		return nil, err
	}
	start := time.Now()
	index, err := r.readIndex(ctx)
	if err != nil {
		return nil, err
	}
	if err := r.machine.WaitApplied(ctx, index); err != nil {
		if ctx.Err() != nil {
			return nil, notServed(ctx)
		}
		return nil, err
	}
	r.metrics.readSeconds.Observe(time.Since(start).Seconds())
	return r.machine.ReadView(route.Epoch, route.Incarnation)
}

// declareForRead makes sure that the shard declares a state that a read names:
// one that is declared in the cluster but was never written here is empty, not
// unknown.
func (r *replica) declareForRead(ctx context.Context, route Route, id engine.FamilyID) error {
	v, err := r.node.metaView()
	if err != nil {
		return err
	}
	if v.StateByID(uint32(id)) == nil && v.Revision() < route.MetadataRevision {
		if v, err = r.node.waitMeta(ctx, route.MetadataRevision); err != nil {
			return err
		}
	}
	if v.StateByID(uint32(id)) == nil {
		return undeclared(id)
	}
	if r.machine.Header().Declaration(id) != nil {
		return nil
	}
	if _, err := r.leading(); err != nil {
		return err
	}
	return r.declareAll(ctx, v)
}

// read answers a ReadRequest from one instant.
func (r *replica) read(ctx context.Context, req *ReadRequest) (*ReadReply, error) {
	reply, err := r.answer(ctx, req)
	if err != nil {
		r.metrics.refused(err)
		return nil, r.detailed(r.suspect(err))
	}
	return reply, nil
}

func (r *replica) answer(ctx context.Context, req *ReadRequest) (*ReadReply, error) {
	failed := make([]error, len(req.Queries))
	for i := range req.Queries {
		failed[i] = r.declareForRead(ctx, req.Route, req.Queries[i].State)
		if failed[i] != nil && !errors.Is(failed[i], base.ErrUndeclared) {
			return nil, failed[i]
		}
	}
	v, err := r.view(ctx, req.Route)
	if err != nil {
		return nil, err
	}
	defer v.Close()
	r.metrics.reads.Inc()
	reply := &ReadReply{Token: v.Token()}
	queries := make([]*state.Query, len(req.Queries))
	for i := range req.Queries {
		q := &req.Queries[i]
		if failed[i] != nil {
			continue
		}
		if failed[i] = fillQuery(v.Header, q); failed[i] == nil {
			queries[i] = q
		}
	}
	reply.Answers, err = answerQueries(v.ReadMany, queries, failed, req.Room)
	if err != nil {
		return nil, err
	}
	for _, err := range failed {
		_ = r.suspect(err)
	}
	reply.Errs = failed
	return reply, nil
}

// The queries of one request are read in parts, so that a request for many large
// values cannot take memory without bound before its size is known: the first
// part is small, and the next ones grow while the answers are.
const (
	firstChunk = 4
	maxChunk   = 64
	// chunkBytes is what a part may have, if no answer is larger than the largest
	// so far.
	chunkBytes = 1 << 20
)

// nextChunk is how many queries follow on a part of the given size, the largest
// answer so far having so many bytes.
func nextChunk(last, largest int) int {
	return max(1, min(4*last, maxChunk, chunkBytes/max(largest, 1)))
}

// answerQueries reads those queries that are not failed yet, all from one
// instant, by readMany, and puts what fails into failed. What no longer fits one
// message is refused, query by query. room, if set, may end the read between two
// parts.
func answerQueries(readMany func([]*state.Query) ([]state.Answer, []error), queries []*state.Query, failed []error,
	room func(bytes int) error) ([]state.Answer, error) {
	answers := make([]state.Answer, len(queries))
	var good []*state.Query
	var at []int
	for i, q := range queries {
		if q != nil {
			good, at = append(good, q), append(at, i)
		}
	}
	bytes, largest, chunk := 0, 0, firstChunk
	for lo := 0; lo < len(good); lo += chunk {
		if lo > 0 {
			if bytes > state.MaxMessageBytes {
				for _, i := range at[lo:] {
					failed[i] = &base.Error{Cause: base.ErrTooLarge, Ordinal: -1,
						Hint: fmt.Sprintf("the answers before this one fill a message of %d bytes; read fewer keys at once", state.MaxMessageBytes)}
				}
				break
			}
			if room != nil {
				if err := room(bytes); err != nil {
					return nil, err
				}
			}
			chunk = nextChunk(chunk, largest)
		}
		hi := min(lo+chunk, len(good))
		got, errs := readMany(good[lo:hi])
		for j, i := range at[lo:hi] {
			answers[i], failed[i] = got[j], errs[j]
			n := answerBytes(&answers[i])
			bytes, largest = bytes+n, max(largest, n)
		}
	}
	return answers, nil
}

func answerBytes(a *state.Answer) int {
	n := len(a.Value)
	for _, e := range a.Elements {
		n += len(e)
	}
	for i := range a.Entries {
		n += len(a.Entries[i].UserKey) + len(a.Entries[i].Value)
	}
	return n
}

// fillQuery computes the key group of a query.
func fillQuery(h *raftfsm.Header, q *state.Query) error {
	g, err := groupOf(h, q.State, q.Key)
	if err != nil {
		return err
	}
	q.Group = g
	return nil
}

// Scan is a scan that is open on one instant.
type Scan struct {
	of    *replica
	view  *raftfsm.ReadView
	query state.ScanQuery
	key   *state.Query // in place of query: pages of one key
	done  bool
}

// scan opens a scan at the present instant.
func (r *replica) scan(ctx context.Context, req *ScanRequest) (*Scan, error) {
	s, err := r.openScan(ctx, req)
	if err != nil {
		r.metrics.refused(err)
		return nil, r.detailed(err)
	}
	return s, nil
}

func (r *replica) openScan(ctx context.Context, req *ScanRequest) (*Scan, error) {
	id := req.Query.State
	if req.Key != nil {
		id = req.Key.State
	}
	if err := r.declareForRead(ctx, req.Route, id); err != nil {
		return nil, err
	}
	v, err := r.view(ctx, req.Route)
	if err != nil {
		return nil, err
	}
	s := &Scan{of: r, view: v, query: req.Query}
	if req.Key != nil {
		q := *req.Key
		if err := fillQuery(v.Header, &q); err != nil {
			v.Close()
			return nil, err
		}
		s.key = &q
	}
	if s.query.Range.Hi == 0 {
		s.query.Range = v.Range
	}
	r.metrics.reads.Inc()
	return s, nil
}

// Next returns the next page and the cursor after it; more is false at the end.
func (s *Scan) Next(ctx context.Context) (items []state.ScanItem, cursor []byte, more bool, err error) {
	if s.done {
		return nil, nil, false, nil
	}
	if err := ctx.Err(); err != nil {
		return nil, nil, false, err
	}
	var next []byte
	if s.key != nil {
		items, next, err = s.keyPage()
	} else {
		items, next, err = s.view.Scan(&s.query)
		s.query.Cursor = next
	}
	if err != nil {
		return nil, nil, false, s.of.suspect(err)
	}
	s.done = next == nil
	return items, next, !s.done, nil
}

// keyPage reads the next page of the key.
func (s *Scan) keyPage() ([]state.ScanItem, []byte, error) {
	a, err := s.view.Read(s.key)
	if err != nil {
		return nil, nil, err
	}
	s.key.Cursor = a.Next
	items := make([]state.ScanItem, 0, len(a.Elements)+len(a.Entries))
	add := func(e state.Entry) {
		items = append(items, state.ScanItem{Group: s.key.Group, Key: s.key.Key, Namespace: s.key.Namespace, Entry: e})
	}
	for _, e := range a.Elements {
		add(state.Entry{Value: e})
	}
	for _, e := range a.Entries {
		add(e)
	}
	return items, a.Next, nil
}

// Token is the position that the scan shows.
func (s *Scan) Token() raftfsm.Token { return s.view.Token() }

// Close releases the instant.
func (s *Scan) Close() { s.view.Close() }
