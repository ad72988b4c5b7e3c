// Package faultfs is a disk that fails on command: a FUSE file system over a
// backing directory that knows what was synced. It lets the chaos harness take
// the power from a node (what was not synced is gone, for Go's and for RocksDB's
// files alike), and make a disk lie, fail, fill up, hang, slow down or rot.
//
// It knows nothing of the product: it sees paths and bytes. It needs Linux,
// /dev/fuse and root; [Supported] says so, and nothing else in the package fails
// where it is missing except [Mount].
//
// Layout of the backing directory: every file is an object of its own
// (objects/NUMBER), and names live in memory. [FS.Close] lays the tree out as
// plain files again (tree/), and [Mount] takes such a tree in.
//
// Concurrency: an FS may be used by many goroutines, and its mount by many
// processes. A stalled call holds no lock. [FS.Crash] excludes every other call
// while it rolls back.
//
// Invariants:
//
//	FF1  After a crash everything that was synced is there: the contents of a
//	     file as of its last fsync or fdatasync, the entries of a directory as
//	     of its last fsync. Syncing a file does not sync its name.
//	FF2  After a crash in mode DropAll nothing else is there. In mode KeepPrefix
//	     the un-synced changes up to one moment are there, the last write torn at
//	     a sector; in mode KeepSubset any of them may be, torn, each change of a
//	     name only with those it builds on. The seed alone decides which.
//	FF3  A rename is one step. Syncing either of its directories makes it durable,
//	     with everything pending in both.
//	FF4  What a failed fsync covered is lost at the next crash, even if a later
//	     fsync of the file succeeds (the kernel forgets such pages).
//	FF5  After a crash no handle and no inode number of before is valid.
//	FF6  When more un-synced bytes pile up than the limit, the oldest habit of
//	     kernels applies: the file at hand is written back, as if synced.
package faultfs
