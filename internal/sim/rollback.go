package sim

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/jepsen/check"
	"github.com/keelstate/keelstate/jepsen/history"
	"github.com/keelstate/keelstate/raftfsm"
)

const (
	// rollbackLimit is from healing to the end of a rollback: a node that was away
	// may take as long as after any healing, and others wait for its replicas.
	rollbackLimit = 2 * time.Minute
	// makingLimit is how long a healed cluster may need for a checkpoint.
	makingLimit = time.Minute
	// lingering is how long clients of an era go on after its end.
	lingering = 3 * time.Second
)

// taken is a checkpoint that was asked for in an era.
type taken struct {
	window
	number uint64
	era    int
	// known is what the keys of the eras before held then.
	known []contents
}

// checkpoint asks a node for a checkpoint or savepoint. It goes on beside what comes
// next.
func (n *nemesis) checkpoint() (string, func()) {
	i, savepoint := n.host(), n.rng.IntN(6) == 0
	if n.rolling || !n.up(i) {
		return "", nil
	}
	make := n.ask(i, savepoint)
	n.background.Go(func() { _ = make() })
	return fmt.Sprintf("asked of %s, savepoint %v", name(i), savepoint), nil
}

// ask prepares the making of a checkpoint at a node; the function that it returns
// follows it to its end.
func (n *nemesis) ask(i int, savepoint bool) func() error {
	t := &taken{era: n.present().n, window: window{asked: n.now()}}
	incarnation := n.present().incarnation
	for _, e := range n.eras[:t.era] {
		t.known = append(t.known, e.known)
	}
	node, life := n.c.Get(i), n.hosts[i].life.Load()
	return func() error {
		ctx, cancel := context.WithTimeout(context.Background(), makingLimit)
		defer cancel()
		create := node.CreateCheckpoint
		if savepoint {
			create = node.CreateSavepoint
		}
		completed := false
		err := create(ctx, func(c *cluster.CheckpointInfo) error {
			// One that had to wait for a rollback is of the next era; what a process
			// says after its death nobody hears.
			if c.Incarnation != incarnation || n.hosts[i].life.Load() != life {
				return errLost
			}
			completed = c.Phase == meta.CheckpointCompleted
			n.note(t, c.Number, completed)
			return nil
		})
		if err == nil && !completed {
			err = base.ErrCheckpoint
		}
		return err
	}
}

// note takes in what is known of a checkpoint.
func (w *world) note(t *taken, number uint64, completed bool) {
	w.checkpoints.Lock()
	defer w.checkpoints.Unlock()
	if t.number == 0 {
		t.number = number
		w.checkpoints.list = append(w.checkpoints.list, t)
	}
	if completed && t.done == 0 {
		t.done = w.now()
	}
}

// anyNode asks running nodes, one after the other, until one answers or the time is
// over.
func (w *world) anyNode(limit time.Duration, f func(ctx context.Context, n *cluster.Node) error) (err error) {
	err = errRefused
	for end := time.Now().Add(limit); time.Now().Before(end); w.sleep(200 * time.Millisecond) {
		n := w.c.Get(w.intN(w.cfg.Nodes))
		if n == nil {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		err = f(ctx, n)
		cancel()
		if err == nil || errors.Is(err, base.ErrNotFound) {
			break
		}
	}
	return err
}

// target draws a checkpoint to go back to, of those that are retained. A healed
// cluster that retains none makes one.
func (n *nemesis) target() *taken {
	for range 3 {
		var list *cluster.CheckpointList
		err := n.anyNode(check.HealLimit, func(ctx context.Context, node *cluster.Node) (err error) {
			list, err = node.Checkpoints(ctx)
			return err
		})
		if err != nil {
			n.finding("nobody lists the checkpoints within %v of healing: %v", check.HealLimit, err)
			return nil
		}
		if t := n.choose(list); t != nil {
			return t
		}
		end := time.Now().Add(makingLimit)
		for err = errRefused; err != nil && time.Now().Before(end); n.sleep(200 * time.Millisecond) {
			if i := n.host(); n.up(i) {
				err = n.ask(i, false)()
			}
		}
		if err != nil {
			n.finding("%v after healing no checkpoint has completed: %v", makingLimit, err)
			return nil
		}
	}
	return nil // each was retired at once by one that was asked for before
}

func (n *nemesis) choose(list *cluster.CheckpointList) *taken {
	n.checkpoints.Lock()
	defer n.checkpoints.Unlock()
	var all []*taken
	for i := range list.Checkpoints {
		c := &list.Checkpoints[i]
		for _, t := range n.checkpoints.list {
			if t.number == c.Number && c.Phase == meta.CheckpointCompleted {
				if t.done == 0 {
					t.done = n.now() // its end was not heard of
				}
				all = append(all, t)
			}
		}
	}
	if len(all) == 0 {
		return nil
	}
	return all[n.rng.IntN(len(all))]
}

// rollBack takes the cluster back to a checkpoint beside faults and load, and begins
// another era. It says whether the run may go on.
func (n *nemesis) rollBack(r *Report) bool {
	n.rolling = true
	defer func() { n.rolling = false }()
	to, old := n.target(), n.present()
	if to == nil {
		return len(n.findings) == 0
	}
	n.faults["rollback"]++
	n.trace.note("rollback to checkpoint %d of era %d, asked for at %.3f; leaders %s", to.number, to.era, float64(to.asked)/1e9, n.leaders())
	late := newClient(n.world, false) // which knows the old incarnation for ever
	done, gone := n.follow(to.number)
	for range 1 + n.rng.IntN(3) {
		n.step()
	}
	n.heal()
	began := time.Now()
	for !done() && !gone() && time.Since(began) < rollbackLimit && len(n.findings) == 0 {
		n.sleep(200 * time.Millisecond)
	}
	if gone() {
		n.trace.note("checkpoint %d was retired before the rollback began", to.number)
		n.faults["rollback"]--
		return n.alive(r)
	}
	if !done() || !n.learn(old.incarnation) {
		n.finding("%v after healing the rollback to checkpoint %d is not done: %s", time.Since(began), to.number, n.dump())
		return false
	}
	over := n.now()
	n.refuses(late)
	n.sleep(lingering) // the old era's clients find out
	old.stop()
	h := old.close(n.world)
	r.Ops += int64(len(h.Ops))
	r.histories = append(r.histories, judged{fmt.Sprintf("era %d", old.n), h, false})
	for i := range h.Ops {
		if op := &h.Ops[i]; op.Outcome == history.OK && op.Invoke > over {
			n.finding("an operation of incarnation %d is taken after the rollback to checkpoint %d: %v", old.incarnation, to.number, op)
			break
		}
	}
	if !n.alive(r) {
		return false
	}
	r.Rollbacks++
	n.compare(r, to)
	n.begin(r.Dir)
	return len(n.findings) == 0
}

// follow asks for a rollback until a node that has lived all the time says that it
// is done, or that the checkpoint is gone and was never gone back to: one that was
// being made has retired it.
func (n *nemesis) follow(number uint64) (done, gone func() bool) {
	var ended, retired, begun atomic.Bool
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	n.background.Go(func() {
		defer cancel()
		for ctx.Err() == nil && !ended.Load() && !retired.Load() {
			i := n.intN(n.cfg.Nodes)
			node, life := n.c.Get(i), n.hosts[i].life.Load()
			if node != nil && life%2 == 1 {
				attempt, end := context.WithTimeout(ctx, 20*time.Second)
				err := node.Rollback(attempt, cluster.RollbackRequest{Checkpoint: number}, func(info *cluster.RollbackInfo) error {
					if n.hosts[i].life.Load() != life {
						return errLost
					}
					begun.Store(true)
					if info.Failed() {
						n.lapse("the rollback to checkpoint %d was given up: %s", number, info.Error)
					}
					if info.Ended() {
						ended.Store(true)
					}
					return nil
				})
				end()
				n.trace.note("%s says of the rollback: %v", name(i), err)
				switch {
				case errors.Is(err, base.ErrNotFound) && !begun.Load():
					retired.Store(true)
				case err != nil && base.SentinelOf(err).Outcome != base.OutcomeNotApplied:
					begun.Store(true) // maybe
				}
			}
			select {
			case <-ctx.Done():
			case <-time.After(n.jitter(300 * time.Millisecond)):
			}
		}
	})
	return ended.Load, retired.Load
}

// learn takes in the incarnation after an old one, and the shards' epochs in it, once
// no rollback runs. It says whether it could.
func (w *world) learn(old base.Incarnation) bool {
	return w.anyNode(rollbackLimit, func(ctx context.Context, n *cluster.Node) error {
		if r, err := n.RollbackStatus(ctx, 0); err == nil {
			return fmt.Errorf("a rollback is in phase %s", r.Phase)
		} else if !errors.Is(err, base.ErrNotFound) {
			return err
		}
		t, err := n.Topology(ctx, 0)
		if err != nil {
			return err
		}
		if t.Incarnation <= old {
			return fmt.Errorf("the incarnation is %d", t.Incarnation)
		}
		w.sawRevision(t.Revision)
		w.incarnation, w.epochs = t.Incarnation, make([]base.Epoch, w.cfg.Shards)
		for _, s := range t.Shards {
			w.epochs[s.ID-1] = s.Epoch
		}
		return nil
	}) == nil
}

// refuses makes sure that a request of an old incarnation is refused by every shard.
func (n *nemesis) refuses(old *client) {
	ctx, cancel := context.WithTimeout(context.Background(), check.HealLimit)
	defer cancel()
	for _, s := range n.shards() {
		key := n.keyOf(base.GroupID(s))
		for name, f := range map[string]func() error{
			"write": func() error {
				return old.write(ctx, raftfsm.Request{}, state.Mutation{State: n.fams.register, Op: state.OpValuePut, Key: key, Value: encode(2)})
			},
			"read": func() error {
				_, err := old.read(ctx, state.Query{State: n.fams.register, Kind: state.QueryGet, Key: key})
				return err
			},
		} {
			err := f()
			for ; base.SentinelOf(err).Outcome == base.OutcomeUnknown && ctx.Err() == nil; err = f() {
				n.sleep(20 * time.Millisecond) // the connection broke
			}
			if !errors.Is(err, base.ErrIncarnation) {
				n.finding("a %s of incarnation %d to shard %d is not refused for that: %v", name, old.incarnation, s, err)
			}
		}
	}
}

// compare reads all keys and judges them: those of the era of the checkpoint by its
// history up to there, those of earlier ones by what they held then, and those of
// later ones are empty.
func (n *nemesis) compare(r *Report, to *taken) {
	for _, e := range n.eras {
		after := n.readAgain(e)
		read := contentsOf(after)
		var diff string
		switch {
		case e.n < to.era:
			diff = read.differs(to.known[e.n])
		case e.n > to.era:
			diff = read.differs(contents{})
		default:
			name := fmt.Sprintf("era %d at checkpoint %d", e.n, to.number)
			r.histories = append(r.histories, judged{name, rewind(e.rec.History().Ops, to.window, after), true})
		}
		if diff != "" {
			n.finding("era %d after the rollback to checkpoint %d of era %d: %s", e.n, to.number, to.era, diff)
		}
		e.known = read
	}
}

// stays makes sure that what the ended eras hold is what it was.
func (w *world) stays() {
	for _, e := range w.eras[:len(w.eras)-1] {
		if diff := contentsOf(w.readAgain(e)).differs(e.known); diff != "" {
			w.finding("era %d at the end: %s", e.n, diff)
		}
	}
}

// verify reads every checkpoint that is retained in the end.
func (w *world) verify() {
	var list *cluster.CheckpointList
	err := w.anyNode(check.HealLimit, func(ctx context.Context, n *cluster.Node) (err error) {
		list, err = n.Checkpoints(ctx)
		return err
	})
	if err != nil {
		w.finding("nobody lists the checkpoints in the end: %v", err)
		return
	}
	for i := range list.Checkpoints {
		c := &list.Checkpoints[i]
		if c.Phase != meta.CheckpointCompleted {
			continue
		}
		var v *cluster.CheckpointVerification
		err := w.anyNode(check.HealLimit, func(ctx context.Context, n *cluster.Node) (err error) {
			v, err = n.VerifyCheckpoint(ctx, c.Number, false, nil)
			return err
		})
		switch {
		case errors.Is(err, base.ErrNotFound): // retired by one that was still being made
		case err != nil:
			w.finding("checkpoint %d, which is retained, could not be read: %v", c.Number, err)
		case len(v.Bad) > 0:
			w.finding("checkpoint %d, which is retained, is not whole: %+v", c.Number, v.Bad)
		}
	}
}
