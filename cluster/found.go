package cluster

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/snapshot"
)

// formatVersion is the newest format that nodes of this build write.
const formatVersion = 1

// admission is what a founder (or, later, a cluster that admits a node) sends
// to a node, and what it answers.
type admission struct {
	Init    *FoundSpec             `json:"init,omitempty"` // forwarded init: found it yourself
	Cluster base.ClusterID         `json:"cluster,omitempty"`
	Node    base.NodeID            `json:"node"`
	Peers   map[base.NodeID]string `json:"peers,omitempty"`
}

type admitted struct {
	Reply    *FoundReply `json:"reply,omitempty"` // of a forwarded init
	Disk     base.DiskID `json:"disk,omitempty"`
	Engine   string      `json:"engine,omitempty"`
	RaftAddr string      `json:"raftAddr,omitempty"`
	GRPCAddr string      `json:"grpcAddr,omitempty"`
	HTTPAddr string      `json:"httpAddr,omitempty"`
	Zone     string      `json:"zone,omitempty"`
}

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

// serveAdmission is what an unfounded node serves: a forwarded init, or its
// admission to a cluster.
func (n *Node) serveAdmission(ctx context.Context, from base.NodeID, req []byte) ([]byte, error) {
	var a admission
	if err := json.Unmarshal(req, &a); err != nil {
		return nil, base.Invalid("admission", err.Error())
	}
	if a.Node != n.opts.NodeID {
		return nil, &base.Error{Cause: base.ErrIdentity, Field: "nodes", Ordinal: -1,
			Hint: fmt.Sprintf("the node at this address is %s, not %s; correct the list", n.opts.NodeID, a.Node)}
	}
	if a.Init != nil {
		reply, err := n.Init(ctx, *a.Init)
		return jsonReply(admitted{Reply: reply}, err)
	}
	if a.Cluster == "" {
		return nil, base.Invalid("cluster", "an admission names a cluster")
	}
	if err := n.admit(a, from); err != nil {
		return nil, err
	}
	id := n.Identity()
	return json.Marshal(admitted{Disk: id.Disk, Engine: id.Engine, RaftAddr: n.RaftAddr(), GRPCAddr: n.opts.GRPCAddr,
		HTTPAddr: n.opts.HTTPAddr, Zone: n.opts.Zone})
}

// admit binds this node to a cluster, durably and only once.
func (n *Node) admit(a admission, from base.NodeID) error {
	n.foundMu.Lock()
	defer n.foundMu.Unlock()
	switch have := n.Identity().Cluster; {
	case have == a.Cluster:
		return nil
	case have != "":
		return &base.Error{Cause: base.ErrAlreadyFounded, Field: "nodes", Ordinal: -1,
			Hint: fmt.Sprintf("node %s belongs to cluster %s; give it an empty data directory, or leave it out", n.opts.NodeID, have)}
	}
	if err := n.addresses.learn(a.Peers); err != nil {
		return err
	}
	if err := n.changeIdentity(func(id *Identity) { id.Cluster, id.SystemGeneration = a.Cluster, 1 }); err != nil {
		return err
	}
	failpoint.Hit("cluster.found.admitted-here")
	n.logger.Info("admitted to a cluster", "cluster", string(a.Cluster), "by", string(from))
	// The connection that this came by is closed by SetCluster; the admission
	// is asked for again and then answered at once.
	if err := n.transport.SetCluster(a.Cluster); err != nil {
		return err
	}
	return n.joinSystem()
}

// leadSystem is what the system group's leader looks after: the founding, the
// system group's own members, sessions, and replicas to rebuild.
func (n *Node) leadSystem(s *system, v *meta.View) {
	ctx, cancel := context.WithTimeout(n.ctx, systemProposeTimeout)
	defer cancel()
	warn := func(doing string, err error) {
		if err != nil && n.ctx.Err() == nil {
			n.logger.Warn(doing, "error", err)
		}
	}
	if founding(v) {
		op, spec, err := v.FoundingOperation()
		if err == nil {
			err = n.driveFounding(ctx, s, v, op, spec)
		}
		warn("founding the cluster", err)
	}
	warn("changing the system group's members", s.reconcileMembers(s.wantedMembers(v), nil))
	warn("ending sessions", n.expireSessions(ctx, s))
	warn("purging dropped states", n.purgeDropped(ctx, s, v))
	warn("deleting the claimed checkpoint", n.deleteClaimed(v))
}

// driveFounding brings the founding one step further.
func (n *Node) driveFounding(ctx context.Context, s *system, v *meta.View, op *meta.Operation, spec meta.FoundingSpec) error {
	switch op.Phase {
	case meta.PhaseFoundAdmit:
		problem := n.admitAll(ctx, s, v, spec)
		if problem != "" {
			return n.advance(ctx, s, op, meta.PhaseFoundAdmit, problem)
		}
		failpoint.Hit("cluster.found.all-admitted")
		return n.advance(ctx, s, op, meta.PhaseFoundPlace, "")
	case meta.PhaseFoundPlace:
		if len(v.Shards()) == 0 {
			failpoint.Hit("cluster.found.before-place")
			return n.place(ctx, s, op, spec)
		}
		serve := 0
		for _, rec := range v.Shards() {
			if n.leaderHint(rec.ID) != "" {
				serve++
			}
		}
		if serve < len(v.Shards()) { // the others are being restored or elected
			return n.noteProgress(ctx, s, op, spec, serve)
		}
		if problem := s.lacksVoters(v); problem != "" {
			return n.advance(ctx, s, op, op.Phase, problem)
		}
		failpoint.Hit("cluster.found.before-done")
		return n.advance(ctx, s, op, meta.PhaseDone, "")
	}
	return nil
}

// safeVoters are the voters that the system group needs, where there are as many
// nodes, before the loss of one disk loses nothing.
const safeVoters = 3

// lacksVoters says in words what the system group of a founding lacks; until it
// has its voters, the loss of the founder's disk would lose the cluster.
func (s *system) lacksVoters(v *meta.View) string {
	var missing []string
	wanted := 0
	voters, _, err := s.voters()
	if err != nil {
		return err.Error()
	}
	for _, m := range s.wantedMembers(v) {
		if !m.voter {
			continue
		}
		wanted++
		if !slices.ContainsFunc(voters, func(srv raft.Server) bool { return srv.ID == m.id }) {
			missing = append(missing, string(m.node))
		}
	}
	if need := min(wanted, safeVoters); len(voters) < need {
		return fmt.Sprintf("%d of %d voters of the system group have caught up; waiting for %s", len(voters), need, strings.Join(missing, ", "))
	}
	return ""
}

// restoreProgress begins what a founding that restores says while nothing is wrong.
const restoreProgress = "restoring: "

// noteProgress tells how far a restore is, unless it waits for something.
func (n *Node) noteProgress(ctx context.Context, s *system, op *meta.Operation, spec meta.FoundingSpec, serve int) error {
	if spec.Restore == nil || op.Error != "" && !strings.HasPrefix(op.Error, restoreProgress) {
		return nil
	}
	return n.advance(ctx, s, op, op.Phase, fmt.Sprintf("%s%d of %d shards serve", restoreProgress, serve, spec.Shards))
}

func (n *Node) advance(ctx context.Context, s *system, op *meta.Operation, phase, problem string) error {
	_, err := s.update(ctx, func(v *meta.View) (broadcast.Txn, error) {
		o := v.Operation(op.ID)
		if o == nil || o.Phase == phase && o.Error == problem {
			return broadcast.Txn{}, nil
		}
		return meta.AdvanceOperationTxn(v, s.node.wallMs(), op.ID, phase, problem)
	})
	return err
}

// admitAll admits every node that is not a member yet, and says in words what
// is still missing.
func (n *Node) admitAll(ctx context.Context, s *system, v *meta.View, spec meta.FoundingSpec) string {
	peers := map[base.NodeID]string{}
	for _, m := range spec.Nodes {
		peers[m.ID] = m.RaftAddr
	}
	peers[n.opts.NodeID] = n.RaftAddr()
	problem := ""
	for _, m := range spec.Nodes {
		if rec := v.Node(m.ID); rec != nil && rec.DiskID != "" {
			continue
		}
		if err := n.admitOne(ctx, s, m, peers); err != nil {
			problem = fmt.Sprintf("node %s at %s: %v", m.ID, m.RaftAddr, err)
			n.logger.Warn("admitting a node", "admitted", string(m.ID), "addr", m.RaftAddr, "error", err)
		}
	}
	return problem
}

func (n *Node) admitOne(ctx context.Context, s *system, m meta.FoundingNode, peers map[base.NodeID]string) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	id := n.Identity()
	a := admitted{Disk: id.Disk, Engine: id.Engine, RaftAddr: n.RaftAddr(), GRPCAddr: n.opts.GRPCAddr, HTTPAddr: n.opts.HTTPAddr, Zone: n.opts.Zone}
	if m.ID != n.opts.NodeID {
		msg, err := json.Marshal(admission{Cluster: id.Cluster, Node: m.ID, Peers: peers})
		if err != nil {
			return err
		}
		raw, err := n.transport.Call(ctx, m.ID, methodAdmission, msg)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(raw, &a); err != nil {
			return fmt.Errorf("reading the admission's answer: %v: %w", err, base.ErrInternal)
		}
	}
	if a.Engine != id.Engine {
		return &base.Error{Cause: base.ErrIdentity, Field: "engine", Ordinal: -1,
			Hint: fmt.Sprintf("node %s runs engine %s, this one %s; they must be the same", m.ID, a.Engine, id.Engine)}
	}
	_, err := s.update(ctx, func(v *meta.View) (broadcast.Txn, error) {
		return meta.AdmitNodeTxn(v, meta.Node{ID: m.ID, DiskID: a.Disk, RaftAddr: m.RaftAddr, GRPCAddr: a.GRPCAddr, HTTPAddr: a.HTTPAddr, Zone: a.Zone})
	})
	return err
}

// place records the first shards, and the states before them if the cluster
// begins with a checkpoint.
func (n *Node) place(ctx context.Context, s *system, op *meta.Operation, spec meta.FoundingSpec) error {
	var from *snapshot.Checkpoint
	if spec.Restore != nil {
		var err error
		from, err = n.restoredFrom(ctx, spec.Restore)
		if err != nil {
			n.restores.note(base.SystemGroup, err, err.Error())
			return errors.Join(err, n.advance(n.ctx, s, op, op.Phase, err.Error()))
		}
		n.restores.note(base.SystemGroup, nil, "")
		if err := n.restoreStates(ctx, s, from); err != nil {
			return err
		}
	}
	_, err := s.update(ctx, func(v *meta.View) (broadcast.Txn, error) {
		if len(v.Shards()) > 0 {
			return broadcast.Txn{}, nil
		}
		var nodes []meta.Node
		for _, m := range spec.Nodes {
			rec := v.Node(m.ID)
			if rec == nil || rec.State != meta.NodeMember {
				return broadcast.Txn{}, fmt.Errorf("node %s is not a member yet: %w", m.ID, base.ErrNotReady)
			}
			nodes = append(nodes, *rec)
		}
		shards, err := firstShards(v.NextShardID(), nodes, spec, from)
		if err != nil {
			return broadcast.Txn{}, err
		}
		return meta.PlaceShardsTxn(v, shards)
	})
	return err
}

// firstShards chooses the first shards and their replicas; with a checkpoint also
// how they begin.
func firstShards(first base.GroupID, nodes []meta.Node, spec meta.FoundingSpec, from *snapshot.Checkpoint) ([]meta.Shard, error) {
	var places []keygroup.PlaceNode
	for _, n := range nodes {
		places = append(places, keygroup.PlaceNode{ID: n.ID, Zone: n.Zone})
	}
	ids := make([]base.GroupID, spec.Shards)
	for i := range ids {
		ids[i] = first + base.GroupID(i)
	}
	plan, err := keygroup.Place(places, ids, spec.Replication)
	if err != nil {
		return nil, err
	}
	shards := newShards(ids, plan, spec)
	for i := range shards {
		if from != nil {
			shards[i].Seed = seedOf(from, &shards[i], spec)
		}
	}
	return shards, nil
}

func newShards(ids []base.GroupID, plan map[base.GroupID][]base.NodeID, spec meta.FoundingSpec) []meta.Shard {
	shards := make([]meta.Shard, len(ids))
	for i, id := range ids {
		r := keygroup.RangeOf(i, spec.KeyGroups, spec.Shards)
		sh := meta.Shard{ID: id, Lo: int(r.Lo), Hi: int(r.Hi), Epoch: 1, Birth: randomBirth(), PreferredLeader: plan[id][0]}
		for _, node := range plan[id] {
			sh.Replicas = append(sh.Replicas, meta.Replica{Node: node, Generation: 1, ReplicaID: base.MakeReplicaID(node, 1), Role: meta.RoleVoter})
		}
		shards[i] = sh
	}
	return shards
}

func randomBirth() base.Birth {
	var b [8]byte
	if _, err := rand.Read(b[:]); err != nil {
		panic(fmt.Sprintf("reading random bytes: %v", err)) // crypto/rand never fails on Linux
	}
	return base.Birth(binary.LittleEndian.Uint64(b[:]) | 1)
}

// expireSessions advances the system clock while sessions live, and ends those
// whose lease is past by it.
func (n *Node) expireSessions(ctx context.Context, s *system) error {
	v, err := s.view()
	if err != nil || v.SessionCount() == 0 {
		return err
	}
	stamp, err := s.stampMs()
	if err != nil {
		return err
	}
	if err := s.awaitIn(ctx, s.raft.Apply(broadcast.EncodeTick(stamp), enqueueTimeout)); err != nil {
		return classify(err)
	}
	if g := s.graceUntil.Load(); g != nil && time.Now().Before(*g) {
		return nil
	}
	_, err = s.update(ctx, func(v *meta.View) (broadcast.Txn, error) {
		txn, _, err := meta.ExpireSessionsTxn(v)
		return txn, err
	})
	return err
}
