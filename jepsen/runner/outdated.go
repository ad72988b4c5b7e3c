//go:build linux

package runner

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/jepsen/check"
	"github.com/keelstate/keelstate/jepsen/wire"
)

// What requests of an incarnation that is over are about.
const (
	outdatedKeyspace = "outdated"
	outdatedState    = "probe"
	outdatedPrefix   = "outdated"
)

const (
	// outdatedLimit bounds making sure that a cluster answers requests, and that the
	// restored one refuses them.
	outdatedLimit = 20 * time.Second
	// maxSessions is how many sessions may be opened until one has the number of an
	// old one.
	maxSessions = 2000
)

// outdated is what a client of the cluster that makes a checkpoint has: it was
// answered with it before.
type outdated struct {
	state                         uint32
	cluster                       string
	incarnation, session, written uint64 // written is the incarnation of a token
}

// caller sends requests as they are given; wire.Client is one.
type caller interface {
	Topology(ctx context.Context) (*wire.Topology, error)
	OpenSession(ctx context.Context) (id, revision uint64, err error)
	Write(ctx context.Context, to wire.Route, state uint32, key []byte, value int64) (incarnation uint64, err error)
	Read(ctx context.Context, to wire.Route, state uint32, key []byte) (incarnation uint64, err error)
}

// remember asks the cluster as a client would that names no cluster, and remembers
// what it was answered with.
func remember(ctx context.Context, endpoints []string) (*outdated, error) {
	ctx, cancel := context.WithTimeout(ctx, outdatedLimit)
	defer cancel()
	c, err := wire.Dial(endpoints)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	o := &outdated{}
	if o.state, err = c.Declare(ctx, outdatedKeyspace, outdatedState); err != nil {
		return nil, err
	}
	t, err := c.Topology(ctx)
	if err != nil {
		return nil, err
	}
	o.cluster, o.incarnation = t.Cluster, t.Incarnation
	var revision uint64
	if o.session, revision, err = c.OpenSession(ctx); err != nil {
		return nil, err
	}
	for _, s := range t.Shards {
		key, err := t.KeyOf(s, outdatedPrefix)
		if err != nil {
			return nil, err
		}
		to := wire.Route{Shard: s.ID, Epoch: s.Epoch, Incarnation: t.Incarnation}
		if o.written, err = c.Write(ctx, to, o.state, key, 1); err != nil {
			return nil, fmt.Errorf("writing to shard %d: %w", s.ID, err)
		}
		to.Session, to.Sequence, to.Revision = o.session, s.ID, revision
		if _, err := c.Write(ctx, to, o.state, key, 2); err != nil {
			return nil, fmt.Errorf("writing to shard %d in session %d: %w", s.ID, o.session, err)
		}
		if _, err := c.Read(ctx, to, o.state, key); err != nil {
			return nil, fmt.Errorf("reading from shard %d: %w", s.ID, err)
		}
	}
	return o, nil
}

// refusedBy is refused, by the nodes at endpoints.
func (o *outdated) refusedBy(ctx context.Context, endpoints []string) (check.Result, error) {
	c, err := wire.Dial(endpoints)
	if err != nil {
		return check.Result{}, err
	}
	res := o.refused(ctx, c)
	return res, c.Close()
}

// refused sends what o has to a cluster that was restored from a checkpoint of o's:
// requests of the old incarnation that are right in all else, with the shards and
// epochs that the new cluster has, and a session whose number is that of an old one.
// A request of the new incarnation shows that they would be taken if they were new.
func (o *outdated) refused(ctx context.Context, c caller) check.Result {
	res := check.Result{Name: "outdated requests", Verdict: check.Pass}
	ctx, cancel := context.WithTimeout(ctx, outdatedLimit)
	defer cancel()
	if err := o.ask(ctx, c, &res); err != nil {
		res.Verdict = check.Combine(res.Verdict, check.Unknown)
		if res.Verdict == check.Unknown {
			res.Text = "whether requests of an old incarnation are refused: " + err.Error()
		}
	}
	return res
}

func (o *outdated) ask(ctx context.Context, c caller, res *check.Result) error {
	t, err := c.Topology(ctx)
	if err != nil {
		return err
	}
	session, revision, err := o.sameNumber(ctx, c)
	if err != nil {
		return err
	}
	for _, s := range t.Shards {
		key, err := t.KeyOf(s, outdatedPrefix)
		if err != nil {
			return err
		}
		old := wire.Route{Shard: s.ID, Epoch: s.Epoch, Incarnation: o.incarnation}
		if _, err := c.Write(ctx, old, o.state, key, 3); !o.judge(res, "a write", s.ID, err) {
			return err
		}
		if _, err := c.Read(ctx, old, o.state, key); !o.judge(res, "a read", s.ID, err) {
			return err
		}
		present := old
		present.Incarnation, present.Sequence, present.Revision = t.Incarnation, s.ID, revision
		present.Session = session
		if session == o.session { // the number means another session here
			old.Session, old.Sequence, old.Revision = session, s.ID, revision
			if _, err := c.Write(ctx, old, o.state, key, 4); !o.judge(res, "a write of the session", s.ID, err) {
				return err
			}
		}
		token, err := c.Write(ctx, present, o.state, key, 5)
		if err != nil {
			return fmt.Errorf("a write of the present incarnation to shard %d: %w", s.ID, err)
		}
		if token <= o.written {
			o.fail(res, fmt.Sprintf("a token of shard %d is of incarnation %d, and one of the cluster that made the checkpoint of %d", s.ID, token, o.written))
		}
	}
	if res.Verdict == check.Pass {
		res.Text = fmt.Sprintf("%d requests of incarnation %d are refused, those of %d are taken", res.OK, o.incarnation, t.Incarnation)
		if session != o.session {
			res.Text += fmt.Sprintf("; no session has the number %d of the old one", o.session)
		}
	}
	return nil
}

// sameNumber opens sessions until one has the number of the old one, if it can: the
// newest is returned.
func (o *outdated) sameNumber(ctx context.Context, c caller) (session, revision uint64, err error) {
	for range maxSessions {
		session, revision, err = c.OpenSession(ctx)
		if err != nil || session >= o.session {
			break
		}
	}
	return session, revision, err
}

// judge takes what a request of the old incarnation was answered with. It says
// whether that is a verdict.
func (o *outdated) judge(res *check.Result, what string, shard uint64, err error) bool {
	switch {
	case errors.Is(err, wire.ErrNoVerdict):
		return false
	case err == nil:
		o.fail(res, fmt.Sprintf("%s of cluster %s, of incarnation %d, is taken by shard %d of the one that was restored from its checkpoint", what, o.cluster, o.incarnation, shard))
	case !errors.Is(err, base.ErrIncarnation):
		o.fail(res, fmt.Sprintf("%s of incarnation %d to shard %d is refused, but not for its incarnation: %v", what, o.incarnation, shard, err))
	default:
		res.OK++
	}
	return true
}

func (o *outdated) fail(res *check.Result, text string) {
	res.Failed++
	if res.Verdict = check.Fail; res.Text == "" {
		res.Text = text
	}
	if len(res.Details) < 20 {
		res.Details = append(res.Details, check.Detail{Verdict: check.Fail, Key: outdatedState, Text: text})
	}
}
