package engine

// Verifier is implemented by stores that can check their files while they are
// in use, which costs nothing to those who read and write but the disk's time.
type Verifier interface {
	// VerifyFiles reads every file that the store needs at this moment, from the
	// disk and not from a cache where the system allows it, and checks the
	// checksums. Files that a flush or a compaction makes superfluous meanwhile
	// are no failure. pace is called after each piece with the bytes that were
	// read; it may wait, and its error ends the call. Damage is base.ErrCorrupt,
	// with the file's name and, where it is known, the offset; the other files
	// are read all the same.
	VerifyFiles(pace func(bytes int64) error) error
}
