package broadcast

import (
	"fmt"

	"github.com/keelstate/keelstate/internal/base"
)

// Limits of commands and entries. They are part of the format: a command over
// a limit is refused by the encoder and, identically on every node, by Apply.
const (
	// MaxKeyBytes bounds a key or a prefix.
	MaxKeyBytes = 16 << 10
	// MaxValueBytes bounds one value.
	MaxValueBytes = 2 << 20
	// MaxCommandBytes bounds one encoded command.
	MaxCommandBytes = 8 << 20
	// MaxOps bounds the operations of one transaction.
	MaxOps = 1 << 17
	// MaxConditions bounds the conditions of one transaction.
	MaxConditions = 1 << 17
)

// CommandKind says what a command does. The numbers are frozen: they are in
// the log.
type CommandKind uint8

// The kinds of commands.
const (
	CommandTxn     CommandKind = 1
	CommandTick    CommandKind = 2
	CommandCompact CommandKind = 3
)

// ConditionKind says what a condition compares. The numbers are frozen.
type ConditionKind uint8

// The kinds of conditions.
const (
	// ConditionAbsent holds if the key does not exist.
	ConditionAbsent ConditionKind = 1
	// ConditionRevision holds if the key exists and its mod revision is equal.
	ConditionRevision ConditionKind = 2
	// ConditionValue holds if the key exists and its value is equal.
	ConditionValue ConditionKind = 3
)

// Condition is one precondition of a transaction, judged on the state before
// the transaction.
type Condition struct {
	Kind ConditionKind
	Key  string
	// Revision is the expected mod revision (ConditionRevision only).
	Revision base.Revision
	// Value is the expected value (ConditionValue only).
	Value []byte
}

// IfAbsent builds the condition that key does not exist.
func IfAbsent(key string) Condition { return Condition{Kind: ConditionAbsent, Key: key} }

// IfRevision builds the condition that key exists and was last written at rev.
func IfRevision(key string, rev base.Revision) Condition {
	return Condition{Kind: ConditionRevision, Key: key, Revision: rev}
}

// IfValue builds the condition that key exists and holds exactly value.
func IfValue(key string, value []byte) Condition {
	return Condition{Kind: ConditionValue, Key: key, Value: value}
}

// OpKind says what an operation does. The numbers are frozen.
type OpKind uint8

// The kinds of operations.
const (
	OpPut          OpKind = 1
	OpDelete       OpKind = 2
	OpDeletePrefix OpKind = 3
)

// Op is one operation of a transaction.
type Op struct {
	Kind OpKind
	// Key is the key, or the prefix of OpDeletePrefix.
	Key string
	// Value is the new value (OpPut only).
	Value []byte
}

// Put builds the operation that sets key to value.
func Put(key string, value []byte) Op { return Op{Kind: OpPut, Key: key, Value: value} }

// Delete builds the operation that removes key if it exists.
func Delete(key string) Op { return Op{Kind: OpDelete, Key: key} }

// DeletePrefix builds the operation that removes every key with the prefix,
// which must not be empty.
func DeletePrefix(prefix string) Op { return Op{Kind: OpDeletePrefix, Key: prefix} }

// Txn is a conditional write. If every condition holds, the operations are
// executed in order, else none is. Only the net effect per key is a change: a
// key that the transaction creates and deletes again was never there.
type Txn struct {
	// Stamp is the proposer's clock in milliseconds. The adapter sees to it
	// that a leader's clock advances; Apply takes the maximum (BC3).
	Stamp      uint64
	Conditions []Condition
	Then       []Op
}

// Command is one decoded command; the fields that its kind does not use are
// zero.
type Command struct {
	Kind CommandKind
	// Stamp is that of a Txn or a Tick, in milliseconds.
	Stamp      uint64
	Conditions []Condition
	Then       []Op
	// Compact is the revision up to which history is dropped.
	Compact base.Revision
}

// validate checks the limits that hold for encoder and decoder alike.
func (c *Command) validate() error {
	if len(c.Conditions) > MaxConditions {
		return tooLarge("conditions", MaxConditions)
	}
	if len(c.Then) > MaxOps {
		return tooLarge("then", MaxOps)
	}
	for i := range c.Conditions {
		if err := c.Conditions[i].validate(); err != nil {
			return fmt.Errorf("checking condition %d: %w", i, err)
		}
	}
	for i := range c.Then {
		if err := c.Then[i].validate(); err != nil {
			return fmt.Errorf("checking operation %d: %w", i, err)
		}
	}
	return nil
}

func (c *Condition) validate() error {
	if err := checkKey(c.Key); err != nil {
		return err
	}
	switch c.Kind {
	case ConditionAbsent, ConditionRevision:
		return nil
	case ConditionValue:
		return checkValue(c.Value)
	}
	return base.Invalid("condition.kind", fmt.Sprintf("unknown kind %d", c.Kind))
}

func (o *Op) validate() error {
	if err := checkKey(o.Key); err != nil {
		return err
	}
	switch o.Kind {
	case OpDelete, OpDeletePrefix:
		return nil
	case OpPut:
		return checkValue(o.Value)
	}
	return base.Invalid("op.kind", fmt.Sprintf("unknown kind %d", o.Kind))
}

func checkKey(key string) error {
	if key == "" {
		return base.Invalid("key", "a key has at least one byte")
	}
	if len(key) > MaxKeyBytes {
		return tooLarge("key", MaxKeyBytes)
	}
	return nil
}

func checkValue(value []byte) error {
	if len(value) > MaxValueBytes {
		return tooLarge("value", MaxValueBytes)
	}
	return nil
}

func tooLarge(field string, limit int) error {
	return &base.Error{Cause: base.ErrTooLarge, Field: field, Hint: fmt.Sprintf("the limit is %d", limit), Ordinal: -1}
}
