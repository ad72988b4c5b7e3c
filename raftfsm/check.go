package raftfsm

import (
	"fmt"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

type keyGroup = keygroup.Group

// route refuses what does not belong to this version of this shard. Nothing of
// it is recorded: the client sends the request again after an update.
func (c *core) route(r *Request) *base.Error {
	refuse := func(s *base.Sentinel, ordinal int, hint string) *base.Error {
		return &base.Error{Cause: s, Ordinal: ordinal, Epoch: c.epoch, Hint: hint}
	}
	switch {
	case !c.initialised:
		return refuse(base.ErrNotReady, -1, "")
	case c.rollback.fence != 0:
		return c.fenced()
	case r.Incarnation != c.incarnation:
		return c.otherIncarnation(r.Incarnation)
	case r.Epoch != c.epoch:
		return refuse(base.ErrStaleEpoch, -1, fmt.Sprintf("the shard's epoch is %d", c.epoch))
	}
	for i := range r.Preconditions {
		if g := r.Preconditions[i].Group; !c.rng.Contains(g) {
			return refuse(base.ErrWrongRange, i, fmt.Sprintf("preconditions[%d]: group %d is outside %s", i, g, c.rng))
		}
	}
	for i := range r.Mutations {
		if g := r.Mutations[i].Group; !c.rng.Contains(g) {
			o := r.Mutations[i].Ordinal
			return refuse(base.ErrWrongRange, int(o), fmt.Sprintf("mutations[%d]: group %d is outside %s", o, g, c.rng))
		}
	}
	return nil
}

// checkContent refuses requests that are too large or name a state that is not
// declared. It needs route before it.
func checkContent(decls declarations, r *Request) *base.Error {
	if n := len(r.Mutations) + len(r.Preconditions); n > state.MaxRequestMutations {
		return &base.Error{Cause: base.ErrTooLarge, Field: "mutations", Ordinal: -1,
			Hint: fmt.Sprintf("%d mutations and preconditions, at most %d", n, state.MaxRequestMutations)}
	}
	// The encoding is longer than what extent counts and has more bytes than
	// items, so most decoded requests need no count.
	if small := min(state.MaxRequestBytes, MaxCommandItems/2); r.size == 0 || r.size > small {
		if bytes, items := r.extent(); bytes > state.MaxRequestBytes || items > MaxCommandItems/2 {
			return &base.Error{Cause: base.ErrTooLarge, Field: "mutations", Ordinal: -1,
				Hint: fmt.Sprintf("%d bytes in %d items, at most %d in %d", bytes, items, state.MaxRequestBytes, MaxCommandItems/2)}
		}
	}
	for i := range r.Preconditions {
		p := &r.Preconditions[i]
		if decls[p.State] == nil {
			return undeclared(p.State, i, fmt.Sprintf("preconditions[%d].state", i))
		}
	}
	for i := range r.Mutations {
		mu := &r.Mutations[i]
		if decls[mu.State] == nil {
			return undeclared(mu.State, int(mu.Ordinal), fmt.Sprintf("mutations[%d].state", mu.Ordinal))
		}
	}
	return nil
}

// checkStatic refuses what engine/state refuses without reading the store; at
// apply, Layout.Check and Layout.Apply do the same. It needs checkContent
// before it.
func checkStatic(layout state.Layout, decls declarations, r *Request) *base.Error {
	for i := range r.Preconditions {
		p := &r.Preconditions[i]
		if err := layout.ValidatePrecondition(&decls[p.State].Declaration, p); err != nil {
			return refusal(err, i, fmt.Sprintf("preconditions[%d]", i))
		}
	}
	for i := range r.Mutations {
		mu := &r.Mutations[i]
		if err := layout.ValidateMutation(&decls[mu.State].Declaration, &mu.Mutation); err != nil {
			return refusal(err, int(mu.Ordinal), fmt.Sprintf("mutations[%d]", mu.Ordinal))
		}
	}
	return nil
}

func undeclared(id engine.FamilyID, ordinal int, field string) *base.Error {
	return &base.Error{Cause: base.ErrUndeclared, Ordinal: ordinal, Field: field, Hint: fmt.Sprintf("no state has id %d here", id)}
}

// extent is the request's size in bytes of keys and values, and its number of
// elements, entries and sources.
func (r *Request) extent() (bytes, items int) {
	for i := range r.Preconditions {
		p := &r.Preconditions[i]
		bytes += len(p.Key) + len(p.Namespace.Bytes) + len(p.UserKey) + len(p.Bytes)
	}
	for i := range r.Mutations {
		mu := &r.Mutations[i]
		bytes += len(mu.Key) + len(mu.Namespace.Bytes) + len(mu.Value)
		items += len(mu.Elements) + len(mu.Entries) + len(mu.Sources)
		for _, e := range mu.Elements {
			bytes += len(e)
		}
		for j := range mu.Entries {
			bytes += len(mu.Entries[j].UserKey) + len(mu.Entries[j].Value)
		}
		for _, s := range mu.Sources {
			bytes += len(s.Bytes)
		}
	}
	return bytes, items
}

// CheckIncarnation refuses a request of an incarnation that a rollback has ended,
// and any while a rollback is under way.
func (m *Machine) CheckIncarnation(r *Request) error {
	switch c := &m.header.Load().core; {
	case c.rollback.fence != 0:
		return c.fenced()
	case c.rollback.op != 0 && r.Incarnation < c.incarnation:
		return c.otherIncarnation(r.Incarnation)
	}
	return nil
}

// CheckRequest refuses what the shard would refuse now by range, epoch,
// incarnation, declaration, kind or size, before anything is proposed. Apply
// decides again, so passing it promises nothing (W1).
func (m *Machine) CheckRequest(r *Request) error {
	if err := m.failed(); err != nil {
		return fmt.Errorf("checking request: %w", notServing(err))
	}
	h := m.header.Load()
	if e := h.core.route(r); e != nil {
		return e
	}
	if r.Session != 0 && r.Seq == 0 {
		return base.Invalid("seq", "number requests of a session from 1")
	}
	if r.Session != 0 && (r.Floor > r.Seq || r.Prev >= r.Seq) {
		return base.Invalid("seq", "the floor is at most, and the previous number below, the request's own number")
	}
	next := uint64(0)
	for i := range r.Mutations {
		if uint64(r.Mutations[i].Ordinal) < next {
			return base.Invalid(fmt.Sprintf("mutations[%d].ordinal", i), "number mutations in strictly ascending order")
		}
		next = uint64(r.Mutations[i].Ordinal) + 1
	}
	if e := checkContent(h.decls, r); e != nil {
		return e
	}
	if e := checkStatic(state.Layout{M: h.M}, h.decls, r); e != nil {
		return e
	}
	return nil
}
