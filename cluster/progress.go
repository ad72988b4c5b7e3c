package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/snapshot"
)

// How far the replicas are with the files that a restore or a rollback has them
// bring here is kept in memory, by each node for its own replicas; who is asked for
// the operation asks the nodes that take part (method 14). It is not in the
// metadata: every step would be an entry of the system group's log, and nobody
// decides anything by it.

// The sources of bytes, as the metric of fetched bytes names them.
const (
	fromStore = "store" // the object store
	fromPeer  = "peer"  // another replica
	fromDisk  = "disk"  // they were here already, and were compared
)

// progressPatience bounds how long the nodes are waited for that are asked how far
// they are: what they do not say is missing from the figures, and nothing else.
const progressPatience = 300 * time.Millisecond

// fetchTable are the fetches of a node's replicas: those for an operation that has
// not ended, and those of snapshots that run.
type fetchTable struct {
	mu sync.Mutex
	of map[fetchKey]*fetching
}

// fetchKey has operation 0 for a snapshot that comes from the leader.
type fetchKey struct {
	group     base.GroupID
	operation uint64
}

// fetching is how far one is, in bytes; here may come from an earlier attempt.
type fetching struct {
	due, here atomic.Int64
	disk      prometheus.Counter
}

// begin notes an attempt that has to bring due bytes here, in place of an earlier one.
func (t *fetchTable) begin(k fetchKey, due int64, m *groupMetrics) *fetching {
	f := &fetching{disk: m.fetchedFrom(fromDisk)}
	f.due.Store(due)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.of == nil {
		t.of = map[fetchKey]*fetching{}
	}
	t.of[k] = f
	return f
}

func (t *fetchTable) remove(gone func(fetchKey) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for k := range t.of {
		if gone(k) {
			delete(t.of, k)
		}
	}
}

// forgetEnded forgets the fetches for operations that have ended.
func (t *fetchTable) forgetEnded(v *meta.View) {
	t.remove(func(k fetchKey) bool {
		o := v.Operation(k.operation)
		return k.operation != 0 && k.operation < v.NextOperationID() && (o == nil || o.Finished())
	})
}

// due is how many bytes are to come, by shard.
func (t *fetchTable) due() map[base.GroupID]int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make(map[base.GroupID]int64, len(t.of))
	for k, f := range t.of {
		out[k.group] += max(f.due.Load()-f.here.Load(), 0)
	}
	return out
}

// note is the Progress of a Fetch; fetched bytes are counted where they come from.
func (f *fetching) note(n int64, fetched bool) {
	f.here.Add(n)
	if !fetched {
		f.disk.Add(float64(n))
	}
}

// countedSource counts the bytes that a source gives.
type countedSource struct {
	snapshot.Source
	bytes prometheus.Counter
}

// Open implements snapshot.Source.
func (s countedSource) Open(ctx context.Context, name string, offset int64) (io.ReadCloser, error) {
	rc, err := s.Source.Open(ctx, name, offset)
	if err != nil {
		return nil, err
	}
	return countedBody{rc, s.bytes}, nil
}

type countedBody struct {
	io.ReadCloser
	bytes prometheus.Counter
}

func (b countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.bytes.Add(float64(n))
	return n, err
}

// storeSource gives the files of a manifest from the object store.
func (r *replica) storeSource(m *snapshot.Manifest) snapshot.Source {
	return countedSource{snapshot.StoreSource(r.node.opts.Objects, m), r.metrics.fetchedFrom(fromStore)}
}

// ShardFetch is how far the replicas of a shard are with the files that an operation
// has them bring beside what they have, in bytes of all of them together.
type ShardFetch struct {
	Group base.GroupID `json:"group"`
	Due   int64        `json:"due"`
	Here  int64        `json:"here"`
}

func (s *ShardFetch) add(due, here int64) {
	s.Due += due
	s.Here += min(here, due)
}

// progressRequest asks a node how far its replicas are with an operation.
type progressRequest struct {
	Operation uint64 `json:"operation"`
}

// replicaProgress is what it says of one of them. Whole says that everything is
// here, whatever the bytes say.
type replicaProgress struct {
	Group base.GroupID `json:"group"`
	Due   int64        `json:"due,omitempty"`
	Here  int64        `json:"here,omitempty"`
	Whole bool         `json:"whole,omitempty"`
	// Stuck is what an operator has to mend, nil if nothing is known.
	Stuck *StuckRestore `json:"stuck,omitempty"`
}

func (n *Node) serveProgress(_ context.Context, _ base.NodeID, req []byte) ([]byte, error) {
	var q progressRequest
	if err := json.Unmarshal(req, &q); err != nil {
		return nil, base.Invalid("request", err.Error())
	}
	return jsonReply(n.ownProgress(q.Operation), nil)
}

// ownProgress is how far this node's replicas are.
func (n *Node) ownProgress(operation uint64) []replicaProgress {
	of := map[base.GroupID]*replicaProgress{}
	at := func(g base.GroupID) *replicaProgress {
		if of[g] == nil {
			of[g] = &replicaProgress{Group: g}
		}
		return of[g]
	}
	n.fetches.mu.Lock()
	for k, f := range n.fetches.of {
		if k.operation == operation {
			p := at(k.group)
			p.Due, p.Here = f.due.Load(), f.here.Load()
		}
	}
	n.fetches.mu.Unlock()
	if v, err := n.metaView(); err == nil && v.RestoreUnderWay() != nil {
		if op, _, err := v.FoundingOperation(); err == nil && op.ID == operation {
			for _, r := range n.runningReplicas() {
				at(r.id).Whole = true // what it is made of is behind it
			}
			n.restores.stuck(func(g base.GroupID, f *failedSeed) {
				at(g).Stuck = &StuckRestore{Group: g, Node: n.opts.NodeID, Fault: f.fault, Detail: f.text, Age: time.Since(f.at)}
			})
		}
	}
	out := make([]replicaProgress, 0, len(of))
	for _, p := range of {
		out = append(out, *p)
	}
	slices.SortFunc(out, func(a, b replicaProgress) int { return int(int64(a.Group) - int64(b.Group)) })
	return out
}

// heardProgress is what nodes say of their replicas.
type heardProgress map[base.NodeID]map[base.GroupID]replicaProgress

// askProgress asks the members, as far as they seem to live.
func (n *Node) askProgress(ctx context.Context, v *meta.View, operation uint64) heardProgress {
	ctx, cancel := context.WithTimeout(ctx, progressPatience)
	defer cancel()
	nodes := map[base.NodeID]bool{}
	for _, rec := range v.Nodes() {
		nodes[rec.ID] = rec.State == meta.NodeMember
	}
	alive, msg := n.alive(), encodeProgressRequest(operation)
	out := heardProgress{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	hear := func(node base.NodeID, all []replicaProgress) {
		of := make(map[base.GroupID]replicaProgress, len(all))
		for _, p := range all {
			of[p.Group] = p
		}
		mu.Lock()
		defer mu.Unlock()
		out[node] = of
	}
	hear(n.opts.NodeID, n.ownProgress(operation))
	for node, member := range nodes {
		if node == n.opts.NodeID || !member || !alive[node] {
			continue
		}
		wg.Go(func() {
			var all []replicaProgress
			raw, err := n.transport.Call(ctx, node, methodProgress, msg)
			if err == nil {
				err = json.Unmarshal(raw, &all)
			}
			if err != nil {
				n.logger.Debug("asking how far a node is with an operation", "asked", string(node), "error", err)
				return
			}
			hear(node, all)
		})
	}
	wg.Wait()
	return out
}

func encodeProgressRequest(operation uint64) []byte {
	msg, err := json.Marshal(progressRequest{Operation: operation})
	if err != nil {
		panic("encoding a number: " + err.Error())
	}
	return msg
}

// rollbackFetches is how far the shards of a rollback are, by its records and by what
// the nodes say; without them it is what the records say.
func rollbackFetches(v *meta.View, r *meta.Rollback, heard heardProgress) []ShardFetch {
	var out []ShardFetch
	for _, s := range v.RollbackShards(r.ID) {
		rec := v.Shard(s.Group)
		if rec == nil {
			continue
		}
		f := ShardFetch{Group: s.Group}
		for _, rep := range rec.Replicas {
			p := heard[rep.Node][s.Group]
			if p.Due == 0 {
				p.Due = s.Bytes
			}
			if slices.Contains(s.Prepared, rep.ReplicaID) {
				p.Here = p.Due
			}
			f.add(p.Due, p.Here)
		}
		out = append(out, f)
	}
	return out
}

// restoreFetches is how far the shards of a cluster are that is made of a checkpoint.
func (n *Node) restoreFetches(ctx context.Context, v *meta.View, from *meta.FoundingRestore, heard heardProgress) []ShardFetch {
	ctx, cancel := context.WithTimeout(ctx, progressPatience)
	defer cancel()
	c, err := n.restoredFrom(ctx, from)
	if err != nil {
		c = &snapshot.Checkpoint{} // what the nodes say is all that is known
	}
	var out []ShardFetch
	for _, rec := range v.Shards() {
		var all int64
		for _, s := range sourcesOf(c, rangeOf(rec)) {
			all += s.FullBytes
		}
		f := ShardFetch{Group: rec.ID}
		for _, rep := range rec.Replicas {
			p := heard[rep.Node][rec.ID]
			if p.Due == 0 {
				p.Due = all
			}
			if p.Whole {
				p.Here = p.Due
			}
			f.add(p.Due, p.Here)
		}
		out = append(out, f)
	}
	return out
}

// progressOf is how far an operation is that has replicas bring files here, and what
// a restore is stuck for; nothing of any other.
func (n *Node) progressOf(ctx context.Context, v *meta.View, op *meta.Operation) (fetches []ShardFetch, stuck []StuckRestore) {
	if op == nil || op.Finished() {
		return nil, nil
	}
	if r := v.Rollback(op.ID); r != nil {
		return rollbackFetches(v, r, n.askProgress(ctx, v, op.ID)), nil
	}
	from := v.RestoreUnderWay()
	if from == nil {
		return nil, nil
	}
	if f, _, err := v.FoundingOperation(); err != nil || f.ID != op.ID {
		return nil, nil
	}
	heard := n.askProgress(ctx, v, op.ID)
	for _, of := range heard {
		for _, p := range of {
			if p.Stuck != nil {
				stuck = append(stuck, *p.Stuck)
			}
		}
	}
	slices.SortFunc(stuck, func(a, b StuckRestore) int {
		return cmp.Or(cmp.Compare(a.Group, b.Group), cmp.Compare(a.Node, b.Node))
	})
	return n.restoreFetches(ctx, v, from, heard), stuck
}
