package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
)

// formatVersion is the newest format that nodes of this build write.
const formatVersion = 1

// initMargin is how long before a caller's deadline an init that has not ended
// says how far it is: an answer at the deadline itself is never read. A caller
// that waits for a short time only gets it after three quarters of that.
const initMargin = 500 * time.Millisecond

// beforeDeadline ends a little before ctx does.
func beforeDeadline(ctx context.Context) (context.Context, context.CancelFunc) {
	at, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, at.Add(-min(initMargin, time.Until(at)/4)))
}

// Init founds the cluster, or resumes or shows the founding. Whichever listed
// node is called, the one with the lowest id founds, so that calls on several
// nodes at once cannot found two clusters (B24).
func (n *Node) Init(ctx context.Context, spec FoundSpec) (*FoundReply, error) {
	early, cancel := beforeDeadline(ctx)
	defer cancel()
	reply, err := n.initUntil(early, spec)
	if err == nil {
		n.addProgress(ctx, reply)
	}
	return reply, err
}

// addProgress adds how far a restore is, and what it is stuck for, where nobody has.
func (n *Node) addProgress(ctx context.Context, reply *FoundReply) {
	v, err := n.metaView()
	if err != nil || reply.Plan != nil || len(reply.Fetches)+len(reply.Stuck) > 0 {
		return
	}
	if op, _, err := v.FoundingOperation(); err == nil {
		reply.Fetches, reply.Stuck = n.progressOf(ctx, v, op)
	}
}

// stuckSince says whether something that an operator has to mend has held a founding
// up again since a moment.
func (n *Node) stuckSince(ctx context.Context, v *meta.View, op *meta.Operation, start time.Time) bool {
	_, stuck := n.progressOf(ctx, v, op)
	return slices.ContainsFunc(stuck, func(s StuckRestore) bool { return s.Age < time.Since(start) })
}

func (n *Node) initUntil(ctx context.Context, spec FoundSpec) (*FoundReply, error) {
	if spec.DryRun {
		return n.planFounding(ctx, spec)
	}
	asked, err := n.askedFor(&spec)
	if err != nil {
		return nil, err
	}
	want, err := asked.Resolve()
	if err != nil {
		return nil, err
	}
	listed := false
	peers := map[base.NodeID]string{}
	for _, m := range want.Nodes {
		listed = listed || m.ID == n.opts.NodeID
		if m.ID != n.opts.NodeID {
			peers[m.ID] = m.RaftAddr
		}
	}
	if !listed {
		return nil, base.Invalid("nodes", fmt.Sprintf("the list does not name the node called, %s; call a listed node", n.opts.NodeID))
	}
	if n.Identity().Cluster == "" {
		if err := n.addresses.learn(peers); err != nil {
			return nil, err
		}
		if first := want.Nodes[0].ID; first != n.opts.NodeID {
			return n.forwardInit(ctx, first, spec)
		}
		if spec.Checkpoint != nil {
			if spec, err = n.findCheckpoint(ctx, spec); err != nil {
				return nil, err
			}
		}
		if err := n.found(spec); err != nil {
			return nil, err
		}
	}
	return n.continueFounding(ctx, asked)
}

// askedFor is what an operator asks for: which checkpoint he means, the founder
// finds out.
func (n *Node) askedFor(spec *FoundSpec) (meta.FoundingSpec, error) {
	spec.Checkpoint = nil
	if spec.Restore != "" {
		key, err := n.restoreKey(spec.Restore)
		if err != nil {
			return meta.FoundingSpec{}, err
		}
		spec.Checkpoint = &meta.FoundingRestore{Key: key, Claim: spec.Claim}
	} else if spec.Claim {
		return meta.FoundingSpec{}, base.Invalid("claim", "only the checkpoint of a restore can be claimed; name it")
	}
	return n.foundingSpec(*spec), nil
}

func (n *Node) foundingSpec(s FoundSpec) meta.FoundingSpec {
	f := meta.FoundingSpec{KeyGroups: s.KeyGroups, Shards: s.Shards, Replication: s.Replication, Engine: n.opts.Driver.Name(), Restore: s.Checkpoint}
	for _, m := range s.Nodes {
		f.Nodes = append(f.Nodes, meta.FoundingNode{ID: m.ID, RaftAddr: m.RaftAddr})
	}
	return f
}

// forwardPatience bounds how long a forwarded init waits for a founder that
// cannot be reached. One that begins to found drops its connections, and then
// refuses a node without a cluster until it has admitted it; that is no failure.
const forwardPatience = 10 * time.Second

func (n *Node) forwardInit(ctx context.Context, to base.NodeID, spec FoundSpec) (*FoundReply, error) {
	msg, err := json.Marshal(admission{Init: &spec, Node: to})
	if err != nil {
		return nil, err
	}
	start := time.Now()
	for {
		var a admitted
		raw, err := n.transport.Call(ctx, to, methodAdmission, msg)
		var refused *base.Error
		if errors.As(err, &refused) && refused.Field == "restore" {
			return nil, err // the founder can be reached, and says what is wrong with the checkpoint
		}
		if err == nil {
			if err = json.Unmarshal(raw, &a); err != nil || a.Reply == nil {
				return nil, fmt.Errorf("reading the founder's reply: %v: %w", err, base.ErrInternal)
			}
			return a.Reply, nil
		}
		if n.Identity().Cluster != "" { // admitted meanwhile: ask the cluster itself
			return n.continueFounding(ctx, n.foundingSpec(spec))
		}
		if !base.SentinelOf(err).Retryable || time.Since(start) > forwardPatience {
			addr, _ := n.resolve(to)
			return nil, &base.Error{Cause: err, Field: "nodes", Ordinal: -1,
				Hint: fmt.Sprintf("node %s at %s founds the cluster and could not; start it, check its address, and repeat the same init", to, addr)}
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting for founder %s: %w: %w", to, base.ErrUnavailable, err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// found makes this node the first member of a new cluster. What is asked for is
// durable before the node belongs to a cluster, so that a crash at any point is
// resumed by the same init.
func (n *Node) found(spec FoundSpec) error {
	n.foundMu.Lock()
	defer n.foundMu.Unlock()
	if n.Identity().Cluster != "" {
		return nil // another call was faster
	}
	cluster := base.ClusterID(randomID())
	err := n.changeIdentity(func(id *Identity) {
		id.Cluster, id.SystemGeneration, id.Founding = cluster, 1, &spec
	})
	if err != nil {
		return err
	}
	if err := n.transport.SetCluster(cluster); err != nil {
		return err
	}
	failpoint.Hit("cluster.found.before-bootstrap")
	n.logger.Info("founding a cluster", "cluster", string(cluster), "nodes", len(spec.Nodes))
	return n.joinSystem()
}

// continueFounding records the founding in the system group and waits until
// its operation has ended, the context does, or a restore is stuck; asking again goes
// on from there.
func (n *Node) continueFounding(ctx context.Context, want meta.FoundingSpec) (*FoundReply, error) {
	s, err := n.waitFounded(ctx)
	if err != nil {
		return nil, err
	}
	op, resumed, rev, err := n.recordFounding(ctx, s, want)
	if err != nil {
		return nil, err
	}
	reply := &FoundReply{Cluster: n.Identity().Cluster, Operation: fmt.Sprint(op.ID), Phase: op.Phase, Resumed: resumed}
	start := time.Now()
	for {
		v, err := s.view()
		if err != nil {
			return nil, err
		}
		if o := v.Operation(op.ID); o != nil {
			reply.Phase, reply.Problem = o.Phase, o.Error
			if o.Finished() {
				return reply, nil
			}
		}
		rev = max(rev, v.Revision())
		wait, cancel := ctx, context.CancelFunc(func() {})
		if want.Restore != nil {
			wait, cancel = context.WithTimeout(ctx, progressPause)
		}
		err = s.store.WaitForRevision(wait, rev+1)
		look := wait.Err() != nil && ctx.Err() == nil
		cancel()
		if err != nil && (!look || n.stuckSince(ctx, v, v.Operation(op.ID), start)) {
			return reply, nil // not done yet: phase and problem say how far it is
		}
	}
}

// recordFounding makes the founding an operation of the system group, unless it
// is one (resumed).
func (n *Node) recordFounding(ctx context.Context, s *system, want meta.FoundingSpec) (op *meta.Operation, resumed bool, rev base.Revision, err error) {
	record := func(spec meta.FoundingSpec) (before bool, err error) {
		rev, err = s.update(ctx, func(v *meta.View) (txn broadcast.Txn, err error) {
			if before = v.Cluster() != nil; !before && spec.Restore != nil && spec.Restore.Asks() {
				return txn, base.ErrNotReady // only the founder knows which checkpoint it is
			}
			txn, op, err = meta.FoundTxn(v, meta.Founding{Spec: spec, Self: n.opts.NodeID, Cluster: n.Identity().Cluster,
				FormatVersion: formatVersion, NowMs: s.node.wallMs()})
			return txn, err
		})
		return before, err
	}
	if begun := n.Identity().Founding; begun != nil && begun.Checkpoint != nil {
		// What this node has begun counts, whatever is asked for now.
		if resumed, err = record(n.foundingSpec(*begun)); err == nil {
			_, err = record(want)
		}
	} else {
		resumed, err = record(want)
	}
	if err == nil {
		n.poke()
	}
	return op, resumed, rev, err
}

// resumeFounding records the founding that this node has begun, where the call
// that asked for it ended first: an init that another node passed on always does
// when its connection is dropped, and a crash ends every call.
func (n *Node) resumeFounding() {
	spec, s := n.Identity().Founding, n.system.Load()
	if spec == nil || s == nil {
		return
	}
	if _, err := s.leading(); err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(n.ctx, systemProposeTimeout)
	defer cancel()
	if _, _, _, err := n.recordFounding(ctx, s, n.foundingSpec(*spec)); err != nil && n.ctx.Err() == nil {
		n.logger.Warn("recording the founding", "error", err)
	}
}

// waitFounded waits for the system group of a node that belongs to a cluster
// already but is still starting its replica.
func (n *Node) waitFounded(ctx context.Context) (*system, error) {
	for {
		changed := n.changes.wait()
		if s := n.system.Load(); s != nil {
			return s, nil
		}
		select {
		case <-ctx.Done():
			return n.founded()
		case <-n.ctx.Done():
			return nil, base.ErrShuttingDown
		case <-changed:
		}
	}
}
