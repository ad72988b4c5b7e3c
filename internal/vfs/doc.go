// Package vfs is the only way in which Go code of the product touches files.
// It has a small interface with three implementations: the operating system,
// a memory file system that can crash, and a wrapper that injects errors and
// latency by predicate. It knows nothing about what the files mean.
//
// RocksDB does its own I/O in C++ and is not covered by this package.
//
// Concurrency: an FS may be used by many goroutines. A File may be read by
// many goroutines at once (ReadAt); writes, Truncate, Sync and Close of one
// File are the business of one owner at a time.
//
// Invariants:
//
//	VF1  After a crash of the memory file system, everything that was synced
//	     is there: file contents as of the file's last Sync, directory entries
//	     as of the directory's last SyncDir.
//	VF2  After a crash, what was not synced is there in part: any subset of the
//	     pending writes, any of them torn, and any subset of the pending
//	     directory changes. Which part is a function of the seed alone.
//	VF3  A crash clone shares no memory with its origin.
//	VF4  Lock excludes a second holder, in this process or another.
package vfs
