package engine

// FailedIterator returns an iterator that has no entries and the given error,
// for a Scan that cannot start.
func FailedIterator(err error) Iterator { return failedIterator{err} }

type failedIterator struct{ err error }

func (failedIterator) Next() bool    { return false }
func (failedIterator) Key() []byte   { return nil }
func (failedIterator) Value() []byte { return nil }
func (f failedIterator) Err() error  { return f.err }
func (failedIterator) Close()        {}
