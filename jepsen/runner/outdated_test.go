//go:build linux

package runner

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/jepsen/check"
	"github.com/keelstate/keelstate/jepsen/wire"
)

// restoredCluster answers as a cluster that was restored; its bugs are spoilt answers.
type restoredCluster struct {
	incarnation, sessions uint64
	// taken says which requests of the old incarnation are taken: write, read or session.
	taken string
	// says is the error of those that are refused, silent the one of the new ones.
	says, silent error
	// token is the incarnation in tokens.
	token uint64
	asked int
}

func (c *restoredCluster) Topology(context.Context) (*wire.Topology, error) {
	return &wire.Topology{Cluster: "new", Incarnation: c.incarnation, KeyGroups: 12, Shards: []wire.Shard{{ID: 1, Epoch: 1, Lo: 0, Hi: 5}, {ID: 2, Epoch: 1, Lo: 5, Hi: 12}}}, nil
}

func (c *restoredCluster) OpenSession(context.Context) (id, revision uint64, err error) {
	c.sessions++
	return c.sessions, 100 + c.sessions, nil
}

func (c *restoredCluster) answer(what string, to wire.Route) (uint64, error) {
	c.asked++
	if to.Incarnation == c.incarnation {
		return c.token, c.silent
	}
	if to.Session != 0 {
		what = "session"
	}
	if what == c.taken {
		return to.Incarnation, nil
	}
	return 0, c.says
}

func (c *restoredCluster) Write(_ context.Context, to wire.Route, _ uint32, _ []byte, _ int64) (uint64, error) {
	return c.answer("write", to)
}

func (c *restoredCluster) Read(_ context.Context, to wire.Route, _ uint32, _ []byte) (uint64, error) {
	return c.answer("read", to)
}

// RU8: whatever a restored cluster takes of an older incarnation is found, and what was not
// seen is no pass.
func TestOutdatedRequestsAreToBeRefused(t *testing.T) {
	why := errors.Join(wire.ErrNoVerdict, context.DeadlineExceeded)
	for _, x := range []struct {
		name   string
		change func(c *restoredCluster, o *outdated)
		want   check.Verdict
		says   string
	}{
		{"all refused", nil, check.Pass, "6 requests of incarnation 2 are refused, those of 3 are taken"},
		{"a write", func(c *restoredCluster, _ *outdated) { c.taken = "write" }, check.Fail, "a write of cluster old, of incarnation 2, is taken"},
		{"a read", func(c *restoredCluster, _ *outdated) { c.taken = "read" }, check.Fail, "a read of cluster old, of incarnation 2, is taken"},
		{"a session", func(c *restoredCluster, _ *outdated) { c.taken = "session" }, check.Fail, "a write of the session of cluster old, of incarnation 2, is taken"},
		{"the same incarnation", func(c *restoredCluster, _ *outdated) { c.incarnation, c.token = 2, 2 }, check.Fail, "a write of cluster old, of incarnation 2, is taken"},
		{"tokens of the old one", func(c *restoredCluster, _ *outdated) { c.token = 2 }, check.Fail, "a token of shard 1 is of incarnation 2"},
		{"refused for another reason", func(c *restoredCluster, _ *outdated) { c.says = base.ErrStaleEpoch }, check.Fail, "refused, but not for its incarnation"},
		{"no answer", func(c *restoredCluster, _ *outdated) { c.says = why }, check.Unknown, "nobody came to a verdict"},
		{"new ones are not taken", func(c *restoredCluster, _ *outdated) { c.silent = base.ErrUndeclared }, check.Unknown, "a write of the present incarnation to shard 1"},
		{"taken, and no answer then", func(c *restoredCluster, _ *outdated) { c.taken, c.silent = "write", why }, check.Fail, "is taken"},
		{"no such session", func(c *restoredCluster, _ *outdated) { c.sessions = 70 }, check.Pass, "4 requests of incarnation 2 are refused, those of 3 are taken; no session has the number 7"},
	} {
		c := &restoredCluster{incarnation: 3, token: 3, says: &base.Error{Cause: base.ErrIncarnation, Ordinal: -1}}
		o := &outdated{cluster: "old", incarnation: 2, session: 7, written: 2}
		if x.change != nil {
			x.change(c, o)
		}
		res := o.refused(t.Context(), c)
		if res.Verdict != x.want || !strings.Contains(res.Text, x.says) || c.asked == 0 || res.Name != "outdated requests" {
			t.Errorf("%s: %+v", x.name, res)
		}
	}
}
