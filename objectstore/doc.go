// Package objectstore is the contract of a store of immutable objects, such as a
// bucket or a directory: put if absent, ranged get, list, delete. Package file
// keeps objects in a directory (the embedded default), package s3 in a bucket;
// package fault makes any store fail, and package objectstoretest holds the tests
// that every store passes.
//
// It must not know what objects mean: snapshots, checkpoints, Raft.
//
// Consistency: an object is there with all of its bytes or not at all; who has
// seen Put return sees the object in every later Get, Stat and List, and who has
// seen Delete return does not. Of concurrent Puts of one key one succeeds.
//
// Concurrency: a Store is safe for use by many goroutines. A reader belongs to
// one goroutine, but Close may come while a Read waits, and ends it.
//
// Invariants:
//
//	OS1  Put stores the bytes that it was told of (size and SHA-256), or nothing.
//	OS2  An object is never replaced: its key means the same bytes for ever, or
//	     nothing.
//	OS3  A reader gives exactly the bytes that were asked for, then io.EOF; a
//	     body that is short, long, or fails gives an error instead (B52).
//	OS4  A list gives every object in the order of their keys, or an error; it is
//	     never cut short (B54).
//	OS5  A key never leaves its store: it names nothing outside the directory or
//	     the bucket's prefix.
//	OS6  What an upload left that did not end is no object, and Sweep removes it
//	     (B56).
package objectstore
