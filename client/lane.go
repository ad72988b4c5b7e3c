package keel

import (
	"context"
	"sync"
	"time"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// maxInternal is how often a request may meet ErrInternal before its outcome is
// left unknown: the next node may fail at it as well.
const maxInternal = 3

// write is one request to one shard under one session number.
type write struct {
	number   uint64
	shard    uint64
	content  *keelstatepb.WriteRequest // mutations, preconditions, atomic; never changed
	groups   keygroup.Range            // the smallest range with all its key groups
	size     int
	done     chan struct{} // closed when token, replayed and err are final
	token    *keelstatepb.Token
	replayed bool
	err      *Error

	// Guarded by the lane.
	resolved bool // done is closed
	sent     bool // some attempt may have left
	flying   bool // an attempt of the lane's generation is unanswered
	maybe    bool // some attempt may have been applied
	internal int  // answers of ErrInternal
	foreign  foreign
	// The newest attempt, and the pipe that it is on.
	exchange *writeX
	pipe     *writePipe
	// incarnation is the cluster's at the first attempt: the number means nothing
	// to a later one, which must not apply the write a second time.
	incarnation uint64
}

// lane carries the writes of a session to one shard in order (KC2).
//
// It is in one of two modes. Flowing: a new write is numbered and sent at once,
// behind those that are open. Broken, after the first answer that calls for
// another attempt or a lost connection: nothing is sent until every attempt in
// flight is answered or given up; then all open writes are sent again in order
// and the lane flows.
type lane struct {
	session *session
	shard   uint64

	mu sync.Mutex
	// window holds the writes from the lowest open one on, by number. A resolved
	// one stays until those before it are resolved.
	window []*write
	space  chan struct{} // closed when the window shrinks, then replaced
	ended  *Error

	// attempt counts the generations of sends; answers to an older one still
	// resolve writes but do not break the lane again.
	attempt  uint64
	inFlight int       // unanswered sends of this generation
	progress time.Time // of the last send into an idle lane, or answer
	broken   bool
	resuming bool // a goroutine waits to send again
	cause    cause
	failures int // generations without any final answer
	node     string
	// news has one slot: a value ends the pause of a resumption.
	news chan struct{}
}

// cause collects why a generation broke.
type cause struct {
	atOnce     bool // every failure so far can be repaired by sending again now
	retryAfter time.Duration
	set        bool
}

func (c *cause) add(atOnce bool, after time.Duration) {
	c.atOnce = atOnce && (c.atOnce || !c.set)
	c.retryAfter = max(c.retryAfter, after)
	c.set = true
}

func newLane(s *session, shard uint64) *lane {
	return &lane{session: s, shard: shard, space: make(chan struct{}), news: make(chan struct{}, 1)}
}

// add numbers a write and sends it, or leaves it to the resumption of a broken
// lane. While the window is full it waits; an error means that the write was
// not taken and will not be applied.
func (l *lane) add(ctx context.Context, w *write) *Error {
	for {
		l.mu.Lock()
		if l.ended != nil {
			l.mu.Unlock()
			return l.ended
		}
		if len(l.window) < l.session.client.opts.window {
			break
		}
		space := l.space
		l.mu.Unlock()
		select {
		case <-space:
		case <-ctx.Done():
			return deadlineError(ctx.Err(), OutcomeNotApplied)
		}
	}
	defer l.mu.Unlock()
	w.number = l.session.number.Add(1)
	l.window = append(l.window, w)
	if l.broken {
		return nil
	}
	if pipe, r, ok := l.targetLocked(); ok {
		l.sendLocked(pipe, w, l.previousLocked(len(l.window)-1), &r)
	}
	return nil
}

// previousLocked is the newest open number before window[i], which must be
// executed before it; 0 if none is. What is resolved needs no place in the
// order: if it was not executed by now, the shard refuses it as too old once a
// newer number is.
func (l *lane) previousLocked(i int) uint64 {
	for i--; i >= 0; i-- {
		if !l.window[i].resolved {
			return l.window[i].number
		}
	}
	return 0
}

// targetLocked chooses where to send; it breaks the lane and is false if there
// is nowhere.
func (l *lane) targetLocked() (*writePipe, route, bool) {
	c := l.session.client
	r, err := c.routeTo(l.shard)
	if err == nil {
		var n *node
		if n, err = c.node(r.address); err == nil {
			return n.writes(), r, true
		}
	}
	l.breakLocked(false, 0)
	return nil, r, false
}

// sendAllLocked sends every open write, in order.
func (l *lane) sendAllLocked() {
	if len(l.window) == 0 {
		return
	}
	pipe, r, ok := l.targetLocked()
	if !ok {
		return
	}
	previous := uint64(0)
	// A copy: a write that cannot be sent is resolved, which moves the window.
	for _, w := range append([]*write(nil), l.window...) {
		if w.resolved {
			continue
		}
		if !l.sendLocked(pipe, w, previous, &r) {
			return
		}
		if !w.resolved {
			previous = w.number
		}
	}
}

// sendLocked sends one write; it breaks the lane and is false if it cannot.
func (l *lane) sendLocked(pipe *writePipe, w *write, previous uint64, r *route) bool {
	c := l.session.client
	if e, ok := r.topo.table.Shard(base.GroupID(l.shard)); !ok || !e.Range.ContainsRange(w.groups) {
		// The map changed under an open write. Its groups have to be routed
		// anew, by the caller: here only this shard is known.
		l.resolveLocked(w, nil, l.outcomeOf(w, newError(ErrWrongRange, OutcomeNotApplied, "the shard map has changed")))
		return true
	}
	if !w.sent {
		w.incarnation = r.topo.incarnation
	}
	req := &keelstatepb.WriteRequest{
		Shard: l.shard, Epoch: r.epoch, Incarnation: w.incarnation, Session: l.session.id,
		Sequence: w.number, Previous: previous, Floor: l.floorLocked(w.number), BarrierSeen: c.barrier.Load(),
		MetadataRevision: c.revision.Load(), Atomic: w.content.Atomic,
		Preconditions: w.content.Preconditions, Mutations: w.content.Mutations,
	}
	attempt, node := l.attempt, r.node
	x := &writeX{req: req, size: w.size, done: func(res *keelstatepb.WriteResult, err error, sent bool) {
		l.answer(w, attempt, node, res, err, sent)
	}}
	if err := pipe.enqueue(x); err != nil {
		l.breakLocked(false, 0)
		return false
	}
	w.sent, w.flying, w.exchange, w.pipe = true, true, x, pipe
	if l.inFlight == 0 {
		l.progress = time.Now()
	}
	l.inFlight++
	l.node = node
	return true
}

// floorLocked is the lowest open number of the lane.
func (l *lane) floorLocked(number uint64) uint64 {
	for _, w := range l.window {
		if !w.resolved {
			return min(w.number, number)
		}
	}
	return number
}

// answer takes in what became of one attempt.
func (l *lane) answer(w *write, attempt uint64, node string, res *keelstatepb.WriteResult, err error, sent bool) {
	c := l.session.client
	var e *Error
	switch {
	case err != nil:
		e = streamError(err, sent)
	case res.GetError() != nil:
		e = fromDetail(res.GetError())
	default:
		c.answered(l.shard, node)
	}
	if e != nil && e.Code == codeSessionEnded && err == nil {
		l.noteEnded(w, attempt, e)
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	current := attempt == l.attempt && l.ended == nil
	if current {
		l.inFlight--
		w.flying = false
		l.progress = time.Now()
	}
	switch {
	case w.resolved:
	case e == nil:
		w.replayed = res.GetReplayed()
		l.failures = 0
		l.resolveLocked(w, res.GetToken(), nil)
	case final(e, err):
		l.finalLocked(w, res, e)
	case e.Code == base.ErrInternal.Reason && err == nil && w.internal+1 >= maxInternal:
		l.resolveLocked(w, nil, e)
	case w.foreign.everywhere(c, l.shard, node, e):
		l.resolveLocked(w, nil, l.outcomeOf(w, e))
	default:
		l.retryLocked(w, node, e, err, current)
	}
	l.resumeLocked()
}

// noteEnded: the cluster has ended the session.
func (l *lane) noteEnded(w *write, attempt uint64, e *Error) {
	l.mu.Lock()
	if attempt == l.attempt && l.ended == nil {
		l.inFlight--
		w.flying = false
	}
	l.mu.Unlock()
	l.session.end(e)
}

// finalLocked resolves a write that the shard refused for good.
func (l *lane) finalLocked(w *write, res *keelstatepb.WriteResult, e *Error) {
	l.session.client.noteIncarnation(e)
	w.replayed = res.GetReplayed()
	if w.maybe && !w.replayed && (e.Code == base.ErrUndeclared.Reason || e.Code == base.ErrIncarnation.Reason) {
		// The state may have been dropped after an attempt was applied.
		e.Outcome = OutcomeUnknown
	}
	l.failures = 0
	l.resolveLocked(w, res.GetToken(), e)
}

// retryLocked takes in an answer that calls for another attempt.
func (l *lane) retryLocked(w *write, node string, e *Error, err error, current bool) {
	c := l.session.client
	if e.Outcome != OutcomeNotApplied {
		w.maybe = true
	}
	if e.Code == base.ErrInternal.Reason && err == nil {
		w.internal++
	}
	if !current {
		return
	}
	switch e.Code {
	case base.ErrNotLeader.Reason:
		l.breakLocked(c.misrouted(l.shard, node, e) && l.failures == 0, 0)
	case base.ErrSessionOrder.Reason:
		// Its predecessor was refused; that decides how long to wait.
		l.breakLocked(l.failures == 0, 0)
	case base.ErrStaleEpoch.Reason, base.ErrWrongRange.Reason, base.ErrNoSuchShard.Reason:
		c.misrouted(l.shard, node, e)
		c.refresh()
		l.breakLocked(false, e.RetryAfter)
	case base.ErrOverloaded.Reason, base.ErrSessionWindow.Reason, base.ErrSessionStale.Reason:
		l.breakLocked(false, e.RetryAfter)
	default:
		c.misrouted(l.shard, node, e)
		l.breakLocked(false, e.RetryAfter)
	}
}

// breakLocked stops the flow.
func (l *lane) breakLocked(atOnce bool, after time.Duration) {
	l.broken = true
	l.cause.add(atOnce, after)
	l.resumeLocked()
}

// resumeLocked starts the resumption of a broken lane when nothing is in flight.
func (l *lane) resumeLocked() {
	if !l.broken || l.inFlight > 0 || l.resuming || l.ended != nil {
		return
	}
	wait := max(l.session.client.opts.backoff(l.failures), l.cause.retryAfter)
	if l.cause.atOnce {
		wait = 0
	}
	l.failures++
	l.cause = cause{}
	l.resuming = true
	if !l.session.client.start() {
		return // the client is closing, and ends the lane
	}
	select { // news from before this failure
	case <-l.news:
	default:
	}
	go l.resume(wait)
}

func (l *lane) resume(wait time.Duration) {
	c := l.session.client
	defer c.wg.Done()
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
	case <-l.news:
	case <-l.session.ctx.Done():
		return // the session's end resolves what is open
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended != nil {
		return
	}
	l.attempt++
	l.inFlight = 0
	l.broken, l.resuming = false, false
	l.sendAllLocked()
}

// leaderGrace is how long the writes in flight to a node may go without an
// answer after another one has become the leader.
const leaderGrace = 500 * time.Millisecond

// newLeader takes in that a node has become the leader: a resumption stops
// waiting, and what the former leader does not answer soon is taken back.
func (l *lane) newLeader(node string) {
	select {
	case l.news <- struct{}{}:
	default:
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.inFlight == 0 || l.node == node || l.ended != nil || !l.session.client.start() {
		return
	}
	attempt, now := l.attempt, time.Now()
	go func() {
		defer l.session.client.wg.Done()
		if !pause(l.session.ctx, leaderGrace) {
			return
		}
		l.mu.Lock()
		same := attempt == l.attempt
		l.mu.Unlock()
		if same {
			l.takeBack(now, true)
		}
	}()
}

// takeBack gives up the attempts in flight if none was answered since before;
// atOnce says that it is known who may answer instead.
func (l *lane) takeBack(before time.Time, atOnce bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.inFlight == 0 || l.resuming || l.ended != nil || l.progress.After(before) {
		return
	}
	c := l.session.client
	c.opts.log.Warn("a node gave no answer in time; trying another", "node", l.node, "shard", l.shard, "open", l.inFlight)
	for _, w := range l.window {
		if w.flying {
			unsent := w.pipe.drop(w.exchange)
			w.maybe, w.flying = w.maybe || !unsent, false
		}
	}
	c.misrouted(l.shard, l.node, &Error{})
	c.refresh()
	l.attempt++ // answers still to come belong to the past
	l.inFlight = 0
	l.breakLocked(atOnce, 0)
}

// withdraw takes back a write that was never sent; false if it was.
func (l *lane) withdraw(w *write, why *Error) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w.sent && !w.resolved {
		return false
	}
	if !w.resolved {
		l.resolveLocked(w, nil, why)
	}
	return true
}

// resolveLocked makes a write's result final and moves the window.
func (l *lane) resolveLocked(w *write, token *keelstatepb.Token, e *Error) {
	w.resolved = true
	w.token, w.err = token, e
	if e != nil && e.Shard == 0 {
		e.Shard = l.shard
	}
	if token != nil {
		l.session.client.sawBarrier(token.GetBarrier())
	}
	close(w.done)
	l.session.client.bytes.Release(int64(w.size))
	n := 0
	for n < len(l.window) && l.window[n].resolved {
		n++
	}
	if n > 0 {
		rest := copy(l.window, l.window[n:])
		clear(l.window[rest:])
		l.window = l.window[:rest]
		close(l.space)
		l.space = make(chan struct{})
	}
}

// outcomeOf gives a refusal to send again the outcome of the earlier attempts.
func (l *lane) outcomeOf(w *write, why *Error) *Error {
	e := *why
	e.Outcome = OutcomeNotApplied
	if w.maybe || w.flying {
		e.Outcome = OutcomeUnknown
	} else if e.Code == codeSessionEnded {
		e.Retryable = !l.session.client.opts.oneSession // under the next session
	}
	return &e
}

// end resolves everything that is open.
func (l *lane) end(why *Error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended != nil {
		return
	}
	l.ended = why
	for _, w := range append([]*write(nil), l.window...) {
		if !w.resolved {
			l.resolveLocked(w, nil, l.outcomeOf(w, why))
		}
	}
	close(l.space)
	l.space = make(chan struct{})
}

// final says that a refusal ends the call. Failures of a stream never do.
func final(e *Error, transport error) bool {
	if transport != nil {
		return false
	}
	switch e.Code {
	case base.ErrPrecondition.Reason, base.ErrInvalid.Reason, base.ErrTooLarge.Reason, base.ErrUndeclared.Reason,
		base.ErrWrongKind.Reason, base.ErrOutOfRange.Reason, base.ErrConflict.Reason, base.ErrNotFound.Reason,
		base.ErrUnsupported.Reason, base.ErrIncarnation.Reason, base.ErrSessionForgot.Reason:
		return true
	}
	return false
}

var (
	codeSessionEnded = base.ErrSessionEnded.Reason
	codeIdentity     = base.ErrIdentity.Reason
	// A checkpoint that has failed stays failed: whoever asks wants to know.
	codeCheckpoint = base.ErrCheckpoint.Reason
)
