// Package retry repeats what an object store failed to do, within bounds: so many
// attempts per call, with a random pause that grows, and one budget of repeats for
// all who share it, so that a store in trouble is not buried under them.
//
// It must not know which store it wraps, or what objects mean.
//
// Concurrency: as package objectstore says. A Budget is shared by any number of
// stores.
//
// Invariants:
//
//	OT1  Only base.ErrObjectStore is repeated: a full, forbidding or unreachable
//	     store may do better, anything else is an answer.
//	OT2  A Put that is repeated and then meets its own object succeeds, if the
//	     object is the body: size and bytes are compared. One that is refused for an
//	     object that is not there is tried again.
//	OT3  A body that breaks is read on from the byte where it broke; no byte is
//	     given twice or left out. The whole Get has one number of attempts.
//	OT4  Repeats of all calls together stay below the budget; then the first
//	     error is given at once.
//	OT5  A pause is never shorter than what the store asked for (throttling), and
//	     ends with the context.
package retry
