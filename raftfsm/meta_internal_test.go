package raftfsm

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

	"github.com/keelstate/keelstate/engine/state"
	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
)

// metaSample is a record of the metadata family and how it is read.
type metaSample struct {
	name  string
	key   []byte
	value []byte
	parse func(v []byte) (any, error)
	again func(parsed any) []byte
}

func metaSamples() []metaSample {
	c := core{
		initialised: true, appliedIndex: 1001, appliedTerm: 12, group: 7, birth: 0xabcdef, rng: keygroup.Range{Lo: 16, Hi: 48}, m: 128,
		epoch: 3, incarnation: 2, clockMs: 1 << 41, sequence: 99, forgotten: 17, barrier: 5, generation: 4,
	}
	rolled := c
	rolled.rollback = rollback{fence: 9, target: 4, op: 8, to: 3, index: 700}
	d := &state.Declaration{
		ID: 300, Keyspace: "flights", Name: "by dest", Kind: state.KindMap, KeyType: keygroup.String,
		UserKeyType: keygroup.Int64, ValueType: keygroup.Float64, CodecVersion: 1,
	}
	s := &session{id: 0x0102030405060708, rng: c.rng, last: 40, floor: 30}
	s.last = 29
	s.remember(31, nil, decided{ordinals: []OrdinalRange{{0, 2}, {5, 6}}, first: 10, sequence: 12, barrier: 1})
	s.remember(33, nil, decided{ordinals: []OrdinalRange{{0, 1}}, sequence: 12, err: &base.Error{Cause: base.ErrPrecondition, Field: "preconditions[0]", Hint: "it is absent", Ordinal: 0}})
	s.remember(33, s.find(33), decided{ordinals: []OrdinalRange{{1, 3}}, first: 13, sequence: 14})
	s.remember(40, nil, decided{sequence: 14, err: &base.Error{Cause: base.ErrTooLarge, Ordinal: -1}})
	var h OpHash
	copy(h[:], "0123456789abcdef")
	parseSession := func(v []byte) (any, error) {
		got := &session{id: s.id, rng: s.rng}
		return got, got.parse(v)
	}
	return []metaSample{
		{"core", coreKey, c.appendTo(nil), func(v []byte) (any, error) { return parseCore(v) },
			func(p any) []byte { c := p.(core); return c.appendTo(nil) }},
		{"configuration", configurationKey, encodeConfiguration(55, []byte("raft")), func(v []byte) (any, error) {
			i, raw, err := parseConfiguration(v)
			return []any{i, raw}, err
		}, func(p any) []byte { l := p.([]any); return encodeConfiguration(l[0].(uint64), l[1].([]byte)) }},
		{"declaration", declarationKey(300), encodeDeclaration(d), func(v []byte) (any, error) { return parseDeclaration(v) },
			func(p any) []byte { return encodeDeclaration(p.(*state.Declaration)) }},
		{"session", appendSessionKey(nil, s.id, s.rng), s.appendTo(nil), parseSession,
			func(p any) []byte { return p.(*session).appendTo(nil) }},
		{"op-hash", appendOpHashKey(nil, 20), appendOpHash(nil, h), func(v []byte) (any, error) { return parseOpHash(v) },
			func(p any) []byte { return appendOpHash(nil, p.(OpHash)) }},
		{"dropped", droppedKey(9), encodeDropped(dropped{index: 8, gone: true}), func(v []byte) (any, error) { return parseDropped(v) },
			func(p any) []byte { return encodeDropped(p.(dropped)) }},
		{"core-rolled-back", coreKey, rolled.appendTo(nil), func(v []byte) (any, error) { return parseCore(v) },
			func(p any) []byte { c := p.(core); return c.appendTo(nil) }},
	}
}

func TestGoldenMetadata(t *testing.T) {
	for _, s := range metaSamples() {
		path := filepath.Join("testdata", "golden", "v1", "meta-"+s.name+".txt")
		got := "key\n" + hex.Dump(s.key) + "value\n" + hex.Dump(s.value)
		if flag.Lookup("rewrite").Value.String() == "true" {
			if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if got != string(want) {
			t.Errorf("%s: the encoding changed:\n%s", s.name, got)
		}
		parsed, err := s.parse(s.value)
		if err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
		if again := s.again(parsed); !bytes.Equal(again, s.value) {
			t.Errorf("%s: encoded again as %x", s.name, again)
		}
	}
}

func TestDamagedMetadataIsCorrupt(t *testing.T) {
	for _, s := range metaSamples() {
		for n := range s.value {
			if _, err := s.parse(s.value[:n]); !errors.Is(err, base.ErrCorrupt) {
				t.Fatalf("%s cut to %d bytes: %v", s.name, n, err)
			}
		}
		for i := range len(s.value) * 8 {
			b := bytes.Clone(s.value)
			b[i/8] ^= 1 << (i % 8)
			if _, err := s.parse(b); !errors.Is(err, base.ErrCorrupt) {
				t.Fatalf("%s with bit %d flipped: %v", s.name, i, err)
			}
		}
		// Also under a good checksum; only a configuration's bytes may be fewer.
		for n := 2; n < len(s.value)-4; n++ {
			_, err := s.parse(sealMeta(bytes.Clone(s.value[:n]), 0))
			if s.name != "configuration" && !errors.Is(err, base.ErrCorrupt) && !errors.Is(err, base.ErrFormatVersion) {
				t.Fatalf("%s cut to %d bytes and sealed: %v", s.name, n, err)
			}
		}
		future := bytes.Clone(s.value[:len(s.value)-4])
		future[1] = coreVersion2 + 1
		if _, err := s.parse(sealMeta(future, 0)); !errors.Is(err, base.ErrFormatVersion) {
			t.Errorf("%s of a later version: %v", s.name, err)
		}
	}
}

func FuzzParseMetadata(f *testing.F) {
	all := metaSamples()
	for i, s := range all {
		f.Add(uint8(i), s.value[2:len(s.value)-4])
	}
	f.Fuzz(func(t *testing.T, kind uint8, body []byte) {
		s := all[int(kind)%len(all)]
		v := sealMeta(append([]byte{metaMagic, s.value[1]}, body...), 0)
		parsed, err := s.parse(v)
		if err != nil {
			if !errors.Is(err, base.ErrCorrupt) && !errors.Is(err, base.ErrFormatVersion) {
				t.Fatalf("%s: %v", s.name, err)
			}
			return
		}
		if again := s.again(parsed); !bytes.Equal(again, v) {
			t.Fatalf("%s: %x encodes again as %x", s.name, v, again)
		}
	})
}

func TestEveryContentReasonSurvivesARecord(t *testing.T) {
	for _, sentinel := range base.Sentinels() {
		if len(sentinel.Reason) > maxReasonBytes {
			t.Errorf("reason %s is too long to be recorded", sentinel.Reason)
		}
		s := &session{}
		want := refusal(fmt.Errorf("doing: %w", sentinel), 3, "field")
		s.remember(1, nil, decided{err: want})
		got := &session{}
		if err := got.parse(s.appendTo(nil)); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got.records[0].parts[0].err, want) {
			t.Errorf("%s came back as %+v", sentinel.Reason, got.records[0].parts[0].err)
		}
	}
}

func TestBoundNeverCutsARune(t *testing.T) {
	s := strings.Repeat("é", 10)
	for n := range 21 {
		if got := bound(s, n); len(got) > n || !strings.HasPrefix(s, got) || strings.ToValidUTF8(got, "?") != got {
			t.Errorf("%d: %q", n, got)
		}
	}
}

func TestOpHashDependsOnOrderSequenceAndContent(t *testing.T) {
	seen := map[OpHash]string{}
	var zero OpHash
	for name, h := range map[string]OpHash{
		"a1": zero.chain(1, []byte("a")), "a2": zero.chain(2, []byte("a")), "b1": zero.chain(1, []byte("b")),
		"ab": zero.chain(1, []byte("a")).chain(2, []byte("b")), "ba": zero.chain(1, []byte("b")).chain(2, []byte("a")), "": zero,
	} {
		if other, ok := seen[h]; ok {
			t.Errorf("%q and %q have one hash", name, other)
		}
		seen[h] = name
	}
}

func TestUncoveredFindsEveryOpenOrdinal(t *testing.T) {
	rec := &record{parts: []decided{{ordinals: []OrdinalRange{{2, 4}, {7, 8}}}, {ordinals: []OrdinalRange{{0, 1}}}}}
	var ms []Mutation
	for i := range uint32(10) {
		ms = append(ms, Mutation{Ordinal: i})
	}
	var got []uint32
	for _, m := range rec.uncovered(ms) {
		got = append(got, m.Ordinal)
	}
	if want := []uint32{1, 4, 5, 6, 8, 9}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := ordinalsOf(rec.uncovered(ms)); !reflect.DeepEqual(got, []OrdinalRange{{1, 2}, {4, 7}, {8, 10}}) {
		t.Errorf("got %v", got)
	}
}
