package keel

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/keelstatepb"
)

// session is the client's identity towards the shards: under its numbers every
// write is applied at most once (KC1). It is opened with the first write and
// kept alive until the client is closed or the cluster says that it has ended.
type session struct {
	client *Client
	id     uint64
	lease  time.Duration
	ctx    context.Context // ends with the session
	cancel context.CancelFunc
	number atomic.Uint64 // newest request number given

	mu struct {
		sync.Mutex
		lanes map[uint64]*lane // by shard
		ended *Error           // why, nil while it lives
	}
}

// currentSession returns the session, opening one if there is none.
func (c *Client) currentSession(ctx context.Context) (*session, error) {
	for {
		c.mu.Lock()
		s, opening := c.mu.session, c.mu.opening
		switch {
		case c.mu.closed:
			c.mu.Unlock()
			return nil, newError(ErrClosed, OutcomeNotApplied, "")
		case s != nil:
			c.mu.Unlock()
			return s, nil
		case c.mu.over != nil:
			over := c.mu.over
			c.mu.Unlock()
			return nil, over
		case opening == nil:
			opening = make(chan struct{})
			c.mu.opening = opening
			c.mu.Unlock()
			return c.openSession(ctx, opening)
		}
		c.mu.Unlock()
		select {
		case <-opening: // look again: that caller may have given up
		case <-ctx.Done():
			return nil, deadlineError(ctx.Err(), OutcomeNotApplied)
		}
	}
}

func (c *Client) openSession(ctx context.Context, opening chan struct{}) (*session, error) {
	var got *keelstatepb.Session
	// A session whose answer was lost runs out by its lease.
	err := c.Call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		got, err = keelstatepb.NewClusterClient(conn).OpenSession(ctx,
			&keelstatepb.OpenSessionRequest{LeaseMs: uint32(c.opts.lease.Milliseconds())})
		return err
	})
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.opening = nil
	close(opening)
	if err != nil {
		return nil, harmless(err)
	}
	if c.mu.closed {
		return nil, newError(ErrClosed, OutcomeNotApplied, "")
	}
	s := &session{client: c, id: got.GetId(), lease: time.Duration(got.GetLeaseMs()) * time.Millisecond}
	s.ctx, s.cancel = context.WithCancel(c.ctx)
	s.mu.lanes = make(map[uint64]*lane)
	c.mu.session = s
	c.sawRevision(got.GetRevision())
	c.wg.Add(2)
	go s.keepAlive()
	go s.watchdog()
	return s, nil
}

// keepAlive renews the lease three times per lease until the session ends.
func (s *session) keepAlive() {
	defer s.client.wg.Done()
	for pause(s.ctx, max(s.lease/3, 10*time.Millisecond)) {
		ctx, cancel := context.WithTimeout(s.ctx, max(s.lease/3, time.Second))
		err := s.client.Call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
			_, err := keelstatepb.NewClusterClient(conn).KeepAliveSession(ctx, &keelstatepb.KeepAliveSessionRequest{Id: s.id})
			return err
		}, withoutBudget)
		cancel()
		switch {
		case err == nil || s.ctx.Err() != nil:
		case asError(err).Code == codeSessionEnded:
			s.end(asError(err))
		default:
			// A write finds out whether the lease ran out; nothing is lost by
			// trying again until then.
			s.client.opts.log.Warn("keeping the session alive failed", "session", s.id, "error", err)
		}
	}
}

// watchdog takes requests back from nodes that keep them without an answer.
func (s *session) watchdog() {
	defer s.client.wg.Done()
	limit := s.client.opts.attemptTimeout
	for pause(s.ctx, limit/4) {
		for _, l := range s.allLanes() {
			l.takeBack(time.Now().Add(-limit), false)
		}
	}
}

func (s *session) allLanes() []*lane {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*lane, 0, len(s.mu.lanes))
	for _, l := range s.mu.lanes {
		out = append(out, l)
	}
	return out
}

// lane returns the lane of a shard; nil with the reason once the session ended.
func (s *session) lane(shard uint64) (*lane, *Error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.ended != nil {
		return nil, s.mu.ended
	}
	l := s.mu.lanes[shard]
	if l == nil {
		l = newLane(s, shard)
		s.mu.lanes[shard] = l
	}
	return l, nil
}

// newLeader tells the lane of a shard, if there is one, that a node leads it.
func (s *session) newLeader(shard uint64, node string) {
	s.mu.Lock()
	l := s.mu.lanes[shard]
	s.mu.Unlock()
	if l != nil {
		l.newLeader(node)
	}
}

// overError is what a client with one session says once that has ended.
func overError(why *Error) *Error {
	e := newError(ErrSessionEnded, OutcomeNotApplied, "the client has one session only, which has ended; begin again with a new client")
	if why.Hint != "" {
		e.Hint += ": " + why.Hint
	}
	e.Retryable = false
	return e
}

// end ends the session for good: what is open fails, with an unknown outcome
// if it may have been applied, and later calls get a new session (KC4).
func (s *session) end(why *Error) {
	s.mu.Lock()
	if s.mu.ended != nil {
		s.mu.Unlock()
		return
	}
	s.mu.ended = why
	s.mu.Unlock()
	s.cancel()
	c := s.client
	c.mu.Lock()
	if c.mu.session == s {
		c.mu.session = nil
		if c.opts.oneSession {
			c.mu.over = overError(why)
		}
	}
	c.mu.Unlock()
	for _, l := range s.allLanes() {
		l.end(why)
	}
}
