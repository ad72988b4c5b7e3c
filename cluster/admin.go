package cluster

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/broadcast/meta"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/raftfsm"
)

// Version is the version of this build, set by the linker.
var Version = "dev"

// shardRequest is what the node-level calls about one shard carry.
type shardRequest struct {
	Group base.GroupID `json:"group"`
	Mark  uint64       `json:"mark,omitempty"`
	To    base.NodeID  `json:"to,omitempty"`
}

type sizes struct {
	A, B uint64
}

// serveAdmin registers the node-level calls that serve administration.
func (n *Node) serveAdmin() {
	t := n.transport
	t.Handle(methodLeaders, n.serveLeaders)
	t.Handle(methodRejoin, n.serveRejoin)
	t.Handle(methodProgress, n.serveProgress)
	t.Handle(methodHello, func(context.Context, base.NodeID, []byte) ([]byte, error) {
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.mu.draining || n.mu.closed {
			return nil, base.ErrShuttingDown
		}
		if why := n.disk.sick(); why != "" {
			return nil, fmt.Errorf("%s: %w", why, base.ErrDiskFull)
		}
		return nil, nil
	})
	t.Handle(methodStatus, func(ctx context.Context, _ base.NodeID, _ []byte) ([]byte, error) {
		st, err := n.NodeStatus(ctx)
		return jsonReply(st, err)
	})
	onShard := func(method uint8, f func(context.Context, *replica, shardRequest) (any, error)) {
		t.Handle(method, func(ctx context.Context, _ base.NodeID, req []byte) ([]byte, error) {
			var q shardRequest
			if err := json.Unmarshal(req, &q); err != nil {
				return nil, base.Invalid("request", err.Error())
			}
			r, err := n.replicaOf(q.Group)
			if err != nil {
				return nil, err
			}
			v, err := f(ctx, r, q)
			return jsonReply(v, err)
		})
	}
	onShard(methodHash, func(ctx context.Context, r *replica, q shardRequest) (any, error) { return r.hashAt(ctx, q) })
	onShard(methodTransfer, func(ctx context.Context, r *replica, q shardRequest) (any, error) {
		if _, err := r.leading(); err != nil {
			return nil, err
		}
		return q.To, r.transferTo(ctx, q.To)
	})
	onShard(methodSnapshot, func(ctx context.Context, r *replica, _ shardRequest) (any, error) { return r.snapshotNow(ctx) })
	onShard(methodCompact, func(_ context.Context, r *replica, _ shardRequest) (any, error) { return r.compact() })
	onShard(methodScrub, func(ctx context.Context, r *replica, _ shardRequest) (any, error) { return r.scrubNow(ctx) })
}

// callShard calls a node-level method about a shard on a node.
func (n *Node) callShard(ctx context.Context, node base.NodeID, method uint8, q shardRequest, reply any) error {
	msg, err := json.Marshal(q)
	if err != nil {
		return err
	}
	raw, err := n.transport.Call(ctx, node, method, msg)
	if err != nil {
		return err
	}
	return json.Unmarshal(raw, reply)
}

// onLeader calls f with the node that leads the shard, again while the leader
// moves, until the context ends.
func (n *Node) onLeader(ctx context.Context, g base.GroupID, f func(base.NodeID) error) error {
	if _, err := n.shardRecord(g); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, systemProposeTimeout)
	defer cancel()
	hint := n.leaderHint(g)
	for {
		err := error(&base.Error{Cause: base.ErrNotReady, Group: &g, Ordinal: -1, Hint: "the shard has no leader at the moment"})
		if hint != "" {
			if err = f(hint); err == nil {
				return nil
			}
		}
		var e *base.Error
		next := n.leaderHint(g)
		if errors.As(err, &e) && e.LeaderHint != "" && e.LeaderHint != hint {
			next = e.LeaderHint
		}
		if s := base.SentinelOf(err); s.Outcome != base.OutcomeNotApplied || !s.Retryable {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(20 * time.Millisecond):
			hint = next
		}
	}
}

func (n *Node) shardRecord(g base.GroupID) (*meta.Shard, error) {
	v, err := n.metaView()
	if err != nil {
		return nil, err
	}
	rec := v.Shard(g)
	if rec == nil {
		return nil, &base.Error{Cause: base.ErrNotFound, Field: "shard", Ordinal: -1, Hint: fmt.Sprintf("no shard %s; see keelctl shard list", g)}
	}
	return rec, nil
}

// TransferLeader hands a shard to the replica on a node and returns who leads.
func (n *Node) TransferLeader(ctx context.Context, shard base.GroupID, to base.NodeID) (base.NodeID, error) {
	var leader base.NodeID
	err := n.onLeader(ctx, shard, func(node base.NodeID) error {
		return n.callShard(ctx, node, methodTransfer, shardRequest{Group: shard, To: to}, &leader)
	})
	return leader, err
}

// HashShard makes every replica compute its hashes at one index of the log.
func (n *Node) HashShard(ctx context.Context, shard base.GroupID) ([]ReplicaHash, error) {
	rec, err := n.shardRecord(shard)
	if err != nil {
		return nil, err
	}
	var b [8]byte
	if _, err := rand.Read(b[:]); err != nil {
		return nil, err
	}
	mark := binary.LittleEndian.Uint64(b[:])
	err = n.onLeader(ctx, shard, func(node base.NodeID) error {
		return n.callShard(ctx, node, methodHash, shardRequest{Group: shard, Mark: mark, To: node}, new(ReplicaHash))
	})
	if err != nil {
		return nil, err
	}
	out := make([]ReplicaHash, len(rec.Replicas))
	var wg sync.WaitGroup
	for i, rep := range rec.Replicas {
		wg.Add(1)
		go func() {
			defer wg.Done()
			out[i].Node = rep.Node
			err := n.callShard(ctx, rep.Node, methodHash, shardRequest{Group: shard, Mark: mark}, &out[i])
			if err != nil {
				out[i] = ReplicaHash{Node: rep.Node, Error: err.Error()}
			}
		}()
	}
	wg.Wait()
	return out, nil
}

// waitMark waits, at most hashWait, until this replica has applied a mark.
func (r *replica) waitMark(ctx context.Context, mark uint64) error {
	ctx, cancel := context.WithTimeout(ctx, hashWait)
	defer cancel()
	return r.machine.WaitMark(ctx, mark)
}

// markKept is how long the views of hash marks are kept after their last use.
const markKept = 2 * time.Minute

// hashWait bounds how long a replica waits to reach a hash mark.
const hashWait = 30 * time.Second

// hashAt computes this replica's hashes at a mark; the leader proposes the mark
// if it does not have it yet.
//
// A request that names the node in To means the leader: who no longer leads says
// so at once instead of waiting for a mark that nobody proposes.
func (r *replica) hashAt(ctx context.Context, q shardRequest) (*ReplicaHash, error) {
	mark := q.Mark
	if err := r.healthy(); err != nil {
		return nil, err
	}
	r.hashedAt.set(time.Now())
	report, err := r.machine.HashAt(ctx, mark)
	if errors.Is(err, base.ErrNotFound) {
		_, lerr := r.leading()
		if lerr != nil && q.To != "" {
			return nil, lerr
		}
		if lerr == nil {
			if _, err := r.command(ctx, raftfsm.AppendHashMark(nil, mark)); err != nil {
				return nil, err
			}
		} else if werr := r.waitMark(ctx, mark); werr != nil {
			return nil, fmt.Errorf("%w: %w", base.ErrNotReady, werr)
		}
		report, err = r.machine.HashAt(ctx, mark)
	}
	if err != nil {
		return nil, r.suspect(err)
	}
	content, ops := report.Sum()
	return &ReplicaHash{Node: r.opts.NodeID, Index: report.Index, ClockMs: report.ClockMs, Content: content, Ops: ops}, nil
}

// SnapshotShard takes a snapshot on the shard's leader.
func (n *Node) SnapshotShard(ctx context.Context, shard base.GroupID) (index, bytes uint64, err error) {
	var s sizes
	err = n.onLeader(ctx, shard, func(node base.NodeID) error {
		return n.callShard(ctx, node, methodSnapshot, shardRequest{Group: shard}, &s)
	})
	return s.A, s.B, err
}

func (r *replica) snapshotNow(ctx context.Context) (*sizes, error) {
	if !r.snapping.CompareAndSwap(false, true) {
		return nil, &base.Error{Cause: base.ErrOverloaded, Ordinal: -1, RetryAfter: time.Second, Hint: "a snapshot is being taken already"}
	}
	defer r.snapping.Store(false)
	index, err := r.takeSnapshot(ctx, r.opts.LogKeepBytes)
	if err != nil {
		return nil, err
	}
	m, _, _, err := r.snaps.newest()
	if err != nil {
		return nil, err
	}
	s := &sizes{A: index}
	if m != nil {
		for _, f := range m.Files {
			s.B += uint64(f.Size)
		}
	}
	return s, nil
}

// CompactShard compacts the store of every replica; sizes are sums.
func (n *Node) CompactShard(ctx context.Context, shard base.GroupID) (before, after uint64, err error) {
	rec, err := n.shardRecord(shard)
	if err != nil {
		return 0, 0, err
	}
	for _, rep := range rec.Replicas {
		var s sizes
		if err := n.callShard(ctx, rep.Node, methodCompact, shardRequest{Group: shard}, &s); err != nil {
			return before, after, fmt.Errorf("compacting %s on node %s: %w", shard, rep.Node, err)
		}
		before, after = before+s.A, after+s.B
	}
	return before, after, nil
}

func (r *replica) compact() (*sizes, error) {
	store, release, err := r.machine.Store()
	if err != nil {
		return nil, err
	}
	defer release()
	if err := store.Flush(); err != nil {
		return nil, err
	}
	s := &sizes{A: store.Stats().DiskBytes}
	if err := store.Compact(); err != nil {
		return nil, err
	}
	s.B = store.Stats().DiskBytes
	return s, nil
}

// serveFile opens a file of a snapshot for a peer. The name comes from the
// network: it must be one that fileName makes, and is opened below the
// snapshot's directory only.
func (n *Node) serveFile(_ context.Context, _ base.NodeID, name string) (io.ReadCloser, int64, error) {
	parts := strings.Split(name, "/")
	if len(parts) != 4 || parts[0] != "snapshot" {
		return nil, 0, base.Invalid("name", "no such file")
	}
	id, err := strconv.ParseUint(parts[1], 10, 64)
	if err != nil {
		return nil, 0, base.Invalid("name", "no such group")
	}
	if sum, err := hex.DecodeString(parts[2]); err != nil || len(sum) != 32 {
		return nil, 0, base.Invalid("name", "no such snapshot")
	}
	r, err := n.replicaOf(base.GroupID(id))
	if err != nil {
		return nil, 0, err
	}
	dir, err := r.snaps.filesOf(parts[2])
	if err != nil {
		return nil, 0, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, 0, fmt.Errorf("opening snapshot %s: %w", filepath.Base(dir), err)
	}
	defer root.Close()
	f, err := root.Open(parts[3])
	if errors.Is(err, fs.ErrNotExist) {
		// The snapshot itself is there, or was a moment ago.
		_ = r.suspect(fmt.Errorf("%s of snapshot %s is missing: %w", parts[3], filepath.Base(dir), base.ErrCorrupt))
	}
	if err != nil {
		return nil, 0, fmt.Errorf("opening %s: %w: %w", parts[3], base.ErrNotFound, err)
	}
	st, err := f.Stat()
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, st.Size(), nil
}

// Drain hands over every office of this node and says not ready from now on.
func (n *Node) Drain(ctx context.Context) error {
	n.mu.Lock()
	n.mu.draining = true
	n.mu.Unlock()
	var errs []error
	for _, g := range n.groups() {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if g.raft.State() != raft.Leader {
			continue
		}
		voters, _, err := g.voters()
		if err != nil || len(voters) < 2 {
			continue
		}
		if err := g.transferAway(ctx); err != nil {
			errs = append(errs, fmt.Errorf("handing over %s: %w", g.id, err))
		}
	}
	return errors.Join(errs...)
}

// Leads says whether this node leads a group and has taken office.
func (n *Node) Leads(id base.GroupID) bool {
	for _, g := range n.groups() {
		if g.id == id {
			_, err := g.leading()
			return err == nil
		}
	}
	return false
}
