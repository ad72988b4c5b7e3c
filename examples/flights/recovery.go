package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/examples/flights/job"
)

// jobLease is the lease of the session of a run with rollback: a checkpoint waits no
// longer for a run that is gone.
const jobLease = 15 * time.Second

// checkpointPatience bounds one checkpoint that the job takes itself.
const checkpointPatience = 2 * time.Minute

// countWithRollback runs the job by checkpoints.
func countWithRollback(ctx context.Context, o *options, c *job.Counters, p *progress) error {
	var cluster job.Cluster = &rollingCluster{o: o, own: make(map[uint64]bool)}
	if o.within != nil {
		cluster = o.within(cluster)
	}
	ro := job.RollbackOptions{CheckpointEvery: o.every, Open: func() (*job.Reader, io.Closer, error) { return openReader(o.input) }}
	if !o.quiet {
		ro.OnNote = p.say
	}
	return job.RunWithRollback(ctx, cluster, o.job, ro, c)
}

// rollingCluster binds a run with rollback to a cluster.
type rollingCluster struct {
	o *options

	mu  sync.Mutex
	own map[uint64]bool // sessions of this process that have registered the participant
}

// Begin implements job.Cluster.
func (c *rollingCluster) Begin(ctx context.Context) (job.Session, error) {
	client, err := connect(ctx, c.o, keel.WithOneSession(), keel.WithSessionLease(jobLease))
	if err != nil {
		return nil, rollingFailure(err)
	}
	s := &rollingSession{cluster: c}
	s.store, err = openStore(ctx, client, c.o.keyspace)
	if err == nil {
		s.turn, err = keel.DeclareValue(ctx, client.Keyspace(c.o.keyspace, keel.String.Type()), "turn", keel.JSON[job.Turn]())
	}
	if err != nil {
		closeClient(ctx, client)
		return nil, rollingFailure(err)
	}
	s.sort, s.free, s.ctx = rollingFailure, true, ctx
	return s, nil
}

// RollBack implements job.Cluster.
func (c *rollingCluster) RollBack(ctx context.Context, checkpoint uint64) error {
	client, err := connect(ctx, c.o)
	if err != nil {
		return rollingFailure(err)
	}
	defer closeClient(ctx, client)
	err = client.RollBack(ctx, checkpoint)
	if errors.Is(err, keel.ErrPrecondition) {
		return err // another job would lose its position: that is an operator's to decide
	}
	return rollingFailure(err)
}

func closeClient(ctx context.Context, client *keel.Client) {
	farewell, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	client.Close(farewell) // the session's lease ends it where this fails
}

// rollingFailure sorts an error of the client.
func rollingFailure(err error) error {
	var e *keel.Error
	if err == nil || !errors.As(err, &e) {
		return err
	}
	kind := job.Kind(0)
	switch {
	case errors.Is(err, keel.ErrIncarnation), errors.Is(err, keel.ErrSessionEnded):
		kind = job.Lost
	case errors.Is(err, keel.ErrPrecondition):
		kind = job.Conflict
	case errors.Is(err, keel.ErrCheckpoint), errors.Is(err, keel.ErrConflict):
		kind = job.NotTaken
	case e.Outcome == keel.OutcomeUnknown:
		kind = job.Unknown
	case e.Retryable, errors.Is(err, keel.ErrDeadline), errors.Is(err, keel.ErrUnavailable):
		kind = job.Transient
	default:
		return err
	}
	return &job.Failure{Kind: kind, Cause: err}
}

// rollingSession is the store under one session.
type rollingSession struct {
	*store
	cluster     *rollingCluster
	ctx         context.Context // of the farewell only
	turn        *keel.Value[job.Turn]
	incarnation uint64
}

// turnKey is the one key of the state turn.
const turnKey = "newest"

// Turn implements job.Session.
func (s *rollingSession) Turn(ctx context.Context) (job.Turn, bool, error) {
	t, ok, err := s.turn.Get(ctx, turnKey)
	return t, ok, s.sort(err)
}

// Take implements job.Session.
func (s *rollingSession) Take(ctx context.Context, old *job.Turn, now job.Turn) error {
	was := s.turn.IfAbsent(turnKey)
	if old != nil {
		was = s.turn.IfEqual(turnKey, *old)
	}
	r, err := s.client.Batch().Add(s.turn.SetOp(turnKey, now)).Require(was).Commit(ctx)
	if err == nil && r.Token().Incarnation != now.Incarnation {
		err = fmt.Errorf("the session began in incarnation %d of the cluster, not in %d", r.Token().Incarnation, now.Incarnation)
		return &job.Failure{Kind: job.Lost, Cause: err}
	}
	return s.sort(err)
}

// Incarnation implements job.Session.
func (s *rollingSession) Incarnation(ctx context.Context) (uint64, error) {
	t, err := s.client.Topology(ctx)
	s.incarnation = t.GetIncarnation()
	return s.incarnation, s.sort(err)
}

// Participate implements job.Session.
func (s *rollingSession) Participate(ctx context.Context) (job.Participant, error) {
	p, err := s.client.Participate(ctx, s.cluster.o.participant)
	if err != nil {
		return nil, s.sort(err)
	}
	s.cluster.mu.Lock()
	s.cluster.own[p.Session()] = true
	s.cluster.mu.Unlock()
	if r := p.Restored(); r != nil && r.Incarnation != s.incarnation {
		return nil, &job.Failure{Kind: job.Lost, Cause: fmt.Errorf("the cluster has incarnation %d by now", r.Incarnation)}
	}
	return &rollingParticipant{p}, nil
}

// Replaced implements job.Session.
func (s *rollingSession) Replaced(ctx context.Context) (bool, error) {
	all, err := s.client.Participants(ctx)
	s.cluster.mu.Lock()
	defer s.cluster.mu.Unlock()
	for _, r := range all {
		if r.Name == s.cluster.o.participant && r.Alive && !s.cluster.own[r.Session] {
			return true, nil
		}
	}
	return false, s.sort(err)
}

// Checkpoint implements job.Session.
func (s *rollingSession) Checkpoint(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, checkpointPatience)
	defer cancel()
	_, err := s.client.Checkpoint(ctx)
	return s.sort(err)
}

// Close implements job.Session.
func (s *rollingSession) Close() { closeClient(s.ctx, s.client) }

// rollingParticipant binds a participant.
type rollingParticipant struct{ *keel.Participant }

// Last implements job.Participant.
func (p *rollingParticipant) Last() *job.Given {
	if l := p.Participant.Last(); l != nil {
		return &job.Given{Checkpoint: l.Checkpoint, Position: l.Bytes}
	}
	return nil
}

// Restored implements job.Participant.
func (p *rollingParticipant) Restored() *job.Given {
	if r := p.Participant.Restored(); r != nil {
		return &job.Given{Checkpoint: r.Checkpoint, Position: r.Bytes}
	}
	return nil
}

// Next implements job.Participant.
func (p *rollingParticipant) Next(ctx context.Context) (uint64, error) {
	n, err := p.Participant.Next(ctx)
	return n, rollingFailure(err)
}

// Ack implements job.Participant.
func (p *rollingParticipant) Ack(ctx context.Context, number uint64, position []byte) error {
	return rollingFailure(p.Participant.Ack(ctx, number, position))
}

// Done implements job.Participant.
func (p *rollingParticipant) Done(ctx context.Context, number uint64) error {
	return rollingFailure(p.Participant.Done(ctx, number))
}
