// Package host runs nodes of a cluster as hosts of their own on one machine: a
// process each, as root in a network namespace with its own address, on a disk
// of its own kind (a plain directory, a faulty FUSE file system, a small ext4 on
// a loop device, a small tmpfs), in a control group of its own. It starts, stops
// and hurts them; it does not decide when.
//
// It knows the product by its two binaries and their flags, and nothing else. It
// must not know workloads, checkers or schedules.
//
// An object store, if there is one, is a host too: a service that speaks S3 and, before
// it, the proxy of jepsen/s3fault, whose socket is in the host's namespace.
//
// The harness's own clients live in the root namespace, and are a host too: the
// bridge's address is theirs, so that they can be cut from nodes.
//
// Concurrency: a Fleet, its Nodes and its Network may be used by many goroutines.
// Start, Stop and Kill of one Node exclude each other.
//
// Invariants:
//
//	HO1  Only processes that this package started are signalled, by their handle.
//	     They die with the harness, however it ends.
//	HO2  Everything outside the fleet's directory (namespaces, links, mounts, loop
//	     devices, control groups, routes) has a name with the harness's process
//	     number. Close removes it, also after a failure; Sweep removes what dead
//	     harnesses left, and nothing of living ones.
//	HO3  No packet for a node leaves the machine: while a fleet in namespaces
//	     exists, an unreachable route stands behind the bridge's own.
//	HO4  What the machine cannot do is named (Capabilities), never passed over.
//	HO5  Undoing a fault succeeds if the fault is already undone.
//	HO6  A killed node is dead when Kill returns, even if it was paused, frozen, or
//	     hung on a stalled disk.
package host
