package keel

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/keelstate/keelstate/api/apierr"
	"github.com/keelstate/keelstate/api/keelstatepb"
	"github.com/keelstate/keelstate/internal/base"
)

// operations answers for a fake cluster how far its founding is; nil is a node
// that does not know.
type operations struct {
	keelstatepb.UnimplementedAdminServer
	list []*keelstatepb.Operation
}

func (o *operations) ListOperations(context.Context, *keelstatepb.ListOperationsRequest) (*keelstatepb.ListOperationsResponse, error) {
	if o.list == nil {
		return nil, apierr.ToStatus(base.ErrNoQuorum).Err()
	}
	return &keelstatepb.ListOperationsResponse{Operations: o.list}, nil
}

// A cluster that is being founded has no shards: that is not ready, not a
// mistake of the caller, and the error says how far the founding is. When it is
// done the same client serves.
func TestReadyNamesTheFounding(t *testing.T) {
	for name, tc := range map[string]struct {
		list []*keelstatepb.Operation
		want []string
	}{
		"phase and problem": {[]*keelstatepb.Operation{{Kind: "other", Phase: "x"}, {Kind: "found", Phase: "admit", Error: "node n3 at n3:1: down"}},
			[]string{"being founded", "phase admit", "node n3 at n3:1: down"}},
		"phase alone":         {[]*keelstatepb.Operation{{Kind: "found", Phase: "place"}}, []string{"being founded", "phase place"}},
		"nothing known of it": {nil, []string{"being founded"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t, 1, &operations{list: tc.list})
			f.change(false, func() { f.founding = true })
			c := f.client()
			v := f.value(c)
			var e *Error
			waitFor(t, func() bool {
				ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
				defer cancel()
				_, err := v.Set(ctx, "a", "x")
				if !errors.As(err, &e) {
					t.Fatalf("a write to a cluster without shards: %v", err)
				}
				for _, w := range tc.want {
					if !strings.Contains(e.Hint, w) {
						return false
					}
				}
				return true
			})
			if !errors.Is(e, ErrNotReady) || e.Outcome != OutcomeNotApplied || !e.Retryable {
				t.Fatalf("got %+v", e)
			}
			f.change(false, func() { f.founding = false })
			if _, err := v.Set(testContext(t), "a", "x"); err != nil {
				t.Fatalf("after the founding: %v", err)
			}
		})
	}
}
