package sim

import (
	"context"
	"sync"
	"time"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/raftfsm"
)

// sessionLease is what the lanes ask for; keepAlive is how old it gets.
const (
	sessionLease = time.Minute
	keepAlive    = 20 * time.Second
	// attempt is how long a lane waits for the answer to one attempt.
	attempt = time.Second
)

// lane sends the numbered requests of one session to one shard: in their order,
// several at once, and each again under the same number, at whichever node leads,
// until its outcome is known (rule W3).
type lane struct {
	c     *client
	shard base.GroupID

	mu      sync.Mutex // never held while waiting
	open    []*numberedRequest
	running bool

	// Owned by run.
	session base.SessionID
	next    uint64 // the next number of the session
	renewed time.Time
	// copies are of requests of this session that are still on their way when it
	// has been closed.
	copies []*raftfsm.Request
}

// numberedRequest is one request of a lane.
type numberedRequest struct {
	ctx    context.Context
	req    raftfsm.Request
	number uint64 // 0 before it has one
	unsure bool   // an attempt may have been applied
	before bool   // unsure, before the attempt under way
	result chan error
}

// start queues a request; wait returns its outcome. Requests take effect in the
// order of the calls.
func (l *lane) start(ctx context.Context, req raftfsm.Request) (wait func() error) {
	r := &numberedRequest{ctx: ctx, req: req, result: make(chan error, 1)}
	l.mu.Lock()
	l.open = append(l.open, r)
	first := !l.running
	l.running = true
	l.mu.Unlock()
	if first {
		l.c.w.background.Go(l.run)
	}
	return func() error { return <-r.result }
}

// take returns what is open, nil (and the lane stands still) if nothing is.
func (l *lane) take() []*numberedRequest {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.open) == 0 {
		l.running = false
		return nil
	}
	return append([]*numberedRequest(nil), l.open...)
}

// end gives a request its outcome.
func (l *lane) end(r *numberedRequest, err error) {
	l.mu.Lock()
	for i, o := range l.open {
		if o == r {
			l.open = append(l.open[:i:i], l.open[i+1:]...)
			break
		}
	}
	l.mu.Unlock()
	r.result <- err
}

// abandon gives the session up: what is open and has a number may be applied or
// not, for ever unknown.
func (l *lane) abandon(open []*numberedRequest) {
	l.forget()
	for _, r := range open {
		switch {
		case r.unsure:
			l.end(r, base.ErrOutcomeUnknown)
		default:
			r.number = 0
		}
	}
}

// run works until nothing is open.
func (l *lane) run() {
	for {
		open := l.take()
		if open == nil {
			return
		}
		for _, r := range open {
			if r.ctx.Err() != nil {
				// It is never sent again, so that nothing after it may follow under
				// this session.
				if !r.unsure {
					l.end(r, errRefused)
				}
				l.abandon(open)
				open = nil
				break
			}
		}
		if open == nil || l.retire(open) || !l.ready(open[0].ctx) {
			continue
		}
		if !l.round(open) {
			l.pause(open[0].ctx)
		}
	}
}

func (l *lane) pause(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(l.c.w.jitter(60 * time.Millisecond)):
	}
}

// ready makes sure that there is a session.
func (l *lane) ready(ctx context.Context) bool {
	w := l.c.w
	ctx, cancel := context.WithTimeout(ctx, attempt)
	defer cancel()
	i := w.intN(w.cfg.Nodes)
	if l.session == 0 {
		err := l.c.call(i, func(n *cluster.Node) error {
			id, rev, _, err := n.OpenSession(ctx, sessionLease)
			if err == nil {
				w.sawRevision(rev)
				l.session, l.next, l.renewed = id, 0, time.Now()
			}
			return err
		})
		if err != nil {
			l.session = 0
			l.pause(ctx)
		}
		return err == nil
	}
	if time.Since(l.renewed) > keepAlive {
		if err := l.c.call(i, func(n *cluster.Node) error { _, err := n.KeepAliveSession(ctx, l.session); return err }); err == nil {
			l.renewed = time.Now()
		}
	}
	return true
}

// round sends what is open once, in order and at once, and takes the answers. It
// says whether all went well.
func (l *lane) round(open []*numberedRequest) bool {
	i := l.c.pick(l.shard)
	floor := uint64(0)
	answers, sent := make([]chan error, len(open)), make([]*raftfsm.Request, len(open))
	life := l.c.w.hosts[i].life.Load()
	n := l.c.w.c.Get(i)
	if n == nil || life%2 == 0 {
		l.c.learn(l.shard, i, errRefused)
		return false
	}
	for k, r := range open {
		if r.number == 0 {
			l.next++
			r.number = l.next
		}
		if floor == 0 {
			floor = r.number
		}
		req := own(&r.req)
		sent[k] = own(&r.req)
		r.before, r.unsure = r.unsure, true // until an answer says that it was not applied
		for _, q := range []*raftfsm.Request{req, sent[k]} {
			q.Session, q.Seq, q.Prev, q.Floor = l.session, r.number, r.number-1, floor
		}
		done := make(chan error, 1)
		answers[k] = done
		if l.c.w.chance(l.c.w.cfg.LostRequests) { // those behind it arrive
			done <- errLost
			continue
		}
		n.Submit(r.ctx, l.c.route(l.shard), req, func(res raftfsm.Result) { done <- res.Failure() })
	}
	limit := time.NewTimer(attempt)
	defer limit.Stop()
	late, well := false, true
	for k, r := range open {
		err := error(errLost)
		if late {
			select {
			case err = <-answers[k]:
			default:
			}
		} else {
			select {
			case err = <-answers[k]:
			case <-limit.C:
				late = true
			}
		}
		if l.c.w.hosts[i].life.Load() != life || l.c.w.chance(l.c.w.cfg.LostReplies) {
			err = errLost
		}
		l.c.learn(l.shard, i, err)
		if !l.answered(r, err, open[k:]) {
			well = false
		}
		if err == nil {
			l.copy(sent[k])
		}
		if l.session == 0 {
			break
		}
	}
	return well
}

// answered takes one answer; it says whether the request has ended.
func (l *lane) answered(r *numberedRequest, err error, rest []*numberedRequest) bool {
	s := base.SentinelOf(err)
	if s.Outcome == base.OutcomeNotApplied {
		r.unsure = r.before
	}
	switch {
	case err == nil:
		l.end(r, nil)
		return true
	case s == base.ErrSessionEnded || s == base.ErrSessionForgot:
		if s == base.ErrSessionForgot { // only what is at or above the floor is ever sent again
			l.c.w.lapse("session %d of %s lost its open request %d: %v", l.session, l.shard, r.number, err)
		}
		l.abandon(rest)
		return false
	case s.Outcome == base.OutcomeUnknown:
		return false
	case s.Retryable:
		return false
	case content(s):
		l.end(r, err) // the recorded result of the number, whenever it was applied
		return true
	case r.unsure:
		l.end(r, base.ErrOutcomeUnknown)
	default:
		l.end(r, err)
	}
	l.abandon(rest[1:])
	return false
}

// content says that an error is a result that the session remembers.
func content(s *base.Sentinel) bool {
	switch s {
	case base.ErrPrecondition, base.ErrInvalid, base.ErrTooLarge, base.ErrUndeclared, base.ErrWrongKind, base.ErrOutOfRange, base.ErrConflict, base.ErrNotFound, base.ErrUnsupported:
		return true
	}
	return false
}

// copy may keep a copy of a request that was answered, as a network does that
// delivers a packet twice: it comes soon, or when its session has been closed.
func (l *lane) copy(req *raftfsm.Request) {
	w := l.c.w
	p := w.cfg.LateCopies
	if req.Seq == 1 {
		p *= 10 // a session that was forgotten begins with it
	}
	switch {
	case !w.chance(p):
	case w.chance(0.5):
		l.straggle(req)
	default:
		l.copies = append(l.copies, req)
	}
}

// straggle delivers a copy some time later, to any node. Nobody waits for what
// comes of it.
func (l *lane) straggle(req *raftfsm.Request) {
	w := l.c.w
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	w.background.Go(func() {
		defer cancel()
		for range 3 {
			time.Sleep(w.jitter(3 * time.Second))
			_ = l.c.call(l.c.pick(l.shard), func(n *cluster.Node) error {
				return submit(ctx, n, l.c.route(l.shard), own(req))
			})
		}
	})
}

// retire closes a session of which copies are on their way, once all that it has
// sent was answered. It says whether it did.
func (l *lane) retire(open []*numberedRequest) bool {
	if l.session == 0 || len(l.copies) == 0 {
		return false
	}
	for _, r := range open {
		if r.number != 0 {
			return false
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), attempt)
	defer cancel()
	w, id := l.c.w, l.session
	// A session that could not be closed runs out.
	_ = l.c.call(w.intN(w.cfg.Nodes), func(n *cluster.Node) error { return n.CloseSession(ctx, id) })
	l.forget()
	return true
}

// forget leaves the session, whose copies are delivered from now on.
func (l *lane) forget() {
	for _, req := range l.copies {
		l.straggle(req)
	}
	l.session, l.copies = 0, nil
}
