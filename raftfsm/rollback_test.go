package raftfsm_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

// The places at which a rollback can be cut off.
const (
	cutNowhere = iota
	cutBefore  // nothing of it is done
	cutOpened  // the new store is there, the shard is not in it yet
	cutSealed  // it is sealed, a restart opens the old one
	cutLive    // a restart opens it, the machine does not have it yet
	cutPlaces
)

var errCut = errors.New("cut off")

// rollbacks does for the machine of a replica what the owner of a replica does.
type rollbacks struct {
	r        *replica
	prepared map[uint64]string // by checkpoint: its files
	cut      int
	n        int
}

func (b *rollbacks) hook(rb raftfsm.Rollback, seal func(engine.Store) error) (engine.Store, func(engine.Store), error) {
	files := b.prepared[rb.Checkpoint]
	if files == "" {
		return nil, nil, fmt.Errorf("nothing is prepared: %w", base.ErrDamaged)
	}
	if b.cut == cutBefore {
		return nil, nil, errCut
	}
	b.n++
	dir := filepath.Join(filepath.Dir(b.r.dir), fmt.Sprintf("rolled-%d", b.n))
	if err := os.CopyFS(dir, os.DirFS(files)); err != nil {
		return nil, nil, err
	}
	store, err := b.r.driver.Open(dir)
	if err != nil {
		return nil, nil, err
	}
	if b.cut != cutOpened {
		err = seal(store)
	}
	if b.cut == cutOpened || b.cut == cutSealed {
		err = errCut
	}
	if err != nil {
		return nil, nil, errors.Join(err, store.Close())
	}
	old := b.r.dir
	b.r.dir = dir
	if b.cut == cutLive {
		return nil, nil, errors.Join(errCut, store.Close())
	}
	b.r.store = store
	return store, func(s engine.Store) { _ = errors.Join(s.Close(), os.RemoveAll(old)) }, nil
}

// rollable is a replica that takes a copy of its store at every barrier, into
// files that may be those of another replica.
func rollable(t testing.TB, driver engine.Driver, opts raftfsm.Options, files map[uint64]string) (*replica, *rollbacks) {
	b := &rollbacks{prepared: files}
	opts.OnRollback = b.hook
	opts.OnBarrier = func(c raftfsm.Barrier) {
		if files[c.Number] != "" {
			return
		}
		dir := filepath.Join(t.TempDir(), fmt.Sprint("checkpoint-", c.Number))
		if err := b.r.store.Checkpoint(dir); err != nil {
			t.Error(err)
		}
		files[c.Number] = dir
	}
	b.r = emptyReplica(t, driver, opts)
	return b.r, b
}

func fence(op, to uint64) []byte {
	return raftfsm.AppendFence(nil, raftfsm.Fence{Operation: op, Checkpoint: to})
}

func rollback(op, to uint64) []byte {
	return raftfsm.AppendRollback(nil, raftfsm.Rollback{Operation: op, Checkpoint: to, Incarnation: base.Incarnation(op + 1), Epoch: base.Epoch(op + 1)})
}

func reopen(op uint64) []byte {
	return raftfsm.AppendReopen(nil, raftfsm.Reopen{Operation: op, Revision: base.Revision(100 * op)})
}

// as makes a request one of the incarnation after an operation.
func as(op uint64, q *raftfsm.Request) *raftfsm.Request {
	q.Incarnation, q.Epoch = base.Incarnation(op+1), base.Epoch(op+1)
	return q
}

func refusedAs(t testing.TB, res raftfsm.Result, s *base.Sentinel, hint string) {
	t.Helper()
	err := res.Failure()
	var e *base.Error
	if !errors.Is(err, s) || !errors.As(err, &e) || !strings.Contains(e.Hint, hint) {
		t.Errorf("%v, want %v with %q", err, s, hint)
	}
}

func (r *replica) conflict(command []byte) {
	r.t.Helper()
	before := r.m.Header()
	if o := r.command(command); !errors.Is(o.Err, base.ErrConflict) {
		r.t.Errorf("%v", o.Err)
	}
	if after := r.m.Header(); after.Fence != before.Fence || after.RolledBack != before.RolledBack || after.Sequence != before.Sequence {
		r.t.Errorf("a refused command left %+v of %+v", after, before)
	}
}

func TestRollbackGivesBackTheCheckpointInANewIncarnation(t *testing.T) {
	for _, name := range []string{"mem", "rocks"} {
		t.Run(name, func(t *testing.T) {
			r, _ := rollable(t, newDriver(t, name), raftfsm.Options{}, map[uint64]string{})
			r.found()
			r.ok(r.command(r.encode(inSession(1, 1, put("a", "then"), listAdd("l", "x"), mapPut("m", "u", "1"), add(sumID, "s", i64(5))))))
			r.ok(r.command(barrier(3)))
			r.stamp = 5000
			r.ok(r.command(r.encode(inSession(1, 2, put("a", "later"), put("b", "later"), listAdd("l", "y"), add(sumID, "s", i64(7))))))
			r.ok(r.command(raftfsm.AppendDrop(nil, []engine.FamilyID{mapID})))
			before := r.m.Header()

			r.conflict(rollback(4, 3)) // no fence is up
			r.conflict(reopen(4))
			r.ok(r.command(fence(4, 3)))
			r.ok(r.command(fence(4, 3))) // a new leader may say it again
			refusedAs(t, r.write(inSession(1, 3, put("a", "fenced"))), base.ErrNotReady, "rolling back to checkpoint 3")
			if err := r.m.CheckIncarnation(inSession(1, 3)); !errors.Is(err, base.ErrNotReady) {
				t.Error(err)
			}
			if o := r.command(raftfsm.AppendDeclare(nil, testDeclarations()[:1])); !errors.Is(o.Err, base.ErrNotReady) {
				t.Error(o.Err)
			}
			if r.value("a") != "later" { // reads go on
				t.Error(r.value("a"))
			}
			r.conflict(fence(5, 3))
			r.conflict(rollback(5, 3))
			r.conflict(rollback(4, 2))
			r.conflict(reopen(4)) // not before it is rolled back

			view := r.view()
			old := r.dir
			r.ok(r.command(rollback(4, 3)))
			if a := r.m.Header(); a.Incarnation != 5 || a.Epoch != 5 || a.ClockMs != 5000 || a.Sequence != before.Sequence+1 ||
				a.Barrier != 3 || a.Sessions != 0 || a.AppliedIndex != uint64(len(r.log)) || a.RollbackIndex != a.AppliedIndex {
				t.Errorf("the header is %+v", a)
			}
			if _, err := os.Stat(old); err != nil {
				t.Error("the old store went under an open view")
			}
			view.Close()
			if _, err := os.Stat(old); !errors.Is(err, os.ErrNotExist) {
				t.Error("the old store is still there")
			}
			// Nobody sees the new incarnation before all shards open together.
			for _, i := range []base.Incarnation{1, 5} {
				if _, err := r.m.ReadView(0, i); !errors.Is(err, base.ErrNotReady) {
					t.Error(err)
				}
			}
			refusedAs(t, r.write(as(4, request(put("a", "early")))), base.ErrNotReady, "checkpoint 3")
			r.conflict(rollback(4, 3))
			r.conflict(fence(4, 3))

			r.ok(r.command(reopen(4)))
			r.ok(r.command(reopen(4)))
			if r.value("a") != "then" || r.value("b") != "" || fmt.Sprint(r.list("l")) != "[x]" || r.sum("s") != 5 {
				t.Errorf("a=%q b=%q l=%q s=%d", r.value("a"), r.value("b"), r.list("l"), r.sum("s"))
			}
			if r.m.Header().Declaration(mapID) != nil {
				t.Error("a state that was dropped since the checkpoint is back")
			}
			refusedAs(t, r.write(inSession(1, 2, put("a", "later"))), base.ErrIncarnation, "rolled back to checkpoint 3")
			if err := r.m.CheckIncarnation(inSession(1, 2)); !errors.Is(err, base.ErrIncarnation) {
				t.Error(err)
			}
			if err := r.m.CheckIncarnation(as(4, inSession(1, 2))); err != nil {
				t.Error(err)
			}
			if _, err := r.m.ReadView(0, 1); !errors.Is(err, base.ErrIncarnation) || !strings.Contains(err.Error(), "rolled back to checkpoint 3") {
				t.Error(err)
			}
			// A leader that does not know that the session has ended cannot bring it back.
			r.rev = 399
			refusedAs(t, r.write(as(4, inSession(1, 2, put("a", "revived")))), base.ErrSessionStale, "400")
			r.rev = 400
			r.ok(r.command(r.encode(as(4, inSession(2, 1, put("a", "new"), listAdd("l", "z"))))))
			if fmt.Sprint(r.list("l")) != "[x z]" || r.value("a") != "new" {
				t.Errorf("a=%q l=%q", r.value("a"), r.list("l"))
			}
			want := r.dump()
			for _, flush := range []bool{false, true} {
				r.restart(flush)
				if got := r.dump(); strings.SplitN(got, "ClockMs", 2)[1] != strings.SplitN(want, "ClockMs", 2)[1] {
					t.Errorf("after a restart:\n%s\n%s", got, want)
				}
			}
		})
	}
}

func TestReplicaThatIsNotPreparedStopsAtTheRollback(t *testing.T) {
	for _, hook := range []bool{false, true} {
		r, b := rollable(t, newDriver(t, "mem"), raftfsm.Options{}, map[uint64]string{})
		if !hook {
			r.opts.OnRollback = nil
			r.m.Close()
			r.open()
		}
		r.found()
		r.ok(r.command(fence(1, 9)))
		delete(b.prepared, 9)
		if o := r.command(rollback(1, 9)); base.OutcomeOf(o.Err) != base.OutcomeUnknown || !errors.Is(r.fatal, base.ErrDamaged) {
			t.Errorf("%v; stopped by %v", o.Err, r.fatal)
		}
		if i, _ := r.m.Applied(); i != uint64(len(r.log))-1 {
			t.Errorf("applied %d of %d", i, len(r.log))
		}
	}
}

func TestPreparedStoreOfAnotherShardIsRefused(t *testing.T) {
	foreign := emptyReplica(t, newDriver(t, "mem"), raftfsm.Options{})
	foreign.ok(foreign.command(raftfsm.AppendInit(nil, raftfsm.Init{Group: 7, Range: keygroup.FullRange(groups), M: groups, Epoch: 1, Birth: 98, Incarnation: 1})))
	dir := filepath.Join(t.TempDir(), "foreign")
	if err := foreign.store.Checkpoint(dir); err != nil {
		t.Fatal(err)
	}
	r, _ := rollable(t, newDriver(t, "mem"), raftfsm.Options{}, map[uint64]string{3: dir})
	r.found()
	if err := raftfsm.CheckPrepared(foreign.store, r.m.Header()); !errors.Is(err, base.ErrIdentity) {
		t.Error(err)
	}
	if err := raftfsm.CheckPrepared(r.store, r.m.Header()); err != nil {
		t.Error(err)
	}
	// A replica that was just made says nothing of what is prepared: the rollback
	// would be given up for it.
	fresh := emptyReplica(t, newDriver(t, "mem"), raftfsm.Options{})
	if err := raftfsm.CheckPrepared(r.store, fresh.m.Header()); !errors.Is(err, base.ErrNotReady) || errors.Is(err, base.ErrIdentity) {
		t.Error(err)
	}
	r.ok(r.command(fence(1, 3)))
	was := r.dir
	if o := r.command(rollback(1, 3)); o.Err == nil || !errors.Is(r.fatal, base.ErrIdentity) || r.dir != was {
		t.Errorf("%v; stopped by %v; the live store is %s, was %s", o.Err, r.fatal, r.dir, was)
	}
}

// rolling is a replica in the property below, which the machine of an ideal
// replica, one that never stops, is compared with.
type rolling struct {
	*replica
	b *rollbacks
}

// cutAndReplay applies the entries of ideal's log that the replica has not, with a
// crash at the given place of the next rollback among them.
func (r *rolling) cutAndReplay(t *rapid.T, log []raftfsm.Entry, cut int) {
	r.log = log
	r.b.cut = cut
	r.m.ApplyBatch(log)
	r.b.cut = cutNowhere
	if r.m.Err() != nil && !errors.Is(r.m.Err(), errCut) {
		t.Fatal(r.m.Err())
	}
	if r.m.Err() != nil {
		r.fatal = nil
		if err := r.m.Close(); err != nil {
			t.Fatal(err)
		}
		r.open()
		r.m.ApplyBatch(log)
		if err := r.m.Err(); err != nil {
			t.Fatal(err)
		}
	}
}

// However often the cluster goes back, to whichever checkpoint, and wherever a
// crash cuts it off: all replicas hold the same, which is what the model says, and
// clock and sequence never go back (RF3, RF5, RF11).
func TestRollbackIsTheSameOnEveryReplica(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		files := map[uint64]string{}
		ideal, _ := rollable(t, newDriver(t, "mem"), raftfsm.Options{}, files)
		ideal.found()
		replay := func(batch int) *rolling {
			r, b := rollable(t, newDriver(t, "mem"), raftfsm.Options{MaxBatchOps: batch}, files)
			return &rolling{r, b}
		}
		others := []*rolling{replay(1), replay(50)}
		content, saved := map[string]string{}, map[uint64]map[string]string{}
		var op, checkpoint, seq uint64
		var clock, sequence uint64
		for range rapid.IntRange(3, 25).Draw(rt, "steps") {
			switch what := rapid.IntRange(0, 9).Draw(rt, "what"); {
			case what < 5:
				seq++
				key := fmt.Sprint("k", rapid.IntRange(0, 5).Draw(rt, "key"))
				content[key] = fmt.Sprint("v", seq)
				ideal.stamp += uint64(rapid.IntRange(0, 50).Draw(rt, "ms"))
				q := inSession(base.SessionID(op+1), seq, put(key, content[key]), listAdd("l", content[key]))
				q.Prev = 0
				ideal.rev = base.Revision(100 * op)
				ideal.ok(ideal.command(ideal.encode(as(op, q))))
			case what < 7:
				checkpoint++
				b := raftfsm.Barrier{Number: checkpoint, Epoch: base.Epoch(op + 1), Attempt: checkpoint, Uploader: "n1"}
				ideal.ok(ideal.command(raftfsm.AppendBarrier(nil, b)))
				saved[checkpoint] = map[string]string{}
				for k, v := range content {
					saved[checkpoint][k] = v
				}
			case what < 9 && checkpoint > 0:
				to := rapid.Uint64Range(1, checkpoint).Draw(rt, "to")
				op++
				for _, c := range [][]byte{fence(op, to), rollback(op, to), reopen(op)} {
					ideal.ok(ideal.command(c))
				}
				content = map[string]string{}
				for k, v := range saved[to] {
					content[k] = v
				}
			default:
				o := others[rapid.IntRange(0, 1).Draw(rt, "replica")]
				o.cutAndReplay(rt, ideal.log, rapid.IntRange(0, cutPlaces-1).Draw(rt, "cut"))
			}
			h := ideal.m.Header()
			if h.ClockMs < clock || h.Sequence < sequence {
				rt.Fatalf("clock or sequence went back: %d %d after %d %d", h.ClockMs, h.Sequence, clock, sequence)
			}
			clock, sequence = h.ClockMs, h.Sequence
		}
		for i := range 6 {
			key := fmt.Sprint("k", i)
			if got := ideal.value(key); got != content[key] {
				rt.Fatalf("%s is %q, want %q", key, got, content[key])
			}
		}
		want := ideal.dump()
		for i, o := range others {
			o.cutAndReplay(rt, ideal.log, rapid.IntRange(0, cutPlaces-1).Draw(rt, "last cut"))
			mark := uint64(len(ideal.log))
			h, err := o.m.HashAt(t.Context(), mark)
			if err != nil {
				rt.Fatal(err)
			}
			if got := fmt.Sprintf("%+v", *h); got != want {
				rt.Fatalf("replica %d holds\n%s\nwant\n%s", i, got, want)
			}
		}
	})
}
