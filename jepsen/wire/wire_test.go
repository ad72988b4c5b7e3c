package wire_test

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"testing"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/keelstate/keelstate/api/apierr"
	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/jepsen/wire"
	"github.com/keelstate/keelstate/keygroup"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// node answers with errors, one after the other, then well.
type node struct {
	keelstatepb.UnimplementedStateServer
	keelstatepb.UnimplementedClusterServer
	mu     sync.Mutex
	says   []error
	writes []*keelstatepb.WriteRequest
	heard  func(writes int) // called at each write, if not nil
	named  []string         // clusters that callers named
}

func (n *node) Write(ctx context.Context, r *keelstatepb.WriteRequest) (*keelstatepb.WriteResult, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.writes = append(n.writes, r); n.heard != nil {
		n.heard(len(n.writes))
	}
	n.named = append(n.named, metadata.ValueFromIncomingContext(ctx, base.ClusterHeader)...)
	if len(n.says) > 0 {
		err := n.says[0]
		n.says = n.says[1:]
		return nil, apierr.ToStatus(err).Err()
	}
	return &keelstatepb.WriteResult{Token: &keelstatepb.Token{Incarnation: 9}}, nil
}

func (n *node) Read(context.Context, *keelstatepb.ReadRequest) (*keelstatepb.ReadResult, error) {
	return &keelstatepb.ReadResult{Answers: []*keelstatepb.Answer{{Error: apierr.ToDetail(base.ErrUndeclared)}}}, nil
}

func serve(t *testing.T, says ...error) (*node, *wire.Client) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	n, s := &node{says: says}, grpc.NewServer()
	keelstatepb.RegisterStateServer(s, n)
	keelstatepb.RegisterClusterServer(s, n)
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
	c, err := wire.Dial([]string{l.Addr().String()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return n, c
}

// WI1: what arrives is what the caller gave.
func TestRequestsSayWhatTheCallerGave(t *testing.T) {
	n, c := serve(t)
	token, err := c.Write(t.Context(), wire.Route{Shard: 3, Epoch: 4, Incarnation: 5, Session: 6, Sequence: 7, Revision: 8}, 2, []byte("k"), 1)
	if err != nil || token != 9 {
		t.Fatal(token, err)
	}
	if w := n.writes[0]; w.GetShard() != 3 || w.GetEpoch() != 4 || w.GetIncarnation() != 5 || w.GetSession() != 6 || w.GetSequence() != 7 || w.GetMetadataRevision() != 8 ||
		w.GetMutations()[0].GetState() != 2 || string(w.GetMutations()[0].GetKey()) != "k" || len(n.named) > 0 {
		t.Errorf("%v, naming %q", w, n.named)
	}
	if _, err := c.Read(t.Context(), wire.Route{}, 2, []byte("k")); !errors.Is(err, base.ErrUndeclared) {
		t.Errorf("an answer that is an error: %v", err)
	}
}

// WI2: what is no verdict is asked again, for as long as there is time.
func TestVerdictsAndWhatIsNone(t *testing.T) {
	for _, s := range []error{base.ErrIncarnation, base.ErrStaleEpoch, base.ErrWrongRange, base.ErrUndeclared, base.ErrSessionEnded} {
		n, c := serve(t, base.ErrNotLeader, base.ErrUnavailable, base.ErrInternal, s)
		if _, err := c.Write(t.Context(), wire.Route{}, 1, nil, 1); !errors.Is(err, s) || errors.Is(err, wire.ErrNoVerdict) || len(n.writes) < 4 {
			t.Errorf("%v became %v after %d writes", s, err, len(n.writes))
		}
	}
	n, c := serve(t, slices.Repeat([]error{base.ErrNotReady}, 1000)...)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	n.heard = func(writes int) {
		if writes == 3 { // of which the client knows two answers by then
			cancel()
		}
	}
	if _, err := c.Write(ctx, wire.Route{}, 1, nil, 1); !errors.Is(err, wire.ErrNoVerdict) || !errors.Is(err, base.ErrNotReady) {
		t.Errorf("without a verdict: %v", err)
	}
}

// Every shard of a topology has keys, always the same.
func TestKeysOfShards(t *testing.T) {
	top := &wire.Topology{KeyGroups: 128, Shards: []wire.Shard{{ID: 1, Lo: 0, Hi: 1}, {ID: 2, Lo: 1, Hi: 127}, {ID: 3, Lo: 127, Hi: 128}}}
	for _, s := range top.Shards {
		key, err := top.KeyOf(s, "p")
		if err != nil {
			t.Fatal(err)
		}
		g, err := keygroup.GroupOfKey(keygroup.String, key, 128)
		again, _ := top.KeyOf(s, "p")
		if err != nil || uint32(g) < s.Lo || uint32(g) >= s.Hi || string(again) != string(key) {
			t.Errorf("shard %d: %q of group %d, %v; again %q", s.ID, key, g, err, again)
		}
	}
	if _, err := top.KeyOf(wire.Shard{ID: 4, Lo: 5, Hi: 5}, "p"); err == nil {
		t.Error("a shard without key groups has a key")
	}
}
