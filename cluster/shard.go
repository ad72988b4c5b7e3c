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
