package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

// metadataWait bounds how long a leader waits for its copy of the metadata to
// become as new as the client's.
const metadataWait = time.Second

// takeOffice proposes Init, if the shard was never founded, and TermStart, and
// waits until they are applied (CL3).
func (r *replica) takeOffice(ctx context.Context, raftNode *raft.Raft, _ uint64) (uint64, error) {
	// Everything before is applied after a barrier: whether the shard was
	// founded is then known.
	if err := r.awaitIn(ctx, raftNode.Barrier(enqueueTimeout)); err != nil {
		return 0, classify(err)
	}
	if r.machine.Header().M == 0 {
		init, err := r.initCommand()
		if err != nil {
			return 0, err
		}
		if _, err := r.command(ctx, raftfsm.AppendInit(nil, init)); err != nil {
			return 0, fmt.Errorf("founding %s: %w", r.id, err)
		}
	}
	out, err := r.command(ctx, raftfsm.AppendTermStart(nil, r.machine.Header().ClockMs))
	failpoint.Hit("cluster.office.term-start-applied")
	if err != nil {
		return 0, fmt.Errorf("starting a term of %s: %w", r.id, err)
	}
	return out.ClockMs, ctx.Err()
}

func (r *replica) initCommand() (raftfsm.Init, error) {
	v, err := r.node.metaView()
	if err != nil {
		return raftfsm.Init{}, err
	}
	rec, c := v.Shard(r.id), v.Cluster()
	if rec == nil || c == nil {
		return raftfsm.Init{}, base.ErrNotReady
	}
	return raftfsm.Init{Group: r.id, Range: r.rng, M: c.KeyGroups, Epoch: rec.Epoch, Birth: rec.Birth, Incarnation: c.Incarnation}, nil
}

// command proposes one command of the leader's own and waits for its outcome, no
// longer than ctx.
func (r *replica) command(ctx context.Context, cmd []byte) (*raftfsm.Outcome, error) {
	timeout := enqueueTimeout
	if at, ok := ctx.Deadline(); ok {
		timeout = max(1, min(timeout, time.Until(at))) // 0 would be for ever
	}
	f := r.raft.Apply(cmd, timeout)
	if err := r.awaitIn(ctx, f); err != nil {
		return nil, classify(err)
	}
	out, ok := f.Response().(*raftfsm.Outcome)
	if !ok {
		return nil, base.ErrInternal
	}
	return out, out.Err
}

// propose is the proposer's way into Raft.
func (r *replica) propose(entry []byte, timeout time.Duration) raft.ApplyFuture {
	return r.raft.Apply(entry, timeout)
}

// stampEntry gives the proposer the stamp of an entry.
func (r *replica) stampEntry() (uint64, error) {
	o, err := r.leading()
	if err != nil {
		return 0, err
	}
	return o.clock.NowMs(), nil
}

// healthy refuses what a damaged replica must not serve.
func (r *replica) healthy() error {
	if why := r.damage.Load(); why != nil {
		id := r.id
		return &base.Error{Cause: base.ErrDamaged, Group: &id, Ordinal: -1, Hint: *why}
	}
	return nil
}

// submit validates a write as its leader and queues it. done is called exactly
// once, maybe before submit returns.
func (r *replica) submit(ctx context.Context, route Route, req *raftfsm.Request, done func(raftfsm.Result)) {
	w, err := r.admit(ctx, route, req)
	if err != nil {
		r.metrics.refused(err)
	} else {
		w.done = done
		err = r.writes.submit(w) // it counts what it refuses
	}
	if err != nil {
		done(raftfsm.Result{Err: r.detailed(err)})
	}
}

// admit refuses early what apply would refuse, and encodes the rest.
func (r *replica) admit(ctx context.Context, route Route, req *raftfsm.Request) (w pendingWrite, err error) {
	if err := r.healthy(); err != nil {
		return w, err
	}
	if _, err := r.leading(); err != nil {
		return w, err
	}
	if err := r.machine.CheckIncarnation(req); err != nil {
		return w, err // before its session, which ended with the incarnation
	}
	if err := r.node.disk.refuse(req); err != nil {
		return w, err
	}
	v, err := r.node.metaView()
	if err != nil {
		return w, err
	}
	if !r.knows(v, req) && v.Revision() < route.MetadataRevision {
		if v, err = r.node.waitMeta(ctx, route.MetadataRevision); err != nil {
			return w, err
		}
	}
	if req.Session != 0 && !v.SessionAlive(req.Session) {
		return w, &base.Error{Cause: base.ErrSessionEnded, Field: "session", Ordinal: -1,
			Hint: fmt.Sprintf("session %d has ended or its lease ran out; open a new one, and treat its open requests as unknown", req.Session)}
	}
	if err := declaredStates(v, req); err != nil {
		return w, err
	}
	if err := r.declare(ctx, v, req); err != nil {
		return w, err
	}
	if err := r.seeBarrier(ctx, req.BarrierSeen); err != nil {
		return w, err
	}
	if err := r.fillGroups(req); err != nil {
		return w, err
	}
	if err := r.machine.CheckRequest(req); err != nil {
		return w, err
	}
	w.revision = v.Revision()
	w.mutations = len(req.Mutations) + len(req.Preconditions)
	for i := range req.Mutations {
		m := &req.Mutations[i]
		w.items += len(m.Elements) + len(m.Entries) + len(m.Sources)
	}
	w.encoded, err = raftfsm.AppendRequest(nil, req)
	return w, err
}

// knows says whether everything that the request names is in the metadata.
func (r *replica) knows(v *meta.View, req *raftfsm.Request) bool {
	if req.Session != 0 && !v.SessionAlive(req.Session) {
		return false
	}
	for i := range req.Preconditions {
		if v.StateByID(uint32(req.Preconditions[i].State)) == nil {
			return false
		}
	}
	for i := range req.Mutations {
		if v.StateByID(uint32(req.Mutations[i].State)) == nil {
			return false
		}
	}
	return true
}

// declaredStates refuses states that this copy of the metadata, which is at
// least as new as the client's, does not have: never declared, or dropped.
func declaredStates(v *meta.View, req *raftfsm.Request) error {
	for i := range req.Preconditions {
		if id := req.Preconditions[i].State; v.StateByID(uint32(id)) == nil {
			return fieldError(undeclared(id), fmt.Sprintf("preconditions[%d]", i), i)
		}
	}
	for i := range req.Mutations {
		if id := req.Mutations[i].State; v.StateByID(uint32(id)) == nil {
			o := req.Mutations[i].Ordinal
			return fieldError(undeclared(id), fmt.Sprintf("mutations[%d]", o), int(o))
		}
	}
	return nil
}

func undeclared(id engine.FamilyID) error {
	return &base.Error{Cause: base.ErrUndeclared, Field: "state", Ordinal: -1, Hint: fmt.Sprintf("no state has id %d; declare it first", id)}
}

// declare makes sure that the shard's own log declares the states that the
// request names (W1), proposing the declarations that are missing.
func (r *replica) declare(ctx context.Context, v *meta.View, req *raftfsm.Request) error {
	h := r.machine.Header()
	missing := func(id engine.FamilyID) bool {
		return h.Declaration(id) == nil && v.StateByID(uint32(id)) != nil
	}
	need := false
	for i := range req.Preconditions {
		need = need || missing(req.Preconditions[i].State)
	}
	for i := range req.Mutations {
		need = need || missing(req.Mutations[i].State)
	}
	if !need {
		return nil
	}
	return r.declareAll(ctx, v)
}

// declareAll proposes every declared state that the shard does not know yet.
func (r *replica) declareAll(ctx context.Context, v *meta.View) error {
	select {
	case r.declaring <- struct{}{}:
		defer func() { <-r.declaring }()
	case <-ctx.Done():
		return fmt.Errorf("declaring states in %s: %w: %w", r.id, base.ErrNotReady, ctx.Err())
	}
	h := r.machine.Header()
	var decls []state.Declaration
	for _, d := range v.States() {
		if h.Declaration(engine.FamilyID(d.ID)) == nil {
			sd, err := stateDeclaration(d)
			if err != nil {
				return err
			}
			decls = append(decls, sd)
		}
	}
	if len(decls) == 0 {
		return nil
	}
	if _, err := r.command(ctx, raftfsm.AppendDeclare(nil, decls)); err != nil {
		return fmt.Errorf("declaring states in %s: %w: %w", r.id, base.ErrNotReady, err)
	}
	return nil
}

// fillGroups computes the key group of every key from its declared type.
func (r *replica) fillGroups(req *raftfsm.Request) error {
	h := r.machine.Header()
	for i := range req.Preconditions {
		p := &req.Preconditions[i]
		g, err := groupOf(h, p.State, p.Key)
		if err != nil {
			return fieldError(err, fmt.Sprintf("preconditions[%d]", i), i)
		}
		p.Group = g
	}
	for i := range req.Mutations {
		m := &req.Mutations[i]
		g, err := groupOf(h, m.State, m.Key)
		if err != nil {
			return fieldError(err, fmt.Sprintf("mutations[%d]", m.Ordinal), int(m.Ordinal))
		}
		m.Group = g
	}
	return nil
}

func groupOf(h *raftfsm.Header, id engine.FamilyID, key []byte) (keygroup.Group, error) {
	d := h.Declaration(id)
	if d == nil {
		return 0, undeclared(id)
	}
	hash, err := keygroup.HashCode(d.KeyType, key)
	if err != nil {
		return 0, &base.Error{Cause: base.ErrInvalid, Field: "key", Ordinal: -1, Hint: err.Error()}
	}
	return keygroup.GroupOf(hash, h.M), nil
}

// fieldError puts a path in front of the field that err names.
func fieldError(err error, path string, ordinal int) error {
	var e *base.Error
	if !errors.As(err, &e) {
		return err
	}
	c := *e
	c.Ordinal = ordinal
	c.Field = path
	if e.Field != "" {
		c.Field = path + "." + e.Field
	}
	return &c
}

// detailed gives an error the shard's name and the leader's.
func (r *replica) detailed(err error) *base.Error {
	e := *asError(err)
	id := r.id
	e.Group = &id
	if e.LeaderHint == "" && errors.Is(e.Cause, base.ErrNotLeader) {
		e.LeaderHint = r.leaderNode()
	}
	return &e
}

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

// stateDeclaration converts a declaration of the metadata for the shards.
func stateDeclaration(d *meta.Declaration) (state.Declaration, error) {
	kind, err := state.ParseKind(d.Kind)
	if err != nil {
		return state.Declaration{}, fmt.Errorf("reading declaration %s/%s: %w", d.Keyspace, d.Name, err)
	}
	out := state.Declaration{ID: engine.FamilyID(d.ID), Keyspace: d.Keyspace, Name: d.Name, Kind: kind,
		Function: d.Function, CodecVersion: uint16(d.CodecVersion)}
	for _, t := range []struct {
		text string
		to   *keygroup.Type
	}{{d.KeyType, &out.KeyType}, {d.UserKeyType, &out.UserKeyType}, {d.ValueType, &out.ValueType}} {
		if t.text == "" {
			continue
		}
		if *t.to, err = keygroup.ParseType(t.text); err != nil {
			return state.Declaration{}, fmt.Errorf("reading declaration %s/%s: %w", d.Keyspace, d.Name, err)
		}
	}
	return out, nil
}
