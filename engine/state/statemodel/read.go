package statemodel

import (
	"slices"
	"strings"

	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/keygroup"
)

// Read is the counterpart of Layout.Read. Its cursors are its own: walk pages
// of one side with cursors of that side.
func (m *Model) Read(d *state.Declaration, q *state.Query) (state.Answer, error) {
	if err := m.layout.ValidateQuery(d, q); err != nil {
		return state.Answer{}, err
	}
	c := m.at(placeOf(d.ID, q.Group, q.Key, q.Namespace))
	switch q.Kind {
	case state.QueryIsEmpty:
		return state.Answer{Found: c.payload != nil || len(c.list) > 0 || len(c.entries) > 0}, nil
	case state.QueryPage:
		return c.page(d, q), nil
	case state.QueryContains:
		e, ok := c.entries[string(q.UserKey)]
		return state.Answer{Found: ok, Null: e.Null, Version: e.Version}, nil
	}
	if d.Kind == state.KindMap {
		e, ok := c.entries[string(q.UserKey)]
		if !ok {
			return state.Answer{}, nil
		}
		a := state.Answer{Found: true, Null: e.Null, Version: e.Version}
		if !e.Null {
			a.Value = copyOf(e.Value)
		}
		return a, nil
	}
	if c.payload == nil {
		return state.Answer{}, nil
	}
	value := c.payload
	if q.Kind == state.QueryGet && d.Kind != state.KindValue {
		var err error
		if value, err = result(d, value); err != nil {
			return state.Answer{}, err
		}
	}
	return state.Answer{Found: true, Value: copyOf(value), Version: c.version}, nil
}

func result(d *state.Declaration, acc []byte) ([]byte, error) {
	f, err := state.ParseFunction(d.Kind, d.ValueType, d.Function)
	if err != nil {
		return nil, err
	}
	return f.Result(acc)
}

// page gives at most Limit items, and beyond the first only what fits in
// PageBytes.
func (c *cell) page(d *state.Declaration, q *state.Query) state.Answer {
	limit, room := q.Limit, q.PageBytes
	if limit == 0 {
		limit = state.DefaultPageItems
	}
	if room == 0 {
		room = state.DefaultPageBytes
	}
	limit, room = min(limit, state.MaxPageItems), min(room, state.MaxPageBytes)
	var a state.Answer
	n := 0
	take := func(size int, cursor string) bool {
		if n == limit || n > 0 && size > room {
			return false
		}
		n++
		room -= size
		a.Next = []byte(cursor)
		return true
	}
	if d.Kind == state.KindList {
		for _, e := range c.list {
			if string(e.place[:]) <= string(q.Cursor) {
				continue
			}
			if !take(len(e.value), string(e.place[:])) {
				return a
			}
			a.Found = true
			a.Elements = append(a.Elements, copyOf(e.value))
		}
		a.Next = nil
		return a
	}
	for _, e := range c.sorted() {
		cursor := "m" + string(e.UserKey) // not empty for the empty user key
		if cursor <= string(q.Cursor) {
			continue
		}
		if q.KeysOnly {
			e = state.Entry{UserKey: e.UserKey}
		}
		if !take(len(e.UserKey)+len(e.Value), cursor) {
			return a
		}
		a.Found = true
		a.Entries = append(a.Entries, e)
	}
	a.Next = nil
	return a
}

// sorted returns copies of the entries in order of the user key.
func (c *cell) sorted() []state.Entry {
	out := make([]state.Entry, 0, len(c.entries))
	for _, e := range c.entries {
		e.UserKey = copyOf(e.UserKey)
		if !e.Null {
			e.Value = copyOf(e.Value)
		}
		out = append(out, e)
	}
	slices.SortFunc(out, func(a, b state.Entry) int { return strings.Compare(string(a.UserKey), string(b.UserKey)) })
	return out
}

// Items returns everything that a scan of the state over the range gives, in
// order: the counterpart of walking Layout.Scan to its end. With keysOnly it is
// each (key, namespace) once. A filter keeps one namespace.
func (m *Model) Items(d *state.Declaration, r keygroup.Range, keysOnly bool, filter *state.Namespace) ([]state.ScanItem, error) {
	var places []place
	for p := range m.cells {
		if p.state == d.ID && r.Contains(p.group) &&
			(filter == nil || filter.Set == p.set && string(filter.Bytes) == p.ns) {
			places = append(places, p)
		}
	}
	slices.SortFunc(places, place.compare)
	var out []state.ScanItem
	for _, p := range places {
		c := m.cells[p]
		item := func(e state.Entry) {
			ns := state.Namespace{Set: p.set}
			if p.set {
				ns.Bytes = []byte(p.ns)
			}
			out = append(out, state.ScanItem{Group: p.group, Key: []byte(p.key), Namespace: ns, Entry: e})
		}
		switch {
		case keysOnly:
			item(state.Entry{})
		case d.Kind == state.KindList:
			for _, e := range c.list {
				item(state.Entry{Value: copyOf(e.value), Version: versionOf(e)})
			}
		case d.Kind == state.KindMap:
			for _, e := range c.sorted() {
				item(e)
			}
		default:
			value := copyOf(c.payload)
			if d.Kind != state.KindValue {
				var err error
				if value, err = result(d, value); err != nil {
					return nil, err
				}
			}
			item(state.Entry{Value: copyOf(value), Version: c.version})
		}
	}
	return out, nil
}

func versionOf(e element) uint64 {
	var n uint64
	for _, b := range e.place[:8] {
		n = n<<8 | uint64(b)
	}
	return n
}
