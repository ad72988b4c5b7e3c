package engine

import "context"

// Absorber is implemented by stores that can take over what other stores have, by
// their files or whatever else they are made of, without writing key by key.
//
// Both methods belong to the one writer, and change what is on disk at once
// (rule W7). A store in which one of them has failed is neither what it was nor
// what it should become: remove it. The exceptions are base.ErrUnsupported,
// base.ErrConflict and base.ErrInvalid, with which nothing that can be read has
// changed; after base.ErrUnsupported the caller copies instead.
type Absorber interface {
	// Clip removes from each of the families all keys outside [lo, hi), hi nil
	// meaning to the end, in such a way that nothing of them is left in any file:
	// Absorb takes the store as another one's source then. It flushes. It fails
	// with base.ErrNotFound for a family that does not exist, and may fail with
	// base.ErrConflict while a View is open, if the view needs what goes.
	Clip(ctx context.Context, families []FamilyID, lo, hi []byte) error
	// Absorb adds to each of the families what others have in the family of that
	// id; an other that has none adds nothing. All of them, and this store, must
	// have been clipped since they were last written, to ranges of which no two
	// have a key in common: keys of two stores in one range are base.ErrConflict,
	// as are other options of a family. Others are stores of the same driver, of
	// which nobody else knows (a checkpoint that was opened, never a live store);
	// they stay readable, and belong to the caller. Views and iterators that are
	// open go on with what was there. The sequence of later writes lies behind
	// whatever was absorbed. Flush makes it durable.
	Absorb(ctx context.Context, families []FamilyID, others []Store) error
}
