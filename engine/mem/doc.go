// Package mem is the engine that keeps a replica's state in memory, the
// counterpart of Flink's heap backend: ordered copy-on-write trees, one per
// family, and a full image on disk at each Flush. The file formats are in
// docs/formats/engine-mem-checkpoint.md, the reasons in DESIGN.md.
//
// It must not know Raft, the state layouts, or what keys and values mean beyond
// the family's MergeKind.
//
// Concurrency: a Write changes private trees and then publishes them with one
// atomic store; readers load that pointer and take no lock. Flush and
// Checkpoint work on a published root, so the writer goes on beside them.
// Store.mu is taken before Store.manifest.mu; Store.disk before both.
//
// Invariants:
//
//	ME1  A published root, and every tree under it, never changes.
//	ME2  A Write that fails has published nothing.
//	ME3  The image that the manifest names is complete and synced, and so is
//	     everything before it in the manifest's directory; DurableGet reads the
//	     root of exactly that image.
//	ME4  An entry of an image belongs to a family of the manifest only if both
//	     carry the same birth number, so a family that was dropped and made
//	     again never meets its old data.
//	ME5  A damaged or missing file is an error, never an older state.
package mem
