package raftfsm

import (
	"encoding/binary"
	"fmt"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
)

// Frozen (docs/formats/command.md). A change of anything below needs a new
// command version, because entries of the old one are in logs.
const (
	commandMagic   byte = 0xC7
	commandVersion byte = 1

	requestAtomic  byte = 0x01
	requestSession byte = 0x02

	// Flags of mutations and preconditions.
	hasNamespace byte = 0x01
	hasUserKey   byte = 0x02
)

func appendEnvelope(dst []byte, k CommandKind) []byte {
	return append(dst, commandMagic, commandVersion, byte(k))
}

// AppendInit appends an encoded Init command.
func AppendInit(dst []byte, i Init) []byte {
	dst = appendEnvelope(dst, CommandInit)
	for _, v := range [...]uint64{
		uint64(i.Group), uint64(i.Range.Lo), uint64(i.Range.Hi), uint64(i.M), uint64(i.Epoch),
		uint64(i.Birth), uint64(i.Incarnation), i.Sequence, i.ClockMs,
	} {
		dst = binary.AppendUvarint(dst, v)
	}
	return dst
}

// AppendTermStart appends an encoded TermStart command.
func AppendTermStart(dst []byte, stampMs uint64) []byte {
	return binary.AppendUvarint(appendEnvelope(dst, CommandTermStart), stampMs)
}

// AppendTick appends an encoded Tick command.
func AppendTick(dst []byte, stampMs uint64) []byte {
	return binary.AppendUvarint(appendEnvelope(dst, CommandTick), stampMs)
}

// AppendDeclare appends an encoded Declare command.
func AppendDeclare(dst []byte, decls []state.Declaration) []byte {
	dst = appendEnvelope(dst, CommandDeclare)
	dst = binary.AppendUvarint(dst, uint64(len(decls)))
	for i := range decls {
		dst = appendDeclaration(dst, &decls[i])
	}
	return dst
}

// appendDeclaration is shared with the declarations in the metadata family.
func appendDeclaration(dst []byte, d *state.Declaration) []byte {
	dst = binary.AppendUvarint(dst, uint64(d.ID))
	dst = append(dst, byte(d.Kind))
	dst = binary.AppendUvarint(dst, uint64(d.CodecVersion))
	dst = appendText(dst, d.Keyspace)
	dst = appendText(dst, d.Name)
	dst = appendText(dst, typeText(d.KeyType))
	dst = appendText(dst, typeText(d.UserKeyType))
	dst = appendText(dst, typeText(d.ValueType))
	return appendText(dst, d.Function)
}

// AppendDrop appends an encoded Drop command.
func AppendDrop(dst []byte, ids []engine.FamilyID) []byte {
	dst = appendEnvelope(dst, CommandDrop)
	dst = binary.AppendUvarint(dst, uint64(len(ids)))
	for _, id := range ids {
		dst = binary.AppendUvarint(dst, uint64(id))
	}
	return dst
}

// AppendForget appends an encoded Forget command: the sessions had ended at the
// given revision of the system state.
func AppendForget(dst []byte, rev base.Revision, sessions []base.SessionID) []byte {
	dst = appendEnvelope(dst, CommandForget)
	dst = binary.AppendUvarint(dst, uint64(rev))
	dst = binary.AppendUvarint(dst, uint64(len(sessions)))
	for _, id := range sessions {
		dst = binary.LittleEndian.AppendUint64(dst, uint64(id))
	}
	return dst
}

// AppendHashMark appends an encoded HashMark command.
func AppendHashMark(dst []byte, id uint64) []byte {
	return binary.AppendUvarint(appendEnvelope(dst, CommandHashMark), id)
}

// AppendBarrier appends an encoded Barrier command.
func AppendBarrier(dst []byte, b Barrier) []byte {
	dst = appendEnvelope(dst, CommandBarrier)
	dst = binary.AppendUvarint(dst, b.Number)
	dst = binary.AppendUvarint(dst, uint64(b.Epoch))
	dst = binary.AppendUvarint(dst, b.Attempt)
	return appendText(dst, string(b.Uploader))
}

// AppendFence appends an encoded Fence command; its numbers are not 0.
func AppendFence(dst []byte, f Fence) []byte {
	dst = binary.AppendUvarint(appendEnvelope(dst, CommandFence), f.Operation)
	return binary.AppendUvarint(dst, f.Checkpoint)
}

// AppendRollback appends an encoded Rollback command; its numbers are not 0.
func AppendRollback(dst []byte, r Rollback) []byte {
	dst = appendEnvelope(dst, CommandRollback)
	for _, v := range [...]uint64{r.Operation, r.Checkpoint, uint64(r.Incarnation), uint64(r.Epoch)} {
		dst = binary.AppendUvarint(dst, v)
	}
	return dst
}

// AppendReopen appends an encoded Reopen command.
func AppendReopen(dst []byte, o Reopen) []byte {
	dst = binary.AppendUvarint(appendEnvelope(dst, CommandReopen), o.Operation)
	return binary.AppendUvarint(dst, uint64(o.Revision))
}

// AppendWrite appends an encoded Write command of requests that AppendRequest
// encoded, so that a leader encodes each request once, when it arrives.
func AppendWrite(dst []byte, stampMs uint64, rev base.Revision, requests ...[]byte) []byte {
	dst = appendEnvelope(dst, CommandWrite)
	dst = binary.AppendUvarint(dst, stampMs)
	dst = binary.AppendUvarint(dst, uint64(rev))
	dst = binary.AppendUvarint(dst, uint64(len(requests)))
	for _, r := range requests {
		dst = appendBytes(dst, r)
	}
	return dst
}

// AppendRequest appends the encoded request. It refuses, with base.ErrInvalid,
// what the format cannot say: ordinals that do not ascend, unknown kinds and
// operations. On an error dst is returned as it was.
func AppendRequest(dst []byte, r *Request) ([]byte, error) {
	start := len(dst)
	var flags byte
	if r.Atomic {
		flags |= requestAtomic
	}
	if r.Session != 0 {
		flags |= requestSession
	}
	dst = append(dst, flags)
	dst = binary.AppendUvarint(dst, uint64(r.Incarnation))
	dst = binary.AppendUvarint(dst, uint64(r.Epoch))
	if r.Session != 0 {
		dst = binary.LittleEndian.AppendUint64(dst, uint64(r.Session))
		dst = binary.AppendUvarint(dst, r.Seq)
		dst = binary.AppendUvarint(dst, r.Prev)
		dst = binary.AppendUvarint(dst, r.Floor)
	}
	dst = binary.AppendUvarint(dst, r.BarrierSeen)
	dst = binary.AppendUvarint(dst, uint64(len(r.Preconditions)))
	var err error
	for i := range r.Preconditions {
		if dst, err = appendPrecondition(dst, &r.Preconditions[i]); err != nil {
			return dst[:start], base.Invalid(fmt.Sprintf("preconditions[%d].kind", i), "use a known kind of precondition")
		}
	}
	dst = binary.AppendUvarint(dst, uint64(len(r.Mutations)))
	next := uint32(0)
	for i := range r.Mutations {
		m := &r.Mutations[i]
		if m.Ordinal < next || m.Ordinal == ^uint32(0) {
			return dst[:start], base.Invalid(fmt.Sprintf("mutations[%d].ordinal", i), "number mutations in strictly ascending order")
		}
		dst = binary.AppendUvarint(dst, uint64(m.Ordinal-next))
		next = m.Ordinal + 1
		if dst, err = appendMutation(dst, &m.Mutation); err != nil {
			return dst[:start], base.Invalid(fmt.Sprintf("mutations[%d].op", i), "use a known operation")
		}
	}
	return dst, nil
}

func appendTarget(dst []byte, flags byte, id engine.FamilyID, group uint64, key []byte, ns state.Namespace) []byte {
	if ns.Set {
		flags |= hasNamespace
	}
	dst = append(dst, flags)
	dst = binary.AppendUvarint(dst, uint64(id))
	dst = binary.AppendUvarint(dst, group)
	dst = appendBytes(dst, key)
	if ns.Set {
		dst = appendBytes(dst, ns.Bytes)
	}
	return dst
}

func appendPrecondition(dst []byte, p *state.Precondition) ([]byte, error) {
	var flags byte
	if p.HasUserKey {
		flags |= hasUserKey
	}
	dst = append(dst, byte(p.Kind))
	dst = appendTarget(dst, flags, p.State, uint64(p.Group), p.Key, p.Namespace)
	if p.HasUserKey {
		dst = appendBytes(dst, p.UserKey)
	}
	switch p.Kind {
	case state.PreAbsent, state.PrePresent, state.PreNull:
	case state.PreEqual:
		dst = appendBytes(dst, p.Bytes)
	case state.PreVersion:
		dst = binary.AppendUvarint(dst, p.Version)
	default:
		return dst, base.ErrInvalid
	}
	return dst, nil
}

// appendMutation encodes a mutation without its ordinal. A nil element is null.
func appendMutation(dst []byte, m *state.Mutation) ([]byte, error) {
	dst = append(dst, byte(m.Op))
	dst = appendTarget(dst, 0, m.State, uint64(m.Group), m.Key, m.Namespace)
	switch m.Op {
	case state.OpClear:
	case state.OpValuePut:
		dst = appendBytes(dst, m.Value)
	case state.OpListAdd, state.OpListUpdate, state.OpAdd:
		dst = binary.AppendUvarint(dst, uint64(len(m.Elements)))
		for _, e := range m.Elements {
			dst = appendOptional(dst, e, e != nil)
		}
	case state.OpMapPut:
		dst = binary.AppendUvarint(dst, uint64(len(m.Entries)))
		for i := range m.Entries {
			dst = appendBytes(dst, m.Entries[i].UserKey)
			dst = appendOptional(dst, m.Entries[i].Value, !m.Entries[i].Null)
		}
	case state.OpMapRemove:
		dst = binary.AppendUvarint(dst, uint64(len(m.Entries)))
		for i := range m.Entries {
			dst = appendBytes(dst, m.Entries[i].UserKey)
		}
	case state.OpMergeNamespaces:
		dst = binary.AppendUvarint(dst, uint64(len(m.Sources)))
		for _, s := range m.Sources {
			dst = appendOptional(dst, s.Bytes, s.Set)
		}
	default:
		return dst, base.ErrInvalid
	}
	return dst, nil
}
