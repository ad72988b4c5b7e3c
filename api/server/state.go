package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/raftfsm"
)

// stateService serves reads and writes of keyed state.
type stateService struct {
	keelstatepb.UnimplementedStateServer
	s *Server
}

// Write implements the State service.
func (v *stateService) Write(ctx context.Context, w *keelstatepb.WriteRequest) (*keelstatepb.WriteResult, error) {
	route, req, _, err := writeRequest(w)
	if err != nil {
		return nil, err
	}
	done := make(chan raftfsm.Result, 1)
	v.s.backend.Submit(ctx, route, req, func(r raftfsm.Result) { done <- r })
	select {
	case r := <-done:
		if err := r.Failure(); err != nil {
			return nil, err
		}
		return &keelstatepb.WriteResult{Tag: w.GetTag(), Token: token(r.Token), Replayed: r.Replayed}, nil
	case <-ctx.Done():
		// It is queued or proposed: nobody can take it back (SV1).
		return nil, ended(ctx, "waiting for the write")
	}
}

// ended is the error of a call whose context ended while its outcome was open.
func ended(ctx context.Context, doing string) error {
	s := base.ErrOutcomeUnknown
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		s = base.ErrDeadline
	}
	return fmt.Errorf("%s: %w: %w", doing, s, ctx.Err())
}

// Read implements the State service.
func (v *stateService) Read(ctx context.Context, r *keelstatepb.ReadRequest) (*keelstatepb.ReadResult, error) {
	result, _, err := v.s.read(ctx, r)
	return result, err
}

// pointBytes is what the answer to a query of one value is expected to have.
// Larger values are counted once they are read (readRoom).
const pointBytes = 32 << 10

// expectedBytes is what the answers to a read may be expected to have.
func expectedBytes(r *keelstatepb.ReadRequest) int {
	n := 0
	for _, q := range r.GetQueries() {
		bytes := pointBytes
		if q.GetKind() == keelstatepb.QueryKind_QUERY_KIND_PAGE {
			if bytes = min(clampInt(q.GetPageBytes()), state.MaxPageBytes); bytes == 0 {
				bytes = state.DefaultPageBytes
			}
		}
		if n += bytes; n >= answerBytes {
			return answerBytes
		}
	}
	return n
}

// readRoom is what one read holds of Options.ReadBytes.
type readRoom struct {
	s    *Server
	held int64
}

// grow makes the room at least as large as what was read. It never waits: reads
// that hold some and wait for more could wait for each other. A read that is
// larger than all the room has all of it.
func (r *readRoom) grow(bytes int) error {
	more := int64(min(bytes, r.s.opts.ReadBytes)) - r.held
	if more <= 0 {
		return nil
	}
	if !r.s.reads.TryAcquire(more) {
		return &base.Error{Cause: base.ErrOverloaded, Ordinal: -1, RetryAfter: 50 * time.Millisecond,
			Hint: "the reads that run on the node have no room for answers as large as these; retry after a pause, or read fewer keys at once"}
	}
	r.held += more
	return nil
}

func (r *readRoom) release() { r.s.reads.Release(r.held) }

// read answers one read and says how many bytes the answers have.
func (s *Server) read(ctx context.Context, r *keelstatepb.ReadRequest) (*keelstatepb.ReadResult, int, error) {
	req, err := readRequest(r)
	if err != nil {
		return nil, 0, err
	}
	room := readRoom{s: s, held: int64(min(expectedBytes(r), s.opts.ReadBytes))}
	if err := s.reads.Acquire(ctx, room.held); err != nil {
		return nil, 0, ended(ctx, "waiting for other reads")
	}
	defer room.release()
	req.Room = room.grow
	reply, err := s.backend.Read(ctx, req)
	if err != nil {
		return nil, 0, err
	}
	n := len(req.Queries)
	if len(reply.Answers) != n || len(reply.Errs) != n {
		return nil, 0, fmt.Errorf("%d answers and %d errors for %d queries: %w", len(reply.Answers), len(reply.Errs), n, base.ErrInternal)
	}
	out := &keelstatepb.ReadResult{Tag: r.GetTag(), Token: token(reply.Token), Answers: make([]*keelstatepb.Answer, n)}
	total := 0
	for i := range reply.Answers {
		a, size := s.answer(ctx, &reply.Answers[i], reply.Errs[i], i, answerBytes-total)
		out.Answers[i] = a
		total += size
	}
	return out, total, nil
}

// answer converts one answer, refusing it if it does not fit in what is left of
// the message (SV5). A refusal that does not fit either keeps its reason only;
// those take less than the reserve of answerBytes, however many they are.
func (s *Server) answer(ctx context.Context, a *state.Answer, err error, i, left int) (*keelstatepb.Answer, int) {
	if err == nil {
		out, size := wireAnswer(a)
		if size <= left {
			return out, size
		}
		err = &base.Error{Cause: fmt.Errorf("%w: the answers of this read do not fit in one message", base.ErrTooLarge),
			Field: fmt.Sprintf("queries[%d]", i), Ordinal: i, Hint: "ask this query again, with fewer others"}
	}
	var e *base.Error
	if errors.As(err, &e) && e.Ordinal < 0 {
		c := *e
		c.Ordinal = i
		err = &c
	}
	d := s.detail(ctx, err)
	size := detailBytes(d)
	if size > left {
		d = &keelstatepb.ErrorDetail{Reason: d.Reason, Outcome: d.Outcome, Retryable: d.Retryable}
		size = 0
	}
	return &keelstatepb.Answer{Error: d}, size
}

// detailBytes is what a detail has on the wire, roughly and not less.
func detailBytes(d *keelstatepb.ErrorDetail) int {
	return 96 + len(d.Reason) + len(d.Message) + len(d.Field) + len(d.Hint) + len(d.LeaderHint) + len(d.LeaderAddress)
}

// Scan implements the State service.
func (v *stateService) Scan(r *keelstatepb.ScanRequest, stream grpc.ServerStreamingServer[keelstatepb.ScanPage]) error {
	if r.GetConsistency() != keelstatepb.Consistency_CONSISTENCY_LINEARIZABLE {
		return badEnum("consistency", int32(r.GetConsistency()))
	}
	ctx, cancel := v.s.drainContext(stream.Context())
	defer cancel()
	err := v.scan(ctx, r, stream)
	if err != nil && stream.Context().Err() == nil && ctx.Err() != nil {
		return context.Cause(ctx) // the drain ended it, not the client
	}
	return err
}

func routeOf(r *keelstatepb.ScanRequest) cluster.Route {
	return cluster.Route{Group: base.GroupID(r.GetShard()), Epoch: base.Epoch(r.GetEpoch()),
		Incarnation: base.Incarnation(r.GetIncarnation()), MetadataRevision: base.Revision(r.GetMetadataRevision())}
}

// quota counts the items that a scan may still send.
type quota struct {
	limited bool
	left    uint64
}

func newQuota(limit uint64) quota { return quota{limited: limit > 0, left: limit} }

// cut says how many of n items may go, and whether the scan is over then.
func (q *quota) cut(n int) (int, bool) {
	if !q.limited {
		return n, false
	}
	if uint64(n) > q.left {
		n = int(q.left)
	}
	q.left -= uint64(n)
	return n, q.left == 0
}

// page is a page size that does not read more than the quota allows.
func (q *quota) page(want int) int {
	if q.limited && q.left < uint64(max(want, 1)) || q.limited && want == 0 && q.left < state.DefaultPageItems {
		return int(q.left)
	}
	return want
}

// scanRequest reads a scan of a state or, with filter_key, of one list or map.
func scanRequest(r *keelstatepb.ScanRequest, quota *quota) (*cluster.ScanRequest, error) {
	req := &cluster.ScanRequest{Route: routeOf(r)}
	limit := quota.page(clampInt(r.GetPageItems()))
	if r.GetFilterKey() {
		if !r.GetFilterNamespace() {
			return nil, &base.Error{Cause: base.ErrUnsupported, Field: "filter_namespace", Ordinal: -1,
				Hint: "a scan of one key is of one namespace: set filter_namespace (an absent namespace is the void one)"}
		}
		req.Key = &state.Query{Kind: state.QueryPage, Key: present(r.GetKey()), Namespace: namespace(r.GetNamespace()),
			Cursor: r.GetCursor(), Limit: limit, PageBytes: clampInt(r.GetPageBytes()), KeysOnly: r.GetKeysOnly()}
		setID(&req.Key.State, r.GetState())
		return req, nil
	}
	req.Query = state.ScanQuery{Filter: r.GetFilterNamespace(), KeysOnly: r.GetKeysOnly(), Cursor: r.GetCursor(),
		Limit: limit, PageBytes: clampInt(r.GetPageBytes())}
	setID(&req.Query.State, r.GetState())
	if req.Query.Filter {
		req.Query.Namespace = namespace(r.GetNamespace())
	}
	if rng := r.GetRange(); rng != nil {
		if rng.Lo >= rng.Hi {
			return nil, base.Invalid("range", "use a range [lo, hi) with lo < hi, or none for the whole shard")
		}
		setID(&req.Query.Range.Lo, rng.Lo)
		setID(&req.Query.Range.Hi, rng.Hi)
	}
	return req, nil
}

func (v *stateService) scan(ctx context.Context, r *keelstatepb.ScanRequest, stream grpc.ServerStreamingServer[keelstatepb.ScanPage]) error {
	quota := newQuota(r.GetLimit())
	req, err := scanRequest(r, &quota)
	if err != nil {
		return err
	}
	scan, err := v.s.backend.OpenScan(ctx, req)
	if err != nil {
		return err
	}
	defer scan.Close()
	tok := token(scan.Token())
	for {
		items, cursor, more, err := scan.Next(ctx)
		if err != nil {
			return err
		}
		n, full := quota.cut(len(items))
		page := &keelstatepb.ScanPage{Items: scanItems(items[:n]), Token: tok}
		// The cursor is the page's: it resumes after the last item only if all of
		// the page was sent. A limit inside a page ends the scan without one,
		// which quota.page makes rare and harmless: nothing is left to resume.
		if more && n == len(items) {
			page.Cursor = cursor
		}
		if n > 0 || page.Cursor != nil || !more {
			if err := v.s.sendWithin(func() error { return stream.Send(page) }); err != nil {
				return err
			}
		}
		if !more || full {
			return nil
		}
	}
}

// sendWithin sends a page, for ScanIdle at most. A send that is given up ends
// with the stream, as soon as the handler has returned.
func (s *Server) sendWithin(send func() error) error {
	sent := make(chan error, 1)
	s.receivers.Add(1) // in a handler, so this never races with a Wait
	go func() {
		defer s.receivers.Done()
		sent <- send()
	}()
	t := time.NewTimer(s.opts.ScanIdle)
	defer t.Stop()
	select {
	case err := <-sent:
		return err
	case <-t.C:
		return fmt.Errorf("sending a page: %w: the client took none for %v", base.ErrDeadline, s.opts.ScanIdle)
	}
}

func scanItems(items []state.ScanItem) []*keelstatepb.ScanItem {
	out := make([]*keelstatepb.ScanItem, len(items))
	wire := make([]keelstatepb.ScanItem, len(items))
	entries := make([]keelstatepb.MapEntry, len(items))
	for i := range items {
		it := &items[i]
		fillEntry(&entries[i], &it.Entry)
		wire[i].Group, wire[i].Key, wire[i].Namespace, wire[i].Entry = uint32(it.Group), it.Key, wireNamespace(it.Namespace), &entries[i]
		out[i] = &wire[i]
	}
	return out
}
