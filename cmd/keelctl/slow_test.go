package main

import (
	"context"
	"testing"
	"time"

	"github.com/keelstate/keelstate/api/keelstatepb"
)

// slowShards is a node that notes how long it is given.
type slowShards struct {
	keelstatepb.UnimplementedAdminServer
	given chan time.Duration // 0 is no bound
}

func (s *slowShards) note(ctx context.Context) {
	left := time.Duration(0)
	if end, has := ctx.Deadline(); has {
		left = time.Until(end)
	}
	s.given <- left
}

func (s *slowShards) HashShard(ctx context.Context, _ *keelstatepb.HashShardRequest) (*keelstatepb.HashShardResponse, error) {
	s.note(ctx)
	return &keelstatepb.HashShardResponse{Agree: true}, nil
}

func (s *slowShards) ScrubShard(ctx context.Context, _ *keelstatepb.ScrubShardRequest) (*keelstatepb.ScrubShardResponse, error) {
	s.note(ctx)
	return &keelstatepb.ScrubShardResponse{Clean: true}, nil
}

func (s *slowShards) SnapshotShard(ctx context.Context, _ *keelstatepb.SnapshotShardRequest) (*keelstatepb.SnapshotShardResponse, error) {
	s.note(ctx)
	return &keelstatepb.SnapshotShardResponse{}, nil
}

func (s *slowShards) CompactShard(ctx context.Context, _ *keelstatepb.CompactShardRequest) (*keelstatepb.CompactShardResponse, error) {
	s.note(ctx)
	return &keelstatepb.CompactShardResponse{}, nil
}

// What takes long on a large shard has one attempt of the whole --timeout.
func TestOnlyTheTimeoutBoundsWorkOnAShard(t *testing.T) {
	node := &slowShards{given: make(chan time.Duration, 8)}
	on := serveAdmin(t, node)
	for _, verb := range []string{"hash", "scrub", "snapshot", "compact"} {
		if code, _, stderr := keelctl(on, "shard", verb, "1", "--timeout", "10m"); code != exitDone {
			t.Fatalf("shard %s: exit %d, %s", verb, code, stderr)
		}
		if left := <-node.given; left < 9*time.Minute {
			t.Errorf("shard %s --timeout 10m: the node is given %v", verb, left)
		}
		if code, _, stderr := keelctl(on, "shard", verb, "1", "--timeout", "0"); code != exitDone {
			t.Fatalf("shard %s: exit %d, %s", verb, code, stderr)
		}
		if left := <-node.given; left != 0 {
			t.Errorf("shard %s --timeout 0: the node is given %v", verb, left)
		}
	}
}
