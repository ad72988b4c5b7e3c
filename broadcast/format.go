package broadcast

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/keelstate/keelstate/internal/base"
)

// The command format, frozen; docs/formats/system-command.md has the table.
// Every version keeps magic and version in the first six bytes.
const (
	commandMagic      = "KSYC"
	commandVersion    = 1
	commandHeaderLen  = 8
	commandTrailerLen = 4
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// EncodeTxn returns the bytes of a transaction, or what is wrong with it.
func EncodeTxn(txn Txn) ([]byte, error) {
	return encodeCommand(&Command{Kind: CommandTxn, Stamp: txn.Stamp, Conditions: txn.Conditions, Then: txn.Then})
}

// EncodeTick returns the bytes of a command that advances the system clock to
// stamp, in milliseconds.
func EncodeTick(stamp uint64) []byte {
	b, err := encodeCommand(&Command{Kind: CommandTick, Stamp: stamp})
	if err != nil {
		panic("broadcast: a tick that cannot be encoded: " + err.Error())
	}
	return b
}

// EncodeCompact returns the bytes of a command that drops the history of
// changes up to and including rev.
func EncodeCompact(rev base.Revision) []byte {
	b, err := encodeCommand(&Command{Kind: CommandCompact, Compact: rev})
	if err != nil {
		panic("broadcast: a compaction that cannot be encoded: " + err.Error())
	}
	return b
}

func encodeCommand(c *Command) ([]byte, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	b := make([]byte, 0, sizeHint(c))
	b = append(b, commandMagic...)
	b = binary.LittleEndian.AppendUint16(b, commandVersion)
	b = append(b, byte(c.Kind), 0)
	switch c.Kind {
	case CommandTxn:
		b = binary.AppendUvarint(b, c.Stamp)
		b = binary.AppendUvarint(b, uint64(len(c.Conditions)))
		for i := range c.Conditions {
			b = appendCondition(b, &c.Conditions[i])
		}
		b = binary.AppendUvarint(b, uint64(len(c.Then)))
		for i := range c.Then {
			b = appendOp(b, &c.Then[i])
		}
	case CommandTick:
		b = binary.AppendUvarint(b, c.Stamp)
	case CommandCompact:
		b = binary.AppendUvarint(b, uint64(c.Compact))
	default:
		return nil, base.Invalid("kind", fmt.Sprintf("unknown kind %d", c.Kind))
	}
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
	if len(b) > MaxCommandBytes {
		return nil, tooLarge("command", MaxCommandBytes)
	}
	return b, nil
}

func sizeHint(c *Command) int {
	n := commandHeaderLen + commandTrailerLen + 3*binary.MaxVarintLen64
	for i := range c.Conditions {
		n += 16 + len(c.Conditions[i].Key) + len(c.Conditions[i].Value)
	}
	for i := range c.Then {
		n += 16 + len(c.Then[i].Key) + len(c.Then[i].Value)
	}
	return n
}

func appendCondition(b []byte, c *Condition) []byte {
	b = append(b, byte(c.Kind))
	b = appendString(b, c.Key)
	switch c.Kind {
	case ConditionRevision:
		b = binary.AppendUvarint(b, uint64(c.Revision))
	case ConditionValue:
		b = appendString(b, c.Value)
	}
	return b
}

func appendOp(b []byte, o *Op) []byte {
	b = append(b, byte(o.Kind))
	b = appendString(b, o.Key)
	if o.Kind == OpPut {
		b = appendString(b, o.Value)
	}
	return b
}

func appendString[T ~string | ~[]byte](b []byte, s T) []byte {
	b = binary.AppendUvarint(b, uint64(len(s)))
	return append(b, s...)
}

// DecodeCommand parses a command. Values alias b; keys are copies. It accepts
// exactly what the encoder makes: varints are minimal and nothing follows. The
// error wraps base.ErrFormatVersion for another version, base.ErrCorrupt for
// damage, base.ErrInvalid or base.ErrTooLarge for well-formed nonsense.
func DecodeCommand(b []byte) (*Command, error) {
	if len(b) > MaxCommandBytes {
		return nil, tooLarge("command", MaxCommandBytes)
	}
	if len(b) < commandHeaderLen+commandTrailerLen || string(b[:4]) != commandMagic {
		return nil, fmt.Errorf("reading a system command of %d bytes: no header: %w", len(b), base.ErrCorrupt)
	}
	if v := binary.LittleEndian.Uint16(b[4:]); v != commandVersion {
		return nil, fmt.Errorf("reading a system command of version %d, this build knows %d: %w", v, commandVersion, base.ErrFormatVersion)
	}
	body := b[:len(b)-commandTrailerLen]
	if crc32.Checksum(body, castagnoli) != binary.LittleEndian.Uint32(b[len(body):]) {
		return nil, fmt.Errorf("reading a system command of %d bytes: checksum: %w", len(b), base.ErrCorrupt)
	}
	if b[7] != 0 {
		return nil, base.Invalid("flags", "must be zero")
	}
	c := &Command{Kind: CommandKind(b[6])}
	r := &reader{b: body[commandHeaderLen:]}
	switch c.Kind {
	case CommandTxn:
		c.Stamp = r.uvarint()
		r.conditions(c)
		r.ops(c)
	case CommandTick:
		c.Stamp = r.uvarint()
	case CommandCompact:
		c.Compact = base.Revision(r.uvarint())
	default:
		return nil, base.Invalid("kind", fmt.Sprintf("unknown kind %d", c.Kind))
	}
	if r.err == nil && len(r.b) != 0 {
		r.err = fmt.Errorf("%d bytes after the end: %w", len(r.b), base.ErrCorrupt)
	}
	if r.err != nil {
		return nil, fmt.Errorf("reading a system command: %w", r.err)
	}
	if err := c.validate(); err != nil {
		return nil, err
	}
	return c, nil
}

// reader cuts fields off b and remembers the first error.
type reader struct {
	b   []byte
	err error
}

func (r *reader) fail(what string) {
	if r.err == nil {
		r.err = fmt.Errorf("%s: %w", what, base.ErrCorrupt)
	}
	r.b = nil
}

func (r *reader) uvarint() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 || (n > 1 && r.b[n-1] == 0) {
		r.fail("a varint that is cut, too long or not minimal")
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) byte() byte {
	if len(r.b) == 0 {
		r.fail("a cut field")
		return 0
	}
	v := r.b[0]
	r.b = r.b[1:]
	return v
}

// bytes returns a field of at most limit bytes that aliases the input.
func (r *reader) bytes(limit int) []byte {
	n := r.uvarint()
	if r.err != nil {
		return nil
	}
	if n > uint64(limit) || n > uint64(len(r.b)) {
		r.fail("a length over its limit or the rest")
		return nil
	}
	v := r.b[:n:n]
	r.b = r.b[n:]
	return v
}

// count reads a number of items of at least two bytes each, so that what is
// allocated for them is bounded by the bytes that are there.
func (r *reader) count(limit int) int {
	n := r.uvarint()
	if r.err != nil {
		return 0
	}
	if n > uint64(limit) || n > uint64(len(r.b)/2) {
		r.fail("a count over its limit or the rest")
		return 0
	}
	return int(n)
}

func (r *reader) conditions(c *Command) {
	n := r.count(MaxConditions)
	if n == 0 {
		return
	}
	c.Conditions = make([]Condition, 0, n)
	for range n {
		if r.err != nil {
			return
		}
		cond := Condition{Kind: ConditionKind(r.byte()), Key: string(r.bytes(MaxKeyBytes))}
		switch cond.Kind {
		case ConditionAbsent:
		case ConditionRevision:
			cond.Revision = base.Revision(r.uvarint())
		case ConditionValue:
			cond.Value = r.bytes(MaxValueBytes)
		default:
			r.fail("an unknown kind of condition")
		}
		c.Conditions = append(c.Conditions, cond)
	}
}

func (r *reader) ops(c *Command) {
	n := r.count(MaxOps)
	if n == 0 {
		return
	}
	c.Then = make([]Op, 0, n)
	for range n {
		if r.err != nil {
			return
		}
		op := Op{Kind: OpKind(r.byte()), Key: string(r.bytes(MaxKeyBytes))}
		switch op.Kind {
		case OpDelete, OpDeletePrefix:
		case OpPut:
			op.Value = r.bytes(MaxValueBytes)
		default:
			r.fail("an unknown kind of operation")
		}
		c.Then = append(c.Then, op)
	}
}
