package transport

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/internal/base"
)

var goldenConfig = raft.EncodeConfiguration(raft.Configuration{Servers: []raft.Server{{ID: "a/1", Address: "a"}, {ID: "b/1", Address: "b"}}})

// goldenFrames is one frame of each kind; the names are those of the files.
func goldenFrames() map[string][]byte {
	h := header("a")
	at := time.Unix(1700000000, 5)
	entries := []*raft.Log{
		{Index: 9, Term: 3, Type: raft.LogCommand, Data: []byte("data"), Extensions: []byte("ext"), AppendedAt: at},
		{Index: 10, Term: 3, Type: raft.LogConfiguration, Data: goldenConfig},
	}
	group := base.GroupID(7)
	seal := func(f frame, b []byte) []byte {
		if err := sealFrame(b, f); err != nil {
			panic(err)
		}
		return b
	}
	req := func(t frameType, b []byte) []byte { return seal(frame{typ: t, group: group, id: 42}, b) }
	resp := func(t frameType, b []byte) []byte {
		return seal(frame{typ: t, flags: flagResponse, group: group, id: 42}, b)
	}
	g := base.GroupID(7)
	detailed := &base.Error{Cause: base.ErrNotLeader, Field: "f", Hint: "h", Group: &g, LeaderHint: "b", Epoch: 3, RetryAfter: time.Second, Ordinal: -1}
	return map[string][]byte{
		"append":             req(typeAppend, putAppend(beginFrame(0), "b/1", &raft.AppendEntriesRequest{RPCHeader: h, Term: 3, PrevLogEntry: 8, PrevLogTerm: 2, LeaderCommitIndex: 7, Entries: entries})),
		"append-answer":      resp(typeAppend, putAppendResponse(beginFrame(0), &raft.AppendEntriesResponse{RPCHeader: h, Term: 3, LastLog: 10, Success: true, NoRetryBackoff: true})),
		"vote":               req(typeVote, putVote(beginFrame(0), "b/1", &raft.RequestVoteRequest{RPCHeader: h, Term: 4, LastLogIndex: 10, LastLogTerm: 3, LeadershipTransfer: true})),
		"vote-answer":        resp(typeVote, putVoteResponse(beginFrame(0), &raft.RequestVoteResponse{RPCHeader: h, Term: 4, Granted: true})),
		"prevote":            req(typePreVote, putPreVote(beginFrame(0), "b/1", &raft.RequestPreVoteRequest{RPCHeader: h, Term: 4, LastLogIndex: 10, LastLogTerm: 3})),
		"prevote-answer":     resp(typePreVote, putPreVoteResponse(beginFrame(0), &raft.RequestPreVoteResponse{RPCHeader: h, Term: 4, Granted: true})),
		"timeout-now":        req(typeTimeoutNow, putTimeoutNow(beginFrame(0), "b/1", &raft.TimeoutNowRequest{RPCHeader: h})),
		"timeout-now-answer": resp(typeTimeoutNow, putRPCHeader(beginFrame(0), h)),
		"install":            req(typeInstall, putInstall(beginFrame(0), "b/1", &raft.InstallSnapshotRequest{RPCHeader: h, SnapshotVersion: 1, Term: 4, LastLogIndex: 10, LastLogTerm: 3, Configuration: goldenConfig, ConfigurationIndex: 10}, []byte("manifest"))),
		"install-answer":     resp(typeInstall, putInstallResponse(beginFrame(0), &raft.InstallSnapshotResponse{RPCHeader: h, Term: 4, Success: true})),
		"error":              seal(frame{typ: typeCall, flags: flagResponse | flagError, id: 42}, putError(beginFrame(0), detailed)),
		"poll":               req(typePoll, putPollRequest(beginFrame(0), []base.GroupID{0, 7})),
		"poll-answer":        resp(typePoll, putPollAnswer(beginFrame(0), []TermAnswer{{}, {Known: true, Replica: "b/1", Term: 4, LastIndex: 10, WallClock: 1700000000}})),
		"ping":               seal(frame{typ: typePing}, beginFrame(0)),
	}
}

// decodeFrame decodes a golden frame's body and encodes it again.
func decodeFrame(f frame) ([]byte, error) {
	switch f.flags {
	case flagResponse | flagError:
		err := decodeError(f.body, "n")
		if base.SentinelOf(err) == base.ErrCorrupt {
			return nil, err
		}
		return nil, nil
	case flagResponse:
		return decodeResponse(f)
	}
	switch f.typ {
	case typeAppend:
		id, m, err := decodeAppend(f.body)
		return encoded(err, func() []byte { return putAppend(nil, id, m) })
	case typeVote:
		id, m, err := decodeVote(f.body)
		return encoded(err, func() []byte { return putVote(nil, id, m) })
	case typePreVote:
		id, m, err := decodePreVote(f.body)
		return encoded(err, func() []byte { return putPreVote(nil, id, m) })
	case typeTimeoutNow:
		id, m, err := decodeTimeoutNow(f.body)
		return encoded(err, func() []byte { return putTimeoutNow(nil, id, m) })
	case typeInstall:
		id, m, manifest, err := decodeInstall(f.body)
		return encoded(err, func() []byte { return putInstall(nil, id, m, manifest) })
	case typePoll:
		groups, err := decodePollRequest(f.body)
		return encoded(err, func() []byte { return putPollRequest(nil, groups) })
	}
	return f.body, nil
}

func decodeResponse(f frame) ([]byte, error) {
	switch f.typ {
	case typeAppend:
		var m raft.AppendEntriesResponse
		return encoded(decodeAppendResponse(f.body, &m), func() []byte { return putAppendResponse(nil, &m) })
	case typeVote:
		var m raft.RequestVoteResponse
		return encoded(decodeVoteResponse(f.body, &m), func() []byte { return putVoteResponse(nil, &m) })
	case typePreVote:
		var m raft.RequestPreVoteResponse
		return encoded(decodePreVoteResponse(f.body, &m), func() []byte { return putPreVoteResponse(nil, &m) })
	case typeTimeoutNow:
		var m raft.TimeoutNowResponse
		return encoded(decodeTimeoutNowResponse(f.body, &m), func() []byte { return putRPCHeader(nil, m.RPCHeader) })
	case typeInstall:
		var m raft.InstallSnapshotResponse
		return encoded(decodeInstallResponse(f.body, &m), func() []byte { return putInstallResponse(nil, &m) })
	case typePoll:
		m, err := decodePollAnswer(f.body, 2)
		return encoded(err, func() []byte { return putPollAnswer(nil, m) })
	}
	return f.body, nil
}

func encoded(err error, f func() []byte) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	return f(), nil
}

func parse(b []byte) (frame, error) { return readFrame(bufio.NewReader(bytes.NewReader(b))) }

// golden compares with the stored bytes; -rewrite stores them, with a dump.
func golden(t *testing.T, name string, b []byte) {
	t.Helper()
	dir := filepath.Join("testdata", "golden", "v1")
	if *rewrite {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for ext, data := range map[string][]byte{".bin": b, ".txt": []byte(hex.Dump(b))} {
			if err := os.WriteFile(filepath.Join(dir, name+ext), data, 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	want, err := os.ReadFile(filepath.Join(dir, name+".bin"))
	if err != nil || !bytes.Equal(want, b) {
		t.Fatalf("the format of %s changed (%v):\n%s", name, err, hex.Dump(b))
	}
}

// TestGoldenFrames pins every message, and reads it cut at every offset and
// with every bit flipped.
func TestGoldenFrames(t *testing.T) {
	for name, b := range goldenFrames() {
		golden(t, name, b)
		f, err := parse(b)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		again, err := decodeFrame(f)
		if err != nil || (again != nil && !bytes.Equal(again, f.body)) {
			t.Fatalf("%s: %v, encoded again as %x", name, err, again)
		}
		for i := range b {
			_, err := parse(b[:i])
			if i == 0 && err != io.EOF || i > 0 && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Fatalf("%s cut at %d: %v", name, i, err)
			}
			for bit := range 8 {
				c := bytes.Clone(b)
				c[i] ^= 1 << bit
				want := error(base.ErrCorrupt)
				if i == 1 {
					want = base.ErrFormatVersion
				}
				if _, err := parse(c); !errors.Is(err, want) {
					t.Fatalf("%s, bit %d of byte %d: %v", name, bit, i, err)
				}
			}
		}
		for i := range f.body { // a body that is cut but carries a right checksum
			if _, err := decodeFrame(frame{typ: f.typ, flags: f.flags, body: f.body[:i]}); err == nil && f.flags != flagResponse|flagError {
				t.Fatalf("%s: a body cut at %d was decoded", name, i)
			}
		}
	}
}

func TestGoldenHello(t *testing.T) {
	h := hello{lane: laneAppend, target: "b", id: Identity{Cluster: testCluster, Node: "a", Disk: "d", Engine: "rocks"}, refusal: putError(nil, base.ErrIdentity)}
	b := h.encode()
	golden(t, "hello", b)
	got, err := readHello(bytes.NewReader(b))
	if err != nil || !reflect.DeepEqual(got, h) {
		t.Fatalf("%+v, %v", got, err)
	}
	for i := range b {
		if _, err := readHello(bytes.NewReader(b[:i])); err == nil {
			t.Fatalf("cut at %d was read", i)
		}
		for bit := range 8 {
			c := bytes.Clone(b)
			c[i] ^= 1 << bit
			_, err := readHello(bytes.NewReader(c))
			if err == nil || ((i == 4 || i == 5) && !errors.Is(err, base.ErrFormatVersion)) {
				t.Fatalf("bit %d of byte %d: %v", bit, i, err)
			}
		}
	}
}

// TestErrorsSurvive: every sentinel keeps its identity, details included.
func TestErrorsSurvive(t *testing.T) {
	g := base.GroupID(9)
	for _, s := range base.Sentinels() {
		plain := decodeError(putError(nil, fmt.Errorf("wrapping: %w", s)), "b")
		if !errors.Is(plain, s) || base.OutcomeOf(plain) != s.Outcome {
			t.Errorf("%s became %v", s.Reason, plain)
		}
		in := &base.Error{Cause: s, Field: "f", Hint: "h", Group: &g, LeaderHint: "c", Epoch: 4, RetryAfter: 5, Ordinal: -1}
		var out *base.Error
		err := decodeError(putError(nil, fmt.Errorf("wrapping: %w", in)), "b")
		if !errors.As(err, &out) || !errors.Is(err, s) {
			t.Fatalf("%s became %v", s.Reason, err)
		}
		if out.Field != "f" || out.Hint != "h" || *out.Group != g || out.LeaderHint != "c" || out.Epoch != 4 || out.RetryAfter != 5 || out.Ordinal != -1 {
			t.Errorf("%s lost details: %+v", s.Reason, out)
		}
	}
	if err := decodeError(putError(nil, context.DeadlineExceeded), "b"); !errors.Is(err, base.ErrDeadline) {
		t.Errorf("a deadline became %v", err)
	}
	b := append(putBytes16(putBytes16(nil, "from_the_future"), "text"), 0)
	if err := decodeError(b, "b"); base.OutcomeOf(err) != base.OutcomeUnknown || !errors.Is(err, base.ErrInternal) {
		t.Errorf("an unknown reason became %v", err)
	}
}

func TestAppendRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		blob := rapid.SliceOfN(rapid.Byte(), 0, 50)
		m := &raft.AppendEntriesRequest{
			RPCHeader: raft.RPCHeader{ProtocolVersion: 3, ID: []byte("x"), Addr: []byte("y")},
			Term:      rapid.Uint64().Draw(t, "term"), PrevLogEntry: rapid.Uint64().Draw(t, "prev"), LeaderCommitIndex: rapid.Uint64().Draw(t, "commit"),
		}
		for range rapid.IntRange(0, 5).Draw(t, "n") {
			m.Entries = append(m.Entries, &raft.Log{Index: rapid.Uint64().Draw(t, "i"), Term: rapid.Uint64().Draw(t, "t"),
				Type: rapid.SampledFrom([]raft.LogType{raft.LogCommand, raft.LogNoop, raft.LogBarrier}).Draw(t, "type"),
				Data: blob.Draw(t, "d"), Extensions: blob.Draw(t, "e"), AppendedAt: time.Unix(0, rapid.Int64().Draw(t, "at"))})
		}
		b := putAppend(nil, "id", m)
		id, got, err := decodeAppend(b)
		if err != nil || id != "id" || !bytes.Equal(putAppend(nil, id, got), b) {
			t.Fatalf("%v", err)
		}
		for i, e := range got.Entries {
			w := m.Entries[i]
			if e.Index != w.Index || e.Term != w.Term || e.Type != w.Type || !bytes.Equal(e.Data, w.Data) || !bytes.Equal(e.Extensions, w.Extensions) {
				t.Fatalf("entry %d: %+v", i, e)
			}
		}
	})
}

// TestNoPanicInRaft is TR9: entries at which raft would panic are refused.
func TestNoPanicInRaft(t *testing.T) {
	for _, e := range []*raft.Log{
		{Type: raft.LogConfiguration, Data: []byte("garbage")}, {Type: raft.LogConfiguration},
		{Type: raft.LogAddPeerDeprecated}, {Type: raft.LogRemovePeerDeprecated}, {Type: 99},
	} {
		if _, _, err := decodeAppend(putAppend(nil, "b", &raft.AppendEntriesRequest{Entries: []*raft.Log{e}})); !errors.Is(err, base.ErrCorrupt) {
			t.Errorf("type %d: %v", e.Type, err)
		}
	}
	in := &raft.InstallSnapshotRequest{SnapshotVersion: 1, Configuration: []byte("garbage")}
	if _, _, _, err := decodeInstall(putInstall(nil, "b", in, nil)); !errors.Is(err, base.ErrCorrupt) {
		t.Errorf("install: %v", err)
	}
	in.SnapshotVersion = 0
	if _, _, _, err := decodeInstall(putInstall(nil, "b", in, nil)); !errors.Is(err, base.ErrFormatVersion) {
		t.Errorf("install of version 0: %v", err)
	}
}

// TestClaimedLength is TR9: a header that claims much costs little.
func TestClaimedLength(t *testing.T) {
	b := make([]byte, headerSize, headerSize+MaxAppendFrame+1)
	if err := sealFrame(b[:headerSize+MaxAppendFrame+1], frame{typ: typeAppend}); !errors.Is(err, base.ErrTooLarge) {
		t.Fatalf("got %v", err)
	}
	if err := sealFrame(b[:headerSize+MaxAppendFrame], frame{typ: typeAppend}); err != nil {
		t.Fatal(err)
	}
	allocs := testing.Benchmark(func(t *testing.B) {
		for range t.N {
			if _, err := parse(b[:headerSize]); !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Fatal(err)
			}
		}
	})
	if got := allocs.AllocedBytesPerOp(); got > 1<<20 {
		t.Fatalf("a claimed 64 MiB cost %d bytes", got)
	}
}

func FuzzFrame(f *testing.F) {
	for _, b := range goldenFrames() {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		fr, err := parse(b)
		if err != nil {
			return
		}
		_, _ = decodeFrame(fr)
	})
}

// FuzzBody fuzzes the decoders behind the checksums.
func FuzzBody(f *testing.F) {
	for _, b := range goldenFrames() {
		f.Add(b[2], b[3], b[headerSize:])
	}
	f.Fuzz(func(t *testing.T, typ, flags uint8, body []byte) {
		fr := frame{typ: frameType(typ), flags: flags & flagsKnown, body: body}
		again, err := decodeFrame(fr)
		if err == nil && again != nil && !bytes.Equal(again, body) {
			t.Fatalf("two encodings of one message:\n%x\n%x", body, again)
		}
	})
}

func FuzzHello(f *testing.F) {
	f.Add(hello{lane: 1, target: "b", id: Identity{Node: "a"}}.encode())
	f.Fuzz(func(t *testing.T, b []byte) { _, _ = readHello(bytes.NewReader(b)) })
}
