// Package treescan walks a range of an ordered tree in either direction. It is
// shared by the transaction overlay and by engine/mem and knows neither.
//
// Concurrency: a Cursor belongs to one goroutine, and its tree must not change
// while it is in use; callers give it a copy-on-write copy.
package treescan

import "github.com/tidwall/btree"

// Cursor walks the items of [lo, hi) of a tree.
type Cursor[T any] struct {
	tree    *btree.BTreeG[T]
	it      btree.IterG[T]
	lo, hi  *T
	reverse bool
	started bool
	done    bool
}

// New returns a cursor before the first item. A nil lo means from the start, a
// nil hi to the end.
func New[T any](tree *btree.BTreeG[T], lo, hi *T, reverse bool) *Cursor[T] {
	return &Cursor[T]{tree: tree, it: tree.Iter(), lo: lo, hi: hi, reverse: reverse}
}

// Next moves to the next item and reports whether there is one.
func (c *Cursor[T]) Next() bool {
	if c.done {
		return false
	}
	ok := c.move()
	if ok && c.reverse && c.lo != nil {
		ok = !c.tree.Less(c.it.Item(), *c.lo)
	}
	if ok && !c.reverse && c.hi != nil {
		ok = c.tree.Less(c.it.Item(), *c.hi)
	}
	c.done = !ok
	return ok
}

func (c *Cursor[T]) move() bool {
	switch {
	case c.started && c.reverse:
		return c.it.Prev()
	case c.started:
		return c.it.Next()
	}
	c.started = true
	switch {
	case c.reverse && c.hi != nil && c.it.Seek(*c.hi):
		return c.it.Prev()
	case c.reverse:
		return c.it.Last()
	case c.lo != nil:
		return c.it.Seek(*c.lo)
	default:
		return c.it.First()
	}
}

// Item is the current item, valid after Next returned true.
func (c *Cursor[T]) Item() T { return c.it.Item() }
