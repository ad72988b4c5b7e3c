// Package snapshot describes the files of a shard's snapshot and moves them: the
// shard manifest, hashing, verification, fetching from a source that can resume,
// uploading to an object store and reading from it; and it describes and verifies
// a checkpoint of a whole cluster there (`_metadata`).
//
// It must not know Raft's types, gRPC, a concrete engine, a concrete store of
// objects, or the registry of objects, which it asks by a function.
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
//	SN5  An object's key has the SHA-256 of its bytes and the attempt that stored
//	     it. Every byte is compared while it is stored, and what is there already
//	     under the key before it is taken for the same: a file that is not what its
//	     manifest says is never referenced (B47, B51).
//	SN6  In a manifest that lies in a store each file that is not empty has a place
//	     of its own length; nothing is stored twice by one upload.
//	SN7  An upload makes a bounded number of objects, however many files there are.
//	SN8  An upload that fails leaves the caller's manifest as it was and reports
//	     nothing; it waits for all that it began.
//	SN9  `_metadata` is decoded only if magic, version and checksum are right,
//	     every length is within its bound, and the ranges of its shards tile
//	     [0, M); equal checkpoints have equal bytes.
//	SN10 A checkpoint is verified only if every object was looked at and is as it
//	     must be; every one that is not is named.
//	SN11 A segment is decoded only if magic, version and checksum are right, every
//	     length is within its bound, and it has every entry that its head claims.
//	SN12 The segments of a manifest have every entry from behind its files up to its
//	     index, none twice; without segments a manifest is of version 1.
package snapshot
