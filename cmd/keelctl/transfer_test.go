package main

import (
	"context"
	"io"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/keelstate/keelstate/api/apierr"
	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/internal/base"
)

// forgetful loses the answer to the first attempt, and refuses the next ones.
type forgetful struct {
	keelstatepb.UnimplementedAdminServer
	refusal error
	calls   atomic.Int32
}

func (f *forgetful) TransferLeader(context.Context, *keelstatepb.TransferLeaderRequest) (*keelstatepb.TransferLeaderResponse, error) {
	if f.calls.Add(1) == 1 {
		return nil, status.Error(codes.Unavailable, "the connection is lost")
	}
	return nil, apierr.ToStatus(f.refusal).Err()
}

// A transfer to a node that cannot lead is known not to have happened, also if an
// attempt before had no answer. Of other refusals nothing follows for that one.
func TestRefusedTransferIsNotApplied(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		refusal error
		code    int
		outcome string
	}{
		"no voter":      {&base.Error{Cause: base.ErrInvalid, Ordinal: -1, Field: "to", Hint: "n3 has no voting replica"}, exitUsage, "not applied"},
		"no such shard": {&base.Error{Cause: base.ErrNoSuchShard, Ordinal: -1}, exitUnknown, "unknown"},
	} {
		node := &forgetful{refusal: tc.refusal}
		f := failing(t, serveAdmin(t, node), io.Discard, "shard", "transfer", "1", "--to", "n3", "--timeout", "6s", "-o", "json")
		if f.ExitCode != tc.code || f.Outcome != tc.outcome || node.calls.Load() < 2 {
			t.Errorf("%s: %+v after %d attempts", name, f, node.calls.Load())
		}
	}
}
