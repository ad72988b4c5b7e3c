// Package statemodel is a naive model of keyed state: plain Go maps and slices
// that give the results that engine/state must give over any engine. Tests run
// the same operations on both and compare.
//
// It shares with engine/state the pure parts: the static refusals (Validate...)
// and the arithmetic of single functions (Fold, Combine, Result), which have
// tests of their own. It must not share what it is there to check: engine keys,
// value headers, merges by the engine, transactions, cursors, scans.
//
// A Model belongs to one goroutine. Everything given to it and got from it is
// copied.
package statemodel

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// Model holds the contents of all states.
type Model struct {
	layout state.Layout
	cells  map[place]*cell
}

// place is (state, group, key, namespace).
type place struct {
	state engine.FamilyID
	group keygroup.Group
	key   string
	set   bool
	ns    string
}

// cell is what is at a place. Exactly one of the three parts is used, by kind.
type cell struct {
	payload []byte // value or accumulator; nil is absent
	version uint64
	list    []element
	entries map[string]state.Entry
}

type element struct {
	place [12]byte // sequence and index: the identity of the element for cursors
	value []byte
}

// New returns an empty model of a cluster with m key groups.
func New(m int) *Model {
	return &Model{layout: state.Layout{M: m}, cells: make(map[place]*cell)}
}

func copyOf(b []byte) []byte { return append([]byte{}, b...) }

func placeOf(id engine.FamilyID, g keygroup.Group, key []byte, ns state.Namespace) place {
	return place{id, g, string(key), ns.Set, string(ns.Bytes)}
}

func (m *Model) at(p place) *cell {
	if c := m.cells[p]; c != nil {
		return c
	}
	return &cell{}
}

// put stores a cell, or forgets it if there is nothing in it.
func (m *Model) put(p place, c *cell) {
	if c.payload == nil && len(c.list) == 0 && len(c.entries) == 0 {
		delete(m.cells, p)
		return
	}
	m.cells[p] = c
}

func (c *cell) clone() *cell {
	n := &cell{payload: c.payload, version: c.version, list: slices.Clone(c.list)}
	if c.entries != nil {
		n.entries = make(map[string]state.Entry, len(c.entries))
		for k, e := range c.entries {
			n.entries[k] = e
		}
	}
	return n
}

// Clone returns an independent copy.
func (m *Model) Clone() *Model {
	n := New(m.layout.M)
	for p, c := range m.cells {
		n.cells[p] = c.clone()
	}
	return n
}

// Drop forgets all of a state.
func (m *Model) Drop(id engine.FamilyID) {
	for p := range m.cells {
		if p.state == id {
			delete(m.cells, p)
		}
	}
}

// Len is the number of (state, key, namespace) places that hold anything.
func (m *Model) Len() int { return len(m.cells) }

// Apply does one mutation, or returns the refusal and changes nothing.
func (m *Model) Apply(d *state.Declaration, mu *state.Mutation, st state.Stamp) error {
	if err := m.layout.ValidateMutation(d, mu); err != nil {
		return err
	}
	p := placeOf(d.ID, mu.Group, mu.Key, mu.Namespace)
	c := m.at(p).clone()
	switch mu.Op {
	case state.OpValuePut:
		c.payload, c.version = copyOf(mu.Value), st.Sequence
	case state.OpClear:
		c = &cell{}
	case state.OpListAdd, state.OpListUpdate:
		if mu.Op == state.OpListUpdate {
			c.list = nil
		}
		for i, e := range mu.Elements {
			c.list = append(c.list, newElement(st.Sequence, i, e))
		}
	case state.OpMapPut, state.OpMapRemove:
		c.applyEntries(mu, st)
	case state.OpAdd:
		if len(mu.Elements) == 0 {
			return nil
		}
		f, err := state.ParseFunction(d.Kind, d.ValueType, d.Function)
		if err != nil {
			return err
		}
		if err := c.fold(f, mu.Elements, st); err != nil {
			return err
		}
	case state.OpMergeNamespaces:
		return m.merge(d, mu, st)
	}
	m.put(p, c)
	return nil
}

func newElement(sequence uint64, index int, value []byte) element {
	e := element{value: copyOf(value)}
	binary.BigEndian.PutUint64(e.place[:], sequence)
	binary.BigEndian.PutUint32(e.place[8:], uint32(index))
	return e
}

func (c *cell) applyEntries(mu *state.Mutation, st state.Stamp) {
	if c.entries == nil {
		c.entries = make(map[string]state.Entry)
	}
	for _, e := range mu.Entries {
		if mu.Op == state.OpMapRemove {
			delete(c.entries, string(e.UserKey))
			continue
		}
		n := state.Entry{UserKey: copyOf(e.UserKey), Null: e.Null, Version: st.Sequence}
		if !e.Null {
			n.Value = copyOf(e.Value)
		}
		c.entries[string(e.UserKey)] = n
	}
}

// fold adds the elements one at a time, however they came.
func (c *cell) fold(f *state.Function, elements [][]byte, st state.Stamp) error {
	acc := c.payload
	for _, e := range elements {
		var err error
		if acc, err = f.Fold(acc, [][]byte{copyOf(e)}); err != nil {
			return err
		}
	}
	if len(acc) > state.MaxValueBytes {
		return base.ErrTooLarge
	}
	c.payload, c.version = copyOf(acc), st.Sequence
	return nil
}

func (m *Model) merge(d *state.Declaration, mu *state.Mutation, st state.Stamp) error {
	target := placeOf(d.ID, mu.Group, mu.Key, mu.Namespace)
	into := m.at(target).clone()
	gone := make(map[place]bool)
	var folded []byte
	var moved []element
	for _, s := range mu.Sources {
		p := placeOf(d.ID, mu.Group, mu.Key, s)
		c := m.cells[p]
		if c == nil || gone[p] {
			continue
		}
		gone[p] = true
		for _, e := range c.list {
			moved = append(moved, newElement(st.Sequence, len(moved), e.value))
		}
		if c.payload == nil {
			continue
		}
		f, err := state.ParseFunction(d.Kind, d.ValueType, d.Function)
		if err != nil {
			return err
		}
		if folded, err = f.Combine(folded, c.payload); err != nil {
			return err
		}
	}
	if len(gone) == 0 {
		return nil
	}
	into.list = append(into.list, moved...)
	if folded != nil {
		f, err := state.ParseFunction(d.Kind, d.ValueType, d.Function)
		if err != nil {
			return err
		}
		if folded, err = f.Combine(folded, into.payload); err != nil {
			return err
		}
		if len(folded) > state.MaxValueBytes {
			return base.ErrTooLarge
		}
		into.payload, into.version = copyOf(folded), st.Sequence
	}
	for p := range gone {
		delete(m.cells, p)
	}
	m.put(target, into)
	return nil
}

// Check is the counterpart of Layout.Check.
func (m *Model) Check(d *state.Declaration, p *state.Precondition) error {
	if err := m.layout.ValidatePrecondition(d, p); err != nil {
		return err
	}
	c := m.at(placeOf(d.ID, p.Group, p.Key, p.Namespace))
	present := c.payload != nil || len(c.list) > 0 || len(c.entries) > 0
	value, version, null := c.payload, c.version, false
	if p.HasUserKey {
		e, ok := c.entries[string(p.UserKey)]
		present, value, version, null = ok, e.Value, e.Version, e.Null
	}
	holds := false
	switch p.Kind {
	case state.PreAbsent:
		holds = !present
	case state.PrePresent:
		holds = present
	case state.PreEqual:
		holds = present && !null && bytes.Equal(value, p.Bytes)
	case state.PreVersion:
		holds = present && version == p.Version
	case state.PreNull:
		holds = present && null
	}
	if !holds {
		return fmt.Errorf("model: %w", base.ErrPrecondition)
	}
	return nil
}

// Change is one mutation of a request with its declaration and stamp.
type Change struct {
	D  *state.Declaration
	M  *state.Mutation
	St state.Stamp
}

// Condition is one precondition of a request with its declaration.
type Condition struct {
	D *state.Declaration
	P *state.Precondition
}

// Request does all changes if all conditions hold and none is refused; else it
// changes nothing and returns the error of the first that failed and its
// position in its list.
func (m *Model) Request(conditions []Condition, changes []Change) (at int, err error) {
	for i, c := range conditions {
		if err := m.Check(c.D, c.P); err != nil {
			return i, err
		}
	}
	before := m.Clone()
	for i, c := range changes {
		if err := m.Apply(c.D, c.M, c.St); err != nil {
			*m = *before
			return i, err
		}
	}
	return 0, nil
}

// compare orders places as scans do.
func (p place) compare(o place) int {
	switch {
	case p.group != o.group:
		return int(p.group) - int(o.group)
	case p.key != o.key:
		return strings.Compare(p.key, o.key)
	case p.set != o.set: // the void namespace comes first
		if p.set {
			return 1
		}
		return -1
	}
	return strings.Compare(p.ns, o.ns)
}
