package snapshot_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/keelstate/keelstate/internal/base"
	"github.com/keelstate/keelstate/keygroup"
	"github.com/keelstate/keelstate/snapshot"
)

// shardOf is a cut of a range with a manifest of some bytes.
func shardOf(g base.GroupID, lo, hi keygroup.Group) snapshot.Shard {
	sum := sha256.Sum256([]byte{byte(g)})
	return snapshot.Shard{
		Group: g, Birth: base.Birth(g) * 0x0101010101010101, Epoch: 4, Range: keygroup.Range{Lo: lo, Hi: hi},
		Index: 100 + uint64(g), Term: 3, Sequence: 50, ClockMs: 1_700_000_000_000,
		ManifestKey: snapshot.ObjectKey(cluster, sum, uint64(g)), ManifestSHA256: sum, ManifestSize: 777, FullBytes: 5000, NewBytes: 700,
	}
}

func fullCheckpoint() *snapshot.Checkpoint {
	return &snapshot.Checkpoint{
		ClusterID: cluster, Number: 42, Incarnation: 2, FormatVersion: 1, M: 1024, Engine: "rocks", CreatedMs: 1_700_000_000_123,
		Keyspaces: []snapshot.Keyspace{{Name: "planes", KeyType: "string"}, {Name: "seats", KeyType: "tuple<string,int64>"}},
		States: []snapshot.State{
			{ID: 1, Keyspace: "planes", Name: "last", Kind: "value", KeyType: "string", ValueType: "bytes", CodecVersion: 1},
			{ID: 2, Keyspace: "seats", Name: "sum", Kind: "reducing", KeyType: "tuple<string,int64>", UserKeyType: "u", ValueType: "int64",
				Function: "sum", FunctionParams: `{"a":1}`, CodecVersion: 2, DroppedMs: 1_699_999_999_999},
		},
		Shards:       []snapshot.Shard{shardOf(7, 0, 100), shardOf(3, 100, 101), shardOf(9, 101, 1024)},
		Participants: []snapshot.Participant{{ID: "flights", Bytes: []byte("offset 4711")}, {ID: "quiet"}},
		Broadcast:    []byte("broadcast"), Operator: []byte("operator states"),
	}
}

// savepoint is a full checkpoint that is one.
func savepoint() *snapshot.Checkpoint {
	c := fullCheckpoint()
	c.Savepoint = true
	for i := range c.Shards {
		c.Shards[i].ManifestKey = path.Base(c.Shards[i].ManifestKey)
	}
	return c
}

func smallCheckpoint() *snapshot.Checkpoint {
	return &snapshot.Checkpoint{
		ClusterID: "c", Number: 1, FormatVersion: 1, M: 1, Engine: "mem", Keyspaces: []snapshot.Keyspace{}, States: []snapshot.State{},
		Shards: []snapshot.Shard{{Group: 1, Range: keygroup.Range{Hi: 1}, ManifestKey: "k", ManifestSize: 1}}, Participants: []snapshot.Participant{},
	}
}

func edgeCheckpoint() *snapshot.Checkpoint {
	c := &snapshot.Checkpoint{
		ClusterID: base.ClusterID(strings.Repeat("c", 200)), Number: ^uint64(0), Incarnation: ^base.Incarnation(0), FormatVersion: ^uint32(0),
		M: 32768, Engine: strings.Repeat("e", 255), CreatedMs: ^uint64(0),
		Keyspaces: []snapshot.Keyspace{{Name: strings.Repeat("n", 300), KeyType: strings.Repeat("t", 300)}},
		States:    []snapshot.State{{ID: ^uint32(0), CodecVersion: ^uint32(0), DroppedMs: ^uint64(0), Name: "\x00\xff"}},
		Shards: []snapshot.Shard{{Group: ^base.GroupID(0), Birth: ^base.Birth(0), Epoch: ^base.Epoch(0), Range: keygroup.Range{Hi: 32768},
			Index: ^uint64(0), Term: ^uint64(0), Sequence: ^uint64(0), ClockMs: ^uint64(0),
			ManifestKey: strings.Repeat("k", 200) + "/" + strings.Repeat("m", 200), ManifestSize: 1<<63 - 1, FullBytes: 1<<63 - 1, NewBytes: 1<<63 - 1}},
		Participants: []snapshot.Participant{},
	}
	for i := range c.Shards[0].ManifestSHA256 {
		c.Shards[0].ManifestSHA256[i] = byte(i)
	}
	return c
}

func goldenCheckpoints() map[string]*snapshot.Checkpoint {
	return map[string]*snapshot.Checkpoint{"checkpoint-full": fullCheckpoint(), "checkpoint-small": smallCheckpoint(), "checkpoint-edge": edgeCheckpoint(),
		"../v2/checkpoint-savepoint": savepoint()}
}

func mustEncodeCheckpoint(t rapid.TB, c *snapshot.Checkpoint) []byte {
	t.Helper()
	b, err := c.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// golden compares text with a golden file, or rewrites it.
func golden(t testing.TB, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", "golden", "v1", name)
	if *rewrite {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s changed:\n%s\nwant\n%s", name, got, want)
	}
}

func dumped(t testing.TB, raw []byte) string {
	t.Helper()
	var b bytes.Buffer
	if err := snapshot.Dump(&b, raw); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestGoldenCheckpoints(t *testing.T) {
	for name, c := range goldenCheckpoints() {
		b := mustEncodeCheckpoint(t, c)
		golden(t, name+".hex", hex.Dump(b))
		golden(t, name+".txt", dumped(t, b))
		back, err := snapshot.DecodeCheckpoint(b)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if !reflect.DeepEqual(back, c) {
			t.Errorf("%s: decoded %+v, want %+v", name, back, c)
		}
	}
	for name, m := range goldens() {
		golden(t, name+".txt", dumped(t, mustEncode(t, m)))
	}
}

// SN9: a prefix is refused, as damage, and so is what has bytes behind it.
func TestCheckpointCutAnywhereIsCorrupt(t *testing.T) {
	for name, c := range goldenCheckpoints() {
		b := mustEncodeCheckpoint(t, c)
		for n := range b {
			if _, err := snapshot.DecodeCheckpoint(b[:n]); !errors.Is(err, base.ErrCorrupt) {
				t.Fatalf("%s cut to %d of %d bytes: %v", name, n, len(b), err)
			}
		}
		if _, err := snapshot.DecodeCheckpoint(append(b, 0)); !errors.Is(err, base.ErrCorrupt) {
			t.Fatalf("%s with a byte behind it: %v", name, err)
		}
	}
}

// SN9: every flipped bit is found; in the version byte only it may look like a
// newer version.
func TestCheckpointWithAFlippedBitIsRefused(t *testing.T) {
	for name, c := range goldenCheckpoints() {
		b := mustEncodeCheckpoint(t, c)
		for bit := range 8 * len(b) {
			b[bit/8] ^= 1 << (bit % 8)
			want := base.ErrCorrupt
			if bit/8 == 4 {
				want = base.ErrFormatVersion
			}
			if _, err := snapshot.DecodeCheckpoint(b); !errors.Is(err, want) {
				t.Fatalf("%s with bit %d flipped: %v, want %v", name, bit, err, want)
			}
			b[bit/8] ^= 1 << (bit % 8)
		}
	}
}

// SN9: behind a right checksum every cut and every changed byte of the head is
// refused or means another checkpoint; it is never the same, and nothing panics.
func TestSealedNonsenseOfACheckpointIsRefused(t *testing.T) {
	for name, c := range goldenCheckpoints() {
		b := mustEncodeCheckpoint(t, c)
		for n := 5; n < len(b)-sha256.Size; n++ {
			cut := append(bytes.Clone(b[:n]), make([]byte, sha256.Size)...)
			if _, err := snapshot.DecodeCheckpoint(reseal(cut)); !errors.Is(err, base.ErrCorrupt) {
				t.Fatalf("%s cut to %d bytes and sealed: %v", name, n, err)
			}
			changed := bytes.Clone(b)
			changed[n] ^= 0x80
			got, err := snapshot.DecodeCheckpoint(reseal(changed))
			if err != nil && !errors.Is(err, base.ErrCorrupt) {
				t.Fatalf("%s with byte %d changed and sealed: %v", name, n, err)
			}
			if err == nil && reflect.DeepEqual(got, c) {
				t.Fatalf("%s: byte %d means nothing", name, n)
			}
		}
	}
}

// A version that this build does not know is not damage, whatever follows it.
func TestUnknownCheckpointVersionIsNotDamage(t *testing.T) {
	b := mustEncodeCheckpoint(t, fullCheckpoint())
	for v := range 256 {
		if v == 1 || v == 2 {
			continue
		}
		c := bytes.Clone(b)
		c[4] = byte(v)
		for _, in := range [][]byte{c, reseal(c), c[:5]} {
			if _, err := snapshot.DecodeCheckpoint(in); !errors.Is(err, base.ErrFormatVersion) || errors.Is(err, base.ErrCorrupt) {
				t.Fatalf("version %d in %d bytes: %v", v, len(in), err)
			}
		}
	}
	// A manifest is no checkpoint, nor the other way round.
	if _, err := snapshot.DecodeCheckpoint(mustEncode(t, sampleContent().manifest())); !errors.Is(err, base.ErrCorrupt) {
		t.Error(err)
	}
	if _, err := snapshot.Decode(b); !errors.Is(err, base.ErrCorrupt) {
		t.Error(err)
	}
	if err := snapshot.Dump(&bytes.Buffer{}, []byte("KS")); !errors.Is(err, base.ErrCorrupt) {
		t.Error(err)
	}
}

// SN9: what cannot be is refused by Encode too, naming the field.
func TestEncodeRefusesImpossibleCheckpoints(t *testing.T) {
	long := strings.Repeat("x", snapshot.MaxTextBytes+1)
	for i, c := range []struct {
		field string
		want  error
		spoil func(c *snapshot.Checkpoint)
	}{
		{"cluster", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.ClusterID = "" }},
		{"cluster", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.ClusterID = "a/b" }},
		{"cluster", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.ClusterID = ".." }},
		{"number", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.Number = 0 }},
		{"format_version", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.FormatVersion = 0 }},
		{"m", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.M = 0 }},
		{"m", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.M = 32769 }},
		{"engine", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.Engine = "" }},
		{"keyspaces", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.Keyspaces[1].Name = "planes" }},
		{"keyspaces", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.Keyspaces[0].Name = "" }},
		{"keyspaces", base.ErrTooLarge, func(c *snapshot.Checkpoint) { c.Keyspaces[0].KeyType = long }},
		{"keyspaces", base.ErrTooLarge, func(c *snapshot.Checkpoint) { c.Keyspaces = make([]snapshot.Keyspace, snapshot.MaxKeyspaces+1) }},
		{"states", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.States[0].ID = 0 }},
		{"states", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.States[0].ID = 2 }},
		{"states", base.ErrTooLarge, func(c *snapshot.Checkpoint) { c.States[0].FunctionParams = long }},
		{"states", base.ErrTooLarge, func(c *snapshot.Checkpoint) { c.States = make([]snapshot.State, snapshot.MaxStates+1) }},
		{"shards", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.Shards = nil }},
		{"shards", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.Shards = c.Shards[1:] }},
		{"shards", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.Shards = c.Shards[:2] }},
		{"shards", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.Shards[1].Range.Hi++ }},                   // overlap
		{"shards", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.Shards[0].Range.Hi-- }},                   // gap
		{"shards", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.Shards[2].Range.Hi++ }},                   // beyond M
		{"shards", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.Shards = append(c.Shards, c.Shards[1]) }}, // twice
		{"shards", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.Shards[1].Group = 7 }},
		{"shards", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.Shards[1].Group = base.SystemGroup }},
		{"shards", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.Shards[1].ManifestSize = 0 }},
		{"shards", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.Shards[1].FullBytes = -1 }},
		{"shards", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.Shards[1].NewBytes = c.Shards[1].FullBytes + 1 }},
		{"key", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.Shards[1].ManifestKey = "../x" }},
		{"participants", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.Participants[0].ID = "quiet" }},
		{"participants", base.ErrInvalid, func(c *snapshot.Checkpoint) { c.Participants[0].ID = "" }},
		{"participants", base.ErrTooLarge, func(c *snapshot.Checkpoint) { c.Participants[0].Bytes = make([]byte, snapshot.MaxParticipantBytes+1) }},
		{"participants", base.ErrTooLarge, func(c *snapshot.Checkpoint) {
			c.Participants = make([]snapshot.Participant, snapshot.MaxParticipants+1)
		}},
		{"bytes", base.ErrTooLarge, func(c *snapshot.Checkpoint) { c.Broadcast = make([]byte, snapshot.MaxCheckpointBytes) }},
	} {
		cp := fullCheckpoint()
		c.spoil(cp)
		_, err := cp.Encode()
		var e *base.Error
		if !errors.Is(err, c.want) || !errors.As(err, &e) || e.Field != c.field {
			t.Errorf("case %d: %v, want %v of %s", i, err, c.want, c.field)
		}
	}
}

// tiles draws shards whose ranges tile [0, m).
func tiles(t *rapid.T, m int) (shards []snapshot.Shard) {
	lo := 0
	for g := base.GroupID(1); lo < m; g++ {
		hi := m
		if len(shards) < 20 {
			hi = rapid.IntRange(lo+1, m).Draw(t, "hi")
		}
		s := shardOf(g, keygroup.Group(lo), keygroup.Group(hi))
		s.Birth, s.Epoch = base.Birth(rapid.Uint64().Draw(t, "birth")), base.Epoch(rapid.Uint64().Draw(t, "epoch"))
		s.Index, s.Sequence = rapid.Uint64().Draw(t, "index"), rapid.Uint64().Draw(t, "sequence")
		s.ManifestSize = rapid.Int64Range(1, 1<<40).Draw(t, "size")
		s.FullBytes = rapid.Int64Min(0).Draw(t, "full")
		s.NewBytes = rapid.Int64Range(0, s.FullBytes).Draw(t, "new")
		shards = append(shards, s)
		lo = hi
	}
	return shards
}

// Whatever is encoded decodes to the same; the order in which lists were given
// does not show (SN9).
func TestCheckpointRoundTripProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := rapid.IntRange(1, 32768).Draw(t, "M")
		c := &snapshot.Checkpoint{
			ClusterID: cluster, Number: rapid.Uint64Min(1).Draw(t, "number"), Incarnation: base.Incarnation(rapid.Uint64().Draw(t, "incarnation")),
			FormatVersion: rapid.Uint32Min(1).Draw(t, "format"), M: m, Engine: rapid.StringN(1, 10, 255).Draw(t, "engine"),
			CreatedMs: rapid.Uint64().Draw(t, "created"), Savepoint: rapid.Bool().Draw(t, "savepoint"),
			Keyspaces: []snapshot.Keyspace{}, States: []snapshot.State{}, Participants: []snapshot.Participant{}, Shards: tiles(t, m),
			Broadcast: blob(t, "broadcast"), Operator: blob(t, "operator"),
		}
		for _, n := range rapid.SliceOfNDistinct(rapid.StringN(1, 10, 40), 0, 5, rapid.ID).Draw(t, "keyspaces") {
			c.Keyspaces = append(c.Keyspaces, snapshot.Keyspace{Name: n, KeyType: rapid.String().Draw(t, "type")})
		}
		for _, id := range rapid.SliceOfNDistinct(rapid.Uint32Min(1), 0, 5, rapid.ID).Draw(t, "states") {
			c.States = append(c.States, snapshot.State{ID: id, Name: rapid.String().Draw(t, "name"), Function: rapid.String().Draw(t, "function"),
				CodecVersion: rapid.Uint32().Draw(t, "codec"), DroppedMs: rapid.Uint64().Draw(t, "dropped")})
		}
		for _, id := range rapid.SliceOfNDistinct(rapid.StringN(1, 10, 40), 0, 5, rapid.ID).Draw(t, "participants") {
			c.Participants = append(c.Participants, snapshot.Participant{ID: id, Bytes: blob(t, "position")})
		}
		for i := range c.Shards {
			if c.Savepoint {
				c.Shards[i].ManifestKey = path.Base(c.Shards[i].ManifestKey)
			}
		}
		b := mustEncodeCheckpoint(t, c) // sorts
		want := *c
		c.Shards, c.States = shuffled(c.Shards), shuffled(c.States)
		c.Keyspaces, c.Participants = shuffled(c.Keyspaces), shuffled(c.Participants)
		if again := mustEncodeCheckpoint(t, c); !bytes.Equal(again, b) {
			t.Fatal("the order of the lists shows")
		}
		back, err := snapshot.DecodeCheckpoint(b)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(back, &want) {
			t.Fatalf("decoded %+v, want %+v", back, want)
		}
	})
}

// blob draws bytes; none are nil, as after decoding.
func blob(t *rapid.T, label string) []byte {
	return append([]byte(nil), rapid.SliceOf(rapid.Byte()).Draw(t, label)...)
}

func shuffled[T any](in []T) []T {
	out := append([]T{}, in...)
	rand.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

// A cluster of the most shards fits well into the limit.
func TestCheckpointOfTheMostShardsFits(t *testing.T) {
	c := fullCheckpoint()
	c.M, c.Shards = keygroup.MaxM, nil
	for i := range keygroup.Group(keygroup.MaxM) {
		c.Shards = append(c.Shards, shardOf(base.GroupID(i+1), i, i+1))
	}
	b := mustEncodeCheckpoint(t, c)
	if len(b) > 16<<20 {
		t.Errorf("%d shards take %d bytes", len(c.Shards), len(b))
	}
	if back, err := snapshot.DecodeCheckpoint(b); err != nil || len(back.Shards) != keygroup.MaxM || back.FullBytes() != 5000*keygroup.MaxM || back.NewBytes() != 700*keygroup.MaxM {
		t.Error(err)
	}
}

// A key has one meaning, and what is not ours is not taken for ours.
func TestKeysAreParsedStrictly(t *testing.T) {
	sum := sha256.Sum256([]byte("x"))
	h := fmt.Sprintf("%x", sum)
	key := snapshot.ObjectKey(cluster, sum, 17)
	if want := cluster + "/" + h + ".17"; key != want {
		t.Errorf("key %s, want %s", key, want)
	}
	if prefix, got, attempt, ok := snapshot.ParseObjectKey(key); prefix != cluster || got != sum || attempt != 17 || !ok {
		t.Errorf("parsed %s %x %d %v", prefix, got, attempt, ok)
	}
	if _, _, attempt, ok := snapshot.ParseObjectKey(cluster + "/" + h + ".18446744073709551615"); !ok || attempt != ^uint64(0) {
		t.Error("the highest attempt is not taken")
	}
	for _, bad := range []string{"", "/", cluster, cluster + "/", h + ".1", "/" + h + ".1", cluster + "/" + h, cluster + "/" + h + ".", cluster + "/" + h + ".0",
		cluster + "/" + h + ".01", cluster + "/" + h + ".+1", cluster + "/" + h + ".-1", cluster + "/" + h + ".1 ", cluster + "/" + h + ".1.2",
		cluster + "/" + h + ".18446744073709551616", cluster + "/" + h[:63] + ".1", cluster + "/" + h + "0.1", cluster + "/" + strings.ToUpper(h) + ".1",
		cluster + "/" + h[:63] + "g.1", cluster + "/x/" + h + ".1", "../" + h + ".1", cluster + "/" + h + ".1/", cluster + "/checkpoints/" + h + ".1",
		cluster + "/" + h + ".0x1", cluster + "/" + h + ".1_0"} {
		if p, s, a, ok := snapshot.ParseObjectKey(bad); ok || p != "" || s != [32]byte{} || a != 0 {
			t.Errorf("%q was taken for an object: %q %x %d %v", bad, p, s, a, ok)
		}
	}
	meta := snapshot.MetadataKey(cluster, 7)
	if want := cluster + "/checkpoints/0000000007/_metadata"; meta != want {
		t.Errorf("key %s, want %s", meta, want)
	}
	for _, n := range []uint64{1, 7, 9_999_999_999, 10_000_000_000, ^uint64(0)} {
		if c, got, ok := snapshot.ParseMetadataKey(snapshot.MetadataKey(cluster, n)); c != cluster || got != n || !ok {
			t.Errorf("parsed %s %d %v, want %d", c, got, ok, n)
		}
	}
	for _, bad := range []string{"", cluster, cluster + "/checkpoints/7/_metadata", cluster + "/checkpoints/0000000000/_metadata",
		cluster + "/checkpoints/00000000007/_metadata", cluster + "/checkpoint/0000000007/_metadata", cluster + "/checkpoints/0000000007/metadata",
		cluster + "/checkpoints/0000000007/_metadata/", "/checkpoints/0000000007/_metadata", "../checkpoints/0000000007/_metadata",
		cluster + "/checkpoints/000000000x/_metadata", cluster + "/checkpoints/-000000007/_metadata", key} {
		if c, n, ok := snapshot.ParseMetadataKey(bad); ok || c != "" || n != 0 {
			t.Errorf("%q was taken for a checkpoint: %q %d", bad, c, n)
		}
	}
}

// FuzzDecodeCheckpoint: no bytes make it panic or allocate out of proportion, and
// what it takes has one encoding only, and can be printed.
func FuzzDecodeCheckpoint(f *testing.F) {
	for _, c := range goldenCheckpoints() {
		b := mustEncodeCheckpoint(f, c)
		f.Add(b)
		f.Add(b[:len(b)/2])
	}
	check := func(t *testing.T, b []byte) {
		c, err := snapshot.DecodeCheckpoint(b)
		if err != nil {
			if !errors.Is(err, base.ErrCorrupt) && !errors.Is(err, base.ErrFormatVersion) {
				t.Fatalf("%v is neither damage nor a version", err)
			}
			return
		}
		if again := mustEncodeCheckpoint(t, c); !bytes.Equal(again, b) {
			t.Fatalf("two encodings of one checkpoint:\n%x\n%x", b, again)
		}
		dumped(t, b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		check(t, b)
		if len(b) > sha256.Size {
			check(t, reseal(b)) // past the checksum
		}
	})
}

// FuzzParseKeys: what is parsed is exactly what makes the key again.
func FuzzParseKeys(f *testing.F) {
	f.Add(snapshot.ObjectKey(cluster, sha256.Sum256(nil), 1))
	f.Add(snapshot.MetadataKey(cluster, 1))
	f.Fuzz(func(t *testing.T, key string) {
		if prefix, sum, attempt, ok := snapshot.ParseObjectKey(key); ok && snapshot.ObjectKey(prefix, sum, attempt) != key {
			t.Fatalf("%q is not the key of %s %x %d", key, prefix, sum, attempt)
		}
		if c, n, ok := snapshot.ParseMetadataKey(key); ok && snapshot.MetadataKey(c, n) != key {
			t.Fatalf("%q is not the key of %s %d", key, c, n)
		}
	})
}
