package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/keelstate/keelstate/api/keelstatepb"
	keel "github.com/keelstate/keelstate/client"
	"github.com/keelstate/keelstate/internal/base"
)

func testContext(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func must[T any](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// B10: every acknowledged number is there exactly once, an unknown one at most
// once, and no other number is.
func TestCrashB10RetriesAddNothingTwice(t *testing.T) {
	c := New(t, Options{Shards: 2})
	ctx := testContext(t, 90*time.Second)
	const clients, perClient, lists = 10, 40, 5
	setup := c.Client()
	if _, err := keel.DeclareList(ctx, setup.Keyspace("b10", keel.String.Type()), "l", keel.Int64); err != nil {
		t.Fatal(err)
	}
	var acked, unknown sync.Map
	var progress atomic.Int64
	var wg sync.WaitGroup
	for i := range clients {
		k := c.Client(keel.WithAttemptTimeout(2 * time.Second))
		wg.Go(func() {
			list, err := keel.OpenList(ctx, k.Keyspace("b10", keel.String.Type()), "l", keel.Int64)
			if err != nil {
				t.Errorf("client %d: %v", i, err)
				return
			}
			for j := range perClient {
				n := int64(i*perClient + j)
				_, err := list.Add(ctx, fmt.Sprint(n%lists), n)
				progress.Add(1)
				var e *keel.Error
				switch {
				case err == nil:
					acked.Store(n, true)
				case errors.As(err, &e) && e.Outcome == keel.OutcomeUnknown:
					unknown.Store(n, true)
				default:
					t.Errorf("number %d: %v", n, err)
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	crashLeaders(t, c, &progress, done)
	verifyLists(t, ctx, setup, lists, &acked, &unknown)
}

// crashLeaders stops and starts the leader of a shard whenever some more writes
// are through, until done.
func crashLeaders(t *testing.T, c *Cluster, progress *atomic.Int64, done chan struct{}) {
	for round := 0; ; round++ {
		next := progress.Load() + 80
		for progress.Load() < next {
			select {
			case <-done:
				if round == 0 {
					t.Error("no leader was stopped")
				}
				return
			case <-time.After(5 * time.Millisecond):
			}
		}
		leader := c.Nodes().Leader(base.GroupID(round%2 + 1))
		c.Stop(leader)
		c.Nodes().Leader(base.GroupID(round%2 + 1)) // another one takes over
		c.Start(leader)
		c.Nodes().WaitReady()
	}
}

func verifyLists(t *testing.T, ctx context.Context, k *keel.Client, lists int, acked, unknown *sync.Map) {
	t.Helper()
	list, err := keel.OpenList(ctx, k.Keyspace("b10", keel.String.Type()), "l", keel.Int64)
	if err != nil {
		t.Fatal(err)
	}
	count := make(map[int64]int)
	for l := range lists {
		for _, n := range must[[]int64](t)(list.Get(ctx, fmt.Sprint(l))) {
			count[n]++
			if int(n)%lists != l {
				t.Errorf("number %d is in list %d", n, l)
			}
			_, a := acked.Load(n)
			_, u := unknown.Load(n)
			if !a && !u || count[n] > 1 {
				t.Errorf("number %d is there %d times, acknowledged %v, unknown %v", n, count[n], a, u)
			}
		}
	}
	acked.Range(func(n, _ any) bool {
		if count[n.(int64)] != 1 {
			t.Errorf("acknowledged number %d is there %d times", n, count[n.(int64)])
		}
		return true
	})
}

// B12: the deadline passes but the write is applied; the request is resolved
// under its number and nothing is doubled.
func TestB12DeadlinePassedButApplied(t *testing.T) {
	c := New(t, Options{})
	ctx := testContext(t, 60*time.Second)
	hold := make(chan struct{})
	var holding atomic.Bool
	// Replies on write streams are held back while holding.
	k := c.Client(keel.WithAttemptTimeout(time.Minute), keel.WithDialOptions(grpc.WithChainStreamInterceptor(
		func(ctx context.Context, d *grpc.StreamDesc, cc *grpc.ClientConn, m string, s grpc.Streamer, o ...grpc.CallOption) (grpc.ClientStream, error) {
			st, err := s(ctx, d, cc, m, o...)
			return &heldStream{ClientStream: st, holding: &holding, hold: hold}, err
		})))
	ks := k.Keyspace("b12", keel.String.Type())
	value := must[*keel.Value[int64]](t)(keel.DeclareValue(ctx, ks, "v", keel.Int64))
	sum := must[*keel.Reducing[int64]](t)(keel.DeclareReducing(ctx, ks, "sum", "sum", keel.Int64))
	if _, err := sum.Add(ctx, "p", 100); err != nil {
		t.Fatal(err)
	}
	holding.Store(true)
	put := k.Batch().Add(value.SetOp("p", 7)).Require(value.IfAbsent("p")).Start(ctx)
	add := k.Batch().Add(sum.AddOp("p", 1)).Start(ctx)
	for _, p := range []*keel.Pending{put, add} {
		short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
		_, err := p.Wait(short)
		cancel()
		var e *keel.Error
		if !errors.As(err, &e) || !errors.Is(err, keel.ErrDeadline) || e.Outcome != keel.OutcomeUnknown {
			t.Fatalf("got %v, want a deadline with an unknown outcome", err)
		}
	}
	other := c.Client() // sees that both were applied, though nobody was told
	seen := must[*keel.Value[int64]](t)(keel.OpenValue(ctx, other.Keyspace("b12", keel.String.Type()), "v", keel.Int64))
	c.Nodes().Eventually("the write is applied", func() error {
		if v, found, err := seen.Get(ctx, "p"); err != nil || !found || v != 7 {
			return fmt.Errorf("%d %v %v", v, found, err)
		}
		return nil
	})
	c.Restart(c.Nodes().Leader(1)) // the replies are lost for good
	holding.Store(false)
	close(hold)
	r, err := put.Wait(ctx) // put-if-absent was sent again: the first outcome, not a refusal
	if err != nil || !r.Parts[0].Replayed {
		t.Fatalf("got %+v %v, want the first outcome", r, err)
	}
	if _, err := add.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	if v, _, err := sum.Get(ctx, "p"); err != nil || v != 101 {
		t.Fatalf("the sum is %d %v, want 101", v, err)
	}
}

// heldStream holds back what a write stream receives.
type heldStream struct {
	grpc.ClientStream
	holding *atomic.Bool
	hold    chan struct{}
}

func (s *heldStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if _, writes := m.(*keelstatepb.WriteResults); writes && s.holding.Load() {
		select {
		case <-s.hold:
		case <-s.Context().Done():
			return s.Context().Err()
		}
		return errors.New("the reply is lost")
	}
	return err
}

// B40: changing a map while walking it.
func TestB40WalkAndChange(t *testing.T) {
	c := New(t, Options{Nodes: 1})
	ctx := testContext(t, 60*time.Second)
	k := c.Client()
	m := must[*keel.Map[int64, string]](t)(keel.DeclareMap(ctx, k.Keyspace("b40", keel.String.Type()), "m", keel.Int64, keel.String))
	fill := func() {
		var entries []keel.Entry[int64, string]
		for i := range int64(300) {
			entries = append(entries, keel.Entry[int64, string]{Key: i, Value: fmt.Sprint(i)})
		}
		must[keel.Token](t)(m.PutAll(ctx, "k", entries...))
	}
	walk := func(each func(e keel.Entry[int64, string])) {
		t.Helper()
		next := int64(0)
		for e, err := range m.Entries(ctx, "k") {
			if err != nil {
				t.Fatal(err)
			}
			if e.Key != next || e.Value != fmt.Sprint(e.Key) {
				t.Fatalf("entry %d came as %+v", next, e)
			}
			next++
			each(e)
		}
		if next != 300 {
			t.Fatalf("%d entries came", next)
		}
	}
	fill()
	walk(func(e keel.Entry[int64, string]) { must[keel.Token](t)(m.Remove(ctx, "k", e.Key)) })
	if !must[bool](t)(m.IsEmpty(ctx, "k")) {
		t.Fatal("the map is not empty after each entry was removed")
	}
	fill()
	walk(func(e keel.Entry[int64, string]) { must[keel.Token](t)(m.Put(ctx, "k", e.Key, "new")) })
	for e, err := range m.Entries(ctx, "k") {
		if err != nil || e.Value != "new" {
			t.Fatalf("%+v %v", e, err)
		}
	}
	fill()
	other := must[*keel.Map[int64, string]](t)(keel.OpenMap(ctx, c.Client().Keyspace("b40", keel.String.Type()), "m", keel.Int64, keel.String))
	walk(func(e keel.Entry[int64, string]) {
		if e.Key == 0 {
			must[keel.Token](t)(other.Clear(ctx, "k"))
		}
	})
	if !must[bool](t)(m.IsEmpty(ctx, "k")) {
		t.Fatal("the map is not empty after another client cleared it")
	}
}

// B42: namespaces have accumulators of their own, and a merge leaves nothing.
func TestB42MergeNamespaces(t *testing.T) {
	c := New(t, Options{Nodes: 1})
	ctx := testContext(t, 60*time.Second)
	k := c.Client()
	a := must[*keel.Aggregating[int64, int64]](t)(keel.DeclareAggregating(ctx, k.Keyspace("b42", keel.String.Type()), "a", "sum", keel.Int64, keel.Int64))
	batch := k.Batch()
	for _, n := range []int64{1, 2, 3} {
		batch.Add(a.In("A").AddOp("k", n), a.In("B").AddOp("k", 10*n))
	}
	must[keel.Result](t)(batch.Commit(ctx))
	want := func(namespace string, sum int64, present bool) {
		t.Helper()
		if v, found, err := a.In(namespace).Get(ctx, "k"); err != nil || found != present || v != sum {
			t.Fatalf("namespace %s has %d %v %v, want %d", namespace, v, found, err, sum)
		}
	}
	want("A", 6, true)
	want("B", 60, true)
	must[keel.Token](t)(a.In("A").MergeNamespaces(ctx, "k", keel.NamespaceOf([]byte("B"))))
	want("A", 66, true)
	want("B", 0, false)
	c.Restart(0)
	want("A", 66, true)
	want("B", 0, false)
	must[keel.Token](t)(a.In("A").Clear(ctx, "k"))
	for it, err := range a.Scan(ctx, keel.ScanOptions{}) {
		t.Fatalf("left over: %+v %v", it, err)
	}
}

// Batches, conditions, multi-reads and scans over several shards.
func TestBatchesOverShards(t *testing.T) {
	c := New(t, Options{Nodes: 1, Shards: 4})
	ctx := testContext(t, 60*time.Second)
	k := c.Client()
	ks := k.Keyspace("batch", keel.Int64.Type())
	v := must[*keel.Value[string]](t)(keel.DeclareValue(ctx, ks, "v", keel.String))
	n := must[*keel.Reducing[int64]](t)(keel.DeclareReducing(ctx, ks, "n", "sum", keel.Int64))
	b := k.Batch()
	for i := range 100 {
		b.Add(v.SetOp(i, fmt.Sprint(i)), n.AddOp(i, int64(i)))
	}
	r := must[keel.Result](t)(b.Commit(ctx))
	if len(r.Parts) != 4 {
		t.Fatalf("%d parts, want one per shard", len(r.Parts))
	}
	rb := k.ReadBatch()
	var texts []*keel.Future[string]
	var sums []*keel.Future[int64]
	for i := range 100 {
		texts = append(texts, v.Queue(rb, i))
		sums = append(sums, n.Queue(rb, i))
	}
	if err := rb.Do(ctx); err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		if it, err := texts[i].Get(); err != nil || it.Value != fmt.Sprint(i) {
			t.Fatalf("key %d: %+v %v", i, it, err)
		}
		if it, err := sums[i].Get(); err != nil || it.Value != int64(i) {
			t.Fatalf("key %d: %+v %v", i, it, err)
		}
	}
	keys := make(map[int64]bool)
	for it, err := range v.ListKeys(ctx, keel.ScanOptions{}) {
		if err != nil || keys[it.Key.(int64)] {
			t.Fatalf("%+v %v", it, err)
		}
		keys[it.Key.(int64)] = true
	}
	if len(keys) != 100 {
		t.Fatalf("%d keys", len(keys))
	}
	if _, err := k.Batch().Add(v.SetOp(1, "x"), v.SetOp(2, "x"), v.SetOp(3, "x"), v.SetOp(4, "x"), v.SetOp(7, "x")).Atomic().Commit(ctx); !errors.Is(err, keel.ErrInvalid) {
		t.Fatalf("an atomic batch over shards: %v", err)
	}
	set, _, err := v.CompareAndSet(ctx, 5, "new", v.IfEqual(5, "5"), n.IfPresent(5))
	if err != nil || !set {
		t.Fatal(set, err)
	}
	if set, _, err = v.CompareAndSet(ctx, 5, "newer", v.IfEqual(5, "5")); err != nil || set {
		t.Fatal(set, err)
	}
	it := must[keel.Item[string]](t)(v.Load(ctx, 5))
	if set, _, err = v.CompareAndSet(ctx, 5, "newest", v.IfVersion(5, it.Version)); err != nil || !set {
		t.Fatal(set, err)
	}
}

// A long list is read in pages from one instant.
func TestLongList(t *testing.T) {
	c := New(t, Options{Nodes: 1})
	ctx := testContext(t, 60*time.Second)
	list := must[*keel.List[int64]](t)(keel.DeclareList(ctx, c.Client().Keyspace("long", keel.String.Type()), "l", keel.Int64))
	var want []int64
	for i := range int64(5000) {
		want = append(want, i)
	}
	must[keel.Token](t)(list.AddAll(ctx, "k", want...))
	if got := must[[]int64](t)(list.Get(ctx, "k")); !slices.Equal(got, want) {
		t.Fatalf("%d elements came back", len(got))
	}
	var got []int64
	for page, err := range list.Pages(ctx, "k", 128) {
		if err != nil || len(page) > 128 {
			t.Fatal(len(page), err)
		}
		got = append(got, page...)
	}
	if !slices.Equal(got, want) {
		t.Fatalf("%d elements came in pages", len(got))
	}
}
