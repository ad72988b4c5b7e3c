package state

import (
	"bytes"
	"fmt"
	"unicode"
	"unicode/utf8"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// MaxNameBytes bounds the name of a keyspace and of a state.
const MaxNameBytes = 128

// CodecVersion is the only version of value codecs so far.
const CodecVersion = 1

var kindNames = [...]string{
	KindValue: "value", KindList: "list", KindMap: "map", KindReducing: "reducing", KindAggregating: "aggregating",
}

// String returns the name that ParseKind reads.
func (k Kind) String() string {
	if k.valid() {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

func (k Kind) valid() bool { return k >= KindValue && k <= KindAggregating }

// ParseKind reads the name of a kind; errors are base.ErrInvalid.
func ParseKind(name string) (Kind, error) {
	for k := KindValue; k <= KindAggregating; k++ {
		if kindNames[k] == name {
			return k, nil
		}
	}
	return 0, fmt.Errorf("%w: no kind %.40q (kinds: value, list, map, reducing, aggregating)", base.ErrInvalid, name)
}

// refuse builds the error of a field. cause is or wraps a sentinel.
func refuse(cause error, field, hint string) *base.Error {
	return &base.Error{Cause: cause, Field: field, Hint: hint, Ordinal: -1}
}

func tooLarge(field string, size, limit int) *base.Error {
	return refuse(fmt.Errorf("%w: %d, at most %d", base.ErrTooLarge, size, limit), field, "")
}

// ValidateDeclaration checks everything in a declaration but its ID. The error
// is a base.Error that names the field.
func ValidateDeclaration(d *Declaration) error {
	if err := validateName("keyspace", d.Keyspace); err != nil {
		return err
	}
	if err := validateName("name", d.Name); err != nil {
		return err
	}
	if !d.Kind.valid() {
		return base.Invalid("kind", "use value, list, map, reducing or aggregating")
	}
	if !d.KeyType.IsKey() {
		return base.Invalid("key_type", "use string, int32, int64, bool, bytes or a tuple of them")
	}
	switch {
	case d.Kind == KindMap && !d.UserKeyType.IsKey():
		return base.Invalid("user_key_type", "use string, int32, int64, bool, bytes or a tuple of them")
	case d.Kind != KindMap && d.UserKeyType.IsValid():
		return base.Invalid("user_key_type", "only maps have user keys")
	case !d.ValueType.IsValid():
		return base.Invalid("value_type", "name a type")
	case d.CodecVersion != CodecVersion:
		return refuse(fmt.Errorf("codec version %d: %w", d.CodecVersion, base.ErrUnsupported), "codec_version", "use 1")
	}
	if d.Kind != KindReducing && d.Kind != KindAggregating {
		if d.Function != "" {
			return base.Invalid("function", "only reducing and aggregating states have a function")
		}
		return nil
	}
	if _, err := functionOf(d); err != nil {
		return refuse(err, "function", "")
	}
	return nil
}

func validateName(field, name string) error {
	if name == "" || len(name) > MaxNameBytes || !utf8.ValidString(name) {
		return base.Invalid(field, fmt.Sprintf("use 1 to %d bytes of UTF-8", MaxNameBytes))
	}
	for _, r := range name {
		if !unicode.IsPrint(r) || r == '/' {
			return base.Invalid(field, "use printable characters and no '/'")
		}
	}
	return nil
}

// CheckRedeclaration says whether declaring next again where old exists is
// harmless: nil if they are equal but for ID, else base.ErrConflict naming the
// field. Both must be valid and have the same keyspace and name.
func CheckRedeclaration(old, next *Declaration) error {
	conflict := func(field string, is, want any) error {
		return refuse(fmt.Errorf("%w: declared as %v, not as %v", base.ErrConflict, is, want), field,
			"drop the state first, or use another name")
	}
	switch {
	case old.KeyType != next.KeyType:
		return conflict("key_type", old.KeyType, next.KeyType)
	case old.Kind != next.Kind:
		return conflict("kind", old.Kind, next.Kind)
	case old.UserKeyType != next.UserKeyType:
		return conflict("user_key_type", old.UserKeyType, next.UserKeyType)
	case old.ValueType != next.ValueType:
		return conflict("value_type", old.ValueType, next.ValueType)
	case old.CodecVersion != next.CodecVersion:
		return conflict("codec_version", old.CodecVersion, next.CodecVersion)
	case old.Function == next.Function:
		return nil
	}
	a, err := functionOf(old)
	if err != nil {
		return refuse(err, "function", "")
	}
	b, err := functionOf(next)
	if err != nil {
		return refuse(err, "function", "")
	}
	if a.text != b.text {
		return conflict("function", a.text, b.text)
	}
	return nil
}

// validateCell checks what every call has: state, key, group and namespace.
func (l Layout) validateCell(d *Declaration, id engine.FamilyID, g keygroup.Group, key []byte, ns Namespace) error {
	if d.ID == engine.MetaFamily || id != d.ID {
		return base.Invalid("state", "name the declaration that the request is for")
	}
	if len(key) > MaxKeyBytes {
		return tooLarge("key", len(key), MaxKeyBytes)
	}
	want, err := keygroup.GroupOfKey(d.KeyType, key, l.M)
	if err == nil {
		err = keygroup.Validate(d.KeyType, key)
	}
	if err != nil {
		return refuse(err, "key", "encode it as a "+d.KeyType.String())
	}
	if want != g {
		return base.Invalid("group", fmt.Sprintf("the key is in key group %d, not %d", want, g))
	}
	return validateNamespace("namespace", ns)
}

func validateNamespace(field string, ns Namespace) error {
	if len(ns.Bytes) > MaxNamespaceBytes {
		return tooLarge(field, len(ns.Bytes), MaxNamespaceBytes)
	}
	if !ns.Set && len(ns.Bytes) > 0 {
		return base.Invalid(field, "the void namespace has no bytes")
	}
	return nil
}

func validateUserKey(field string, d *Declaration, userKey []byte) error {
	if len(userKey) > MaxUserKeyBytes {
		return tooLarge(field, len(userKey), MaxUserKeyBytes)
	}
	if err := keygroup.Validate(d.UserKeyType, userKey); err != nil {
		return refuse(err, field, "encode it as a "+d.UserKeyType.String())
	}
	return nil
}

func validateValue(field string, d *Declaration, value []byte) error {
	if len(value) > MaxValueBytes {
		return tooLarge(field, len(value), MaxValueBytes)
	}
	if err := keygroup.Validate(d.ValueType, value); err != nil {
		return refuse(err, field, "encode it as a "+d.ValueType.String())
	}
	return nil
}

// fits says whether a state of the kind has the operation.
func (o Op) fits(k Kind) bool {
	switch o {
	case OpValuePut:
		return k == KindValue
	case OpClear:
		return true
	case OpListAdd, OpListUpdate:
		return k == KindList
	case OpMapPut, OpMapRemove:
		return k == KindMap
	case OpAdd:
		return k == KindReducing || k == KindAggregating
	case OpMergeNamespaces:
		return k == KindList || k == KindReducing || k == KindAggregating
	}
	return false
}

// ValidateMutation refuses whatever can be refused without the store. It is
// pure; Apply repeats it. A nil Value is the empty value: "update(null)" is
// OpClear. A nil element is a null element and is refused; an empty one that is
// not nil is a value.
func (l Layout) ValidateMutation(d *Declaration, m *Mutation) error {
	if m.Op < OpValuePut || m.Op > OpMergeNamespaces {
		return base.Invalid("op", "unknown operation")
	}
	if !m.Op.fits(d.Kind) {
		return refuse(fmt.Errorf("%w: operation %d on a state of kind %s", base.ErrWrongKind, m.Op, d.Kind), "op", "")
	}
	if err := l.validateCell(d, m.State, m.Group, m.Key, m.Namespace); err != nil {
		return err
	}
	if err := checkUnused(m); err != nil {
		return err
	}
	switch m.Op {
	case OpValuePut:
		return validateValue("value", d, m.Value)
	case OpListAdd, OpListUpdate, OpAdd:
		return validateElements(d, m.Elements)
	case OpMapPut, OpMapRemove:
		return validateEntries(d, m)
	case OpMergeNamespaces:
		return validateSources(m)
	}
	return nil
}

// checkUnused refuses fields that the operation does not have, so that a client
// that fills the wrong one is told instead of ignored.
func checkUnused(m *Mutation) error {
	const hint = "the operation has no such field"
	switch {
	case len(m.Value) > 0 && m.Op != OpValuePut:
		return base.Invalid("value", hint)
	case len(m.Elements) > 0 && m.Op != OpListAdd && m.Op != OpListUpdate && m.Op != OpAdd:
		return base.Invalid("elements", hint)
	case len(m.Entries) > 0 && m.Op != OpMapPut && m.Op != OpMapRemove:
		return base.Invalid("entries", hint)
	case len(m.Sources) > 0 && m.Op != OpMergeNamespaces:
		return base.Invalid("sources", hint)
	}
	return nil
}

func validateElements(d *Declaration, elements [][]byte) error {
	if len(elements) > MaxElements {
		return tooLarge("elements", len(elements), MaxElements)
	}
	var f *Function
	if d.Kind != KindList {
		var err error
		if f, err = functionOf(d); err != nil {
			return refuse(err, "function", "")
		}
	}
	total := 0
	for i, e := range elements {
		var err error
		if e == nil {
			err = base.Invalid("", "an element cannot be null")
		} else if err = validateValue("", d, e); err == nil && f != nil {
			err = f.checkElement(e)
		}
		if err != nil {
			return at("elements", i, err)
		}
		if total += len(e); total > MaxRequestBytes {
			return tooLarge("elements", total, MaxRequestBytes)
		}
	}
	return nil
}

// at makes err name one item of a list, keeping the hint of a base.Error.
func at(field string, i int, err error) error {
	name := fmt.Sprintf("%s[%d]", field, i)
	if e, ok := err.(*base.Error); ok { //nolint:errorlint // made by this package just before
		if e.Field != "" {
			name += "." + e.Field
		}
		return refuse(e.Cause, name, e.Hint)
	}
	return refuse(err, name, "")
}

func validateEntries(d *Declaration, m *Mutation) error {
	if len(m.Entries) > MaxElements {
		return tooLarge("entries", len(m.Entries), MaxElements)
	}
	total := 0
	for i := range m.Entries {
		e := &m.Entries[i]
		err := validateUserKey("user_key", d, e.UserKey)
		if err == nil {
			switch {
			case len(e.Value) > 0 && (e.Null || m.Op == OpMapRemove):
				err = base.Invalid("value", "a null or removed entry has no value")
			case m.Op == OpMapRemove && e.Null:
				err = base.Invalid("null", "a removed entry has no value")
			case m.Op == OpMapPut && !e.Null:
				err = validateValue("value", d, e.Value)
			}
		}
		if err != nil {
			return at("entries", i, err)
		}
		if total += len(e.UserKey) + len(e.Value); total > MaxRequestBytes {
			return tooLarge("entries", total, MaxRequestBytes)
		}
	}
	return nil
}

func (ns Namespace) equal(o Namespace) bool { return ns.Set == o.Set && bytes.Equal(ns.Bytes, o.Bytes) }

func validateSources(m *Mutation) error {
	if len(m.Sources) > MaxElements {
		return tooLarge("sources", len(m.Sources), MaxElements)
	}
	for i, s := range m.Sources {
		err := validateNamespace("", s)
		if err == nil && s.equal(m.Namespace) {
			err = base.Invalid("", "the target cannot be among the sources")
		}
		if err != nil {
			return at("sources", i, err)
		}
	}
	return nil
}

// ValidatePrecondition refuses whatever can be refused without the store. It is
// pure; Check repeats it.
func (l Layout) ValidatePrecondition(d *Declaration, p *Precondition) error {
	if err := l.validateCell(d, p.State, p.Group, p.Key, p.Namespace); err != nil {
		return err
	}
	if p.Kind < PreAbsent || p.Kind > PreNull {
		return base.Invalid("kind", "unknown precondition")
	}
	if !p.HasUserKey && len(p.UserKey) > 0 {
		return base.Invalid("user_key", "it is given but not marked as given")
	}
	if p.HasUserKey {
		if d.Kind != KindMap {
			return refuse(fmt.Errorf("%w: a state of kind %s has no user keys", base.ErrWrongKind, d.Kind), "user_key", "")
		}
		if err := validateUserKey("user_key", d, p.UserKey); err != nil {
			return err
		}
	}
	whole := d.Kind == KindList || d.Kind == KindMap && !p.HasUserKey
	switch {
	case whole && (p.Kind == PreEqual || p.Kind == PreVersion):
		return refuse(fmt.Errorf("%w: a list or whole map has neither bytes nor a version", base.ErrWrongKind), "kind", "")
	case p.Kind == PreNull && !p.HasUserKey:
		return refuse(fmt.Errorf("%w: only map entries can be null", base.ErrWrongKind), "kind", "")
	case p.Kind == PreVersion && p.Version == 0:
		return base.Invalid("version", "nothing has version 0; for an absent value use the precondition absent")
	case len(p.Bytes) > MaxValueBytes:
		return tooLarge("bytes", len(p.Bytes), MaxValueBytes)
	}
	return nil
}

// ValidateQuery refuses whatever can be refused without the store. It is pure;
// Read repeats it.
func (l Layout) ValidateQuery(d *Declaration, q *Query) error {
	if err := l.validateCell(d, q.State, q.Group, q.Key, q.Namespace); err != nil {
		return err
	}
	paged := d.Kind == KindList || d.Kind == KindMap
	folded := d.Kind == KindReducing || d.Kind == KindAggregating
	var fits bool
	switch q.Kind {
	case QueryGet:
		fits = d.Kind != KindList
	case QueryContains:
		fits = d.Kind == KindMap
	case QueryIsEmpty:
		fits = true
	case QueryPage:
		fits = paged
	case QueryAccumulator:
		fits = folded
	default:
		return base.Invalid("kind", "unknown query")
	}
	if !fits {
		return refuse(fmt.Errorf("%w: query %d on a state of kind %s", base.ErrWrongKind, q.Kind, d.Kind), "kind", "")
	}
	if d.Kind == KindMap && (q.Kind == QueryGet || q.Kind == QueryContains) {
		if err := validateUserKey("user_key", d, q.UserKey); err != nil {
			return err
		}
	} else if len(q.UserKey) > 0 {
		return base.Invalid("user_key", "the query has no user key")
	}
	if q.Kind != QueryPage {
		return nil
	}
	return validatePage(q.Limit, q.PageBytes)
}

func validatePage(limit, pageBytes int) error {
	if limit < 0 {
		return base.Invalid("limit", "use 0 for the default, or a positive number")
	}
	if pageBytes < 0 {
		return base.Invalid("page_bytes", "use 0 for the default, or a positive number")
	}
	return nil
}
