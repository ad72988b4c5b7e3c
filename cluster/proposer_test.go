package cluster

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/raftfsm"
)

// fakeFuture is an entry in the hands of a fake raft, answered by the test.
type fakeFuture struct {
	entry    []byte
	answered chan struct{}
	err      error
	response any
}

func (f *fakeFuture) Error() error  { <-f.answered; return f.err }
func (f *fakeFuture) Response() any { return f.response }
func (f *fakeFuture) Index() uint64 { return 1 }

// fakeRaft collects what is proposed.
type fakeRaft struct {
	proposed chan *fakeFuture
	// auto, if set, answers an entry at once.
	auto func(f *fakeFuture)
}

func (r *fakeRaft) propose(entry []byte, _ time.Duration) raft.ApplyFuture {
	f := &fakeFuture{entry: bytes.Clone(entry), answered: make(chan struct{})}
	if r.auto != nil {
		r.auto(f)
		close(f.answered)
	}
	r.proposed <- f
	return f
}

func fakeMetrics(t testing.TB) *groupMetrics {
	t.Helper()
	m, err := newMetrics(nil)
	if err != nil {
		t.Fatal(err)
	}
	return m.group(1)
}

func startProposer(t testing.TB, r *fakeRaft, stamp func() (uint64, error)) *proposer {
	t.Helper()
	if stamp == nil {
		stamp = func() (uint64, error) { return 1, nil }
	}
	return newProposer(r.propose, stamp, func(f raft.Future) error { return f.Error() }, fakeMetrics(t))
}

// numbered is a write that can be told from others, of about size bytes.
func numbered(seq uint64, size int, done func(raftfsm.Result)) pendingWrite {
	req := &raftfsm.Request{Session: 1, Seq: seq, Mutations: []raftfsm.Mutation{{}}}
	m := &req.Mutations[0].Mutation
	m.State, m.Op, m.Key, m.Value = 1, 1, []byte("k"), make([]byte, size)
	b, err := raftfsm.AppendRequest(nil, req)
	if err != nil {
		panic(err)
	}
	return pendingWrite{encoded: b, mutations: 1, revision: base.Revision(seq), done: done}
}

// numbersOf lists the numbers of an entry's requests.
func numbersOf(t testing.TB, entry []byte) []uint64 {
	t.Helper()
	var c raftfsm.Command
	if err := c.Decode(entry); err != nil {
		t.Fatal(err)
	}
	out := make([]uint64, len(c.Requests))
	for i := range c.Requests {
		out[i] = c.Requests[i].Seq
	}
	return out
}

// answers counts the done calls per number.
type answers struct {
	mu sync.Mutex
	n  map[uint64]int
	r  map[uint64]raftfsm.Result
}

func newAnswers() *answers { return &answers{n: map[uint64]int{}, r: map[uint64]raftfsm.Result{}} }

func (a *answers) done(seq uint64) func(raftfsm.Result) {
	return func(r raftfsm.Result) {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.n[seq]++
		a.r[seq] = r
	}
}

func (a *answers) get(seq uint64) (int, raftfsm.Result) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.n[seq], a.r[seq]
}

// succeed gives every request of an entry a result with its own number.
func succeed(t testing.TB) func(f *fakeFuture) {
	return func(f *fakeFuture) {
		out := &raftfsm.Outcome{}
		for _, seq := range numbersOf(t, f.entry) {
			out.Results = append(out.Results, raftfsm.Result{First: seq})
		}
		f.response = out
	}
}

// Order, bounds and answers, whatever is submitted: every write is in exactly
// one entry, in the order of submit, no entry is over a bound unless it holds
// one request, its revision is the lowest of its requests, and done is called
// once per write with its own result.
func TestProposerKeepsOrderAndBoundsProperty(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(1, 2500).Draw(rt, "writes")
		sizes := rapid.SliceOfN(rapid.SampledFrom([]int{0, 10, 1000, 300_000, maxEntryBytes - 100, maxEntryBytes + 5}), 1, 8).Draw(rt, "sizes")
		if n > 300 {
			sizes = []int{10}
		}
		var gate sync.Mutex
		gate.Lock() // until everything is queued, so that coalescing has its choice
		r := &fakeRaft{proposed: make(chan *fakeFuture, n)}
		r.auto = succeed(t)
		p := startProposer(t, r, func() (uint64, error) { gate.Lock(); gate.Unlock(); return 7, nil }) //nolint:staticcheck // a gate
		a := newAnswers()
		total := 0
		for i := 1; i <= n; i++ {
			w := numbered(uint64(i), sizes[i%len(sizes)], a.done(uint64(i)))
			if total += len(w.encoded); total > maxQueuedBytes {
				n = i - 1
				break
			}
			if err := p.submit(w); err != nil {
				rt.Fatal(err)
			}
		}
		gate.Unlock()
		p.close()
		close(r.proposed)
		next := uint64(1)
		for f := range r.proposed {
			var c raftfsm.Command
			if err := c.Decode(f.entry); err != nil {
				rt.Fatal(err)
			}
			if k := len(c.Requests); k > maxEntryRequests || k > 1 && len(f.entry) > maxEntryBytes+100 {
				rt.Fatalf("an entry of %d requests and %d bytes", k, len(f.entry))
			}
			if c.StampMs != 7 || c.SystemRevision != base.Revision(next) {
				rt.Fatalf("stamp %d, revision %d, want 7 and %d", c.StampMs, c.SystemRevision, next)
			}
			for i := range c.Requests {
				if c.Requests[i].Seq != next {
					rt.Fatalf("number %d came in place of %d", c.Requests[i].Seq, next)
				}
				next++
			}
		}
		if next != uint64(n)+1 {
			rt.Fatalf("%d of %d writes were proposed", next-1, n)
		}
		for i := uint64(1); i <= uint64(n); i++ {
			if times, res := a.get(i); times != 1 || res.Err != nil || res.First != i {
				rt.Fatalf("number %d was answered %d times, the last with %+v", i, times, res)
			}
		}
	})
}

// A write goes at once while nothing is under way; beside entries under way the
// queue grows until it is worth as much as they are; never more than the bound
// of entries is in raft's hands.
func TestProposerGathersWhileEntriesAreUnderWay(t *testing.T) {
	r := &fakeRaft{proposed: make(chan *fakeFuture, 100)}
	p := startProposer(t, r, nil)
	a := newAnswers()
	seq := uint64(0)
	submit := func(count int) {
		t.Helper()
		for range count {
			seq++
			if err := p.submit(numbered(seq, 10, a.done(seq))); err != nil {
				t.Fatal(err)
			}
		}
	}
	nothing := func(why string) {
		t.Helper()
		select {
		case f := <-r.proposed:
			t.Fatalf("entry %v was proposed %s", numbersOf(t, f.entry), why)
		default:
		}
	}
	var under []*fakeFuture
	for _, size := range []int{1, 1, 2, 4} { // each as many as are under way
		submit(size - 1)
		nothing("before it was worth it")
		submit(1)
		f := <-r.proposed
		if got := numbersOf(t, f.entry); len(got) != size || got[size-1] != seq {
			t.Fatalf("entry %v, want %d up to %d", got, size, seq)
		}
		under = append(under, f)
	}
	if len(under) != maxEntriesInFlight {
		t.Fatalf("the test fills %d entries, the bound is %d", len(under), maxEntriesInFlight)
	}
	submit(100)
	nothing("beyond the bound")
	answer := func(f *fakeFuture) { succeed(t)(f); close(f.answered) }
	answer(under[0])
	f := <-r.proposed
	if got := numbersOf(t, f.entry); len(got) != 100 {
		t.Fatalf("an entry of %d requests, want 100", len(got))
	}
	for _, u := range append(under[1:], f) {
		answer(u)
	}
	p.close()
	for i := uint64(1); i <= seq; i++ {
		if times, res := a.get(i); times != 1 || res.Err != nil {
			t.Errorf("number %d: %d answers, %v", i, times, res.Err)
		}
	}
}

// Bytes are worth an entry as well as requests are.
func TestProposerSendsLargeWritesBesideOthers(t *testing.T) {
	r := &fakeRaft{proposed: make(chan *fakeFuture, 100)}
	p := startProposer(t, r, nil)
	a := newAnswers()
	for _, size := range []int{10, 10} {
		if err := p.submit(numbered(1, size, a.done(1))); err != nil {
			t.Fatal(err)
		}
	}
	first := []*fakeFuture{<-r.proposed}
	for got := len(numbersOf(t, first[0].entry)); got < 2; got++ {
		first = append(first, <-r.proposed)
	}
	if err := p.submit(numbered(2, worthwhileBytes, a.done(2))); err != nil {
		t.Fatal(err)
	}
	last := <-r.proposed
	for _, f := range append(first, last) {
		succeed(t)(f)
		close(f.answered)
	}
	p.close()
	if times, res := a.get(2); times != 1 || res.Err != nil {
		t.Fatalf("%d answers, %v", times, res.Err)
	}
}

// A burst that comes back together goes together; a lone writer never waits.
func TestPaceLingersOnlyForABurst(t *testing.T) {
	var p pace
	land := func(requests, queued int, took time.Duration) { p.depart(requests); p.land(requests, queued, took) }
	for range 50 {
		land(1, 0, 8*time.Millisecond)
		if w := p.linger(1); w != 0 {
			t.Fatalf("a lone writer waits %v", w)
		}
	}
	land(16, 2, 8*time.Millisecond)
	for queued, want := range map[int]time.Duration{1: maxLinger, 17: maxLinger, 18: 0, 30: 0} {
		if w := p.linger(queued); w != want {
			t.Fatalf("18 are expected, %d queued: it waits %v", queued, w)
		}
	}
	for range 100 { // a fast disk
		land(16, 0, 400*time.Microsecond)
	}
	if w := p.linger(1); w > 60*time.Microsecond || w < 40*time.Microsecond {
		t.Fatalf("a burst on a fast disk waits %v", w)
	}
	p.depart(16)
	if w := p.linger(1); w != 0 {
		t.Fatalf("it waits %v beside an entry in flight", w)
	}
	land(16, 0, 0) // never proposed: says nothing about the disk
	if p.commit < 400*time.Microsecond || p.entries != 1 || p.requests != 16 {
		t.Fatalf("%+v", p)
	}
	for range maxEntriesInFlight - 1 {
		p.depart(1)
	}
	if p.ready(maxEntryRequests, maxEntryBytes) || !p.full() {
		t.Fatalf("the bound does not hold: %+v", p)
	}
}

// A full queue refuses, by count and by bytes, before anything is proposed, and
// says when to come back; what it took is kept.
func TestProposerRefusesWhenFull(t *testing.T) {
	for _, c := range []struct {
		name     string
		size, at int
	}{
		{"requests", 0, maxQueuedRequests},
		{"bytes", 4 << 20, maxQueuedBytes / (4<<20 + 100)},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := &fakeRaft{proposed: make(chan *fakeFuture, 20000)}
			r.auto = succeed(t)
			gate := make(chan struct{})
			p := startProposer(t, r, func() (uint64, error) { <-gate; return 1, nil })
			a := newAnswers()
			w := numbered(1, c.size, nil)
			taken, refusals := uint64(0), 0
			// The batcher may hold one entry's worth outside of the queue.
			for i := range uint64(c.at + 2*maxEntryRequests) {
				w.done = a.done(i)
				err := p.submit(w)
				if err == nil {
					if refusals == 0 {
						taken = i + 1
					}
					continue
				}
				refusals++
				var e *base.Error
				if !errors.As(err, &e) || !errors.Is(err, base.ErrOverloaded) || e.RetryAfter <= 0 || base.OutcomeOf(err) != base.OutcomeNotApplied {
					t.Fatalf("refusal %v", err)
				}
				if times, _ := a.get(i); times != 0 {
					t.Fatal("done was called for a refused write")
				}
				if refusals == 3 {
					break
				}
			}
			if refusals == 0 || taken < uint64(c.at)-1 || taken > uint64(c.at+maxEntryRequests) {
				t.Fatalf("%d taken, %d refused; the bound is %d", taken, refusals, c.at)
			}
			close(gate)
			p.close()
			for i := range taken {
				if times, res := a.get(i); times != 1 || res.Err != nil {
					t.Fatalf("write %d: %d answers, %v", i, times, res.Err)
				}
			}
		})
	}
}

// W8: every error of raft answers every request of the entry once, with the
// outcome of the table.
func TestProposerAnswersEveryRaftError(t *testing.T) {
	for _, c := range raftErrors {
		var pending sync.Mutex
		r := &fakeRaft{proposed: make(chan *fakeFuture, 10), auto: func(f *fakeFuture) { f.err = c.err }}
		pending.Lock()
		p := startProposer(t, r, func() (uint64, error) { pending.Lock(); pending.Unlock(); return 1, nil }) //nolint:staticcheck // a gate
		a := newAnswers()
		for seq := uint64(1); seq <= 5; seq++ {
			if err := p.submit(numbered(seq, 10, a.done(seq))); err != nil {
				t.Fatal(err)
			}
		}
		pending.Unlock()
		p.close()
		for seq := uint64(1); seq <= 5; seq++ {
			times, res := a.get(seq)
			if times != 1 || base.SentinelOf(res.Failure()) != c.want || base.OutcomeOf(res.Failure()) != c.outcome {
				t.Errorf("%v: %d answers, %v (%s), want %v", c.err, times, res.Err, base.OutcomeOf(res.Failure()), c.want)
			}
		}
	}
}

// A response that is not what raftfsm gives is never taken for success.
func TestProposerDoesNotBelieveStrangeResponses(t *testing.T) {
	for name, c := range map[string]struct {
		response any
		outcome  base.Outcome
	}{
		"no outcome":         {nil, base.OutcomeUnknown},
		"another type":       {errors.New("x"), base.OutcomeUnknown},
		"too few results":    {&raftfsm.Outcome{}, base.OutcomeUnknown},
		"too many results":   {&raftfsm.Outcome{Results: make([]raftfsm.Result, 2)}, base.OutcomeUnknown},
		"refused as a whole": {&raftfsm.Outcome{Err: base.ErrNotReady}, base.OutcomeNotApplied},
	} {
		r := &fakeRaft{proposed: make(chan *fakeFuture, 10), auto: func(f *fakeFuture) { f.response = c.response }}
		p := startProposer(t, r, nil)
		a := newAnswers()
		if err := p.submit(numbered(1, 10, a.done(1))); err != nil {
			t.Fatal(err)
		}
		p.close()
		if times, res := a.get(1); times != 1 || res.Err == nil || base.OutcomeOf(res.Failure()) != c.outcome {
			t.Errorf("%s: %d answers, %v", name, times, res.Err)
		}
	}
}

// A replica that does not lead proposes nothing: not applied.
func TestProposerWithoutOfficeProposesNothing(t *testing.T) {
	r := &fakeRaft{proposed: make(chan *fakeFuture, 10)}
	p := startProposer(t, r, func() (uint64, error) { return 0, &base.Error{Cause: base.ErrNotLeader, LeaderHint: "n2", Ordinal: -1} })
	a := newAnswers()
	for seq := uint64(1); seq <= 3; seq++ {
		if err := p.submit(numbered(seq, 10, a.done(seq))); err != nil {
			t.Fatal(err)
		}
	}
	p.close()
	for seq := uint64(1); seq <= 3; seq++ {
		if times, res := a.get(seq); times != 1 || !errors.Is(res.Failure(), base.ErrNotLeader) || res.Err.LeaderHint != "n2" {
			t.Errorf("number %d: %d answers, %+v", seq, times, res.Err)
		}
	}
	if len(r.proposed) != 0 {
		t.Error("something was proposed")
	}
	if err := p.submit(numbered(9, 10, nil)); !errors.Is(err, base.ErrShuttingDown) {
		t.Errorf("submit after close: %v", err)
	}
}

// Submit and close race: exactly one answer or an error per write.
func TestProposerCloseRacesWithSubmit(t *testing.T) {
	for range 20 {
		r := &fakeRaft{proposed: make(chan *fakeFuture, 1000)}
		r.auto = succeed(t)
		p := startProposer(t, r, nil)
		a := newAnswers()
		var wg sync.WaitGroup
		var mu sync.Mutex
		accepted := map[uint64]bool{}
		for g := range uint64(4) {
			wg.Add(1)
			go func() {
				defer wg.Done()
				for i := range uint64(50) {
					seq := g*1000 + i + 1
					if p.submit(numbered(seq, 10, a.done(seq))) == nil {
						mu.Lock()
						accepted[seq] = true
						mu.Unlock()
					}
				}
			}()
		}
		p.close()
		wg.Wait()
		for g := range uint64(4) {
			for i := range uint64(50) {
				seq := g*1000 + i + 1
				times, _ := a.get(seq)
				if want := map[bool]int{true: 1}[accepted[seq]]; times != want {
					t.Fatalf("number %d: accepted %v, %d answers", seq, accepted[seq], times)
				}
			}
		}
	}
}

// raftErrors is the table of W8 for every error that raft's Apply can give.
var raftErrors = []struct {
	err     error
	want    *base.Sentinel
	outcome base.Outcome
}{
	{raft.ErrNotLeader, base.ErrNotLeader, base.OutcomeNotApplied},
	{raft.ErrLeadershipTransferInProgress, base.ErrNotLeader, base.OutcomeNotApplied},
	{raft.ErrEnqueueTimeout, base.ErrOverloaded, base.OutcomeNotApplied},
	{raft.ErrLeadershipLost, base.ErrOutcomeUnknown, base.OutcomeUnknown},
	{raft.ErrAbortedByRestore, base.ErrOutcomeUnknown, base.OutcomeUnknown},
	{raft.ErrRaftShutdown, base.ErrOutcomeUnknown, base.OutcomeUnknown},
	{raft.ErrLeader, base.ErrOutcomeUnknown, base.OutcomeUnknown},
	{raft.ErrNotVoter, base.ErrOutcomeUnknown, base.OutcomeUnknown},
	{raft.ErrLogNotFound, base.ErrOutcomeUnknown, base.OutcomeUnknown},
	{raft.ErrTransportShutdown, base.ErrOutcomeUnknown, base.OutcomeUnknown},
	{errors.New("storing logs: disk failed"), base.ErrOutcomeUnknown, base.OutcomeUnknown},
	// What StoreLogs says, even if it wraps something of ours that is "not
	// applied" elsewhere: the entry may be in the log.
	{fmt.Errorf("storing logs: %w", base.ErrClosed), base.ErrOutcomeUnknown, base.OutcomeUnknown},
	{fmt.Errorf("storing logs: %w", base.ErrDiskFailed), base.ErrOutcomeUnknown, base.OutcomeUnknown},
}

// CL4, W8.
func TestClassifyTable(t *testing.T) {
	if classify(nil) != nil {
		t.Error("no error was classified as one")
	}
	for _, c := range raftErrors {
		for _, err := range []error{c.err, fmt.Errorf("wrapped: %w", c.err)} {
			got := classify(err)
			if base.SentinelOf(got) != c.want || base.OutcomeOf(got) != c.outcome {
				t.Errorf("%v: %v (%s), want %v (%s)", err, got, base.OutcomeOf(got), c.want, c.outcome)
			}
		}
	}
}
