// Package snapshot describes the files of a shard's snapshot and moves them: the
// shard manifest, hashing, verification, and fetching from a source that can
// resume.
//
// It must not know Raft's types, gRPC, a concrete engine or a concrete store of
// objects. The manifest has seats for where each file lies in an object store;
// nothing here fills them yet.
//
// Concurrency: functions are safe for use by many goroutines on different
// directories; one directory belongs to one call at a time. HashCache is safe
// for use by many goroutines.
//
// Invariants:
//
//	SN1  A manifest is decoded only if magic, version and checksum are right and
//	     every length is within its bound; a decoded name never leaves its
//	     directory.
//	SN2  A fetched file gets its name only after its size and SHA-256 were
//	     verified and it was fsynced; until then it is NAME.part. So every file
//	     of the manifest that is there under its name is right, and an
//	     interrupted fetch is resumed (B21).
//	SN3  Verify names the file that is wrong.
//	SN4  Files that an engine may write to again are copied, never linked.
package snapshot
