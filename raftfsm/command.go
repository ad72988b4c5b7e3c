package raftfsm

import (
	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// CommandKind is the kind of a log entry's command. The numbers are part of the
// command format.
type CommandKind uint8

const (
	// CommandInit founds the shard: the first command of its log.
	CommandInit CommandKind = 1
	// CommandWrite carries coalesced requests of clients.
	CommandWrite CommandKind = 2
	// CommandTermStart is the first command of a leader's term; reads wait for it.
	CommandTermStart CommandKind = 3
	// CommandTick advances the shard clock only.
	CommandTick CommandKind = 4
	// CommandDeclare makes states known to the shard.
	CommandDeclare CommandKind = 5
	// CommandDrop removes states from the shard.
	CommandDrop CommandKind = 6
	// CommandForget removes sessions that have ended.
	CommandForget CommandKind = 7
	// CommandHashMark makes every replica keep a view of this index, from which
	// its hashes are computed.
	CommandHashMark CommandKind = 8
	// CommandBarrier is the shard's cut of a checkpoint of the cluster: what is
	// before it in the log belongs to the checkpoint, what follows does not.
	CommandBarrier CommandKind = 9
	// CommandFence stops the writes to the shard, which will be rolled back.
	CommandFence CommandKind = 10
	// CommandRollback replaces what the shard holds by what a checkpoint had.
	CommandRollback CommandKind = 11
	// CommandReopen ends the fence.
	CommandReopen CommandKind = 12
)

func (k CommandKind) String() string {
	names := [...]string{"", "init", "write", "term-start", "tick", "declare", "drop", "forget", "hash-mark", "barrier", "fence", "rollback", "reopen"}
	if k == 0 || int(k) >= len(names) {
		return "unknown"
	}
	return names[k]
}

// Limits of the command format, beyond those of engine/state.
const (
	// MaxCommandBytes bounds one encoded command.
	MaxCommandBytes = 16 << 20
	// MaxCommandItems bounds the elements, entries and sources of one command,
	// so that decoding allocates in proportion.
	MaxCommandItems = 1 << 20
	// MaxCommandRequests bounds the requests of one write.
	MaxCommandRequests = 1 << 16
	// MaxCommandMutations bounds mutations and preconditions of one command.
	MaxCommandMutations = 1 << 17
	// maxNameBytes bounds keyspace, name, type and function of a declaration.
	maxNameBytes = 4 << 10
)

// Init says what a shard is when it is founded.
type Init struct {
	Group       base.GroupID
	Range       keygroup.Range
	M           int
	Epoch       base.Epoch
	Birth       base.Birth
	Incarnation base.Incarnation
	Sequence    uint64
	ClockMs     uint64
}

// Barrier is the cut of a checkpoint in the log of one shard.
type Barrier struct {
	// Number is the checkpoint's; a shard passes them in ascending order.
	Number uint64
	// Epoch is that of the shard in the checkpoint's version of the shard map.
	Epoch base.Epoch
	// Attempt names the upload; 0 if the shard passes the number without taking
	// part, which fails the checkpoint.
	Attempt uint64
	// Uploader is the node that takes the snapshot here; empty if Attempt is 0.
	Uploader base.NodeID
}

// Missed says that the shard passes the number without taking part.
func (b *Barrier) Missed() bool { return b.Attempt == 0 }

// Command is a decoded command. Only the fields of its kind are set. Byte
// strings alias the decoded buffer.
type Command struct {
	Kind CommandKind
	// StampMs is the leader's clock in ms (Write, TermStart, Tick).
	StampMs uint64
	// SystemRevision is the leader's revision of the system state (Write), or
	// the revision at which the sessions had ended (Forget).
	SystemRevision base.Revision
	Init           Init
	Requests       []Request
	Declarations   []state.Declaration
	Drops          []engine.FamilyID
	Sessions       []base.SessionID
	// MarkID names a hash mark; the proposer chooses it, unique in the cluster.
	MarkID   uint64
	Barrier  Barrier
	Fence    Fence
	Rollback Rollback
	Reopen   Reopen

	// Backing memory of the slices inside Requests, kept over calls of Decode.
	mutations     []Mutation
	preconditions []state.Precondition
	elements      [][]byte
	entries       []state.Entry
	sources       []state.Namespace
}

// Mutation is one mutation of a request under its ordinal: its position in the
// request as the client first cut it, which survives re-cutting.
type Mutation struct {
	Ordinal uint32
	state.Mutation

	// raw is the encoded mutation without its ordinal, for the op hash; nil if
	// the mutation was not decoded.
	raw []byte
}

// Request is what a client asks of one shard in one piece. It is atomic.
type Request struct {
	Incarnation base.Incarnation
	Epoch       base.Epoch
	// Session 0 means no session: Seq, Prev and Floor are ignored.
	Session base.SessionID
	// Seq is the session's number of the request, at least 1 and unique in the
	// session over all shards. Prev is the number of the session's previous
	// request to this key-group range, 0 if none. Floor is the lowest number
	// that the session still has open at this shard.
	Seq, Prev, Floor uint64
	// Atomic requests are never re-cut; those with preconditions are atomic too.
	Atomic bool
	// BarrierSeen is the newest checkpoint barrier that the client has seen.
	BarrierSeen   uint64
	Preconditions []state.Precondition
	// Mutations have strictly ascending ordinals.
	Mutations []Mutation

	// size is the encoded size if the request was decoded, 0 otherwise.
	size int
}

// indivisible says that the request must be decided as a whole.
func (r *Request) indivisible() bool { return r.Atomic || len(r.Preconditions) > 0 }

// OrdinalRange is the ordinals [Lo, Hi).
type OrdinalRange struct{ Lo, Hi uint32 }

// Token names a position that later reads can ask for.
type Token struct {
	Incarnation base.Incarnation
	// Group and Birth name the lineage of the shard.
	Group    base.GroupID
	Birth    base.Birth
	Sequence uint64
	// Barrier is the newest checkpoint barrier that the shard has passed.
	Barrier uint64
}

// Part is the result of some ordinals of a request that were decided together.
type Part struct {
	Ordinals []OrdinalRange
	// Err is nil if these ordinals were applied.
	Err *base.Error
	// First is the sequence, and so the version, of the first ordinal; the
	// others follow one by one in order. 0 if refused.
	First uint64
	// Sequence is that of the last ordinal, or of the shard if refused.
	Sequence uint64
	Replayed bool
}

// Result is the answer to one request.
type Result struct {
	// Err is nil if the request was applied. Its Cause is a sentinel of package
	// base, and its Ordinal names the mutation or precondition at fault.
	Err   *base.Error
	Token Token
	// First is the version of the first mutation; the others follow one by one.
	First uint64
	// Replayed says that nothing was executed: this is the first result.
	Replayed bool
	// Parts is set only if the ordinals were decided at different times, after a
	// change of the shard map. Err is then the first error of the parts.
	Parts []Part
}

// Failure returns Err as an error, nil if the request was applied.
func (r *Result) Failure() error {
	if r.Err == nil {
		return nil
	}
	return r.Err
}

// Entry is a committed log entry: a command, a Raft configuration, or neither
// (only the index advances).
type Entry struct {
	Index, Term   uint64
	Command       []byte
	Configuration []byte
}

// Outcome is the answer to one entry.
type Outcome struct {
	Index uint64
	// Err is nil if the entry was carried out. For a write it is nil, and the
	// requests have their own results.
	Err error
	// Skipped says that the entry was at or below the applied index.
	Skipped bool
	// Results has one result per request of a write.
	Results []Result
	// ClockMs and Sequence are the shard's after the entry.
	ClockMs, Sequence uint64
}
