package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/snapshot"
)

// A cluster that begins with a checkpoint is founded as any other, with three
// differences. The founder looks at every object of the checkpoint before anything
// is durable. The states and the shards are those of the checkpoint: the states
// under the same numbers, the shards over the ranges that were asked for. And the
// first replicas of a shard are made of the checkpoint's files
// (restorereplica.go).

// restorePlans are the looks at checkpoints that run, or whose outcome nobody has
// taken yet. A look may take longer than the init that asks for it: the same init
// comes back to it.
type restorePlans struct {
	sync.Mutex
	looks map[string]*restoreLook
	// failed are the replicas that could not be made of the checkpoint; of the system
	// group it is that the founder could not read it.
	failed map[base.GroupID]failedSeed
}

// stuckAfter is how many attempts in a row have to find something missing or damaged
// before an operator is told: a body may be damaged on its way.
const stuckAfter = 3

type failedSeed struct {
	at time.Time
	notSeeded
	// fault is what is wrong with the checkpoint, empty for what may be better by
	// itself; row is in how many attempts in a row something was.
	fault snapshot.Fault
	row   int
}

// faultOf says what is wrong with a checkpoint that cannot be read for this error.
func faultOf(err error) snapshot.Fault {
	switch {
	case errors.Is(err, base.ErrNotFound):
		return snapshot.FaultMissing
	case errors.Is(err, base.ErrCorrupt):
		return snapshot.FaultDamaged
	case errors.Is(err, base.ErrIdentity), errors.Is(err, base.ErrFormatVersion):
		return snapshot.FaultForeign
	}
	return ""
}

// note keeps why a shard is not made of the checkpoint yet; nil that it is.
func (p *restorePlans) note(g base.GroupID, err error, text string) *notSeeded {
	p.Lock()
	defer p.Unlock()
	if err == nil {
		delete(p.failed, g)
		return nil
	}
	if p.failed == nil {
		p.failed = map[base.GroupID]failedSeed{}
	}
	f := failedSeed{at: time.Now(), notSeeded: notSeeded{text}, fault: faultOf(err)}
	if f.fault != "" {
		f.row = p.failed[g].row + 1
	}
	p.failed[g] = f
	return &f.notSeeded
}

// stuck calls fn for what an operator has to mend.
func (p *restorePlans) stuck(fn func(base.GroupID, *failedSeed)) {
	p.Lock()
	defer p.Unlock()
	for g, f := range p.failed {
		if f.row >= stuckAfter {
			fn(g, &f)
		}
	}
}

type restoreLook struct {
	done chan struct{}
	// found and err are set once done is closed.
	found *foundCheckpoint
	err   error
	// objects counts those that were looked at, of counts those known so far.
	objects, of atomic.Int64
}

// foundCheckpoint is a checkpoint of which every object is there.
type foundCheckpoint struct {
	Checkpoint
	sum      meta.Sum
	metadata *snapshot.Checkpoint
}

// restoreKey is the key of the `_metadata` that an operator names, or
// CLUSTER/latest. The store is the one of the node's configuration: a name in any
// other is refused.
func (n *Node) restoreKey(name string) (string, error) {
	own := strings.TrimSuffix(n.opts.ObjectsURI, "/") + "/"
	if n.opts.ObjectsURI != "" {
		name = strings.TrimPrefix(name, own)
	}
	if strings.Contains(name, "://") {
		return "", base.Invalid("restore", fmt.Sprintf("%.200q is not in the nodes' object store, %s; start every node with the store in which it lies, or name it as CLUSTER/NUMBER",
			name, own))
	}
	return snapshot.ParseName(name)
}

// lookAt looks at all objects of a checkpoint, or waits for a look that runs.
func (n *Node) lookAt(ctx context.Context, key string) (*foundCheckpoint, error) {
	if n.opts.Objects == nil {
		return nil, errNoObjectStore()
	}
	n.restores.Lock()
	l := n.restores.looks[key]
	if l == nil {
		l = &restoreLook{done: make(chan struct{})}
		if n.restores.looks == nil {
			n.restores.looks = map[string]*restoreLook{}
		}
		n.restores.looks[key] = l
		n.spawn(func() {
			l.found, l.err = n.look(n.ctx, key, l)
			close(l.done)
		})
	}
	n.restores.Unlock()
	select {
	case <-l.done:
	case <-n.ctx.Done():
		return nil, base.ErrShuttingDown
	case <-ctx.Done():
		return nil, &base.Error{Cause: base.ErrNotReady, Field: "restore", Ordinal: -1,
			Hint: fmt.Sprintf("%d of %d objects of the checkpoint were looked at so far; repeat the same init", l.objects.Load(), l.of.Load())}
	}
	n.restores.Lock()
	if n.restores.looks[key] == l {
		delete(n.restores.looks, key) // who asks again wants to know how it is then
	}
	n.restores.Unlock()
	return l.found, l.err
}

func (n *Node) look(ctx context.Context, key string, l *restoreLook) (*foundCheckpoint, error) {
	if cluster, latest := strings.CutSuffix(key, "/latest"); latest {
		number, err := snapshot.Latest(ctx, n.opts.Objects, base.ClusterID(cluster))
		if err != nil {
			return nil, notRestored(err)
		}
		key = snapshot.MetadataKey(base.ClusterID(cluster), number)
	}
	c, sum, err := snapshot.ReadCheckpoint(ctx, n.opts.Objects, key, meta.Sum{})
	if err != nil {
		return nil, notRestored(err)
	}
	if err := n.canRestore(c); err != nil {
		return nil, err
	}
	v, err := snapshot.VerifyCheckpoint(ctx, n.opts.Objects, key, snapshot.VerifyOptions{Progress: func(done, objects int) {
		l.objects.Store(int64(done))
		l.of.Store(int64(objects))
	}})
	if err != nil {
		return nil, notRestored(err)
	}
	return &foundCheckpoint{metadata: c, sum: sum, Checkpoint: Checkpoint{
		Key: key, Cluster: c.ClusterID, Number: c.Number, CreatedMs: c.CreatedMs, KeyGroups: c.M, Engine: c.Engine,
		Shards: len(c.Shards), Objects: v.Objects, Bytes: c.FullBytes(), Incarnation: c.Incarnation + 1,
	}}, nil
}

// notRestored says that nothing was done. A checkpoint that is not whole is
// refused for good: its error is not one whose outcome is unknown.
func notRestored(err error) error {
	s := base.SentinelOf(err)
	switch {
	case errors.Is(err, base.ErrCorrupt), errors.Is(err, base.ErrFormatVersion):
		s = base.ErrConflict
	case errors.Is(err, base.ErrNotFound):
		s = base.ErrNotFound
	case errors.Is(err, base.ErrObjectStore):
		s = base.ErrNotReady
	}
	return &base.Error{Cause: s, Field: "restore", Ordinal: -1, Hint: fmt.Sprintf("nothing was founded: %v", err)}
}

// canRestore says why this build, on this engine, cannot begin with a checkpoint.
func (n *Node) canRestore(c *snapshot.Checkpoint) error {
	refuse := func(field, hint string) error {
		return &base.Error{Cause: base.ErrConflict, Field: field, Ordinal: -1, Hint: hint}
	}
	switch {
	case c.Engine != n.opts.Driver.Name():
		return refuse("engine", fmt.Sprintf("the checkpoint is of engine %s, this node runs %s; start every node with --engine %s", c.Engine, n.opts.Driver.Name(), c.Engine))
	case c.FormatVersion > formatVersion:
		return refuse("restore", fmt.Sprintf("the checkpoint is of format version %d, this build writes %d; use a newer build", c.FormatVersion, formatVersion))
	case len(c.Broadcast) > 0 || len(c.Operator) > 0:
		return refuse("restore", "the checkpoint holds broadcast or operator state, which this build does not know; use a newer build")
	}
	want := restoredStates(c)
	if err := want.Check(); err != nil {
		return refuse("restore", fmt.Sprintf("the checkpoint's states or participants cannot be taken over: %v", err))
	}
	return nil
}

// resolve makes a founding that names a checkpoint one that says which it is, and
// with how many key groups.
func (f *foundCheckpoint) resolve(spec FoundSpec) (FoundSpec, error) {
	if spec.KeyGroups != 0 && spec.KeyGroups != f.KeyGroups {
		return spec, &base.Error{Cause: base.ErrConflict, Field: "key_groups", Ordinal: -1,
			Hint: fmt.Sprintf("the checkpoint has %d key groups, which never change; leave the number out, or give this one", f.KeyGroups)}
	}
	if spec.Shards > f.KeyGroups {
		return spec, &base.Error{Cause: base.ErrConflict, Field: "shards", Ordinal: -1,
			Hint: fmt.Sprintf("the checkpoint has %d key groups, so there can be no more shards than that", f.KeyGroups)}
	}
	if spec.Claim && f.metadata.Savepoint {
		return spec, &base.Error{Cause: base.ErrConflict, Field: "claim", Ordinal: -1,
			Hint: "a savepoint belongs to the user and cannot be claimed; leave --claim out, and delete its files when you do not need them any more"}
	}
	spec.KeyGroups = f.KeyGroups
	spec.Checkpoint = &meta.FoundingRestore{Key: f.Key, SHA256: f.sum, Incarnation: f.Incarnation, Claim: spec.Claim}
	return spec, nil
}

// findCheckpoint looks at the checkpoint with which this node is to found a cluster.
func (n *Node) findCheckpoint(ctx context.Context, spec FoundSpec) (FoundSpec, error) {
	found, err := n.lookAt(ctx, spec.Checkpoint.Key)
	if err != nil {
		return spec, err
	}
	if spec, err = found.resolve(spec); err != nil {
		return spec, err
	}
	_, err = n.foundingSpec(spec).Resolve() // with the checkpoint's key groups
	return spec, err
}

// planFounding is a dry run. Any node can answer it that has the store, one that
// is not listed too.
func (n *Node) planFounding(ctx context.Context, spec FoundSpec) (*FoundReply, error) {
	if spec.Restore == "" {
		return nil, base.Invalid("dry_run", "only the restore of a checkpoint has a plan; name the checkpoint")
	}
	listed := slices.ContainsFunc(spec.Nodes, func(m FoundNode) bool { return m.ID == n.opts.NodeID })
	if cluster := n.Identity().Cluster; cluster != "" && listed {
		return nil, &base.Error{Cause: base.ErrAlreadyFounded, Field: "nodes", Ordinal: -1,
			Hint: fmt.Sprintf("node %s belongs to cluster %s; a checkpoint is restored into nodes with empty data directories", n.opts.NodeID, cluster)}
	}
	key, err := n.restoreKey(spec.Restore)
	if err != nil {
		return nil, err
	}
	spec.Checkpoint = nil
	if _, err := n.foundingSpec(spec).Resolve(); err != nil {
		return nil, err
	}
	found, err := n.lookAt(ctx, key)
	if err != nil {
		return nil, err
	}
	if spec, err = found.resolve(spec); err != nil {
		return nil, err
	}
	want, err := n.foundingSpec(spec).Resolve()
	if err != nil {
		return nil, err
	}
	var nodes []meta.Node
	for _, m := range want.Nodes {
		nodes = append(nodes, meta.Node{ID: m.ID})
	}
	shards, err := firstShards(1, nodes, want, found.metadata)
	if err != nil {
		return nil, err
	}
	plan := &RestorePlan{Checkpoint: found.Checkpoint}
	for i := range shards {
		sh := plannedShard(&shards[i], found.metadata)
		plan.Shards = append(plan.Shards, sh)
		plan.FetchBytes += sh.FetchBytes * int64(len(sh.Nodes))
	}
	return &FoundReply{Plan: plan}, nil
}

func plannedShard(rec *meta.Shard, c *snapshot.Checkpoint) RestoredShard {
	out := RestoredShard{ID: rec.ID, Range: rangeOf(rec)}
	for _, r := range rec.Replicas {
		out.Nodes = append(out.Nodes, r.Node)
	}
	for i, s := range sourcesOf(c, rangeOf(rec)) {
		from := RestoreSource{ID: s.Group, Range: s.Range, Bytes: s.FullBytes}
		switch {
		case i > 0 && c.Engine == "mem": // a store has one image
			from.How = "copied"
		case out.Range.ContainsRange(s.Range):
			from.How = "linked"
		default:
			from.How = "clipped"
		}
		out.Sources = append(out.Sources, from)
		out.FetchBytes += s.FullBytes
	}
	return out
}
