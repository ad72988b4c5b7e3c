package failpoint

// Kind says what a point can be armed with.
type Kind uint8

const (
	// KindHit can crash, panic, wait or stall: no error can be returned there.
	KindHit Kind = iota
	// KindErr can fail as well.
	KindErr
	// KindInt is a number that a test may replace, to reach by small amounts of
	// data what else needs large ones.
	KindInt
)

// String is the kind in words.
func (k Kind) String() string {
	return [...]string{"a place", "a place that can fail", "a number"}[k]
}

// Point is one registered point.
type Point struct {
	Name string
	Kind Kind
	// At says when the point is reached.
	At string
}

// Points lists all points (FP2).
func Points() []Point {
	return []Point{
		{"raftlog.append.before-write", KindErr, "a batch of records is about to be written"},
		{"raftlog.append.before-sync", KindErr, "the batch is written, its fsync has not begun"},
		{"raftlog.append.after-sync", KindHit, "the batch is durable, nobody knows it yet"},
		{"raftlog.mark.before-write", KindHit, "the log is idle and a mark is about to follow its last batch"},
		{"raftlog.term.before-store", KindErr, "a term, or the term of a vote, is about to be stored"},
		{"raftlog.term.after-store", KindHit, "it is durable, raft does not know it yet"},
		{"raftlog.vote.before-candidate", KindHit, "the term of a vote is durable, for whom it is not"},
		{"raftlog.rotate.begin", KindHit, "a segment is full"},
		{"raftlog.head.before-sync", KindErr, "the head of a new segment is written"},
		{"raftlog.head.before-dir-sync", KindHit, "the head is durable, the name of the file is not"},
		{"raftlog.rotate.head-made", KindHit, "the next segment is durable, the full one has its zeros yet"},
		{"raftlog.rotate.before-seal", KindHit, "the full segment is cut to its records"},
		{"raftlog.rotate.before-seal-sync", KindHit, "its seal is written"},
		{"raftlog.rotate.sealed", KindHit, "its seal is durable"},
		{"raftlog.cut.begin", KindHit, "entries of a group are about to be deleted, at either end"},
		{"raftlog.cut.end", KindHit, "their deletion is durable"},
		{"raftlog.remove-segment.begin", KindHit, "the oldest segment holds nothing live"},
		{"raftlog.remove-segment.before-sync", KindHit, "its file is removed, the directory is not synced"},
		{"raftlog.move.before-write", KindHit, "live entries of the oldest segment are about to be written forward"},
		{"raftlog.move.written", KindHit, "their copies are durable"},
		{"raftlog.create-group.begin", KindHit, "a group is about to be made in the log"},
		{"raftlog.tombstone.begin", KindHit, "a group is about to be deleted for good"},
		{"raftlog.recover.before-mend", KindHit, "at a start, before the tail of a segment is written once more"},
		{"raftlog.recover.before-sync", KindHit, "at a start, the mended tail is written"},
		{"raftlog.segment-bytes", KindInt, "bytes at which a segment is full"},

		{"raftfsm.init.begin", KindHit, "the first command of a shard is being applied"},
		{"raftfsm.apply.begin", KindHit, "entries that are committed come to the state machine"},
		{"raftfsm.apply.before-store", KindErr, "they are applied in memory, their batch is not written"},
		{"raftfsm.apply.after-store", KindHit, "their batch is written, nobody knows it yet"},
		{"raftfsm.session.create", KindHit, "a shard sees a session for the first time"},
		{"raftfsm.session.forget", KindHit, "ended sessions are forgotten, their batch is not written"},
		{"raftfsm.declare.families-made", KindHit, "a declared state has its family, its declaration is not written"},
		{"raftfsm.drop-family.begin", KindHit, "the family of a dropped state is about to go"},
		{"raftfsm.drop-family.end", KindHit, "it is gone, that it is gone is not written"},
		{"raftfsm.swap.begin", KindHit, "an installed store is about to take the place of the old one"},
		{"raftfsm.swap.adopted", KindHit, "it has, the old one is still there"},

		{"snapshot.fetch.part-made", KindHit, "a file of a snapshot is about to be fetched"},
		{"snapshot.fetch.before-rename", KindErr, "it is whole and durable under its temporary name"},
		{"snapshot.fetch.file-done", KindHit, "it has its name; also for one that was linked"},
		{"snapshot.fetch.before-sync", KindHit, "all files are there, their directory is not synced"},
		{"snapshot.link.before-file", KindHit, "a file of a snapshot is about to be linked into a new store"},
		{"snapshot.link.before-sync", KindHit, "all are linked, their directory is not synced"},
	}
}
