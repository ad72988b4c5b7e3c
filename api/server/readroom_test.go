package server

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/cluster"
	"github.com/keelstate/keelstate/engine/state"
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
