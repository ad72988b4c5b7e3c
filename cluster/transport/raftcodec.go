package transport

import (
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	"github.com/keelstate/keelstate/internal/base"
)

// Every raft request starts with the server id that it is meant for. The
// receiver refuses another one: a replica that came back under a new id (rule
// R3) must not answer for the promises of the old one.
//
// The deprecated fields Leader, Candidate and Peers are not carried:
// RPCHeader.Addr replaces them at protocol version 3, the only one accepted.

// entryOverhead is the fixed part of an encoded log entry.
const entryOverhead = 8 + 8 + 1 + 8 + 4 + 4

func putRPCHeader(b []byte, h raft.RPCHeader) []byte {
	b = append(b, uint8(h.ProtocolVersion))
	b = putBytes16(b, h.ID)
	return putBytes16(b, h.Addr)
}

func (r *wireReader) rpcHeader() raft.RPCHeader {
	return raft.RPCHeader{ProtocolVersion: raft.ProtocolVersion(r.u8()), ID: r.bytes16(), Addr: r.bytes16()}
}

func putAppend(b []byte, target raft.ServerID, m *raft.AppendEntriesRequest) []byte {
	b = putBytes16(b, target)
	b = putRPCHeader(b, m.RPCHeader)
	b = putU64(b, m.Term)
	b = putU64(b, m.PrevLogEntry)
	b = putU64(b, m.PrevLogTerm)
	b = putU64(b, m.LeaderCommitIndex)
	b = putU32(b, uint32(len(m.Entries)))
	for _, e := range m.Entries {
		b = putU64(b, e.Index)
		b = putU64(b, e.Term)
		b = append(b, uint8(e.Type))
		b = putU64(b, uint64(stampOf(e.AppendedAt)))
		b = putBytes32(b, e.Data)
		b = putBytes32(b, e.Extensions)
	}
	return b
}

// stampOf maps the zero time, which UnixNano cannot express, to 0.
func stampOf(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func timeOf(stamp int64) time.Time {
	if stamp == 0 {
		return time.Time{}
	}
	return time.Unix(0, stamp)
}

func decodeAppend(body []byte) (raft.ServerID, *raft.AppendEntriesRequest, error) {
	r := wireReader{b: body}
	target := raft.ServerID(r.str16())
	m := &raft.AppendEntriesRequest{
		RPCHeader: r.rpcHeader(), Term: r.u64(), PrevLogEntry: r.u64(), PrevLogTerm: r.u64(), LeaderCommitIndex: r.u64(),
	}
	n := int(r.u32())
	if n > len(r.b)/entryOverhead { // bounds the allocation below
		r.bad = true
		n = 0
	}
	entries := make([]raft.Log, n)
	if n > 0 {
		m.Entries = make([]*raft.Log, n)
	}
	for i := range entries {
		e := &entries[i]
		e.Index, e.Term, e.Type = r.u64(), r.u64(), raft.LogType(r.u8())
		e.AppendedAt = timeOf(int64(r.u64()))
		e.Data, e.Extensions = r.bytes32(), r.bytes32()
		m.Entries[i] = e
	}
	if err := r.finish("AppendEntries"); err != nil {
		return target, nil, err
	}
	for _, e := range m.Entries {
		if err := checkEntry(e); err != nil {
			return target, nil, err
		}
	}
	return target, m, nil
}

// checkEntry refuses what would make raft panic on bytes from the network: it
// decodes configuration entries with a panic on error.
func checkEntry(e *raft.Log) error {
	switch e.Type {
	case raft.LogCommand, raft.LogNoop, raft.LogBarrier:
		return nil
	case raft.LogConfiguration:
		return checkConfiguration(e.Data)
	}
	return fmt.Errorf("decoding log entry %d of type %d: %w", e.Index, e.Type, base.ErrCorrupt)
}

func checkConfiguration(b []byte) (err error) {
	if len(b) > maxConfiguration {
		return fmt.Errorf("decoding a configuration of %d bytes: %w", len(b), base.ErrTooLarge)
	}
	defer func() {
		if recover() != nil {
			err = fmt.Errorf("decoding a configuration: %w", base.ErrCorrupt)
		}
	}()
	raft.DecodeConfiguration(b)
	return nil
}

func putAppendResponse(b []byte, m *raft.AppendEntriesResponse) []byte {
	b = putRPCHeader(b, m.RPCHeader)
	b = putU64(b, m.Term)
	b = putU64(b, m.LastLog)
	b = putBool(b, m.Success)
	return putBool(b, m.NoRetryBackoff)
}

func decodeAppendResponse(body []byte, m *raft.AppendEntriesResponse) error {
	r := wireReader{b: body}
	v := raft.AppendEntriesResponse{
		RPCHeader: r.rpcHeader(), Term: r.u64(), LastLog: r.u64(), Success: r.boolean(), NoRetryBackoff: r.boolean(),
	}
	if err := r.finish("AppendEntries answer"); err != nil {
		return err
	}
	*m = v
	return nil
}

func putVote(b []byte, target raft.ServerID, m *raft.RequestVoteRequest) []byte {
	b = putBytes16(b, target)
	b = putRPCHeader(b, m.RPCHeader)
	b = putU64(b, m.Term)
	b = putU64(b, m.LastLogIndex)
	b = putU64(b, m.LastLogTerm)
	return putBool(b, m.LeadershipTransfer)
}

func decodeVote(body []byte) (raft.ServerID, *raft.RequestVoteRequest, error) {
	r := wireReader{b: body}
	target := raft.ServerID(r.str16())
	m := &raft.RequestVoteRequest{
		RPCHeader: r.rpcHeader(), Term: r.u64(), LastLogIndex: r.u64(), LastLogTerm: r.u64(), LeadershipTransfer: r.boolean(),
	}
	return target, m, r.finish("RequestVote")
}

func putVoteResponse(b []byte, m *raft.RequestVoteResponse) []byte {
	b = putRPCHeader(b, m.RPCHeader)
	b = putU64(b, m.Term)
	return putBool(b, m.Granted)
}

func decodeVoteResponse(body []byte, m *raft.RequestVoteResponse) error {
	r := wireReader{b: body}
	v := raft.RequestVoteResponse{RPCHeader: r.rpcHeader(), Term: r.u64(), Granted: r.boolean()}
	if err := r.finish("RequestVote answer"); err != nil {
		return err
	}
	*m = v
	return nil
}

func putPreVote(b []byte, target raft.ServerID, m *raft.RequestPreVoteRequest) []byte {
	b = putBytes16(b, target)
	b = putRPCHeader(b, m.RPCHeader)
	b = putU64(b, m.Term)
	b = putU64(b, m.LastLogIndex)
	return putU64(b, m.LastLogTerm)
}

func decodePreVote(body []byte) (raft.ServerID, *raft.RequestPreVoteRequest, error) {
	r := wireReader{b: body}
	target := raft.ServerID(r.str16())
	m := &raft.RequestPreVoteRequest{RPCHeader: r.rpcHeader(), Term: r.u64(), LastLogIndex: r.u64(), LastLogTerm: r.u64()}
	return target, m, r.finish("RequestPreVote")
}

func putPreVoteResponse(b []byte, m *raft.RequestPreVoteResponse) []byte {
	b = putRPCHeader(b, m.RPCHeader)
	b = putU64(b, m.Term)
	return putBool(b, m.Granted)
}

func decodePreVoteResponse(body []byte, m *raft.RequestPreVoteResponse) error {
	r := wireReader{b: body}
	v := raft.RequestPreVoteResponse{RPCHeader: r.rpcHeader(), Term: r.u64(), Granted: r.boolean()}
	if err := r.finish("RequestPreVote answer"); err != nil {
		return err
	}
	*m = v
	return nil
}

func putTimeoutNow(b []byte, target raft.ServerID, m *raft.TimeoutNowRequest) []byte {
	return putRPCHeader(putBytes16(b, target), m.RPCHeader)
}

func decodeTimeoutNow(body []byte) (raft.ServerID, *raft.TimeoutNowRequest, error) {
	r := wireReader{b: body}
	target := raft.ServerID(r.str16())
	m := &raft.TimeoutNowRequest{RPCHeader: r.rpcHeader()}
	return target, m, r.finish("TimeoutNow")
}

func decodeTimeoutNowResponse(body []byte, m *raft.TimeoutNowResponse) error {
	r := wireReader{b: body}
	v := raft.TimeoutNowResponse{RPCHeader: r.rpcHeader()}
	if err := r.finish("TimeoutNow answer"); err != nil {
		return err
	}
	*m = v
	return nil
}

func putInstall(b []byte, target raft.ServerID, m *raft.InstallSnapshotRequest, manifest []byte) []byte {
	b = putBytes16(b, target)
	b = putRPCHeader(b, m.RPCHeader)
	b = append(b, uint8(m.SnapshotVersion))
	b = putU64(b, m.Term)
	b = putU64(b, m.LastLogIndex)
	b = putU64(b, m.LastLogTerm)
	b = putU64(b, m.ConfigurationIndex)
	b = putBytes32(b, m.Configuration)
	return putBytes32(b, manifest)
}

func decodeInstall(body []byte) (target raft.ServerID, m *raft.InstallSnapshotRequest, manifest []byte, err error) {
	r := wireReader{b: body}
	target = raft.ServerID(r.str16())
	m = &raft.InstallSnapshotRequest{
		RPCHeader: r.rpcHeader(), SnapshotVersion: raft.SnapshotVersion(r.u8()), Term: r.u64(),
		LastLogIndex: r.u64(), LastLogTerm: r.u64(), ConfigurationIndex: r.u64(), Configuration: r.bytes32(),
	}
	manifest = r.bytes32()
	m.Size = int64(len(manifest))
	if err := r.finish("InstallSnapshot"); err != nil {
		return target, nil, nil, err
	}
	if m.SnapshotVersion != raft.SnapshotVersionMax {
		return target, nil, nil, fmt.Errorf("decoding a snapshot of version %d: %w", m.SnapshotVersion, base.ErrFormatVersion)
	}
	return target, m, manifest, checkConfiguration(m.Configuration)
}

func putInstallResponse(b []byte, m *raft.InstallSnapshotResponse) []byte {
	b = putRPCHeader(b, m.RPCHeader)
	b = putU64(b, m.Term)
	return putBool(b, m.Success)
}

func decodeInstallResponse(body []byte, m *raft.InstallSnapshotResponse) error {
	r := wireReader{b: body}
	v := raft.InstallSnapshotResponse{RPCHeader: r.rpcHeader(), Term: r.u64(), Success: r.boolean()}
	if err := r.finish("InstallSnapshot answer"); err != nil {
		return err
	}
	*m = v
	return nil
}
