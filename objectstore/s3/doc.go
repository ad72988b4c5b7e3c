// Package s3 keeps objects in a bucket that speaks the protocol of Amazon S3, by
// minio-go. It is the only package that knows minio-go.
//
// It must not know what objects mean, and repeats nothing itself: package retry
// does, within one budget.
//
// Concurrency: as package objectstore says.
//
// Invariants:
//
//	OC1  Every upload carries the SHA-256 of what is sent, which the server checks;
//	     an upload in parts compares the hash of the whole before it completes, and
//	     the size of what came of it after.
//	OC2  Every upload is conditional on the key being free (If-None-Match).
//	OC3  A response that says less than was asked for, or other bytes, is an error:
//	     length and range are compared with the request (OS3), a list and the answer
//	     to a deletion must be one, and answer for every key.
//	OC4  Every request ends: with its context, and if nothing moves for a while.
//	OC5  Credentials are in no error and no log.
//	OC6  No request goes out unsigned unless the options say so.
package s3
