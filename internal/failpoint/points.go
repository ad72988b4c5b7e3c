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
		{"raftfsm.rollback.fenced", KindHit, "a shard refuses writes, its batch is not written"},
		{"raftfsm.rollback.begin", KindHit, "a shard is about to be rolled back, what is before it is written"},
		{"raftfsm.rollback.sealed", KindHit, "the shard is in the prepared store, not durably"},
		{"raftfsm.rollback.before-adopt", KindHit, "a restart opens that store, the machine has the old one"},
		{"raftfsm.rollback.adopted", KindHit, "the machine has it, the old one is still there"},
		{"raftfsm.rollback.reopened", KindHit, "a shard takes writes again, its batch is not written"},

		{"snapshot.fetch.part-made", KindHit, "a file of a snapshot is about to be fetched"},
		{"snapshot.fetch.before-rename", KindErr, "it is whole and durable under its temporary name"},
		{"snapshot.fetch.file-done", KindHit, "it has its name; also for one that was linked"},
		{"snapshot.fetch.before-sync", KindHit, "all files are there, their directory is not synced"},
		{"snapshot.link.before-file", KindHit, "a file of a snapshot is about to be linked into a new store"},
		{"snapshot.link.before-sync", KindHit, "all are linked, their directory is not synced"},

		{"rocks.create-family.end", KindHit, "RocksDB has made a family, nobody knows it yet"},
		{"rocks.flush.begin", KindErr, "a store is about to be flushed"},
		{"rocks.flush.end", KindHit, "it is flushed, nobody knows it yet"},
		{"rocks.checkpoint.begin", KindErr, "a checkpoint is about to be made"},
		{"rocks.checkpoint.files-linked", KindHit, "its files are linked, its marker is not written"},
		{"rocks.checkpoint.before-rename", KindHit, "it is whole under its temporary name"},
		{"rocks.clip.family", KindHit, "nothing outside a range is left in a family that another store is to take over"},
		{"rocks.absorb.family", KindHit, "a family has been made anew of the files of several stores"},

		{"cluster.identity.before-save", KindHit, "the IDENTITY file is about to be replaced"},
		{"cluster.identity.before-copy", KindHit, "it is durable, its second copy is the old one"},
		{"cluster.identity.saved", KindHit, "both are durable, nothing was done by it yet"},
		{"cluster.file.before-rename", KindErr, "a small file (IDENTITY, CURRENT, META, MANIFEST, DAMAGED, addresses) is durable under its temporary name"},
		{"cluster.file.before-dir-sync", KindHit, "it has its name, the directory is not synced"},
		{"cluster.boot.before-count", KindHit, "at a start, before the Raft log counts it"},
		{"cluster.boot.log-counted", KindHit, "the log has counted the start, IDENTITY has not"},
		{"cluster.replica.log-made", KindHit, "a replica's group is in the Raft log, IDENTITY does not know it"},
		{"cluster.replica.noted", KindHit, "IDENTITY knows the replica, it has no store"},
		{"cluster.replica.store-open", KindHit, "its store is open, log and store are not compared yet"},
		{"cluster.damage.before-mark", KindHit, "a replica is found damaged, the mark is not durable"},
		{"cluster.retire.before-tombstone", KindHit, "a replaced replica is stopped, its log is still there"},
		{"cluster.retire.before-rename", KindHit, "its log is gone, its files are not put aside"},
		{"cluster.retire.before-remove", KindHit, "the new replica is ready, the files of the old one are about to go"},
		{"cluster.snapshot.begin", KindErr, "raft asks a replica for a snapshot"},
		{"cluster.snapshot.persist", KindHit, "the instant is fixed, nothing is hashed"},
		{"cluster.snapshot.staged", KindErr, "its files are hashed and have their place, the manifest is not written"},
		{"cluster.snapshot.before-manifest", KindHit, "the metadata of a snapshot, made or fetched, is written, its manifest is not"},
		{"cluster.snapshot.before-rename", KindErr, "it is whole under its temporary name"},
		{"cluster.snapshot.before-dir-sync", KindHit, "it has its name, the directory is not synced"},
		{"cluster.snapshot.reap", KindHit, "an older snapshot has lost its name, its files are still there"},
		{"cluster.anew.before-current", KindHit, "a store that cannot be opened is about to be given up for an empty one"},
		{"cluster.anew.after-current", KindHit, "CURRENT names the empty store, nothing is in it"},
		{"cluster.install.begin", KindHit, "a fetched snapshot is about to become the store"},
		{"cluster.install.linked", KindHit, "the new store's files are there, it is not open"},
		{"cluster.install.before-current", KindHit, "it is open, CURRENT names the old one"},
		{"cluster.install.after-current", KindHit, "CURRENT names it, the state machine has the old one"},
		{"cluster.install.before-remove-old", KindHit, "nobody reads the old store any more, its files are still there"},
		{"cluster.office.before-term-start", KindHit, "a group has elected this node, which has not begun its term"},
		{"cluster.office.term-start-applied", KindHit, "a shard's first command of the term is applied, the office is not taken"},
		{"cluster.office.taken", KindHit, "the first command is applied, nothing is served yet"},
		{"cluster.transfer.begin", KindHit, "a leader is about to hand over"},
		{"cluster.transfer.end", KindHit, "it has"},
		{"cluster.members.before-remove", KindHit, "a leader is about to remove a replaced member"},
		{"cluster.members.removed", KindHit, "it is removed"},
		{"cluster.members.learner-added", KindHit, "a learner was added"},
		{"cluster.members.before-promote", KindHit, "a learner has caught up and is about to become a voter"},
		{"cluster.members.promoted", KindHit, "it is a voter"},
		{"cluster.metadata.before-propose", KindHit, "the leader of the system group is about to propose a change"},
		{"cluster.metadata.before-apply", KindHit, "a change of the metadata is committed, this node's copy does not have it"},
		{"cluster.metadata.applied", KindHit, "it has, nobody was told"},
		{"cluster.metadata.before-note", KindHit, "how far the copy is, is about to be made durable"},
		{"cluster.metadata.restore", KindHit, "at a start, before the copy is built from snapshot and log"},
		{"cluster.system-snapshot.begin", KindHit, "a snapshot of the metadata is about to be written"},
		{"cluster.system-snapshot.written", KindHit, "it is written, raft's store has not closed it"},
		{"cluster.session.opened", KindHit, "a session is in the metadata, the client does not know it"},
		{"cluster.found.before-bootstrap", KindHit, "the founder belongs to the new cluster, which has no first entry"},
		{"cluster.found.admitted-here", KindHit, "a node belongs to the cluster, the founder does not know it"},
		{"cluster.found.all-admitted", KindHit, "all nodes are admitted, the founding does not say so"},
		{"cluster.found.before-place", KindHit, "the first shards are about to be placed"},
		{"cluster.found.before-done", KindHit, "all shards lead, the founding does not say that it is done"},
		{"cluster.barrier.before-propose", KindHit, "a leader is about to put the barrier of a checkpoint into its log"},
		{"cluster.upload.flushed", KindHit, "the uploader of a shard has flushed, nobody knows"},
		{"cluster.upload.begin", KindHit, "the cut of a shard is on the uploader's disk, nothing is in the object store"},
		{"cluster.changelog.ahead", KindErr, "a segment of the log was stored between two checkpoints, the uploader has not noted it"},
		{"cluster.upload.ahead", KindErr, "a shard's manifest names segments that were stored between two checkpoints, and is in the object store; the registry does not know them"},
		{"cluster.upload.segments", KindErr, "the log of a shard since the last checkpoint is in the object store, its manifest is not"},
		{"cluster.upload.stored", KindErr, "it is in the object store, the registry does not know"},
		{"cluster.checkpoint.before-propose", KindHit, "the coordinator is about to change the records of checkpoints"},
		{"cluster.checkpoint.before-metadata", KindHit, "every shard has uploaded, _metadata is not stored"},
		{"cluster.checkpoint.after-metadata", KindHit, "_metadata is stored, the checkpoint is not completed"},
		{"cluster.checkpoint.before-delete", KindHit, "a delete plan is committed, nothing of it is deleted"},
		{"cluster.restore.declared", KindHit, "a cluster is founded with a checkpoint, whose states are declared, no shard is placed"},
		{"cluster.restore.begin", KindHit, "a replica is about to be made of a checkpoint"},
		{"cluster.restore.fetched", KindHit, "the files of the checkpoint are on its disk"},
		{"cluster.restore.assembled", KindHit, "a store is made of them, the replica does not have it"},
		{"cluster.restore.before-publish", KindHit, "its first snapshot is about to be put together, its term is durable"},
		{"cluster.links.before-manifest", KindHit, "what a replica held at a barrier is here, the manifest that says so is not"},
		{"cluster.rollback.begin", KindHit, "a replica is about to be prepared for a rollback"},
		{"cluster.rollback.fetched", KindHit, "what the shard had is here, nobody has opened it"},
		{"cluster.rollback.before-prepared", KindHit, "it can be opened, the mark that says so is not there"},
		{"cluster.rollback.before-propose", KindHit, "a leader is about to fence, roll back or reopen its shard"},
		{"cluster.rollback.opened", KindHit, "a shard is being rolled back, the new store is open"},
		{"cluster.rollback.before-current", KindHit, "the new store is sealed, a restart opens the old one"},
		{"cluster.rollback.after-current", KindHit, "a restart opens the new one, the machine has the old one"},
		{"cluster.rollback.cut", KindHit, "the log begins behind the rollback, the shard has not said that it is rolled back"},
		{"cluster.rollback.before-remove", KindHit, "what was prepared is about to go"},
		{"cluster.restore.published", KindHit, "the snapshot is there, the replica has not begun"},
		{"cluster.changelog-segment-bytes", KindInt, "bytes at which a segment of the log for the object store is full"},
		{"cluster.remove.aside", KindHit, "a directory that is not used any more has lost its name, its files are still there"},
		{"cluster.log-max-bytes", KindInt, "bytes of a log at which a snapshot is taken; a quarter of it for the system group"},
		{"cluster.log-keep-bytes", KindInt, "bytes of log that are kept behind it"},
	}
}
