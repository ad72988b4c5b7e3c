package cluster

import (
	"errors"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/keelstate/keelstate/cluster/raftlog"
	"github.com/keelstate/keelstate/cluster/transport"
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/internal/failpoint"
	"github.com/keelstate/keelstate/internal/vfs"
	"github.com/keelstate/keelstate/objectstore"
	"github.com/keelstate/keelstate/snapshot"
)

// Options configure a node. Zero fields take the default that their comment
// names; fields without one are required.
type Options struct {
	NodeID  base.NodeID
	DataDir string
	// Zone is where the node is; replicas of a shard are spread over zones.
	Zone string
	// RaftAddr is listened on for node-to-node traffic; AdvertiseRaftAddr is
	// what other nodes dial (default: RaftAddr as listened on).
	RaftAddr          string
	AdvertiseRaftAddr string
	// GRPCAddr and HTTPAddr are what the node tells others about itself.
	GRPCAddr string
	HTTPAddr string

	// Driver opens the stores of shard replicas.
	Driver engine.Driver
	// Objects is where checkpoints go, shared by all nodes; the node does not close
	// it. ObjectsURI is how its configuration names it, for people. Nil and empty:
	// there is none, and checkpoints are refused.
	Objects    objectstore.Store
	ObjectsURI string
	// RebuildFromStore makes replicas that take a leader's snapshot read from Objects
	// what that has of its files, and only the rest from the leader.
	RebuildFromStore bool
	// Network carries node-to-node traffic. Default transport.TCP{}.
	Network transport.Network
	// Gossip says who is alive and where; a hint. Nil: none.
	Gossip Gossip
	// Logger; default: discard.
	Logger *slog.Logger
	// Registerer for metrics; nil: not exported.
	Registerer prometheus.Registerer
	// OnFatal is called once when the node cannot go on (its disk failed a
	// write or an fsync): the process must end. Required.
	OnFatal func(error)
	// WallClock is the node's wall clock; a seam for fault injection. Default
	// time.Now. Only the polls of W5 and operation timestamps use it; leases do not.
	WallClock func() time.Time
	// Log says where the Raft log lives and how large its parts are; a seam for
	// simulations. OnFailure, OnCorrupt and Metrics are the node's own. Default:
	// raftlog's defaults, on the operating system's files.
	Log raftlog.Options

	// ElectionTimeout is Raft's heartbeat and election timeout. Default 500 ms.
	ElectionTimeout time.Duration
	// CommitTimeout is about how soon the followers of a group without new entries
	// hear what was committed last; who compares their hashes waits for it.
	// Default a tenth of ElectionTimeout.
	CommitTimeout time.Duration
	// SyncLimit is how old a write of the Raft log may be before the node falls
	// silent, so that others lead. Default 3 s.
	SyncLimit time.Duration
	// DiskSpace tells the room on the volume of a directory; a seam for tests.
	// Default: what the operating system says.
	DiskSpace func(dir string) (DiskSpace, error)
	// LogMaxBytes is the size of a shard's log at which a snapshot is taken;
	// LogKeepBytes are kept behind it for followers that are a little behind.
	// LogHardBytes bounds what is kept for a live follower that is further
	// behind. Defaults 64, 16 and 256 MiB.
	LogMaxBytes, LogKeepBytes, LogHardBytes uint64
	// CheckInterval is how often leaders, the log's size, and replicas are
	// looked after. Default 1 s.
	CheckInterval time.Duration
	// BalanceDelay is how long a leader that is not the preferred one waits
	// before it hands over to a healthy preferred one. Default 10 s.
	BalanceDelay time.Duration
	// ScrubInterval is how often a replica reads and checks all of its files, at
	// most ScrubBytesPerSecond. Defaults 24 h and 16 MiB/s; a negative interval:
	// never by itself.
	ScrubInterval       time.Duration
	ScrubBytesPerSecond int64
	// CheckpointInterval is the time between automatic checkpoints; 0: none.
	// CheckpointRetain is how many completed ones are kept (default 3).
	// CheckpointTimeout is after how long a running one fails (default 10 min).
	// OrphanGrace is how old an object must be that nothing refers to before it is
	// deleted (default 24 h). What the leader of the system group has counts.
	CheckpointInterval time.Duration
	CheckpointRetain   int
	CheckpointTimeout  time.Duration
	OrphanGrace        time.Duration
	// CheckpointLocalLinks makes every replica keep what it held at the barriers of
	// the checkpoints that are kept, so that a rollback fetches nothing.
	CheckpointLocalLinks bool
	// CheckpointChangelog makes checkpoints store the log since an earlier one in
	// place of the files of now, unless that log has more bytes than the larger of
	// ChangelogMaterializeBytes (default 64 MiB) and half of the files.
	CheckpointChangelog       bool
	ChangelogMaterializeBytes int64
	// ChangelogSegmentBytes is the size at which a segment of the log ends and is
	// stored between two checkpoints (default 4 MiB); a sixteenth of it is stored once
	// it is as old as ChangelogSegmentAge (default 10 s).
	ChangelogSegmentBytes int
	ChangelogSegmentAge   time.Duration
	// AppliedLagBound is the lag, in entries, up to which a replica counts as
	// ready. Default 10,000.
	AppliedLagBound uint64
}

// Gossip is what cluster needs of a gossip implementation (CL6).
type Gossip interface {
	// Members lists the nodes that gossip believes alive, without ourselves or
	// with; only those of this cluster.
	Members() []GossipMember
}

// GossipMember is one node as gossip knows it.
type GossipMember struct {
	Node     base.NodeID
	RaftAddr string
	// Unbound says that it belongs to no cluster: it is yet to be admitted, or has
	// lost its data directory.
	Unbound bool
}

// EnsureDefaults replaces zero fields by their defaults.
func (o *Options) EnsureDefaults() {
	if o.Network == nil {
		o.Network = transport.TCP{}
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.WallClock == nil {
		o.WallClock = time.Now
	}
	if o.Log.FS == nil {
		o.Log.FS = vfs.OS
	}
	def(&o.ElectionTimeout, 500*time.Millisecond)
	def(&o.CommitTimeout, o.ElectionTimeout/10)
	def(&o.SyncLimit, 3*time.Second)
	if o.DiskSpace == nil {
		o.DiskSpace = diskSpace
	}
	def(&o.LogMaxBytes, uint64(failpoint.Int("cluster.log-max-bytes", 64<<20)))
	def(&o.LogKeepBytes, uint64(failpoint.Int("cluster.log-keep-bytes", 16<<20)))
	def(&o.LogHardBytes, 256<<20)
	def(&o.CheckInterval, time.Second)
	def(&o.BalanceDelay, 10*time.Second)
	def(&o.CheckpointRetain, 3)
	def(&o.CheckpointTimeout, 10*time.Minute)
	def(&o.OrphanGrace, 24*time.Hour)
	def(&o.ChangelogMaterializeBytes, 64<<20)
	def(&o.ChangelogSegmentBytes, int(failpoint.Int("cluster.changelog-segment-bytes", 4<<20)))
	def(&o.ChangelogSegmentAge, 10*time.Second)
	def(&o.AppliedLagBound, 10_000)
	def(&o.ScrubInterval, 24*time.Hour)
	def(&o.ScrubBytesPerSecond, 16<<20)
}

// pingInterval is how often an idle connection to a node is tried: a black hole
// need not be found sooner than a leader is missed. It is bounded, for nodes may
// have different options.
func pingInterval(election time.Duration) time.Duration {
	return min(max(election, time.Second), 5*time.Second)
}

func def[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// Validate returns every problem of the options at once.
func (o *Options) Validate() error {
	var errs []error
	if err := ValidateNodeID(o.NodeID); err != nil {
		errs = append(errs, err)
	}
	need := func(ok bool, field, hint string) {
		if !ok {
			errs = append(errs, base.Invalid(field, hint))
		}
	}
	need(o.DataDir != "", "data-dir", "name a directory of this node's own")
	need(o.RaftAddr != "", "raft-addr", "give host:port")
	need(o.Driver != nil, "engine", "a storage engine is required")
	need(o.OnFatal != nil, "OnFatal", "a function is required")
	need(o.LogKeepBytes <= o.LogMaxBytes && o.LogMaxBytes <= o.LogHardBytes, "LogMaxBytes",
		"use LogKeepBytes <= LogMaxBytes <= LogHardBytes")
	need(o.ScrubBytesPerSecond > 0, "ScrubBytesPerSecond", "give bytes per second")
	need(o.CheckpointInterval >= 0 && (o.CheckpointInterval == 0 || o.Objects != nil), "checkpoint-interval", "give an object store too, or 0 for no automatic checkpoints")
	need(o.ChangelogSegmentBytes > 0 && o.ChangelogSegmentBytes <= snapshot.MaxSegmentBytes/4 && o.ChangelogSegmentAge > 0, "ChangelogSegmentBytes",
		"give an age, and bytes that leave room for an entry")
	need(o.CheckpointRetain >= 1, "checkpoint-retain", "keep at least 1")
	need(o.CheckpointTimeout > 0, "checkpoint-timeout", "give a time")
	need(o.ChangelogMaterializeBytes > 0, "changelog-materialize-bytes", "give bytes")
	need(o.OrphanGrace > 0, "OrphanGrace", "give a time")
	need(o.ElectionTimeout >= 20*time.Millisecond, "ElectionTimeout", "use at least 20 ms")
	return errors.Join(errs...)
}
