package cluster_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/testcluster"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

// pipeline sends the numbers of the kit's session in order, several at once, as
// a client does: each names its previous one and the lowest open one; after a
// failure the open ones are resolved in order before new ones follow (W3).
type pipeline struct {
	k       *kit
	open    []uint64 // ascending
	window  int
	answers chan pipelineAnswer
	flying  int
	// ordered counts refusals by order, lost those of unknown outcome.
	ordered, lost int
	first         map[uint64]uint64 // sequence of the shard by number
}

type pipelineAnswer struct {
	seq uint64
	res raftfsm.Result
}

func (p *pipeline) send(node int, seq uint64) {
	r := p.k.request(seq, p.k.add("s", int64(seq)), p.k.appendTo("l", fmt.Sprint(seq)))
	r.Floor = p.open[0]
	p.flying++
	p.k.Node(node).Submit(p.k.ctx(), p.k.route(), r, func(res raftfsm.Result) { p.answers <- pipelineAnswer{seq, res} })
}

// receive takes one answer; it says whether all goes well.
func (p *pipeline) receive() bool {
	a := <-p.answers
	p.flying--
	if a.res.Err == nil {
		if old, twice := p.first[a.seq]; twice && old != a.res.First {
			p.k.t.Fatalf("number %d has sequence %d and %d", a.seq, old, a.res.First)
		}
		p.first[a.seq] = a.res.First
		p.open = slices.DeleteFunc(p.open, func(s uint64) bool { return s == a.seq })
		return true
	}
	s := base.SentinelOf(a.res.Err)
	switch {
	case s == base.ErrSessionOrder:
		p.ordered++
	case s.Outcome == base.OutcomeUnknown && s != base.ErrSessionForgot:
		p.lost++
	case !s.Retryable:
		p.k.t.Fatalf("number %d: %v", a.seq, a.res.Err)
	}
	return false
}

// run sends the numbers from 1 on until enough says so of the next one, and returns
// the last.
func (p *pipeline) run(enough func(next uint64) bool) uint64 {
	next := uint64(1)
	for len(p.open) > 0 || !enough(next) {
		leader := p.k.Leader(1)
		for _, seq := range p.open { // again, in order
			p.send(leader, seq)
		}
		for well := true; well || p.flying > 0; {
			for well && len(p.open) < p.window && !enough(next) {
				p.open = append(p.open, next)
				p.send(leader, next)
				next++
			}
			if p.flying == 0 {
				break
			}
			well = p.receive() && well
		}
	}
	return next - 1
}

// W3: a pipelined session under changes of leader loses nothing, doubles
// nothing and never overtakes itself.
func TestPipelinedSessionUnderLeaderTransfers(t *testing.T) {
	eachEngine(t, func(t *testing.T, e string) {
		k := newKit(t, testcluster.Options{Engine: e})
		p := &pipeline{k: k, window: 32, answers: make(chan pipelineAnswer, 64), first: map[uint64]uint64{}}
		stop := make(chan struct{})
		var wg sync.WaitGroup
		var transfers atomic.Int64
		wg.Add(1)
		go func() {
			defer wg.Done()
			tick := time.NewTicker(50 * time.Millisecond)
			defer tick.Stop()
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				case <-tick.C:
				}
				if _, err := k.Node(0).TransferLeader(k.ctx(), 1, testcluster.ID(i%3)); err == nil {
					transfers.Add(1)
				}
			}
		}()
		// A quick machine is done with 1,500 before the first transfer.
		numbers := int(p.run(func(next uint64) bool { return next > 1500 && transfers.Load() >= 3 || next > 100_000 }))
		close(stop)
		wg.Wait()
		t.Logf("%d numbers, %d transfers, %d refusals by order, %d unknown outcomes", numbers, transfers.Load(), p.ordered, p.lost)
		if transfers.Load() == 0 {
			t.Error("no transfer took place: the test shows nothing")
		}
		if got, want := k.sum("s"), int64(numbers*(numbers+1)/2); got != want {
			t.Errorf("sum %d, want %d", got, want)
		}
		l := k.list("l")
		if len(l) != numbers {
			t.Fatalf("the list has %d elements, want %d", len(l), numbers)
		}
		for i := range l {
			if l[i] != fmt.Sprint(i+1) {
				t.Fatalf("element %d is %s: the pipeline overtook itself", i, l[i])
			}
		}
		k.checkHashes()
	})
}

// W3: a request whose predecessor was lost is refused, not applied, until that
// one came.
func TestRequestBehindALostOneIsRefusedByOrder(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{})
	k.mustWrite(k.appendTo("l", "1"))
	third := k.request(3, k.appendTo("l", "3"))
	third.Floor = 2
	for range 3 {
		if res := k.submit(k.Leader(1), third); res.Err == nil || !errors.Is(res.Err, base.ErrSessionOrder) {
			t.Fatalf("number 3 without number 2: %v", res.Err)
		}
	}
	second := k.request(2, k.appendTo("l", "2"))
	if res := k.submit(k.Leader(1), second); res.Err != nil {
		t.Fatal(res.Err)
	}
	if res := k.submit(k.Leader(1), third); res.Err != nil {
		t.Fatal(res.Err)
	}
	if res := k.submit(k.Leader(1), second); res.Err != nil || !res.Replayed {
		t.Fatalf("number 2 again: %+v", res)
	}
	// Below the floor nothing is remembered and nothing executed.
	fourth := k.request(4, k.appendTo("l", "4"))
	if res := k.submit(k.Leader(1), fourth); res.Err != nil {
		t.Fatal(res.Err)
	}
	if res := k.submit(k.Leader(1), second); res.Err == nil || !errors.Is(res.Err, base.ErrSessionForgot) {
		t.Fatalf("number 2 below the floor: %+v", res)
	}
	if got := k.list("l"); !slices.Equal(got, []string{"1", "2", "3", "4"}) {
		t.Fatalf("the list is %v", got)
	}
}

// W3: a session whose lease ran out is refused everywhere, its memory goes from
// every replica, and nothing brings it back: not a repeat, not a keep-alive, not
// a leader whose metadata are old.
func TestExpiredSessionNeverOpensAgain(t *testing.T) {
	eachEngine(t, func(t *testing.T, e string) {
		k := newKit(t, testcluster.Options{Engine: e})
		id, rev, lease, err := k.Node(1).OpenSession(k.ctx(), time.Second)
		if err != nil || lease != time.Second {
			t.Fatalf("opening: %v, lease %v", err, lease)
		}
		k.session, k.rev = id, rev
		k.mustWrite(k.add("s", 1))
		for i := range 3 {
			k.Eventually("every replica remembers the session", func() error { return k.remembers(i, 1) })
		}
		k.Eventually("the session is refused", func() error {
			res := k.submit(k.Leader(1), k.request(1, k.add("s", 1)))
			if res.Err == nil {
				if !res.Replayed {
					t.Fatal("number 1 was executed again")
				}
				return errors.New("it lives")
			}
			if !errors.Is(res.Err, base.ErrSessionEnded) {
				return res.Err
			}
			return nil
		})
		for i := range 3 {
			k.Eventually("every replica forgets the session", func() error { return k.remembers(i, 0) })
			if _, err := k.Node(i).KeepAliveSession(k.ctx(), id); !errors.Is(err, base.ErrSessionEnded) {
				t.Errorf("keep-alive at node %d: %v", i, err)
			}
		}
		for _, seq := range []uint64{1, 2} {
			if res := k.submit(k.Leader(1), k.request(seq, k.add("s", 1))); !errors.Is(res.Failure(), base.ErrSessionEnded) {
				t.Errorf("number %d of the ended session: %v", seq, res.Err)
			}
		}
		// A leader that still knows the session as alive: the entry carries the
		// revision of its metadata, and apply refuses it.
		leader := k.Leader(1)
		req := k.request(2, k.add("s", 1))
		req.Epoch = 1
		res, err := k.Node(leader).ProposeAs(1, rev, req)
		if err != nil || !errors.Is(res.Failure(), base.ErrSessionStale) {
			t.Errorf("an entry of a leader with old metadata: %+v, %v", res, err)
		}
		other, _, _, err := k.Node(0).OpenSession(k.ctx(), 0)
		if err != nil || other == id {
			t.Errorf("the next session is %d, %v; the ended one was %d", other, err, id)
		}
		for i := range 3 {
			k.Restart(i)
		}
		k.WaitReady()
		if res := k.submit(k.Leader(1), k.request(1, k.add("s", 1))); !errors.Is(res.Failure(), base.ErrSessionEnded) && base.OutcomeOf(res.Failure()) != base.OutcomeNotApplied {
			t.Errorf("number 1 after a restart: %v", res.Err)
		}
		if got := k.sum("s"); got != 1 {
			t.Errorf("sum %d, want 1", got)
		}
		k.checkHashes()
	})
}

func (k *kit) remembers(node, want int) error {
	n, _, err := k.Node(node).ShardSessions(1)
	if err == nil && n != want {
		err = fmt.Errorf("node %d remembers %d sessions, want %d", node, n, want)
	}
	return err
}

// Requests that the shard refuses by place or content are refused with their
// reason and detail, and nothing is written.
func TestRefusedRequestsWriteNothing(t *testing.T) {
	t.Parallel()
	k := newKit(t, testcluster.Options{Shards: 2})
	here := k.keyIn(1, "key")
	there := k.keyIn(2, "key")
	k.mustWrite(k.put(here, "1"))
	leader := k.Leader(1)
	before := k.sequence(leader)
	wrongKind := k.put(here, "2")
	wrongKind.State = k.lists
	undeclared := k.put(here, "2")
	undeclared.State = 9999
	badNumber := k.add(here, 1)
	badNumber.Elements = [][]byte{{1, 2, 3}}
	cases := []struct {
		name  string
		want  *base.Sentinel
		spoil func(r *raftfsm.Request)
		epoch base.Epoch
		inc   base.Incarnation
	}{
		{"undeclared", base.ErrUndeclared, func(r *raftfsm.Request) { r.Mutations[1].Mutation = undeclared }, 1, 0},
		{"wrong kind", base.ErrWrongKind, func(r *raftfsm.Request) { r.Mutations[1].Mutation = wrongKind }, 1, 0},
		{"invalid element", base.ErrInvalid, func(r *raftfsm.Request) { r.Mutations[1].Mutation = badNumber }, 1, 0},
		{"key of another shard", base.ErrWrongRange, func(r *raftfsm.Request) { r.Mutations[1].Mutation = k.put(there, "2") }, 1, 0},
		{"older epoch", base.ErrStaleEpoch, func(*raftfsm.Request) {}, 0, 0},
		{"newer epoch", base.ErrStaleEpoch, func(*raftfsm.Request) {}, 2, 0},
		{"other incarnation", base.ErrIncarnation, func(*raftfsm.Request) {}, 1, 7},
		{"number 0", base.ErrInvalid, func(r *raftfsm.Request) { r.Seq = 0 }, 1, 0},
		{"floor above the number", base.ErrInvalid, func(r *raftfsm.Request) { r.Floor = r.Seq + 1 }, 1, 0},
		{"unknown session", base.ErrSessionEnded, func(r *raftfsm.Request) { r.Session = 12345 }, 1, 0},
		{"ordinals not ascending", base.ErrInvalid, func(r *raftfsm.Request) { r.Mutations[1].Ordinal = 0 }, 1, 0},
	}
	for _, c := range cases {
		req := k.request(k.seq+1, k.put(here, "2"), k.put(here, "3"))
		c.spoil(req)
		route := k.route()
		route.Epoch, route.Incarnation = c.epoch, c.inc
		done := make(chan raftfsm.Result, 1)
		k.Node(leader).Submit(k.ctx(), route, req, func(r raftfsm.Result) { done <- r })
		res := <-done
		if !errors.Is(res.Failure(), c.want) {
			t.Errorf("%s: %v, want %v", c.name, res.Err, c.want)
			continue
		}
		if res.Err.Group == nil || *res.Err.Group != 1 {
			t.Errorf("%s: the error does not name the shard: %+v", c.name, res.Err)
		}
	}
	route := k.route()
	route.Group = 77
	done := make(chan raftfsm.Result, 1)
	k.Node(leader).Submit(k.ctx(), route, k.request(k.seq+1, k.put(here, "2")), func(r raftfsm.Result) { done <- r })
	if res := <-done; !errors.Is(res.Failure(), base.ErrNoSuchShard) {
		t.Errorf("unknown shard: %v", res.Err)
	}
	for i := range 3 {
		if i == leader {
			continue
		}
		res := k.submit(i, k.request(k.seq+1, k.put(here, "2")))
		if !errors.Is(res.Failure(), base.ErrNotLeader) || res.Err.LeaderHint != testcluster.ID(leader) {
			t.Errorf("a follower: %v, hint %q", res.Err, res.Err.LeaderHint)
		}
	}
	if after := k.sequence(leader); after != before {
		t.Errorf("the refused requests moved the sequence from %d to %d", before, after)
	}
	if got := k.value(here); got != "1" {
		t.Errorf("value %q", got)
	}
	k.mustWrite(k.put(here, "4")) // the number of the refused ones is still free
	if got := k.value(here); got != "4" {
		t.Errorf("value %q", got)
	}
}

// keyIn returns a key of a shard.
func (k *kit) keyIn(shard base.GroupID, prefix string) string {
	k.t.Helper()
	top, err := k.Node(k.Running()[0]).Topology(k.ctx(), 0)
	if err != nil {
		k.t.Fatal(err)
	}
	i := slices.IndexFunc(top.Shards, func(s cluster.ShardInfo) bool { return s.ID == shard })
	for n := 0; ; n++ {
		key := fmt.Sprintf("%s-%d", prefix, n)
		hash, err := keygroup.HashCode(keygroup.String, []byte(key))
		if err != nil {
			k.t.Fatal(err)
		}
		if top.Shards[i].Range.Contains(keygroup.GroupOf(hash, top.KeyGroups)) {
			return key
		}
	}
}

// sequence is the sequence of shard 1 at a node.
func (k *kit) sequence(node int) uint64 {
	k.t.Helper()
	st, err := k.Node(node).NodeStatus(k.ctx())
	if err != nil {
		k.t.Fatal(err)
	}
	for _, g := range st.Groups {
		if g.Group == 1 {
			return g.Sequence
		}
	}
	k.t.Fatal("no replica of shard 1")
	return 0
}
