package raftfsm_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/engine"
	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/raftfsm"
)

var rewrite = flag.Bool("rewrite", false, "rewrite golden files")

type sample struct {
	name string
	b    []byte
}

// samples has every command kind, operation, precondition and flag.
func samples(t failer) []sample {
	full := &raftfsm.Request{
		Incarnation: 2, Epoch: 3, Session: 0x1122334455667788, Seq: 9, Prev: 7, Floor: 5, Atomic: true, BarrierSeen: 4,
		Preconditions: []state.Precondition{
			{State: 1, Kind: state.PreAbsent, Group: 1, Key: []byte("k")},
			{State: 1, Kind: state.PrePresent, Group: 1, Key: []byte{}},
			{State: 1, Kind: state.PreEqual, Group: 200, Key: []byte("k"), Bytes: []byte{0, 255}, Namespace: state.Namespace{Set: true, Bytes: []byte{}}},
			{State: 1, Kind: state.PreVersion, Group: 1, Key: []byte("k"), Version: 1 << 40},
			{State: 3, Kind: state.PreNull, Group: 1, Key: []byte("k"), HasUserKey: true, UserKey: []byte("u"), Namespace: state.Namespace{Set: true, Bytes: []byte("n")}},
		},
	}
	ms := []state.Mutation{
		put("a", "value"),
		mut(valueID, state.OpClear, "a", nil),
		listAdd("b", "", "two"),
		mut(listID, state.OpListUpdate, "b", func(m *state.Mutation) {
			m.Elements = [][]byte{nil, {}}
			m.Namespace = state.Namespace{Set: true, Bytes: []byte("ns")}
		}),
		mut(mapID, state.OpMapPut, "c", func(m *state.Mutation) {
			m.Entries = []state.Entry{{UserKey: []byte("u"), Value: []byte("v")}, {UserKey: []byte{}, Null: true}, {UserKey: []byte("e"), Value: []byte{}}}
		}),
		mut(mapID, state.OpMapRemove, "c", func(m *state.Mutation) { m.Entries = []state.Entry{{UserKey: []byte("u")}} }),
		add(sumID, "d", i64(-1)),
		mut(sumID, state.OpMergeNamespaces, "d", func(m *state.Mutation) {
			m.Sources = []state.Namespace{{}, {Set: true, Bytes: []byte{}}, {Set: true, Bytes: []byte("s")}}
		}),
	}
	for i, m := range ms {
		full.Mutations = append(full.Mutations, raftfsm.Mutation{Ordinal: uint32(i * i), Mutation: m})
	}
	plain := request(put("x", "y"))
	return []sample{
		{"init", raftfsm.AppendInit(nil, raftfsm.Init{Group: 3, Range: keygroup.Range{Lo: 16, Hi: 300}, M: 1024, Epoch: 5, Birth: ^base.Birth(0), Incarnation: 2, Sequence: 77, ClockMs: 1 << 41})},
		{"write", encodeWrite(t, 123456789, 42, full, plain)},
		{"write-empty", raftfsm.AppendWrite(nil, 0, 0)},
		{"term-start", raftfsm.AppendTermStart(nil, 1<<42)},
		{"tick", raftfsm.AppendTick(nil, 1)},
		{"declare", raftfsm.AppendDeclare(nil, testDeclarations())},
		{"drop", raftfsm.AppendDrop(nil, []engine.FamilyID{1, 300, 1 << 31})},
		{"forget", raftfsm.AppendForget(nil, 500, []base.SessionID{1, ^base.SessionID(0)})},
		{"hash-mark", raftfsm.AppendHashMark(nil, 1<<63)},
		{"barrier", raftfsm.AppendBarrier(nil, raftfsm.Barrier{Number: 300, Epoch: 4, Attempt: 1 << 33, Uploader: "n2"})},
		{"barrier-missed", raftfsm.AppendBarrier(nil, raftfsm.Barrier{Number: 1, Epoch: 1})},
		{"fence", raftfsm.AppendFence(nil, raftfsm.Fence{Operation: 300, Checkpoint: 7})},
		{"rollback", raftfsm.AppendRollback(nil, raftfsm.Rollback{Operation: 300, Checkpoint: 7, Incarnation: 2, Epoch: 1 << 20})},
		{"reopen", raftfsm.AppendReopen(nil, raftfsm.Reopen{Operation: 300, Revision: 1 << 33})},
	}
}

// encodeCommand is the inverse of Decode.
func encodeCommand(c *raftfsm.Command) ([]byte, error) {
	switch c.Kind {
	case raftfsm.CommandInit:
		return raftfsm.AppendInit(nil, c.Init), nil
	case raftfsm.CommandWrite:
		var encoded [][]byte
		for i := range c.Requests {
			b, err := raftfsm.AppendRequest(nil, &c.Requests[i])
			if err != nil {
				return nil, err
			}
			encoded = append(encoded, b)
		}
		return raftfsm.AppendWrite(nil, c.StampMs, c.SystemRevision, encoded...), nil
	case raftfsm.CommandTermStart:
		return raftfsm.AppendTermStart(nil, c.StampMs), nil
	case raftfsm.CommandTick:
		return raftfsm.AppendTick(nil, c.StampMs), nil
	case raftfsm.CommandDeclare:
		return raftfsm.AppendDeclare(nil, c.Declarations), nil
	case raftfsm.CommandDrop:
		return raftfsm.AppendDrop(nil, c.Drops), nil
	case raftfsm.CommandForget:
		return raftfsm.AppendForget(nil, c.SystemRevision, c.Sessions), nil
	case raftfsm.CommandHashMark:
		return raftfsm.AppendHashMark(nil, c.MarkID), nil
	case raftfsm.CommandBarrier:
		return raftfsm.AppendBarrier(nil, c.Barrier), nil
	case raftfsm.CommandFence:
		return raftfsm.AppendFence(nil, c.Fence), nil
	case raftfsm.CommandRollback:
		return raftfsm.AppendRollback(nil, c.Rollback), nil
	case raftfsm.CommandReopen:
		return raftfsm.AppendReopen(nil, c.Reopen), nil
	}
	return nil, fmt.Errorf("kind %d", c.Kind)
}

func TestGoldenCommands(t *testing.T) {
	for _, s := range samples(t) {
		path := filepath.Join("testdata", "golden", "v1", s.name+".txt")
		var c raftfsm.Command
		if err := c.Decode(s.b); err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
		got := hex.Dump(s.b) + "\n" + describe(&c) + "\n"
		if *rewrite {
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if got != string(want) {
			t.Errorf("%s: the encoding changed:\n%s\nwant\n%s", s.name, got, want)
		}
	}
}

func describe(c *raftfsm.Command) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s stamp=%d revision=%d mark=%d drops=%v sessions=%v\n", c.Kind, c.StampMs, c.SystemRevision, c.MarkID, c.Drops, c.Sessions)
	if c.Kind == raftfsm.CommandInit {
		fmt.Fprintf(&b, "init %+v\n", c.Init)
	}
	if c.Kind == raftfsm.CommandBarrier {
		fmt.Fprintf(&b, "barrier %+v\n", c.Barrier)
	}
	switch c.Kind {
	case raftfsm.CommandFence:
		fmt.Fprintf(&b, "fence %+v\n", c.Fence)
	case raftfsm.CommandRollback:
		fmt.Fprintf(&b, "rollback %+v\n", c.Rollback)
	case raftfsm.CommandReopen:
		fmt.Fprintf(&b, "reopen %+v\n", c.Reopen)
	}
	for _, d := range c.Declarations {
		fmt.Fprintf(&b, "declaration %+v\n", d)
	}
	for i := range c.Requests {
		r := &c.Requests[i]
		fmt.Fprintf(&b, "request incarnation=%d epoch=%d session=%x seq=%d prev=%d floor=%d atomic=%t barrier=%d\n",
			r.Incarnation, r.Epoch, uint64(r.Session), r.Seq, r.Prev, r.Floor, r.Atomic, r.BarrierSeen)
		for _, p := range r.Preconditions {
			fmt.Fprintf(&b, "  precondition %+v\n", p)
		}
		for _, m := range r.Mutations {
			fmt.Fprintf(&b, "  %d %+v\n", m.Ordinal, m.Mutation)
		}
	}
	return b.String()
}

func TestEveryCommandHasOneEncoding(t *testing.T) {
	for _, s := range samples(t) {
		var c raftfsm.Command
		if err := c.Decode(s.b); err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
		again, err := encodeCommand(&c)
		if err != nil || !bytes.Equal(again, s.b) {
			t.Errorf("%s: encoded again as %x (%v), not %x", s.name, again, err, s.b)
		}
	}
}

func TestTruncatedCommandsAreCorrupt(t *testing.T) {
	for _, s := range samples(t) {
		for n := range s.b {
			var c raftfsm.Command
			if err := c.Decode(s.b[:n]); !errors.Is(err, base.ErrCorrupt) {
				t.Fatalf("%s cut to %d of %d bytes: %v", s.name, n, len(s.b), err)
			}
		}
		var c raftfsm.Command
		if err := c.Decode(append(bytes.Clone(s.b), 0)); !errors.Is(err, base.ErrCorrupt) {
			t.Errorf("%s with a trailing byte: %v", s.name, err)
		}
	}
}

// A command has no checksum (the log has one), so a flipped bit may give another
// command; it must never give a panic or bytes with two meanings.
func TestFlippedBitsNeverGiveASecondEncoding(t *testing.T) {
	for _, s := range samples(t) {
		for i := range len(s.b) * 8 {
			b := bytes.Clone(s.b)
			b[i/8] ^= 1 << (i % 8)
			checkDecode(t, b)
		}
	}
}

// checkDecode holds what must hold of every byte string.
func checkDecode(t *testing.T, b []byte) {
	t.Helper()
	var c raftfsm.Command
	err := c.Decode(b)
	if err == nil {
		again, err := encodeCommand(&c)
		if err != nil || !bytes.Equal(again, b) {
			t.Fatalf("%x decodes, but encodes again as %x (%v)", b, again, err)
		}
		return
	}
	if !errors.Is(err, base.ErrCorrupt) && !errors.Is(err, base.ErrFormatVersion) {
		t.Fatalf("%x: %v", b, err)
	}
}

func TestUnknownVersionIsNotCorruption(t *testing.T) {
	for offset, what := range map[int]string{1: "version", 2: "kind"} {
		b := raftfsm.AppendTick(nil, 5)
		b[offset] = 200
		var c raftfsm.Command
		if err := c.Decode(b); !errors.Is(err, base.ErrFormatVersion) {
			t.Errorf("unknown %s: %v", what, err)
		}
	}
}

func TestDecodeReusesMemoryWithoutMixingCommands(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		all := samples(t)
		var reused raftfsm.Command
		for range rapid.IntRange(1, 8).Draw(t, "n") {
			s := all[rapid.IntRange(0, len(all)-1).Draw(t, "sample")]
			var fresh raftfsm.Command
			if fresh.Decode(s.b) != nil || reused.Decode(s.b) != nil {
				t.Fatal(s.name)
			}
			if a, b := describe(&fresh), describe(&reused); a != b {
				t.Fatalf("%s:\n%s\nreused:\n%s", s.name, a, b)
			}
		}
	})
}

func FuzzDecodeCommand(f *testing.F) {
	for _, s := range samples(f) {
		f.Add(s.b)
	}
	f.Fuzz(func(t *testing.T, b []byte) { checkDecode(t, b) })
}

func TestEncodingRefusesWhatTheFormatCannotSay(t *testing.T) {
	r := request(put("a", "b"), put("a", "c"))
	r.Mutations[1].Ordinal = 0
	unknown := request(mut(valueID, 99, "a", nil))
	pre := request(put("a", "b"))
	pre.Preconditions = []state.Precondition{{Kind: 77}}
	for field, q := range map[string]*raftfsm.Request{"mutations[1].ordinal": r, "mutations[0].op": unknown, "preconditions[0].kind": pre} {
		dst := []byte("kept")
		got, err := raftfsm.AppendRequest(dst, q)
		var detail *base.Error
		if !errors.As(err, &detail) || detail.Field != field || string(got) != "kept" {
			t.Errorf("%s: %v, %q", field, err, got)
		}
	}
}

func TestDecodedRequestsAreWhatWasEncoded(t *testing.T) {
	r := inSession(5, 3, put("a", "b"), listAdd("l", "x"))
	b, err := raftfsm.AppendRequest(nil, r)
	if err != nil {
		t.Fatal(err)
	}
	got, err := raftfsm.DecodeRequest(b)
	if err != nil {
		t.Fatal(err)
	}
	if got.Session != 5 || got.Seq != 3 || len(got.Mutations) != 2 || !reflect.DeepEqual(got.Mutations[0].Mutation, r.Mutations[0].Mutation) {
		t.Errorf("got %+v", got)
	}
	if _, err := raftfsm.DecodeRequest(b[:len(b)-1]); !errors.Is(err, base.ErrCorrupt) {
		t.Error(err)
	}
}
