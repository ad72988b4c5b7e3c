// Package keygroup is the pure arithmetic of routing: from a typed key to its
// hash code, from there to its key group, and from a key group to the shard
// that holds it. It also defines the typed values themselves (their canonical,
// order-preserving bytes and their text), because a key's bytes and its hash
// must never drift apart, and the plan that places shards on nodes.
//
// It must not know: I/O, Raft, clocks, addresses, randomness. It imports the
// standard library and internal/base (for identifiers and errors) only.
//
// Concurrency: everything here is a pure function or an immutable value; all
// of it may be used from any number of goroutines at once.
//
// Invariants:
//
//	KG1  Encode is injective for each type: two different values never have the
//	     same bytes. (All NaNs are one value.)
//	KG2  Decode accepts exactly the bytes that Encode makes, and nothing else.
//	KG3  The byte order of encodings is the order of the values: signed order of
//	     integers, false before true, byte order of strings and bytes, numeric
//	     order of floats, field by field for tuples.
//	KG4  HashCode of a key's bytes equals HashCodeOf of the key, and both equal
//	     the Java hash code of the corresponding Java value.
//	KG5  RangeOf(0..p-1, m, p) tile [0, m), and OwnerOf(g) = i exactly when
//	     RangeOf(i) contains g.
//	KG6  A Table's ranges tile [0, M): every key group has exactly one shard.
//	KG7  Place is a function of the set of its inputs: the order in which nodes
//	     and shards are listed does not matter.
//
// The bytes and the hash are frozen: stored data and clients in other languages
// depend on them. testdata/vectors.json publishes them as test vectors, and
// docs/formats/key-types.md describes them.
package keygroup
