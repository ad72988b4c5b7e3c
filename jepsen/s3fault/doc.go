// Package s3fault stands between nodes and a service that speaks S3: a reverse
// proxy over HTTP whose faults can be switched on and off. It passes everything on
// as it is, signatures too, and does harm only where a fault says so.
//
// It knows HTTP, and of S3 the form of an error and which requests read an object.
// It must not know the product, hosts or schedules.
//
// Concurrency: a Proxy may be used by many goroutines. Which of several requests
// that come at once a fault with a share hits depends on their order.
//
// Invariants:
//
//	SF1  Without a fault an answer is what the service said, byte for byte.
//	SF2  A request that a fault hit is counted for that fault, once; nothing else is.
//	SF3  After Remove no request is hit by the fault; those that it held end.
//	SF4  Harm shows as harm: bytes are wrong, missing or never come, and an answer
//	     that is kept back is never replaced by one that says that all went well.
//	SF5  After Close nothing listens, and no request is under way.
package s3fault
