package server

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/keelstate/keelstate/api/apierr"
	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
)

func TestExpectedBytes(t *testing.T) {
	point := &keelstatepb.Query{Kind: keelstatepb.QueryKind_QUERY_KIND_GET}
	page := func(n uint32) *keelstatepb.Query {
		return &keelstatepb.Query{Kind: keelstatepb.QueryKind_QUERY_KIND_PAGE, PageBytes: n}
	}
	many := make([]*keelstatepb.Query, 1000)
	for _, c := range []struct {
		queries []*keelstatepb.Query
		want    int
	}{{nil, 0}, {[]*keelstatepb.Query{nil, point}, 2 * pointBytes}, {[]*keelstatepb.Query{page(0)}, state.DefaultPageBytes},
		{[]*keelstatepb.Query{page(100), page(1 << 31)}, 100 + state.MaxPageBytes}, {many, answerBytes}} {
		if got := expectedBytes(&keelstatepb.ReadRequest{Queries: c.queries}); got != c.want {
			t.Errorf("%d queries: %d bytes, want %d", len(c.queries), got, c.want)
		}
	}
}

// TestReadsAreBoundedByTheirAnswers is SV3: pages run at once only as far as
// their answers fit in the room of the stream and of the node.
func TestReadsAreBoundedByTheirAnswers(t *testing.T) {
	const page = 1 << 20
	for name, o := range map[string]Options{
		"stream": {StreamBytes: 3*page + page/2}, "node": {ReadBytes: 3*page + page/2}, "one larger than all": {StreamBytes: page / 2, ReadBytes: page / 2},
	} {
		t.Run(name, func(t *testing.T) {
			const n = 40
			streams, atMost := 1, int64(3)
			if name == "node" {
				streams = 3
			}
			if name == "one larger than all" {
				atMost = 1
			}
			var running, most atomic.Int64
			gate := make(chan struct{})
			f := &fake{read: func(context.Context, *cluster.ReadRequest) (*cluster.ReadReply, error) {
				if now := running.Add(1); now > most.Load() {
					most.Store(now)
				}
				<-gate
				running.Add(-1)
				return &cluster.ReadReply{Answers: make([]state.Answer, 1), Errs: make([]error, 1)}, nil
			}}
			k := newKit(t, f, o)
			var wg sync.WaitGroup
			var answers atomic.Int64
			for range streams {
				s, err := k.state.ReadStream(testContext(t))
				if err != nil {
					t.Fatal(err)
				}
				b := &keelstatepb.ReadBatch{}
				for i := range n {
					b.Requests = append(b.Requests, &keelstatepb.ReadRequest{Tag: uint64(i), Queries: []*keelstatepb.Query{
						{Kind: keelstatepb.QueryKind_QUERY_KIND_PAGE, Key: []byte("k"), PageBytes: page}}})
				}
				if err := errors.Join(s.Send(b), s.CloseSend()); err != nil {
					t.Fatal(err)
				}
				wg.Add(1)
				go func() {
					defer wg.Done()
					for {
						m, err := s.Recv()
						if err != nil {
							if !errors.Is(err, io.EOF) {
								t.Error(err)
							}
							return
						}
						answers.Add(int64(len(m.Results)))
					}
				}()
			}
			eventually(t, "the room is used", func() bool { return running.Load() == atMost })
			close(gate)
			wg.Wait()
			if most.Load() > atMost || answers.Load() != int64(streams*n) {
				t.Errorf("%d reads ran at once, want at most %d; %d answers of %d", most.Load(), atMost, answers.Load(), streams*n)
			}
		})
	}
}

// A read whose answers are larger than expected takes room as it goes; where
// there is none it is refused, not applied and to be retried, and gives back all.
func TestReadTakesRoomForWhatItReads(t *testing.T) {
	const all = 8 << 20
	entered, release := make(chan int64, 1), make(chan struct{})
	var k *kit
	f := &fake{read: func(_ context.Context, r *cluster.ReadRequest) (*cluster.ReadReply, error) {
		for _, bytes := range []int{0, pointBytes, 3 << 20, 6 << 20} {
			if err := r.Room(bytes); err != nil {
				return nil, err
			}
		}
		select {
		case entered <- 1: // the first has grown to 6 MiB and waits
			<-release
		default:
		}
		return &cluster.ReadReply{Answers: make([]state.Answer, 1), Errs: make([]error, 1)}, nil
	}}
	k = newKit(t, f, Options{ReadBytes: all})
	req := &keelstatepb.ReadRequest{Queries: []*keelstatepb.Query{{Kind: keelstatepb.QueryKind_QUERY_KIND_GET, Key: []byte("k")}}}
	first := make(chan error, 1)
	go func() {
		_, err := k.state.Read(testContext(t), req)
		first <- err
	}()
	eventually(t, "the first read has its room", func() bool { return len(entered) == 1 })
	_, err := k.state.Read(testContext(t), req)
	if e := apierr.FromError(err); !errors.Is(e, base.ErrOverloaded) || base.OutcomeOf(e) != base.OutcomeNotApplied {
		t.Fatalf("a read without room: %v", err)
	}
	close(release)
	if err := <-first; err != nil {
		t.Fatal(err)
	}
	if _, err := k.state.Read(testContext(t), req); err != nil {
		t.Fatalf("the room was not given back: %v", err)
	}
	// One that is larger than all goes alone.
	big := &readRoom{s: k.server}
	if err := big.grow(100 * all); err != nil || big.held != all {
		t.Fatalf("%d held, %v", big.held, err)
	}
	big.release()
}
