package state

// Limits of what may be written. They are checked before a write is proposed
// and again at apply, and are chosen so that everything that can be written can
// be read back in one message (ST5): a page always holds at least one element,
// and MaxValueBytes plus MaxUserKeyBytes plus framing is well below the
// transport's MaxMessageBytes.
const (
	MaxKeyBytes       = 32 << 10
	MaxNamespaceBytes = 32 << 10
	MaxUserKeyBytes   = 32 << 10
	// MaxValueBytes bounds a value, list element, map value, and an accumulator.
	MaxValueBytes = 4 << 20
	// MaxRequestBytes bounds the encoded mutations and preconditions of one
	// request to one shard.
	MaxRequestBytes = 8 << 20
	// MaxRequestMutations bounds their number; MaxElements bounds the elements,
	// entries or sources of one mutation.
	MaxRequestMutations = 10_000
	MaxElements         = 100_000
	// MaxMessageBytes bounds a message on every channel: client to node, node to
	// node, replies.
	MaxMessageBytes = 16 << 20

	// Page sizes of lists, maps and scans.
	DefaultPageBytes = 1 << 20
	MaxPageBytes     = 4 << 20
	DefaultPageItems = 1000
	MaxPageItems     = 10_000
)
