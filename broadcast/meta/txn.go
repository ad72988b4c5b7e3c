package meta

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/keelstate/keelstate/broadcast"
	"github.com/keelstate/keelstate/internal/base"
)

// MaxNameBytes bounds the name of a node, a keyspace, a state, or a zone.
const MaxNameBytes = 255

// Empty says that the transaction changes nothing and needs no proposal.
func Empty(txn broadcast.Txn) bool { return len(txn.Then) == 0 }

// Join makes one atomic transaction of several that were built from the same
// view. The parts must not write the same keys. Its stamp is the latest.
func Join(txns ...broadcast.Txn) broadcast.Txn {
	var out broadcast.Txn
	for _, t := range txns {
		out.Stamp = max(out.Stamp, t.Stamp)
		out.Conditions = append(out.Conditions, t.Conditions...)
		out.Then = append(out.Then, t.Then...)
	}
	return out
}

// builder collects a transaction and remembers the first error.
type builder struct {
	txn broadcast.Txn
	err error
	// expected are the keys that have a condition already.
	expected map[string]struct{}
}

// expect adds the condition that the key is as the view showed it: absent if
// rev is 0.
func (b *builder) expect(key string, rev base.Revision) {
	if _, twice := b.expected[key]; twice {
		return
	}
	if b.expected == nil {
		b.expected = make(map[string]struct{})
	}
	b.expected[key] = struct{}{}
	if rev == 0 {
		b.txn.Conditions = append(b.txn.Conditions, broadcast.IfAbsent(key))
		return
	}
	b.txn.Conditions = append(b.txn.Conditions, broadcast.IfRevision(key, rev))
}

func (b *builder) put(kind, key string, rec any) {
	value, err := encode(kind, rec)
	if err != nil && b.err == nil {
		b.err = err
	}
	b.txn.Then = append(b.txn.Then, broadcast.Put(key, value))
}

// replace puts a record under the condition that its key is as the view showed.
func (b *builder) replace(kind, key string, rev base.Revision, rec any) {
	b.expect(key, rev)
	b.put(kind, key, rec)
}

func (b *builder) delete(key string) { b.txn.Then = append(b.txn.Then, broadcast.Delete(key)) }

// expectCounter adds the condition that no id of the kind was given meanwhile.
func (b *builder) expectCounter(v *View, name string) {
	var rev base.Revision
	if c, ok := v.counters.Get(name); ok {
		rev = c.revision
	}
	b.expect(nameKey(kindCounter, name), rev)
}

// advance moves a counter to next (ME1).
func (b *builder) advance(v *View, name string, next uint64) {
	b.expectCounter(v, name)
	b.put(kindCounter, nameKey(kindCounter, name), counter{Next: next})
}

func (b *builder) done() (broadcast.Txn, error) {
	if b.err != nil {
		return broadcast.Txn{}, b.err
	}
	return b.txn, nil
}

// checkName refuses what cannot be a part of a key or would confuse a reader.
func checkName(field, name string) error {
	switch {
	case name == "":
		return base.Invalid(field, "must not be empty")
	case len(name) > MaxNameBytes:
		return base.Invalid(field, fmt.Sprintf("has at most %d bytes", MaxNameBytes))
	case !utf8.ValidString(name) || strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }):
		return base.Invalid(field, "must be printable UTF-8")
	case strings.Contains(name, "/"):
		return base.Invalid(field, "must not contain '/'")
	}
	return nil
}

// checkText refuses text that JSON would not give back as it was.
func checkText(field, text string) error {
	if !utf8.ValidString(text) {
		return base.Invalid(field, "must be UTF-8")
	}
	return nil
}

func conflict(field, hint string) error {
	return &base.Error{Cause: base.ErrConflict, Field: field, Hint: hint, Ordinal: -1}
}

func notFound(field, what string) error {
	return &base.Error{Cause: base.ErrNotFound, Field: field, Hint: what, Ordinal: -1}
}
